"""What the hand-scheduled kernels for Hopper (compute capability 9.0) share, in Gluon: `ops/*/hopper_*.py`.

    loop.py        main loops in PTX, for accumulators that Triton cannot have
    buffers.py     where buffers lie in shared memory, for these
    copies.py      rows of tokens copied into a ring

One program per multiprocessor walks through the tiles of its output. A producer warp fills a ring of stages by TMA, two
consumer warpgroups multiply. Barriers: `full` completes when TMA has written a stage, `empty` when its wgmma is done,
`turn` of a consumer when the other one has issued the last wgmma of its main loop.

Triton 3.6 to 3.9 have Gluon for Hopper; what they name differently is here. GLUON_MISSING says why there is none.
`admission.py` says which of them may run under this Triton.
"""

import functools
import importlib.util

import torch

from swiglu_kernels.hopper import admission
from swiglu_kernels.runtime.backend import INTERPRETING, TRITON_AVAILABLE, Capability, capability_of, tl, triton
from swiglu_kernels.runtime.internals import constant_in_graphs

CONSUMER_WARPS = 4
ALIGNMENT_BYTES = 16
NO_TMA = f"TMA needs a last stride of 1, and rows that start and step by multiples of {ALIGNMENT_BYTES} bytes"
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
SIZES = ("M", "N", "K")
"""Integers for which no kernel is compiled anew: what they are divisible by changes no instruction."""
LOG2_E = 1.4426950408889634


def _gluon_is_missing() -> str | None:
    if not TRITON_AVAILABLE or INTERPRETING:
        return "Gluon needs Triton and has no interpreter"
    if importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is None:
        return "this Triton has no Gluon for Hopper; 3.6 and later have it"
    return None


GLUON_MISSING = _gluon_is_missing()


@constant_in_graphs  # verdicts do not change while a compiled function lives
def why_off(kernel: str | None = None) -> str | None:
    """Say why a hand-scheduled kernel of `admission.KERNELS`, or all of them, run on no GPU here, or return None."""
    return GLUON_MISSING or admission.why_aside(kernel)


def why_aside(device: torch.device) -> str | None:
    """Say which portable kernels run on a GPU that these are made for, and why; None elsewhere and where none do."""
    made_for = not INTERPRETING and TRITON_AVAILABLE and (capability_of(device) or (0,))[0] == 9
    if not made_for:
        return None
    refused = [reason for kernel in admission.KERNELS if (reason := admission.why_aside(kernel))]
    return GLUON_MISSING or admission.why_aside() or "; ".join(refused) or None


