"""z = silu(x w_gate^T) * (x w_up^T) scheduled by hand for Hopper (compute capability 9.0), in Gluon.

M tokens, N intermediate, K hidden. One program per multiprocessor walks through tiles of 128 rows and 96 columns of z.
A producer warp fills a ring of STAGES tiles of x, w_gate and w_up by TMA. Two consumer warpgroups take tiles in turn
("ping-pong"): while one runs its main loop, the other applies the gate to its finished tile and stores it, so that the
tensor cores never wait for an epilogue. 96 columns make accumulators of 128 x 192, all that a warpgroup's registers
hold; as shapes are powers of two they are kept as 128 x 128 (64 columns of gate, 64 of up) and 128 x 64 (32 and 32).
The tiles of w_gate and w_up lie one below the other in shared memory, so that one wgmma makes gate and up at once; an
accumulator is then split between them without leaving the registers. With STORE_PREACT gate and up are stored as well,
for the backward.

Barriers: `full` completes when TMA has written a stage, `empty` when its wgmma is done, `turn` of a consumer when the
other one has issued the last wgmma of its main loop.

Measured on an H200: NOTES.md.
"""

import functools
import importlib.util

import torch

from swiglu_kernels.backend import INTERPRETING, TRITON_AVAILABLE
from swiglu_kernels.launch import Launch
from swiglu_kernels.tiles import Capability

ROWS, COLUMNS, DEPTH, STAGES, GROUP = 128, 96, 64, 5, 16
PART = 32
"""Columns that are loaded and stored at once: a tile has three parts, the first two in one accumulator."""
CONSUMER_WARPS = 4
LEAST_TOKENS = 65
"""Below, the portable kernel's smaller tiles fill the GPU better."""
ALIGNMENT_BYTES = 16
LOG2_E = 1.4426950408889634


def _gluon_is_missing() -> str | None:
    if not TRITON_AVAILABLE or INTERPRETING:
        return "Gluon needs Triton and has no interpreter"
    if importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is None:
        return "this Triton has no Gluon for Hopper; 3.6 to 3.9 have it"
    return None


