"""Unsloth-style elementwise kernels (our own, to Unsloth's documented contracts) between torch's products."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from swiglu_bench.cases.cases import DENSE, Scope
from swiglu_bench.cases.costs import Footprint
from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.contenders.around import around

if TYPE_CHECKING:
    from swiglu_bench.cases.problem import Problem


@implementation(
    "unsloth",
    scopes=DENSE,
    description="Unsloth-style SiLU-mul: one pass forward, one in-place pass backward, between two nn.Linear",
    usage="from swiglu_kernels import unsloth_silu_mul; h = unsloth_silu_mul(gate, up, overwrite=True)",
    backend="triton",
    imports="swiglu_kernels",
    offers=("bias",),
    overwrites=("gate", "up"),
    footprints={
        Scope.ACTIVATION: Footprint(saved=0, phases=((2, 0, 0),)),
        Scope.GLU: Footprint(saved=2, phases=((4, 0, 0), (3, 1, 1), (2, 2, 2))),
        Scope.MLP: Footprint(saved=3, phases=((4, 1, 1), (2, 2, 2), (1, 3, 3))),
    },
)
def unsloth(problem: Problem) -> Step:
    """Its backward overwrites gate and up."""
    from swiglu_kernels import unsloth_silu_mul

    return around(problem, partial(unsloth_silu_mul, overwrite=True))
