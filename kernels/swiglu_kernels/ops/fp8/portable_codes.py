"""Quantisation to fp8 (e4m3): codes and scales of the operands of products, by rows, along columns, or both.

Every operand of a product lies with the axis that is summed over last, as codes [rows, depth] and fp32 scales; what is
meant is code * scale. The recipes and their arithmetic are those of `reference.quantise`, bit for bit:

    "rowwise"    a scale for each row
    "blockwise"  a scale for 1 x 128 elements, of a weight for 128 x 128

A matrix that is multiplied along both of its axes (a gradient: along its columns for dX, along the tokens for dW) is
quantised along both in one pass, which writes the second codes transposed. Tokens that are summed over are padded to a
multiple of 16 with zeros. Rows of codes lie a multiple of 128 bytes apart, a line of memory: with 3280 bytes PyTorch's
product of 4978 x 4496 takes 183 us on an H200, so 130. By blocks there are zeros between, and memory goes on for as
many more rows as PyTorch's product asks for: it takes both as parts of the matrix, and lines of scales of blocks in the
same way. The rows' scales need all of a row or column before its first code: the first pass over memory,
`_amax_kernel`, finds them, except where rows alone are wanted, which a program takes as a whole.
"""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from swiglu_kernels.ops.gate.arithmetic import strided_tile
from swiglu_kernels.runtime.backend import tl, triton
from swiglu_kernels.runtime.launch import Launch, tile_needs_int64
from swiglu_kernels.runtime.precision import INTERPRETING
from swiglu_kernels.runtime.shortcuts import plan
from swiglu_kernels.runtime.shortcuts.plan import run

BLOCK = 128
"""Elements of a block along the axis that is summed over, and rows of a weight's block."""
ALIGNMENT = 16
"""What divides an axis that is summed over: 16 bytes of codes."""
ROWS = 4
"""What divides the rows that PyTorch multiplies by blocks, and the lines of scales of blocks: 16 bytes of scales."""
AMAX_TILES = {True: (128, 64), False: (256, 128)}
"""Of rows and columns, and of columns alone: in one tile a program, 2.7 TB/s on an H200. Programs that went down a
strip read 1.1 to 2.5."""
WHOLE_ROW = 32768
"""Columns up to which a program holds a row in registers: 3.4 TB/s of 3706 x 25472 on an H200, read twice 2.4."""


class Quantised(NamedTuple):
    """A matrix [rows, depth] in fp8, for products that sum over its last axis, or rowwise one for each expert.

    codes: [rows, depth], float8_e4m3fn. scales: float32; rowwise [rows], blockwise [rows, ceil(depth / 128)], of a
    weight [ceil(rows / 128), ceil(depth / 128)]. Of experts: [experts, rows, depth] and [experts, rows].
    """

    codes: torch.Tensor
    scales: torch.Tensor


Maxima = tuple[torch.Tensor | None, torch.Tensor | None]
"""The largest magnitudes of rows and of columns, int32, as `magnitudes` has them; None: not known."""


@triton.jit
def magnitudes(tile):
    """Return the bit patterns of an fp32 tile's absolute values: they have its order, and NaN is the largest."""
    return tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scales_of(magnitude):
    """Return the scales of rows or blocks with these largest magnitudes, of 16-bit values, and what codes multiply.

    2^-100 stands for a magnitude that is smaller, so that neither leaves fp32.
    """
    scale: tl.constexpr = 1 / 448
    amax = tl.maximum(magnitude, 27 << 23).to(tl.float32, bitcast=True)
    if INTERPRETING:
        inverse = tl.div_rn(448.0, amax)
    else:  # to the same last bit, without the branch of that division; of infinity 0
        near = 448.0 / amax
        left = tl.fma(near, amax * -1.0, 448.0)
        inverse = tl.where(amax == float("inf"), 0.0, tl.fma(left * scale, near, near))
    return amax * scale, inverse


