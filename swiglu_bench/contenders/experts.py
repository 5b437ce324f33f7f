"""Mixtures of experts: the ways of transformers in PyTorch, other projects' kernels, and those of swiglu_kernels.

Every row holds the gate and up weights of all experts in one [experts, 2 * intermediate, hidden] parameter, as models
do: the gate's rows first or, where the model has it so, in turn with up's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.cases.implementation import Implementation, Step, implementation
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


def packed(problem: Problem, compute: Compute, interleaved: bool = False) -> Step:
    """The Step of a function of the parameters w_gate_up, w_down and, where there are biases, theirs.

    Gate and up lie as the model has them, or `interleaved`.
    """
    own, to_canonical = joined(problem, interleaved or problem.extras.interleaved)

    def forward(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows, index, weights = (value.flatten(0, -2) for value in (x, top_k_index, top_k_weights))
        return compute(own, rows, index, weights).view_as(x)

    return Step(forward, own, to_canonical)


def _gate(problem: Problem) -> Callable[[Tensor], Tensor]:
    """[..., 2 * intermediate] of gate and up, in the model's order -> [..., intermediate]."""
    from swiglu_bench.cases.definition import gate_mul

    extras = problem.extras

    def gate(both: Tensor) -> Tensor:
        pair = (both[..., ::2], both[..., 1::2]) if extras.interleaved else both.chunk(2, -1)
        return gate_mul(*pair, **extras.variant)  # type: ignore[arg-type]

    return gate


def loop(problem: Problem) -> Step:
    """As the model files of transformers have it: expert by expert, those without a token left out."""
    import torch
    from torch.nn.functional import linear

    gate = _gate(problem)

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(index, len(own["w_down"])).permute(2, 1, 0)
        for number in mask.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[number])
            mine = {name: value[number] for name, value in own.items()}
            hidden = gate(linear(x[token], mine["w_gate_up"], mine.get("bias_gate_up")))
            found = linear(hidden, mine["w_down"], mine.get("bias_down")) * weights[token, slot, None]
            output.index_add_(0, token, found.to(output.dtype))
        return output

    return packed(problem, forward)


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
    offers=("bias", "limit"),
    multiple=GROUPED_ALIGNMENT,
)
def grouped(problem: Problem) -> Step:
    """Without what transformers' spends on experts that lie on other ranks."""
    import torch

    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    gate = _gate(problem)

    def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        expert, order, ends = sorted_by_expert(index, len(own["w_down"]))
        both = product(x[order // index.shape[1]], own["w_gate_up"].mT, offs=ends)
        hidden = gate(both + of_each_row(own["bias_gate_up"], expert) if problem.biases else both)
        found = product(hidden, own["w_down"].mT, offs=ends)
        return summed(found + of_each_row(own["bias_down"], expert) if problem.biases else found, order, weights)

    return packed(problem, forward)


@_row(
    "grouped-compile",
    description="grouped under torch.compile (Inductor, fullgraph, static shapes)",
    usage='model.set_experts_implementation("grouped_mm"); model = torch.compile(model)  # transformers',
    backend="inductor",
    offers=("bias", "limit"),
    multiple=GROUPED_ALIGNMENT,
    dtypes=(Dtype.BFLOAT16,),  # Inductor's grouped product takes no other
)
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
    imports="liger_kernel.ops.fused_moe",
    **LIGER,
)
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
    return packed(problem, _quack(), interleaved=True)


def _quack() -> Compute:
    import torch
    from quack.gemm_interface import gemm, gemm_gated

    backward_of_gate = torch.compile(gate_gradient, fullgraph=True)
    product = partial(gemm, tuned=False)

    class GatedProduct(torch.autograd.Function):
        """x [tokens, hidden] -> h of the sorted rows [pairs, intermediate]"""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w_gate_up: Tensor, token: Tensor, starts: Tensor, keeps: bool) -> Tensor:
            both, hidden = gemm_gated(
                x, w_gate_up.mT, activation="swiglu", cu_seqlens_m=starts, A_idx=token, tuned=False,
                store_preact=keeps,
            )  # fmt: skip
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

    return forward


def _absent(name: str, description: str, why: str) -> Implementation:
    """A row that says why a package of that name is not measured."""

    def build(problem: Problem) -> Step:
        raise NotImplementedError(why)

    return implementation(name, scopes=(Scope.EXPERTS,), description=description, absent=why)(build)


triton_kernels = _absent(
    "triton-kernels",
    "Triton's own grouped products: those of its repository",
    "PyPI's triton-kernels is another project without grouped products; Triton's own is in its repository only.",
)
deep_gemm = _absent(
    "deep-gemm",
    "DeepGEMM's grouped products",
    "PyPI's deep-gemm 1.0.0 has fp8 products only; DeepGEMM's bf16 ones have to be built from its repository.",
)


def _fused_row(name: str, description: str, **choices: Any) -> Implementation:
    def build(problem: Problem) -> Step:
        from swiglu_kernels import swiglu_experts

        options: dict[str, Any] = {"interleaved": problem.extras.interleaved, **problem.extras.variant, **choices}

        def forward(own: Parameters, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            biases: dict[str, Any] = {"b_gate_up": own.get("bias_gate_up"), "b_down": own.get("bias_down")}
            return swiglu_experts(x, own["w_gate_up"], own["w_down"], index, weights, **biases, **options)

        return packed(problem, forward)

    arguments = "".join(f", {name}={value!r}" for name, value in choices.items())
    return _row(
        name,
        description=description,
        backend="triton",
        imports="swiglu_kernels",
        variant=(Scope.EXPERTS,) if choices else (),
        offers=("bias", "limit", "other_ranks"),
        usage="from swiglu_kernels import swiglu_experts; "
        f"out = swiglu_experts(x, w_gate_up, w_down, top_k_index, top_k_weights{arguments})",
    )(build)


fused_experts = _fused_row(
    "fused-experts", "swiglu_experts with default options: grouped products, the gate in the first one's epilogue"
)
fused_experts_recompute = _fused_row(
    "fused-experts-recompute", "swiglu_experts saving x and routing: gate and up are recomputed", recompute=True
)
ROWS = (
    grouped, grouped_compiled, batched, liger_experts, quack_experts, triton_kernels, deep_gemm, fused_experts,
    fused_experts_recompute,
)  # fmt: skip
"""All but the loop, which is `eager` at this scope, in the order in which tables show them."""
