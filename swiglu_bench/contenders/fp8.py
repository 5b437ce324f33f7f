"""fp8 by swiglu_kernels, torch._scaled_mm, torchao, DeepGEMM and TransformerEngine, each by its own functions.

Each quantises to the recipe of the case. Those that multiply codes of the suite's quantiser hand these over. The others
quantise inside, and torch.compile rounds a division otherwise: they are judged by results.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from swiglu_bench.cases.cases import Dtype, Precision, Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import ModuleDict

    from swiglu_bench.cases.fp8 import Quantised
    from swiglu_bench.cases.problem import Problem

SCOPES, DTYPES = (Scope.GLU, Scope.MLP), (Dtype.BFLOAT16,)
TENSORWISE, ROWWISE, BLOCKWISE = (precision for precision in Precision if precision)


def by_products(problem: Problem, *, package: str = "torch", compiled: bool = False, quantised_dw: bool = True) -> Step:
    """One product for gate and up, silu and multiplication by torch, and in the mlp scope a product with w_down."""
    import torch

    from swiglu_bench.cases.definition import silu_mul
    from swiglu_bench.cases.fp8 import quantise
    from swiglu_bench.contenders.around import packed
    from swiglu_bench.contenders.fp8_linear import QuantisedWeight, ScaledLinear, deep_gemm, in_both_ways, scaled_mm

    precision = problem.case.precision
    multiply = scaled_mm(precision) if package == "torch" else deep_gemm
    step = packed(problem, lambda x, w_gate_up, bias: x)
    assert step.parameters
    names = {"w_gate_up": ("x", "d_gate_up"), "w_down": ("h", "upstream")}
    layers = [
        ScaledLinear(names[name][0], name, names[name][1], precision, multiply, quantised_dw)
        for name in step.parameters
    ]
    layers.sort(key=lambda layer: layer.weight, reverse=True)  # w_gate_up, w_down
    weights = [step.parameters[layer.weight] for layer in layers]
    kept = [
        QuantisedWeight(weight, partial(quantise, precision=precision, name=layer.weight))
        for weight, layer in zip(weights, layers, strict=True)
    ]

    def train(x: Tensor, *given: Tensor) -> Tensor:
        hidden = silu_mul(*layers[0].train(x, given[0]).chunk(2, dim=-1))
        return layers[1].train(hidden, given[1]) if len(given) > 1 else hidden

    def infer(x: Tensor, *given: Quantised) -> Tensor:
        hidden = silu_mul(*layers[0].infer(x, given[0]).chunk(2, dim=-1))
        return layers[1].infer(hidden, given[1]) if len(given) > 1 else hidden

    ways = in_both_ways(train, infer, compiled)

    def forward(x: Tensor) -> Tensor:
        return ways[0](x, *weights) if torch.is_grad_enabled() else ways[1](x, *(codes() for codes in kept))

    def hand_over(into: dict[str, Quantised] | None) -> None:
        for layer in layers:
            layer.watched = into

    return dataclasses.replace(step, forward=forward, hand_over=None if compiled else hand_over)


def _scaled(name: str, description: str, compiled: bool, **fields: object) -> Implementation:
    declare = implementation(
        name, scopes=SCOPES, dtypes=DTYPES, description=description, weight_layout="packed", multiple=16,
        backend="inductor" if compiled else "torch", **fields,
    )  # fmt: skip
    return declare(partial(by_products, compiled=compiled))


_SCALED = "torch._scaled_mm, gate and up at once: quantised by plain PyTorch"
scaled_mm = _scaled("scaled-mm", _SCALED, False, precisions=(TENSORWISE, ROWWISE))
scaled_mm_compiled = _scaled(
    "scaled-mm-compile", "scaled-mm under torch.compile", True, precisions=(TENSORWISE, ROWWISE)
)
scaled_mm_blocks = _scaled(
    "scaled-mm-blocks",
    f"{_SCALED}; blocks, which torch multiplies on Hopper",
    False,
    precisions=(BLOCKWISE,),
    gpus=(9,),
)
scaled_mm_blocks_compiled = _scaled(
    "scaled-mm-blocks-compile", "scaled-mm-blocks under torch.compile", True, precisions=(BLOCKWISE,), gpus=(9,)
)
deep_gemm = implementation(
    "deep-gemm-fp8", scopes=SCOPES, dtypes=DTYPES, precisions=(BLOCKWISE,), weight_layout="packed", multiple=128,
    description="DeepGEMM's fp8 products: quantised by plain PyTorch; gradients of weights are torch's bf16 products",
    package="deep_gemm", gpus=(9, 10), quantises_dw=False,
)(partial(by_products, package="deep_gemm", quantised_dw=False))  # fmt: skip


@implementation(
    "fp8-reference",
    scopes=(*SCOPES, Scope.EXPERTS),
    dtypes=DTYPES,
    precisions=(TENSORWISE, ROWWISE, BLOCKWISE),
    description="the definition in plain PyTorch: quantised and dequantised, multiplied in fp32; slow",
    quantises_weights_before=False,
    on_request=True,
)
def reference(problem: Problem) -> Step:
    """What results are judged by, for any machine."""
    from swiglu_bench.cases.fp8 import defined

    return defined(problem)


def _through(layers: ModuleDict, x: Tensor) -> Tensor:
    from swiglu_bench.cases.definition import silu_mul

    hidden = silu_mul(layers["w_gate"](x), layers["w_up"](x))
    out: Tensor = layers["w_down"](hidden) if "w_down" in layers else hidden
    return out


def _weights_of(layers: ModuleDict) -> dict[str, Tensor]:
    return {name: layer.get_parameter("weight") for name, layer in layers.items()}


@implementation(
    "torchao-float8",
    scopes=SCOPES,
    dtypes=DTYPES,
    precisions=(TENSORWISE, ROWWISE),
    description="torchao's float8 training, compiled: three nn.Linear by convert_to_float8_training, e4m3 throughout",
    backend="inductor",
    package="torchao",
    multiple=16,
    quantises_weights_before=False,
    usage="from torchao.float8 import convert_to_float8_training; convert_to_float8_training(model)",
)
def torchao_float8(problem: Problem) -> Step:
    """Its recipes, but for gradients in e5m2 (tensorwise) and scales rounded to powers of two (rowwise)."""
    import torch
    from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

    recipe = str(problem.case.precision).removeprefix("fp8-")
    changes: dict[str, object] = {"round_scales_to_power_of_2": False}
    if problem.case.precision is TENSORWISE:
        changes = {"cast_config_grad_output": CastConfig(target_dtype=torch.float8_e4m3fn)}
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **changes)
    layers = torch.nn.ModuleDict()
    for name, weight in problem.weights.items():
        layers[name] = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layers[name].weight = torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    convert_to_float8_training(layers, config=config)

    def forward(x: Tensor) -> Tensor:
        return _through(layers, x)

    return Step(torch.compile(forward, fullgraph=True, dynamic=False), _weights_of(layers))


@implementation(
    "transformer-engine",
    scopes=SCOPES,
    dtypes=DTYPES,
    precisions=(TENSORWISE, BLOCKWISE),
    description="three te.Linear under fp8_autocast: Float8CurrentScaling and Float8BlockScaling, e4m3",
    package="transformer_engine",
    imports="transformer_engine.pytorch",
    gpus=(9, 10, 12),
    multiple=128,
    quantises_weights_before=False,
    usage="from transformer_engine.pytorch import Linear  # in place of nn.Linear, called under fp8_autocast",
)
def transformer_engine(problem: Problem) -> Step:
    """Scales of blocks are fp32, not rounded to powers of two."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    if problem.case.precision is BLOCKWISE:
        exact = recipe.QParams(power_2_scale=False, amax_epsilon=0.0)
        names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
        chosen = recipe.Float8BlockScaling(**dict.fromkeys(names, exact))
    else:
        chosen = recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3)
    layers = torch.nn.ModuleDict()
    for name, weight in problem.weights.items():
        layers[name] = te.Linear(
            weight.shape[1], weight.shape[0], bias=False, params_dtype=weight.dtype, device=weight.device
        )
        layers[name].weight = torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)

    def forward(x: Tensor) -> Tensor:
        with te.fp8_autocast(enabled=True, fp8_recipe=chosen):
            return _through(layers, x)

    return Step(forward, _weights_of(layers))


