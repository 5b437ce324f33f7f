"""The fused kernels of swiglu_kernels: one launch for both projections and the gate.

Rows differ in what backward does: whether weights get gradients, who computes them, and whether gate and up were kept
(`-preact`) or are computed again from x.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from swiglu_bench.cases import Scope
from swiglu_bench.costs import Footprint
from swiglu_bench.registry import Implementation, Step, Trains, implementation

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.problem import Problem


def _build(problem: Problem, *, weight_grad: str, save: str, input_grad: str = "two_step") -> Step:
    from torch.nn.functional import linear

    from swiglu_kernels import swiglu_glu

    weights = problem.weights

    def glu(x: Tensor) -> Tensor:
        return swiglu_glu(
            x, weights["w_gate"], weights["w_up"], weight_grad=weight_grad, save=save, input_grad=input_grad
        )

    return Step(glu if problem.case.scope is Scope.GLU else lambda x: linear(glu(x), weights["w_down"]))


def _row(
    name: str,
    description: str,
    *,
    weight_grad: Literal["none", "torch", "triton"],
    save: Literal["input", "preact"],
    glu: Footprint,
    mlp: Footprint,
) -> Implementation:
    trains: Trains = "inputs" if weight_grad == "none" else "everything"
    declare = implementation(
        name,
        scopes=(Scope.GLU, Scope.MLP),
        description=description,
        backend="triton",
        trains=trains,
        footprints={Scope.GLU: glu, Scope.MLP: mlp},
    )
    return declare(partial(_build, weight_grad=weight_grad, save=save))


fused = _row(
    "fused",
    "one Triton launch from x to z; backward computes gate and up again and yields dX only (frozen weights)",
    weight_grad="none",
    save="input",
    glu=Footprint(saved=0, phases=((3, 1, 0),)),
    mlp=Footprint(saved=0, phases=((3, 2, 0),)),
)
fused_dw_torch = _row(
    "fused-dw-torch",
    "fused, with weight gradients by torch products",
    weight_grad="torch",
    save="input",
    glu=Footprint(saved=0, phases=((3, 1, 2),)),
    mlp=Footprint(saved=1, phases=((3, 2, 3), (2, 1, 1))),
)
fused_dw_triton = _row(
    "fused-dw-triton",
    "fused, with weight gradients by one Triton launch",
    weight_grad="triton",
    save="input",
    glu=Footprint(saved=0, phases=((3, 1, 2),)),
    mlp=Footprint(saved=1, phases=((3, 2, 3), (2, 1, 1))),
)
fused_preact = _row(
    "fused-preact",
    "as fused, but the forward launch also stores gate and up for backward",
    weight_grad="none",
    save="preact",
    glu=Footprint(saved=2, phases=((5, 1, 0),)),
    mlp=Footprint(saved=2, phases=((5, 2, 0),)),
)
fused_dw_torch_preact = _row(
    "fused-dw-torch-preact",
    "fused-preact, with weight gradients by torch products",
    weight_grad="torch",
    save="preact",
    glu=Footprint(saved=2, phases=((5, 1, 2),)),
    mlp=Footprint(saved=3, phases=((5, 2, 3),)),
)
fused_dw_triton_preact = _row(
    "fused-dw-triton-preact",
    "fused-preact, with weight gradients by one Triton launch",
    weight_grad="triton",
    save="preact",
    glu=Footprint(saved=2, phases=((5, 1, 2),)),
    mlp=Footprint(saved=3, phases=((5, 2, 3),)),
)