@triton.jit
def position(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return the row and column of a tile; GROUP rows of tiles are walked together, to share the L2 cache.

    A few that are left go with the last group: alone, they would read all columns again for themselves. Kernels in
    Gluon and in Triton take it alike.
    """
    groups = max(tl.cdiv(row_tiles - GROUP // 4, GROUP), 1)
    group = min(tile // (GROUP * column_tiles), groups - 1)
    first = group * GROUP
    rows = tl.where(group == groups - 1, row_tiles - first, GROUP)
    tile -= first * column_tiles
    return first + tile % rows, tile // rows


if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Triton 3.9 renamed these.
    load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    _LOG2_E = gl.constexpr(LOG2_E)
    synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
    if hasattr(gl.shared_memory_descriptor, "reinterpret"):

        @gluon.jit
        def view(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
            """Take a buffer for one of another type, shape and layout."""
            return buffer.reinterpret(dtype, shape, layout)
    else:

        @gluon.jit
        def view(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
            """Take a buffer for one of another type, shape and layout."""
            return buffer._reinterpret(dtype, shape, layout)

    @gluon.jit
    def start(tile, SIZE: gl.constexpr, length):
        """Return the first row or column of a tile; the last one begins earlier, where it would reach beyond the end.

        What two tiles have in common is computed and written twice, with the same bits: TMA takes several times as long
        for rows that do not exist.
        """
        return max(min(tile * SIZE, length - SIZE), 0)

    @gluon.jit
    def load_rest(blocks, first, at, full, buffer, OFFSET: gl.constexpr, COUNT: gl.constexpr):
        """Load COUNT rows of a matrix, fewer than 64, which start at `first`, to a buffer's rows from OFFSET on.

        Each part begins at a multiple of its size, so that the 8 rows come first where OFFSET is no multiple of 16.

        blocks: descriptors of the matrix for 32, 16 and 8 rows; None where not needed.
        """
        AT_16: gl.constexpr = COUNT // 32 * 32 + (OFFSET & 8)
        AT_8: gl.constexpr = 0 if OFFSET & 8 else COUNT // 16 * 16
        if COUNT & 32 != 0:
            load(blocks[0], [first, at], full, buffer.slice(OFFSET, 32, dim=0))
        if COUNT & 16 != 0:
            load(blocks[1], [first + AT_16, at], full, buffer.slice(OFFSET + AT_16, 16, dim=0))
        if COUNT & 8 != 0:
            load(blocks[2], [first + AT_8, at], full, buffer.slice(OFFSET + AT_8, 8, dim=0))

    @gluon.jit
    def before(stage, STAGES: gl.constexpr):
        """Return the stage before one in the ring."""
        return gl.where(stage == 0, STAGES - 1, stage - 1)

    @gluon.jit
    def sigmoid(gate):
        """1 / (1 + exp(-gate)), by the GPU's own reciprocal: a division costs twice the instructions of all the rest.

        Below -87 it is 0.
        """
        return gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(-_LOG2_E * gate)], gl.float32, is_pure=True, pack=1
        )

    @gluon.jit
    def fill(value, target, buffer, NEWER: gl.constexpr = 0):
        """Put a tile, in the target's type, into the buffer that TMA takes it from, once the last one has left it.

        NEWER: stores that were begun after the buffer's last one, and may go on.
        """
        tma.store_wait(NEWER)
        buffer.store(value.to(target.dtype))
        fence_async_shared()

    @gluon.jit
    def write(value, target, row, column, buffer, NEWER: gl.constexpr = 0):
        """Send a tile to global memory through the buffer, see `fill`."""
        fill(value, target, buffer, NEWER)
        store(target, [row, column], buffer)

    @gluon.jit
    def halves(tile, ROWS: gl.constexpr, WIDTH: gl.constexpr):
        """Split a tile of 2 WIDTH columns into its left and its right half, within the registers."""
        return tile.reshape([ROWS, 2, WIDTH]).permute(0, 2, 1).split()


def missing_for(kernel: str, capability: Capability | None, *operands: torch.Tensor) -> str | None:
    """Say what rules out a kernel of `admission.KERNELS` for a GPU and these matrices, or return None.

    Their strides are for `fits_tma` to judge.
    """
    if capability is None or capability[0] != 9:
        return "the kernel is for compute capability 9.0"
    if off := why_off(kernel):
        return off
    if any(operand.dtype not in SIXTEEN_BITS for operand in operands):
        return "the kernel is for 16-bit types"
    if any(0 in operand.shape for operand in operands):
        return "an empty tensor has no descriptor"
    return None


def fits_tma(matrix: torch.Tensor) -> bool:
    """Tell whether TMA can read or write a matrix: [rows, columns] with a last stride of 1, 16-byte aligned rows."""
    aligned = matrix.is_meta or matrix.data_ptr() % ALIGNMENT_BYTES == 0
    step_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and aligned and step_bytes > 0 and step_bytes % ALIGNMENT_BYTES == 0


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> "TensorDescriptor":
    """Describe a matrix for TMA that moves blocks of rows x columns; one with a first stride of 1 is transposed."""
    layout = _shared_layout(matrix.dtype, rows, columns)
    shape, strides = list(matrix.shape), list(matrix.stride())
    if strides[1] != 1:
        shape, strides = shape[::-1], strides[::-1]
    return TensorDescriptor(matrix, shape, strides, [rows, columns], layout)


@functools.cache
def _shared_layout(dtype: torch.dtype, rows: int, columns: int) -> "gl.NVMMASharedLayout":
    element = {
        torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv,
    }[dtype]  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def forward_outputs(
    z: torch.Tensor | None, preactivations: tuple[torch.Tensor, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Name what a forward stores as its kernel does."""
    stored = dict(zip(("gate_out", "up_out"), preactivations, strict=True)) if preactivations else {}
    return stored if z is None else {"z": z} | stored
