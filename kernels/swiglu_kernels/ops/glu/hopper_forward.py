"""z = silu(x w_gate^T) * (x w_up^T) hand-scheduled for Hopper (compute capability 9.0), in Gluon.

M tokens, N intermediate, K hidden. One program per multiprocessor walks through tiles of 128 rows and 64 to 96 columns
of z, whichever leave the fewest multiprocessors idle in the end (`tile_for`). A producer warp fills a ring of STAGES
tiles of x, w_gate and w_up by TMA. Two consumer warpgroups take tiles in turn ("ping-pong"): while one runs its main
loop, the other applies the gate to its finished tile and stores it, so that the tensor cores never wait for an
epilogue. 96 columns of gate and of up make an accumulator of 128 x 192, all that a warpgroup's registers hold.
`hopper/loop.py` has its main loop, which yields it in blocks of 64 x 64; the rows of w_gate and w_up lie in a stage
such that these are 64 columns of gate, 64 of up, and the last ones of each, up to 32. With STORE_PREACT gate and up are
stored as well, for the backward.

Measured on an H200: NOTES.md.
"""

import dataclasses
from typing import Any

import torch

from swiglu_kernels.hopper import buffers, shared
from swiglu_kernels.hopper.shared import ALIGNMENT_BYTES, CONSUMER_WARPS, GLUON_MISSING, SIZES, descriptor, fits_tma
from swiglu_kernels.runtime.backend import Capability, multiprocessors
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.rules import Tile, waves

ROWS, DEPTH, STAGES, GROUP = 128, 64, 5, 16
COLUMNS = {96: (1.0, 1.0), 88: (1.003, 1.015), 80: (1.005, 1.005), 72: (1.01, 1.035), 64: (1.015, 1.02)}
"""Tile widths to choose from; the launch takes the one that fills its waves best. For each, the time of a column
relative to the first width: with only z stored, and with gate and up stored too (widths that are not a multiple of 32
bytes are slow to store)."""
WIDE, PART = 64, 32
"""Columns of gate and up in the first blocks of the accumulator, and how many are stored at once; the last block has
the last PART of both, some of which are in the first blocks and stored already: all that is stored are whole parts."""
REST = (32, 16, 8)
"""Columns of gate and of up beyond the first blocks are loaded in such parts: TMA moves powers of two."""
BUFFERS = 3
"""Of each consumer, through which blocks are stored."""
TILE = Tile(ROWS, 96, DEPTH, warps=CONSUMER_WARPS, stages=STAGES, group=GROUP)
"""What is shipped; columns, stages and group may differ."""
_FILE = "ops/glu/hopper_forward.py"
_OPTIONAL = (*(f"{weight}_{rows}" for weight in ("w_gate", "w_up") for rows in REST), "gate_out", "up_out")

