"""fp8 by swiglu_kernels, torch's scaled products, torchao, DeepGEMM and TransformerEngine, each by its own functions.

Each quantises to the recipe of the case. Those that multiply codes of the suite's quantiser hand these over. The others
quantise inside, and torch.compile rounds a division otherwise: they are judged by results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases.cases import Dtype, Precision, Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.contenders.around import joined
from swiglu_bench.contenders.experts import sorted_by_expert, summed

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, ModuleDict

    from swiglu_bench.cases.fp8 import Quantised
    from swiglu_bench.cases.problem import Problem

SCOPES = (Scope.GLU, Scope.MLP)
TENSORWISE, ROWWISE, BLOCKWISE = (precision for precision in Precision if precision)
_row = partial(implementation, scopes=SCOPES, dtypes=(Dtype.BFLOAT16,))


def by_products(problem: Problem, *, package: str = "torch", compiled: bool = False, quantised_dw: bool = True) -> Step:
    """One product for gate and up, silu and multiplication by torch, and outside of the glu scope one with w_down.

    Of experts the products are grouped: rows are sorted by expert before, and summed by their weights behind.
    """
    import torch

    from swiglu_bench.cases.definition import silu_mul
    from swiglu_bench.cases.fp8 import quantise
    from swiglu_bench.contenders import fp8_linear

    precision, experts = problem.case.precision, problem.case.shape.experts
    multiply = fp8_linear.scaled_mm(precision) if package == "torch" else fp8_linear.deep_gemm
    own, to_canonical = joined(problem)
    names = [("x", "w_gate_up", "d_gate_up"), ("h", "w_down", "upstream")][: len(own)]
    how = precision, fp8_linear.scaled_grouped_mm if experts else multiply, quantised_dw and not experts
    layers = [fp8_linear.ScaledLinear(*of, *how, experts.top_k if experts else 0) for of in names]
    weights = [own[layer.weight] for layer in layers]
    current = fp8_linear.operands(weights, lambda number, weight: quantise(weight, precision, layers[number].weight))

    def block(ways: Sequence[Callable[..., Tensor]], x: Tensor, given: Sequence[Any], *sorting: Tensor) -> Tensor:
        hidden = silu_mul(*ways[0](x, given[0], *sorting).chunk(2, dim=-1))
        return ways[1](hidden, given[1], *sorting) if len(given) > 1 else hidden

    def whole(ways: Sequence[Callable[..., Tensor]], rows: Sequence[Tensor], given: Sequence[Any]) -> Tensor:
        if not experts:
            return block(ways, rows[0], given)
        x, index, routing_weights = rows
        _, order, ends = sorted_by_expert(index, experts.count)
        return summed(block(ways, x[order // experts.top_k], given, ends, order), order, routing_weights)

    def train(rows: Sequence[Tensor], given: Sequence[Tensor]) -> Tensor:
        return whole([layer.train for layer in layers], rows, given)

    def infer(rows: Sequence[Tensor], given: Sequence[Quantised]) -> Tensor:
        return whole([layer.infer for layer in layers], rows, given)

    ways: list[Callable[..., Tensor]] = [train, infer]
    if compiled:
        ways = [torch.compile(way, fullgraph=True, dynamic=False) for way in ways]

    def forward(*activations: Tensor) -> Tensor:
        rows = [value.flatten(0, -2) for value in activations]
        found = ways[0 if torch.is_grad_enabled() else 1](rows, current())
        return found.unflatten(0, activations[0].shape[:-1])

    def hand_over(into: dict[str, Quantised] | None) -> None:
        for layer in layers:
            layer.watched = into

    return Step(forward, own, to_canonical, None if compiled else hand_over)


def _scaled(name: str, description: str, **fields: Any) -> tuple[Implementation, Implementation]:
    """A row of `by_products`, and the same under torch.compile."""
    declare = partial(_row, weight_layout="packed", multiple=16, **fields)
    plain = declare(name, description=description)(by_products)
    under = declare(f"{name}-compile", description=f"{name} under torch.compile", backend="inductor")
    return plain, under(partial(by_products, compiled=True))


_SCALED = "torch._scaled_mm, gate and up at once: quantised by plain PyTorch"
scaled_mm, scaled_mm_compiled = _scaled("scaled-mm", _SCALED, precisions=(TENSORWISE, ROWWISE))
scaled_mm_blocks, scaled_mm_blocks_compiled = _scaled(
    "scaled-mm-blocks", f"{_SCALED}; blocks, which torch multiplies on Hopper", precisions=(BLOCKWISE,), gpus=(9,)
)
scaled_grouped, scaled_grouped_compiled = _scaled(
    "scaled-grouped",
    "torch._scaled_grouped_mm: quantised by plain PyTorch; sort, gather, weighted sum as in grouped; dW in bf16",
    scopes=(Scope.EXPERTS,), precisions=(ROWWISE,), gpus=(9,),
)  # fmt: skip
_BY_BLOCKS = "DeepGEMM's fp8 products: quantised by plain PyTorch; gradients of weights are torch's bf16 products"
_DEEP_GEMM: dict[str, Any] = {"package": "deep_gemm", "gpus": (9, 10), "multiple": 128, "quantises_dw": False}
deep_gemm = _row(
    "deep-gemm-fp8", description=_BY_BLOCKS, precisions=(BLOCKWISE,), weight_layout="packed", **_DEEP_GEMM
)(partial(by_products, package="deep_gemm", quantised_dw=False))


@_row(
    "fp8-reference", scopes=(*SCOPES, Scope.EXPERTS), precisions=(TENSORWISE, ROWWISE, BLOCKWISE),
    description="the definition in plain PyTorch: quantised and dequantised, multiplied in fp32; slow",
    quantises_weights_before=False, on_request=True,
)  # fmt: skip
def reference(problem: Problem) -> Step:
    """What results are judged by, for any machine."""
    from swiglu_bench.cases.fp8 import defined

    return defined(problem)


def _linears(problem: Problem, make: Callable[[int, int], Module]) -> tuple[ModuleDict, Callable[[Tensor], Tensor]]:
    """A layer for each weight, over the same memory, and the block by these layers."""
    import torch

    from swiglu_bench.cases.definition import silu_mul

    layers = torch.nn.ModuleDict()
    for name, weight in problem.weights.items():
        layers[name] = make(weight.shape[1], weight.shape[0])
        layers[name].weight = torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)

    def forward(x: Tensor) -> Tensor:
        hidden = silu_mul(layers["w_gate"](x), layers["w_up"](x))
        return layers["w_down"](hidden) if "w_down" in layers else hidden

    return layers, forward


def _weights_of(layers: ModuleDict) -> dict[str, Tensor]:
    return {name: layer.get_parameter("weight") for name, layer in layers.items()}


@_row(
    "torchao-float8", precisions=(TENSORWISE, ROWWISE),
    description="torchao's float8 training, compiled: three nn.Linear by convert_to_float8_training, e4m3 throughout",
    backend="inductor", package="torchao", multiple=16, quantises_weights_before=False,
    usage="from torchao.float8 import convert_to_float8_training; convert_to_float8_training(model)",
)  # fmt: skip
def torchao_float8(problem: Problem) -> Step:
    """Its recipes, but for gradients in e5m2 (tensorwise) and scales rounded to powers of two (rowwise)."""
    import torch
    from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

    recipe = str(problem.case.precision).removeprefix("fp8-")
    changes: dict[str, object] = {"round_scales_to_power_of_2": False}
    if problem.case.precision is TENSORWISE:
        changes = {"cast_config_grad_output": CastConfig(target_dtype=torch.float8_e4m3fn)}
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **changes)
    layers, forward = _linears(problem, partial(torch.nn.Linear, bias=False, device="meta"))
    convert_to_float8_training(layers, config=config)
    return Step(torch.compile(forward, fullgraph=True, dynamic=False), _weights_of(layers))


@_row(
    "transformer-engine", precisions=(TENSORWISE, BLOCKWISE),
    description="three te.Linear under fp8_autocast: Float8CurrentScaling and Float8BlockScaling, e4m3",
    package="transformer_engine", imports="transformer_engine.pytorch", gpus=(9, 10, 12), multiple=128,
    quantises_weights_before=False,
    usage="from transformer_engine.pytorch import Linear  # in place of nn.Linear, called under fp8_autocast",
)  # fmt: skip
def transformer_engine(problem: Problem) -> Step:
    """Scales of blocks are fp32, not rounded to powers of two."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    if problem.case.precision is BLOCKWISE:
        exact = recipe.QParams(power_2_scale=False, amax_epsilon=0.0)
        names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
        chosen = recipe.Float8BlockScaling(**dict.fromkeys(names, exact))
    else:
        chosen = recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3)
    dtype = problem.weights["w_gate"].dtype
    layers, block = _linears(problem, partial(te.Linear, bias=False, params_dtype=dtype, device=problem.device))

    def forward(x: Tensor) -> Tensor:
        with te.fp8_autocast(enabled=True, fp8_recipe=chosen):
            return block(x)

    return Step(forward, _weights_of(layers))