@triton.jit
def codes_of(tile, inverse):
    """Return tile * inverse in e4m3, rounded to nearest even; the GPU's conversion saturates."""
    value = tile * inverse
    if INTERPRETING:  # whose conversion rounds ties away from zero and loses carries
        bits = value.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = tl.minimum(((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960, 126)
        subnormal = (tl.abs(value) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, subnormal, normal)
        code = tl.where(value == value, code, 127) | ((bits >> 24) & 128)
        codes = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        codes = value.to(tl.float8e4nv)
    return codes


@triton.jit
def _rows_kernel(
    x_ptr, codes_ptr, scales_ptr, starts_ptr, rows, columns, width, of_matrix, x_matrix, x_row, x_column,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Quantise whole rows, in one block, or read twice; of a routing of `rows` experts the rows that are in use."""
    if starts_ptr is not None:
        rows = tl.load(starts_ptr + rows)
        if tl.program_id(0) * BLOCK_ROWS >= rows:
            return
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS).to(tl.int64)
    row_inside = row < rows
    x_ptrs = x_ptr + ((row // of_matrix).to(tl.int64) * x_matrix + (row % of_matrix).to(tl.int64) * x_row)[:, None]
    row = row.to(tl.int64)
    codes_ptrs = codes_ptr + row[:, None] * width
    if WHOLE:
        inside = row_inside[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptrs + column[None, :] * x_column, mask=inside, other=0.0)
        scales, inverse = scales_of(tl.max(magnitudes(x.to(tl.float32)), 1))
        tl.store(codes_ptrs + column[None, :], codes_of(x.to(tl.float32), inverse[:, None]), mask=inside)
    else:
        largest = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.int32)
        for first in range(0, columns, BLOCK_COLUMNS):
            inside = row_inside[:, None] & (first + column < columns)[None, :]
            x = tl.load(x_ptrs + (first + column)[None, :] * x_column, mask=inside, other=0.0)
            largest = tl.maximum(largest, magnitudes(x.to(tl.float32)))
        scales, inverse = scales_of(tl.max(largest, 1))
        for first in range(0, columns, BLOCK_COLUMNS):
            inside = row_inside[:, None] & (first + column < columns)[None, :]
            x = tl.load(x_ptrs + (first + column)[None, :] * x_column, mask=inside, other=0.0)
            tl.store(codes_ptrs + (first + column)[None, :], codes_of(x.to(tl.float32), inverse[:, None]), mask=inside)
    tl.store(scales_ptr + row, scales, mask=row_inside)


@triton.jit
def line_of(size):
    """Return how far lines of as many scales of blocks lie apart, see `new_scales`."""
    return (size + 3) // 4 * 4


@triton.jit
def _store_scale(scales_ptr, scale, line, at, size):
    """Store a scale of a weight's blocks, and zeros behind the last of its line."""
    near = tl.arange(0, 4)
    stored = tl.where(at == size - 1, line_of(size) - at, 1)
    tl.store(scales_ptr + line * line_of(size) + at + near, tl.where(near == 0, scale, 0.0), mask=near < stored)


@triton.jit
def note_rows(sizes, row_amax_ptr, tile_row, rows, BLOCK_ROWS: tl.constexpr):
    """Raise the largest magnitudes of rows to those of a tile of magnitudes; the pointer may be None."""
    if row_amax_ptr is not None:
        row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        tl.atomic_max(row_amax_ptr + row, tl.max(sizes, 1), mask=row < rows, sem="relaxed")


@triton.jit
def note_columns(sizes, column_amax_ptr, tile_column, columns, BLOCK_COLUMNS: tl.constexpr):
    """Raise the largest magnitudes of columns to those of a tile of magnitudes; the pointer may be None."""
    if column_amax_ptr is not None:
        column = tile_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        tl.atomic_max(column_amax_ptr + column, tl.max(sizes, 0), mask=column < columns, sem="relaxed")


@triton.jit
def write_rows(
    tile, codes_ptr, scales_ptr, row_amax_ptr, tile_row, tile_column, first, rows, width,
    BLOCK: tl.constexpr, EVERY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantise an fp32 tile along its rows: every one from `first` on that is a multiple of EVERY further down.

    Codes have `width` columns; the tile is zero where the matrix has fewer.
    Scales are made of the largest magnitudes of whole rows where these are given, else of the tile's own. Blockwise
    scales lie with the rows last, so that a program of a product reads neighbours.
    """
    row = tile_row * BLOCK + first + EVERY * tl.arange(0, BLOCK // EVERY)
    if row_amax_ptr is not None:
        scales, inverse = scales_of(tl.load(row_amax_ptr + row, mask=row < rows, other=0))
        if tile_column == 0:
            tl.store(scales_ptr + row, scales, mask=row < rows)
    else:
        scales, inverse = scales_of(tl.max(magnitudes(tile), 1))
        tl.store(scales_ptr + tile_column.to(tl.int64) * line_of(rows) + row, scales, mask=row < rows)
    store_codes(
        codes_of(tile, inverse[:, None]), codes_ptr, tile_row, tile_column, first, rows, width, BLOCK, EVERY, WIDE
    )


@triton.jit
def store_codes(
    codes, codes_ptr, tile_row, tile_column, first, rows, width,
    BLOCK: tl.constexpr, EVERY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store a tile of codes; which rows are in it is said as to `write_rows`."""
    position, offsets, inside = _tile_of_every(tile_row, tile_column, first, rows, width, width, 1, BLOCK, EVERY, WIDE)
    tl.store(codes_ptr + position + offsets, codes, mask=inside)


@triton.jit
def _tile_of_every(
    tile_row, tile_column, first, rows, columns, row_stride, column_stride,
    BLOCK: tl.constexpr, EVERY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return what `strided_tile` returns, of every row from `first` on that is a multiple of EVERY further down."""
    if WIDE:
        row_stride *= tl.full([], 1, tl.int64)
    position, offsets, inside = strided_tile(
        tile_row, tile_column, (rows - first + EVERY - 1) // EVERY, columns, EVERY * row_stride, column_stride,
        BLOCK // EVERY, BLOCK, WIDE,
    )  # fmt: skip
    return position + first * row_stride, offsets, inside


@triton.jit
def _fourth(
    x_ptr, tile_row, tile_column, first, rows, columns, x_row, x_column, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Load every fourth row of a tile of x, as fp32, from its row `first` on."""
    position, offsets, inside = _tile_of_every(
        tile_row, tile_column, first, rows, columns, x_row, x_column, BLOCK, 4, WIDE
    )
    return tl.load(x_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _words(x_0, x_1, x_2, x_3, inverse):
    """Return the codes of four tiles, as bytes from the lowest on."""
    if INTERPRETING:
        c_0, c_1, c_2, c_3 = _bits(x_0, inverse), _bits(x_1, inverse), _bits(x_2, inverse), _bits(x_3, inverse)
        words = c_0 | c_1 << 8 | c_2 << 16 | c_3 << 24
    else:  # built of shifts, ptxas of CUDA 12.8 makes other words of it, or crashes
        words = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,r,r,r,r",
            [x_0 * inverse, x_1 * inverse, x_2 * inverse, x_3 * inverse],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return words


@triton.jit
def _bits(tile, inverse):
    return codes_of(tile, inverse).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _amax_kernel(
    x_ptr, row_amax_ptr, column_amax_ptr, rows, columns, x_row, x_column,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Find the largest magnitude of each row and column, as `magnitudes` has it; from zeros, either may be None."""
    tile_row, tile_column = tl.program_id(0), tl.program_id(1)
    position, offsets, inside = strided_tile(
        tile_row, tile_column, rows, columns, x_row, x_column, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
    )
    sizes = magnitudes(tl.load(x_ptr + position + offsets, mask=inside, other=0.0).to(tl.float32))
    note_rows(sizes, row_amax_ptr, tile_row, rows, BLOCK_ROWS)
    note_columns(sizes, column_amax_ptr, tile_column, columns, BLOCK_COLUMNS)


@triton.jit
def _tiles_kernel(
    x_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, row_amax_ptr, column_amax_ptr,
    rows, columns, width, words, x_row, x_column, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile along its rows into [rows, width], its columns into [columns, words], or both.

    The tile is four, of every fourth row: four codes that are neighbours in a column are a word of a thread's own, and
    words are turned through shared memory at four times the speed of bytes.
    """
    tile_row, tile_column = tl.program_id(0), tl.program_id(1)
    x_0 = _fourth(x_ptr, tile_row, tile_column, 0, rows, columns, x_row, x_column, BLOCK, WIDE)
    x_1 = _fourth(x_ptr, tile_row, tile_column, 1, rows, columns, x_row, x_column, BLOCK, WIDE)
    x_2 = _fourth(x_ptr, tile_row, tile_column, 2, rows, columns, x_row, x_column, BLOCK, WIDE)
    x_3 = _fourth(x_ptr, tile_row, tile_column, 3, rows, columns, x_row, x_column, BLOCK, WIDE)
    largest = tl.maximum(tl.maximum(magnitudes(x_0), magnitudes(x_1)), tl.maximum(magnitudes(x_2), magnitudes(x_3)))
    if WEIGHT:
        scale, inverse = scales_of(tl.max(tl.max(largest, 1), 0))
        if codes_ptr is not None:
            _store_scale(scales_ptr, scale, tile_row, tile_column, tl.cdiv(columns, BLOCK))
            store_codes(codes_of(x_0, inverse), codes_ptr, tile_row, tile_column, 0, rows, width, BLOCK, 4, WIDE)
            store_codes(codes_of(x_1, inverse), codes_ptr, tile_row, tile_column, 1, rows, width, BLOCK, 4, WIDE)
            store_codes(codes_of(x_2, inverse), codes_ptr, tile_row, tile_column, 2, rows, width, BLOCK, 4, WIDE)
            store_codes(codes_of(x_3, inverse), codes_ptr, tile_row, tile_column, 3, rows, width, BLOCK, 4, WIDE)
    elif codes_ptr is not None:
        write_rows(x_0, codes_ptr, scales_ptr, row_amax_ptr, tile_row, tile_column, 0, rows, width, BLOCK, 4, WIDE)
        write_rows(x_1, codes_ptr, scales_ptr, row_amax_ptr, tile_row, tile_column, 1, rows, width, BLOCK, 4, WIDE)
        write_rows(x_2, codes_ptr, scales_ptr, row_amax_ptr, tile_row, tile_column, 2, rows, width, BLOCK, 4, WIDE)
        write_rows(x_3, codes_ptr, scales_ptr, row_amax_ptr, tile_row, tile_column, 3, rows, width, BLOCK, 4, WIDE)
    if turned_ptr is not None:
        column = tile_column * BLOCK + tl.arange(0, BLOCK)
        if WEIGHT:
            _store_scale(turned_scales_ptr, scale, tile_column, tile_row, tl.cdiv(rows, BLOCK))
        elif column_amax_ptr is not None:
            scales, inverse = scales_of(tl.load(column_amax_ptr + column, mask=column < columns, other=0))
            if tile_row == 0:
                tl.store(turned_scales_ptr + column, scales, mask=column < columns)
            inverse = inverse[None, :]
        else:
            scales, inverse = scales_of(tl.max(largest, 0))
            at = tile_row.to(tl.int64) * line_of(columns) + column
            tl.store(turned_scales_ptr + at, scales, mask=column < columns)
            inverse = inverse[None, :]
        position, offsets, inside = strided_tile(
            tile_row, tile_column, words, columns, 1, words, BLOCK // 4, BLOCK, WIDE
        )
        tl.store(turned_ptr + position + offsets, _words(x_0, x_1, x_2, x_3, inverse), mask=inside)


def rows_launch(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, starts: torch.Tensor | None = None
) -> Launch:
    """Describe the launch that quantises x [R, C] or [E, R, C], any strides, by rows.

    Codes of x's shape, their rows one after the other, and scales [R] or [E, R] are written. `starts` is of a routing,
    whose rows are those of x: rows behind the last in use are neither read nor written.
    """
    *each, of_matrix, columns = x.shape
    rows = math.prod(each) * of_matrix
    block_rows, block_columns, warps = _rows_tile(columns)
    return Launch(_rows_kernel, (triton.cdiv(rows, block_rows),), {
        "x_ptr": x, "codes_ptr": codes, "scales_ptr": scales, "starts_ptr": starts,
        "rows": rows if starts is None else starts.shape[0] - 1, "columns": columns, "width": codes.stride(-2),
        "of_matrix": max(of_matrix, 1), "x_matrix": x.stride(0) if each else 0, "x_row": x.stride(-2),
        "x_column": x.stride(-1), "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns,
        "WHOLE": columns <= block_columns,
    }, num_warps=warps, num_stages=1)  # fmt: skip


def _rows_tile(columns: int) -> tuple[int, int, int]:
    """Return rows, columns and warps of a program that quantises rows."""
    whole = max(128, triton.next_power_of_2(columns))
    if INTERPRETING:  # where a program costs milliseconds, whatever it does
        return 128, min(whole, 4096), 4
    if whole > WHOLE_ROW:
        return 1, 2048, 4
    return max(1, 4096 // whole), whole, 8 if whole > WHOLE_ROW // 2 else 4


def wide(x: torch.Tensor, block_rows: int = BLOCK, block_columns: int = BLOCK) -> bool:
    """Whether offsets in a tile of x [R, C], or of its codes along either axis, need 64 bits."""
    block = block_rows, block_columns
    return tile_needs_int64((x.stride(), block), ((max(x.shape) + BLOCK, 1), (max(block), max(block))))


def amax_launch(x: torch.Tensor, row_amax: torch.Tensor | None, column_amax: torch.Tensor | None) -> Launch:
    """Describe the launch that finds the largest magnitudes of x [R, C], any strides.

    row_amax [R] and column_amax [C], int32, zeros, take the bit patterns of the largest absolute values; None: not
    wanted.
    """
    block_rows, block_columns = tile = (BLOCK, BLOCK) if INTERPRETING else AMAX_TILES[row_amax is not None]
    return Launch(_amax_kernel, (triton.cdiv(x.shape[0], block_rows), triton.cdiv(x.shape[1], block_columns)), {
        "x_ptr": x, "row_amax_ptr": row_amax, "column_amax_ptr": column_amax, "rows": x.shape[0],
        "columns": x.shape[1], "x_row": x.stride(0), "x_column": x.stride(1),
        "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns, "WIDE": wide(x, *tile),
    }, num_warps=4, num_stages=1)  # fmt: skip


def tiles_launch(
    x: torch.Tensor, codes: torch.Tensor | None, scales: torch.Tensor | None, turned: torch.Tensor | None,
    turned_scales: torch.Tensor | None, row_amax: torch.Tensor | None, column_amax: torch.Tensor | None, weight: bool,
) -> Launch:  # fmt: skip
    """Describe the launch that quantises x [R, C], any strides, along its rows, its columns, or both.

    Args:
        codes: [R, C], written, and zeros to the end of a row's memory, less than 128; None: not wanted.
        scales: of codes, written, as of `new_scales`.
        turned: [C, P / 4], int32, written: four codes each, of the rows of x from R to P zeros; None: not wanted.
        turned_scales: of turned, the same.
        row_amax: [R] as `amax_launch` writes it, for rowwise codes.
        column_amax: [C], for rowwise turned codes.
        weight: whether the blocks are 128 x 128, not rowwise.
    """
    return Launch(_tiles_kernel, (triton.cdiv(x.shape[0], BLOCK), triton.cdiv(x.shape[1], BLOCK)), {
        "x_ptr": x, "codes_ptr": codes, "scales_ptr": scales, "turned_ptr": turned, "turned_scales_ptr": turned_scales,
        "row_amax_ptr": row_amax, "column_amax_ptr": column_amax, "width": 0 if codes is None else codes.stride(0),
        "words": 0 if turned is None else turned.shape[1], "WEIGHT": weight, "rows": x.shape[0],
        "columns": x.shape[1], "x_row": x.stride(0), "x_column": x.stride(1), "BLOCK": BLOCK, "WIDE": wide(x),
    }, num_warps=4, num_stages=1)  # fmt: skip


def quantise_rows(x: torch.Tensor, recipe: str, weight: bool, starts: torch.Tensor | None = None) -> Quantised:
    """Quantise x [R, C], any strides, for products that sum over C, by "rowwise" or "blockwise".

    "rowwise" takes [E, R, C] as well, and starts as `rows_launch` does.
    """
    if recipe == "blockwise":
        return quantise_both(x, recipe, weight, turned=False)[0]
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    codes = new_codes(x, scales.numel(), x.shape[-1], False)
    codes = codes if x.dim() == 2 else codes.unflatten(0, x.shape[:-1])
    run(rows_launch, x, codes, scales, starts)
    return Quantised(codes, scales)


def quantise_both(
    x: torch.Tensor, recipe: str, weight: bool, rows: bool = True, turned: bool = True, maxima: Maxima = (None, None)
) -> tuple[Quantised, Quantised]:
    """Quantise x [R, C], any strides, for products that sum over C (codes of [R, C]) and over R ([C, P]).

    P is R, padded with zeros to a multiple of ALIGNMENT. What is not wanted is empty. `maxima` are those of "rowwise"
    that something else found already.
    """
    (R, C), padded, blocks = x.shape, up_to(x.shape[0], ALIGNMENT), recipe == "blockwise"
    codes = new_codes(x, R, C, blocks) if rows else x.new_empty((0, 0), dtype=torch.float8_e4m3fn)
    other = x.new_empty((C, up_to(R, BLOCK)) if turned else (0, 0), dtype=torch.float8_e4m3fn)
    if not blocks and all(maximum is None for maximum in maxima):
        (maxima,) = new_maxima(x, (rows, turned))
        run(amax_launch, x, *maxima)
    scales, other_scales = (new_scales(x, *size, blocks, weight) for size in ((R, C), (C, R)))
    written = codes if rows else None, scales, other.view(torch.int32) if turned else None, other_scales
    run(tiles_launch, x, *written, *maxima, weight and blocks)
    return Quantised(codes, scales), Quantised(other[:, :padded], other_scales)


def up_to(size: int, multiple: int) -> int:
    """Return the least multiple that is not below a size."""
    return -(-size // multiple) * multiple


def new_codes(like: torch.Tensor, rows: int, columns: int, blocks: bool) -> torch.Tensor:
    """Return codes [rows, columns], not written, on a tensor's device, a part of a larger matrix."""
    size = up_to(rows, ROWS) if blocks else rows, up_to(columns, BLOCK)
    return like.new_empty(size, dtype=torch.float8_e4m3fn)[:rows, :columns]


def new_scales(like: torch.Tensor, rows: int, columns: int, blocks: bool, weight: bool = False) -> torch.Tensor:
    """Return scales as `Quantised` has them, not written: by blocks columns, of a weight rows, of a larger matrix.

    These lines lie a multiple of ROWS apart, as PyTorch reads them.
    """
    if not blocks:
        return like.new_empty(rows, dtype=torch.float32)
    across = -(-columns // BLOCK)
    count, line = (-(-rows // BLOCK), across) if weight else (across, rows)
    lines = like.new_empty((count, up_to(line, ROWS)), dtype=torch.float32)[:, :line]
    return lines if weight else lines.t()


def laid(scales: torch.Tensor, weight: bool) -> torch.Tensor:
    """Return scales of blocks with the strides of `new_scales`, copied where they have others."""
    lines = scales if weight else scales.t()
    if lines.stride() != (up_to(lines.shape[1], ROWS), 1) or lines.storage_offset() % ROWS:
        lines = pad(lines, (0, -lines.shape[1] % ROWS)).contiguous()[:, : lines.shape[1]]
    return lines if weight else lines.t()


def lies_as_codes(codes: torch.Tensor) -> bool:
    """Whether codes [R, C] or [E, R, C] lie as `new_codes` has them, or contiguously."""
    *_, rows, columns = codes.shape
    pitch = up_to(columns, BLOCK)
    return codes.is_contiguous() or codes.stride() == (rows * pitch, pitch, 1)[-codes.dim() :]


def lines_of(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [R, C] or [E, R, C], or a view of them as another type, with what lies behind each row."""
    return codes.as_strided((*codes.shape[:-1], codes.stride(-2)), codes.stride())


def new_maxima(x: torch.Tensor, *wanted: tuple[bool, bool]) -> list[Maxima]:
    """Zeros for the largest magnitudes of matrices like x [R, C] by rows and by columns; None: not wanted."""
    sizes = [size if want else 0 for of in wanted for size, want in zip(x.shape, of, strict=True)]
    zeros = x.new_empty(sum(up_to(size, ROWS) for size in sizes), dtype=torch.int32)
    plan.apply(torch.Tensor.zero_, zeros)
    found, first = [], 0
    for size in sizes:
        found.append(zeros[first : first + size] if size else None)
        first += up_to(size, ROWS)
    return list(zip(found[::2], found[1::2], strict=True))