GLUON_MISSING = _gluon_is_missing()

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
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Triton 3.9 renamed both.
    _load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    _store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    _LOG2_E = gl.constexpr(LOG2_E)

    @gluon.jit
    def _position(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
        """Return the row and column of a tile; GROUP rows of tiles are walked together, to share the L2 cache."""
        per_group = GROUP * column_tiles
        first = tile // per_group * GROUP
        rows = min(row_tiles - first, GROUP)
        return first + tile % per_group % rows, tile % per_group // rows

    @gluon.jit
    def _load_pair(w_gate, w_up, row, at, arrived, both, WIDTH: gl.constexpr):
        """Load WIDTH rows of w_gate into the upper half of `both` and of w_up into the lower."""
        _load(w_gate, [row, at], arrived, both.slice(0, WIDTH, dim=0))
        _load(w_up, [row, at], arrived, both.slice(WIDTH, WIDTH, dim=0))

    @gluon.jit
    def _produce(
        x, w_gate, w_up, w_gate_narrow, w_up_narrow, x_ring, wide_ring, narrow_ring, full, empty,
        row_tiles, column_tiles, depth_tiles,
        ROWS: gl.constexpr, PART: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ):  # fmt: skip
        step = 0
        for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
            row, column = _position(tile, row_tiles, column_tiles, GROUP)
            for depth in range(depth_tiles):
                stage = step % STAGES
                arrived = full.index(stage)
                mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)  # passes at once in the first round
                mbarrier.expect(arrived, (ROWS + 6 * PART) * DEPTH * 2)  # elements of 16 bits
                _load(x, [row * ROWS, depth * DEPTH], arrived, x_ring.index(stage))
                first, at = 3 * column * PART, depth * DEPTH
                _load_pair(w_gate, w_up, first, at, arrived, wide_ring.index(stage), 2 * PART)
                _load_pair(w_gate_narrow, w_up_narrow, first + 2 * PART, at, arrived, narrow_ring.index(stage), PART)
                step += 1

    @gluon.jit
    def _before(stage, STAGES: gl.constexpr):
        return gl.where(stage == 0, STAGES - 1, stage - 1)

    @gluon.jit
    def _write(value, target, row, column, buffer):
        """Send a tile to global memory through the buffer, after the buffer's last tile has left."""
        tma.store_wait(0)
        buffer.store(value.to(target.dtype))
        fence_async_shared()
        _store(target, [row, column], buffer)

    @gluon.jit
    def _finish(gate, up, z, gate_out, up_out, row, column, buffer, STORE_PREACT: gl.constexpr):
        """Apply the gate to one part of a tile and store it."""
        if STORE_PREACT:
            _write(gate, gate_out, row, column, buffer)
            _write(up, up_out, row, column, buffer)
        _write(gate / (1.0 + gl.exp2(-_LOG2_E * gate)) * up, z, row, column, buffer)

    @gluon.jit
    def _halves(tile, ROWS: gl.constexpr, WIDTH: gl.constexpr):
        """Split a tile of 2 WIDTH columns into its left and its right half, within the registers."""
        return tile.reshape([ROWS, 2, WIDTH]).permute(0, 2, 1).split()

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
            row, column = _position(gl.program_id(0) + number * programs, row_tiles, column_tiles, GROUP)
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
                mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=depth > 0)  # the stage before is done
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            mbarrier.arrive(turn.index(1 - ME))
            wide, narrow = warpgroup_mma_wait(num_outstanding=0, deps=(wide, narrow))
            mbarrier.arrive(empty.index(_before(stage, STAGES)))
            gate, up = _halves(wide, ROWS, 2 * PART)
            gate_0, gate_1 = _halves(gate, ROWS, PART)
            up_0, up_1 = _halves(up, ROWS, PART)
            gate_2, up_2 = _halves(narrow, ROWS, PART)
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
    if GLUON_MISSING is not None:
        return GLUON_MISSING
    if capability is None or capability[0] != 9:
        return "the kernel is for compute capability 9.0"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return "the kernel is for 16-bit types"
    if x.shape[0] < LEAST_TOKENS:
        return f"fewer than {LEAST_TOKENS} tokens"
    if 0 in x.shape or 0 in w_gate.shape:
        return "an empty tensor has no descriptor"
    if (w_gate.shape[0] * x.element_size()) % ALIGNMENT_BYTES:
        return f"a row of z is not a multiple of {ALIGNMENT_BYTES} bytes"
    if not all(map(_fits_tma, (x, w_gate, w_up))):
        return f"TMA needs a last stride of 1, and rows that start and step by multiples of {ALIGNMENT_BYTES} bytes"
    return None


def _fits_tma(matrix: torch.Tensor) -> bool:
    aligned = matrix.is_meta or matrix.data_ptr() % ALIGNMENT_BYTES == 0
    step_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and aligned and step_bytes > 0 and step_bytes % ALIGNMENT_BYTES == 0


def forward_launch(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None,
) -> Launch:
    """Describe the launch; ask `why_not` first.

    Args:
        x: [M, K].
        w_gate: [N, K].
        w_up: [N, K].
        z: [M, N], contiguous, written.
        preactivations: gate and up, [M, N] and contiguous, written; None stores z alone.
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
        grid=(min(tiles, _multiprocessors(x.device)),),
        arguments={"gate_out": None, "up_out": None}  # a descriptor costs 2 us in every launch
        | {name: _descriptor(*block) for name, block in blocks.items()}
        | {"M": M, "N": N, "K": K, "ROWS": ROWS, "PART": PART, "DEPTH": DEPTH}
        | {"STAGES": STAGES, "GROUP": GROUP, "STORE_PREACT": preactivations is not None},
        num_warps=CONSUMER_WARPS,
        num_stages=STAGES,
    )


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> "TensorDescriptor":
    layout = _shared_layout(matrix.dtype, rows, columns)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


@functools.cache
def _shared_layout(dtype: torch.dtype, rows: int, columns: int) -> "gl.NVMMASharedLayout":
    element = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "meta":  # described to be compiled, not to run
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
