"""z = silu(x w_gate^T) * (x w_up^T) for up to 128 tokens, hand-scheduled for Hopper (capability 9.0), in Gluon.

M tokens, N intermediate, K hidden. So few tokens are one row of tiles, and reading the weights takes most of the time:
every multiprocessor gets an equal share of their rows, as tiles of 128 x (W + W) whose W is any multiple of 8 up to 128
(`tile_for`). A producer warp fills a ring of STAGES by TMA, which moves powers of two, so a share comes in parts of 64,
32, 16 and 8 rows. Two consumer warpgroups have 64 rows of the tile each ("cooperative"), so that neither waits for a
turn. `hopper/loop.py` has their main loop. With STORE_PREACT gate and up are stored as well, for the backward.

The ring is one buffer of units of 64 rows of 128 bytes: a stage has two for x, and one or two for each weight. Two more
units hold the barriers and a mark by which all is found.

Measured on an H200: NOTES.md.
"""

import torch

from swiglu_kernels.hopper import buffers, shared
from swiglu_kernels.hopper.shared import CONSUMER_WARPS, GLUON_MISSING
from swiglu_kernels.ops.glu.hopper_forward import launch_of
from swiglu_kernels.runtime.backend import multiprocessors
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.rules import Tile

ROWS, DEPTH = 128, 64
MOST_TOKENS, MOST_COLUMNS = ROWS, 128
UNIT, PARTS = 64, (64, 32, 16, 8)
"""Rows that TMA moves at once; the first is a unit of the ring."""
X_STEP = 16
"""Rows of x are loaded in multiples of it: rows beyond the last token cost TMA more than others."""
STAGES = {1: 6, 2: 4}
"""What fits into shared memory, by the units that a weight takes up in a stage."""
_BLOCKS = (f"{name}_{part}" for name in ("x", "w_gate", "w_up") for part in PARTS if (name, part) != ("x", 8))
_OPTIONAL = (*_BLOCKS, "gate_out", "up_out")

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

    from swiglu_kernels.hopper.buffers import locate
    from swiglu_kernels.hopper.loop import multiply_half
    from swiglu_kernels.hopper.shared import load, load_rest, sigmoid, start, synchronize, view

    _ROWS, _HALF, _DEPTH, _UNIT = (gl.constexpr(size) for size in (ROWS, ROWS // 2, DEPTH, UNIT))
    _RELEASES = gl.constexpr(2 * buffers.RELEASES)  # both consumers read every stage

    @gluon.jit
    def _load_rows(blocks, first, at, full, ring, unit, COUNT: gl.constexpr):
        """Load COUNT rows of a matrix, which start at `first`, into the units of the ring that start at `unit`.

        blocks: descriptors of the matrix for 64, 32, 16 and 8 rows; None where not needed.
        """
        REST: gl.constexpr = COUNT % _UNIT
        for part in gl.static_range(COUNT // _UNIT):
            load(blocks[0], [first + _UNIT * part, at], full, ring.index(unit + part))
        if REST > 0:
            rest = ring.index(unit + COUNT // _UNIT)
            load_rest((blocks[1], blocks[2], blocks[3]), first + COUNT - REST, at, full, rest, 0, REST)

    @gluon.jit
    def _load_stage(
        given, step, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, W_UNITS: gl.constexpr, STAGES: gl.constexpr
    ):
        x, w_gate, w_up, ring, barriers, N, depth_tiles = given
        X_UNITS: gl.constexpr = _ROWS // _UNIT
        stage = step % STAGES
        first = start(gl.program_id(0) + step // depth_tiles * gl.num_programs(0), COLUMNS, N)
        at = step % depth_tiles * _DEPTH
        full = barriers.index(stage)
        unit = stage * (X_UNITS + 2 * W_UNITS)
        mbarrier.expect(full, (TOKENS + 2 * COLUMNS) * _DEPTH * 2)  # elements of 16 bits
        _load_rows(w_gate, first, at, full, ring, unit + X_UNITS, COLUMNS)
        _load_rows(w_up, first, at, full, ring, unit + X_UNITS + W_UNITS, COLUMNS)
        _load_rows(x, 0, at, full, ring, unit, TOKENS)

    @gluon.jit
    def _produce(
        given, steps, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, W_UNITS: gl.constexpr, STAGES: gl.constexpr
    ):
        barriers = given[4]
        for step in range(STAGES, steps):
            mbarrier.wait(barriers.index(STAGES + step % STAGES), (step // STAGES + 1) & 1)
            _load_stage(given, step, TOKENS, COLUMNS, W_UNITS, STAGES)

    @gluon.jit
    def _store(value, out, row, column, WIDTH: gl.constexpr, M, N):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        value = gl.convert_layout(value.to(out.dtype.element_ty), LAYOUT)
        rows = row + gl.arange(0, _HALF, gl.SliceLayout(1, LAYOUT))
        columns = gl.arange(0, _HALF, gl.SliceLayout(0, LAYOUT))
        inside = (rows < M)[:, None] & ((columns < WIDTH) & (column + columns < N))[None, :]
        gl.store(out + rows.to(gl.int64)[:, None] * N + (column + columns)[None, :], value, mask=inside)

    @gluon.jit
    def _finish(gate, up, z, gate_out, up_out, row, column, WIDTH: gl.constexpr, M, N, STORE_PREACT: gl.constexpr):
        """Apply the gate to WIDTH columns of one consumer's rows and store them."""
        _store(gate * sigmoid(gate) * up, z, row, column, WIDTH, M, N)
        if STORE_PREACT:
            _store(gate, gate_out, row, column, WIDTH, M, N)
            _store(up, up_out, row, column, WIDTH, M, N)

    @gluon.jit
    def _consume(
        given, ME: gl.constexpr, COLUMNS: gl.constexpr, W_UNITS: gl.constexpr, STAGES: gl.constexpr,
        STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        z, gate_out, up_out, ring_at, barriers_at, M, N, tiles, depth_tiles = given
        ROW: gl.constexpr = ME * _HALF
        FIRST: gl.constexpr = min(COLUMNS, _HALF)
        step = 0
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            gate, gate_rest, up, up_rest = multiply_half(
                ring_at, ring_at + _ROWS * _DEPTH * 2, barriers_at, step, depth_tiles, z.dtype.element_ty,
                COLUMNS, W_UNITS * _UNIT, _ROWS + 2 * W_UNITS * _UNIT, ME, STAGES,
            )  # fmt: skip
            column = start(tile, COLUMNS, N)
            _finish(gate, up, z, gate_out, up_out, ROW, column, FIRST, M, N, STORE_PREACT)
            if COLUMNS > FIRST:
                column += FIRST
                _finish(gate_rest, up_rest, z, gate_out, up_out, ROW, column, COLUMNS - FIRST, M, N, STORE_PREACT)
            step += depth_tiles

    @gluon.jit(do_not_specialize=("M", "K"))
    def _row_kernel(
        x_64, x_32, x_16, w_gate_64, w_gate_32, w_gate_16, w_gate_8, w_up_64, w_up_32, w_up_16, w_up_8,
        z, gate_out, up_out, M, N, K, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, W_UNITS: gl.constexpr,
        STAGES: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        UNITS: gl.constexpr = STAGES * (_ROWS // _UNIT + 2 * W_UNITS)
        UNIT_BYTES: gl.constexpr = _UNIT * _DEPTH * 2
        tiles, depth_tiles = gl.cdiv(N, COLUMNS), gl.cdiv(K, _DEPTH)
        steps = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0)) * depth_tiles
        x = (x_64, x_32, x_16, None)
        w_gate = (w_gate_64, w_gate_32, w_gate_16, w_gate_8)
        w_up = (w_up_64, w_up_32, w_up_16, w_up_8)
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # swizzled over 128 bytes, 16 bits an element
        ring = gl.allocate_shared_memory(z.dtype.element_ty, [UNITS + 2, _UNIT, _DEPTH], LAYOUT)
        barriers = view(ring.index(UNITS), gl.int64, [_DEPTH * 16, 1], mbarrier.MBarrierLayout())  # all of a unit
        for stage in gl.static_range(STAGES):
            mbarrier.init(barriers.index(stage), count=1)
            mbarrier.init(barriers.index(STAGES + stage), count=_RELEASES)
        fence_async_shared()
        synchronize()
        loaded = (x, w_gate, w_up, ring, barriers, N, depth_tiles)
        for step in range(min(STAGES, steps)):  # these are on their way while the ring is looked for
            _load_stage(loaded, step, TOKENS, COLUMNS, W_UNITS, STAGES)
        barriers_at = locate(ring.index(UNITS + 1)) - UNIT_BYTES
        ring_at = barriers_at - UNITS * UNIT_BYTES
        given = (z, gate_out, up_out, ring_at, barriers_at, M, N, tiles, depth_tiles)
        gl.warp_specialize(
            [
                (_consume, (given, 0, COLUMNS, W_UNITS, STAGES, STORE_PREACT)),
                (_consume, (given, 1, COLUMNS, W_UNITS, STAGES, STORE_PREACT)),
                (_produce, (loaded, steps, TOKENS, COLUMNS, W_UNITS, STAGES)),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [240, 24],  # their registers; the first consumer gets the rest, 240
        )  # fmt: skip


def tile_for(intermediate: int, processors: int) -> Tile:
    """Return the narrowest tile in which every multiprocessor has one, or as many as it takes."""
    waves = -(-intermediate // (processors * MOST_COLUMNS))
    columns = 8 * -(-intermediate // (8 * processors * waves))
    return Tile(ROWS, columns, DEPTH, warps=CONSUMER_WARPS, stages=STAGES[_units(columns)], group=1)


def _units(columns: int) -> int:
    """How many units a weight takes up in a stage."""
    return -(-columns // UNIT)


def forward_launch(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None, tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """Describe the launch for at most MOST_TOKENS tokens; ask `hopper_forward.why_not` first.

    Args:
        x, w_gate, w_up, z, preactivations: as of `portable_forward.forward_launch`.
        tile: its columns and stages are taken. None: `tile_for`.
    """
    (M, K), N = x.shape, w_gate.shape[0]
    programs = multiprocessors(x.device)
    tile = tile or tile_for(N, programs)
    tokens = -(-M // X_STEP) * X_STEP
    blocks = {
        f"{name}_{part}": (matrix, part, DEPTH)
        for name, matrix, count in (("x", x, tokens), ("w_gate", w_gate, tile.columns), ("w_up", w_up, tile.columns))
        for part in PARTS
        if (count >= part if part == UNIT else count & part)
    }
    others = dict.fromkeys(_OPTIONAL) | shared.forward_outputs(z, preactivations)
    others |= {"M": M, "N": N, "K": K, "TOKENS": tokens, "COLUMNS": tile.columns, "W_UNITS": _units(tile.columns)}
    others |= {"STORE_PREACT": preactivations is not None}
    return launch_of(_row_kernel, min(-(-N // tile.columns), programs), tile, blocks, others, "ops/glu/hopper_row.py")
