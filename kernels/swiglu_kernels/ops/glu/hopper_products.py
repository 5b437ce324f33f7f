"""The products of the backward, hand-scheduled for Hopper (compute capability 9.0), in Gluon.

    out = A B                  d_w_down = d_out^T h
    out = A_0 B_0 + A_1 B_1    dX = d_gate w_gate + d_up w_up, summed in registers
    out += A_0 B_0 + A_1 B_1   the same over slices of the intermediate dimension, out in fp32
    two outputs, one launch    d_w_gate = d_gate^T x and d_w_up = d_up^T x
    d_gate, d_up and h         from d_h = d_out w_down, which is never stored, and the gate and up of the forward

Programs, producer, consumers and barriers are those of `hopper_forward.py`. A consumer's accumulator is 128 x 128.
There are two schedules:

    ping-pong      tiles of 128 rows, which the consumers take in turn: the epilogue of one is hidden behind the main
                   loop of the other (`hopper_forward.py`)
    cooperative    tiles of 256 rows, half for each consumer: the columns are read from the L2 cache half as often,
                   which counts where the sums are long and the epilogue short

Operands are read as they lie in memory: a ring holds [DEPTH, 128] where the summed axis is not the contiguous one
(ACROSS), and the wgmma reads it transposed. One more barrier, `loaded` of a consumer, completes when its part of gate
and up, or of the sum so far, has arrived.

Where A and B are both read ACROSS, the last step may have a depth of its own, LAST: as many rows as there are.

Measured on an H200: NOTES.md.
"""

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from swiglu_kernels.hopper import shared
from swiglu_kernels.hopper.shared import ALIGNMENT_BYTES, CONSUMER_WARPS, GLUON_MISSING, SIZES, descriptor, fits_tma
from swiglu_kernels.runtime.backend import Capability, multiprocessors
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.rules import Tile, waves

TILE, DEPTH, GROUP = 128, 64, 8
PART, READ_PART = 64, 32
"""Columns that are stored at once: alone, and where the epilogue reads as well."""
LAST = (16, 32)
"""Depths of the last step of a transposed product that has no more rows left: TMA takes several times as long for rows
that do not exist."""
STAGES = {"ping-pong": 6, "cooperative": 4, "gate": 5}
TILE_ROWS = {"ping-pong": TILE, "cooperative": 2 * TILE, "gate": TILE}
LEAST_TILES = 0.7
"""For each multiprocessor; with fewer, the portable kernels' smaller tiles fill the GPU better."""
LEAST_FILLED_PERCENT = {1024: 64, 4096: 90, math.inf: 92}
"""Of its waves of tiles, that a sum over so many columns of each operand, or fewer, has to take up: where they are
emptier, PyTorch's products are faster (results/nvidia-h200/waves.csv). Of a short sum PyTorch's two launches, one to
make it and one to add to it, are slow."""
LEAST_FILLED_TRANSPOSED_PERCENT = 84
LEAST_GATE_TOKENS, LEAST_GATE_ELEMENTS = 512, 5_600_000
"""Tokens, and elements of d_gate, from which `gate_backward_launch` is faster than PyTorch's product and an elementwise
launch behind it; below, its tiles are too few (results/nvidia-h200/parts.csv)."""

