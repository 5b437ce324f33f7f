"""Implementations that compute something else: faults as kernels have them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Dtype, Mode, Scope
from swiglu_bench.cases.costs import longest_sum
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.tolerance import unit_roundoff
from swiglu_bench.tasks.selftest.specimen import (
    CHECKED_CALLS,
    changed_gradients,
    gate_gradients,
    glu,
    right_backward,
    right_forward,
    specimen,
)

VALUES = ("relative error", "largest element")
UNWRITTEN = ("finite", *VALUES)


@specimen("zeros", "an output of zeros", VALUES)
def zeros(problem: Problem) -> Step:
    """A launch that failed in silence."""
    return glu(problem, lambda x, w_gate, w_up: torch.zeros_like(right_forward(x, w_gate, w_up)))


@specimen("gate-up-swapped", "silu of up instead of gate", VALUES)
def swapped(problem: Problem) -> Step:
    """Weights packed in the other order."""
    return glu(problem, lambda x, w_gate, w_up: right_forward(x, w_up, w_gate))


@specimen("silu-in-fp16", "SiLU rounded to fp16 in an fp32 case", VALUES)
def silu_in_fp16(problem: Problem) -> Step:
    """A cast that was left in."""
    return glu(problem, lambda x, w_gate, w_up: silu((x @ w_gate.T).half()).float() * (x @ w_up.T))


@specimen("dropped-k-tile", "the last 16 terms of each product are missing", VALUES)
def dropped_k_tile(problem: Problem) -> Step:
    """A loop that ends one tile early."""
    return glu(problem, lambda x, w_gate, w_up: right_forward(x[:, :-16], w_gate[:, :-16], w_up[:, :-16]))


@specimen("last-row-unwritten", "the last row of the output is never stored", UNWRITTEN)
def last_row(problem: Problem) -> Step:
    """A mask off by one."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], w_gate.shape[0])
        out[:-1] = right_forward(x[:-1], w_gate, w_up)
        return out

    return glu(problem, forward)


@specimen("last-column-unwritten", "the last column of the output is never stored", UNWRITTEN)
def last_column(problem: Problem) -> Step:
    """A mask off by one, the other way."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], w_gate.shape[0])
        out[:, :-1] = right_forward(x, w_gate[:-1], w_up[:-1])
        return out

    return glu(problem, forward)


@specimen("gradient-of-row-0", "every row of dx is that of row 0", VALUES)
def gradient_of_row_0(problem: Problem) -> Step:
    """A row offset that was forgotten."""

    return changed_gradients(problem, lambda dx, *dw: (dx[:1].repeat(len(dx), 1), *dw))


@specimen("dw-misses-tokens", "the weight gradients leave out the last 8 tokens", VALUES)
def dw_misses_tokens(problem: Problem) -> Step:
    """A split of the sum whose last part is dropped."""

    def backward(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dx, *_ = right_backward(dz, x, w_gate, w_up)
        return (dx, *right_backward(dz[:-8], x[:-8], w_gate, w_up)[1:])

    return glu(problem, backward=backward)


@specimen("dw-exchanged", "the gradients of w_gate and w_up exchanged", VALUES)
def dw_exchanged(problem: Problem) -> Step:
    """Two results returned in the wrong order."""

    return changed_gradients(problem, lambda dx, dw_gate, dw_up: (dx, dw_up, dw_gate))


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx, dz: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        d_gate, d_up = gate_gradients(dz, *ctx.saved_tensors)
        return d_up, d_gate


@specimen("d-gate-d-up-exchanged", "the gradients of gate and up exchanged", VALUES, scope=Scope.ACTIVATION)
def exchanged(problem: Problem) -> Step:
    """Unsloth's kernel leaves them so in its buffers."""
    del problem
    return Step(_Exchanged.apply)


