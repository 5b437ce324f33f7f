"""A mixture of experts as products of matrices and vectors: for one token, or few of many experts; without gradients.

The experts of one token are different ones, and those of a few rarely the same: a weight that is read is multiplied by
one number, no tile of rows would be full, and nothing waits for tensor cores. A program has some rows of a weight and
all of their depth, as many loads in flight as its registers hold. What tokens share is read for each, the second time
from the L2 cache. Two launches: h of all pairs of a token and an expert, and out, which adds up a token's slots in
registers. The second begins while the first runs, and the weights of its first slots are on their way before it waits
for h.
"""

from typing import Any

import torch

from swiglu_kernels.ops.experts import portable_experts
from swiglu_kernels.ops.experts.portable_experts import bias_arguments, both_columns, even_and_odd, strides
from swiglu_kernels.ops.experts.routing import as_mask
from swiglu_kernels.ops.gate.arithmetic import gated, multiple_of, unit_of
from swiglu_kernels.ops.gate.formula import Formula
from swiglu_kernels.runtime.backend import Capability, capability_of, tl, triton
from swiglu_kernels.runtime.early import starts_early, wait_for_launch_ahead
from swiglu_kernels.runtime.launch import Launch, tile_needs_int64
from swiglu_kernels.runtime.precision import round_to

MOST_TOKENS, EXPERTS_PER_PAIR = 4, 4
"""With fewer experts for each pair, tokens share them so often that `portable_pairs.py` is faster, as it reads
each once."""
DEPTH, WARPS = 1024, 4
GATE_UP_COLUMNS = 8
"""Of h, for a program of the first launch."""
LONG = 24
"""Parts of DEPTH over all slots, from which on a program of the second launch has 8 columns instead of 4."""


def takes(index: torch.Tensor, experts: int) -> bool:
    """Tell whether index [T, k] is for these."""
    return index.shape[0] == 1 or (index.shape[0] <= MOST_TOKENS and EXPERTS_PER_PAIR * index.numel() <= experts)


