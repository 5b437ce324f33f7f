"""The fp64 answer of a case, computed by all ranks together, and what eager PyTorch loses on the way to it.

Each rank computes in fp64 what its features contribute, from weights that it cut out of the full ones by itself, and
the ranks' outputs and dX are added in fp64. That the parts make up the whole is checked, so a contender that cuts
elsewhere differs. For a rank's rows of the weight gradients nothing has to be added.

What eager loses is measured twice: on one GPU, and split, where every rank's part of a sum is rounded before the parts
are added in the case's dtype. The second is what split contenders are judged by, and is itself held against the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.check.judge import REFERENCE, Judge, Sealed
from swiglu_bench.check.truth import compute_truth
from swiglu_bench.spec.cases import Mode
from swiglu_bench.spec.costs import longest_sum
from swiglu_bench.spec.problem import Problem
from swiglu_bench.tp.contenders import cuts, part_of, rows_of
from swiglu_bench.tp.group import Group


class NoReference(RuntimeError):
    """The ranks' own reference is wrong: what they add up is not the answer."""


@dataclass(frozen=True)
class Judges:
    """Of one variant: for contenders on all ranks, and on one GPU."""

    split: Judge
    single: Judge


def check_same(group: Group, problem: Problem) -> None:
    """Raise NoReference unless all ranks drew the same tensors."""
    tensors = [*problem.weights.values(), *(one for those in problem.activations for one in those), *problem.upstream]
    prints = group.gather([tolerance.fingerprint(one).tolist() for one in tensors])
    if any(one != prints[0] for one in prints):
        raise NoReference("The ranks drew different tensors from one seed: their GPUs are not of one kind.")


def make_judges(group: Group, problem: Problem, part: Problem, variant: int) -> Judges:
    """Compute the truth and both references. `part` is this rank's problem with all tokens."""
    truth = shared_truth(group, problem, variant)
    single = own_part(group, problem, dict(_run(problem, variant)))
    split = _run(part, variant)
    for name in {"output", "x"} & split.keys():
        dist.all_reduce(split[name])
    errors = {
        name: [tolerance.tensor_error(value, truth[name]) for value in (single[name], split[name])] for name in truth
    }
    roundoff = tolerance.unit_roundoff(torch_dtype(problem.case))
    for name, (alone, parted) in errors.items():
        # n parts rounded, then n - 1 sums of them: each loses about one rounding
        if not parted.relative <= (1 + group.size) * (alone.relative + roundoff):
            raise NoReference(
                f"The sum of the ranks' parts is wrong in {name}: plain PyTorch with plain collectives is off by "
                f"{parted.relative:.2e}, on one rank by {alone.relative:.2e}."
            )
    sealed = {name: Sealed(value) for name, value in truth.items()}
    make = [
        Judge(sealed, {name: both[which] for name, both in errors.items()}, torch_dtype(problem.case),
                  longest_sum(problem.case))
        for which in (0, 1)
    ]  # fmt: skip
    return Judges(split=make[1], single=make[0])


def shared_truth(group: Group, problem: Problem, variant: int) -> dict[str, Tensor]:
    """fp64: the output and dX whole, of the weights' gradients this rank's part."""
    rows = rows_of(group.rank, group.size, problem)
    covered = torch.zeros(problem.case.shape.intermediate, device=problem.device)
    covered[rows] += 1
    dist.all_reduce(covered)
    assert bool((covered == 1).all()), "every intermediate feature belongs to exactly one rank"
    truth = compute_truth(part_of(group, problem, by_sequence=False), variant)
    for name in {"output", "x"} & truth.keys():
        dist.all_reduce(truth[name])
    return truth


def own_part(group: Group, problem: Problem, produced: Produced) -> dict[str, Tensor]:
    """Of what one GPU produced, what this rank's truth is about."""
    cut = cuts(group.rank, group.size, problem)
    return {name: one[cut.get(name, ())] for name, one in produced.items() if one is not None}


def _run(problem: Problem, variant: int) -> dict[str, Tensor]:
    built = Built(REFERENCE, problem)
    produced = built.infer(variant) if problem.case.mode is Mode.FORWARD else built.train(variant)
    return {name: one for name, one in produced.items() if one is not None}
