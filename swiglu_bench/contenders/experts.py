"""Mixtures of experts: the ways of transformers in PyTorch, other projects' kernels, and those of swiglu_kernels.

Every row holds the gate and up weights of all experts in one [experts, 2 * intermediate, hidden] parameter, as models
do: the gate's rows first or, where the model has it so, in turn with up's.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation, taken_apart
from swiglu_bench.contenders.around import joined, under_compile
from swiglu_bench.contenders.peers import LIGER, QUACK, gate_gradient

if TYPE_CHECKING:
    from torch import Tensor

    from swiglu_bench.cases.problem import Problem

    Parameters = Mapping[str, Tensor]
    Compute = Callable[[Parameters, Tensor, Tensor, Tensor], Tensor]
    """(parameters, x [tokens, hidden], top_k_index, top_k_weights [tokens, top_k]) -> [tokens, hidden]"""

GROUPED_ALIGNMENT = 8
"""torch's grouped product needs rows that step by 16 bytes."""
_row = partial(implementation, scopes=(Scope.EXPERTS,), weight_layout="packed")
_OFFERS = ("bias", "limit", "other_ranks")


def packed(problem: Problem, compute: Compute, interleaved: bool | None = None) -> Step:
    """The Step of a function of the parameters w_gate_up, w_down and, where there are biases, theirs.

    Gate and up lie as the model has them unless `interleaved` says whether in turn.
    """
    own, to_canonical = joined(problem, problem.extras.interleaved if interleaved is None else interleaved)

    def forward(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows, index, weights = (value.flatten(0, -2) for value in (x, top_k_index, top_k_weights))
        return compute(own, rows, index, weights).view_as(x)

    return Step(forward, own, to_canonical)


def _gate(problem: Problem, interleaved: bool = False) -> Callable[[Tensor], Tensor]:
    """[..., 2 * intermediate] of gate and up, in the model's order or `interleaved` -> [..., intermediate]."""
    from swiglu_bench.cases.definition import gate_mul

    extras = problem.extras

    def gate(both: Tensor) -> Tensor:
        pair = (both[..., ::2], both[..., 1::2]) if interleaved or extras.interleaved else both.chunk(2, -1)
        return gate_mul(*pair, **extras.variant)  # type: ignore[arg-type]

    return gate


def loop(problem: Problem) -> Step:
    """As the model files of transformers have it: expert by expert, those without a token left out."""
    import torch
    from torch.nn.functional import linear

    gate = _gate(problem)

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output, count = torch.zeros_like(x), len(own["w_down"])
        if problem.case.shape.is_local:
            index, weights = of_this_rank(index, weights, count)
        mask = torch.nn.functional.one_hot(index, count + problem.case.shape.is_local).permute(2, 1, 0)[:count]
        for number in mask.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[number])
            mine = {name: value[number] for name, value in own.items()}
            hidden = gate(linear(x[token], mine["w_gate_up"], mine.get("bias_gate_up")))
            found = linear(hidden, mine["w_down"], mine.get("bias_down")) * weights[token, slot, None]
            output.index_add_(0, token, found.to(output.dtype))
        return output

    return packed(problem, forward)


