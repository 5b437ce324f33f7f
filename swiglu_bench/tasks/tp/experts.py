"""Expert parallelism: each rank has its part of the tokens and of the experts, and tokens travel to their experts.

    forward    all-to-all of the rows of x, one for each (token, expert); the rank's experts on what came in; all-to-all
               of their results; the weighted sum where the token is
    in a step  the same two for the gradients, in the other order

How many rows a rank has for another is known after a first exchange of counts, for which the host waits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.contenders.experts import summed
from swiglu_bench.tasks.tp.group import Group


class _Exchanged(torch.autograd.Function):
    """Rows in the order of the ranks that they are for -> those that came, in the order of the ranks they are from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = received, sent
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Exchanged.apply(gradient, *ctx.sizes), None, None


def between_exchanges(part: Problem, known: Implementation, group: Group) -> Step:
    """The Step of an implementation on a rank's experts, for the rank's tokens, which may have any experts."""
    assert part.case.shape.experts
    each = part.case.shape.experts.count
    step = known.build(part)
    compute = step.forward

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        expert = index.flatten()
        order = expert.argsort(stable=True)
        counts = (expert // each).bincount(minlength=group.size)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        sent, received = counts.tolist(), coming.tolist()
        rows = _Exchanged.apply(x[order // index.shape[1]], sent, received)
        mine = _Exchanged.apply(expert[order] % each, sent, received)
        found = compute(rows, mine[:, None], rows.new_ones(len(rows), 1))
        return summed(_Exchanged.apply(found, received, sent), order, weights)

    return dataclasses.replace(step, forward=forward)


def without_exchanges(part: Problem, known: Implementation) -> Step:
    """The same work on a rank's own tokens: each is for the expert that has its expert's place on this rank."""
    assert part.case.shape.experts
    each = part.case.shape.experts.count
    step = known.build(part)
    compute = step.forward

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = x.repeat_interleave(index.shape[1], 0)
        found = compute(rows, index.flatten()[:, None] % each, rows.new_ones(len(rows), 1))
        return (found.unflatten(0, index.shape) * weights[..., None]).sum(1).to(x.dtype)

    return dataclasses.replace(step, forward=forward)
