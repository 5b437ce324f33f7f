"""The gate and its derivative, elementwise, in one pass with the quantisation of what they make.

For products that something else made in 16 bits: PyTorch's, or the caller's upstream gradient. h, d_gate and d_up are
rounded to 16 bits before they are quantised, as everywhere. By blocks, codes of h leave the pass and the 16 bits do
not. Of d_gate and d_up they do, with the largest magnitudes of rows and columns where scales need these:
`portable_codes.tiles_launch` quantises along both, which in this pass would take more registers than there are. Scales
of rows and columns that PyTorch's product left out are applied here: its products with one scale take 2 to 20% less.
"""

from typing import Any

import torch

from swiglu_kernels.ops.fp8.portable_codes import BLOCK, Maxima, magnitudes, note_columns, note_rows, wide, write_rows
from swiglu_kernels.ops.gate.arithmetic import gated, gated_gradients, output_tile, strided_tile
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu.portable_forward import Pair
from swiglu_kernels.runtime.backend import tl, triton
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.precision import INTERPRETING, round_to

Scales = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of rows and of columns; Nones: there are none."""
TILES = {True: (32, 32, 2), False: (16, 128, 4)}
"""Rows, columns and warps of a program with maxima and of one without: gradients of 2897 x 9696 take 108 and 88 us
on an H200, and took 139 and 118 in programs that went down a strip of 16 x 128."""


@triton.jit
def _gate_kernel(
    gate_ptr, up_ptr, codes_ptr, scales_ptr, rows, columns, width, multiplier, alpha, limit, up_offset,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    numbers = multiplier, alpha, limit, up_offset
    tile_row, tile_column = tl.program_id(0), tl.program_id(1)
    position, offsets, inside = output_tile(tile_row, tile_column, rows, columns, BLOCK, BLOCK, WIDE)
    gate = tl.load(gate_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
    h = round_to(gated(gate, up, numbers, FORMULA), gate_ptr.dtype.element_ty)
    h = tl.where(inside, h.to(tl.float32), 0.0)
    write_rows(h, codes_ptr, scales_ptr, None, tile_row, tile_column, 0, rows, width, BLOCK, 1, WIDE)


@triton.jit
def _gradients_kernel(
    d_h_ptr, d_h_row_scales_ptr, d_h_column_scales_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, h_ptr,
    d_gate_row_amax_ptr, d_gate_column_amax_ptr, d_up_row_amax_ptr, d_up_column_amax_ptr, h_column_amax_ptr,
    rows, columns, d_h_row, d_h_column, multiplier, alpha, limit, up_offset,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WIDE: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """d_gate, d_up and h in 16 bits, and the largest magnitudes of their rows and columns; what is None is left out."""
    numbers = multiplier, alpha, limit, up_offset
    tile_row, tile_column = tl.program_id(1), tl.program_id(0)
    position, offsets, inside = strided_tile(
        tile_row, tile_column, rows, columns, d_h_row, d_h_column, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
    )
    d_h = tl.load(d_h_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
    d_h = _scaled(
        d_h, d_h_row_scales_ptr, d_h_column_scales_ptr, tile_row, tile_column, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS
    )
    position, offsets, inside = output_tile(tile_row, tile_column, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
    gate = tl.load(gate_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
    d_gate, d_up = gated_gradients(d_h, gate, up, numbers, FORMULA)
    d_gate, d_up = round_to(d_gate, gate_ptr.dtype.element_ty), round_to(d_up, gate_ptr.dtype.element_ty)
    tl.store(d_gate_ptr + position + offsets, d_gate, mask=inside)
    tl.store(d_up_ptr + position + offsets, d_up, mask=inside)
    if h_ptr is not None:
        h = round_to(gated(gate, up, numbers, FORMULA), gate_ptr.dtype.element_ty)
        tl.store(h_ptr + position + offsets, h, mask=inside)
        if h_column_amax_ptr is not None:
            sizes = magnitudes(tl.where(inside, h.to(tl.float32), 0.0))
            note_columns(sizes, h_column_amax_ptr, tile_column, columns, BLOCK_COLUMNS)
    if d_gate_row_amax_ptr is not None or d_gate_column_amax_ptr is not None:
        sizes = magnitudes(d_gate.to(tl.float32))
        note_rows(sizes, d_gate_row_amax_ptr, tile_row, rows, BLOCK_ROWS)
        note_columns(sizes, d_gate_column_amax_ptr, tile_column, columns, BLOCK_COLUMNS)
        sizes = magnitudes(d_up.to(tl.float32))
        note_rows(sizes, d_up_row_amax_ptr, tile_row, rows, BLOCK_ROWS)
        note_columns(sizes, d_up_column_amax_ptr, tile_column, columns, BLOCK_COLUMNS)


@triton.jit
def _scaled(
    tile, row_scales_ptr, column_scales_ptr, tile_row, tile_column, rows, columns,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a tile of a product of codes times its scales, which both may be None."""
    if row_scales_ptr is not None:
        row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = tile_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        of_rows = tl.load(row_scales_ptr + row, mask=row < rows, other=0.0)
        of_columns = tl.load(column_scales_ptr + column, mask=column < columns, other=0.0)
        tile *= of_rows[:, None] * of_columns[None, :]
    return tile


