"""Weight gradients, hand-scheduled for Hopper (compute capability 9.0), in Gluon: A^T B_0 and A^T B_1 in one launch.

M columns of A, N of each B, K rows, which are tokens and summed over. A tile has 256 columns of A, half for each
consumer, and 192 of B: 110 operations for each byte that is read from the L2 cache. With tiles of 128 x 128, which
have 64, an H100's L2 cache is what takes the time. Both B are one matrix of blocks of 64 columns, so that no tile ends
where the first one does. Programs, producer and main loop are those of `hopper_forward.py`; both consumers read every
stage, as in `hopper_row.py`.

Measured on an H100 and an H200: NOTES.md.
"""

from collections.abc import Sequence

import torch

from swiglu_kernels.hopper.loop import BLOCK
from swiglu_kernels.hopper.shared import CONSUMER_WARPS, GLUON_MISSING, SIZES
from swiglu_kernels.ops.glu import hopper_products
from swiglu_kernels.ops.glu.hopper_forward import launch_of
from swiglu_kernels.runtime.backend import multiprocessors
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.rules import Tile, waves

LEFT, RIGHT = 4, 3
"""Blocks of a tile."""
BUFFERS = 3
TILE = Tile(LEFT * BLOCK, RIGHT * BLOCK, BLOCK, CONSUMER_WARPS, stages=3, group=16)
"""What is shipped; stages and group may differ."""

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

    from swiglu_kernels.hopper.buffers import set_up
    from swiglu_kernels.hopper.loop import multiply_shared
    from swiglu_kernels.hopper.shared import load, position, start, synchronize, write

    _BLOCK, _LEFT, _RIGHT, _BUFFERS = (gl.constexpr(size) for size in (BLOCK, LEFT, RIGHT, BUFFERS))

    @gluon.jit
    def _place(block, N):
        """Return where a block of both B begins in its own, and whether that is the second one."""
        blocks = gl.cdiv(N, _BLOCK)
        block = min(block, 2 * blocks - 1)  # what is behind the last block is that one again
        second = block >= blocks
        return start(gl.where(second, block - blocks, block), _BLOCK, N), second

    @gluon.jit
    def _produce(given, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr):
        a, b_0, b_1, a_ring, b_ring, barriers = given
        M, N, row_tiles, column_tiles, depth_tiles = sizes
        step = 0
        for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
            row, column = position(tile, row_tiles, column_tiles, GROUP)
            for depth in range(depth_tiles):
                stage = step % STAGES
                at = depth * _BLOCK
                full = barriers.index(stage)
                mbarrier.wait(barriers.index(STAGES + stage), (step // STAGES + 1) & 1)  # passes in the first round
                mbarrier.expect(full, (_LEFT + _RIGHT) * _BLOCK * _BLOCK * 2)  # elements of 16 bits
                for number in gl.static_range(_LEFT):
                    first = start(min(_LEFT * row + number, gl.cdiv(M, _BLOCK) - 1), _BLOCK, M)
                    load(a, [at, first], full, a_ring.index(_LEFT * stage + number))
                for number in gl.static_range(_RIGHT):
                    first, second = _place(_RIGHT * column + number, N)
                    block = b_ring.index(_RIGHT * stage + number)
                    if second:
                        load(b_1, [at, first], full, block)
                    else:
                        load(b_0, [at, first], full, block)
                step += 1

    @gluon.jit
    def _put(value, out_0, out_1, row, place, buffer, TRANSPOSED: gl.constexpr):
        """Store a block; `place` is its column and whether it is one of the second output."""
        column, second = place
        at = [column, row] if TRANSPOSED else [row, column]
        if TRANSPOSED:
            value = value.permute((1, 0))
        if second:
            write(value, out_1, at[0], at[1], buffer, _BUFFERS - 1)
        else:
            write(value, out_0, at[0], at[1], buffer, _BUFFERS - 1)

    @gluon.jit
    def _consume(given, sizes, ME: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, TRANSPOSED: gl.constexpr):
        out_0, out_1, a_at, b_at, barriers_at, buffers = given
        M, N, row_tiles, column_tiles, depth_tiles = sizes
        FIRST: gl.constexpr = ME * _BUFFERS
        programs = gl.num_programs(0)
        tiles = (row_tiles * column_tiles - gl.program_id(0) + programs - 1) // programs  # of this program
        for number in range(tiles):
            row, column = position(gl.program_id(0) + number * programs, row_tiles, column_tiles, GROUP)
            upper_0, upper_1, upper_2, lower_0, lower_1, lower_2 = multiply_shared(
                a_at, b_at, barriers_at, number * depth_tiles, depth_tiles, out_0.dtype, ME, STAGES
            )
            last = gl.cdiv(M, _BLOCK) - 1
            upper = start(min(_LEFT * row + 2 * ME, last), _BLOCK, M)
            lower = start(min(_LEFT * row + 2 * ME + 1, last), _BLOCK, M)
            place_0 = _place(_RIGHT * column, N)
            place_1 = _place(_RIGHT * column + 1, N)
            place_2 = _place(_RIGHT * column + 2, N)
            _put(upper_0, out_0, out_1, upper, place_0, buffers.index(FIRST), TRANSPOSED)
            _put(upper_1, out_0, out_1, upper, place_1, buffers.index(FIRST + 1), TRANSPOSED)
            _put(upper_2, out_0, out_1, upper, place_2, buffers.index(FIRST + 2), TRANSPOSED)
            _put(lower_0, out_0, out_1, lower, place_0, buffers.index(FIRST), TRANSPOSED)
            _put(lower_1, out_0, out_1, lower, place_1, buffers.index(FIRST + 1), TRANSPOSED)
            _put(lower_2, out_0, out_1, lower, place_2, buffers.index(FIRST + 2), TRANSPOSED)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=SIZES)
    def _weights_kernel(
        a, b_0, b_1, out_0, out_1, M, N, K, STAGES: gl.constexpr, GROUP: gl.constexpr,
        TRANSPOSED: gl.constexpr,
    ):  # fmt: skip
        row_tiles, depth_tiles = gl.cdiv(M, _LEFT * _BLOCK), gl.cdiv(K, _BLOCK)
        column_tiles = gl.cdiv(2 * gl.cdiv(N, _BLOCK), _RIGHT)
        a_ring = gl.allocate_shared_memory(a.dtype, [_LEFT * STAGES, _BLOCK, _BLOCK], a.layout)
        b_ring = gl.allocate_shared_memory(a.dtype, [_RIGHT * STAGES, _BLOCK, _BLOCK], b_0.layout)
        buffers = gl.allocate_shared_memory(out_0.dtype, [2 * _BUFFERS, _BLOCK, _BLOCK], out_0.layout)
        a_at, b_at, barriers_at, barriers = set_up(a_ring, b_ring, STAGES, TURNS=False)
        fence_async_shared()
        synchronize()
        consumed, produced = (out_0, out_1, a_at, b_at, barriers_at, buffers), (a, b_0, b_1, a_ring, b_ring, barriers)
        sizes = (M, N, row_tiles, column_tiles, depth_tiles)
        gl.warp_specialize(
            [
                (_consume, (consumed, sizes, 0, STAGES, GROUP, TRANSPOSED)),
                (_consume, (consumed, sizes, 1, STAGES, GROUP, TRANSPOSED)),
                (_produce, (produced, sizes, STAGES, GROUP)),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [240, 24],  # their registers; the first consumer gets the rest, 240
        )  # fmt: skip


def slower_waves(hidden: int, intermediate: int, processors: int) -> float:
    """Return how large the waves of both gradients' tiles are, over those of `hopper_products.py`'s tiles."""
    side, columns = hopper_products.TILE, 2 * -(-intermediate // BLOCK) * BLOCK
    wide = waves(hidden, columns, TILE.rows, TILE.columns, processors) * TILE.rows * TILE.columns
    return wide / (waves(hidden, 2 * -(-intermediate // side) * side, side, side, processors) * side * side)


def weights_launch(
    a: torch.Tensor, bs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], tile: Tile = TILE
) -> Launch:
    """Describe the launch that writes both B^T A.

    Args:
        a: [K, M], with a last stride of 1, as of both B.
        bs: two [K, N].
        outs: two [N, M], of the same strides, of which one is 1; written.
        tile: its stages and its group are taken.
    """
    (K, M), N = a.shape, bs[0].shape[1]
    transposed = outs[0].stride(1) == 1
    tiles = -(-M // (LEFT * BLOCK)) * -(-(2 * -(-N // BLOCK)) // RIGHT)
    matrices = {"a": a, "b_0": bs[0], "b_1": bs[1], "out_0": outs[0], "out_1": outs[1]}
    blocks = {name: (matrix, BLOCK, BLOCK) for name, matrix in matrices.items()}
    others = {"M": M, "N": N, "K": K, "GROUP": tile.group, "TRANSPOSED": transposed}
    programs, file = min(tiles, multiprocessors(a.device)), "ops/glu/hopper_weights.py"
    return launch_of(_weights_kernel, programs, tile, blocks, others, file)