def _build_fused(problem: Problem, weight_grad: str, keeps: bool) -> Step:
    from swiglu_bench.contenders.fp8_linear import operands
    from swiglu_kernels.ops.fp8.kept_codes import KeptCodes
    from swiglu_kernels.ops.fp8.operation import hand_over, quantise, swiglu_mlp_fp8

    kept = KeptCodes() if keeps else None
    recipe = str(problem.case.precision).removeprefix("fp8-")
    given = operands(list(problem.weights.values()), lambda _, weight: quantise(weight, recipe, weight=True))

    def forward(x: Tensor) -> Tensor:
        w_gate, w_up, w_down = (*given(), None)[:3]
        return swiglu_mlp_fp8(x, w_gate, w_up, w_down, recipe=recipe, weight_grad=weight_grad, kept=kept)

    return Step(forward, hand_over=hand_over)


def _fused(name: str, weight_grad: str, description: str, keeps: bool = False) -> Implementation:
    call = f"swiglu_mlp_fp8(x, w_gate, w_up, w_down, recipe='rowwise', weight_grad={weight_grad!r}"
    call += ", kept=kept)  # a KeptCodes() for each layer" if keeps else ")"
    return _row(
        name, precisions=(ROWWISE, BLOCKWISE), description=description, backend="triton", multiple=16,
        package="swiglu_kernels.ops.fp8.operation", variant=() if weight_grad == "fp8" else SCOPES,
        quantises_dw=weight_grad == "fp8", keeps_between_batches=keeps,
        usage=f"from swiglu_kernels import swiglu_mlp_fp8; out = {call}",
    )(partial(_build_fused, weight_grad=weight_grad, keeps=keeps))  # fmt: skip


