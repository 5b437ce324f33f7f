"""Products of operands in fp8 (`portable_codes.py`): SwiGLU's forward and backward.

The sum over each 128 of depth is added in fp32 registers (`arithmetic.dot`); blockwise, its scales are applied there.
"""

from typing import Any

import torch

from swiglu_kernels.ops.fp8.portable_codes import BLOCK, codes_of, line_of, magnitudes, scales_of
from swiglu_kernels.ops.gate.arithmetic import dot, gated, grouped_tile, halves, output_tile
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu.portable_forward import Biases, Pair, bias_arguments, biased, store_gated
from swiglu_kernels.ops.mlp.portable_mlp import store_gate_gradients
from swiglu_kernels.runtime.backend import capability_of, tl, triton
from swiglu_kernels.runtime.launch import Launch, tile_needs_int64
from swiglu_kernels.runtime.precision import round_to
from swiglu_kernels.tiles.rules import Tile, fp8_glu_tile, fp8_product_tile

Operand = tuple[torch.Tensor, torch.Tensor]
"""Codes and scales: `Quantised`, or a plain tuple of the same."""


@triton.jit
def _scaled(accumulator, part, a_scales, b_scales):
    return accumulator + part * (a_scales[:, None] * b_scales[None, :])


@triton.jit
def _products(
    pointers, tile_row, tile_column, sizes, strides, start, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr, B_ROWS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the fp32 tiles of start + a b^T and a other^T, which has the strides of b.

    start is a tile or None. None for other: zeros, of no cost.

    b_scales has a row for B_ROWS rows of b. BLOCKS: scales are those of blocks; else a_scales_depth and b_scales_depth
    are not read.
    """
    a_row, b_row, a_scales_row, a_scales_depth, b_scales_row, b_scales_depth = strides
    rows, columns, depth = sizes
    a_ptr, b_ptr, other_ptr, a_scales_ptr, b_scales_ptr, other_scales_ptr = pointers
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    k = tl.arange(0, BLOCK_DEPTH)
    row_inside = tile_row * BLOCK_ROWS + row < rows
    column_inside = tile_column * BLOCK_COLUMNS + column < columns
    a_scales_ptr += (tile_row * BLOCK_ROWS + row).to(tl.int64) * a_scales_row
    b_scales_offsets = ((tile_column * BLOCK_COLUMNS + column) // B_ROWS).to(tl.int64) * b_scales_row
    unit = tl.full([], 1, tl.int64)
    if WIDE:
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    a_ptr += tile_row.to(tl.int64) * BLOCK_ROWS * a_row
    b_position = tile_column.to(tl.int64) * BLOCK_COLUMNS * b_row
    a_offsets = row[:, None] * a_row + k[None, :]
    b_offsets = k[:, None] + column[None, :] * b_row
    first = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    if BLOCKS and start is not None:
        first = start
    second = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for step in range(tl.cdiv(depth, BLOCK_DEPTH)):
        at = step * BLOCK_DEPTH
        a_inside, b_inside = row_inside[:, None], column_inside[None, :]
        if not EVEN:
            a_inside = a_inside & (at + k < depth)[None, :]
            b_inside = b_inside & (at + k < depth)[:, None]
        a = tl.load(a_ptr + at + a_offsets, mask=a_inside, other=0.0)
        b = tl.load(b_ptr + (b_position + at) + b_offsets, mask=b_inside, other=0.0)
        if BLOCKS:
            tl.static_assert(BLOCK_DEPTH == 128)
            zero = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
            scales_at = unit * step * b_scales_depth
            a_scales = tl.load(a_scales_ptr + unit * step * a_scales_depth, mask=row_inside, other=0.0)
            b_scales = tl.load(b_scales_ptr + scales_at + b_scales_offsets, mask=column_inside, other=0.0)
            first = _scaled(first, dot(a, b, zero, "ieee"), a_scales, b_scales)
            if other_ptr is not None:
                other = tl.load(other_ptr + (b_position + at) + b_offsets, mask=b_inside, other=0.0)
                other_scales = tl.load(other_scales_ptr + scales_at + b_scales_offsets, mask=column_inside, other=0.0)
                second = _scaled(second, dot(a, other, zero, "ieee"), a_scales, other_scales)
        else:
            first = dot(a, b, first, "ieee")
            if other_ptr is not None:
                other = tl.load(other_ptr + (b_position + at) + b_offsets, mask=b_inside, other=0.0)
                second = dot(a, other, second, "ieee")
    if not BLOCKS:
        a_scales = tl.load(a_scales_ptr, mask=row_inside, other=0.0)[:, None]
        first *= a_scales * tl.load(b_scales_ptr + b_scales_offsets, mask=column_inside, other=0.0)[None, :]
        if start is not None:
            first += start
        if other_ptr is not None:
            second *= a_scales * tl.load(other_scales_ptr + b_scales_offsets, mask=column_inside, other=0.0)[None, :]
    return first, second


@triton.jit
def _glu_kernel(
    a_ptr, b_ptr, other_ptr, a_scales_ptr, b_scales_ptr, other_scales_ptr, z_ptr, z_scales_ptr, gate_ptr, up_ptr,
    rows, columns, depth, width, a_row, b_row, a_scales_row, a_scales_depth, b_scales_row, b_scales_depth,
    bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n, multiplier, alpha, limit, up_offset,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, B_ROWS: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    STORE_PREACT: tl.constexpr, STORE_CODES: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Both products and the gate: z rounded to 16 bits; with STORE_CODES that value in fp8, by blocks of 1 x 128."""
    numbers = multiplier, alpha, limit, up_offset
    tile_row, tile_column = grouped_tile(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    gate, up = _products(
        (a_ptr, b_ptr, other_ptr, a_scales_ptr, b_scales_ptr, other_scales_ptr), tile_row, tile_column,
        (rows, columns, depth), (a_row, b_row, a_scales_row, a_scales_depth, b_scales_row, b_scales_depth), None,
        BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH, B_ROWS, BLOCKS, EVEN, WIDE,
    )  # fmt: skip
    if not STORE_CODES:
        store_gated(
            gate, up, (z_ptr, gate_ptr, up_ptr), tile_column, tile_row, rows, columns,
            (bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n), numbers, BLOCK_ROWS, BLOCK_COLUMNS, WIDE,
            STORE_PREACT, FORMULA,
        )  # fmt: skip
    else:
        tl.static_assert(BLOCK_COLUMNS == 128)
        gate, up = biased(
            gate, up, (bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n), tile_column, columns, BLOCK_COLUMNS,
        )  # fmt: skip
        position, offsets, inside = output_tile(tile_row, tile_column, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
        z = round_to(gated(gate, up, numbers, FORMULA), gate_ptr.dtype.element_ty)
        z = tl.where(inside, z.to(tl.float32), 0.0)
        if STORE_PREACT:
            tl.store(gate_ptr + position + offsets, round_to(gate, gate_ptr.dtype.element_ty), mask=inside)
            tl.store(up_ptr + position + offsets, round_to(up, up_ptr.dtype.element_ty), mask=inside)
        scales, inverse = scales_of(tl.max(magnitudes(z), 1))
        row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        tl.store(z_scales_ptr + tile_column.to(tl.int64) * line_of(rows) + row, scales, mask=row < rows)
        position, offsets, inside = output_tile(tile_row, tile_column, rows, width, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
        tl.store(z_ptr + position + offsets, codes_of(z, inverse[:, None]), mask=inside)


@triton.jit
def _hidden_grad_kernel(
    a_ptr, b_ptr, a_scales_ptr, b_scales_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, h_ptr,
    rows, columns, depth, a_row, b_row, a_scales_row, a_scales_depth, b_scales_row, b_scales_depth,
    multiplier, alpha, limit, up_offset,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, B_ROWS: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    STORE_H: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """d_h = d_out w_down, never stored: its tile becomes d_gate, d_up and h."""
    numbers = multiplier, alpha, limit, up_offset
    tile_row, tile_column = grouped_tile(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    d_h, _ = _products(
        (a_ptr, b_ptr, None, a_scales_ptr, b_scales_ptr, None), tile_row, tile_column, (rows, columns, depth),
        (a_row, b_row, a_scales_row, a_scales_depth, b_scales_row, b_scales_depth), None, BLOCK_ROWS, BLOCK_COLUMNS,
        BLOCK_DEPTH, B_ROWS, BLOCKS, EVEN, WIDE,
    )  # fmt: skip
    parts = halves(d_h)
    for half in tl.static_range(2):
        store_gate_gradients(
            parts[half], (gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, h_ptr), tile_row, 2 * tile_column + half, rows,
            columns, numbers, BLOCK_ROWS, BLOCK_COLUMNS // 2, WIDE, STORE_H, FORMULA,
        )  # fmt: skip


@triton.jit
def _sum_kernel(
    a_ptr, b_ptr, a_scales_ptr, b_scales_ptr, more_a_ptr, more_b_ptr, more_a_scales_ptr, more_b_scales_ptr,
    out_ptr, bias_ptr, bias_n,
    rows, columns, depth, a_row, b_row, a_scales_row, a_scales_depth, b_scales_row, b_scales_depth,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, B_ROWS: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out = a b^T + more_a more_b^T + bias, rounded once; the second product and the bias may be None."""
    tile_row, tile_column = grouped_tile(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    total, _ = _products(
        (a_ptr, b_ptr, None, a_scales_ptr, b_scales_ptr, None), tile_row, tile_column, (rows, columns, depth),
        (a_row, b_row, a_scales_row, a_scales_depth, b_scales_row, b_scales_depth), None, BLOCK_ROWS, BLOCK_COLUMNS,
        BLOCK_DEPTH, B_ROWS, BLOCKS, EVEN, WIDE,
    )  # fmt: skip
    if more_a_ptr is not None:
        total, _ = _products(
            (more_a_ptr, more_b_ptr, None, more_a_scales_ptr, more_b_scales_ptr, None), tile_row, tile_column,
            (rows, columns, depth), (a_row, b_row, a_scales_row, a_scales_depth, b_scales_row, b_scales_depth), total,
            BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH, B_ROWS, BLOCKS, EVEN, WIDE,
        )  # fmt: skip
    if bias_ptr is not None:
        column = tile_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        bias = tl.load(bias_ptr + column.to(tl.int64) * bias_n, mask=column < columns, other=0.0)
        total += bias.to(tl.float32)[None, :]
    position, offsets, inside = output_tile(tile_row, tile_column, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
    tl.store(out_ptr + position + offsets, round_to(total, out_ptr.dtype.element_ty), mask=inside)


def _launch(
    kernel: object, a: Operand, b: Operand, tile: Tile, others: dict[str, Any], formula: Formula | None = None
) -> Launch:
    """Describe a launch with a product of a and b; both are `Quantised`, or plain tuples of the same."""
    (codes, scales), (b_codes, b_scales) = a, b
    (rows, depth), columns = codes.shape, b_codes.shape[0]
    blocks = scales.dim() == 2
    arguments = {
        "a_ptr": codes, "b_ptr": b_codes, "a_scales_ptr": scales, "b_scales_ptr": b_scales,
        "rows": rows, "columns": columns, "depth": depth, "a_row": codes.stride(0), "b_row": b_codes.stride(0),
        "a_scales_row": scales.stride(0), "a_scales_depth": scales.stride(1) if blocks else None,
        "b_scales_row": b_scales.stride(0), "b_scales_depth": b_scales.stride(1) if blocks else None,
        "BLOCK_ROWS": tile.rows, "BLOCK_COLUMNS": tile.columns, "BLOCK_DEPTH": tile.depth, "GROUP": tile.group,
        "B_ROWS": 1 if b_scales.shape[0] == columns else BLOCK, "BLOCKS": blocks, "EVEN": depth % tile.depth == 0,
        "WIDE": tile_needs_int64(
            ((codes.stride(0), 1), (tile.rows, tile.depth)), ((b_codes.stride(0), 1), (tile.columns, tile.depth)),
            ((columns + BLOCK, 1), (tile.rows, tile.columns)),
        ),
    } | others | ({} if formula is None else formula.arguments())  # fmt: skip
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    return Launch(kernel, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)


def glu_launch(
    x: Operand, w_gate: Operand, w_up: Operand, z: torch.Tensor, z_scales: torch.Tensor | None, preactivations: Pair,
    biases: Biases = (None, None), formula: Formula = PLAIN,
) -> Launch:  # fmt: skip
    """Describe the launch that makes z of the quantised x and weights.

    Args:
        x: Quantised, [M, K].
        w_gate, w_up: Quantised, [N, K], the same strides.
        z: [M, N], written: 16 bits, contiguous; or codes, as of `tiles_launch`.
        z_scales: as of `new_scales`, written, where z are codes; else None.
        preactivations: gate and up, [M, N] and contiguous, written; empty: not wanted. What is quantised was rounded to
            their dtype.
        biases: [N] each, or None.
        formula: the gate.
    """
    (gate, up), (other, other_scales) = preactivations, w_up
    tile = fp8_glu_tile(x[0].shape[0], x[1].dim() == 2, capability_of(x[0].device))
    strides = [[part.stride() for part in weight] for weight in (w_gate, w_up)]
    assert strides[0] == strides[1], "one pair of strides serves both"
    others: dict[str, Any] = {"other_ptr": other, "other_scales_ptr": other_scales}
    others |= {"z_ptr": z, "z_scales_ptr": z_scales, "STORE_CODES": z_scales is not None, "width": z.stride(0)}
    others |= {"gate_ptr": gate, "up_ptr": up, "STORE_PREACT": gate.numel() > 0}
    return _launch(_glu_kernel, x, w_gate, tile, others | bias_arguments(biases), formula)


def hidden_grad_launch(
    d_out: Operand, w_down: Operand, preactivations: Pair, d_gate: torch.Tensor, d_up: torch.Tensor,
    h: torch.Tensor | None, formula: Formula = PLAIN,
) -> Launch:  # fmt: skip
    """Describe the launch that turns the quantised d_out into d_gate, d_up and h.

    Args:
        d_out: Quantised, [M, H].
        w_down: Quantised, turned: [N, H].
        preactivations, d_gate, d_up, h, formula: as of `portable_mlp.down_backward_launch`.
    """
    gate, up = preactivations
    tile = fp8_product_tile(d_gate.shape[0], capability_of(d_gate.device))
    others: dict[str, Any] = {"gate_ptr": gate, "up_ptr": up, "d_gate_ptr": d_gate, "d_up_ptr": d_up}
    others |= {"h_ptr": d_gate if h is None else h, "STORE_H": h is not None}
    return _launch(_hidden_grad_kernel, d_out, w_down, tile, others, formula)


def sum_launch(
    a: Operand, b: Operand, more: tuple[Operand, Operand] | None, out: torch.Tensor, bias: torch.Tensor | None = None
) -> Launch:
    """Describe the launch that writes out = a b^T + bias, or with more (a2, b2) a b^T + a2 b2^T + bias.

    Args:
        a, b: Quantised, [R, D] and [C, D].
        more: a second pair of the same shapes and strides, or None.
        out: [R, C], contiguous, written.
        bias: [C] or None.
    """
    tile = fp8_product_tile(out.shape[0], capability_of(out.device))
    (more_a, more_a_scales), (more_b, more_b_scales) = more or ((None, None), (None, None))
    others = {"more_a_ptr": more_a, "more_a_scales_ptr": more_a_scales, "out_ptr": out, "bias_ptr": bias}
    others |= {"more_b_ptr": more_b, "more_b_scales_ptr": more_b_scales}
    return _launch(_sum_kernel, a, b, tile, others | {"bias_n": None if bias is None else bias.stride(0)})
