"""The kernels of swiglu_mlp's way back through w_down: out = h w_down^T, h = silu(gate) * up.

M tokens, N intermediate, K hidden of x, H hidden of out.

    d_h [M, N] = d_out w_down                      never stored: its fp32 accumulator goes straight into the gate's
    d_gate, d_up, h = f(d_h, gate, up)             derivative. h is made here again, so that nobody has to keep it.
    d_w_down [H, N] = d_out^T h                    a second launch, each sum in one program: the same bits on every run
"""

import torch

from swiglu_kernels.ops.gate.arithmetic import (
    dot,
    gated,
    gated_gradients,
    grouped_tile,
    halves,
    output_tile,
    round_to,
    store_sum,
    strided_tile,
)
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu import hopper_products
from swiglu_kernels.ops.glu.portable_forward import Pair, tiled_launch
from swiglu_kernels.ops.mlp import choice
from swiglu_kernels.runtime.backend import tl, triton
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.candidates import Choice


@triton.jit
def _one_product(
    a_ptr, b_ptr, tile_row, tile_column, sizes, strides, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the fp32 tile of a b for a [rows, depth] and b [depth, columns]."""
    a_row, a_depth, b_depth, b_column = strides
    rows, columns, depth = sizes
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    k = tl.arange(0, BLOCK_DEPTH)
    row_inside = (tile_row * BLOCK_ROWS + row < rows)[:, None]
    column_inside = (tile_column * BLOCK_COLUMNS + column < columns)[None, :]
    if WIDE:
        row = row.to(tl.int64)
        column = column.to(tl.int64)
        k = k.to(tl.int64)
    a_ptr += tile_row.to(tl.int64) * BLOCK_ROWS * a_row
    b_ptr += tile_column.to(tl.int64) * BLOCK_COLUMNS * b_column
    a_offsets = row[:, None] * a_row + k[None, :] * a_depth
    b_offsets = k[:, None] * b_depth + column[None, :] * b_column
    step = tl.full([], BLOCK_DEPTH, tl.int64)
    accumulator = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for first in range(0, depth, BLOCK_DEPTH):
        if EVEN:
            a = tl.load(a_ptr + a_offsets, mask=row_inside, other=0.0)
            b = tl.load(b_ptr + b_offsets, mask=column_inside, other=0.0)
        else:
            k_inside = first + tl.arange(0, BLOCK_DEPTH) < depth
            a = tl.load(a_ptr + a_offsets, mask=row_inside & k_inside[None, :], other=0.0)
            b = tl.load(b_ptr + b_offsets, mask=k_inside[:, None] & column_inside, other=0.0)
        accumulator = dot(a, b, accumulator, PRECISION)
        a_ptr += step * a_depth
        b_ptr += step * b_depth
    return accumulator


@triton.jit
def _store_gradients(
    d_h, pointers, tile_m, tile_n, M, N, numbers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
    STORE_H: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Turn one fp32 tile of d_h and the saved gate and up into d_gate, d_up and h."""
    gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, h_ptr = pointers
    position, offsets, inside = output_tile(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, WIDE)
    gate = tl.load(gate_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
    d_gate, d_up = gated_gradients(d_h, gate, up, numbers, FORMULA)
    tl.store(d_gate_ptr + position + offsets, round_to(d_gate, d_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(d_up_ptr + position + offsets, round_to(d_up, d_up_ptr.dtype.element_ty), mask=inside)
    if STORE_H:
        h = gated(gate, up, numbers, FORMULA)
        tl.store(h_ptr + position + offsets, round_to(h, h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_half(
    d_h, pointers, tile_m, tile_n, M, N, numbers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
    STORE_H: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """As `_store_gradients`; halved once more where the formula is a long one that makes h as well."""
    if STORE_H and FORMULA != "silu":
        parts = halves(d_h)
        for half in tl.static_range(2):
            _store_gradients(
                parts[half], pointers, tile_m, 2 * tile_n + half, M, N, numbers,
                BLOCK_M, BLOCK_N // 2, WIDE, STORE_H, FORMULA,
            )  # fmt: skip
    else:
        _store_gradients(
            d_h, pointers, tile_m, tile_n, M, N, numbers, BLOCK_M, BLOCK_N, WIDE,
            STORE_H, FORMULA,
        )  # fmt: skip


@triton.jit
def store_gate_gradients(
    d_h, pointers, tile_m, tile_n, M, N, numbers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
    STORE_H: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """As `_store_gradients`, in halves, one after the other: five whole tiles at once spill registers."""
    if BLOCK_N >= 64:
        parts = halves(d_h)
        for half in tl.static_range(2):
            _store_half(
                parts[half], pointers, tile_m, 2 * tile_n + half, M, N, numbers,
                BLOCK_M, BLOCK_N // 2, WIDE, STORE_H, FORMULA,
            )  # fmt: skip
    else:
        _store_gradients(
            d_h, pointers, tile_m, tile_n, M, N, numbers, BLOCK_M, BLOCK_N, WIDE,
            STORE_H, FORMULA,
        )  # fmt: skip


@triton.jit
def _down_backward_kernel(
    d_out_ptr, w_down_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, h_ptr, M, N, H,
    d_out_m, d_out_h, w_down_h, w_down_n, multiplier, alpha, limit, up_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr,
    EVEN_H: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    STORE_H: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    numbers = multiplier, alpha, limit, up_offset
    tile_m, tile_n = grouped_tile(M, N, BLOCK_M, BLOCK_N, GROUP)
    d_h = _one_product(
        d_out_ptr, w_down_ptr, tile_m, tile_n, (M, N, H), (d_out_m, d_out_h, w_down_h, w_down_n), BLOCK_M, BLOCK_N,
        BLOCK_H, EVEN_H, WIDE, PRECISION,
    )  # fmt: skip
    store_gate_gradients(
        d_h, (gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, h_ptr), tile_m, tile_n, M, N, numbers, BLOCK_M, BLOCK_N, WIDE,
        STORE_H, FORMULA,
    )  # fmt: skip


@triton.jit
def _down_weight_grad_kernel(
    d_out_ptr, h_ptr, d_w_ptr, M, N, H, d_out_m, d_out_h, d_w_h, d_w_n,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
    EVEN_M: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_h, tile_n = grouped_tile(H, N, BLOCK_H, BLOCK_N, GROUP)
    d_w = _one_product(
        d_out_ptr, h_ptr, tile_h, tile_n, (H, N, M), (d_out_h, d_out_m, N, 1), BLOCK_H, BLOCK_N, BLOCK_M, EVEN_M, WIDE,
        PRECISION,
    )  # fmt: skip
    position, offsets, inside = strided_tile(tile_h, tile_n, H, N, d_w_h, d_w_n, BLOCK_H, BLOCK_N, WIDE)
    store_sum(d_w_ptr + position + offsets, d_w, inside, d_w_ptr.dtype != h_ptr.dtype)


def down_backward_launch(
    d_out: torch.Tensor, w_down: torch.Tensor, preactivations: Pair, d_gate: torch.Tensor, d_up: torch.Tensor,
    h: torch.Tensor | None, formula: Formula = PLAIN, chosen: Choice | None = None,
) -> Launch:  # fmt: skip
    """Describe the launch that turns d_out into d_gate, d_up and h.

    Args:
        d_out: [M, H], any strides.
        w_down: [H, N], any strides.
        preactivations: gate and up, [M, N] and contiguous, biases included.
        d_gate, d_up: [M, N], contiguous, written; they may be gate and up themselves.
        h: [M, N], contiguous, written; None: not wanted.
        formula: the gate.
        chosen: what `choice.hidden_grad` returned, if it was asked.
    """
    gate, up = preactivations
    stored = [gate, up, d_gate, d_up, *([] if h is None else [h])]
    chosen = chosen or choice.hidden_grad(d_out, w_down, stored, formula, launch=True)
    if chosen.schedule != "portable":
        return hopper_products.gate_backward_launch(d_out, w_down, preactivations, d_gate, d_up, h, chosen.tile)
    return tiled_launch(
        _down_backward_kernel, chosen.tile, {"M": d_out.shape[0], "N": w_down.shape[1], "H": d_out.shape[1]},
        {"d_out": (d_out, "MH"), "w_down": (w_down, "HN")}, {"gate": (gate, "MN")},
        {"up_ptr": up, "d_gate_ptr": d_gate, "d_up_ptr": d_up, "h_ptr": d_gate if h is None else h}
        | {"STORE_H": h is not None} | formula.arguments(),
    )  # fmt: skip


def down_weight_grad_launch(d_out: torch.Tensor, h: torch.Tensor, d_w_down: torch.Tensor) -> Launch:
    """Describe the launch that writes d_w_down.

    Args:
        d_out: [M, H], any strides.
        h: [M, N], contiguous.
        d_w_down: [H, N], any strides, written; float32 with others of 16 bits: added to.
    """
    chosen = choice.down_weight_grad(d_out, h, d_w_down)
    if chosen.schedule != "portable":
        return hopper_products.transposed_launch([(d_out, h)], [d_w_down], chosen.tile)
    return tiled_launch(
        _down_weight_grad_kernel, chosen.tile, {"H": d_out.shape[1], "N": h.shape[1], "M": d_out.shape[0]},
        {"d_out": (d_out, "MH"), "d_w": (d_w_down, "HN")}, {"h": (h, "MN")}, {},
    )  # fmt: skip
