"""PyTorch by itself: eager and torch.compile, with separate projections and with one packed product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from swiglu_bench.cases.cases import DENSE, Scope
from swiglu_bench.cases.costs import Footprint
from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.contenders import experts
from swiglu_bench.contenders.around import around, packed, under_compile

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.cases.problem import Problem


def _gate(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    from swiglu_bench.cases import definition

    limit = problem.extras.limit
    return definition.silu_mul if limit is None else partial(definition.gate_mul, limit=limit)


@implementation(
    "eager", scopes=Scope,
    description="nn.Linear, F.silu and a product: each its own kernel; experts in a loop",
    usage="h = F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)  # as models have it: nothing to change",
    offers=("bias", "limit", "other_ranks"),
    footprints={Scope.ACTIVATION: Footprint(saved=1, phases=((4, 0, 0),)),
                Scope.GLU: Footprint(saved=3, phases=((6, 0, 0), (4, 1, 1), (2, 2, 2))),
                Scope.MLP: Footprint(saved=4, phases=((5, 1, 1), (6, 1, 1), (3, 2, 2), (1, 3, 3)))},
)  # fmt: skip
def eager(problem: Problem) -> Step:
    """The definition of SwiGLU as models write it."""
    return experts.loop(problem) if problem.case.scope is Scope.EXPERTS else around(problem, _gate(problem))


@implementation(
    "eager-packed", scopes=(Scope.GLU, Scope.MLP),
    description="one nn.Linear for gate and up: chunk, F.silu and a product",
    usage="gate, up = F.linear(x, w_gate_up).chunk(2, dim=-1); h = F.silu(gate) * up",
    weight_layout="packed", offers=("bias", "limit", "packed"), variant=(Scope.MLP,),
    footprints={Scope.GLU: Footprint(saved=3, phases=((6, 0, 0), (5, 0, 0), (3, 1, 2))),
                Scope.MLP: Footprint(saved=4, phases=((5, 1, 1), (6, 1, 1), (2, 2, 3)))},
)  # fmt: skip
def eager_packed(problem: Problem) -> Step:
    """As Phi-3 and vLLM lay out their weights."""
    from torch.nn.functional import linear

    gate_mul = _gate(problem)

    def glu(x: Tensor, w_gate_up: Tensor, bias_gate_up: Tensor | None) -> Tensor:
        return gate_mul(*linear(x, w_gate_up, bias_gate_up).chunk(2, dim=-1))

    return packed(problem, glu)


@implementation(
    "compile", scopes=DENSE,
    description="eager under torch.compile (Inductor, fullgraph, static shapes)",
    usage="mlp = torch.compile(mlp, fullgraph=True, dynamic=False)",
    backend="inductor", offers=("bias", "limit"),
    footprints={Scope.ACTIVATION: Footprint(saved=0, phases=((3, 0, 0),)),
                Scope.GLU: Footprint(saved=2, phases=((4, 0, 0), (3, 1, 1), (2, 1, 2))),
                Scope.MLP: Footprint(saved=3, phases=((4, 1, 1), (2, 1, 2), (1, 2, 3)))},
)  # fmt: skip
def compiled(problem: Problem) -> Step:
    """torch.compile's default mode."""
    return under_compile(around(problem, _gate(problem)))


@implementation(
    "compile-packed", scopes=(Scope.GLU, Scope.MLP),
    description="eager-packed under torch.compile (Inductor, fullgraph, static shapes)",
    usage="mlp = torch.compile(mlp, fullgraph=True, dynamic=False)  # with one nn.Linear for gate and up",
    weight_layout="packed", offers=("bias", "limit", "packed"), backend="inductor",
    footprints={Scope.GLU: Footprint(saved=2, phases=((5, 0, 0), (3, 1, 2))),
                Scope.MLP: Footprint(saved=3, phases=((5, 1, 1), (2, 2, 3)))},
)  # fmt: skip
def compiled_packed(problem: Problem) -> Step:
    """torch.compile's default mode over one packed product."""
    return under_compile(eager_packed.build(problem))


@implementation(
    "compile-max-autotune", scopes=(Scope.GLU, Scope.MLP),
    description="compile, max-autotune-no-cudagraphs: Inductor chooses among cuBLAS and its own products",
    usage="mlp = torch.compile(mlp, fullgraph=True, mode='max-autotune-no-cudagraphs')",
    backend="inductor", offers=("bias", "limit"), on_request=True,
    footprints={scope: compiled.footprints[scope] for scope in (Scope.GLU, Scope.MLP)},
)  # fmt: skip
def compiled_max_autotune(problem: Problem) -> Step:
    """Without CUDA graphs, which no other row uses either; graph time is measured for every row."""
    return under_compile(around(problem, _gate(problem)), "max-autotune-no-cudagraphs")
