"""An implementation split over ranks: on a rank's part of the weights, with the collectives around it, or without them.

What torch itself offers is a plain MLP under `parallelize_module`; `swiglu_mlp` is called as split modules call it,
which may run communication beside its products; any other implementation is put between the same collectives. In a
mixture of experts each rank has its part of the tokens and of the experts, and tokens travel to their experts.
`swiglu_experts` is measured as `swiglu_experts_parallel`; all others are put between the exchanges that torchtitan has:

    forward    all-to-all of the rows of x, one for each (token, expert); the rank's experts on what came in; all-to-all
               of their results; the weighted sum where the token is
    in a step  the same two for the gradients, in the other order

How many rows a rank has for another is known after a first exchange of counts, for which the host waits.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.contenders import ASYNC, experts, fused

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PROJECTIONS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}


class NothingFused(RuntimeError):
    """torch found no collective that it could run piece by piece beside a product."""


def split(known: Implementation, mesh: DeviceMesh, whole: Problem, by_sequence: bool) -> Implementation:
    """The implementation with the collectives around it, to be built on a rank's part of the whole problem."""
    if known.name in experts.FUSED:
        build = partial(experts.fused, group=mesh, **experts.FUSED[known.name])
    elif whole.case.shape.experts:
        build = partial(between_exchanges, known=known, mesh=mesh)
    elif known.name in _COMPILED:
        build = partial(_torch_mlp, mesh=mesh, whole=whole, by_sequence=by_sequence, options=_COMPILED[known.name])
    else:
        build = partial(_between_collectives, known=known, mesh=mesh, by_sequence=by_sequence)
    return dataclasses.replace(known, build=build)


def _between_collectives(part: Problem, known: Implementation, mesh: DeviceMesh, by_sequence: bool) -> Step:
    from swiglu_kernels.nn.split import Split

    meet = Split(mesh, 0 if by_sequence else None)
    if known.name in fused.MLP:
        return fused.build_mlp(part, meet, **fused.MLP[known.name])
    step = known.build(part)
    forward = step.forward
    return dataclasses.replace(step, forward=lambda x: meet.sum(forward(meet.whole(x)), None))


class _PlainMLP(nn.Module):
    """As models have it; the weights are not copied."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        for name, projection in PROJECTIONS.items():
            weight = problem.weights[name].detach()
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight)
            setattr(self, projection, linear)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
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
    part: Problem, mesh: DeviceMesh, whole: Problem, by_sequence: bool, options: dict[str, Any] | None
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
    mlp = parallelize_module(_PlainMLP(whole), mesh, plan, src_data_rank=None)
    mlp.requires_grad_(part.weights["w_gate"].requires_grad)
    if options:
        from torch.distributed import _symmetric_memory

        enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", lambda name: None)  # a later torch does it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(mesh.get_group().group_name)
    forward = mlp if options is None else torch.compile(mlp, fullgraph=True, dynamic=False, options=options or None)
    parameters = {name: mlp.get_parameter(f"{projection}.weight") for name, projection in PROJECTIONS.items()}

    def to_canonical(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to_local() if name in parameters else value for name, value in gradients.items()}  # type: ignore[attr-defined]

    return Step(lambda x: _Arrived.apply(forward(x)), parameters, to_canonical)


_COMPILED: dict[str, dict[str, Any] | None] = {"eager": None, "compile": {}, ASYNC: {"_micro_pipeline_tp": True}}
"""What torch itself offers, by the options of torch.compile; None: not compiled."""


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
    needs = "torch's asynchronous tensor parallelism needs GPUs with symmetric memory."
    return None if device_type == "cuda" else needs


class _Travelled(torch.autograd.Function):
    """Rows in the order of the ranks that they are for -> those that came, in the order of the ranks they are from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = received, sent
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Travelled.apply(gradient, *ctx.sizes), None, None


def between_exchanges(part: Problem, known: Implementation, mesh: DeviceMesh) -> Step:
    """The Step of an implementation on a rank's experts, for the rank's tokens, which may have any experts.

    What is compiled for one number of rows is compiled for any, as every call has another.
    """
    assert part.case.shape.experts
    each = part.case.shape.experts.count
    compiled = known.name == experts.grouped_compiled.name
    step = (experts.grouped if compiled else known).build(part)
    compute = torch.compile(step.forward, fullgraph=True, dynamic=True) if compiled else step.forward

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        expert = index.flatten()
        order = expert.argsort(stable=True)
        counts = (expert // each).bincount(minlength=mesh.size())
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        sent, received = counts.tolist(), coming.tolist()
        rows = _Travelled.apply(x[order // index.shape[1]], sent, received)
        mine = _Travelled.apply(expert[order] % each, sent, received)
        found = compute(rows, mine[:, None], rows.new_ones(len(rows), 1))
        return experts.summed(_Travelled.apply(found, received, sent), order, weights)

    return dataclasses.replace(step, forward=forward)


def without_exchanges(part: Problem, known: Implementation, rank: int) -> Step:
    """The same work without exchanges.

    That is, for what skips the experts of other ranks, a rank's experts on all ranks' tokens; for all others, on the
    rank's own, each for the expert that has its expert's place on this rank.
    """
    assert part.case.shape.experts
    each = part.case.shape.experts.count
    step = known.build(part)
    compute = step.forward
    if known.name in experts.FUSED:
        return dataclasses.replace(step, forward=lambda x, index, weights: compute(x, index - rank * each, weights))

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = x.repeat_interleave(index.shape[1], 0)
        found = compute(rows, index.flatten()[:, None] % each, rows.new_ones(len(rows), 1))
        return (found.unflatten(0, index.shape) * weights[..., None]).sum(1).to(x.dtype)

    return dataclasses.replace(step, forward=forward)
