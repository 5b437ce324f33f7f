"""The products of a mixture of experts on sorted rows; `routing.py` has the order of the rows and each function's task.

M rows, N columns of a product, K what it sums over. A program owns one tile: its rows have one expert, whose weights it
reads. Rows of tokens are read where they lie, through the routing, so that `gather` has nothing to do: an operand with
fewer than P rows is one of tokens.

Gate and up are neighbouring columns of one accumulator, whichever way the rows of w_gate_up are ordered: its columns
are mapped to these rows when the weights are read.

    pre = x w_gate_up^T + bias              h = gate's function of pre
    y = h w_down^T + bias                   out[token] = sum over slots of weight * y[row]
    d_h = dy w_down                         never stored; dy is d_out without the weight
    dots = sum over columns of h * d_h      the gradient of the weight, with dy * bias
         = sum over columns of dy * y       the same, and the only one that is right where pre and y are of fp8 operands
    d_pre = gate's derivative of weight * d_h,   wh = weight * h
    d_x[token] = sum over slots of d_pre w_gate_up,   d_w_gate_up = d_pre^T x,   d_w_down = dy^T wh
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swiglu_kernels.ops.experts import choice
from swiglu_kernels.ops.experts.routing import Routing, Store, as_mask, stored
from swiglu_kernels.ops.fp8.portable_codes import Quantised
from swiglu_kernels.ops.gate.arithmetic import (
    dot,
    gated,
    gated_gradients,
    grouped_tile,
    halves,
    multiple_of,
    output_tile,
    store_sum,
    strided_tile,
    unit_of,
)
from swiglu_kernels.ops.gate.formula import Formula
from swiglu_kernels.runtime.backend import Capability, capability_of, tl, triton
from swiglu_kernels.runtime.early import starts_early, wait_for_launch_ahead
from swiglu_kernels.runtime.launch import Launch, tile_needs_int64
from swiglu_kernels.runtime.precision import float32_dot_precision, round_to
from swiglu_kernels.runtime.shortcuts.plan import run
from swiglu_kernels.tiles.rules import Tile


@triton.jit
def _rows(pair_ptr, tile, slots, BLOCK_M: tl.constexpr, OF_TOKENS: tl.constexpr):
    """Return the pairs of a tile's rows, and which rows of an operand they are, 64 bits."""
    row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(pair_ptr + row)
    return pair, (tl.maximum(pair, 0) // slots).to(tl.int64) if OF_TOKENS else row


@triton.jit
def product(
    a_ptr, b_ptr, a_offsets, b_offsets, inside, K, a_k, b_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the fp32 tile of a b, for the offsets and masks of a's rows [BLOCK_M] and of b's columns [BLOCK_N]."""
    a_inside, b_inside = inside
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        k = k.to(tl.int64)
    a_offsets = a_offsets[:, None] + k[None, :] * a_k
    b_offsets = k[:, None] * b_k + b_offsets[None, :]
    step = tl.full([], BLOCK_K, tl.int64)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptr + a_offsets, mask=a_inside[:, None], other=0.0)
            b = tl.load(b_ptr + b_offsets, mask=b_inside[None, :], other=0.0)
        else:
            k_inside = first + tl.arange(0, BLOCK_K) < K
            a = tl.load(a_ptr + a_offsets, mask=a_inside[:, None] & k_inside[None, :], other=0.0)
            b = tl.load(b_ptr + b_offsets, mask=k_inside[:, None] & b_inside[None, :], other=0.0)
        accumulator = dot(a, b, accumulator, PRECISION)
        a_ptr += step * a_k
        b_ptr += step * b_k
    return accumulator


@triton.jit
def _scaled(product, a_scales_ptr, w_scales_ptr, row, column, row_inside, column_inside):
    """Return a product of codes times the scales of its rows and columns; without a_scales_ptr the product."""
    if a_scales_ptr is not None:
        of_rows = tl.load(a_scales_ptr + row, mask=row_inside, other=0.0)
        of_columns = tl.load(w_scales_ptr + column, mask=column_inside, other=0.0)
        product *= of_rows[:, None] * of_columns[None, :]
    return product


@triton.jit
def even_and_odd(pair):
    """Return the even and the odd columns of a tile."""
    return tl.split(tl.reshape(pair, (pair.shape[0], pair.shape[1] // 2, 2)))


@triton.jit
def both_columns(tile, N, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr):
    """Return the rows of w_gate_up that are a tile's 2 BLOCK_N columns, from its first on, that one, and a mask.

    The first is added to the pointers, whose positions have 64 bits.
    """
    both = tl.arange(0, 2 * BLOCK_N)
    if INTERLEAVED:
        column, first = both, tile.to(tl.int64) * BLOCK_N * 2
    else:
        column, first = both % 2 * N + both // 2, tile.to(tl.int64) * BLOCK_N
    if WIDE:
        column = column.to(tl.int64)
    return column, first, tile * BLOCK_N + both // 2 < N


@triton.jit
def _store_gated(
    gate, up, h_ptr, pre_ptr, tile_m, tile_n, rows, N, numbers,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Store fp32 tiles of gate and up in the two halves of pre, and h; either pointer may be None."""
    if pre_ptr is not None:
        position, offsets, inside = strided_tile(tile_m, tile_n, rows, N, 2 * N, 1, BLOCK_M, BLOCK_N, WIDE)
        tl.store(pre_ptr + position + offsets, round_to(gate, pre_ptr.dtype.element_ty), mask=inside)
        tl.store(pre_ptr + N + position + offsets, round_to(up, pre_ptr.dtype.element_ty), mask=inside)
    if h_ptr is not None:
        h = gated(gate, up, numbers, FORMULA)
        position, offsets, inside = output_tile(tile_m, tile_n, rows, N, BLOCK_M, BLOCK_N, WIDE)
        tl.store(h_ptr + position + offsets, round_to(h, h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_up_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, h_ptr, pre_ptr, pair_ptr, tile_expert_ptr, rows, N, K, slots,
    x_m, x_k, w_e, w_n, w_k, bias_e, bias_n, multiplier, alpha, limit, up_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, OF_TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORMULA: tl.constexpr, EARLY: tl.constexpr,
    UNIT: tl.constexpr, N_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of h [rows, N] and pre [rows, 2 N]; N intermediate, K hidden."""
    numbers = multiplier, alpha, limit, up_offset
    N, K, x_m = multiple_of(N, UNIT), multiple_of(K, UNIT), multiple_of(x_m, UNIT)
    w_n, w_k = multiple_of(w_n, N_UNIT), multiple_of(w_k, K_UNIT)
    wait_for_launch_ahead(EARLY)
    tile_m, tile_n = grouped_tile(rows, N, BLOCK_M, BLOCK_N, GROUP)
    expert = tl.load(tile_expert_ptr + tile_m).to(tl.int64)
    if expert < 0:
        return
    pair, source = _rows(pair_ptr, tile_m, slots, BLOCK_M, OF_TOKENS)
    column, first, inside = both_columns(tile_n, N, BLOCK_N, INTERLEAVED, WIDE)
    pre = product(
        x_ptr, w_ptr + expert * w_e + first * w_n, source * x_m, column * w_n, (pair >= 0, inside), K, x_k, w_k,
        BLOCK_M, 2 * BLOCK_N, BLOCK_K, EVEN_K, WIDE, PRECISION,
    )  # fmt: skip
    pre = _scaled(pre, x_scales_ptr, w_scales_ptr, source, expert * 2 * N + first + column, pair >= 0, inside)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * bias_e + first * bias_n + column * bias_n, mask=inside, other=0.0)
        pre += bias.to(tl.float32)[None, :]
    if pre_ptr is not None and INTERLEAVED:
        position, offsets, both_inside = output_tile(tile_m, tile_n, rows, 2 * N, BLOCK_M, 2 * BLOCK_N, WIDE)
        tl.store(pre_ptr + position + offsets, round_to(pre, pre_ptr.dtype.element_ty), mask=both_inside)
    gate, up = even_and_odd(pre)
    halves_ptr = None if INTERLEAVED else pre_ptr
    if BLOCK_N >= 128:  # one half after the other: whole tiles of gate, up and h spill registers
        left_gate, right_gate = halves(gate)
        left_up, right_up = halves(up)
        _store_gated(
            left_gate, left_up, h_ptr, halves_ptr, tile_m, 2 * tile_n, rows, N, numbers,
            BLOCK_M, BLOCK_N // 2, WIDE, FORMULA,
        )  # fmt: skip
        _store_gated(
            right_gate, right_up, h_ptr, halves_ptr, tile_m, 2 * tile_n + 1, rows, N,
            numbers, BLOCK_M, BLOCK_N // 2, WIDE, FORMULA,
        )  # fmt: skip
    else:
        _store_gated(
            gate, up, h_ptr, halves_ptr, tile_m, tile_n, rows, N, numbers,
            BLOCK_M, BLOCK_N, WIDE, FORMULA,
        )  # fmt: skip


@triton.jit
def _rows_kernel(
    a_ptr, w_ptr, a_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, pair_ptr, tile_expert_ptr, rows, N, K,
    a_m, w_e, w_n, w_k, bias_e, bias_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    UNIT: tl.constexpr, N_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of out [rows, N] = a [rows, K] w[expert]^T + bias[expert], of codes with their scales."""
    N, K, a_m = multiple_of(N, UNIT), multiple_of(K, UNIT), multiple_of(a_m, UNIT)
    w_n, w_k = multiple_of(w_n, N_UNIT), multiple_of(w_k, K_UNIT)
    wait_for_launch_ahead(EARLY)
    tile_m, tile_n = grouped_tile(rows, N, BLOCK_M, BLOCK_N, GROUP)
    expert = tl.load(tile_expert_ptr + tile_m).to(tl.int64)
    if expert < 0:
        return
    pair, row = _rows(pair_ptr, tile_m, 1, BLOCK_M, False)
    n = tl.arange(0, BLOCK_N)
    inside = tile_n * BLOCK_N + n < N
    first = tile_n.to(tl.int64) * BLOCK_N
    if WIDE:
        n = n.to(tl.int64)
    out = product(
        a_ptr, w_ptr + expert * w_e + first * w_n, row * a_m, n * w_n, (pair >= 0, inside), K, 1, w_k, BLOCK_M, BLOCK_N,
        BLOCK_K, EVEN_K, WIDE, PRECISION,
    )  # fmt: skip
    out = _scaled(out, a_scales_ptr, w_scales_ptr, row, expert * N + first + n, pair >= 0, inside)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * bias_e + (first + n) * bias_n, mask=inside, other=0.0)
        out += bias.to(tl.float32)[None, :]
    position, offsets, inside = output_tile(tile_m, tile_n, rows, N, BLOCK_M, BLOCK_N, WIDE)
    tl.store(out_ptr + position + offsets, round_to(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_gradients(
    d_h, weight, pointers, tile_m, tile_n, rows, N, numbers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, INTERLEAVED: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Turn one fp32 tile of d_h and the saved gate and up into d_pre and wh; return the sums of h * d_h [BLOCK_M]."""
    pre_ptr, d_pre_ptr, wh_ptr = pointers
    position, offsets, inside = strided_tile(tile_m, tile_n, rows, N, 2 * N, 1, BLOCK_M, BLOCK_N, WIDE)
    if INTERLEAVED:
        position, offsets, both_inside = output_tile(tile_m, tile_n, rows, 2 * N, BLOCK_M, 2 * BLOCK_N, WIDE)
        gate, up = even_and_odd(tl.load(pre_ptr + position + offsets, mask=both_inside, other=0.0).to(tl.float32))
    else:
        gate = tl.load(pre_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(pre_ptr + N + position + offsets, mask=inside, other=0.0).to(tl.float32)
    d_gate, d_up = gated_gradients(weight * d_h, gate, up, numbers, FORMULA)
    dtype: tl.constexpr = d_pre_ptr.dtype.element_ty
    if INTERLEAVED:
        tl.store(d_pre_ptr + position + offsets, round_to(tl.interleave(d_gate, d_up), dtype), mask=both_inside)
    else:
        tl.store(d_pre_ptr + position + offsets, round_to(d_gate, dtype), mask=inside)
        tl.store(d_pre_ptr + N + position + offsets, round_to(d_up, dtype), mask=inside)
    h = gated(gate, up, numbers, FORMULA)
    if wh_ptr is not None:
        position, offsets, inside = output_tile(tile_m, tile_n, rows, N, BLOCK_M, BLOCK_N, WIDE)
        tl.store(wh_ptr + position + offsets, round_to(weight * h, wh_ptr.dtype.element_ty), mask=inside)
    return tl.sum(tl.where(inside, h * d_h, 0.0), 1)


@triton.jit
def _store_halves(
    d_h, weight, pointers, tile_m, tile_n, rows, N, numbers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, INTERLEAVED: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """As `_store_gradients`, in parts of 32 columns, one after the other: whole tiles of six kinds spill registers."""
    if BLOCK_N > 32:
        left, right = halves(d_h)
        dots = _store_halves(
            left, weight, pointers, tile_m, 2 * tile_n, rows, N, numbers, BLOCK_M, BLOCK_N // 2, WIDE, INTERLEAVED,
            FORMULA,
        )  # fmt: skip
        dots += _store_halves(
            right, weight, pointers, tile_m, 2 * tile_n + 1, rows, N, numbers, BLOCK_M, BLOCK_N // 2, WIDE, INTERLEAVED,
            FORMULA,
        )  # fmt: skip
    else:
        dots = _store_gradients(
            d_h, weight, pointers, tile_m, tile_n, rows, N, numbers, BLOCK_M, BLOCK_N, WIDE,
            INTERLEAVED, FORMULA,
        )  # fmt: skip
    return dots


@triton.jit
def _down_backward_kernel(
    dy_ptr, w_ptr, pre_ptr, weights_ptr, d_pre_ptr, wh_ptr, dots_ptr, pair_ptr, tile_expert_ptr, rows, N, K, slots,
    dy_m, dy_k, w_e, w_n, w_k, weights_token, weights_slot, multiplier, alpha, limit, up_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, OF_TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORMULA: tl.constexpr,
    UNIT: tl.constexpr, N_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of d_pre [rows, 2 N], wh [rows, N] and its part of dots; N intermediate, K hidden."""
    numbers = multiplier, alpha, limit, up_offset
    N, K, dy_m = multiple_of(N, UNIT), multiple_of(K, UNIT), multiple_of(dy_m, UNIT)
    w_n, w_k = multiple_of(w_n, N_UNIT), multiple_of(w_k, K_UNIT)
    tile_m, tile_n = grouped_tile(rows, N, BLOCK_M, BLOCK_N, GROUP)
    expert = tl.load(tile_expert_ptr + tile_m).to(tl.int64)
    if expert < 0:
        return
    pair, source = _rows(pair_ptr, tile_m, slots, BLOCK_M, OF_TOKENS)
    n = tl.arange(0, BLOCK_N)
    inside = tile_n * BLOCK_N + n < N
    if WIDE:
        n = n.to(tl.int64)
    d_h = product(
        dy_ptr, w_ptr + expert * w_e + tile_n.to(tl.int64) * BLOCK_N * w_n, source * dy_m, n * w_n, (pair >= 0, inside),
        K, dy_k, w_k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, WIDE, PRECISION,
    )  # fmt: skip
    at_weight = weights_ptr + (pair // slots).to(tl.int64) * weights_token + pair % slots * weights_slot
    weight = tl.load(at_weight, mask=pair >= 0, other=0.0).to(tl.float32)[:, None]
    dots = _store_halves(
        d_h, weight, (pre_ptr, d_pre_ptr, wh_ptr), tile_m, tile_n, rows, N, numbers, BLOCK_M, BLOCK_N, WIDE,
        INTERLEAVED, FORMULA,
    )  # fmt: skip
    at_dots = dots_ptr + tile_n.to(tl.int64) * rows + tile_m.to(tl.int64) * BLOCK_M
    tl.store(at_dots + tl.arange(0, BLOCK_M), dots)


@triton.jit
def _weight_grad_kernel(
    a_ptr, b_ptr, d_w_ptr, pair_ptr, starts_ptr, counts_ptr, M, N, slots, a_row, a_m, b_row, b_n, d_w_e, d_w_m, d_w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, A_OF_TOKENS: tl.constexpr, B_OF_TOKENS: tl.constexpr,
    UNIT: tl.constexpr, M_UNIT: tl.constexpr, N_UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of d_w[expert] [M, N], the sum over the expert's rows of a [rows, M] times b [rows, N]."""
    M, N = multiple_of(M, UNIT), multiple_of(N, UNIT)
    a_row, b_row = multiple_of(a_row, UNIT), multiple_of(b_row, UNIT)
    d_w_m, d_w_n = multiple_of(d_w_m, M_UNIT), multiple_of(d_w_n, N_UNIT)
    expert = tl.program_id(1)
    tile_m, tile_n = tl.program_id(0) % tl.cdiv(M, BLOCK_M), tl.program_id(0) // tl.cdiv(M, BLOCK_M)
    first = tl.load(starts_ptr + expert)
    count = tl.load(counts_ptr + expert)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_inside, n_inside = (m < M)[None, :], (n < N)[None, :]
    d_w = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for done in range(0, count, BLOCK_ROWS):
        number = done + tl.arange(0, BLOCK_ROWS)
        inside = (number < count)[:, None]
        row = (first + number).to(tl.int64)
        a_rows, b_rows = row, row
        if A_OF_TOKENS or B_OF_TOKENS:
            token = (tl.load(pair_ptr + row, mask=number < count, other=0) // slots).to(tl.int64)
            a_rows, b_rows = token if A_OF_TOKENS else row, token if B_OF_TOKENS else row
        a = tl.load(a_ptr + a_rows[:, None] * a_row + (m * a_m)[None, :], mask=inside & m_inside, other=0.0)
        b = tl.load(b_ptr + b_rows[:, None] * b_row + (n * b_n)[None, :], mask=inside & n_inside, other=0.0)
        d_w = dot(tl.trans(a), b, d_w, PRECISION)
    position, offsets, inside = strided_tile(tile_m, tile_n, M, N, d_w_m, d_w_n, BLOCK_M, BLOCK_N, WIDE)
    at = d_w_ptr + expert.to(tl.int64) * d_w_e + position + offsets
    store_sum(at, d_w, inside, d_w_ptr.dtype != a_ptr.dtype)


@triton.jit
def _row_sums_kernel(
    a_ptr, weights_ptr, out_ptr, pair_ptr, starts_ptr, counts_ptr, N, slots, a_row, a_n, weights_token, weights_slot,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, OF_TOKENS: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of out[expert] [N], the sum over the expert's rows of a, or of their weights times a."""
    expert = tl.program_id(1)
    first = tl.load(starts_ptr + expert)
    count = tl.load(counts_ptr + expert)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)  # across threads they are added up but once
    for done in range(0, count, BLOCK_ROWS):
        number = done + tl.arange(0, BLOCK_ROWS)
        row = (first + number).to(tl.int64)
        pair = tl.load(pair_ptr + row, mask=number < count, other=0)
        token = (pair // slots).to(tl.int64)
        source = token if OF_TOKENS else row
        inside = (number < count)[:, None] & (n < N)[None, :]
        a = tl.load(a_ptr + source[:, None] * a_row + n.to(tl.int64)[None, :] * a_n, mask=inside, other=0.0)
        a = a.to(tl.float32)
        if weights_ptr is not None:
            at = weights_ptr + token * weights_token + pair % slots * weights_slot
            a *= tl.load(at, mask=number < count, other=0.0).to(tl.float32)[:, None]
        sums += a
    out = tl.sum(sums, 0)
    tl.store(out_ptr + expert.to(tl.int64) * N + n, round_to(out, out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _slot_grads_kernel(
    dots_ptr, dy_ptr, bias_ptr, out_ptr, row_ptr, tile_expert_ptr, pairs, rows, parts, K, slots,
    dy_m, dy_k, bias_e, bias_k, TILE_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradients of BLOCK_PAIRS routing weights: each row's dots, and dy times the bias of its expert."""
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    row = tl.load(row_ptr + pair, mask=pair < pairs, other=-1).to(tl.int64)
    routed = row >= 0
    out = tl.zeros((BLOCK_PAIRS,), dtype=tl.float32)
    at = dots_ptr + row
    for _ in range(parts):
        out += tl.load(at, mask=routed, other=0.0)
        at += rows
    if bias_ptr is not None:
        expert = tl.load(tile_expert_ptr + row // TILE_ROWS, mask=routed, other=0).to(tl.int64)
        token = (pair // slots).to(tl.int64)
        sums = tl.zeros((BLOCK_PAIRS, BLOCK_K), dtype=tl.float32)
        for first in range(0, K, BLOCK_K):
            k = (first + tl.arange(0, BLOCK_K)).to(tl.int64)[None, :]
            inside = routed[:, None] & (k < K)
            dy = tl.load(dy_ptr + token[:, None] * dy_m + k * dy_k, mask=inside, other=0.0).to(tl.float32)
            bias = tl.load(bias_ptr + expert[:, None] * bias_e + k * bias_k, mask=inside, other=0.0).to(tl.float32)
            sums += dy * bias
        out += tl.sum(sums, 1)
    tl.store(out_ptr + pair, round_to(out, out_ptr.dtype.element_ty), mask=pair < pairs)


@triton.jit
def _row_dots_kernel(dy_ptr, y_ptr, dots_ptr, pair_ptr, starts_ptr, experts, K, slots, dy_m, dy_k, BLOCK: tl.constexpr):
    """dots of one row: the sum of dy * y."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(starts_ptr + experts):
        return
    pair = tl.load(pair_ptr + row)
    token = (tl.maximum(pair, 0) // slots).to(tl.int64)
    column = tl.arange(0, BLOCK).to(tl.int64)
    dots = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, K, BLOCK):
        inside = (first + column < K) & as_mask(pair >= 0)
        dy = tl.load(dy_ptr + token * dy_m + (first + column) * dy_k, mask=inside, other=0.0).to(tl.float32)
        dots += dy * tl.load(y_ptr + row * K + first + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(dots_ptr + row, tl.sum(dots, 0))


Scales = tuple[Tensor | None, Tensor | None]
"""Of codes: fp32 of the rows of a, [T] or [P], and of those of the weights, [E, N]; Nones: operands are no codes."""
NO_SCALES: Scales = (None, None)


def strides(tensor: Tensor | None, *names: str) -> dict[str, int | None]:
    """Return the strides of a tensor under the names of a kernel's arguments; None for each where there is none."""
    return dict(zip(names, [None] * len(names) if tensor is None else tensor.stride(), strict=True))


def bias_arguments(bias: Tensor | None) -> dict[str, Any]:
    """Return the arguments for a bias [E, N] or None."""
    return {"bias_ptr": bias} | strides(bias, "bias_e", "bias_n")


def weight_arguments(w: Tensor) -> dict[str, Any]:
    """Return the arguments for a weight [E, N, K] and its depth."""
    units = {"N_UNIT": unit_of(w.stride(1)), "K_UNIT": unit_of(w.stride(2))}
    return {"w_ptr": w, "K": w.shape[2]} | strides(w, "w_e", "w_n", "w_k") | units


def product_arguments(a: Tensor, w: Tensor, tile: Tile, columns: int) -> dict[str, Any]:
    """Return what all kernels with `product` share: the columns of w [E, N, K], and how many a tile has."""
    return weight_arguments(w) | {
        "BLOCK_N": columns, "BLOCK_K": tile.depth, "EVEN_K": w.shape[2] % tile.depth == 0,
        "WIDE": tile_needs_int64((a.stride(), (1, tile.depth)), (w.stride()[1:], (w.shape[1], tile.depth))),
        "PRECISION": float32_dot_precision(),
    }  # fmt: skip


def _routed_launch(
    kernel: Any, a: Tensor, w: Tensor, pair: Tensor, tile_expert: Tensor, tile: Tile,
    columns: int, arguments: dict[str, Any],
) -> Launch:  # fmt: skip
    """Describe a product of the rows of a routing, of so many columns a tile; N is that of `arguments`."""
    rows = {
        "pair_ptr": pair, "tile_expert_ptr": tile_expert, "rows": pair.shape[0],
        "BLOCK_M": tile.rows, "GROUP": tile.group, "UNIT": unit_of(arguments["N"], *a.shape[1:], a.stride(0)),
    }  # fmt: skip
    grid = (tile_expert.shape[0] * triton.cdiv(arguments["N"], columns),)
    everything = arguments | rows | product_arguments(a, w, tile, columns)
    return Launch(kernel, grid, everything, num_warps=tile.warps, num_stages=tile.stages)


def gate_up_launch(
    x: Tensor, w_gate_up: Tensor, outs: tuple[Tensor | None, Tensor | None],
    routing: Sequence[Any], bias: Tensor | None, formula: Formula, interleaved: bool,
    capability: Capability | None = None, scales: Scales = NO_SCALES,
) -> Launch:  # fmt: skip
    """Describe the launch that writes h [P, I] and pre [P, 2I], contiguous, or one of them.

    Args:
        x: [T, H] or [P, H], any strides.
        w_gate_up: [E, 2I, H], any strides.
        outs: h and pre, written; None: not wanted.
        routing: a `Routing`, or what is in it.
        bias: [E, 2I], any strides, or None.
        formula: the gate.
        interleaved: rows of w_gate_up are gate, up, gate, up, ...; else the gate's come first.
        capability: of the GPU to choose the tile for; None for that of the tensors' device. So it is for the others.
        scales: of x and w_gate_up, where these are codes.
    """
    (h, pre), (pair, _, tile_expert, _, _, slots, _) = outs, routing
    N = w_gate_up.shape[1] // 2
    rows = pair.shape[0] // tile_expert.shape[0]
    tile = choice.tile("experts-gate-up", (rows, w_gate_up.shape[2], N), capability, x, w_gate_up)
    arguments = {
        "x_ptr": x, "h_ptr": h, "pre_ptr": pre, "N": N, "slots": slots, "x_scales_ptr": scales[0],
        "w_scales_ptr": scales[1], "OF_TOKENS": x.shape[0] < pair.shape[0], "INTERLEAVED": interleaved,
        "EARLY": starts_early(capability or capability_of(x.device)),
    }  # fmt: skip
    arguments |= strides(x, "x_m", "x_k") | bias_arguments(bias) | formula.arguments()
    return _routed_launch(_gate_up_kernel, x, w_gate_up, pair, tile_expert, tile, tile.columns // 2, arguments)


def rows_launch(
    a: Tensor, w: Tensor, out: Tensor, pair: Tensor, tile_expert: Tensor, bias: Tensor | None,
    capability: Capability | None = None, kernel: str = "experts-down", scales: Scales = NO_SCALES,
) -> Launch:  # fmt: skip
    """Describe the launch that writes out [P, N] = a [P, K] w[expert]^T + bias[expert]; w [E, N, K], any strides.

    Of a the last stride is 1.

    `kernel` is what it is tuned as; of "experts-input-grad" K is both gate and up. `scales` are those of a and w, where
    these are codes.
    """
    intermediate = w.shape[2] // 2 if kernel == "experts-input-grad" else w.shape[2]
    rows = pair.shape[0] // tile_expert.shape[0]
    tile = choice.tile(kernel, (rows, w.shape[1], intermediate), capability, a, w)
    arguments = {"a_ptr": a, "a_m": a.stride(0), "out_ptr": out, "N": w.shape[1]}
    arguments |= {"a_scales_ptr": scales[0], "w_scales_ptr": scales[1]}
    arguments |= {"EARLY": starts_early(capability or capability_of(a.device))} | bias_arguments(bias)
    return _routed_launch(_rows_kernel, a, w, pair, tile_expert, tile, tile.columns, arguments)


def down_backward_launch(
    dy: Tensor, w: Tensor, pre: Tensor, weights: Tensor, outs: tuple[Tensor, Tensor | None, Tensor],
    routing: Sequence[Any], formula: Formula, interleaved: bool, capability: Capability | None = None,
) -> Launch:  # fmt: skip
    """Describe the launch that turns dy [T, H] or [P, H] into d_pre, wh and dots.

    Args:
        dy: any strides, as weights [T, k].
        w: w_down as [E, I, H], any strides.
        pre: [P, 2I], contiguous.
        weights: of any dtype.
        outs: d_pre [P, 2I], which may be pre, wh [P, I], or None where it is not wanted, and dots [`dots_parts`, P];
            contiguous, written.
        routing, formula, interleaved: as for `gate_up_launch`.
    """
    (d_pre, wh, dots), (pair, _, tile_expert, _, _, slots, _) = outs, routing
    N = w.shape[1]
    rows = pair.shape[0] // tile_expert.shape[0]
    tile = choice.tile("experts-hidden-grad", (rows, w.shape[2], N), capability, dy, w)
    columns = tile.columns // 2
    assert dots.shape[0] == triton.cdiv(N, columns), "a part for each tile of columns"
    arguments = {
        "dy_ptr": dy, "pre_ptr": pre, "weights_ptr": weights, "d_pre_ptr": d_pre, "wh_ptr": wh, "dots_ptr": dots,
        "N": N, "slots": slots, "OF_TOKENS": dy.shape[0] < pair.shape[0], "INTERLEAVED": interleaved,
    }  # fmt: skip
    arguments |= strides(dy, "dy_m", "dy_k") | strides(weights, "weights_token", "weights_slot") | formula.arguments()
    return _routed_launch(_down_backward_kernel, dy, w, pair, tile_expert, tile, columns, arguments)


def dots_parts(dy: Tensor, w: Tensor, routing: Routing, capability: Capability | None = None) -> int:
    """Return how many parts `down_backward_launch` writes of each row's dots; w is w_down as [E, I, H]."""
    _, N, K = w.shape
    tile = choice.tile("experts-hidden-grad", (routing.tile_rows, K, N), capability, dy, w)
    return triton.cdiv(N, tile.columns // 2)


def weight_grad_launch(
    a: Tensor, b: Tensor, d_w: Tensor, routing: Sequence[Any], capability: Capability | None = None
) -> Launch:
    """Describe the launch that writes d_w [E, M, N], the sums of a^T b over each expert's rows; any strides.

    A d_w in float32, with a and b of 16 bits, is added to.
    a is [P, M] or [T, M], b [P, N] or [T, N]. The gradient of an expert without rows is zero.
    """
    pair, _, _, starts, counts, slots, tile_rows = routing
    experts, M, N = d_w.shape
    of_tokens = a.shape[0] < pair.shape[0]
    # Of w_down the rows of a are those of tokens, and N is the intermediate size; of w_gate_up M is gate and up.
    kernel = "experts-down-weight-grad" if of_tokens else "experts-weight-grad"
    sizes = tile_rows, *((M, N) if of_tokens else (N, M // 2))
    tile = choice.tile(kernel, sizes, capability, a, b, d_w, mean_rows=pair.shape[0] // experts)
    arguments = {
        "a_ptr": a, "b_ptr": b, "d_w_ptr": d_w, "pair_ptr": pair, "starts_ptr": starts, "counts_ptr": counts, "M": M,
        "N": N, "slots": slots, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_ROWS": tile.depth,
        "WIDE": tile_needs_int64((d_w.stride()[1:], (tile.rows, tile.columns))), "PRECISION": float32_dot_precision(),
        "A_OF_TOKENS": of_tokens, "B_OF_TOKENS": b.shape[0] < pair.shape[0],
        "UNIT": unit_of(M, N, a.stride(0), b.stride(0)), "M_UNIT": unit_of(d_w.stride(1)),
        "N_UNIT": unit_of(d_w.stride(2)),
    }  # fmt: skip
    arguments |= strides(a, "a_row", "a_m") | strides(b, "b_row", "b_n") | strides(d_w, "d_w_e", "d_w_m", "d_w_n")
    grid = (triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.columns), experts)
    return Launch(_weight_grad_kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)


def row_sums_launch(a: Tensor, weights: Tensor | None, out: Tensor, routing: Sequence[Any]) -> Launch:
    """Describe the launch that writes out [E, N], contiguous: sums of a [P or T, N] over each expert's rows."""
    pair, _, _, starts, counts, slots, _ = routing
    (experts, N), block = out.shape, 64
    arguments = {
        "a_ptr": a, "weights_ptr": weights, "out_ptr": out, "pair_ptr": pair, "starts_ptr": starts,
        "counts_ptr": counts, "N": N, "slots": slots,
        "BLOCK_ROWS": 32, "BLOCK_N": block, "OF_TOKENS": a.shape[0] < pair.shape[0],
    }  # fmt: skip
    arguments |= strides(a, "a_row", "a_n") | strides(weights, "weights_token", "weights_slot")
    return Launch(_row_sums_kernel, (triton.cdiv(N, block), experts), arguments, num_warps=4, num_stages=2)


def slot_grads_launch(dots: Tensor, dy: Tensor, bias: Tensor | None, out: Tensor, routing: Sequence[Any]) -> Launch:
    """Describe the launch that writes the gradient of the routing weights, out [T, k], contiguous.

    dots are as `down_backward_launch` writes them, dy is [T, H], bias that of w_down, [E, H], or None; any strides. The
    gradient of a pair without a row is zero.
    """
    _, row, tile_expert, _, _, slots, _ = routing
    pairs, block = row.shape[0], 16
    arguments = {
        "dots_ptr": dots, "dy_ptr": dy, "bias_ptr": bias, "out_ptr": out, "row_ptr": row,
        "tile_expert_ptr": tile_expert, "pairs": pairs, "rows": dots.shape[1], "parts": dots.shape[0], "K": dy.shape[1],
        "slots": slots, "TILE_ROWS": dots.shape[1] // tile_expert.shape[0], "BLOCK_PAIRS": block, "BLOCK_K": 128,
    }  # fmt: skip
    arguments |= strides(dy, "dy_m", "dy_k") | strides(bias, "bias_e", "bias_k")
    return Launch(_slot_grads_kernel, (triton.cdiv(pairs, block),), arguments, num_warps=8, num_stages=1)


def row_dots_launch(dy: Tensor, y: Tensor, dots: Tensor, routing: Sequence[Any]) -> Launch:
    """Describe the launch that writes dots [1, P], contiguous, from dy [T, H], any strides, and y [P, H], contiguous.

    Dots of rows behind the last in use are not written.
    """
    pair, _, _, starts, _, slots, _ = routing
    arguments = {
        "dy_ptr": dy, "y_ptr": y, "dots_ptr": dots, "pair_ptr": pair, "starts_ptr": starts,
        "experts": starts.shape[0] - 1, "K": y.shape[1], "slots": slots,
        "BLOCK": min(1024, triton.next_power_of_2(max(y.shape[1], 1))),
    }  # fmt: skip
    arguments |= strides(dy, "dy_m", "dy_k")
    return Launch(_row_dots_kernel, (y.shape[0],), arguments, num_warps=4, num_stages=1)


def gather(x: Tensor, routing: Routing) -> Tensor:
    """Return x: these kernels read the rows of tokens where they are."""
    return x


def gate_up(
    x: Tensor, w_gate_up: Tensor, routing: Routing, bias: Tensor | None, formula: Formula, interleaved: bool,
    stores: tuple[Store, Store] = (True, False), codes: tuple[Scales, torch.dtype | None] = (NO_SCALES, None),
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return h [P, I] and pre [P, 2I], each None unless wanted; of codes, with their scales and the results' dtype."""
    (rows, both), (scales, dtype) = (routing.pair.shape[0], w_gate_up.shape[1]), codes
    h = stored(stores[0], x, (rows, both // 2), dtype)
    pre = stored(stores[1], x, (rows, both), dtype)
    run(gate_up_launch, x, w_gate_up, (h, pre), routing, bias, formula, interleaved, None, scales)
    return h, pre


def gate_up_of_codes(
    x: Quantised, w_gate_up: Quantised, routing: Routing, bias: Tensor | None, formula: Formula,
    interleaved: bool, dtype: torch.dtype, store_pre: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """`gate_up` of operands in fp8: x of tokens [T, H]; h and pre are in `dtype`."""
    codes = (x.scales, w_gate_up.scales), dtype
    return gate_up(x.codes, w_gate_up.codes, routing, bias, formula, interleaved, (True, store_pre), codes)


def down_of_codes(h: Quantised, w_down: Quantised, routing: Routing, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`down` of operands in fp8; y is in `dtype`."""
    return down(h.codes, w_down.codes, routing, bias, scales=(h.scales, w_down.scales), dtype=dtype)


def row_dots(dy: Tensor, y: Tensor, routing: Routing) -> Tensor:
    """Return dots [1, P], fp32, from dy [T, H] and y [P, H]: those of rows in use."""
    dots = y.new_empty((1, y.shape[0]), dtype=torch.float32)
    run(row_dots_launch, dy, y, dots, routing)
    return dots


def down(
    h: Tensor, w_down: Tensor, routing: Routing, bias: Tensor | None, out: Tensor | None = None,
    kernel: str = "experts-down", scales: Scales = NO_SCALES, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return y [P, H] = h w_down[expert]^T + bias[expert]; kernel and scales as of `rows_launch`, dtype that of y."""
    if out is None:
        out = h.new_empty((h.shape[0], w_down.shape[1]), dtype=dtype)
    run(rows_launch, h, w_down, out, routing.pair, routing.tile_expert, bias, None, kernel, scales)
    return out


def rows_times(d_pre: Tensor, w_gate_up: Tensor, routing: Routing) -> Tensor:
    """Return d_pre w_gate_up[expert], [P, H]."""
    return down(d_pre, w_gate_up.mT, routing, None, kernel="experts-input-grad")


def down_backward(
    dy: Tensor, w_down: Tensor, pre: Tensor, weights: Tensor, routing: Routing,
    formula: Formula, interleaved: bool, stores: tuple[Store, Store, Store] = (True, True, True),
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return d_pre [P, 2I], wh [P, I] or None, and dots [parts, P]."""
    w = w_down.mT
    d_pre, wh = stored(stores[0], pre, pre.shape), stored(stores[1], pre, (pre.shape[0], w.shape[1]))
    dots = stored(stores[2], pre, (dots_parts(dy, w, routing), pre.shape[0]), torch.float32)
    assert isinstance(d_pre, Tensor)
    assert isinstance(dots, Tensor)
    run(down_backward_launch, dy, w, pre, weights, (d_pre, wh, dots), routing, formula, interleaved)
    return d_pre, wh, dots


def weight_grad(
    a: Tensor, b: Tensor, routing: Routing, like: Tensor, with_sums: bool = False, add_to: Tensor | None = None
) -> tuple[Tensor, None]:
    """Return a^T b over each expert's rows, [E, M, N], with the strides of `like`, and never the sums of a.

    `add_to`: in float32, where a and b have 16 bits: it is added to, and returned.
    """
    d_w = torch.empty_like(like) if add_to is None else add_to
    run(weight_grad_launch, a, b, d_w, routing)
    return d_w, None


def row_sums(a: Tensor, weights: Tensor | None, routing: Routing, experts: int) -> Tensor:
    """Return the fp32 sums over each expert's rows of a [P or T, N], or of weights [T, k] times a: [E, N], rounded."""
    out = a.new_empty((experts, a.shape[1]))
    run(row_sums_launch, a, weights, out, routing)
    return out


def slot_grads(dots: Tensor, dy: Tensor, bias: Tensor | None, routing: Routing, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the routing weights, [T, k], from the dots of any set of kernels and dy [T, H]."""
    out = dots.new_empty((dy.shape[0], routing.slots), dtype=dtype)
    run(slot_grads_launch, dots, dy, bias, out, routing)
    return out