@specimen("nan-in-one-element", "one element of a weight gradient is NaN", "finite")
def nan_in_one_element(problem: Problem) -> Step:
    """An element that no tile covers, as it lay in memory."""

    def change(dx: Tensor, dw_gate: Tensor, dw_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dw_up[-1, -1] = torch.nan
        return dx, dw_gate, dw_up

    return changed_gradients(problem, change)


@specimen("one-wrong-element", "one element of the output is off, by as much as the norm allows", "largest element")
def one_wrong_element(problem: Problem) -> Step:
    """So little that the norm of the error does not see it among many."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = right_forward(x, w_gate, w_up)
        allowed = 0.9 * unit_roundoff(torch.float32) * math.sqrt(longest_sum(problem.case))
        out[-1, -1] += allowed * out.norm()
        return out

    return glu(problem, forward)


@specimen("fp16-product", "inputs rounded to fp16 in an fp32 case", VALUES)
def fp16_product(problem: Problem) -> Step:
    """A faster product than was asked for; TF32 keeps as many bits."""

    return glu(problem, lambda *given: right_forward(*(value.half().float() for value in given)))


@specimen("fp8-product", "inputs rounded to fp8 in a bf16 case", VALUES, dtype=Dtype.BFLOAT16)
def fp8_product(problem: Problem) -> Step:
    """Half the bytes, twice the rate, and not the question."""

    return glu(problem, lambda *given: right_forward(*(one.to(torch.float8_e4m3fn).to(one.dtype) for one in given)))


@specimen("gradient-in-fp8", "d_gate and d_up rounded to fp8 in a bf16 case", VALUES, dtype=Dtype.BFLOAT16)
def gradient_in_fp8(problem: Problem) -> Step:
    """Half the memory between two kernels of the backward."""

    def backward(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pair = gate_gradients(dz, x @ w_gate.T, x @ w_up.T)
        d_gate, d_up = (value.to(torch.float8_e5m2).to(value.dtype) for value in pair)
        return d_gate @ w_gate + d_up @ w_up, d_gate.T @ x, d_up.T @ x

    return glu(problem, backward=backward)


@specimen("upstream-ignored", "the gradient of the sum of the output, whatever the upstream gradient", VALUES)
def upstream_ignored(problem: Problem) -> Step:
    """Right in every test that calls out.sum().backward()."""
    return glu(problem, backward=lambda dz, *saved: right_backward(torch.ones_like(dz), *saved))


@specimen("no-weight-gradient", "promises weight gradients and yields none", "missing")
def no_weight_gradient(problem: Problem) -> Step:
    """A detach that was left in."""
    w_gate, w_up = (value.detach() for value in problem.weights.values())
    return Step(lambda x: right_forward(x, w_gate, w_up))


@specimen("other-dtype", "an fp32 output in a bf16 case", "form", dtype=Dtype.BFLOAT16, mode=Mode.FORWARD)
def other_dtype(problem: Problem) -> Step:
    """It saves a rounding, and whoever comes next reads twice the bytes."""
    return glu(problem, lambda x, w_gate, w_up: right_forward(x, w_gate, w_up).float())


@specimen("sigmoid-tail", "a sigmoid that is 0 below -8", "use")
def sigmoid_tail(problem: Problem) -> Step:
    """The tail of an approximation; normal gates never go there."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        gate = x @ w_gate.T
        return gate * torch.where(gate < -8, 0.0, torch.sigmoid(gate)) * (x @ w_up.T)

    return glu(problem, forward)


@specimen("sigmoid-deep-tail", "a sigmoid that is 0 below -25", "use")
def sigmoid_deep_tail(problem: Problem) -> Step:
    """Values that are small beside their neighbours and everything in a token of their own."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        gate = x @ w_gate.T
        return gate * torch.where(gate < -25, 0.0, torch.sigmoid(gate)) * (x @ w_up.T)

    return glu(problem, forward)


@specimen("large-gradients-bounded", "bounds upstream gradients at 1000", "use")
def large_gradients_bounded(problem: Problem) -> Step:
    """A loss that is scaled up, as for fp16, has larger ones."""
    return glu(problem, backward=lambda dz, *saved: right_backward(dz.clamp(-1000, 1000), *saved))


@specimen("gate-bounded", "bounds the gate at 20", "use")
def gate_bounded(problem: Problem) -> Step:
    """Against an overflow of exp, on the wrong side."""
    return glu(problem, lambda x, w_gate, w_up: silu((x @ w_gate.T).clamp(max=20)) * (x @ w_up.T))


@specimen("nan-hidden", "replaces NaN and Inf by numbers", "use")
def nan_hidden(problem: Problem) -> Step:
    """A training run that diverges looks well."""
    return glu(problem, lambda x, *weights: right_forward(x, *weights).nan_to_num())


@specimen("small-gradients-flushed", "takes small upstream gradients for zero", "use")
def small_gradients_flushed(problem: Problem) -> Step:
    """A loss over many tokens has no others."""

    return glu(problem, backward=lambda dz, *saved: right_backward(torch.where(dz.abs() < 1e-5, 0.0, dz), *saved))


@specimen("truncated", "cuts the output's digits off instead of rounding", "bias", dtype=Dtype.BFLOAT16,
          mode=Mode.FORWARD)  # fmt: skip
def truncated(problem: Problem) -> Step:
    """The upper half of fp32's bits; each value a little too small."""

    def forward(*given: Tensor) -> Tensor:
        out = right_forward(*(value.float() for value in given))
        return (out.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)

    return glu(problem, forward)


@specimen("sometimes-skips-a-row", "one call in seven leaves a row of the output zero", "timed loop",
          mode=Mode.FORWARD)  # fmt: skip
def sometimes_skips_a_row(problem: Problem) -> Step:
    """A race that the check does not meet."""
    calls: list[int] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        calls.append(1)
        out = right_forward(x, w_gate, w_up)
        if len(calls) > CHECKED_CALLS and len(calls) % 7 == 0:
            out[len(calls) % len(out)] = 0
        return out

    return glu(problem, forward)
