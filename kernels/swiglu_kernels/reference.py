"""The definitions of all operations, in plain PyTorch; each operation's folder has its own."""

from swiglu_kernels.ops.experts.definition import swiglu_experts
from swiglu_kernels.ops.fp8.definition import RECIPES, dequantise, quantise, swiglu_mlp_fp8
from swiglu_kernels.ops.gate.definition import gate_mul, silu_mul
from swiglu_kernels.ops.glu.definition import split_packed, swiglu_glu, swiglu_glu_packed
from swiglu_kernels.ops.mlp.definition import swiglu_mlp

__all__ = [
    "RECIPES", "dequantise", "gate_mul", "quantise", "silu_mul", "split_packed", "swiglu_experts", "swiglu_glu",
    "swiglu_glu_packed", "swiglu_mlp", "swiglu_mlp_fp8",
]  # fmt: skip
