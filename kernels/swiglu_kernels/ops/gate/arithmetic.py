"""The arithmetic that the kernels share, each piece written once: gate, derivative, rounding, one dot, tile order.

With `s = sigmoid(gate)` and `f = gate * s` (SiLU), `z = f * up`, and for the upstream gradient `dz`:

    d_up   = dz * f
    d_gate = dz * up * df/dgate,   df/dgate = s * (1 + gate * (1 - s))

The variants of the gate that `formula.py` defines replace the argument of the sigmoid and bound gate and up, or bound
what SiLU yields.
"""

from swiglu_kernels.ops.gate.formula import bounded, passes
from swiglu_kernels.runtime.backend import tl, triton
from swiglu_kernels.runtime.precision import INTERPRETING
from swiglu_kernels.runtime.precision import round_to as round_to


@triton.jit
def gated(gate, up, numbers, FORMULA: tl.constexpr):
    """Return silu(gate) * up for fp32 tiles, or what FORMULA says; the numbers are read by other formulas only."""
    if FORMULA == "silu":
        z = gate / (1.0 + tl.exp(-gate)) * up
    elif FORMULA == "silu_clamp" or FORMULA == "silu_softcap":
        multiplier, alpha, limit, up_offset = numbers
        f, _, u, _ = _bounded_silu(gate * multiplier, up, alpha, limit, FORMULA)
        z = f * (u + up_offset)
    else:
        multiplier, alpha, limit, up_offset = numbers
        gate, up = bounded(gate * multiplier, up, limit)
        v, _ = _inside_sigmoid(gate, alpha, FORMULA)
        z = gate / (1.0 + tl.exp(-v)) * (up + up_offset)
    return z


@triton.jit
def gated_gradients(dz, gate, up, numbers, FORMULA: tl.constexpr):
    """Return (d_gate, d_up) for fp32 tiles; zeros in give zeros out, which masked loads rely on."""
    if FORMULA == "silu":
        s = tl.sigmoid(gate)
        d_f = dz * s
        d_gate = d_f * up * (1.0 + gate * (1.0 - s))
        d_up = d_f * gate
    elif FORMULA == "silu_clamp" or FORMULA == "silu_softcap":
        multiplier, alpha, limit, up_offset = numbers
        f, df, u, du = _bounded_silu(gate * multiplier, up, alpha, limit, FORMULA)
        d_gate = dz * (u + up_offset) * df * multiplier
        d_up = dz * f * du
    else:
        multiplier, alpha, limit, up_offset = numbers
        scaled = gate * multiplier
        g, u = bounded(scaled, up, limit)
        v, dv = _inside_sigmoid(g, alpha, FORMULA)
        s = tl.sigmoid(v)
        d_f = dz * s
        d_gate = tl.where(passes(scaled, limit), d_f * (u + up_offset) * (1.0 + g * dv * (1.0 - s)) * multiplier, 0.0)
        d_up = tl.where(passes(tl.abs(up), limit), d_f * g, 0.0)
    return d_gate, d_up


@triton.jit
def _bounded_silu(gate, up, alpha, limit, FORMULA: tl.constexpr):
    """Return f, df/dgate, u and du/dup of z = f * u, where a bound is on f = silu(gate), or on its factor."""
    s = tl.sigmoid(gate)
    if FORMULA == "silu_clamp":
        f = gate * s
        df = tl.where(passes(f, limit), s * (1.0 + gate * (1.0 - s)), 0.0)
        du = tl.where(passes(tl.abs(up), limit), 1.0, 0.0)
        f, u = bounded(f, up, limit)
    else:
        of_gate, of_up = _tanh(gate / limit), _tanh(up / alpha)
        f = limit * of_gate * s
        df = s * (1.0 - of_gate * of_gate) + f * (1.0 - s)
        u, du = alpha * of_up, 1.0 - of_up * of_up
    return f, df, u, du


@triton.jit
def _tanh(x):
    """Return tanh(x), as exact as fp32 is: below 0.5 by a polynomial that was fitted to it, since 1 - 1 is nothing."""
    square = x * x
    inner = x + x * square * (-0.3333331 + square * (0.13330513 + square * (-0.053391054 + square * 0.017999219)))
    outer = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.5, inner, tl.where(x < 0.0, -outer, outer))


