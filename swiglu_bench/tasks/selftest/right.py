"""Right implementations that look like cheats: none of them may be refused."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from swiglu_bench.cases.cases import Scope
from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.contenders import pytorch

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.cases.problem import Problem

TIMES = 4


@implementation(
    "slow", scopes=Scope, description=f"eager, whose forward runs {TIMES} times in each call", offers=("bias", "limit")
)
def slow(problem: Problem) -> Step:
    """Its turns take much longer than eager's: so do its samples."""
    step = pytorch.eager.build(problem)

    def forward(*given: Tensor) -> Tensor:
        for _ in range(TIMES - 1):
            step.forward(*given)
        return step.forward(*given)

    return dataclasses.replace(step, forward=forward)
