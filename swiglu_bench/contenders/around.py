"""How an implementation of one part is completed to the scope of a problem with torch's own products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swiglu_bench.cases.cases import Scope
from swiglu_bench.cases.implementation import Step, taken_apart

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.cases.problem import Problem

    Gradients = dict[str, Tensor]


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


def joined(problem: Problem, interleaved: bool = False) -> tuple[Gradients, Callable[[Gradients], Gradients]]:
    """The parameters with an own copy of gate and up, and what splits the gradients again.

    `w_gate_up` is [2 * intermediate, hidden], of experts [experts, ...]: the gate's rows first or, interleaved, in turn
    with up's. `bias_gate_up` likewise.
    """
    import torch

    own = problem.parameters
    trains = own["w_gate"].requires_grad
    dim = 1 if problem.case.scope is Scope.EXPERTS else 0
    for kind in ("w", "bias") if problem.biases else ("w",):
        pair = [own.pop(f"{kind}_{name}").detach() for name in ("gate", "up")]
        both = torch.stack(pair, dim + 1).flatten(dim, dim + 1) if interleaved else torch.cat(pair, dim)
        own[f"{kind}_gate_up"] = both.requires_grad_(trains)
    return own, taken_apart("interleaved" if interleaved else "packed", dim == 1)


def packed(problem: Problem, glu: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Step:
    """The Step of `glu(x, w_gate_up, bias_gate_up)`, the gate's rows first."""
    from torch.nn.functional import linear

    own, to_canonical = joined(problem)

    def forward(x: Tensor) -> Tensor:
        hidden = glu(x, own["w_gate_up"], own.get("bias_gate_up"))
        return linear(hidden, own["w_down"], own.get("bias_down")) if "w_down" in own else hidden

    return Step(forward, own, to_canonical)


def under_compile(step: Step, mode: str | None = None) -> Step:
    """The Step with its forward compiled for its static shape; a graph break is an error, not a slow path."""
    import torch

    step.forward = torch.compile(step.forward, fullgraph=True, dynamic=False, mode=mode)
    return step
