"""A mixture of experts for so few pairs of a token and an expert that every launch counts; without gradients.

No routing is made. A program has the expert of a pair, unless a pair before it has the same, and its tile has a row for
each token, of which it reads and writes those with its expert. Rows of h and y are pairs, in their order; slots of a
token with the same expert share the row of the first. Two products and the weighted sum are three launches, each of
which begins while the one ahead runs: what is older than that, the index and the routing weights, the second and the
third read before they wait for its end. One token, or few of many experts, are for `portable_gemv.py`.
"""

from typing import Any

import torch

from swiglu_kernels.ops.experts import portable_experts, portable_gemv
from swiglu_kernels.ops.experts.portable_experts import bias_arguments, both_columns, even_and_odd, product, strides
from swiglu_kernels.ops.gate.arithmetic import gated, multiple_of, unit_of
from swiglu_kernels.ops.gate.formula import Formula
from swiglu_kernels.runtime.backend import Capability, capability_of, tl, triton
from swiglu_kernels.runtime.early import starts_early, wait_for_launch_ahead
from swiglu_kernels.runtime.launch import Launch, vectorises
from swiglu_kernels.runtime.precision import round_to
from swiglu_kernels.runtime.shortcuts.plan import run
from swiglu_kernels.tiles.rules import expert_tile

SUM_COLUMNS = 128
"""Of a program, which has all slots of a token at once: after each other, every one waits for memory."""


@triton.jit
def _expert_of(
    index_ptr, number, tokens, experts, SLOTS: tl.constexpr, TOKENS: tl.constexpr, EVERY_EXPERT: tl.constexpr
):
    """Return a program's expert, and of each token whether it has that expert, and in which pair.

    The expert is less than 0 where there is nothing to do. It is the program's number itself or, where there are more
    experts than pairs, that of the pair with this number, unless a pair before it has the same: one load, so that what
    is read of its weights waits for nothing else.
    """
    expert = number if EVERY_EXPERT else tl.load(index_ptr + number)
    expert = expert.to(tl.int64)
    token = tl.arange(0, TOKENS)
    none: tl.constexpr = SLOTS * TOKENS
    pair = tl.full((TOKENS,), none, tl.int32)
    for slot in tl.static_range(SLOTS - 1, -1, -1):  # of an expert that a token has twice, the first counts
        of_slot = tl.load(index_ptr + token * SLOTS + slot, mask=token < tokens, other=-1).to(tl.int64)
        pair = tl.where(of_slot == expert, token * SLOTS + slot, pair)
    mine = (pair < none) & (token < tokens)
    first = tl.min(tl.where(mine, pair, none), 0)
    alive = (expert < experts) & ((first < none) if EVERY_EXPERT else (first == number))
    return tl.where(alive, expert, -1), mine, pair.to(tl.int64)


