"""Which tiles a mixture's products have, and where: whole ones, and tall ones for what is left of an expert's rows.

    tiles_of, place    of one expert, in Triton
    find               of all of them, from their numbers of rows, in Gluon

Every warp finds the expert of a tile by itself, from all experts' numbers of rows: no table, and no host.
"""

from swiglu_kernels.hopper.shared import GLUON_MISSING, position
from swiglu_kernels.launches.backend import tl, triton
from swiglu_kernels.launches.launch import INT32_MAX

ROWS, TALL_ROWS = 128, 192
"""Of a tile."""
TALL_BLOCKS = 24
"""Blocks of rows of an expert from which on it has no tall tile: half a tile is little of them, and costs less."""


@triton.jit
def tiles_of(rows, TALL_BLOCKS: tl.constexpr):
    """Return how many tiles of 128 rows an expert's rows take, and how many of 192: one of these, or none.

    An odd number of blocks of 64 rows, three or more and less than TALL_BLOCKS, has a tall one in place of two tiles
    of which one would be half empty.
    """
    blocks = tl.cdiv(rows, 64)
    tall = tl.where((blocks > 1) & (blocks < TALL_BLOCKS), blocks & 1, 0)
    return (blocks + 1) // 2 - 2 * tall, tall


@triton.jit
def place(tile, row_tiles, tall, column_tiles, tall_tiles, GROUP: tl.constexpr):
    """Return the row and column of a tile as `position` does, and whether it is one of a tall row, which is the last.

    tall: 1 if there is such a row, else 0. It has tall_tiles, which are narrower: three of them are walked with each
        two columns of the last group, so that both read the same columns at the same time.
    """
    groups = max(tl.cdiv(row_tiles - GROUP // 4, GROUP), 1)
    group = min(tile // (GROUP * column_tiles), groups - 1)
    first = group * GROUP
    tile -= first * column_tiles
    rows, talls = tl.where(group == groups - 1, row_tiles - first, GROUP), tl.where(group == groups - 1, 3 * tall, 0)
    turns = min(column_tiles // 2, tall_tiles // 3)  # what is left are at most two columns, and two tall tiles
    turn = min(tile // (2 * rows + talls), turns)
    tile -= turn * (2 * rows + talls)
    others = tl.where(turn < turns, 2, column_tiles - 2 * turns) * rows
    second, is_tall = tile >= rows, tile >= others
    row = tl.where(is_tall, row_tiles, first + tile - tl.where(second, rows, 0))
    column = tl.where(is_tall, 3 * turn + tile - others, 2 * turn + tl.where(second, 1, 0))
    return row, column, tl.where(is_tall, 1, 0)


if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    _ROWS, _TALL_BLOCKS, _MOST = (gl.constexpr(size) for size in (ROWS, TALL_BLOCKS, INT32_MAX))

    @gluon.constexpr_function
    def columns_of_output(columns, form):
        """Columns of output of a tile: half of its own, where gate and up make h."""
        return columns // 2 if form == "gate_up" else columns

    @gluon.jit
    def rows_of(counts, experts, EXPERTS: gl.constexpr, WARPS: gl.constexpr):
        """Return how many rows every expert has. Each warp holds all of them."""
        expert = gl.arange(0, EXPERTS, gl.BlockedLayout([EXPERTS // 32], [32], [WARPS], [0]))
        return gl.load(counts + expert, mask=expert < experts, other=0)

    @gluon.jit
    def _tiles_to(count, N, WIDTH: gl.constexpr, TALL_WIDTH: gl.constexpr):
        """Return how many tiles each expert and those before it have."""
        if TALL_WIDTH > 0:
            whole, tall = tiles_of(count, _TALL_BLOCKS)
            tiles = whole * gl.cdiv(N, WIDTH) + tall * gl.cdiv(N, TALL_WIDTH)
        else:
            tiles = gl.cdiv(count, _ROWS) * gl.cdiv(N, WIDTH)
        return gl.associative_scan(tiles, 0, _sum)

    @gluon.jit
    def _sum(one, other):
        return one + other

    @gluon.jit
    def tiles_in_all(
        counts, experts, N, WIDTH: gl.constexpr, TALL_WIDTH: gl.constexpr, EXPERTS: gl.constexpr, WARPS: gl.constexpr
    ):
        """Return how many tiles all experts have."""
        return gl.max(_tiles_to(rows_of(counts, experts, EXPERTS, WARPS), N, WIDTH, TALL_WIDTH), 0)

    @gluon.jit
    def find(unit, count, N, WIDTH: gl.constexpr, TALL_WIDTH: gl.constexpr, GROUP: gl.constexpr):
        """Return a tile's first row, which column of tiles it is in, its expert, and whether it is tall.

        count: rows of every expert.
        WIDTH, TALL_WIDTH: columns of output of a tile, and of a tall one or 0.
        """
        column_tiles = gl.cdiv(N, WIDTH)
        if TALL_WIDTH > 0:
            ends = _tiles_to(count, N, WIDTH, TALL_WIDTH)
            before = ends <= unit
            expert = gl.sum(before.to(gl.int32), 0)
            first = gl.sum(gl.where(before, gl.cdiv(count, _ROWS), 0), 0)
            unit -= gl.max(gl.where(before, ends, 0), 0)
            numbers = gl.arange(0, count.shape[0], count.type.layout)
            whole, some = tiles_of(gl.sum(gl.where(numbers == expert, count, 0), 0), _TALL_BLOCKS)
            row, column, tall = place(unit, whole, some, column_tiles, gl.cdiv(N, TALL_WIDTH), GROUP)
        else:
            ends = gl.associative_scan(gl.cdiv(count, _ROWS), 0, _sum)
            before = ends * column_tiles <= unit
            expert = gl.sum(before.to(gl.int32), 0)
            first = gl.max(gl.where(before, ends, 0), 0)
            tiles = gl.min(gl.where(before, _MOST, ends), 0) - first
            row, column = position(unit - first * column_tiles, tiles, column_tiles, GROUP)
            tall = 0
        return (first + row) * _ROWS, column, expert, tall
