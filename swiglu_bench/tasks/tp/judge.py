"""A rank's part of a problem, and what split contenders are judged by: the fp64 answer of a call, and eager's loss.

Each rank computes the whole answer in fp64 from the full weights, and looks at its own part of the weights' gradients.
So a contender that cuts the weights elsewhere, or adds up wrongly, differs.

What eager loses is measured twice: on one GPU, and split, where every rank's part of a sum is rounded before the parts
are added in the case's dtype. The second is what split contenders are judged by, and is itself held against the first.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from swiglu_bench.cases.cases import Mode
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import Desk, Draw, make_problem
from swiglu_bench.check.judge import REFERENCE, Judge, Truth, compute_truth
from swiglu_bench.check.results import Fault, fingerprint, same_bits
from swiglu_bench.contenders import pytorch
from swiglu_bench.contenders.split import split
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.tasks.tp import SINGLE, SplitCase, Splitting
from swiglu_bench.worker.admission import Drawn
from swiglu_bench.worker.ranks import Group

OF_TOKENS = ("output", "x", "top_k_weights")
"""What has a row for each token, of which every rank has all or its part."""
COPIES = "the ranks' copies differ"


def cuts(rank: int, size: int, problem: Problem) -> dict[str, tuple[slice, ...]]:
    """Where a rank's part of each weight is, and of its gradient: whole experts, where there are any."""
    experts = problem.case.shape.experts
    each = (experts.count if experts else problem.case.shape.intermediate) // size
    rows = slice(rank * each, (rank + 1) * each)
    if experts:
        return dict.fromkeys(problem.parameters, (rows,))
    return {"w_gate": (rows,), "w_up": (rows,), "w_down": (slice(None), rows)}


def part_of(group: Group, problem: Problem) -> Problem:
    """The problem as this rank has it: its part of the weights. Its case is a SplitCase."""
    assert isinstance(problem.case, SplitCase)
    cut = cuts(group.rank, group.size, problem)
    both = (problem.weights, problem.biases)
    weights, biases = ({name: value[cut[name]].contiguous() for name, value in whole.items()} for whole in both)
    return dataclasses.replace(problem, case=problem.case.local, weights=weights, biases=biases)


class PartOfTokens(Desk):
    """Draws what all ranks have and hands out this rank's tokens."""

    def __init__(self, problem: Problem, group: Group) -> None:
        super().__init__(problem)
        self._group = group

    def activations(self, draw: Draw) -> list[Tensor]:
        """Of a call, this rank's part."""
        return [self._mine(value) for value in super().activations(draw)]

    def upstream(self, draw: Draw) -> Tensor:
        """The same of the upstream gradient."""
        return self._mine(super().upstream(draw))

    def _mine(self, value: Tensor) -> Tensor:
        return value.chunk(self._group.size)[self._group.rank]