def _build_fused(problem: Problem, weight_grad: str) -> Step:
    import torch

    from swiglu_bench.contenders.fp8_linear import QuantisedWeight
    from swiglu_kernels.ops.fp8.operation import hand_over, quantise, swiglu_mlp_fp8

    recipe = str(problem.case.precision).removeprefix("fp8-")
    weights = list(problem.weights.values())
    kept = [QuantisedWeight(weight, partial(quantise, recipe=recipe, weight=True)) for weight in weights]

    def forward(x: Tensor) -> Tensor:
        given = weights if torch.is_grad_enabled() else [codes() for codes in kept]
        w_gate, w_up, w_down = (*given, None)[:3]
        return swiglu_mlp_fp8(x, w_gate, w_up, w_down, recipe=recipe, weight_grad=weight_grad)

    return Step(forward, hand_over=hand_over)


def _fused(name: str, weight_grad: str, description: str) -> Implementation:
    call = f"swiglu_mlp_fp8(x, w_gate, w_up, w_down, recipe='rowwise', weight_grad={weight_grad!r})"
    declare = implementation(
        name, scopes=SCOPES, dtypes=DTYPES, precisions=(ROWWISE, BLOCKWISE), description=description, backend="triton",
        package="swiglu_kernels.ops.fp8.operation", multiple=16, variant=() if weight_grad == "fp8" else SCOPES,
        quantises_dw=weight_grad == "fp8",
        usage=f"from swiglu_kernels import swiglu_mlp_fp8; out = {call}",
    )  # fmt: skip
    return declare(partial(_build_fused, weight_grad=weight_grad))


fused = _fused("fused-fp8", "fp8", "swiglu_glu_fp8 or swiglu_mlp_fp8: one Triton launch for gate, up and SwiGLU")
fused_dw_torch = _fused("fused-fp8-dw-torch", "torch", "fused-fp8, weight gradients in bf16: by torch's products")

ROWS = (
    fused, fused_dw_torch,
    scaled_mm, scaled_mm_compiled, scaled_mm_blocks, scaled_mm_blocks_compiled, deep_gemm, torchao_float8,
    transformer_engine, reference,
)  # fmt: skip
