"""z = silu(x w_gate^T) * (x w_up^T) scheduled by hand for Hopper (compute capability 9.0), in Gluon.

M tokens, N intermediate, K hidden. One program per multiprocessor walks through tiles of 128 rows and 96 columns of z.
A producer warp fills a ring of STAGES tiles of x, w_gate and w_up by TMA. Two consumer warpgroups take tiles in turn
("ping-pong"): while one runs its main loop, the other applies the gate to its finished tile and stores it, so that the
tensor cores never wait for an epilogue. 96 columns make accumulators of 128 x 192, all that a warpgroup's registers
hold; as shapes are powers of two they are kept as 128 x 128 (64 columns of gate, 64 of up) and 128 x 64 (32 and 32).
The tiles of w_gate and w_up lie one below the other in shared memory, so that one wgmma makes gate and up at once; an
accumulator is then split between them without leaving the registers. With STORE_PREACT gate and up are stored as well,
for the backward.

Barriers are those of `hopper.py`. Measured on an H200: NOTES.md.
"""

import torch

from swiglu_kernels import hopper
from swiglu_kernels.hopper import ALIGNMENT_BYTES, CONSUMER_WARPS, GLUON_MISSING, LOG2_E, descriptor, fits_tma
from swiglu_kernels.launch import Launch
from swiglu_kernels.tiles import Capability, Tile

ROWS, COLUMNS, DEPTH, STAGES, GROUP = 128, 96, 64, 5, 16
PART = 32
"""Columns that are loaded and stored at once: a tile has three parts, the first two in one accumulator."""
TILE = Tile(ROWS, COLUMNS, DEPTH, warps=CONSUMER_WARPS, stages=STAGES, group=GROUP)
"""What is shipped; stages and group may differ."""
LEAST_TOKENS = 65
"""Below, the portable kernel's smaller tiles fill the GPU better, unless tuning finds otherwise."""


if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    from swiglu_kernels.hopper import before, halves, load, position, write

    _LOG2_E = gl.constexpr(LOG2_E)

    @gluon.jit
    def _load_pair(w_gate, w_up, row, at, arrived, both, WIDTH: gl.constexpr):
        """Load WIDTH rows of w_gate into the upper half of `both` and of w_up into the lower."""
        load(w_gate, [row, at], arrived, both.slice(0, WIDTH, dim=0))
        load(w_up, [row, at], arrived, both.slice(WIDTH, WIDTH, dim=0))

    @gluon.jit
    def _produce(
        x, w_gate, w_up, w_gate_narrow, w_up_narrow, x_ring, wide_ring, narrow_ring, full, empty,
        row_tiles, column_tiles, depth_tiles,
        ROWS: gl.constexpr, PART: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ):  # fmt: skip
        step = 0
        for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
            row, column = position(tile, row_tiles, column_tiles, GROUP)
            for depth in range(depth_tiles):
                stage = step % STAGES
                arrived = full.index(stage)
                mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)  # passes at once in the first round
                mbarrier.expect(arrived, (ROWS + 6 * PART) * DEPTH * 2)  # elements of 16 bits
                load(x, [row * ROWS, depth * DEPTH], arrived, x_ring.index(stage))
                first, at = 3 * column * PART, depth * DEPTH
                _load_pair(w_gate, w_up, first, at, arrived, wide_ring.index(stage), 2 * PART)
                _load_pair(w_gate_narrow, w_up_narrow, first + 2 * PART, at, arrived, narrow_ring.index(stage), PART)
                step += 1

    @gluon.jit
    def _finish(gate, up, z, gate_out, up_out, row, column, buffer, STORE_PREACT: gl.constexpr):
        """Apply the gate to one part of a tile and store it."""
        if STORE_PREACT:
            write(gate, gate_out, row, column, buffer)
            write(up, up_out, row, column, buffer)
        write(gate / (1.0 + gl.exp2(-_LOG2_E * gate)) * up, z, row, column, buffer)

    @gluon.jit
    def _consume(
        z, gate_out, up_out, x_ring, wide_ring, narrow_ring, buffers, full, empty, turn,
        row_tiles, column_tiles, depth_tiles, ME: gl.constexpr,
        ROWS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 4 * PART, 16])
        NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PART, 16])
        buffer = buffers.index(ME)
        programs = gl.num_programs(0)
        tiles = (row_tiles * column_tiles - gl.program_id(0) + programs - 1) // programs  # of this program
        for number in range(ME, tiles, 2):
            row, column = position(gl.program_id(0) + number * programs, row_tiles, column_tiles, GROUP)
            wide = gl.zeros([ROWS, 4 * PART], gl.float32, WIDE)
            narrow = gl.zeros([ROWS, 2 * PART], gl.float32, NARROW)
            stage = number * depth_tiles % STAGES
            phase = number * depth_tiles // STAGES & 1
            mbarrier.wait(turn.index(ME), (number // 2 + 1 - ME) & 1)  # the first tile's passes at once
            for depth in range(depth_tiles):
                mbarrier.wait(full.index(stage), phase)
                left = x_ring.index(stage)
                wide = warpgroup_mma(left, wide_ring.index(stage).permute((1, 0)), wide, is_async=True)
                narrow = warpgroup_mma(left, narrow_ring.index(stage).permute((1, 0)), narrow, is_async=True)
                wide, narrow = warpgroup_mma_wait(num_outstanding=2, deps=(wide, narrow))
                mbarrier.arrive(empty.index(before(stage, STAGES)), pred=depth > 0)  # the stage before is done
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            mbarrier.arrive(turn.index(1 - ME))
            wide, narrow = warpgroup_mma_wait(num_outstanding=0, deps=(wide, narrow))
            mbarrier.arrive(empty.index(before(stage, STAGES)))
            gate, up = halves(wide, ROWS, 2 * PART)
            gate_0, gate_1 = halves(gate, ROWS, PART)
            up_0, up_1 = halves(up, ROWS, PART)
            gate_2, up_2 = halves(narrow, ROWS, PART)
            first_row, first = row * ROWS, 3 * column * PART
            _finish(gate_0, up_0, z, gate_out, up_out, first_row, first, buffer, STORE_PREACT)
            _finish(gate_1, up_1, z, gate_out, up_out, first_row, first + PART, buffer, STORE_PREACT)
            _finish(gate_2, up_2, z, gate_out, up_out, first_row, first + 2 * PART, buffer, STORE_PREACT)
        tma.store_wait(0)

    @gluon.jit
    def _forward_kernel(
        x, w_gate, w_up, w_gate_narrow, w_up_narrow, z, gate_out, up_out, M, N, K,
        ROWS: gl.constexpr, PART: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
        STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        row_tiles, column_tiles, depth_tiles = gl.cdiv(M, ROWS), gl.cdiv(N, 3 * PART), gl.cdiv(K, DEPTH)
        x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
        wide_ring = gl.allocate_shared_memory(x.dtype, [STAGES, 4 * PART, DEPTH], w_gate.layout)
        narrow_ring = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * PART, DEPTH], w_gate.layout)
        buffers = gl.allocate_shared_memory(x.dtype, [2, ROWS, PART], z.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=1)
        for consumer in gl.static_range(2):
            mbarrier.init(turn.index(consumer), count=1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        z, gate_out, up_out, x_ring, wide_ring, narrow_ring, buffers, full, empty, turn,
                        row_tiles, column_tiles, depth_tiles, 0, ROWS, PART, STAGES, GROUP, STORE_PREACT,
                    ),
                ),
                (
                    _consume,
                    (
                        z, gate_out, up_out, x_ring, wide_ring, narrow_ring, buffers, full, empty, turn,
                        row_tiles, column_tiles, depth_tiles, 1, ROWS, PART, STAGES, GROUP, STORE_PREACT,
                    ),
                ),
                (
                    _produce,
                    (
                        x, w_gate, w_up, w_gate_narrow, w_up_narrow, x_ring, wide_ring, narrow_ring, full, empty,
                        row_tiles, column_tiles, depth_tiles, ROWS, PART, DEPTH, STAGES, GROUP,
                    ),
                ),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [240, 24],  # their registers; the first consumer gets the rest, 240
        )  # fmt: skip


