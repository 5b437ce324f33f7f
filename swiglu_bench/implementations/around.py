"""An elementwise `silu_mul(gate, up)` put into each scope: alone, behind two projections, or in the whole MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swiglu_bench.cases import Scope
from swiglu_bench.registry import Step

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.problem import Problem


def around(problem: Problem, silu_mul: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """The Step that runs `silu_mul` with the products of the problem's scope done by torch's linear."""
    from torch.nn.functional import linear

    weights = problem.weights
    match problem.case.scope:
        case Scope.ACTIVATION:
            return Step(silu_mul)
        case Scope.GLU:
            return Step(lambda x: silu_mul(linear(x, weights["w_gate"]), linear(x, weights["w_up"])))
        case Scope.MLP:
            return Step(
                lambda x: linear(silu_mul(linear(x, weights["w_gate"]), linear(x, weights["w_up"])), weights["w_down"])
            )


def packed(problem: Problem, silu_mul_packed: Callable[[Tensor], Tensor]) -> Step:
    """The same with gate and up as one product by a [2 * intermediate, hidden] weight of the Step's own."""
    import torch
    from torch.nn.functional import linear

    own = dict(problem.weights)
    w_gate, w_up = own.pop("w_gate"), own.pop("w_up")
    own["w_gate_up"] = torch.cat([w_gate, w_up]).detach().requires_grad_(w_gate.requires_grad)

    def forward(x: Tensor) -> Tensor:
        hidden = silu_mul_packed(linear(x, own["w_gate_up"]))
        return linear(hidden, own["w_down"]) if "w_down" in own else hidden

    def to_canonical(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        d_gate, d_up = gradients.pop("w_gate_up").chunk(2)
        return {**gradients, "w_gate": d_gate, "w_up": d_up}

    return Step(forward, own, to_canonical)