Blocks = dict[str, tuple[torch.Tensor, int, int]]
"""By names of arguments: a matrix, and the rows and columns of the blocks of it that TMA moves."""

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

    from swiglu_kernels.hopper.buffers import set_up
    from swiglu_kernels.hopper.loop import load_scales, multiply
    from swiglu_kernels.hopper.shared import halves, load, load_rest, position, sigmoid, start, synchronize, write

    _ROWS, _DEPTH, _WIDE, _PART = (gl.constexpr(size) for size in (ROWS, DEPTH, WIDE, PART))
    _BUFFERS = gl.constexpr(BUFFERS)

    @gluon.jit
    def first_column(tile, COLUMNS: gl.constexpr, N):
        """Return where a tile's columns begin; of twice WIDE, the last one may reach beyond the end."""
        return tile * COLUMNS if COLUMNS == 2 * _WIDE else start(tile, COLUMNS, N)

    @gluon.jit
    def produce(
        operands, sizes, COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr
    ):
        """Fill the ring with the stages of this program's tiles, in turn.

        Of twice WIDE columns a stage has four tiles of weights, two of each. BLOCKS: scales come with them.
        """
        x, w_gate, w_up, w_gate_rest, w_up_rest, x_ring, w_ring, barriers, scales = operands
        M, N, row_tiles, column_tiles, depth_tiles = sizes
        LAST: gl.constexpr = COLUMNS - _WIDE
        WHOLE: gl.constexpr = COLUMNS == 2 * _WIDE
        EACH: gl.constexpr = 4 if WHOLE else 3
        step = 0
        for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
            row, column = position(tile, row_tiles, column_tiles, GROUP)
            first_row, first = start(row, _ROWS, M), first_column(column, COLUMNS, N)
            for depth in range(depth_tiles):
                stage = step % STAGES
                at = depth * _DEPTH
                full = barriers.index(stage)
                mbarrier.wait(barriers.index(STAGES + stage), (step // STAGES + 1) & 1)  # passes in the first round
                mbarrier.expect(full, (_ROWS + 2 * COLUMNS) * _DEPTH * 2)  # elements of 16 bits
                if BLOCKS:
                    load_scales(*scales, stage, depth, first_row, first, COLUMNS)
                load(x, [first_row, at], full, x_ring.index(stage))
                load(w_gate, [first, at], full, w_ring.index(EACH * stage))
                load(w_up, [first, at], full, w_ring.index(EACH * stage + EACH // 2))
                if WHOLE:
                    load(w_gate, [first + _WIDE, at], full, w_ring.index(EACH * stage + 1))
                    load(w_up, [first + _WIDE, at], full, w_ring.index(EACH * stage + 3))
                elif LAST > 0:
                    both = w_ring.index(3 * stage + 2)
                    load_rest(w_gate_rest, first + _WIDE, at, full, both, 0, LAST)
                    load_rest(w_up_rest, first + _WIDE, at, full, both, LAST, LAST)
                step += 1

    @gluon.jit
    def finish_part(
        gate, up, z, gate_out, up_out, row, column, buffers, FIRST: gl.constexpr, PART: gl.constexpr,
        NEWER: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """Store z of a tile's PART columns, and gate and up if they are wanted, each through a buffer of its own."""
        if STORE_PREACT:
            write(gate, gate_out, row, column, buffers.index(FIRST), NEWER)
            write(up, up_out, row, column, buffers.index(FIRST + 1), NEWER)
            write(gate * sigmoid(gate) * up, z, row, column, buffers.index(FIRST + 2), NEWER)
        else:
            write(gate * sigmoid(gate) * up, z, row, column, buffers.index(FIRST + PART), NEWER)

    @gluon.jit
    def _finish(
        gate, up, both, z, gate_out, up_out, row, column, buffers,
        COLUMNS: gl.constexpr, FIRST: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """Apply the gate to one half of a tile's rows and store them."""
        NEWER: gl.constexpr = _BUFFERS - 1 if STORE_PREACT or COLUMNS > _WIDE else 1  # buffers in use are taken in turn
        gate_0, gate_1 = halves(gate, _WIDE, _PART)
        up_0, up_1 = halves(up, _WIDE, _PART)
        finish_part(gate_0, up_0, z, gate_out, up_out, row, column, buffers, FIRST, 0, NEWER, STORE_PREACT)
        finish_part(gate_1, up_1, z, gate_out, up_out, row, column + _PART, buffers, FIRST, 1, NEWER, STORE_PREACT)
        if COLUMNS > _WIDE:
            gate_2, up_2 = halves(both, _WIDE, _PART)
            column += COLUMNS - _PART
            finish_part(gate_2, up_2, z, gate_out, up_out, row, column, buffers, FIRST, 2, NEWER, STORE_PREACT)

    @gluon.jit
    def _consume(
        given, sizes, ME: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
        STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        z, gate_out, up_out, x_at, w_at, barriers_at, buffers = given
        M, N, row_tiles, column_tiles, depth_tiles = sizes
        FIRST: gl.constexpr = ME * _BUFFERS
        programs = gl.num_programs(0)
        tiles = (row_tiles * column_tiles - gl.program_id(0) + programs - 1) // programs  # of this program
        for number in range(ME, tiles, 2):
            row, column = position(gl.program_id(0) + number * programs, row_tiles, column_tiles, GROUP)
            parity = (number // 2 + 1 - ME) & 1  # the first tile's turn passes at once
            gate, up, both, gate_1, up_1, both_1 = multiply(
                x_at, w_at, barriers_at, number * depth_tiles, depth_tiles, parity,
                z.dtype, 2 * COLUMNS, ME, STAGES,
            )  # fmt: skip
            row, column = start(row, _ROWS, M), start(column, COLUMNS, N)
            _finish(gate, up, both, z, gate_out, up_out, row, column, buffers, COLUMNS, FIRST, STORE_PREACT)
            row += _WIDE
            _finish(gate_1, up_1, both_1, z, gate_out, up_out, row, column, buffers, COLUMNS, FIRST, STORE_PREACT)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=SIZES)
    def _forward_kernel(
        x, w_gate, w_up, w_gate_32, w_gate_16, w_gate_8, w_up_32, w_up_16, w_up_8,
        z, gate_out, up_out, M, N, K,
        COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        row_tiles, column_tiles, depth_tiles = gl.cdiv(M, _ROWS), gl.cdiv(N, COLUMNS), gl.cdiv(K, _DEPTH)
        x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, _ROWS, _DEPTH], x.layout)
        w_ring = gl.allocate_shared_memory(x.dtype, [3 * STAGES, _WIDE, _DEPTH], w_gate.layout)
        buffers = gl.allocate_shared_memory(x.dtype, [2 * _BUFFERS, _WIDE, _PART], z.layout)
        x_at, w_at, barriers_at, barriers = set_up(x_ring, w_ring, STAGES, TURNS=True)
        fence_async_shared()
        synchronize()
        w_gate_rest, w_up_rest = (w_gate_32, w_gate_16, w_gate_8), (w_up_32, w_up_16, w_up_8)
        operands = (x, w_gate, w_up, w_gate_rest, w_up_rest, x_ring, w_ring, barriers, ())
        given = (z, gate_out, up_out, x_at, w_at, barriers_at, buffers)
        sizes = (M, N, row_tiles, column_tiles, depth_tiles)
        gl.warp_specialize(
            [
                (_consume, (given, sizes, 0, COLUMNS, STAGES, GROUP, STORE_PREACT)),
                (_consume, (given, sizes, 1, COLUMNS, STAGES, GROUP, STORE_PREACT)),
                (produce, (operands, sizes, COLUMNS, STAGES, GROUP, False)),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [240, 24],  # their registers; the first consumer gets the rest, 240
        )  # fmt: skip


def tile_for(tokens: int, intermediate: int, processors: int, stores_preact: bool) -> Tile:
    """Return the tile whose waves are filled best."""
    found = costs(tokens, intermediate, processors, stores_preact)
    return dataclasses.replace(TILE, columns=min(found, key=found.__getitem__))


def costs(tokens: int, intermediate: int, processors: int, stores_preact: bool) -> dict[int, float]:
    """Return what the tiles take, by their columns: a wave takes about as long as its tiles are wide."""
    return {
        columns: waves(tokens, intermediate, ROWS, columns, processors) * columns * each[stores_preact]
        for columns, each in COLUMNS.items()
    }


def why_not(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, capability: Capability | None) -> str | None:
    """Say why a product cannot take this path, or return None where it can.

    Args:
        x: [M, K].
        w_gate: [N, K].
        w_up: [N, K].
        capability: of the GPU that would run it; None for none.
    """
    kernel = "row forward" if x.shape[0] <= ROWS else "forward"
    if reason := shared.missing_for(kernel, capability, x, w_gate, w_up):
        return reason
    if (w_gate.shape[0] * x.element_size()) % ALIGNMENT_BYTES:
        return f"a row of z is not a multiple of {ALIGNMENT_BYTES} bytes"
    return None if all(map(fits_tma, (x, w_gate, w_up))) else shared.NO_TMA


def forward_launch(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None, tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """Describe the launch; ask `why_not` first.

    Args:
        x, w_gate, w_up, z, preactivations: as of `portable_forward.forward_launch`.
        tile: its columns, stages and group are taken; rows and depth are the kernel's own. None: `tile_for`.
    """
    (M, K), N = x.shape, w_gate.shape[0]
    programs, stored = multiprocessors(x.device), preactivations is not None
    tile = tile or tile_for(M, N, programs, stored)
    blocks = operand_blocks(x, w_gate, w_up, tile.columns - WIDE)
    blocks |= {name: (output, WIDE, PART) for name, output in shared.forward_outputs(z, preactivations).items()}
    others = {"M": M, "N": N, "K": K, "COLUMNS": tile.columns, "GROUP": tile.group, "STORE_PREACT": stored}
    tiles = -(-M // ROWS) * -(-N // tile.columns)
    return launch_of(_forward_kernel, min(tiles, programs), tile, blocks, dict.fromkeys(_OPTIONAL) | others, _FILE)


def operand_blocks(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, last: int) -> Blocks:
    """Return the blocks of the operands, in a tile with `last` columns beyond the first blocks."""
    blocks = {"x": (x, ROWS, DEPTH), "w_gate": (w_gate, WIDE, DEPTH), "w_up": (w_up, WIDE, DEPTH)}
    for rows in (part for part in REST if last & part):
        blocks |= {f"w_gate_{rows}": (w_gate, rows, DEPTH), f"w_up_{rows}": (w_up, rows, DEPTH)}
    return blocks


def launch_of(
    kernel: object, programs: int, tile: Tile, blocks: Blocks, others: dict[str, Any], file: str, **more: Any
) -> Launch:
    """Describe a launch of a kernel that looks for its buffers; blocks are what TMA moves."""
    # A descriptor costs 2 us in every launch: what is not needed is None.
    arguments = others | {name: descriptor(*block) for name, block in blocks.items()} | {"STAGES": tile.stages}
    traps = buffers.lost(file)
    return Launch(kernel, (programs,), arguments, CONSUMER_WARPS, tile.stages, traps=traps, **more)