@triton.jit
def _sum_kernel(
    first_ptr, row_scales_ptr, column_scales_ptr, second_ptr, second_row_scales_ptr, second_column_scales_ptr,
    rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """first = first * scales + second * scales; both are contiguous."""
    tile_row, tile_column = tl.program_id(1), tl.program_id(0)
    position, offsets, inside = output_tile(tile_row, tile_column, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
    first = tl.load(first_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
    first = _scaled(
        first, row_scales_ptr, column_scales_ptr, tile_row, tile_column, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS
    )
    second = tl.load(second_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
    second = _scaled(
        second, second_row_scales_ptr, second_column_scales_ptr, tile_row, tile_column, rows, columns, BLOCK_ROWS,
        BLOCK_COLUMNS,
    )  # fmt: skip
    tl.store(first_ptr + position + offsets, round_to(first + second, first_ptr.dtype.element_ty), mask=inside)


def gate_launch(preactivations: Pair, codes: torch.Tensor, scales: torch.Tensor, formula: Formula = PLAIN) -> Launch:
    """Describe the launch that makes codes of h, as of `tiles_launch`, and scales as of `new_scales`."""
    gate, up = preactivations
    rows, columns = gate.shape
    arguments = {
        "gate_ptr": gate, "up_ptr": up, "codes_ptr": codes, "scales_ptr": scales, "rows": rows, "columns": columns,
        "width": codes.stride(0), "BLOCK": BLOCK, "WIDE": wide(gate), **formula.arguments(),
    }  # fmt: skip
    grid = triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK)
    # With 128 registers two programs fit a multiprocessor: one computes while one waits for memory.
    return Launch(_gate_kernel, grid, arguments, num_warps=8, num_stages=1, registers=128)


def gradients_launch(
    d_h: torch.Tensor, scales: Scales, preactivations: Pair, d_gate: torch.Tensor, d_up: torch.Tensor,
    h: torch.Tensor | None, maxima: tuple[Maxima, Maxima, Maxima], formula: Formula = PLAIN,
) -> Launch:  # fmt: skip
    """Describe the launch that makes d_gate, d_up and h in 16 bits and finds their largest magnitudes.

    Args:
        d_h: [M, N], any strides.
        scales: [M] and [N] that d_h is multiplied by, or Nones.
        preactivations, d_gate, d_up, h: as of `portable_mlp.down_backward_launch`.
        maxima: [M] and [N] each of d_gate, d_up and h, zeros, written; those of h's rows are not found.
        formula: the gate.
    """
    (gate, up), (of_gate, of_up, of_h) = preactivations, maxima
    arguments = {
        "d_h_ptr": d_h, "d_h_row_scales_ptr": scales[0], "d_h_column_scales_ptr": scales[1],
        "gate_ptr": gate, "up_ptr": up, "d_gate_ptr": d_gate, "d_up_ptr": d_up, "h_ptr": h,
        "d_gate_row_amax_ptr": of_gate[0], "d_gate_column_amax_ptr": of_gate[1], "d_up_row_amax_ptr": of_up[0],
        "d_up_column_amax_ptr": of_up[1], "h_column_amax_ptr": of_h[1],
        "d_h_row": d_h.stride(0), "d_h_column": d_h.stride(1), **formula.arguments(),
    }  # fmt: skip
    return _elementwise(_gradients_kernel, d_h, of_gate[0] is not None, arguments)


def scaled_sum_launch(first: torch.Tensor, scales: Scales, second: torch.Tensor, others: Scales) -> Launch:
    """Describe the launch that makes first [R, C] the sum of first and second, times their scales [R] and [C]."""
    return _elementwise(_sum_kernel, first, False, {
        "first_ptr": first, "row_scales_ptr": scales[0], "column_scales_ptr": scales[1], "second_ptr": second,
        "second_row_scales_ptr": others[0], "second_column_scales_ptr": others[1],
    })  # fmt: skip


def _elementwise(kernel: object, like: torch.Tensor, maxima: bool, arguments: dict[str, Any]) -> Launch:
    """Describe a launch over the tiles of a matrix like this one, of `TILES`."""
    (rows, columns), (block_rows, block_columns, warps) = like.shape, TILES[maxima]
    if INTERPRETING:
        block_rows = block_columns = BLOCK
    arguments |= {"rows": rows, "columns": columns, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
    arguments["WIDE"] = wide(like, block_rows, block_columns)
    grid = triton.cdiv(columns, block_columns), triton.cdiv(rows, block_rows)
    return Launch(kernel, grid, arguments, num_warps=warps, num_stages=1)