@triton.jit(do_not_specialize=("tokens", "experts"))
def _gate_up_kernel(
    x_ptr, w_ptr, bias_ptr, h_ptr, index_ptr, tokens, experts, N, K,
    x_m, x_k, w_e, w_n, w_k, bias_e, bias_n, multiplier, alpha, limit, up_offset,
    SLOTS: tl.constexpr, TOKENS: tl.constexpr, EVERY_EXPERT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, INTERLEAVED: tl.constexpr, FORMULA: tl.constexpr, EARLY: tl.constexpr,
    UNIT: tl.constexpr, N_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of h [pairs, N] in the rows of one expert; N intermediate, K hidden."""
    numbers = multiplier, alpha, limit, up_offset
    N, K, x_m = multiple_of(N, UNIT), multiple_of(K, UNIT), multiple_of(x_m, UNIT)
    w_n, w_k = multiple_of(w_n, N_UNIT), multiple_of(w_k, K_UNIT)
    wait_for_launch_ahead(EARLY)
    expert, mine, pair = _expert_of(index_ptr, tl.program_id(1), tokens, experts, SLOTS, TOKENS, EVERY_EXPERT)
    if expert < 0:
        return
    tile = tl.program_id(0)
    column, first, inside = both_columns(tile, N, BLOCK_N, INTERLEAVED, WIDE)
    token = tl.arange(0, TOKENS).to(tl.int64)
    pre = product(
        x_ptr, w_ptr + expert * w_e + first * w_n, token * x_m, column * w_n, (mine, inside), K, x_k, w_k, TOKENS,
        2 * BLOCK_N, BLOCK_K, EVEN_K, WIDE, PRECISION,
    )  # fmt: skip
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * bias_e + first * bias_n + column * bias_n, mask=inside, other=0.0)
        pre += bias.to(tl.float32)[None, :]
    gate, up = even_and_odd(pre)
    h = gated(gate, up, numbers, FORMULA)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = h_ptr + pair[:, None] * N + n[None, :]
    tl.store(at, round_to(h, h_ptr.dtype.element_ty), mask=mine[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=("tokens", "experts"))
def _down_kernel(
    h_ptr, w_ptr, bias_ptr, y_ptr, index_ptr, tokens, experts, N, K, w_e, w_n, w_k, bias_e, bias_n,
    SLOTS: tl.constexpr, TOKENS: tl.constexpr, EVERY_EXPERT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, UNIT: tl.constexpr, N_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of y [pairs, N] in the rows of one expert; N hidden, K intermediate."""
    N, K = multiple_of(N, UNIT), multiple_of(K, UNIT)
    w_n, w_k = multiple_of(w_n, N_UNIT), multiple_of(w_k, K_UNIT)
    tile = tl.program_id(0)
    expert, mine, pair = _expert_of(index_ptr, tl.program_id(1), tokens, experts, SLOTS, TOKENS, EVERY_EXPERT)
    wait_for_launch_ahead(EARLY)
    if expert < 0:
        return
    n = tl.arange(0, BLOCK_N)
    inside = tile * BLOCK_N + n < N
    first = tile.to(tl.int64) * BLOCK_N
    if WIDE:
        n = n.to(tl.int64)
    y = product(
        h_ptr, w_ptr + expert * w_e + first * w_n, pair * K, n * w_n, (mine, inside), K, 1, w_k, TOKENS, BLOCK_N,
        BLOCK_K, EVEN_K, WIDE, PRECISION,
    )  # fmt: skip
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * bias_e + (first + n) * bias_n, mask=inside, other=0.0)
        y += bias.to(tl.float32)[None, :]
    at = y_ptr + pair[:, None] * N + (first + n)[None, :]
    tl.store(at, round_to(y, y_ptr.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@triton.jit
def _weighted_sum_kernel(
    y_ptr, weights_ptr, index_ptr, out_ptr, columns, experts, weights_token, weights_slot,
    SLOTS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token of out."""
    columns = multiple_of(columns, UNIT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_SLOTS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index_ptr + token * SLOTS + slot, mask=slot < SLOTS, other=-1)
    pair = token * SLOTS + tl.min(tl.where(expert[:, None] == expert[None, :], slot[None, :], SLOTS), 1)
    named = (expert >= 0) & (expert < experts)
    # masked as well: the weight of a pair without an expert may be anything
    weight = tl.load(weights_ptr + token * weights_token + slot * weights_slot, mask=named, other=0.0).to(tl.float32)
    wait_for_launch_ahead(EARLY)
    inside = named[:, None] & (column < columns)[None, :]
    y = tl.load(y_ptr + pair[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    out = tl.sum(weight[:, None] * y, 0)
    tl.store(out_ptr + token * columns + column, round_to(out, out_ptr.dtype.element_ty), mask=column < columns)


def forward_launch(
    operands: tuple[Any, ...], h: torch.Tensor, y: torch.Tensor, out: torch.Tensor, formula: Formula,
    interleaved: bool, capability: Capability | None = None,
) -> Launch:  # fmt: skip
    """Describe the launches that write h [T k, I], y [T k, H_out] and out [T, H_out], all contiguous, of few tokens.

    operands: x [T, H], w_gate_up [E, 2I, H], w_down [E, H_out, I], weights [T, k], b_gate_up [E, 2I] or None and b_down
    [E, H_out] or None, all of any strides; index [T, k], contiguous: what names no expert counts for nothing. The
    others are those of `portable_experts.gate_up_launch`.
    """
    x, w_gate_up, w_down, weights, b_gate_up, b_down, index = operands
    experts, pairs, capability = w_gate_up.shape[0], index.numel(), capability or capability_of(x.device)
    intermediate, hidden = h.shape[1], y.shape[1]
    (tokens, slots), rows = index.shape, max(16, triton.next_power_of_2(index.shape[0]))
    tile = expert_tile(rows, x.dtype, capability, vectorises(x, w_gate_up, w_down, multiple=8))
    programs, every = min(pairs, experts), experts < pairs
    of_pairs = {"index_ptr": index, "experts": experts, "SLOTS": slots, "EARLY": starts_early(capability)}
    of_pairs["UNIT"] = unit_of(intermediate, hidden, x.shape[1], x.stride(0))
    shared = of_pairs | {"tokens": tokens, "TOKENS": rows, "EVERY_EXPERT": every}
    block = min(SUM_COLUMNS, triton.next_power_of_2(hidden))
    summed = of_pairs | {
        "y_ptr": y, "weights_ptr": weights, "out_ptr": out, "columns": hidden,
        "BLOCK_SLOTS": triton.next_power_of_2(slots), "BLOCK": block,
    }  # fmt: skip
    summed |= strides(weights, "weights_token", "weights_slot")
    grid = (tokens, triton.cdiv(hidden, block))
    last = Launch(_weighted_sum_kernel, grid, summed, num_warps=4, num_stages=1)
    down = shared | {"h_ptr": h, "y_ptr": y, "N": hidden} | bias_arguments(b_down)
    down |= portable_experts.product_arguments(h, w_down, tile, tile.columns)
    grid = (triton.cdiv(hidden, tile.columns), programs)
    second = Launch(_down_kernel, grid, down, num_warps=tile.warps, num_stages=tile.stages, then=last)
    gated = shared | {"x_ptr": x, "h_ptr": h, "N": intermediate, "INTERLEAVED": interleaved}
    gated |= strides(x, "x_m", "x_k") | bias_arguments(b_gate_up) | formula.arguments()
    gated |= portable_experts.product_arguments(x, w_gate_up, tile, tile.columns // 2)
    grid = (triton.cdiv(intermediate, tile.columns // 2), programs)
    return Launch(_gate_up_kernel, grid, gated, num_warps=tile.warps, num_stages=tile.stages, then=second)


def forward(operands: tuple[Any, ...], formula: Formula, interleaved: bool) -> torch.Tensor:
    """Return out [T, H_out]; arguments as of `forward_launch`."""
    x, w_gate_up, w_down, _, _, _, index = operands
    h, out = x.new_empty((index.numel(), w_gate_up.shape[1] // 2)), x.new_empty((x.shape[0], w_down.shape[1]))
    if portable_gemv.takes(index, w_gate_up.shape[0]):
        run(portable_gemv.forward_launch, operands, h, out, formula, interleaved)
    else:
        y = x.new_empty((index.numel(), w_down.shape[1]))
        run(forward_launch, operands, h, y, out, formula, interleaved)
    return out