@triton.jit
def _inside_sigmoid(gate, alpha, FORMULA: tl.constexpr):
    """Return v and dv/dgate of the activation gate * sigmoid(v)."""
    if FORMULA == "gelu_tanh":
        square = gate * gate
        v = gate * (1.5957691216057308 + 0.07135481627260025 * square)  # 2 sqrt(2/pi) (gate + 0.044715 gate^3)
        dv = 1.5957691216057308 + 0.21406444881780076 * square
    else:
        v = gate * alpha
        dv = alpha
    return v, dv


@triton.jit
def multiple_of(size, UNIT: tl.constexpr):
    """Return a multiple of UNIT as one that the compiler knows: by itself it finds those of 16 alone."""
    return size // UNIT * UNIT


def unit_of(*sizes: int) -> int:
    """Return the UNIT of `multiple_of` for sizes and strides: 8 where it divides all and 16 does not, else 1."""
    return 8 if all(size % 8 == 0 for size in sizes) and any(size % 16 for size in sizes) else 1


@triton.jit
def halves(tile):
    """Return the left and the right half of a tile's columns."""
    split: tl.constexpr = (tile.shape[0], 2, tile.shape[1] // 2)
    return tl.split(tl.permute(tl.reshape(tile, split), (0, 2, 1)))


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """Return accumulator + a b with products and sums in fp32; PRECISION ("ieee", "tf32") matters for fp32 operands.

    Of fp8 operands the tensor cores of compute capability 9.0 keep some 14 bits of a sum: each 128 of depth is added in
    fp32 registers.
    """
    if INTERPRETING:  # it would multiply the bit patterns of bfloat16 operands, and fp8 in fp16
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision=PRECISION)
    elif a.dtype == tl.float8e4nv:
        total = tl.dot(a, b, accumulator, max_num_imprecise_acc=128)
    else:
        total = tl.dot(a, b, accumulator, input_precision=PRECISION)
    return total


@triton.jit
def grouped_tile(rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return (row tile, column tile) of this program: GROUP row tiles are swept together over all column tiles.

    Programs that run at the same time then share the row operand's GROUP tiles and few column tiles in the L2 cache.
    """
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    per_group = GROUP * tl.cdiv(columns, BLOCK_COLUMNS)
    first_row_tile = (program // per_group) * GROUP
    group_rows = tl.minimum(row_tiles - first_row_tile, GROUP)
    within = program % per_group
    return first_row_tile + within % group_rows, within // group_rows


@triton.jit
def output_tile(
    tile_row, tile_column, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """Return (64-bit position, offsets within the tile, mask) of one tile of a contiguous [rows, columns] matrix.

    Kept apart because the offsets then fit 32 bits: a tile of 64-bit offsets costs registers that the epilogue lacks.
    """
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = (tile_row * BLOCK_ROWS + row < rows)[:, None] & (tile_column * BLOCK_COLUMNS + column < columns)[None, :]
    if WIDE:
        row = row.to(tl.int64)
    position = tile_row.to(tl.int64) * BLOCK_ROWS * columns + tile_column * BLOCK_COLUMNS
    return position, row[:, None] * columns + column[None, :], inside


@triton.jit
def strided_tile(
    tile_row, tile_column, rows, columns, row_stride, column_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return what `output_tile` returns, for a [rows, columns] matrix of any strides."""
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = (tile_row * BLOCK_ROWS + row < rows)[:, None] & (tile_column * BLOCK_COLUMNS + column < columns)[None, :]
    if WIDE:
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    position = (
        tile_row.to(tl.int64) * BLOCK_ROWS * row_stride + tile_column.to(tl.int64) * BLOCK_COLUMNS * column_stride
    )
    return position, row[:, None] * row_stride + column[None, :] * column_stride, inside


@triton.jit
def store_sum(ptrs, value, inside, ACCUMULATE: tl.constexpr):
    """Store an fp32 tile, rounded to the type of the pointers; ACCUMULATE adds what is there first."""
    if ACCUMULATE:
        value += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(ptrs, round_to(value, ptrs.dtype.element_ty), mask=inside)