@triton.jit
def _no_sums(COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return zeros: a sum for every eight elements of a row, which a thread loads at once."""
    return tl.zeros((COLUMNS, BLOCK_K // 8), tl.float32)


@triton.jit
def _add_products(sums, w, v):
    """Add the products of w [columns, depth] and v [1, depth] to sums."""
    products = w.to(tl.float32) * v.to(tl.float32)
    return sums + tl.sum(tl.reshape(products, (sums.shape[0], sums.shape[1], w.shape[1] // sums.shape[1])), 2)


@triton.jit
def _offsets(rows, BLOCK_K: tl.constexpr, w_n, w_k, WIDE: tl.constexpr):
    """Return where BLOCK_K elements of some rows are."""
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        rows, k = rows.to(tl.int64), k.to(tl.int64)
    return rows[:, None] * w_n + k[None, :] * w_k


@triton.jit
def _expert_of(index_ptr, pair, experts):
    """Return the expert of a pair, and whether there is one."""
    expert = tl.load(index_ptr + pair).to(tl.int64)
    return expert, as_mask((expert >= 0) & (expert < experts))


@triton.jit(do_not_specialize=("experts",))
def _gate_up_kernel(
    x_ptr, w_ptr, bias_ptr, h_ptr, index_ptr, experts, N, K, x_m, x_k, w_e, w_n, w_k, bias_e, bias_n,
    multiplier, alpha, limit, up_offset,
    SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORMULA: tl.constexpr, EARLY: tl.constexpr,
    UNIT: tl.constexpr, N_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of a pair's row of h [pairs, N]; N intermediate, K hidden."""
    numbers = multiplier, alpha, limit, up_offset
    N, K, x_m = multiple_of(N, UNIT), multiple_of(K, UNIT), multiple_of(x_m, UNIT)
    w_n, w_k = multiple_of(w_n, N_UNIT), multiple_of(w_k, K_UNIT)
    wait_for_launch_ahead(EARLY)
    pair, tile = tl.program_id(0), tl.program_id(1)
    expert, named = _expert_of(index_ptr, pair, experts)
    if not named:
        return
    column, first, inside = both_columns(tile, N, BLOCK_N, INTERLEAVED, WIDE)
    w_at = w_ptr + expert * w_e + first * w_n + _offsets(column, BLOCK_K, w_n, w_k, WIDE)
    x_ptr += (pair // SLOTS).to(tl.int64) * x_m
    sums = _no_sums(2 * BLOCK_N, BLOCK_K)
    for at in range(0, K, BLOCK_K):
        k = (at + tl.arange(0, BLOCK_K))[None, :]
        w = tl.load(w_at + tl.cast(at, tl.int64) * w_k, mask=inside[:, None] & (k < K), other=0.0)
        sums = _add_products(sums, w, tl.load(x_ptr + k.to(tl.int64) * x_k, mask=k < K, other=0.0))
    pre = tl.sum(sums, 1)
    if bias_ptr is not None:
        bias = bias_ptr + expert * bias_e + first * bias_n
        pre += tl.load(bias + column * bias_n, mask=inside, other=0.0).to(tl.float32)
    gate, up = even_and_odd(pre[None, :])
    h = gated(gate, up, numbers, FORMULA)
    n = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    tl.store(h_ptr + pair.to(tl.int64) * N + n, round_to(h, h_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=("experts",))
def _down_kernel(
    h_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, index_ptr, experts, N, K, w_e, w_n, w_k, bias_e, bias_n,
    weights_token, weights_slot,
    SLOTS: tl.constexpr, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr, UNIT: tl.constexpr, N_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of out [tokens, N]; N hidden, K intermediate. AHEAD slots' first BLOCK_K are loaded ahead."""
    N, K = multiple_of(N, UNIT), multiple_of(K, UNIT)
    w_n, w_k = multiple_of(w_n, N_UNIT), multiple_of(w_k, K_UNIT)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index_ptr += token * SLOTS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, first = n < N, tl.arange(0, BLOCK_K)[None, :]
    w_at = w_ptr + tile.to(tl.int64) * BLOCK_N * w_n
    w_at += _offsets(tl.arange(0, BLOCK_N), BLOCK_K, w_n, w_k, WIDE)
    ahead = ()
    for slot in tl.static_range(AHEAD):
        expert, named = _expert_of(index_ptr, slot, experts)
        mask = inside[:, None] & (first < K) & named
        ahead = ahead + (tl.load(w_at + expert * w_e, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_launch_ahead(EARLY)
    sums = _no_sums(BLOCK_N, BLOCK_K)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    for slot in tl.static_range(SLOTS):
        expert, named = _expert_of(index_ptr, slot, experts)
        h = h_ptr + (token * SLOTS + slot) * K
        weight_at = weights_ptr + token * weights_token + slot * weights_slot
        # masked as well: the weight of a slot without an expert may be anything
        weight = tl.load(weight_at, mask=named, other=0.0).to(tl.float32)
        of_slot = _no_sums(BLOCK_N, BLOCK_K)
        if slot < AHEAD:
            of_slot = _add_products(of_slot, ahead[slot], tl.load(h + first, mask=(first < K) & named, other=0.0))
        for at in range(BLOCK_K if slot < AHEAD else 0, K, BLOCK_K):
            k = at + first
            mask = inside[:, None] & (k < K) & named
            w = tl.load(w_at + (expert * w_e + tl.cast(at, tl.int64) * w_k), mask=mask, other=0.0)
            of_slot = _add_products(of_slot, w, tl.load(h + k, mask=(k < K) & named, other=0.0))
        sums += weight * of_slot
        if bias_ptr is not None:
            at = bias_ptr + expert * bias_e + n.to(tl.int64) * bias_n
            bias += weight * tl.load(at, mask=inside & named, other=0.0).to(tl.float32)
    out = tl.sum(sums, 1) + bias
    tl.store(out_ptr + token * N + n, round_to(out, out_ptr.dtype.element_ty), mask=inside)


def forward_launch(
    operands: tuple[Any, ...], h: torch.Tensor, out: torch.Tensor, formula: Formula, interleaved: bool,
    capability: Capability | None = None,
) -> Launch:  # fmt: skip
    """Describe the launches that write out; arguments as of `portable_pairs.forward_launch`, which has y as well."""
    x, w_gate_up, w_down, weights, b_gate_up, b_down, index = operands
    (tokens, slots), early = index.shape, starts_early(capability or capability_of(x.device))
    intermediate, hidden, parts = h.shape[1], out.shape[1], triton.cdiv(h.shape[1], DEPTH)
    shared = {"index_ptr": index, "experts": w_gate_up.shape[0], "SLOTS": slots, "EARLY": early}
    shared["UNIT"] = unit_of(intermediate, hidden, x.shape[1], x.stride(0))
    columns = 8 if slots * parts >= LONG else 4
    down = {"h_ptr": h, "out_ptr": out, "N": hidden, "AHEAD": min(slots, 4 if parts == 1 else 2)}
    down |= {"weights_ptr": weights} | strides(weights, "weights_token", "weights_slot") | bias_arguments(b_down)
    down |= shared | _product_arguments(w_down, columns)
    second = Launch(_down_kernel, (tokens, triton.cdiv(hidden, columns)), down, num_warps=WARPS, num_stages=1)
    gated = {"x_ptr": x, "h_ptr": h, "N": intermediate, "INTERLEAVED": interleaved} | strides(x, "x_m", "x_k")
    gated |= shared | _product_arguments(w_gate_up, GATE_UP_COLUMNS) | bias_arguments(b_gate_up) | formula.arguments()
    grid = (tokens * slots, triton.cdiv(intermediate, GATE_UP_COLUMNS))
    return Launch(_gate_up_kernel, grid, gated, num_warps=WARPS, num_stages=1, then=second)


def _product_arguments(w: torch.Tensor, columns: int) -> dict[str, object]:
    """Return the arguments for a weight [E, N, K], of which a program has so many columns of the result."""
    depth = max(16, min(DEPTH, triton.next_power_of_2(w.shape[2])))
    wide = tile_needs_int64((w.stride()[1:], (w.shape[1], depth)))
    return portable_experts.weight_arguments(w) | {"BLOCK_N": columns, "BLOCK_K": depth, "WIDE": wide}
