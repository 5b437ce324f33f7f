"""z = silu(x w_gate^T) * (x w_up^T) scheduled by hand for Hopper (compute capability 9.0), in Gluon.

M tokens, N intermediate, K hidden. One program per multiprocessor walks through M x N tiles of 128 x 128. A producer
warp fills a ring of STAGES tiles of x, w_gate and w_up by TMA; two warpgroups consume them. The tiles of w_gate and
w_up lie one below the other in shared memory, so that one wgmma of 256 columns makes gate and up at once; the
accumulator is then split between them without leaving the registers, the gate is applied, and z leaves by TMA while the
producer already loads the next tile. With STORE_PREACT gate and up leave the same way, for the backward.

Two mbarriers a stage: `full` completes when TMA has written the stage, `empty` when its wgmma is done.

Measured on an H200, bf16, hidden 4096, intermediate 11008, as time / time of the bare packed cuBLAS product in the same
rounds: 0.99-1.00 at 2048 and 8192 tokens, 1.07 at 1024 (six waves of tiles where 5.2 are full), where the portable
kernel takes 1.16-1.22. GROUP 8 to 64 made no difference beyond 0.5%; two products of 128 columns were 0.3-0.7% slower.
"""

import functools
import importlib.util

import torch

from swiglu_kernels.backend import INTERPRETING, TRITON_AVAILABLE
from swiglu_kernels.launch import Launch
from swiglu_kernels.tiles import Capability

ROWS, COLUMNS, DEPTH, STAGES, GROUP, WARPS = 128, 128, 64, 4, 16, 8
LEAST_TOKENS = 512
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
    def _produce(
        x, w_gate, w_up, x_ring, w_ring, full, empty, row_tiles, column_tiles, depth_tiles,
        ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ):  # fmt: skip
        turn = 0
        for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
            row, column = _position(tile, row_tiles, column_tiles, GROUP)
            for depth in range(depth_tiles):
                stage = turn % STAGES
                arrived = full.index(stage)
                mbarrier.wait(empty.index(stage), (turn // STAGES + 1) & 1)  # passes at once in the first round
                mbarrier.expect(arrived, x.block_type.nbytes + w_gate.block_type.nbytes + w_up.block_type.nbytes)
                both = w_ring.index(stage)
                _load(x, [row * ROWS, depth * DEPTH], arrived, x_ring.index(stage))
                _load(w_gate, [column * COLUMNS, depth * DEPTH], arrived, both.slice(0, COLUMNS, dim=0))
                _load(w_up, [column * COLUMNS, depth * DEPTH], arrived, both.slice(COLUMNS, COLUMNS, dim=0))
                turn += 1

    @gluon.jit
    def _write(value, target, row, column, buffer):
        """Send a tile to global memory through the buffer, after the buffer's last tile has left."""
        tma.store_wait(0)
        buffer.store(value.to(target.dtype))
        fence_async_shared()
        _store(target, [row, column], buffer)

    @gluon.jit
    def _consume(
        z, gate_out, up_out, x_ring, w_ring, buffer, full, empty, row_tiles, column_tiles, depth_tiles,
        ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
        ACCUMULATOR: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        turn = 0
        for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
            row, column = _position(tile, row_tiles, column_tiles, GROUP)
            both = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, ACCUMULATOR)
            for depth in range(depth_tiles):
                stage = turn % STAGES
                mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                both = warpgroup_mma(x_ring.index(stage), w_ring.index(stage).permute((1, 0)), both, is_async=True)
                both = warpgroup_mma_wait(num_outstanding=1, deps=(both,))
                mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), pred=depth > 0)  # the one before is done
                turn += 1
            both = warpgroup_mma_wait(num_outstanding=0, deps=(both,))
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES))
            gate, up = both.reshape([ROWS, 2, COLUMNS]).permute(0, 2, 1).split()
            if STORE_PREACT:
                _write(gate, gate_out, row * ROWS, column * COLUMNS, buffer)
                _write(up, up_out, row * ROWS, column * COLUMNS, buffer)
            _write(gate / (1.0 + gl.exp2(-_LOG2_E * gate)) * up, z, row * ROWS, column * COLUMNS, buffer)
        tma.store_wait(0)

    @gluon.jit
    def _forward_kernel(
        x, w_gate, w_up, z, gate_out, up_out, M, N, K,
        ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
        STORE_PREACT: gl.constexpr, num_warps: gl.constexpr,
    ):  # fmt: skip
        row_tiles, column_tiles, depth_tiles = gl.cdiv(M, ROWS), gl.cdiv(N, COLUMNS), gl.cdiv(K, DEPTH)
        x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
        w_ring = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * COLUMNS, DEPTH], w_gate.layout)
        buffer = gl.allocate_shared_memory(x.dtype, [ROWS, COLUMNS], z.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=1)
        fence_async_shared()
        ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 2 * COLUMNS, 16]
        )
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        z, gate_out, up_out, x_ring, w_ring, buffer, full, empty, row_tiles, column_tiles, depth_tiles,
                        ROWS, COLUMNS, STAGES, GROUP, ACCUMULATOR, STORE_PREACT,
                    ),
                ),
                (
                    _produce,
                    (
                        x, w_gate, w_up, x_ring, w_ring, full, empty, row_tiles, column_tiles, depth_tiles,
                        ROWS, COLUMNS, DEPTH, STAGES, GROUP,
                    ),
                ),
            ],
            [1],  # warps of the producer
            [40],  # its registers; the consumers get the rest
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
    gate, up = preactivations or (z, z)  # never touched without STORE_PREACT
    tiles = -(-M // ROWS) * -(-N // COLUMNS)
    operands = {"x": (x, ROWS, DEPTH), "w_gate": (w_gate, COLUMNS, DEPTH), "w_up": (w_up, COLUMNS, DEPTH)}
    results = {"z": z, "gate_out": gate, "up_out": up}
    blocks = operands | {name: (tensor, ROWS, COLUMNS) for name, tensor in results.items()}
    return Launch(
        kernel=_forward_kernel,
        grid=(min(tiles, _multiprocessors(x.device)),),
        arguments={name: _descriptor(*block) for name, block in blocks.items()}
        | {"M": M, "N": N, "K": K, "ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": DEPTH}
        | {"STAGES": STAGES, "GROUP": GROUP, "STORE_PREACT": preactivations is not None},
        num_warps=WARPS,
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
