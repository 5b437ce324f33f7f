"""PyTorch by itself: eager and torch.compile, with separate projections and with one packed product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiglu_bench.cases import Scope
from swiglu_bench.costs import Footprint
from swiglu_bench.implementations.around import around, packed
from swiglu_bench.registry import Step, implementation

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.problem import Problem


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    from swiglu_kernels import reference

    return reference.silu_mul(gate, up)


def _silu_mul_packed(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _silu_mul(gate, up)


def _compile(step: Step) -> Step:
    """The Step with its forward compiled for its static shape; a graph break is an error, not a slow path."""
    import torch

    step.forward = torch.compile(step.forward, fullgraph=True, dynamic=False)
    return step


@implementation(
    "eager",
    scopes=Scope,
    description="two nn.Linear, F.silu and a product, each its own kernel",
    footprints={
        Scope.ACTIVATION: Footprint(saved=1, phases=((4, 0, 0),)),
        Scope.GLU: Footprint(saved=3, phases=((6, 0, 0), (4, 1, 1), (2, 2, 2))),
        Scope.MLP: Footprint(saved=4, phases=((5, 1, 1), (6, 1, 1), (3, 2, 2), (1, 3, 3))),
    },
)
def eager(problem: Problem) -> Step:
    """The definition of SwiGLU as models write it."""
    return around(problem, _silu_mul)


@implementation(
    "eager-packed",
    scopes=(Scope.GLU, Scope.MLP),
    description="one nn.Linear for gate and up, chunk, F.silu and a product",
    weight_layout="packed",
    footprints={
        Scope.GLU: Footprint(saved=3, phases=((6, 0, 0), (5, 0, 0), (3, 1, 2))),
        Scope.MLP: Footprint(saved=4, phases=((5, 1, 1), (6, 1, 1), (2, 2, 3))),
    },
)
def eager_packed(problem: Problem) -> Step:
    """As Phi-3 and vLLM lay out their weights."""
    return packed(problem, _silu_mul_packed)


@implementation(
    "compile",
    scopes=Scope,
    description="eager under torch.compile (Inductor, fullgraph, static shapes)",
    backend="inductor",
    footprints={
        Scope.ACTIVATION: Footprint(saved=0, phases=((3, 0, 0),)),
        Scope.GLU: Footprint(saved=2, phases=((4, 0, 0), (3, 1, 1), (2, 1, 2))),
        Scope.MLP: Footprint(saved=3, phases=((4, 1, 1), (2, 1, 2), (1, 2, 3))),
    },
)
def compiled(problem: Problem) -> Step:
    """torch.compile's default mode."""
    return _compile(around(problem, _silu_mul))


@implementation(
    "compile-packed",
    scopes=(Scope.GLU, Scope.MLP),
    description="eager-packed under torch.compile (Inductor, fullgraph, static shapes)",
    weight_layout="packed",
    backend="inductor",
    footprints={
        Scope.GLU: Footprint(saved=2, phases=((5, 0, 0), (3, 1, 2))),
        Scope.MLP: Footprint(saved=3, phases=((5, 1, 1), (2, 2, 3))),
    },
)
def compiled_packed(problem: Problem) -> Step:
    """torch.compile's default mode over one packed product."""
    return _compile(packed(problem, _silu_mul_packed))
