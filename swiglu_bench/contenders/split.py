"""An implementation split over ranks: on a rank's part of the weights, with the collectives around it, or without them.

What torch itself offers is a plain MLP under `parallelize_module`; `swiglu_mlp` is called as split modules call it,
which may run communication beside its products; any other implementation is put between the same collectives. In a
mixture of experts each rank has its part of the tokens and of the experts, and tokens travel to their experts.
`swiglu_experts` is measured as `swiglu_experts_parallel`; all others are put between the exchanges that torchtitan has:

    forward    all-to-all of the rows of x, one for each (token, expert); the rank's experts on what came in; all-to-all
               of their results; the weighted sum where the token is
    in a step  the same two for the gradients, in the other order

How many rows a rank has for another is known after a first exchange of counts, for which the host waits. Megatron's
dispatchers have exchanges of their own, with the same products between them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.contenders import ALLTOALL, ASYNC, DEEPEP, experts, fused

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PROJECTIONS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}


class NothingFused(RuntimeError):
    """torch found no collective that it could run piece by piece beside a product."""


def split(known: Implementation, mesh: DeviceMesh, whole: Problem, by_sequence: bool) -> Implementation:
    """The implementation with the collectives around it, to be built on a rank's part of the whole problem."""
    if known.name in experts.FUSED:
        build = partial(experts.fused, group=mesh, **experts.FUSED[known.name])
    elif known.name in _DISPATCHERS:
        build = partial(_dispatched, mesh=mesh, name=known.name)
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
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


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
    from torch.distributed.tensor import Replicate, Shard, parallel

    outside = Shard(0) if by_sequence else Replicate()
    plan = {
        # x becomes a DTensor once for both projections, so that their gradients of it are added before the collective
        "": parallel.PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate()),
        "gate_proj": parallel.ColwiseParallel(),
        "up_proj": parallel.ColwiseParallel(),
        "down_proj": parallel.RowwiseParallel(output_layouts=outside),
    }
    mlp = parallel.parallelize_module(_PlainMLP(whole), mesh, plan, src_data_rank=None)
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
        found = "torch.compile found no collective to pipeline with a product"
        raise NothingFused(f"{found}; it would be compile once more")


def _not_by_itself(problem: Problem) -> Step:
    raise AssertionError(f"It is built by `split` only: {problem.case.label}.")


_PIECES = "compile with torch's asynchronous tensor parallelism: collectives in pieces, overlapping products"
async_tp = implementation(ASYNC, scopes=(Scope.MLP,), description=_PIECES, backend="inductor")(_not_by_itself)


def why_not(known: Implementation, device_type: str, by_sequence: bool, ranks: int) -> str | None:
    """Why an implementation that only `tp` has does not apply, in one sentence, or None if it may, or is another."""
    if known.name == DEEPEP:
        if not find_spec("megatron"):
            return "Megatron calls DeepEP here, and the package megatron is not installed."
        return "Megatron's dispatcher by DeepEP needs several ranks." if ranks == 1 else None
    if known.name != ASYNC:
        return None
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


_DISPATCHERS: dict[str, tuple[str, dict[str, str]]] = {
    ALLTOALL: ("MoEAlltoAllTokenDispatcher", {"moe_token_dispatcher_type": "alltoall"}),
    DEEPEP: ("MoEFlexTokenDispatcher", {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}),
}
"""Of megatron.core: the class, and what its configuration says of it."""
_GROUPED: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def _products(rows: Tensor, probabilities: Tensor, ends: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Of rows sorted by expert; weighted before the second product, as Megatron's experts do."""
    gate, up = _GROUPED(rows, w_gate_up.mT, offs=ends).chunk(2, -1)
    hidden = (silu(gate) * up * probabilities[:, None]).to(rows.dtype)
    return _GROUPED(hidden, w_down.mT, offs=ends)


def _dispatched(part: Problem, mesh: DeviceMesh, name: str) -> Step:
    """Megatron's dispatcher; the probabilities are fp32, which DeepEP needs and Megatron recommends."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape, ranks = part.case.shape, mesh.size()
    assert shape.experts
    each, (kind, options) = shape.experts.count, _DISPATCHERS[name]
    first = mesh.get_local_rank() * each
    config = TransformerConfig(
        num_layers=1, hidden_size=shape.hidden, num_attention_heads=1, add_bias_linear=False,
        num_moe_experts=each * ranks, moe_router_topk=shape.experts.top_k, expert_model_parallel_size=ranks,
        moe_router_dtype="fp32", **options,
    )  # fmt: skip
    groups = ProcessGroupCollection(ep=mesh.get_group(), expt_tp=None, tp_ep=mesh.get_group())
    dispatcher = getattr(token_dispatcher, kind)(each, list(range(first, first + each)), config, groups)
    products = torch.compile(_products, fullgraph=True, dynamic=True)

    def forward(own: experts.Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        dense = x.new_zeros(len(x), each * ranks, dtype=torch.float32)  # as Megatron's router has it
        chosen = torch.zeros_like(dense, dtype=torch.bool).scatter(1, index, True)
        prepared = dispatcher.dispatch_preprocess(x, chosen, dense.scatter(1, index, weights.float()))
        rows, counts, probabilities = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*prepared))
        ends = counts.cumsum(0).to(x.device, torch.int32, non_blocking=True)
        found = products(rows, probabilities, ends, own["w_gate_up"], own["w_down"])
        back = dispatcher.token_combine(dispatcher.combine_preprocess(found))
        return dispatcher.combine_postprocess(back)

    return experts.packed(part, forward, interleaved=False)


_MEGATRON: dict[str, Any] = {
    "scopes": (Scope.EXPERTS,), "backend": "inductor", "imports": "megatron.core.transformer.moe.token_dispatcher",
    "weight_layout": "packed", "dtypes": (Dtype.BFLOAT16,), "multiple": experts.GROUPED_ALIGNMENT, "gpus": (9, 10),
}  # fmt: skip
MEGATRON = (
    implementation(
        ALLTOALL, package="megatron", **_MEGATRON,
        description="Megatron's all-to-all dispatcher, rows permuted by torch; grouped_mm under torch.compile",
    )(_not_by_itself),
    implementation(
        DEEPEP, package="deep_ep", **_MEGATRON,
        description="Megatron's flexible dispatcher by DeepEP, rows permuted by torch; grouped_mm under torch.compile",
    )(_not_by_itself),
)  # fmt: skip
"""Without Transformer Engine, which has kernels that permute."""
