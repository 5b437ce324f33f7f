"""A wrong or cheating implementation, and what must catch it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Dtype, Mode, Precision, Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.problem import Problem

INDEX_CHECK = "> 2^31 elements"
"""The check of `audit` for those that are right on small tensors only."""
CHECKED_CALLS = 24
"""More calls than come before the first that is timed."""
CROWDED_CHECK = "crowded expert"
"""The one for those that are right on even loads only."""


@dataclass(frozen=True)
class Specimen:
    """What it is, where it shows, and the checks of which at least one must catch it."""

    implementation: Implementation
    caught_by: tuple[str, ...]
    scope: Scope
    dtype: Dtype
    mode: Mode
    task: str
    """time | verify | audit: which of the suite's ways in it is sent through."""
    needs_gpu: bool
    tokens: int | None = None
    """Of its case, where those of the others would not show it."""
    precision: Precision = Precision.UNQUANTISED

    @property
    def name(self) -> str:
        """Of the implementation."""
        return self.implementation.name


def specimen(
    name: str,
    description: str,
    caught_by: str | Iterable[str],
    *,
    scope: Scope = Scope.GLU,
    dtype: Dtype = Dtype.FLOAT32,
    mode: Mode = Mode.STEP,
    task: str = "time",
    needs_gpu: bool = False,
    tokens: int | None = None,
    precision: Precision = Precision.UNQUANTISED,
) -> Callable[[Callable[[Problem], Step]], Specimen]:
    """Turn a build function into a Specimen; the arguments are the fields of that class."""

    def wrap(build: Callable[[Problem], Step]) -> Specimen:
        made = implementation(name, scopes=[scope], description=description, precisions=[precision])(build)
        names = (caught_by,) if isinstance(caught_by, str) else tuple(caught_by)
        return Specimen(made, names, scope, dtype, mode, task, needs_gpu, tokens, precision)

    return wrap


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
"""dx, dw_gate and dw_up."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor], Gradients]


def right_forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """SwiGLU."""
    return torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T)


def right_at_first(forward: Forward, calls: int = CHECKED_CALLS) -> Forward:
    """SwiGLU in the first calls, for as long as it is checked, and `forward` from call number `calls` on."""
    number = itertools.count(1)
    return lambda *given: (right_forward if next(number) < calls else forward)(*given)


def gate_gradients(dz: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """d_gate and d_up, by the operations of eager's own backward."""
    return torch.ops.aten.silu_backward(dz * up, gate), dz * torch.nn.functional.silu(gate)


def right_backward(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> Gradients:
    """dx, dw_gate and dw_up."""
    d_gate, d_up = gate_gradients(dz, x @ w_gate.T, x @ w_up.T)
    return d_gate @ w_gate + d_up @ w_up, d_gate.T @ x, d_up.T @ x


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward, x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        ctx.save_for_backward(x, w_gate, w_up)
        ctx.differentiate = backward
        return forward(x, w_gate, w_up)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.differentiate(dz, *ctx.saved_tensors))


def glu(problem: Problem, forward: Forward = right_forward, backward: Backward = right_backward) -> Step:
    """The Step of a forward and a backward; each is right unless given."""
    weights = problem.weights
    return Step(lambda x: _Glu.apply(forward, backward, x, weights["w_gate"], weights["w_up"]))


def changed_gradients(problem: Problem, change: Callable[[Tensor, Tensor, Tensor], Gradients]) -> Step:
    """A right forward, and a backward that returns what `change` makes of the gradients."""
    return glu(problem, backward=lambda *given: change(*right_backward(*given)))
