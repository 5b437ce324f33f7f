"""Implementations that are right when they are called once, and wrong as a model uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.tasks.selftest.specimen import glu, right_backward, right_forward, specimen


class _Glu(torch.autograd.Function):
    """SwiGLU whose backward finds in `holder` what the last forward has left there."""

    @staticmethod
    def forward(ctx: Any, holder: dict[str, Any], x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        ctx.save_for_backward(w_gate, w_up)
        ctx.holder = holder
        holder["x"] = x.clone()
        return right_forward(x, w_gate, w_up)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *right_backward(dz, ctx.holder["x"], *ctx.saved_tensors))


@specimen("shared-workspace", "two calls share the memory in which they save x", "use")
def shared_workspace(problem: Problem) -> Step:
    """A layer that is applied twice, or a backward that comes after the next forward."""
    holder: dict[str, Any] = {}
    return Step(lambda x: _Glu.apply(holder, x, problem.weights["w_gate"], problem.weights["w_up"]))


class _Assigning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        ctx.save_for_backward(x, w_gate, w_up)
        ctx.weights = (w_gate, w_up)
        return right_forward(x, w_gate, w_up)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        dx, *gradients = right_backward(dz, *ctx.saved_tensors)
        for weight, gradient in zip(ctx.weights, gradients, strict=True):
            weight.grad = gradient
        return dx, None, None


@specimen("assigned-gradients", "assigns weight gradients instead of adding them", "use")
def assigned_gradients(problem: Problem) -> Step:
    """Gradient accumulation keeps the last micro-batch only."""
    weights = problem.weights
    return Step(lambda x: _Assigning.apply(x, weights["w_gate"], weights["w_up"]))


@specimen("stale-weights", "packs its weights once", "use")
def stale_weights(problem: Problem) -> Step:
    """The optimiser changes others."""
    w_gate, w_up = (value.detach().clone() for value in problem.weights.values())
    return glu(
        problem, lambda x, *_: right_forward(x, w_gate, w_up), lambda dz, x, *_: right_backward(dz, x, w_gate, w_up)
    )


_PACKED: dict[torch.Size, tuple[Tensor, Tensor]] = {}


@specimen("weights-by-shape", "keeps packed weights by their shape", "use")
def weights_by_shape(problem: Problem) -> Step:
    """Every layer of a model has the same."""

    def packed(w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor]:
        return _PACKED.setdefault(w_gate.shape, (w_gate.detach(), w_up.detach()))

    return glu(
        problem,
        lambda x, *weights: right_forward(x, *packed(*weights)),
        lambda dz, x, *weights: right_backward(dz, x, *packed(*weights)),
    )


@specimen("first-batch-only", "computes the first sequence of a batch for all", "use")
def first_batch_only(problem: Problem) -> Step:
    """A stride of the batch that was taken for 0."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = right_forward(x if x.dim() == 2 else x[:1], w_gate, w_up)
        return out if x.dim() == 2 else out.repeat(x.shape[0], 1, 1)

    def backward(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dx, *dw = right_backward(dz.flatten(0, -2), x.flatten(0, -2), w_gate, w_up)
        return dx.view_as(x), dw[0], dw[1]

    return glu(problem, forward, backward)


@specimen("ignores-strides", "reads its input as if it were contiguous", "use")
def ignores_strides(problem: Problem) -> Step:
    """A pointer and no strides."""

    def flat(value: Tensor) -> Tensor:
        return value.as_strided(value.shape, torch.empty(value.shape, device="meta").stride())

    return glu(
        problem,
        lambda x, *weights: right_forward(flat(x), *weights),
        lambda dz, x, *weights: right_backward(dz, flat(x), *weights),
    )


class _NeedsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        ctx.save_for_backward(x, w_gate, w_up)
        return right_forward(x, w_gate, w_up)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        found = right_backward(dz, *ctx.saved_tensors)
        return found if all(ctx.needs_input_grad) else tuple(value * 0 for value in found)


@specimen("needs-every-gradient", "returns zeros where one of its inputs needs no gradient", "use")
def needs_every_gradient(problem: Problem) -> Step:
    """The first layer of a model, or one with frozen weights."""
    weights = problem.weights
    return Step(lambda x: _NeedsInput.apply(x, weights["w_gate"], weights["w_up"]))


LARGE = 96
"""More tokens and channels than the suite's small layers have."""


@specimen("stale-when-large", "packs its weights once, where they are many", "use", task="verify")
def stale_when_large(problem: Problem) -> Step:
    """The path that tests of small sizes do not take."""
    w_gate, w_up = (value.detach().clone() for value in problem.weights.values())
    if len(w_gate) <= LARGE:
        return glu(problem)
    return glu(
        problem, lambda x, *_: right_forward(x, w_gate, w_up), lambda dz, x, *_: right_backward(dz, x, w_gate, w_up)
    )


@specimen("overflows-when-large", "bounds the gate at 20, where tokens are many", "use", task="verify")
def overflows_when_large(problem: Problem) -> Step:
    """The same of values."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        gate = x @ w_gate.T
        bounded = gate.clamp(max=20) if len(x) > LARGE else gate
        return torch.nn.functional.silu(bounded) * (x @ w_up.T)

    return glu(problem, forward)


@specimen("one-number-of-tokens", "leaves out the last token where there are more or fewer than at first", "use")
def one_number_of_tokens(problem: Problem) -> Step:
    """A grid or a graph that was made for the first call."""
    counts: list[int] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        counts.append(len(x))
        out = right_forward(x, w_gate, w_up)
        if x.dim() == 2 and len(x) != counts[0]:
            out[-1] = 0
        return out

    return glu(problem, forward)


class _Exposed(torch.autograd.Function):
    """SwiGLU that keeps its input where others can write."""

    @staticmethod
    def forward(ctx: Any, saved: list[Tensor], x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        ctx.save_for_backward(w_gate, w_up)
        saved[:] = [x.clone()]
        ctx.x = saved[0]
        return right_forward(x, w_gate, w_up)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *right_backward(dz, ctx.x, *ctx.saved_tensors))


@specimen("inference-overwrites", "inference writes into what a forward has saved for its backward", "use")
def inference_overwrites(problem: Problem) -> Step:
    """A model that is evaluated between a forward and its backward, such as a teacher."""
    saved: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Exposed.apply(saved, x, *problem.weights.values())
        for one in saved:
            one[: len(x)] = x[: len(one)]
        return right_forward(x, *problem.weights.values())

    return Step(forward)


@specimen("nan-gradient-hidden", "replaces NaN and Inf in gradients by numbers", "use")
def nan_gradient_hidden(problem: Problem) -> Step:
    """A loss scaler that never finds an overflow."""

    def backward(dz: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dx, dw_gate, dw_up = right_backward(dz.nan_to_num(), *saved)
        return dx, dw_gate, dw_up

    return glu(problem, backward=backward)
