"""What split contenders are judged by: the fp64 answer of a call, computed by all ranks together, and eager's loss.

Each rank computes in fp64 what its features contribute, from weights that it cut out of the full ones by itself, and
the ranks' outputs and dX are added in fp64. That the parts make up the whole is checked, so a contender that cuts
elsewhere differs. For a rank's rows of the weight gradients nothing has to be added.

Of experts each rank computes the whole answer, and looks at its own ones' gradients.

What eager loses is measured twice: on one GPU, and split, where every rank's part of a sum is rounded before the parts
are added in the case's dtype. The second is what split contenders are judged by, and is itself held against the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from swiglu_bench.cases.cases import Mode
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import Draw
from swiglu_bench.check.judge import REFERENCE, Judge, compute_truth
from swiglu_bench.check.results import Fault, fingerprint
from swiglu_bench.contenders import pytorch
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.tasks.tp.contenders import cuts, part_of, split
from swiglu_bench.tasks.tp.group import Group

SUMMED = ("output", "x")
"""What the ranks' parts of are added."""
OF_TOKENS = (*SUMMED, "top_k_weights")
"""What has a row for each token, of which every rank has all or its part."""


class NoReference(RuntimeError):
    """The ranks' own reference is wrong: what they add up is not the answer."""


class _OwnExperts(Built):
    """Eager on the whole problem, of whose gradients a rank has its experts': no sum is parted between ranks."""

    def __init__(self, whole: Problem, cut: Mapping[str, tuple[slice, ...]]) -> None:
        super().__init__(REFERENCE, whole)
        self._cut = cut

    def _collect(self, leaves: list[Tensor]) -> Produced:
        return {name: value[self._cut.get(name, ())] for name, value in super()._collect(leaves).items()}


class SplitJudge(Judge):
    """Judges results of a whole problem's calls, of which this rank has all tokens and its part of the weights."""

    def __init__(self, group: Group, whole: Problem, draws: Sequence[Draw]) -> None:
        """Compute the truths of `draws`; raises NoReference where the ranks do not agree, or their sum is wrong."""
        super().__init__(part_of(group, whole))
        self._group = group
        self._whole, self._cut = whole, cuts(group.rank, group.size, whole)
        experts = whole.case.shape.experts
        if experts:
            self._reference: Built = _OwnExperts(whole, self._cut)
        else:
            self._reference = Built(split(pytorch.eager, group, whole, by_sequence=False), self.problem)
        self.desk = self._reference.desk
        self._check_same([*whole.weights.values(), *self.desk.activations(draws[0]), self.desk.upstream(draws[0])])
        covered = torch.zeros(experts.count if experts else whole.case.shape.intermediate, device=group.device)
        covered[self._cut["w_gate"][0]] += 1
        dist.all_reduce(covered)
        assert bool((covered == 1).all()), "every intermediate feature or expert belongs to exactly one rank"
        alone = Built(REFERENCE, whole)
        self._alone = {draw: self._errors_alone(alone, draw) for draw in draws}

    def answer(self, activations: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
        """fp64: what is of tokens whole, of the weights' gradients this rank's part."""
        if self._whole.case.shape.experts:
            found = compute_truth(self._whole, activations, upstream)
            return {name: self._own(name, value) for name, value in found.items()}
        found = compute_truth(self.problem, activations, upstream)
        for name in (name for name in SUMMED if name in found):
            dist.all_reduce(found[name])
        return found

    def judge_alone(self, produced: Produced, draw: Draw, faults: Mapping[str, Fault]) -> tuple[TensorCheck, ...]:
        """Verdicts on what one GPU produced, of which this rank looks at its part; `draw` is one of the first."""
        truth = self.truth(draw, backward=produced.keys() != {"output"})
        return tuple(
            tolerance.check(
                name, value if value is None else self._own(name, value), truth.expected[name], self._alone[draw][name],
                self.arithmetic, faults.get(name),
            )
            for name, value in produced.items()
        )  # fmt: skip

    def differing(self, produced: Mapping[str, Tensor]) -> list[str]:
        """Names of results of which every rank has all, and whose copies are not equal bit for bit."""
        prints = {name: fingerprint(produced[name]).tolist() for name in OF_TOKENS if name in produced}
        others = self._group.gather(prints)
        return [name for name in prints if any(other[name] != others[0][name] for other in others)]

    def _own(self, name: str, value: Tensor) -> Tensor:
        return value[self._cut.get(name, ())]

    def _check_same(self, tensors: Sequence[Tensor]) -> None:
        prints = self._group.gather([fingerprint(one).tolist() for one in tensors])
        if any(one != prints[0] for one in prints):
            raise NoReference("The ranks drew different tensors from one seed: their GPUs are not of one model.")

    def _errors_alone(self, alone: Built, draw: Draw) -> dict[str, tolerance.TensorError]:
        """What eager loses on one GPU; raises NoReference where the ranks together lose far more."""
        forward = self.problem.case.mode is Mode.FORWARD
        truth, produced = self.truth(draw, not forward), (alone.infer if forward else alone.train)(draw)
        errors = {
            name: tolerance.tensor_error(self._own(name, produced[name]), one) for name, one in truth.expected.items()
        }
        roundoff = tolerance.unit_roundoff(self.dtype)
        for name, one in errors.items():
            # n parts rounded, then n - 1 sums of them: each loses about one rounding
            if not truth.eager[name].relative <= (1 + self._group.size) * (one.relative + roundoff):
                raise NoReference(
                    f"The sum of the ranks' parts is wrong in {name}: plain PyTorch with plain collectives is off by "
                    f"{truth.eager[name].relative:.2e}, on one rank by {one.relative:.2e}."
                )
        return errors
