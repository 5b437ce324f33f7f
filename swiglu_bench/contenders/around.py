"""How an implementation of one part is completed to the scope of a problem with torch's own products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swiglu_bench.cases.cases import Scope
from swiglu_bench.cases.implementation import Step

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.cases.problem import Problem


def around(problem: Problem, silu_mul: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """The Step that runs an elementwise `silu_mul(gate, up)` with the products of the problem's scope done by torch."""
    from torch.nn.functional import linear

    weights = problem.weights
    # Looked up here: torch.compile traces what is below, and not every version supports a dictionary's bound method.
    bias_gate, bias_up, bias_down = (problem.biases.get(f"bias_{name}") for name in ("gate", "up", "down"))

    def hidden(x: Tensor) -> Tensor:
        return silu_mul(linear(x, weights["w_gate"], bias_gate), linear(x, weights["w_up"], bias_up))

    match problem.case.scope:
        case Scope.ACTIVATION:
            return Step(silu_mul)
        case Scope.GLU:
            return Step(hidden)
        case _:
            return Step(lambda x: linear(hidden(x), weights["w_down"], bias_down))


def packed(problem: Problem, glu: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Step:
    """The Step of `glu(x, w_gate_up, bias_gate_up)` with its own [2 * intermediate, hidden] copy of gate and up."""
    import torch
    from torch.nn.functional import linear

    own = problem.parameters
    trains = own["w_gate"].requires_grad
    kinds = ("w", "bias") if problem.biases else ("w",)
    for kind in kinds:
        joined = torch.cat([own.pop(f"{kind}_gate"), own.pop(f"{kind}_up")]).detach()
        own[f"{kind}_gate_up"] = joined.requires_grad_(trains)

    def forward(x: Tensor) -> Tensor:
        hidden = glu(x, own["w_gate_up"], own.get("bias_gate_up"))
        return linear(hidden, own["w_down"], own.get("bias_down")) if "w_down" in own else hidden

    def to_canonical(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        for kind in kinds:
            if f"{kind}_gate_up" in gradients:
                gradients[f"{kind}_gate"], gradients[f"{kind}_up"] = gradients.pop(f"{kind}_gate_up").chunk(2)
        return gradients

    return Step(forward, own, to_canonical)
