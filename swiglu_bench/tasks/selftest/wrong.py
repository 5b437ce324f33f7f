"""Implementations that compute something else: faults as kernels have them, of values, routing and quantisation."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Dtype, Mode, Precision, Scope
from swiglu_bench.cases.costs import longest_sum
from swiglu_bench.cases.fp8 import BLOCK, E4M3, LARGEST, Quantised, defined, quantise, scale_size
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.judge import REFERENCE
from swiglu_bench.check.tolerance import unit_roundoff
from swiglu_bench.tasks.selftest.specimen import (
    LARGE,
    Build,
    Differentiable,
    Gradients,
    Specimen,
    gate_gradients,
    glu,
    right_backward,
    right_forward,
    table,
    when_large,
)

VALUES = ("relative error", "largest element")
UNWRITTEN = ("finite", *VALUES)
RECIPE, USE = ("recipe",), ("use",)
MOST_ROWS = 256
"""Rows of an expert beyond which a specimen computes nothing."""
TILE, FEW_EXPERTS = 128, 4


# One dense block


def _last_row_unwritten(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], w_gate.shape[0])
    out[:-1] = right_forward(x[:-1], w_gate, w_up)
    return out


def _nan_in_last_element(dx: Tensor, dw_gate: Tensor, dw_up: Tensor) -> Gradients:
    dw_up[-1, -1] = torch.nan
    return dx, dw_gate, dw_up


def _one_wrong_element(problem: Problem) -> Step:
    """The error is so small that the norm over many elements does not show it."""
    allowed = 0.9 * unit_roundoff(torch.float32) * math.sqrt(longest_sum(problem.case))

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = right_forward(x, w_gate, w_up)
        out[-1, -1] += allowed * out.norm()
        return out

    return glu(problem, forward)


def _through(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).to(value.dtype)


def _no_weight_gradient(problem: Problem) -> Step:
    w_gate, w_up = (value.detach() for value in problem.weights.values())
    return Step(lambda x: right_forward(x, w_gate, w_up))


def _without_tail(below: float, x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    gate = x @ w_gate.T
    return gate * torch.where(gate < below, 0.0, torch.sigmoid(gate)) * (x @ w_up.T)


def _flat_beyond(most: float, dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> Gradients:
    """No gradient for gates beyond a bound, as of a table that ends there."""
    rows, d_rows = x.flatten(0, -2), dz.flatten(0, -2)
    gate = rows @ w_gate.T
    d_gate, d_up = gate_gradients(d_rows, gate, rows @ w_up.T)
    d_gate = torch.where(gate > most, 0.0, d_gate)
    return (d_gate @ w_gate + d_up @ w_up).view_as(x), d_gate.T @ rows, d_up.T @ rows


def _flushed(below: float, dz: Tensor, *saved: Tensor) -> Gradients:
    return right_backward(torch.where(dz.abs() < below, 0.0, dz), *saved)


def _normalised(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """By a power of two, so that nothing is lost; of a token of zeros 0 divided by 0."""
    scale = x.abs().amax(-1, keepdim=True).log2().floor().exp2()
    return x / scale * scale, *weights


def _truncated(*given: Tensor) -> Tensor:
    out = right_forward(*(value.float() for value in given))
    return (out.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


_in_bf16 = partial(Specimen, dtype=Dtype.BFLOAT16)
_large = partial(Specimen, caught_by=USE, task="verify")
"""Right at the suite's small size, wrong at that of its case."""
DENSE = (
    Specimen("gate-up-swapped", "silu of up", VALUES, forward=lambda x, w_gate, w_up: right_forward(x, w_up, w_gate)),
    Specimen("dropped-k-tile", "the last 16 terms of each product are missing", VALUES,
             forward=lambda *given: right_forward(*(value[:, :-16] for value in given))),
    Specimen("last-row-unwritten", "the last row of the output is not stored", UNWRITTEN, forward=_last_row_unwritten),
    Specimen("gradient-of-row-0", "every row of dx is that of row 0", VALUES,
             gradients=lambda dx, *dw: (dx[:1].repeat(len(dx), 1), *dw)),
    Specimen("nan-in-one-element", "NaN in one weight gradient element", ("finite",), gradients=_nan_in_last_element),
    Specimen("one-wrong-element", "one element off by what the norm allows", ("largest element",), _one_wrong_element),
    Specimen("fp16-product", "inputs rounded to fp16 in an fp32 case", VALUES,
             forward=lambda *given: right_forward(*(_through(value, torch.float16) for value in given))),
    _in_bf16("fp8-product", "inputs rounded to fp8 in a bf16 case", VALUES,
             forward=lambda *given: right_forward(*(_through(value, E4M3) for value in given))),
    Specimen("upstream-ignored", "the gradient of the sum of the output, whatever the upstream gradient", VALUES,
             backward=lambda dz, *saved: right_backward(torch.ones_like(dz), *saved)),
    Specimen("no-weight-gradient", "promises weight gradients and yields none", ("missing",), _no_weight_gradient),
    _in_bf16("other-dtype", "an fp32 output in a bf16 case", ("form",),
             forward=lambda *given: right_forward(*given).float(), mode=Mode.FORWARD),
    _in_bf16("truncated", "cuts digits off instead of rounding", ("bias",), forward=_truncated, mode=Mode.FORWARD),
    Specimen("sigmoid-tail", "a sigmoid that is 0 below -8", USE, forward=partial(_without_tail, -8)),
    Specimen("sigmoid-deep-tail", "a sigmoid that is 0 below -25", USE, forward=partial(_without_tail, -25)),
    Specimen("gate-bounded", "bounds the gate at 20", USE,
             forward=lambda x, w_gate, w_up: silu((x @ w_gate.T).clamp(max=20)) * (x @ w_up.T)),
    Specimen("nan-hidden", "replaces NaN and Inf", USE, forward=lambda *given: right_forward(*given).nan_to_num()),
    Specimen("nan-gradient-hidden", "replaces NaN and Inf in gradients by numbers", USE,
             backward=lambda dz, *saved: right_backward(dz.nan_to_num(), *saved)),
    Specimen("large-gradients-bounded", "bounds upstream gradients at 1000", USE,
             backward=lambda dz, *saved: right_backward(dz.clamp(-1000, 1000), *saved)),
    Specimen("small-gradients-flushed", "takes small upstream gradients for zero", USE,
             backward=partial(_flushed, 1e-5)),
    _large("tail-when-large", "a sigmoid that is 0 below -6, of many tokens",
           forward=when_large(partial(_without_tail, -6))),
    _large("flat-when-large", "no gradient for gates beyond 7, of many tokens",
           backward=when_large(partial(_flat_beyond, 7), right_backward)),
    _large("flushed-when-large", "takes upstream gradients below 1e-6 for zero, of many tokens",
           backward=when_large(partial(_flushed, 1e-6), right_backward)),
    Specimen("padding-divided", "divides each token by its largest value, which may be zero", USE, inputs=_normalised),
)  # fmt: skip