def why_not(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, capability: Capability | None) -> str | None:
    """Say why a product cannot take this path, or return None where it can.

    Args:
        x: [M, K].
        w_gate: [N, K].
        w_up: [N, K].
        capability: of the GPU that would run it; None for none.
    """
    reason = hopper.missing_for(capability, x, w_gate, w_up)
    if reason is not None:
        return reason
    if (w_gate.shape[0] * x.element_size()) % ALIGNMENT_BYTES:
        return f"a row of z is not a multiple of {ALIGNMENT_BYTES} bytes"
    if not all(map(fits_tma, (x, w_gate, w_up))):
        return f"TMA needs a last stride of 1, and rows that start and step by multiples of {ALIGNMENT_BYTES} bytes"
    return None


def forward_launch(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None,
    tile: Tile = TILE,
) -> Launch:
    """Describe the launch; ask `why_not` first.

    Args:
        x: [M, K].
        w_gate: [N, K].
        w_up: [N, K].
        z: [M, N], contiguous, written.
        preactivations: gate and up, [M, N] and contiguous, written; None stores z alone.
        tile: its stages and its group are taken; its sizes are the kernel's own.
    """
    (M, K), N = x.shape, w_gate.shape[0]
    tiles = -(-M // ROWS) * -(-N // COLUMNS)
    blocks = {
        "x": (x, ROWS, DEPTH),
        "w_gate": (w_gate, 2 * PART, DEPTH),
        "w_up": (w_up, 2 * PART, DEPTH),
        "w_gate_narrow": (w_gate, PART, DEPTH),
        "w_up_narrow": (w_up, PART, DEPTH),
        "z": (z, ROWS, PART),
    }
    if preactivations is not None:
        blocks |= {"gate_out": (preactivations[0], ROWS, PART), "up_out": (preactivations[1], ROWS, PART)}
    return Launch(
        kernel=_forward_kernel,
        grid=(min(tiles, hopper.multiprocessors(x.device)),),
        arguments={"gate_out": None, "up_out": None}  # a descriptor costs 2 us in every launch
        | {name: descriptor(*block) for name, block in blocks.items()}
        | {"M": M, "N": N, "K": K, "ROWS": ROWS, "PART": PART, "DEPTH": DEPTH}
        | {"STAGES": tile.stages, "GROUP": tile.group, "STORE_PREACT": preactivations is not None},
        num_warps=CONSUMER_WARPS,
        num_stages=tile.stages,
    )
