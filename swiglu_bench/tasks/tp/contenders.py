"""A contender three ways: on a rank's part of the weights with the collectives around it, without them, and whole.

What torch itself offers is a plain MLP under `parallelize_module`; the kernels' row is what `SwiGLUParallel` makes of
FusedSwiGLUMLP; any other implementation of the registry is put between the same collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import Desk, Draw
from swiglu_bench.tasks.tp.experts import between_exchanges
from swiglu_bench.tasks.tp.group import Group
from swiglu_bench.tasks.tp.plan import ASYNC, local

PROJECTIONS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}


class NothingFused(RuntimeError):
    """torch found no collective that it could run piece by piece beside a product."""


def rows_of(rank: int, size: int, problem: Problem) -> slice:
    """The intermediate features that a rank has."""
    each = problem.case.shape.intermediate // size
    return slice(rank * each, (rank + 1) * each)


def cuts(rank: int, size: int, problem: Problem) -> dict[str, tuple[slice, ...]]:
    """Where a rank's part of each weight is, and of its gradient: whole experts, where there are any."""
    if problem.case.shape.experts:
        each = problem.case.shape.experts.count // size
        return dict.fromkeys(problem.parameters, (slice(rank * each, (rank + 1) * each),))
    rows = rows_of(rank, size, problem)
    return {"w_gate": (rows,), "w_up": (rows,), "w_down": (slice(None), rows)}


def part_of(group: Group, problem: Problem) -> Problem:
    """The problem as this rank has it: its part of the weights."""
    cut = cuts(group.rank, group.size, problem)
    weights, biases = (
        {name: value[cut[name]].contiguous() for name, value in one.items()}
        for one in (problem.weights, problem.biases)
    )
    return dataclasses.replace(problem, case=local(problem.case, group.size), weights=weights, biases=biases)


class PartOfTokens(Desk):
    """Draws what all ranks have and hands out this rank's tokens."""

    def __init__(self, problem: Problem, group: Group) -> None:
        super().__init__(problem)
        self._group = group

    def activations(self, draw: Draw) -> list[Tensor]:
        """Of a call, this rank's part."""
        return [self._mine(value) for value in super().activations(draw)]

    def upstream(self, draw: Draw) -> Tensor:
        """The same of the upstream gradient."""
        return self._mine(super().upstream(draw))

    def _mine(self, value: Tensor) -> Tensor:
        return value.chunk(self._group.size)[self._group.rank]


def split(known: Implementation, group: Group, whole: Problem, by_sequence: bool) -> Implementation:
    """The implementation with the collectives around it, to be built on `part_of` the whole problem."""
    if whole.case.shape.experts:
        build = partial(between_exchanges, known=known, group=group)
    elif known.name in _TORCH:
        build = partial(_TORCH[known.name], group=group, whole=whole, by_sequence=by_sequence)
    else:
        build = partial(_between_collectives, known=known, group=group, by_sequence=by_sequence)
    return dataclasses.replace(known, build=build)


def _between_collectives(part: Problem, known: Implementation, group: Group, by_sequence: bool) -> Step:
    from swiglu_kernels.nn.split import Split

    meet = Split(group.mesh, 0 if by_sequence else None)
    step = known.build(part)
    forward = step.forward
    return dataclasses.replace(step, forward=lambda x: meet.sum(forward(meet.whole(x)), None))


class _PlainMLP(nn.Module):
    """As models have it; the weights are not copied."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        for name, projection in PROJECTIONS.items():
            weight = problem.weights[name].detach()
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight)
            setattr(self, projection, linear)

    def forward(self, x: Tensor) -> Tensor:
        hidden = silu(self.get_submodule("gate_proj")(x)) * self.get_submodule("up_proj")(x)
        out: Tensor = self.get_submodule("down_proj")(hidden)
        return out


class _Arrived(torch.autograd.Function):
    """The result of a collective that may be under way -> the same, once it is there; else it would not be timed."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.wait() if hasattr(out, "wait") else out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _torch_mlp(
    part: Problem,
    group: Group,
    whole: Problem,
    by_sequence: bool,
    compiled: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda mlp: mlp,
) -> Step:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    outside = Shard(0) if by_sequence else Replicate()
    plan = {
        # x becomes a DTensor once for both projections, so that their gradients of it are added before the collective
        "": PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate()),
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(output_layouts=outside),
    }
    mlp = parallelize_module(_PlainMLP(whole), group.mesh, plan, src_data_rank=None)
    mlp.requires_grad_(part.weights["w_gate"].requires_grad)
    forward = compiled(mlp)
    parameters = {name: mlp.get_parameter(f"{projection}.weight") for name, projection in PROJECTIONS.items()}

    def to_canonical(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: one.to_local() if name in parameters else one for name, one in gradients.items()}  # type: ignore[attr-defined]

    return Step(lambda x: _Arrived.apply(forward(x)), parameters, to_canonical)


def _compiled(part: Problem, **where: Any) -> Step:
    return _torch_mlp(part, **where, compiled=partial(torch.compile, fullgraph=True, dynamic=False))


def _compiled_async(part: Problem, group: Group, **where: Any) -> Step:
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None:  # a later torch does it by itself
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group.mesh.get_group().group_name)
    compiled = partial(torch.compile, fullgraph=True, dynamic=False, options={"_micro_pipeline_tp": True})
    return _torch_mlp(part, group, **where, compiled=compiled)


_TORCH: dict[str, Callable[..., Step]] = {"eager": _torch_mlp, "compile": _compiled, ASYNC: _compiled_async}


def check_fused(call: Callable[[], object]) -> None:
    """Raise NothingFused unless the call, compiled before, runs a product fused with a collective."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = {event.key for event in profile.key_averages()}
    if not any(name.startswith("symm_mem::fused_") for name in names):
        raise NothingFused(
            "torch.compile found no collective to pipeline with a product; it would be compile once more"
        )


def _not_by_itself(problem: Problem) -> Step:
    raise AssertionError(f"{ASYNC} is built by `split` only: {problem.case.label}.")


async_tp = implementation(
    ASYNC,
    scopes=(Scope.MLP,),
    description="compile with torch's asynchronous tensor parallelism: collectives in pieces, overlapping products",
    backend="inductor",
)(_not_by_itself)


def why_no_async(device_type: str, by_sequence: bool) -> str | None:
    """Why torch's asynchronous tensor parallelism does not apply, in one sentence, or None if it may."""
    if not by_sequence:
        return "It splits all-gathers and reduce-scatters; without sequence parallelism there are none."
    if device_type != "cuda":
        return "torch's asynchronous tensor parallelism needs GPUs with symmetric memory."
    with contextlib.suppress(ImportError):
        if importlib.util.find_spec("torch.distributed._symmetric_memory"):
            import torch._inductor.config as config

            return None if hasattr(config, "_micro_pipeline_tp") else "This torch has no _micro_pipeline_tp."
    return "This torch has no symmetric memory."
