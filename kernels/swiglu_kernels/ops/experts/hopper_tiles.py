"""Which tiles a mixture's products have, and where: whole ones, and tall ones for what is left of rows and columns.

    tiles_of, tiles_in, place    of one expert, in Triton
    find                         of all of them, from their numbers of rows, in Gluon

Every warp finds the expert of a tile by itself, from all experts' numbers of rows: no table, and no host.
"""

from swiglu_kernels.hopper.shared import GLUON_MISSING, position
from swiglu_kernels.runtime.backend import tl, triton
from swiglu_kernels.runtime.launch import INT32_MAX

ROWS, TALL_ROWS = 128, 192
"""Of a tile."""
TALL_COLUMNS = 128
"""Of a tall tile; whole ones have 192 beside it."""
BLOCK = 64
"""Rows of what an expert's are counted in."""
TALL_BLOCKS = 24
"""Blocks of rows of an expert from which on their odd number makes no tall row: half a tile is little of them, and
costs less."""


@triton.jit
def tiles_of(rows, TALL_BLOCKS: tl.constexpr):
    """Return how many rows of tiles of 128 an expert's rows take, and how many of 192: one of these, or none.

    An odd number of blocks of 64 rows, three or more and less than TALL_BLOCKS, has a tall one in place of two of which
    one would be half empty.
    """
    blocks = tl.cdiv(rows, 64)
    tall = tl.where((blocks > 1) & (blocks < TALL_BLOCKS), blocks & 1, 0)
    return (blocks + 1) // 2 - 2 * tall, tall


