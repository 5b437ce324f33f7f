"""The real liger-kernel: its SiLU-mul between torch's products, and its fused MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiglu_bench.cases.cases import DENSE, Scope
from swiglu_bench.cases.costs import Footprint
from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.contenders.around import around

if TYPE_CHECKING:
    from swiglu_bench.cases.problem import Problem


@implementation(
    "liger",
    scopes=DENSE,
    description="liger-kernel's SiLU-mul: LigerSiLUMulFunction between two nn.Linear",
    usage="from liger_kernel.ops.swiglu import LigerSiLUMulFunction; h = LigerSiLUMulFunction.apply(gate, up)",
    backend="triton",
    package="liger_kernel",
    imports="liger_kernel.ops.swiglu",
    offers=("bias",),
    overwrites=("gate", "up"),
    interpretable="liger-kernel passes a float where Triton's interpreter needs a tensor; it runs on a GPU only.",
    footprints={
        Scope.ACTIVATION: Footprint(saved=0, phases=((1, 0, 0),)),
        Scope.GLU: Footprint(saved=2, phases=((3, 1, 1), (2, 2, 2))),
        Scope.MLP: Footprint(saved=3, phases=((4, 1, 1), (2, 2, 2), (1, 3, 3))),
    },
)
def liger(problem: Problem) -> Step:
    """As liger_kernel.transformers.LigerSwiGLUMLP calls it. Its backward overwrites gate and up."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return around(problem, LigerSiLUMulFunction.apply)


@implementation(
    "liger-mlp",
    scopes=(Scope.MLP,),
    description="liger-kernel's LigerMLPFunction: autotuned Triton kernels; w_down and the weight gradients by cuBLAS",
    usage="from liger_kernel.ops.mlp import LigerMLPFunction; "
    "out = LigerMLPFunction.apply(x, w_gate, w_up, w_down)  # x is [batch, tokens, hidden]",
    backend="triton",
    package="liger_kernel",
    imports="liger_kernel.ops.mlp",
    interpretable="liger-kernel's LigerMLPFunction takes CUDA tensors only; it runs on a GPU only.",
    multiple=8,  # rows must step by 16 bytes
    tf32=True,  # on an H100 output and gradients were 1.6e-3 to 2.3e-3 off, eager's 5e-7
    footprints={Scope.MLP: Footprint(saved=3, phases=((3, 2, 3),))},
)
def liger_mlp(problem: Problem) -> Step:
    """As liger_kernel.transformers.LigerMLP calls it. Its backward overwrites what it saved: no second one.

    It stores gate and up even under torch.no_grad as long as a weight requires a gradient, for it reads
    `ctx.needs_input_grad`.
    """
    from liger_kernel.ops.mlp import LigerMLPFunction

    weights = tuple(problem.weights[name] for name in ("w_gate", "w_up", "w_down"))
    return Step(lambda x: LigerMLPFunction.apply(x.unsqueeze(0), *weights).squeeze(0))
