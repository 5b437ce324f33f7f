"""The real liger-kernel: its fused SiLU-mul between torch's products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiglu_bench.implementations.around import around
from swiglu_bench.spec.cases import Scope
from swiglu_bench.spec.costs import Footprint
from swiglu_bench.spec.implementation import Step, implementation

if TYPE_CHECKING:
    from swiglu_bench.spec.problem import Problem


@implementation(
    "liger",
    scopes=Scope,
    description="liger-kernel's LigerSiLUMulFunction between two nn.Linear",
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