Pair = tuple[Tensor, Tensor]

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

    from swiglu_kernels.hopper.shared import before, fill, halves, load, position, sigmoid, store

    @gluon.jit
    def _load_tile(matrix, outer, depth, arrived, tile, ACROSS: gl.constexpr):
        if ACROSS:
            load(matrix, [depth, outer], arrived, tile)
        else:
            load(matrix, [outer, depth], arrived, tile)

    @gluon.jit
    def _produce(
        given, tiles, ROWS: gl.constexpr, TILE: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
        GROUP: gl.constexpr, A_ACROSS: gl.constexpr, B_ACROSS: gl.constexpr, TERMS: gl.constexpr,
        OUTPUTS: gl.constexpr, LAST: gl.constexpr,
    ):  # fmt: skip
        a_0, a_1, b_0, b_1, a_0_last, a_1_last, b_0_last, b_1_last, a_ring, b_ring, full, empty = given
        row_tiles, column_tiles, depth_tiles = tiles
        step = 0
        for tile in range(gl.program_id(0), OUTPUTS * row_tiles * column_tiles, gl.num_programs(0)):
            row, column = position(tile, OUTPUTS * row_tiles, column_tiles, GROUP)
            for depth in range(TERMS * depth_tiles - (LAST > 0)):
                stage = step % STAGES
                arrived, a, b = full.index(stage), a_ring.index(stage), b_ring.index(stage)
                mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)  # passes at once in the first round
                mbarrier.expect(arrived, (ROWS + TILE) * DEPTH * 2)  # elements of 16 bits
                if (OUTPUTS == 2 and row >= row_tiles) or (TERMS == 2 and depth >= depth_tiles):
                    first_row, at = (
                        (row - (OUTPUTS - 1) * row_tiles) * ROWS,
                        (depth - (TERMS - 1) * depth_tiles) * DEPTH,
                    )
                    _load_tile(a_1, first_row, at, arrived, a, A_ACROSS)
                    _load_tile(b_1, column * TILE, at, arrived, b, B_ACROSS)
                else:
                    _load_tile(a_0, row * ROWS, depth * DEPTH, arrived, a, A_ACROSS)
                    _load_tile(b_0, column * TILE, depth * DEPTH, arrived, b, B_ACROSS)
                step += 1
            if LAST > 0:
                stage = step % STAGES
                arrived, at = full.index(stage), (depth_tiles - 1) * DEPTH
                a, b = a_ring.index(stage).slice(0, LAST, dim=0), b_ring.index(stage).slice(0, LAST, dim=0)
                mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
                mbarrier.expect(arrived, (ROWS + TILE) * LAST * 2)
                if OUTPUTS == 2 and row >= row_tiles:
                    load(a_1_last, [at, (row - row_tiles) * ROWS], arrived, a)
                    load(b_1_last, [at, column * TILE], arrived, b)
                else:
                    load(a_0_last, [at, row * ROWS], arrived, a)
                    load(b_0_last, [at, column * TILE], arrived, b)
                step += 1

    @gluon.jit
    def _put(value, out_0, out_1, second, row, column, buffer, OUTPUTS: gl.constexpr):
        """Send a part of a tile to its output through the buffer."""
        fill(value, out_0, buffer)
        if OUTPUTS == 2 and second:
            store(out_1, [row, column], buffer)
        else:
            store(out_0, [row, column], buffer)

    @gluon.jit
    def _add(value, out, row, column, buffer, loaded, PHASE: gl.constexpr):
        """Add a part of a tile to its output."""
        tma.store_wait(0)
        mbarrier.expect(loaded, value.shape[0] * value.shape[1] * 4)
        load(out, [row, column], loaded, buffer)
        mbarrier.wait(loaded, PHASE)
        buffer.store(value + buffer.load(value.type.layout))
        fence_async_shared()
        store(out, [row, column], buffer)

    @gluon.jit
    def _put_gated(
        d_h, gate, up, d_gate, d_up, h, row, column, buffers, loaded,
        FIRST: gl.constexpr, PHASE: gl.constexpr, STORE_H: gl.constexpr,
    ):  # fmt: skip
        """Make one part of d_gate, d_up and h; gate and up arrive in the buffers that d_gate and d_up leave from."""
        gate_buffer, up_buffer = buffers.index(FIRST), buffers.index(FIRST + 1)
        tma.store_wait(0)
        mbarrier.expect(loaded, 2 * d_h.shape[0] * d_h.shape[1] * 2)
        load(gate, [row, column], loaded, gate_buffer)
        load(up, [row, column], loaded, up_buffer)
        mbarrier.wait(loaded, PHASE)
        g = gate_buffer.load(d_h.type.layout).to(gl.float32)
        u = up_buffer.load(d_h.type.layout).to(gl.float32)
        slope = sigmoid(g)
        silu = g * slope
        gate_buffer.store((d_h * u * (slope + silu * (1.0 - slope))).to(d_gate.dtype))
        up_buffer.store((d_h * silu).to(d_gate.dtype))
        if STORE_H:
            buffers.index(FIRST + 2).store((silu * u).to(d_gate.dtype))
        fence_async_shared()
        store(d_gate, [row, column], gate_buffer)
        store(d_up, [row, column], up_buffer)
        if STORE_H:
            store(h, [row, column], buffers.index(FIRST + 2))

    @gluon.jit
    def _add_product(
        sums, left, right, full, empty, stage, phase, freed,
        A_ACROSS: gl.constexpr, B_ACROSS: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """Add the product of what a stage holds, when it has arrived, and free the stage before if there is one."""
        mbarrier.wait(full.index(stage), phase)
        if A_ACROSS:
            left = left.permute((1, 0))
        if not B_ACROSS:
            right = right.permute((1, 0))
        sums = warpgroup_mma(left, right, sums, is_async=True)
        sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
        mbarrier.arrive(empty.index(before(stage, STAGES)), pred=freed)
        return sums

    @gluon.jit
    def _consume(
        given, of_all, ME: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, PART: gl.constexpr,
        STAGES: gl.constexpr, GROUP: gl.constexpr, A_ACROSS: gl.constexpr, B_ACROSS: gl.constexpr, TERMS: gl.constexpr,
        OUTPUTS: gl.constexpr, GATE: gl.constexpr, STORE_H: gl.constexpr, ADD: gl.constexpr, LAST: gl.constexpr,
    ):  # fmt: skip
        out_0, out_1, h, gate, up, a_ring, b_ring, buffers, full, empty, turn, loaded = given
        row_tiles, column_tiles, depth_tiles = of_all
        COOPERATIVE: gl.constexpr = ROWS == 2 * TILE
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
        programs, steps = gl.num_programs(0), TERMS * depth_tiles
        tiles = (OUTPUTS * row_tiles * column_tiles - gl.program_id(0) + programs - 1) // programs  # of this program
        for number in range(0 if COOPERATIVE else ME, tiles, 1 if COOPERATIVE else 2):
            row, column = position(gl.program_id(0) + number * programs, OUTPUTS * row_tiles, column_tiles, GROUP)
            sums = gl.zeros([TILE, TILE], gl.float32, LAYOUT)
            stage = number * steps % STAGES
            phase = number * steps // STAGES & 1
            if not COOPERATIVE:
                mbarrier.wait(turn.index(ME), (number // 2 + 1 - ME) & 1)  # the first tile's passes at once
            for depth in range(steps - (LAST > 0)):
                left = a_ring.index(stage)
                if COOPERATIVE:
                    left = left.slice(ME * TILE, TILE, dim=1 if A_ACROSS else 0)
                sums = _add_product(
                    sums, left, b_ring.index(stage), full, empty, stage, phase, depth > 0, A_ACROSS, B_ACROSS, STAGES
                )
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            if LAST > 0:
                left, right = a_ring.index(stage).slice(0, LAST, dim=0), b_ring.index(stage).slice(0, LAST, dim=0)
                sums = _add_product(sums, left, right, full, empty, stage, phase, steps > 1, A_ACROSS, B_ACROSS, STAGES)
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            if not COOPERATIVE:
                mbarrier.arrive(turn.index(1 - ME))
            sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            mbarrier.arrive(empty.index(before(stage, STAGES)))
            second = row >= row_tiles
            first_row, first = (row - row_tiles * second.to(gl.int32)) * ROWS, column * TILE
            if COOPERATIVE:
                first_row += ME * TILE
            half_0, half_1 = halves(sums, TILE, TILE // 2)
            if GATE:
                FIRST: gl.constexpr = ME * (3 if STORE_H else 2)
                arrived = loaded.index(ME)
                part_0, part_1 = halves(half_0, TILE, PART)
                part_2, part_3 = halves(half_1, TILE, PART)
                _put_gated(part_0, gate, up, out_0, out_1, h, first_row, first, buffers, arrived, FIRST, 0, STORE_H)
                first += PART
                _put_gated(part_1, gate, up, out_0, out_1, h, first_row, first, buffers, arrived, FIRST, 1, STORE_H)
                first += PART
                _put_gated(part_2, gate, up, out_0, out_1, h, first_row, first, buffers, arrived, FIRST, 0, STORE_H)
                first += PART
                _put_gated(part_3, gate, up, out_0, out_1, h, first_row, first, buffers, arrived, FIRST, 1, STORE_H)
            elif ADD:
                buffer, arrived = buffers.index(ME), loaded.index(ME)
                part_0, part_1 = halves(half_0, TILE, PART)
                part_2, part_3 = halves(half_1, TILE, PART)
                _add(part_0, out_0, first_row, first, buffer, arrived, 0)
                _add(part_1, out_0, first_row, first + PART, buffer, arrived, 1)
                _add(part_2, out_0, first_row, first + 2 * PART, buffer, arrived, 0)
                _add(part_3, out_0, first_row, first + 3 * PART, buffer, arrived, 1)
            else:
                _put(half_0, out_0, out_1, second, first_row, first, buffers.index(ME), OUTPUTS)
                _put(half_1, out_0, out_1, second, first_row, first + PART, buffers.index(ME), OUTPUTS)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=SIZES)
    def _product_kernel(
        a_0, a_1, b_0, b_1, a_0_last, a_1_last, b_0_last, b_1_last, out_0, out_1, h, gate, up, M, N, K,
        ROWS: gl.constexpr, TILE: gl.constexpr, DEPTH: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
        GROUP: gl.constexpr, A_ACROSS: gl.constexpr, B_ACROSS: gl.constexpr, TERMS: gl.constexpr, OUTPUTS: gl.constexpr,
        GATE: gl.constexpr, STORE_H: gl.constexpr, ADD: gl.constexpr, LAST: gl.constexpr,
    ):  # fmt: skip
        """M rows and N columns of an output, K the axis that is summed over; the last arguments name the form."""
        BUFFERS: gl.constexpr = (3 if STORE_H else 2) if GATE else 1  # of each consumer
        CONSUMERS: gl.constexpr = ROWS // TILE  # of a stage
        row_tiles, column_tiles, depth_tiles = gl.cdiv(M, ROWS), gl.cdiv(N, TILE), gl.cdiv(K, DEPTH)
        a_ring = gl.allocate_shared_memory(
            a_0.dtype, [STAGES, a_0.block_type.shape[0], a_0.block_type.shape[1]], a_0.layout
        )
        b_ring = gl.allocate_shared_memory(
            b_0.dtype, [STAGES, b_0.block_type.shape[0], b_0.block_type.shape[1]], b_0.layout
        )
        buffers = gl.allocate_shared_memory(out_0.dtype, [2 * BUFFERS, TILE, PART], out_0.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=CONSUMERS)
        for consumer in gl.static_range(2):
            mbarrier.init(turn.index(consumer), count=1)
            mbarrier.init(loaded.index(consumer), count=1)
        fence_async_shared()
        given = (out_0, out_1, h, gate, up, a_ring, b_ring, buffers, full, empty, turn, loaded)
        operands = (a_0, a_1, b_0, b_1, a_0_last, a_1_last, b_0_last, b_1_last, a_ring, b_ring, full, empty)
        tiles = (row_tiles, column_tiles, depth_tiles)
        gl.warp_specialize(
            [
                (_consume, (
                    given, tiles, 0, ROWS, TILE, PART, STAGES, GROUP, A_ACROSS, B_ACROSS, TERMS, OUTPUTS, GATE, STORE_H,
                    ADD, LAST,
                )),
                (_consume, (
                    given, tiles, 1, ROWS, TILE, PART, STAGES, GROUP, A_ACROSS, B_ACROSS, TERMS, OUTPUTS, GATE, STORE_H,
                    ADD, LAST,
                )),
                (_produce, (
                    operands, tiles, ROWS, TILE, DEPTH, STAGES, GROUP, A_ACROSS, B_ACROSS, TERMS, OUTPUTS, LAST,
                )),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [240, 24],  # their registers; the first consumer gets the rest, 240
        )  # fmt: skip


def why_not(kernel: str, pairs: Sequence[Pair], stored: Sequence[Tensor], capability: Capability | None) -> str | None:
    """Say why products cannot take this path, or return None where they can.

    Args:
        kernel: "dX", "dW" or "hidden gradient", as `admission.KERNELS` names them.
        pairs: of operands, one or two.
        stored: every [M, N] that is written or read beside them.
        capability: of the GPU that would run it; None for none.
    """
    operands = [operand for pair in pairs for operand in pair]
    if reason := shared.missing_for(kernel, capability, *operands):
        return reason
    if kernel == "dW" and stored[0].dtype != operands[0].dtype:
        return "gradients that are added to float32 are the portable kernels'"
    if len({(left.stride(1) == 1, right.stride(1) == 1) for left, right in pairs}) > 1:
        return "the operands of the two pairs do not lie in memory alike"
    fit = all(fits_tma(operand) or fits_tma(operand.t()) for operand in operands) and all(map(fits_tma, stored))
    unfit = f"TMA needs a stride of 1, and rows that start and step by multiples of {ALIGNMENT_BYTES} bytes"
    return None if fit else unfit


def fills(rows: int, columns: int, processors: int) -> bool:
    """Tell whether the 128 x 128 tiles of an output are enough for a GPU."""
    return -(-rows // TILE) * -(-columns // TILE) >= LEAST_TILES * processors


def gate_pays(tokens: int, intermediate: int) -> bool:
    """Tell whether `gate_backward_launch` is the fastest for gradients of so many rows and columns."""
    return tokens >= LEAST_GATE_TOKENS and tokens * intermediate >= LEAST_GATE_ELEMENTS


def sum_fills_waves(rows: int, columns: int, depth: int, processors: int) -> bool:
    """Tell whether an output [rows, columns] of `sum_launch` fills its waves of tiles, to be faster than PyTorch's.

    In the last wave some multiprocessors have no tile, and the last tiles hang over the edge.
    """
    schedule = sum_schedule(rows, columns, processors)
    covered = _rows_in_turn(schedule, rows, columns, processors) * TILE * processors
    least = next(percent for most, percent in LEAST_FILLED_PERCENT.items() if depth <= most)
    return 100 * rows * columns >= least * covered


def transposed_fills_waves(rows: int, columns: int, processors: int) -> bool:
    """Tell the same of an output of `transposed_launch`, of one pair."""
    covered = waves(rows, columns, TILE, TILE, processors) * TILE * TILE * processors
    return 100 * rows * columns >= LEAST_FILLED_TRANSPOSED_PERCENT * covered


def sum_launch(
    pairs: Sequence[Pair], out: Tensor, schedule: str | None = None, tile: Tile | None = None, accumulate: bool = False
) -> Launch:
    """Describe the launch that writes A_0 B_0, or A_0 B_0 + A_1 B_1; ask `why_not` first.

    Args:
        pairs: one or two (A [M, K], B [K, N]).
        out: [M, N], written.
        schedule: "ping-pong" or "cooperative"; None: by the size of the output.
        tile: its stages and its group are taken; None: as shipped.
        accumulate: add to what out holds, which is fp32 then; always "ping-pong", which hides the reading.
    """
    if accumulate:
        return _launch(pairs, [out], "ping-pong", accumulate=True)
    schedule = schedule or sum_schedule(out.shape[0], out.shape[1], multiprocessors(out.device))
    return _launch(pairs, [out], schedule, tile=tile)


def sum_schedule(rows: int, columns: int, processors: int) -> Literal["ping-pong", "cooperative"]:
    """Name the schedule of `sum_launch` for an output: whose waves are filled better, the cooperative one of equals."""
    cooperative = _rows_in_turn("cooperative", rows, columns, processors)
    return "cooperative" if cooperative <= _rows_in_turn("ping-pong", rows, columns, processors) else "ping-pong"


def _rows_in_turn(schedule: str, rows: int, columns: int, processors: int) -> int:
    """Return how many rows of an output the busiest multiprocessor works on, tile after tile."""
    return waves(rows, columns, TILE_ROWS[schedule], TILE, processors) * TILE_ROWS[schedule]


def transposed_launch(pairs: Sequence[Pair], outs: Sequence[Tensor], tile: Tile | None = None) -> Launch:
    """Describe the launch that writes A^T B of one pair, or of two pairs of equal shapes; ask `why_not` first.

    Args:
        pairs: one or two (A [K, M], B [K, N]).
        outs: as many [M, N], written.
        tile: as of `sum_launch`.
    """
    return _launch(pairs, outs, "ping-pong", transposed=True, tile=tile)


def gate_backward_launch(
    d_out: Tensor, w_down: Tensor, preactivations: Pair, d_gate: Tensor, d_up: Tensor,
    h: Tensor | None, tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """Describe what `portable_mlp.down_backward_launch` does, for silu(gate) * up; ask `why_not` first.

    Of the tile its stages and its group are taken; None: as shipped.
    """
    return _launch([(d_out, w_down)], [d_gate, d_up], "gate", preactivations=preactivations, h=h, tile=tile)


def _launch(
    pairs: Sequence[Pair], outs: Sequence[Tensor], schedule: str, transposed: bool = False,
    preactivations: Pair | None = None, h: Tensor | None = None, tile: Tile | None = None, accumulate: bool = False,
) -> Launch:  # fmt: skip
    stages, group = (tile.stages, tile.group) if tile else (STAGES[schedule], GROUP)
    (left, right), (M, N) = pairs[0], outs[0].shape
    K, rows = right.shape[0], TILE_ROWS[schedule]
    # Whether the axis that is summed over is not the contiguous one.
    a_across, b_across = (left.stride(1) == 1) == transposed, right.stride(1) == 1
    gated = preactivations is not None
    outputs = 1 if gated else len(outs)
    lefts = [descriptor(a, *((DEPTH, rows) if a_across else (rows, DEPTH))) for a, _ in pairs]
    rights = [descriptor(b, *((DEPTH, TILE) if b_across else (TILE, DEPTH))) for _, b in pairs]
    last = next((depth for depth in LAST if 0 < K % DEPTH <= depth), 0) if transposed and a_across and b_across else 0
    lasts = [[descriptor(matrix, last, TILE) if last else None for matrix in side] for side in zip(*pairs, strict=True)]
    gate, up = preactivations or (None, None)
    stored = {"out_0": outs[0], "out_1": outs[-1], "gate": gate, "up": up, "h": h}
    part = READ_PART if gated or accumulate else PART
    arguments: dict[str, object] = {"a_0": lefts[0], "a_1": lefts[-1], "b_0": rights[0], "b_1": rights[-1]}
    arguments |= {"a_0_last": lasts[0][0], "a_1_last": lasts[0][-1], "b_0_last": lasts[1][0], "b_1_last": lasts[1][-1]}
    arguments |= {name: None if made is None else descriptor(made, TILE, part) for name, made in stored.items()}
    arguments |= {"M": M, "N": N, "K": K, "ROWS": rows, "TILE": TILE, "DEPTH": DEPTH, "PART": part, "LAST": last}
    arguments |= {"STAGES": stages, "GROUP": group, "A_ACROSS": a_across, "B_ACROSS": b_across, "ADD": accumulate}
    arguments |= {"TERMS": len(pairs) // outputs, "OUTPUTS": outputs, "GATE": gated, "STORE_H": h is not None}
    programs = min(outputs * -(-M // rows) * -(-N // TILE), multiprocessors(outs[0].device))
    return Launch(_product_kernel, (programs,), arguments, CONSUMER_WARPS, stages)
