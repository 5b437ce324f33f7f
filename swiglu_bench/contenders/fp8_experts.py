"""Mixtures of experts in fp8: torch._scaled_grouped_mm by the book, and swiglu_kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from swiglu_bench.cases.cases import Dtype, Precision, Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.contenders.experts import packed, sorted_by_expert, summed

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.cases.fp8 import Quantised
    from swiglu_bench.cases.problem import Problem
    from swiglu_bench.contenders.experts import Forward

ROWWISE = Precision.FP8_ROWWISE


def by_grouped_products(problem: Problem, *, compiled: bool = False) -> Step:
    """Sort, gather, one grouped product for gate and up, silu and multiplication, one with w_down, weighted sum."""
    import torch

    from swiglu_bench.cases.definition import silu_mul
    from swiglu_bench.cases.fp8 import quantise
    from swiglu_bench.contenders.fp8_linear import GroupedLinear, QuantisedWeight, in_both_ways

    case = problem.case
    assert case.shape.experts
    count, top_k = case.shape.experts.count, case.shape.experts.top_k
    first = GroupedLinear("x", "w_gate_up", "d_gate_up", case.precision, top_k)
    second = GroupedLinear("h", "w_down", "upstream", case.precision, top_k)

    def hidden_of(both: Tensor) -> Tensor:
        return silu_mul(*both.chunk(2, dim=-1))

    def train(x: Tensor, index: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        _, order, ends = sorted_by_expert(index, count)
        hidden = hidden_of(first.train(x[order // top_k], w_gate_up, ends, order))
        return summed(second.train(hidden, w_down, ends, order), order, weights)

    def infer(x: Tensor, index: Tensor, weights: Tensor, w_gate_up: Quantised, w_down: Quantised) -> Tensor:
        _, order, ends = sorted_by_expert(index, count)
        hidden = hidden_of(first.infer(x[order // top_k], w_gate_up, ends, order))
        return summed(second.infer(hidden, w_down, ends, order), order, weights)

    ways = in_both_ways(train, infer, compiled)

    def of(own: Mapping[str, Tensor]) -> Forward:
        given = [own[layer.weight] for layer in (first, second)]
        kept = [
            QuantisedWeight(weight, partial(quantise, precision=case.precision, name=layer.weight))
            for weight, layer in zip(given, (first, second), strict=True)
        ]

        def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                return ways[0](x, index, weights, *given)
            return ways[1](x, index, weights, *(codes() for codes in kept))

        return forward

    def hand_over(into: dict[str, Quantised] | None) -> None:
        first.watched = second.watched = into

    return dataclasses.replace(packed(problem, of), hand_over=None if compiled else hand_over)


def _scaled(name: str, description: str, compiled: bool) -> Implementation:
    declare = implementation(
        name, scopes=(Scope.EXPERTS,), dtypes=(Dtype.BFLOAT16,), precisions=(ROWWISE,), description=description,
        weight_layout="packed", multiple=16, backend="inductor" if compiled else "torch", gpus=(9,),
    )  # fmt: skip
    return declare(partial(by_grouped_products, compiled=compiled))


scaled_grouped = _scaled(
    "scaled-grouped",
    "torch._scaled_grouped_mm: quantised by plain PyTorch; sort, gather, weighted sum as in grouped; dW in bf16",
    False,
)
scaled_grouped_compiled = _scaled("scaled-grouped-compile", "scaled-grouped under torch.compile", True)


@implementation(
    "fused-fp8-experts",
    scopes=(Scope.EXPERTS,),
    dtypes=(Dtype.BFLOAT16,),
    precisions=(ROWWISE,),
    description="swiglu_experts with fp8 products: those of the forward; the backward's are in bf16",
    weight_layout="packed",
    backend="triton",
    package="swiglu_kernels.ops.experts.fp8_experts",
    multiple=16,
    quantises_dx=False,
    quantises_dw=False,
    usage="from swiglu_kernels import swiglu_experts; "
    "out = swiglu_experts(x, w_gate_up, w_down, top_k_index, top_k_weights, precision='fp8-rowwise')",
)
def fused(problem: Problem) -> Step:
    """Weights are quantised before an inference forward, as `FusedSwiGLUExperts.keep_codes` has it."""
    import torch

    from swiglu_bench.contenders.fp8_linear import QuantisedWeight
    from swiglu_kernels import swiglu_experts
    from swiglu_kernels.ops.fp8.operation import hand_over, quantise
    from swiglu_kernels.ops.fp8.portable_codes import Quantised

    precision = str(problem.case.precision)

    def of(own: Mapping[str, Tensor]) -> Forward:
        given = own["w_gate_up"], own["w_down"]
        kept = [QuantisedWeight(weight, partial(quantise, recipe="rowwise", weight=True)) for weight in given]

        def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            w_gate_up, w_down = given if torch.is_grad_enabled() else (Quantised(*codes()) for codes in kept)
            return swiglu_experts(x, w_gate_up, w_down, index, weights, precision=precision)

        return forward

    return dataclasses.replace(packed(problem, of), hand_over=hand_over)


ROWS = (fused, scaled_grouped, scaled_grouped_compiled)