# Mixtures of experts


def _routed(change: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> Build:
    """The definition on another routing than it was given: `change` gets index, weights and the number of experts."""

    def build(problem: Problem) -> Step:
        forward, count = REFERENCE.build(problem).forward, len(problem.weights["w_gate"])
        return Step(lambda x, index, weights: forward(x, *change(index, weights, count)))

    return build


def _place_in_expert(index: Tensor) -> Tensor:
    """For each (token, slot): how many before it have the same expert."""
    flat = index.flatten()
    same = flat[:, None] == flat
    return same.tril(-1).sum(1).view_as(index)


def _rows_of_expert(index: Tensor, count: int) -> Tensor:
    """For each (token, slot): how many rows its expert has."""
    return index.flatten().bincount(minlength=count)[index]


def _dropping(kept: Callable[[Tensor, int], Tensor]) -> Build:
    """Leaves out the rows of (token, slot) pairs that are not `kept`, by top_k_index and the number of experts."""
    return _routed(lambda index, weights, count: (index, weights * kept(index, count)))


def _strides_of_experts(problem: Problem) -> Step:
    forward = REFERENCE.build(problem).forward

    def ignoring(x: Tensor, *routing: Tensor) -> Tensor:
        return forward(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()), *routing)

    return Step(when_large(ignoring, forward))


def _first_routing_kept(problem: Problem) -> Step:
    kept: dict[torch.Size, Tensor] = {}
    return _routed(lambda index, weights, _: (kept.setdefault(index.shape, index.clone()), weights))(problem)


def _unwritten_if_idle(gradient: Tensor, weight: Tensor, index: Tensor) -> tuple[Tensor, None]:
    idle = index.flatten().bincount(minlength=len(gradient)) == 0
    return torch.where(idle[:, None, None], torch.nan, gradient), None


