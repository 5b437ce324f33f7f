"""Mixtures of experts that compute something else: faults of routing, as kernels have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Mode, Scope
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.judge import REFERENCE
from swiglu_bench.tasks.selftest.specimen import CROWDED_CHECK, Specimen, specimen
from swiglu_bench.tasks.selftest.wrong import UNWRITTEN, VALUES

FIRST_TILE = 4
ROUTING = tuple[Tensor, Tensor]


def _routed(problem: Problem, change: Callable[[Tensor, Tensor], ROUTING]) -> Step:
    """The definition on another routing than it was given."""
    forward = REFERENCE.build(problem).forward
    return Step(lambda x, index, weights: forward(x, *change(index, weights)))


def _place_in_expert(index: Tensor) -> Tensor:
    """For each (token, slot): how many before it have the same expert."""
    flat = index.flatten()
    same = flat[:, None] == flat
    return same.tril(-1).sum(1).view_as(index)


def _fault(
    name: str, description: str, caught_by: str | tuple[str, ...] = VALUES, **where: Any
) -> Callable[[Callable[[Problem], Step]], Specimen]:
    return specimen(name, description, caught_by, scope=Scope.EXPERTS, **where)


@_fault("experts-exchanged", "each expert has the weights of the next one")
def exchanged(problem: Problem) -> Step:
    """An expert's number off by one."""
    count = len(problem.weights["w_gate"])
    return _routed(problem, lambda index, weights: ((index + 1) % count, weights))


@_fault("slots-exchanged", "the routing weights of a token's experts in another order")
def slots_exchanged(problem: Problem) -> Step:
    """Weights that were not sorted along with the experts."""
    return _routed(problem, lambda index, weights: (index, weights.flip(1)))


@_fault("routing-weights-ignored", "every expert of a token counts the same")
def weights_ignored(problem: Problem) -> Step:
    """A sum without its weights; their gradient is zero."""
    return _routed(problem, lambda index, weights: (index, weights * 0 + 1 / weights.shape[1]))


@_fault("routing-gradient-zero", "the gradient of the routing weights is zero")
def gradient_zero(problem: Problem) -> Step:
    """A router that never learns."""
    return _routed(problem, lambda index, weights: (index, weights.detach() + 0 * weights))


@_fault("tokens-over-capacity-dropped", "an expert takes no more than its share of the tokens")
def over_capacity(problem: Problem) -> Step:
    """A buffer of fixed size for each expert."""
    count = len(problem.weights["w_gate"])

    def change(index: Tensor, weights: Tensor) -> ROUTING:
        return index, weights * (_place_in_expert(index) < index.numel() / count)

    return _routed(problem, change)


@_fault("first-tile-only", f"an expert computes its first {FIRST_TILE} rows only")
def first_tile_only(problem: Problem) -> Step:
    """A loop over tiles that ends after the first."""
    return _routed(problem, lambda index, weights: (index, weights * (_place_in_expert(index) < FIRST_TILE)))


@_fault("last-expert-left-out", "the last expert's part is missing")
def last_left_out(problem: Problem) -> Step:
    """A bound off by one."""
    last = len(problem.weights["w_gate"]) - 1
    return _routed(problem, lambda index, weights: (index, weights * (index < last)))


@_fault("first-routing-kept", "every call is routed as the first one was", "new inputs", mode=Mode.FORWARD)
def first_routing_kept(problem: Problem) -> Step:
    """A sort that is kept by the address of its input."""
    kept: list[Tensor] = []

    def change(index: Tensor, weights: Tensor) -> ROUTING:
        if not kept:
            kept.append(index.clone())
        return kept[0] if kept[0].shape == index.shape else index, weights

    return _routed(problem, change)


class _UnwrittenIfIdle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        idle = index.flatten().bincount(minlength=len(gradient)) == 0
        return torch.where(idle[:, None, None], torch.nan, gradient), None


@_fault(
    "idle-expert-unwritten", "the weight gradient of an expert without a token is never stored", UNWRITTEN, tokens=3
)
def idle_unwritten(problem: Problem) -> Step:
    """A launch with no tile for it."""

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        own = problem.weights | {"w_down": _UnwrittenIfIdle.apply(problem.weights["w_down"], index)}
        step = REFERENCE.build(Problem(problem.case, problem.device, own, problem.biases, problem.extras))
        return step.forward(x, index, weights)

    return Step(forward)


@_fault("crowded-expert-cut", "an expert computes no more than 256 rows", CROWDED_CHECK, task="audit")
def crowded_cut(problem: Problem) -> Step:
    """Right wherever tokens are spread."""
    return _routed(problem, lambda index, weights: (index, weights * (_place_in_expert(index) < 256)))