def gather_into(whole: Tensor, part: Tensor) -> None:
    """All ranks' parts along the first dimension, in rank order."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, part)


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
        if whole.case.shape.experts:
            self._reference: Built = _OwnExperts(whole, self._cut)
        else:
            self._reference = Built(split(pytorch.eager, group.mesh, whole, by_sequence=False), self.problem)
        self.desk = self._reference.desk
        drawn = [*whole.weights.values(), *self.desk.activations(draws[0]), self.desk.upstream(draws[0])]
        prints = group.gather([fingerprint(tensor).tolist() for tensor in drawn])
        if any(other != prints[0] for other in prints):
            raise NoReference("The ranks drew different tensors from one seed: their GPUs are not of one model.")
        alone = Built(REFERENCE, whole)
        self._alone = {draw: self._errors_alone(alone, draw) for draw in draws}

    def answer(self, activations: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
        """fp64: what is of tokens whole, of the weights' gradients this rank's part."""
        found = compute_truth(self._whole, activations, upstream)
        return {name: self._own(name, value).clone() for name, value in found.items()}

    def judge_alone(self, produced: Produced, draw: Draw, faults: Mapping[str, Fault]) -> tuple[TensorCheck, ...]:
        """Verdicts on what one GPU produced, of which this rank looks at its part; `draw` is one of the first."""
        truth = self.truth(draw, backward=produced.keys() != {"output"})
        own = {name: value if value is None else self._own(name, value) for name, value in produced.items()}
        return self._verdicts(own, Truth(truth.expected, self._alone[draw]), "{}", faults, False)

    def differing(self, produced: Mapping[str, Tensor]) -> list[str]:
        """Names of results of which every rank has all, and whose copies are not equal bit for bit."""
        prints = {name: fingerprint(produced[name]).tolist() for name in OF_TOKENS if name in produced}
        others = self._group.gather(prints)
        return [name for name in prints if any(other[name] != others[0][name] for other in others)]

    def _own(self, name: str, value: Tensor) -> Tensor:
        return value[self._cut.get(name, ())]

    def _errors_alone(self, alone: Built, draw: Draw) -> dict[str, tolerance.TensorError]:
        """What eager loses on one GPU; raises NoReference where the ranks together lose far more."""
        forward = self.problem.case.mode is Mode.FORWARD
        truth, produced = self.truth(draw, not forward), (alone.infer if forward else alone.train)(draw)
        own = {name: self._own(name, produced[name]) for name in truth.expected}
        errors = {name: tolerance.tensor_error(own[name], right) for name, right in truth.expected.items()}
        roundoff = tolerance.unit_roundoff(self.dtype)
        for name, error in errors.items():
            # n parts rounded, then n - 1 sums of them: each loses about one rounding
            if not truth.eager[name].relative <= (1 + self._group.size) * (error.relative + roundoff):
                off = f"off by {truth.eager[name].relative:.2e}, on one rank by {error.relative:.2e}"
                plain = f"plain PyTorch with plain collectives is {off}"
                raise NoReference(f"The sum of the ranks' parts is wrong in {name}: {plain}.")
        return errors


class RankJudge:
    """All ranks' judges of a case, on this rank; what `worker` asks of a JudgeBench."""

    def __init__(
        self, group: Group, case: SplitCase, drawn: Drawn, together: Callable[[Callable[[], Any]], list[Any]]
    ) -> None:
        """Draw the weights, and compute the truth of the calls that all contenders are admitted by."""
        self._group, self._case, self._seed, self._together = group, case, drawn.weights, together
        self.whole = make_problem(case, group.device, seed=drawn.weights)
        self.split = SplitJudge(group, self.whole, drawn.draws)
        self.seats: dict[str, tuple[Splitting, Mapping[str, Tensor]]] = {}
        """How each contender on this rank is run, and what it hands over, by its name."""

    def letterbox(self, *_: object) -> tuple[bytes, dict[str, tuple[int, ...]]]:
        """Each rank's process has one of its own."""
        return b"", {}

    def judge(
        self, contender: str, draw: Draw, results: Mapping[str, Fault | None], label: str, distribution: bool
    ) -> tuple[TensorCheck, ...]:
        """For each tensor the verdict of the rank that fails, or else of the one that is the nearest to failing."""
        faults = {name: fault for name, fault in results.items() if fault}

        def verdicts() -> tuple[TensorCheck, ...]:
            sound = self._whole_results(contender, [name for name in results if name not in faults])
            produced = {name: sound.get(name) for name in results}
            if self.seats[contender][0] == SINGLE:
                return self.split.judge_alone(produced, draw, faults)
            checks = self.split.judge(produced, draw, label=label, faults=faults, distribution=distribution)
            different = self.split.differing(sound)
            differs = partial(dataclasses.replace, ok=False, reason=COPIES, check="relative error")
            return tuple(differs(check) if check.ok and check.tensor in different else check for check in checks)

        of_ranks = zip(*self._together(verdicts), strict=True)
        return tuple(_worst(checks, name in faults) for checks, name in zip(of_ranks, results, strict=True))

    def compare(self, draw: Draw, delivered: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Hold the results of a round against eager's on the same inputs: what is wrong on any rank, by contender."""

        def differences() -> dict[str, str]:
            wrong, found = self.split.compare(self._case.mode, [draw]), {}
            for contender, names in delivered.items():
                results = self._whole_results(contender, names)
                different = self.split.differing(results)
                found[contender] = wrong(results) or "; ".join(f"{name}: {COPIES}" for name in different)
            return {contender: reason for contender, reason in found.items() if reason}

        answers = self._together(differences)
        return {name: said(answers, name) for name in delivered if any(name in answer for answer in answers)}

    def changed_weights(self, contender: str = "") -> list[str]:
        """Names of the weights that are not what they were on some rank when the case began; they are then put back."""

        def changed() -> set[str]:
            fresh, found = make_problem(self._case, self._group.device, seed=self._seed), set()
            for now, before in ((self.whole, fresh), (self.split.problem, part_of(self._group, fresh))):
                for name, value in before.weights.items():
                    if not same_bits(now.weights[name], value):
                        now.weights[name].detach().copy_(value)
                        found.add(name)
            return found

        return sorted(set().union(*self._together(changed)))

    def _whole_results(self, contender: str, names: Sequence[str]) -> dict[str, Tensor]:
        """What a contender has handed over, with all ranks' tokens."""
        kind, results = self.seats[contender]
        found = {name: results[name].clone() for name in names}
        for name in OF_TOKENS if kind is True else ():
            if name in found:
                whole = found[name].new_empty(self._case.tokens, found[name].shape[1])
                gather_into(whole, found[name])
                found[name] = whole
        return found


def said(of_ranks: Sequence[Mapping[str, str]], name: str) -> str:
    """What the first rank says that says anything of it."""
    rank = next(number for number, reasons in enumerate(of_ranks) if name in reasons)
    return f"on rank {rank} {of_ranks[rank][name]}"


def _worst(checks: Sequence[TensorCheck], fault: bool) -> TensorCheck:
    rank = max(range(len(checks)), key=lambda number: (not checks[number].ok, checks[number].used))
    check = checks[rank]
    return check if check.ok or fault else dataclasses.replace(check, reason=f"on rank {rank} {check.reason}")
