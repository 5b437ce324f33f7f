"""The gate and its derivative, elementwise, in one pass with the quantisation of what they make.

For products that something else made in 16 bits: PyTorch's, or the caller's upstream gradient. h, d_gate and d_up are
rounded to 16 bits before they are quantised, as everywhere. By blocks, codes of h leave the pass and the 16 bits do
not. Of d_gate and d_up they do, with the largest magnitudes of rows and columns where scales need these:
`portable_codes.tiles_launch` quantises along both, which in this pass would take more registers than there are.
"""

import torch

from swiglu_kernels.ops.fp8.portable_codes import (
    BLOCK,
    Maxima,
    magnitudes,
    note_columns,
    note_rows,
    wide,
    write_rows,
)  # fmt: skip
from swiglu_kernels.ops.gate.arithmetic import gated, gated_gradients, output_tile, strided_tile
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu.portable_forward import Pair
from swiglu_kernels.runtime.backend import tl, triton
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.precision import INTERPRETING, round_to

TILE = (128, 128) if INTERPRETING else (16, 128)
"""Of the gradients: with the maxima of columns that are kept, larger ones spill registers."""
STRIPS, PROGRAMS = (512, 256, 128), 512
"""Rows that a program goes down, which keeps the maxima of columns from tile to tile, so that there are so many."""


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
    d_h_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, h_ptr,
    d_gate_row_amax_ptr, d_gate_column_amax_ptr, d_up_row_amax_ptr, d_up_column_amax_ptr, h_column_amax_ptr,
    rows, columns, d_h_row, d_h_column, multiplier, alpha, limit, up_offset,
    STRIP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    FORMULA: tl.constexpr,
):  # fmt: skip
    """d_gate, d_up and h in 16 bits, and the largest magnitudes of their rows and columns; what is None is left out."""
    numbers = multiplier, alpha, limit, up_offset
    tile_column = tl.program_id(1)
    first = tl.program_id(0) * (STRIP // BLOCK_ROWS)
    tiles = tl.minimum(STRIP // BLOCK_ROWS, tl.cdiv(rows, BLOCK_ROWS) - first)
    of_gate = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.int32)
    of_up = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.int32)
    of_h = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.int32)
    for step in range(tiles):
        tile_row = first + step
        position, offsets, inside = strided_tile(
            tile_row, tile_column, rows, columns, d_h_row, d_h_column, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
        )
        d_h = tl.load(d_h_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
        position, offsets, inside = output_tile(tile_row, tile_column, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
        gate = tl.load(gate_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)
        d_gate, d_up = gated_gradients(d_h, gate, up, numbers, FORMULA)
        d_gate, d_up = round_to(d_gate, gate_ptr.dtype.element_ty), round_to(d_up, gate_ptr.dtype.element_ty)
        if h_ptr is not None:
            h = round_to(gated(gate, up, numbers, FORMULA), gate_ptr.dtype.element_ty)
            tl.store(h_ptr + position + offsets, h, mask=inside)
            if h_column_amax_ptr is not None:
                of_h = tl.maximum(of_h, magnitudes(h.to(tl.float32)))
        tl.store(d_gate_ptr + position + offsets, d_gate, mask=inside)
        tl.store(d_up_ptr + position + offsets, d_up, mask=inside)
        if d_gate_row_amax_ptr is not None or d_gate_column_amax_ptr is not None:
            sizes = magnitudes(d_gate.to(tl.float32))
            note_rows(sizes, d_gate_row_amax_ptr, tile_row, rows, BLOCK_ROWS)
            of_gate = tl.maximum(of_gate, sizes)
            sizes = magnitudes(d_up.to(tl.float32))
            note_rows(sizes, d_up_row_amax_ptr, tile_row, rows, BLOCK_ROWS)
            of_up = tl.maximum(of_up, sizes)
    note_columns(of_gate, d_gate_column_amax_ptr, tile_column, columns, BLOCK_COLUMNS)
    note_columns(of_up, d_up_column_amax_ptr, tile_column, columns, BLOCK_COLUMNS)
    note_columns(of_h, h_column_amax_ptr, tile_column, columns, BLOCK_COLUMNS)


def gate_launch(preactivations: Pair, codes: torch.Tensor, scales: torch.Tensor, formula: Formula = PLAIN) -> Launch:
    """Describe the launch that makes codes of h, as of `tiles_launch`, and blockwise scales [ceil(N / 128), M]."""
    gate, up = preactivations
    rows, columns = gate.shape
    return Launch(
        kernel=_gate_kernel,
        grid=(triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK)),
        arguments={
            "gate_ptr": gate, "up_ptr": up, "codes_ptr": codes, "scales_ptr": scales, "rows": rows, "columns": columns,
            "width": codes.stride(0), "BLOCK": BLOCK, "WIDE": wide(gate), **formula.arguments(),
        },
        num_warps=8,
        num_stages=1,
        registers=128,  # so that two programs fit a multiprocessor: one computes while one waits for memory
    )  # fmt: skip


def gradients_launch(
    d_h: torch.Tensor, preactivations: Pair, d_gate: torch.Tensor, d_up: torch.Tensor, h: torch.Tensor | None,
    maxima: tuple[Maxima, Maxima, Maxima], formula: Formula = PLAIN,
) -> Launch:  # fmt: skip
    """Describe the launch that makes d_gate, d_up and h in 16 bits and finds their largest magnitudes.

    Args:
        d_h: [M, N], any strides.
        preactivations, d_gate, d_up, h: as of `portable_mlp.down_backward_launch`.
        maxima: [M] and [N] each of d_gate, d_up and h, zeros, written; those of h's rows are not found.
        formula: the gate.
    """
    (gate, up), (of_gate, of_up, of_h) = preactivations, maxima
    block_rows, block_columns = TILE
    rows, across = d_h.shape[0], triton.cdiv(d_h.shape[1], block_columns)
    strip = next((strip for strip in STRIPS if triton.cdiv(rows, strip) * across >= PROGRAMS), STRIPS[-1])
    return Launch(
        kernel=_gradients_kernel,
        grid=(triton.cdiv(rows, strip), across),
        arguments={
            "d_h_ptr": d_h, "gate_ptr": gate, "up_ptr": up, "d_gate_ptr": d_gate, "d_up_ptr": d_up, "h_ptr": h,
            "d_gate_row_amax_ptr": of_gate[0], "d_gate_column_amax_ptr": of_gate[1], "d_up_row_amax_ptr": of_up[0],
            "d_up_column_amax_ptr": of_up[1], "h_column_amax_ptr": of_h[1], "rows": rows,
            "columns": d_h.shape[1], "d_h_row": d_h.stride(0), "d_h_column": d_h.stride(1),
            "STRIP": strip, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns, "WIDE": wide(d_h, *TILE),
            **formula.arguments(),
        },
        num_warps=8,
        num_stages=1,
    )  # fmt: skip