def _idle_expert_unwritten(problem: Problem) -> Step:
    """A launch with no tile for an expert without tokens."""

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        w_down = Differentiable.apply(
            lambda weight, _: weight.view_as(weight), _unwritten_if_idle, problem.weights["w_down"], index
        )
        own = problem.weights | {"w_down": w_down}
        step = REFERENCE.build(Problem(problem.case, problem.device, own, problem.biases, problem.extras))
        return step.forward(x, index, weights)

    return Step(forward)


def _all_but_last_tile(index: Tensor, count: int) -> Tensor:
    rows = _rows_of_expert(index, count)
    return (rows <= MOST_ROWS) | (_place_in_expert(index) < rows // TILE * TILE)


def _far_experts_folded(problem: Problem) -> Step:
    beyond = 2**31 // problem.weights["w_gate"][0].numel()
    return _routed(lambda index, weights, count: (index % min(count, beyond), weights))(problem)


_of_experts = partial(Specimen, scope=Scope.EXPERTS)
_of_large = partial(_large, scope=Scope.EXPERTS)
ROUTED = (
    _of_experts("experts-exchanged", "each expert has the weights of the next one", VALUES,
                _routed(lambda index, weights, count: ((index + 1) % count, weights))),
    _of_experts("routing-weights-ignored", "every expert of a token counts the same", VALUES,
                _routed(lambda index, weights, count: (index, weights * 0 + 1 / weights.shape[1]))),
    _of_experts("routing-gradient-zero", "the gradient of the routing weights is zero", VALUES,
                _routed(lambda index, weights, count: (index, weights.detach() + 0 * weights))),
    _of_experts("first-routing-kept", "every call is routed as the first one was", ("new inputs",),
                _first_routing_kept, mode=Mode.FORWARD),
    _of_experts("idle-expert-unwritten", "the weight gradient of an expert without a token is never stored", UNWRITTEN,
                _idle_expert_unwritten, tokens=3),
    _of_experts("crowded-expert-cut", f"an expert computes no more than {MOST_ROWS} rows", ("crowded expert",),
                _dropping(lambda index, count: _place_in_expert(index) < MOST_ROWS), task="audit"),
    _of_large("capacity-factor", "drops what is beyond twice an even share of the tokens",
              build=_dropping(lambda index, count: _place_in_expert(index) <= 2 * index.numel() // count)),
    _of_large("idle-expert-not-met", "the same as idle-expert-unwritten, where every expert of its case has tokens",
              build=_idle_expert_unwritten),
    _of_large("few-tokens-misrouted", f"wrong for fewer tokens than experts, of more than {FEW_EXPERTS}",
              build=_routed(lambda index, weights, n: ((index + (FEW_EXPERTS < n > len(index))) % n, weights))),
    _of_large("half-of-the-tokens", "drops rows of an expert that has more than half of many tokens",
              build=_dropping(lambda index, n: (_rows_of_expert(index, n) <= len(index) / 2) | (len(index) <= LARGE))),
    _of_large("last-tile-lost", f"beyond {MOST_ROWS} rows of an expert, its last partial tile is lost",
              build=_dropping(_all_but_last_tile), tokens=300),
    _of_large("strides-of-experts", "reads x as if it were contiguous, of many tokens", build=_strides_of_experts),
    _of_large("other-ranks-wrapped", "offers to skip experts of other ranks, and takes -1 for its own last one",
              build=_routed(lambda index, weights, count: (index % count, weights.nan_to_num(0.5))),
              offers=("other_ranks",)),
    _of_large("other-ranks-times-zero", "the same, with weights that are multiplied by zero, NaN or not",
              build=_routed(lambda index, weights, n: (index % n, weights * ((index >= 0) & (index < n)))),
              offers=("other_ranks",)),
    _of_experts("far-experts-folded", "the offset of an expert's weights is computed in 32 bits", ("far experts",),
                _far_experts_folded, task="audit", needs="cuda", dtype=Dtype.BFLOAT16),
)  # fmt: skip


# Quantisation that is not that of the recipe

Memory = dict[str, Tensor]
"""What a quantiser finds again in its next call."""


def _by_scales(value: Tensor, scales: Tensor) -> Quantised:
    return (value.float() / scales).clamp(-LARGEST, LARGEST).to(E4M3), scales


def _coarse(_: Memory, value: Tensor, precision: Precision, name: str) -> Quantised:
    codes, scale = quantise(value, Precision.FP8_TENSORWISE, name)
    rows, columns = value.shape
    return codes, scale.expand(scale_size(precision, name, (rows, columns))).contiguous()


def _overflowing(_: Memory, value: Tensor, precision: Precision, name: str) -> Quantised:
    """A scale by a sample of the columns, and a conversion that does not saturate."""
    scales = quantise(value[:, ::2], precision, name)[1]
    ratio = value.float() / scales
    return torch.where(ratio.abs() > LARGEST, torch.nan, ratio).to(E4M3), scales


def _towards_zero(_: Memory, value: Tensor, precision: Precision, name: str) -> Quantised:
    codes, scales = quantise(value, precision, name)
    above = codes.float().abs() > (value.float() / scales).abs()
    return (codes.view(torch.uint8) - above.to(torch.uint8)).view(E4M3), scales


def _wide_blocks(_: Memory, value: Tensor, precision: Precision, name: str) -> Quantised:
    codes, scales = quantise(value, precision, name)
    if name != "x":
        return codes, scales
    pairs = torch.maximum(scales[:, ::2], scales[:, 1::2]).repeat_interleave(2, 1)
    return _by_scales(value, pairs.repeat_interleave(BLOCK, 1))[0], pairs


def _scales_of_first_expert(kept: Memory, value: Tensor, precision: Precision, name: str) -> Quantised:
    codes, scales = quantise(value, precision, name)
    return codes, kept.setdefault(name, scales) if name.startswith("w_") else scales  # experts come in order


def _scales_of_first_call(kept: Memory, value: Tensor, precision: Precision, name: str) -> Quantised:
    return _by_scales(value, kept.setdefault(f"{name} {value.shape}", quantise(value, precision, name)[1]))


def _by(quantiser: Callable[..., Quantised], silent: bool = False) -> Build:
    """The definition by another quantiser; `silent`: it hands over no codes and no scales."""

    def build(problem: Problem) -> Step:
        step = defined(problem, quantiser=partial(quantiser, {}))
        return Step(step.forward) if silent else step

    return build


def _one_scale_denied(problem: Problem) -> Step:
    coarse, shown = _by(_coarse)(problem), defined(problem)
    return Step(lambda x: (shown.forward(x), coarse.forward(x))[1], hand_over=shown.hand_over)


def _half_handed_over(problem: Problem) -> Step:
    """What is not handed over could be in any precision."""
    step, shown = defined(problem), list[dict[str, Quantised] | None]([None])

    def hand_over(into: dict[str, Quantised] | None) -> None:
        shown[0] = into
        assert step.hand_over
        step.hand_over(into)

    def forward(x: Tensor) -> Tensor:
        output, handed = step.forward(x), shown[0] or {}
        for name in handed.keys() - {"x"}:
            del handed[name]
        return output

    return Step(forward, hand_over=hand_over)


_rowwise = partial(Specimen, dtype=Dtype.BFLOAT16, mode=Mode.FORWARD, task="verify", precision=Precision.FP8_ROWWISE)
QUANTISED = (
    _rowwise("one-scale-as-rows", "one scale for a matrix as a scale for each row", RECIPE, _by(_coarse)),
    _rowwise("one-scale-silent", "the same, and hands over nothing", VALUES, _by(_coarse, silent=True)),
    _rowwise("one-scale-denied", "the same, and hands over codes that it does not multiply", VALUES, _one_scale_denied),
    _rowwise("one-scale-of-experts", "one scale for each expert", RECIPE, _by(_coarse), scope=Scope.EXPERTS),
    _rowwise("scales-of-the-first-expert", "right codes, and the scales of the first expert for all", RECIPE,
             _by(_scales_of_first_expert), scope=Scope.EXPERTS),
    _rowwise("half-handed-over", "hands over the codes of x, not those of the weights", RECIPE, _half_handed_over),
    _rowwise("scales-of-the-first-call", "quantises by the first call's scales", RECIPE, _by(_scales_of_first_call)),
    _rowwise("no-saturation", "codes that overflow to NaN", (*RECIPE, *UNWRITTEN), _by(_overflowing)),
    _rowwise("truncated-codes", "codes are rounded towards zero", RECIPE, _by(_towards_zero)),
    _rowwise("blocks-of-256", "a scale for 256 values", RECIPE, _by(_wide_blocks), precision=Precision.FP8_BLOCKWISE),
)  # fmt: skip

SPECIMENS = table(__name__, *DENSE, *ROUTED, *QUANTISED)