@triton.jit
def tiles_in(whole, tall, N, WIDTH: tl.constexpr, TALL_WIDTH: tl.constexpr, TALL: tl.constexpr):
    """Return how many tiles an expert has; whole, tall: as `tiles_of` says; TALL: see `tall_columns`."""
    return whole * tl.cdiv(N, WIDTH) + tall * tl.cdiv(N, TALL_WIDTH) - TALL * (whole // 3)


@triton.jit
def place(tile, whole, tall, N, WIDTH: tl.constexpr, TALL_WIDTH: tl.constexpr, TALL: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and column of a tile within its expert's, and whether it is tall.

    Whole tiles are walked as `position` does. The tall row is the last: three tiles of it are walked with each two
    columns of the last group, so that both read the same columns at the same time. TALL columns come behind all that,
    where there are three whole rows or more.
    """
    columns, tall_tiles = tl.cdiv(N, WIDTH), tl.cdiv(N, TALL_WIDTH)
    if TALL > 0:
        columns -= tl.where(whole > 2, TALL, 0)
        behind = tile - whole * columns - tall * tall_tiles
    groups = max(tl.cdiv(whole - GROUP // 4, GROUP), 1)
    group = min(tile // max(GROUP * columns, 1), groups - 1)
    above = group * GROUP
    tile -= above * columns
    rows, talls = tl.where(group == groups - 1, whole - above, GROUP), tl.where(group == groups - 1, 3 * tall, 0)
    turns = min(columns // 2, tall_tiles // 3)  # what is left are at most two columns, and some tall tiles
    turn = min(tile // (2 * rows + talls), turns)
    tile -= turn * (2 * rows + talls)
    others = tl.where(turn < turns, 2, columns - 2 * turns) * rows
    second, is_tall = tile >= rows, tile >= others
    row = 128 * tl.where(is_tall, whole, above + tile - tl.where(second, rows, 0))
    # of the last tiles each begins earlier where it would reach beyond the end, and has the same bits as another
    whole_column = min((2 * turn + tl.where(second, 1, 0)) * WIDTH, N - WIDTH)
    tall_column = min((3 * turn + tile - others) * TALL_WIDTH, N - TALL_WIDTH)
    column = tl.where(is_tall, tall_column, whole_column)
    if TALL > 0:
        thirds = tl.cdiv(2 * whole, 3)
        last = behind >= (TALL - 1) * thirds
        number = behind - tl.where(last, (TALL - 1) * thirds, 0)
        row = tl.where(behind < 0, row, min(number * 192, 128 * whole - 192))
        column = tl.where(behind < 0, column, tl.where(last, N - TALL_WIDTH, N - TALL * TALL_WIDTH))
        is_tall = is_tall | (behind >= 0)
    return row, column, tl.where(is_tall, 1, 0)


def tall_columns(columns: int, width: int, tall_width: int) -> int:
    """Return how many columns of tall tiles, which are narrower, leave whole ones no rest: none, one or two.

    width is three halves of tall_width, and columns are a multiple of such a half.
    """
    return -columns % width // (width - tall_width)


if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    from swiglu_kernels.hopper.shared import start

    _ROWS, _TALL_COLUMNS, _TALL_BLOCKS, _BLOCK, _MOST = (
        gl.constexpr(size) for size in (ROWS, TALL_COLUMNS, TALL_BLOCKS, BLOCK, INT32_MAX)
    )

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
    def _tiles_to(count, N, COLUMNS: gl.constexpr, TALL: gl.constexpr, FORM: gl.constexpr):
        """Return how many tiles each expert and those before it have."""
        WIDTH: gl.constexpr = columns_of_output(COLUMNS, FORM)
        if TALL is None:
            tiles = gl.cdiv(count, _ROWS) * gl.cdiv(N, WIDTH)
        else:
            whole, tall = tiles_of(count, _TALL_BLOCKS)
            tiles = tiles_in(whole, tall, N, WIDTH, columns_of_output(_TALL_COLUMNS, FORM), TALL)
        return gl.associative_scan(tiles, 0, _sum)

    @gluon.jit
    def _sum(first, other):
        return first + other

    @gluon.jit
    def tiles_of_gradient(M, N, COLUMNS: gl.constexpr):
        """Return how many tiles an expert's gradient of M x N has."""
        return gl.cdiv(M, _ROWS) * gl.cdiv(N, COLUMNS)

    @gluon.jit
    def steps_of(expert, counts):
        """Return how many blocks of an expert's rows a weight's gradient sums: one of zeros if there are none."""
        return max(gl.cdiv(gl.load(counts + expert), _BLOCK), 1)

    @gluon.jit
    def tiles_in_all(
        counts, experts, M, N,
        COLUMNS: gl.constexpr, TALL: gl.constexpr, FORM: gl.constexpr, EXPERTS: gl.constexpr, WARPS: gl.constexpr,
    ):  # fmt: skip
        """Return how many tiles all experts have."""
        if FORM == "weights":
            tiles = experts * tiles_of_gradient(M, N, COLUMNS)
        else:
            tiles = gl.max(_tiles_to(rows_of(counts, experts, EXPERTS, WARPS), N, COLUMNS, TALL, FORM), 0)
        return tiles

    @gluon.jit
    def find(
        unit, count, M, N,
        COLUMNS: gl.constexpr, TALL: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
        SUMS: gl.constexpr = False, begin=None,
    ):  # fmt: skip
        """Return a tile's first row, its first column of output, its expert, and whether it is tall.

        count: rows of every expert. begin: the first of them, in a part of a routing (`routing.split`); None where they
        follow from count. Where gradients of weights are wanted, a row is one of the M of an expert's.
        TALL: columns of tall tiles behind the whole ones, see `tall_columns`; None if no tile is tall.
        SUMS: behind the last of the M rows are the sums of the other operand.
        """
        WIDTH: gl.constexpr = columns_of_output(COLUMNS, FORM)
        if FORM == "weights":
            each = tiles_of_gradient(M, N, COLUMNS)
            expert = unit // each
            row, column = position(unit % each, gl.cdiv(M, _ROWS), gl.cdiv(N, COLUMNS), GROUP)
            row, column = row * _ROWS if SUMS else start(row, _ROWS, M), start(column, COLUMNS, N)
            tall, first = 0, 0
        elif TALL is None:
            column_tiles = gl.cdiv(N, WIDTH)
            ends = gl.associative_scan(gl.cdiv(count, _ROWS), 0, _sum)
            before = ends * column_tiles <= unit
            expert = gl.sum(before.to(gl.int32), 0)
            first = gl.max(gl.where(before, ends, 0), 0)
            tiles = gl.min(gl.where(before, _MOST, ends), 0) - first
            row, column = position(unit - first * column_tiles, tiles, column_tiles, GROUP)
            row, column, tall = row * _ROWS, start(column, WIDTH, N), 0
        else:
            ends = _tiles_to(count, N, COLUMNS, TALL, FORM)
            before = ends <= unit
            expert = gl.sum(before.to(gl.int32), 0)
            first = gl.sum(gl.where(before, gl.cdiv(count, _ROWS), 0), 0)
            unit -= gl.max(gl.where(before, ends, 0), 0)
            numbers = gl.arange(0, count.shape[0], count.type.layout)
            whole, some = tiles_of(gl.sum(gl.where(numbers == expert, count, 0), 0), _TALL_BLOCKS)
            row, column, tall = place(unit, whole, some, N, WIDTH, columns_of_output(_TALL_COLUMNS, FORM), TALL, GROUP)
        begins = first * _ROWS
        if begin is not None:
            begins = gl.sum(gl.where(gl.arange(0, begin.shape[0], begin.type.layout) == expert, begin, 0), 0)
        return begins + row, column, expert, tall