fused = _fused("fused-fp8", "fp8", "swiglu_glu_fp8 or swiglu_mlp_fp8: one Triton launch for gate, up and SwiGLU")
fused_kept = _fused(
    "fused-fp8-kept", "fp8", "fused-fp8, with weights quantised once for all micro-batches of a step", True
)
fused_dw_torch = _fused("fused-fp8-dw-torch", "torch", "fused-fp8, weight gradients in bf16: by torch's products")


@_row(
    "fused-fp8-experts", scopes=(Scope.EXPERTS,), precisions=(ROWWISE,),
    description="swiglu_experts with fp8 products: those of the forward; the backward's are in bf16",
    weight_layout="packed", backend="triton", package="swiglu_kernels.ops.experts.fp8_experts", multiple=16,
    quantises_dx=False, quantises_dw=False,
    usage="from swiglu_kernels import swiglu_experts; "
    "out = swiglu_experts(x, w_gate_up, w_down, top_k_index, top_k_weights, precision='fp8-rowwise')",
)  # fmt: skip
def fused_experts(problem: Problem) -> Step:
    """Weights are quantised before an inference forward, as `FusedSwiGLUExperts.keep_codes` has it."""
    from swiglu_bench.contenders.fp8_linear import operands
    from swiglu_kernels import swiglu_experts
    from swiglu_kernels.ops.fp8.operation import hand_over, quantise

    own, to_canonical = joined(problem)
    given = operands([own["w_gate_up"], own["w_down"]], lambda _, weight: quantise(weight, "rowwise", weight=True))

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        w_gate_up, w_down = given()
        return swiglu_experts(x, w_gate_up, w_down, index, weights, precision=str(problem.case.precision))

    return Step(forward, own, to_canonical, hand_over)


_never: Any = partial(_row, scopes=(Scope.EXPERTS,), precisions=(ROWWISE,), on_request=True)
ABSENT = tuple(
    _never(f"{name}-grouped", description=f"fp8 grouped products of {name}: never run", absent=why)(reference.build)
    for name, why in (
        ("torchao", "torchao 0.18 rounds its scales to powers of two, which is another recipe."),
        ("transformer-engine", "The part of transformer-engine 2.20 for PyTorch is published as source only."),
    )
)
ROWS = (
    fused, fused_kept, fused_dw_torch, scaled_mm, scaled_mm_compiled, scaled_mm_blocks, scaled_mm_blocks_compiled,
    deep_gemm, torchao_float8, transformer_engine, reference, fused_experts, scaled_grouped, scaled_grouped_compiled,
    *ABSENT,
)  # fmt: skip