def of_this_rank(index: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """With `experts` for experts of other ranks, which sorts last, and 0 for their weights."""
    away = (index < 0) | (index >= experts)
    return index.masked_fill(away, experts), weights.masked_fill(away, 0.0)


def sorted_by_expert(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of (token, expert) pairs: their experts in order, the pair at each place, and where each expert's end (int32)."""
    import torch

    expert, order = torch.sort(index.flatten())
    counts = torch.histc(expert.int() if expert.is_cuda else expert.float(), experts, min=0, max=experts - 1)
    return expert, order, counts.cumsum(0, dtype=torch.int32)


def summed(found: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sorted rows [pairs, hidden] -> [tokens, hidden], weighted."""
    import torch

    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    weighted = found * weights.flatten()[order, None]
    return weighted[places].unflatten(0, weights.shape).sum(1).to(found.dtype)


def of_each_row(bias: Tensor, expert: Tensor) -> Tensor:
    """[experts, width] -> [pairs, width], by way of fp32.

    The gradient of an index adds row by row in the dtype indexed: of 512 rows in bf16 it loses 15 times what a sum in
    fp32 does (0.026 and 0.0017, relative), which transformers' own does.
    """
    return bias.float()[expert].to(bias.dtype)


@_row(
    "grouped",
    description="sort, gather, torch's grouped_mm: for both products; weighted sum; as in transformers",
    usage='model.set_experts_implementation("grouped_mm")  # transformers',
    offers=_OFFERS, multiple=GROUPED_ALIGNMENT,
)  # fmt: skip
def grouped(problem: Problem) -> Step:
    """Rows of other ranks sort last, where no product reads or writes; only `local` routing pays for their masks."""
    import torch

    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    gate, local = _gate(problem), problem.case.shape.is_local

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        count = len(own["w_down"])
        if local:
            index, weights = of_this_rank(index, weights, count)
        expert, order, ends = sorted_by_expert(index, count)
        away, expert = (expert[:, None] == count, expert.clamp(max=count - 1)) if local else (None, expert)

        def kept(rows: Tensor) -> Tensor:
            return rows if away is None else rows.masked_fill(away, 0.0)

        both = product(kept(x[order // index.shape[1]]), own["w_gate_up"].mT, offs=ends)
        hidden = gate(kept(both + of_each_row(own["bias_gate_up"], expert) if problem.biases else both))
        found = product(hidden, own["w_down"].mT, offs=ends)
        found = kept(found + of_each_row(own["bias_down"], expert) if problem.biases else found)
        return summed(found, order, weights)

    return packed(problem, forward)


@_row(
    "grouped-compile",
    description="grouped under torch.compile (Inductor, fullgraph, static shapes)",
    usage='model.set_experts_implementation("grouped_mm"); model = torch.compile(model)  # transformers',
    backend="inductor", offers=_OFFERS, multiple=GROUPED_ALIGNMENT,
    dtypes=(Dtype.BFLOAT16,),  # Inductor's grouped product takes no other
)  # fmt: skip
def grouped_compiled(problem: Problem) -> Step:
    """torch.compile's default mode."""
    return under_compile(grouped.build(problem))


@_row(
    "batched",
    description="weights copied for each row, torch.bmm: those of its expert; weighted sum; as in transformers",
    usage='model.set_experts_implementation("batched_mm")  # transformers',
    offers=("bias", "limit"),
    most_tokens=16,  # of Mixtral's experts, that is 11 GB of copies
)
def batched(problem: Problem) -> Step:
    """For decoding: the copies grow with the tokens."""
    import torch

    gate = _gate(problem)

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        expert = index.flatten()
        mine = {name: value[expert] for name, value in own.items()}
        rows = x.repeat_interleave(index.shape[1], 0)[:, :, None]
        both = torch.bmm(mine["w_gate_up"], rows)[:, :, 0]
        hidden = gate(both + mine["bias_gate_up"] if problem.biases else both)
        found = torch.bmm(mine["w_down"], hidden[:, :, None])[:, :, 0]
        found = found + mine["bias_down"] if problem.biases else found
        return (found * weights.flatten()[:, None]).unflatten(0, index.shape).sum(1).to(x.dtype)

    return packed(problem, forward)


@_row(
    "liger-experts",
    description="liger-kernel's LigerFusedMoEFunction: autotuned Triton kernels for all of it",
    usage="from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe; apply_liger_kernel_to_qwen3_moe()",
    tf32=True,  # on an H100 an output was 2.4e-3 off, eager's 1.5e-7
    imports="liger_kernel.ops.fused_moe", **LIGER,
)  # fmt: skip
def liger_experts(problem: Problem) -> Step:
    """As liger_kernel.transformers.LigerExperts calls it."""
    import torch
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return LigerFusedMoEFunction.apply(x, own["w_gate_up"], own["w_down"], index.to(torch.int32), weights)

    return packed(problem, forward)


@_row(
    "quack-experts",
    description="QuACK's grouped products: with gather and gate (CuTe DSL), interleaved weights; sort and sum by torch",
    usage="from quack.gemm_interface import gemm_gated; gemm_gated(x, w_gate_up.mT, cu_seqlens_m=starts, A_idx=tokens)",
    **QUACK,
)
def quack_experts(problem: Problem) -> Step:
    """QuACK has the products and the gate; the backward of the gate is torch.compile's, as in its dense row."""
    import torch
    from quack.gemm_interface import gemm, gemm_gated

    backward_of_gate = torch.compile(gate_gradient, fullgraph=True)
    product = partial(gemm, tuned=False)

    class GatedProduct(torch.autograd.Function):
        """x [tokens, hidden] -> h of the sorted rows [pairs, intermediate]"""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w_gate_up: Tensor, token: Tensor, starts: Tensor, keeps: bool) -> Tensor:
            both, hidden = gemm_gated(
                x, w_gate_up.mT, activation="swiglu", cu_seqlens_m=starts, A_idx=token, tuned=False, store_preact=keeps
            )
            ctx.save_for_backward(x, w_gate_up, token, starts, both)
            return hidden

        @staticmethod
        def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
            x, w_gate_up, token, starts, both = ctx.saved_tensors
            d_both, dx, dw = backward_of_gate(d_hidden, both), None, None
            if ctx.needs_input_grad[0]:
                dx = torch.zeros_like(x, dtype=torch.float32)
                dx = dx.index_add_(0, token, product(d_both, w_gate_up, cu_seqlens_m=starts).float()).to(x.dtype)
            if ctx.needs_input_grad[1]:
                dw = product(d_both.T, x[token], cu_seqlens_k=starts)
            return dx, dw, None, None, None

    class Product(torch.autograd.Function):
        """Sorted rows [pairs, k] and [experts, n, k] -> [pairs, n]"""

        @staticmethod
        def forward(ctx: Any, rows: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
            ctx.save_for_backward(rows, weights, starts)
            return product(rows, weights.mT, cu_seqlens_m=starts)

        @staticmethod
        def backward(ctx: Any, d_found: Tensor) -> tuple[Tensor | None, ...]:
            rows, weights, starts = ctx.saved_tensors
            d_found = d_found.contiguous()
            d_rows = product(d_found, weights, cu_seqlens_m=starts) if ctx.needs_input_grad[0] else None
            dw = product(d_found.T, rows, cu_seqlens_k=starts) if ctx.needs_input_grad[1] else None
            return d_rows, dw, None

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        _, order, ends = sorted_by_expert(index, len(own["w_down"]))
        starts = torch.nn.functional.pad(ends, (1, 0))
        token = (order // index.shape[1]).to(torch.int32)
        hidden = GatedProduct.apply(x, own["w_gate_up"], token, starts, torch.is_grad_enabled())
        return summed(Product.apply(hidden, own["w_down"], starts), order, weights)

    return packed(problem, forward, interleaved=True)


@_row(
    "triton-kernels",
    description="Triton's own grouped products: with gather, SwiGLU, scatter; interleaved weights; torch sorts",
    usage="from triton_kernels.matmul import matmul; both = matmul(x, w_gate_up.mT, None, a_ragged_metadata=ragged, "
    "gather_indx=tokens)  # tokenspeed-triton-kernels",
    backend="triton", package="triton_kernels", imports="triton_kernels.matmul", weight_layout="interleaved",
    trains="nothing",
    interpretable="triton_kernels asks a GPU how many multiprocessors it has; it runs on a GPU only.", gpus=(9, 10),
    dtypes=(Dtype.BFLOAT16,),
    multiple=8,  # rows must step by 16 bytes
    offers=("bias", "limit"),
)  # fmt: skip
def triton_kernels(problem: Problem) -> Step:
    """Its SwiGLU adds 1 to up, as gpt-oss does; elsewhere a bias of -1, which it adds in fp32, takes that off again."""
    import torch
    from triton_kernels.matmul import FnSpecs, FusedActivation, matmul
    from triton_kernels.reduce import reduce
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import make_ragged_tensor_metadata

    variant = {"alpha": 1.0, "up_offset": 0.0} | problem.extras.variant
    adds, limit = variant["up_offset"] == 1.0, variant["limit"]
    fused = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (variant["alpha"], limit))
    # It bounds up with its bias: a bias of -1 would be bounded, too.
    apart = None if adds or limit is None else _gate(problem, interleaved=True)
    less = torch.tensor([0.0, 0.0 if adds or apart else -1.0], device=problem.device)
    less = less.repeat(problem.weights["w_gate"].shape[1])

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        _, order, ends = sorted_by_expert(index, len(own["w_down"]))
        ragged = make_ragged_tensor_metadata(ends.diff(prepend=ends.new_zeros(1)), len(order))
        pair, token = order.int(), (order // index.shape[1]).int()
        bias = own["bias_gate_up"] + less if problem.biases else less.expand(len(own["w_down"]), -1)
        hidden = matmul(
            x.contiguous(), own["w_gate_up"].mT, bias, a_ragged_metadata=ragged, gather_indx=token,
            fused_activation=None if apart else fused,
        )  # fmt: skip
        found = matmul(
            apart(hidden) if apart else hidden, own["w_down"].mT, own["bias_down"].float() if problem.biases else None,
            a_ragged_metadata=ragged, scatter_indx=pair, gammas=weights.flatten()[order],
        )  # fmt: skip
        return reduce(found.unflatten(0, index.shape), dim=1)[0]

    return packed(problem, forward, interleaved=True)


@_row(
    "deep-gemm",
    description="DeepGEMM's grouped products: torch pads rows to its blocks; torch.compile's gate and sum",
    usage="from deep_gemm import m_grouped_bf16_gemm_nt_contiguous; "
    "m_grouped_bf16_gemm_nt_contiguous(rows, w_gate_up, both, ends, use_psum_layout=True)  # sgl-deep-gemm",
    package="deep_gemm", trains="nothing", gpus=(9, 10), dtypes=(Dtype.BFLOAT16,), multiple=64, offers=("limit",),
)  # fmt: skip
def deep_gemm(problem: Problem) -> Step:
    """Each expert's rows begin at a multiple of its blocks' rows; what lies between is never read again."""
    import torch
    from deep_gemm import get_mk_alignment_for_contiguous_layout, m_grouped_bf16_gemm_nt_contiguous

    @torch.compile(fullgraph=True)
    def total(found: Tensor, place: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        return summed(found[place], order, weights)

    gate = torch.compile(_gate(problem), fullgraph=True)
    block = int(get_mk_alignment_for_contiguous_layout())

    def product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), weights.shape[1])
        m_grouped_bf16_gemm_nt_contiguous(rows, weights.detach(), out, ends, use_psum_layout=True)
        return out

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        experts = len(own["w_down"])
        expert, order, ends = sorted_by_expert(index, experts)
        counts = ends.diff(prepend=ends.new_zeros(1))
        blocks = (counts + (block - 1)) // block
        padded_ends = (blocks.cumsum(0, dtype=torch.int32) - blocks) * block + counts
        place = torch.arange(len(order), device=x.device) + (padded_ends - ends)[expert]
        # As many blocks as any routing can need, so that nobody waits for the GPU.
        most = (len(order) + min(experts, len(order)) * (block - 1)) // block
        rows = x.new_empty(most * block, x.shape[1]).index_copy_(0, place, x[order // index.shape[1]])
        found = product(gate(product(rows, own["w_gate_up"], padded_ends)), own["w_down"], padded_ends)
        return total(found, place, order, weights)

    return packed(problem, forward)


def _flashinfer(problem: Problem, tuned: bool, finalize: bool) -> Step:
    """Its rows of up come before those of the gate, 32 by 32; with `tuned` its own tuner chooses the tiles at build."""
    import torch
    from flashinfer import autotune, cute_dsl_fused_moe_bf16
    from flashinfer.fused_moe.utils import map_to_hybrid_bucket_uncapped

    case = problem.case
    names = {"limit": "swiglu_limit", "alpha": "swiglu_alpha", "up_offset": "swiglu_beta"}
    gate = {names[name]: value for name, value in problem.extras.variant.items() if value is not None}
    run: Callable[..., Tensor] = partial(cute_dsl_fused_moe_bf16, use_fused_finalize=finalize, **gate)

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        route, sizes = (index.to(torch.int32), weights.float()), (len(own["w_down"]), index.shape[1])
        return run(x, *route, own["w_gate_up"], own["w_down"], *sizes)

    def to_canonical(given: dict[str, Tensor]) -> dict[str, Tensor]:
        found = taken_apart("interleaved:32", experts=True)(given)
        return found | {"w_gate": found["w_up"], "w_up": found["w_gate"]}

    step = packed(problem, forward, interleaved=False)
    own: Any = step.parameters
    own["w_gate_up"] = own["w_gate_up"].detach().unflatten(1, (2, -1, 32)).flip(1).transpose(1, 2).flatten(1, 3)
    step.to_canonical = to_canonical
    if tuned and case.shape.experts:
        x = own["w_down"].new_zeros(case.tokens, case.shape.hidden)
        index = torch.arange(case.shape.experts.top_k, device=problem.device).expand(case.tokens, -1)
        with torch.no_grad(), autotune(True, tuning_buckets=(map_to_hybrid_bucket_uncapped(case.tokens),)):
            step.forward(x, index, index.to(x.dtype))
    return step


_INFERENCE: dict[str, Any] = {"trains": "nothing", "gpus": (9,), "dtypes": (Dtype.FLOAT16, Dtype.BFLOAT16)}
_FLASHINFER: dict[str, Any] = {
    "backend": "cutlass", "package": "flashinfer", "weight_layout": "interleaved:32", "multiple": 32,
    "offers": ("limit",), **_INFERENCE,
}  # fmt: skip
FLASHINFER = tuple(
    _row(
        f"flashinfer{name}{'-tuned' if tuned else ''}",
        description=f"FlashInfer's CuTe DSL kernels: {sums}; tiles {'by its own tuner' if tuned else 'by default'}",
        usage="from flashinfer import cute_dsl_fused_moe_bf16; cute_dsl_fused_moe_bf16(x, index.int(), "
        f"weights.float(), w_up_gate_by_32, w_down, experts, top_k, use_fused_finalize={finalize})",
        **_FLASHINFER | {"on_request": tuned},
    )(partial(_flashinfer, tuned=tuned, finalize=finalize))
    for tuned in (False, True)
    for name, sums, finalize in (("", "sums in bf16", True), ("-deterministic", "sums in fp32 by a kernel", False))
)


@_row(
    "tileops",
    description="TileOPs' routed experts (TileLang): indexed kernels for few rows, else sorted rows",
    usage="from tileops.moe import FusedMoEExpertsFwdOp; experts = FusedMoEExpertsFwdOp(); "
    "experts(x, w_gate_up, w_down, weights.float(), index.int())",
    package="tileops", imports="tileops.moe", offers=("bias",), **_INFERENCE,
)  # fmt: skip
def tileops(problem: Problem) -> Step:
    """Its forward operation, which takes the model's own layout."""
    import torch
    from tileops.moe import FusedMoEExpertsFwdOp

    run: Callable[..., Tensor] = FusedMoEExpertsFwdOp()

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        biases = (own["bias_gate_up"], own["bias_down"]) if problem.biases else ()
        return run(x, own["w_gate_up"], own["w_down"], weights.float(), index.to(torch.int32), *biases)

    return packed(problem, forward)


@_row(
    "sonic-moe",
    description="SonicMoE: QuACK's tuned grouped products, own kernels around them; interleaved weights",
    usage="from sonicmoe import moe_general_routing_inputs; moe_general_routing_inputs(x, weights.flatten(), tokens, "
    "index.flatten(), w_gate_up.permute(1, 2, 0), None, w_down.permute(1, 2, 0), None, experts, stream, SWIGLU)",
    **QUACK | {"package": "sonicmoe", "imports": "sonicmoe", "gpus": (9, 10)},
)
def sonic_moe(problem: Problem) -> Step:
    """With indices and weights that a router outside of it has made."""
    import torch
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    run: Callable[..., tuple[Tensor, Tensor]] = moe_general_routing_inputs

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        token = torch.arange(len(x), device=x.device, dtype=torch.int32).repeat_interleave(index.shape[1])
        gate_up, down = (own[name].permute(1, 2, 0) for name in ("w_gate_up", "w_down"))
        stream = torch.cuda.current_stream().cuda_stream
        return run(
            x, weights.flatten(), token, index.flatten().int(), gate_up, None, down, None, down.shape[2], stream,
            ActivationType.SWIGLU, is_inference_mode_enabled=not torch.is_grad_enabled(),
        )[0]  # fmt: skip

    return packed(problem, forward, interleaved=True)


def _transformers(problem: Problem, name: str) -> Step:
    """The function that transformers calls by this name, on what it reads of a module of experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    module, local = types.SimpleNamespace(), problem.case.shape.is_local
    run: Callable[..., Tensor] = partial(ALL_EXPERTS_FUNCTIONS[name], module)

    def forward(_: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return run(x, *(of_this_rank(index, weights, module.num_experts) if local else (index, weights)))

    step = packed(problem, forward)
    own = step.parameters or {}
    vars(module).update(
        gate_up_proj=own["w_gate_up"], down_proj=own["w_down"], gate_up_proj_bias=own.get("bias_gate_up"),
        down_proj_bias=own.get("bias_down"), num_experts=len(own["w_down"]), has_gate=True,
        has_bias=bool(problem.biases), has_post_expert_norm=False, is_transposed=False, _is_expert_parallel=local,
        is_concatenated=not problem.extras.interleaved, _apply_gate=_gate(problem),
        config=types.SimpleNamespace(hidden_act="silu"),
    )  # fmt: skip
    return step


_BY_TORCH: dict[str, Any] = {"offers": _OFFERS, "multiple": GROUPED_ALIGNMENT}
_OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "grouped_mm": _BY_TORCH, "batched_mm": {"offers": ("bias", "limit"), "most_tokens": 16},
    "deepgemm": {"trains": "nothing", "gpus": (9, 10), "dtypes": (Dtype.BFLOAT16,), "multiple": 64},
    "sonicmoe": {"gpus": (9, 10), "dtypes": (Dtype.FLOAT16, Dtype.BFLOAT16), "multiple": 8},
}  # fmt: skip
"""The last two fetch their kernels from the Hugging Face Hub, by the package `kernels`."""
TRANSFORMERS = tuple(
    _row(
        f"transformers-{name.partition('_')[0]}",
        description=f"transformers' own {name}: the function that a model of it calls",
        usage=f"model.set_experts_implementation({name!r})  # transformers",
        **fields | {"package": "transformers", "imports": "transformers.integrations.moe", "on_request": True},
    )(partial(_transformers, name=name))
    for name, fields in _OF_TRANSFORMERS.items()
)

FUSED: dict[str, dict[str, Any]] = {}
"""Options of `swiglu_experts`, by the names of the rows that call it."""
_OF_KERNELS: dict[str, Any] = {"backend": "triton", "imports": "swiglu_kernels", "offers": _OFFERS}


def fused(problem: Problem, group: Any = None, **choices: Any) -> Step:
    """`swiglu_experts`, or of a rank of a group, for its tokens and its part of the experts, `..._parallel`."""
    from swiglu_kernels import swiglu_experts, swiglu_experts_parallel

    call: Any = swiglu_experts if group is None else partial(swiglu_experts_parallel, group=group)
    options: dict[str, Any] = {"interleaved": problem.extras.interleaved, **problem.extras.variant, **choices}

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        biases: dict[str, Any] = {"b_gate_up": own.get("bias_gate_up"), "b_down": own.get("bias_down")}
        return call(x, own["w_gate_up"], own["w_down"], index, weights, **biases, **options)

    return packed(problem, forward)


def _fused_row(name: str, description: str, **choices: Any) -> Implementation:
    FUSED[name] = choices
    arguments = "".join(f", {name}={value!r}" for name, value in choices.items())
    call = f"swiglu_experts(x, w_gate_up, w_down, top_k_index, top_k_weights{arguments})"
    usage, variant = f"from swiglu_kernels import swiglu_experts; out = {call}", (Scope.EXPERTS,) if choices else ()
    return _row(name, description=description, variant=variant, usage=usage, **_OF_KERNELS)(partial(fused, **choices))


fused_experts = _fused_row(
    "fused-experts", "swiglu_experts with default options: grouped products, the gate in the first one's epilogue"
)
fused_experts_recompute = _fused_row(
    "fused-experts-recompute", "swiglu_experts saving x and routing: gate and up are recomputed", recompute=True
)
ROWS = (
    grouped, grouped_compiled, batched, liger_experts, quack_experts, sonic_moe, triton_kernels, deep_gemm,
    *FLASHINFER, tileops, *TRANSFORMERS, fused_experts, fused_experts_recompute,
)  # fmt: skip
"""All but the loop, which is `eager` at this scope, in the order in which tables show them."""
