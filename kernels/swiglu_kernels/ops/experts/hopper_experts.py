"""The products of a mixture of experts, hand-scheduled for Hopper (compute capability 9.0), in Gluon.

    gate_up         h = silu(gate) * up, and pre = (gate, up), from x w_gate_up^T
    rows            y = h w_down^T; dx = d_pre w_gate_up
    gate_backward   d_pre, weight * h, and the dots of h and d_h, from d_h = dy w_down, which is never stored
    weights         d_w = a^T b of each expert's rows

Rows are sorted by expert, and each expert's begin at a multiple of 128 (`routing.py`): every block that is loaded or
stored is one for TMA, and the weights are one matrix of all experts' rows. The schedule is `hopper_forward.py`'s: one
program per multiprocessor walks through the tiles, a producer fills a ring of stages, two consumers take tiles in turn.
A tile has 128 rows, however many its expert has left: what is beyond them is written and means nothing. An expert whose
rows are an odd number of blocks of 64 has a tall tile for the last three, 192 x 128 in place of 128 x 192, multiplied
by the same wgmmas and stored transposed; columns that 192 does not divide end in such tiles as well
(`hopper_tiles.py`). Half tiles cost more than they save (NOTES.md, measured on an H200).

A weight's gradient whose last rows of tiles are half empty has room for the sums of the other operand: rows of ones.
There is no sorted copy of x or dy, unless they are not aligned: four producers copy the rows of the tokens into the
ring (`copies.py`), as Hopper's TMA cannot.

M rows of a weight's gradient, N columns of an output, K the axis that is summed over.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swiglu_kernels.hopper import buffers, shared
from swiglu_kernels.hopper.copies import COPIERS, PIECE
from swiglu_kernels.hopper.shared import ALIGNMENT_BYTES, CONSUMER_WARPS, GLUON_MISSING, SIZES, fits_tma
from swiglu_kernels.ops.experts.hopper_epilogue import BLOCK, BLOCKS, BUFFERS, PART
from swiglu_kernels.ops.experts.hopper_tiles import ROWS, TALL_COLUMNS, tall_columns
from swiglu_kernels.ops.experts.routing import Routing, Store, stored
from swiglu_kernels.ops.experts.routing import gather as sort
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.runtime.backend import multiprocessors, triton
from swiglu_kernels.runtime.launch import INT32_MAX, Launch
from swiglu_kernels.runtime.shortcuts.plan import apply, run

MOST_EXPERTS = 512
"""Whose numbers of rows a warp's registers hold."""
LEAST_ROWS = {False: 256, True: 32}
"""Of an expert on average, by whether a gradient is wanted; below, the portable kernels' smaller tiles are faster."""
STAGES, GROUP = 5, 8
BACKWARD_STAGES = 4
"""Beside which gate and up of a block for each consumer have room, and what is stored."""
REGISTERS = 232, 40
"""Of a thread of a consumer, and of a producer: those of copies are addresses, which are found before any is used."""
WIDE, NARROW = BLOCKS * BLOCK, 128
"""Columns of a tile."""
_OPTIONAL = ("ones", "pre", "bias", "sums", "weighted_h", "weights", "dots")

__all__ = ["BLOCK", "ROWS", "down", "down_backward", "gate_up", "gather", "rows_times", "weight_grad"]

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from swiglu_kernels.hopper.buffers import set_up
    from swiglu_kernels.hopper.loop import multiply_blocks
    from swiglu_kernels.hopper.shared import halves, synchronize
    from swiglu_kernels.ops.experts.hopper_epilogue import (
        fetch,
        finish,
        finish_backward,
        finish_tall,
        put_sums,
        weights_of,
    )
    from swiglu_kernels.ops.experts.hopper_producer import produce
    from swiglu_kernels.ops.experts.hopper_tiles import find, rows_of, steps_of, tiles_in_all, tiles_of_gradient

    _BLOCK, _PART = gl.constexpr(BLOCK), gl.constexpr(PART)
    _ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))
    _CONSUMERS, _PRODUCERS = gl.constexpr(REGISTERS[0]), gl.constexpr(REGISTERS[1])
    _BUFFERS, _COPIERS = gl.constexpr(BUFFERS), gl.constexpr(COPIERS)

    @gluon.jit
    def _consume(
        ME: gl.constexpr, given,
        COLUMNS: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
        B_ACROSS: gl.constexpr, INTERLEAVED: gl.constexpr, FORMULA: gl.constexpr,
        EXPERTS: gl.constexpr, SLOTS: gl.constexpr,
    ):  # fmt: skip
        (
            out, pre, tall_out, tall_pre, bias, sums, weighted_h, pair, weights, dots, a_at, b_at, barriers_at, buffers,
            reads, h_buffers, loaded, counts, begins, units, experts, M, N, K, P, expert_rows, numbers,
        ) = given  # fmt: skip
        programs = gl.num_programs(0)
        mine = (units - gl.program_id(0) + programs - 1) // programs
        step = ME * gl.cdiv(K, _BLOCK)
        if FORM == "weights":
            per_expert = tiles_of_gradient(M, N, COLUMNS)
            step = ME * steps_of(gl.program_id(0) // per_expert, counts)
        for number in range(ME, mine, 2):
            unit = gl.program_id(0) + number * programs
            count = rows_of(counts, experts, EXPERTS, 4)
            begin = None if begins is None else rows_of(begins, experts, EXPERTS, 4)
            row, first, expert, tall = find(unit, count, M, N, COLUMNS, TALL, FORM, GROUP, sums is not None, begin)
            steps = gl.cdiv(K, _BLOCK)
            others = steps  # of the next tile, which is the other consumer's
            if FORM == "weights":
                ends, sums_at = row + _BLOCK == M, expert * N + first
                if buffers.shape[1] == _PART:  # rows of out are columns of the tile
                    first += expert * expert_rows
                else:
                    row += expert * expert_rows
                steps = steps_of(expert, counts)
                others = steps_of(min(unit + programs, units - 1) // per_expert, counts)
            if FORM == "gate_backward":
                column = gl.cdiv(first, COLUMNS)
                skipped = (column * COLUMNS - first) // _BLOCK
                for side in gl.static_range(2):
                    fetch(pre, row, column * COLUMNS + side * _PART, N, reads, loaded, 2 * ME + side, INTERLEAVED)
                part, _unused = halves(gl.zeros([_BLOCK, _BLOCK], gl.float32, _ACCUMULATOR), _BLOCK, _PART)
                LAYOUT: gl.constexpr = gl.SliceLayout(1, part.type.layout)
                weight = weights_of(row, pair, weights, LAYOUT)
                lower_weight = weights_of(row + _BLOCK, pair, weights, LAYOUT)
            parity = (number // 2 + 1 - ME) & 1  # the first tile's turn passes at once
            third_0, third_1, third_2, lower_0, lower_1, lower_2 = multiply_blocks(
                (a_at, b_at, barriers_at), step, steps, parity, tall, out.dtype, COLUMNS, ME, STAGES, FORM == "weights",
                B_ACROSS, TALL is not None, SLOTS > 0,
            )  # fmt: skip
            step += steps + others
            if FORM == "gate_backward":
                finish_backward(
                    (third_0, third_1, third_2, lower_0, lower_1, lower_2, weight, lower_weight),
                    dots + column.to(gl.int64) * P, (pre, out, weighted_h), row, first, skipped, N, numbers,
                    (reads, buffers, h_buffers, loaded), ME, INTERLEAVED, FORMULA,
                )  # fmt: skip
            else:
                BOTH: gl.constexpr = 2 if FORM == "gate_up" else 1
                bias_at = BOTH * expert * N + (2 if INTERLEAVED else 1) * first
                if TALL is not None and tall != 0:
                    finish_tall(
                        (third_0, third_1, third_2, lower_0, lower_1, lower_2), tall_out, tall_pre, bias, row, first, N,
                        bias_at, numbers, buffers, ME * _BUFFERS, FORM, FORMULA,
                    )  # fmt: skip
                else:
                    for half in range(2):  # written out, it has more instructions than their cache holds
                        if sums is not None and half == 1 and ends:
                            put_sums(third_0, third_1, third_2, sums + sums_at)
                        else:
                            finish(
                                (third_0, third_1, third_2), (out, pre, bias), row + half * _BLOCK, first, N, bias_at,
                                numbers, buffers, COLUMNS, ME * _BUFFERS, FORM, INTERLEAVED, FORMULA,
                            )  # fmt: skip
                        third_0, third_1, third_2 = lower_0, lower_1, lower_2
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=(*SIZES, "P", "token_pieces"))
    def _experts_kernel(
        a, tokens, b, b_rest, ones, out, pre, tall_out, tall_pre, bias, sums, weighted_h, pair, weights, dots,
        starts, counts, begins, token_pieces, experts, M, N, K, P, expert_rows, alpha, limit, up_offset,
        COLUMNS: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
        B_ACROSS: gl.constexpr, INTERLEAVED: gl.constexpr, FORMULA: gl.constexpr, EXPERTS: gl.constexpr,
        SLOTS: gl.constexpr,
    ):  # fmt: skip
        numbers = alpha, limit, up_offset
        BACKWARD: gl.constexpr = FORM == "gate_backward"
        EACH: gl.constexpr = 1 if INTERLEAVED else 2  # buffers for gate and up
        units = tiles_in_all(counts, experts, M, N, COLUMNS, TALL, FORM, EXPERTS, 4)
        a_ring = gl.allocate_shared_memory(out.dtype, [2 * STAGES, _BLOCK, _BLOCK], b.layout)
        b_ring = gl.allocate_shared_memory(out.dtype, [COLUMNS // _BLOCK * STAGES, _BLOCK, _BLOCK], b.layout)
        if BACKWARD:
            reads = gl.allocate_shared_memory(out.dtype, [4 * EACH, _BLOCK, _BLOCK // EACH], pre.layout)
            buffers = gl.allocate_shared_memory(out.dtype, [2 * EACH, _BLOCK, _BLOCK // EACH], out.layout)
            h_buffers = gl.allocate_shared_memory(out.dtype, [2, _BLOCK, _PART], weighted_h.layout)
        else:
            buffers = gl.allocate_shared_memory(
                out.dtype, [2 * _BUFFERS, out.block_shape[0], out.block_shape[1]], out.layout
            )
            reads, h_buffers = buffers, buffers
        a_at, b_at, barriers_at, barriers = set_up(
            a_ring, b_ring, STAGES, TURNS=True, COPIERS=_COPIERS if SLOTS > 0 else 0
        )
        loaded = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # both halves of `reads`
        for half in gl.static_range(4):
            mbarrier.init(loaded.index(half), count=1)
        fence_async_shared()
        synchronize()
        consumed = (
            out, pre, tall_out, tall_pre, bias, sums, weighted_h, pair, weights, dots, a_at, b_at, barriers_at, buffers,
            reads, h_buffers, loaded, counts, begins, units, experts, M, N, K, P, expert_rows, numbers,
        )  # fmt: skip
        produced = (
            a, b, b_rest, ones, a_ring, b_ring, barriers, starts, counts, begins, units, experts, M, N, K, P,
            expert_rows, tokens, token_pieces, pair, a_at, b_at, barriers_at,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        0, consumed, COLUMNS, TALL, STAGES, GROUP, FORM, B_ACROSS, INTERLEAVED, FORMULA, EXPERTS, SLOTS,
                    ),
                ),
                (
                    _consume,
                    (
                        1, consumed, COLUMNS, TALL, STAGES, GROUP, FORM, B_ACROSS, INTERLEAVED, FORMULA, EXPERTS, SLOTS,
                    ),
                ),
                (produce, (0, produced, COLUMNS, TALL, STAGES, GROUP, FORM, B_ACROSS, INTERLEAVED, EXPERTS, SLOTS)),
                (produce, (1, produced, COLUMNS, TALL, STAGES, GROUP, FORM, B_ACROSS, INTERLEAVED, EXPERTS, SLOTS)),
                (produce, (2, produced, COLUMNS, TALL, STAGES, GROUP, FORM, B_ACROSS, INTERLEAVED, EXPERTS, SLOTS)),
                (produce, (3, produced, COLUMNS, TALL, STAGES, GROUP, FORM, B_ACROSS, INTERLEAVED, EXPERTS, SLOTS)),
            ],
            [4, 1, 1, 1, 1],  # warps of the second consumer and of the producers
            [_CONSUMERS, _PRODUCERS, _PRODUCERS, _PRODUCERS, _PRODUCERS],  # registers; the first consumer gets the rest
        )  # fmt: skip
        a_ring._keep_alive()  # where rows are copied its address alone is used, and Triton would put others into it


Routed = tuple[Tensor, Tensor, Tensor | None, int]
"""starts, counts, pair and slots of a routing, for rows that are copied from the tokens; 0 slots: they are sorted."""


def why_not(x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, multiple: int = BLOCK) -> str | None:
    """Say why a layer's products cannot take this path on a Hopper GPU, or return None where they can."""
    sizes = x.shape[1], w_down.shape[1], w_down.shape[2]
    if x.dtype not in shared.SIXTEEN_BITS:
        return "the kernels are for 16-bit types"
    if activation != "silu":
        return "the kernels' gate is SiLU"
    if any(size % multiple for size in sizes) or min(sizes) < WIDE:
        return f"hidden and intermediate are to be multiples of {multiple}, and at least {WIDE}"
    if w_gate_up.shape[0] > MOST_EXPERTS:
        return f"there are more than {MOST_EXPERTS} experts"
    if not all(map(_is_one_matrix, (w_gate_up, w_down))):
        return "TMA needs the weights of all experts, or all their transposes, as one matrix with a last stride of 1"
    return None


def _is_one_matrix(weights: Tensor) -> bool:
    """Tell whether the experts' [N, K], or all their transposes, lie one after the other."""
    matrix = weights if weights.stride(2) == 1 else weights.mT
    each, step, unit = matrix.stride()
    aligned = unit == 1 and step * matrix.element_size() % ALIGNMENT_BYTES == 0
    return aligned and each % step == 0 and each >= matrix.shape[1] * step


def flat(weights: Tensor) -> tuple[list[int], list[int], int, bool]:
    """Return shape and strides of the matrix of all experts' weights [E, N, K], its rows an expert, and whether it
    lies across: N is contiguous, not K."""
    across = weights.stride(2) != 1
    experts, _, columns = (weights.mT if across else weights).shape
    step = weights.stride(2 if across else 1)
    each = weights.stride(0) // step
    return [experts * each, columns], [step, 1], each, across


def block_descriptor(
    base: Tensor, rows: int, columns: int, shape: list[int] | None = None, strides: list[int] | None = None
) -> "TensorDescriptor":
    """Describe a tensor for TMA that moves blocks of rows x columns, taken for a matrix of a shape if one is given."""
    layout = shared._shared_layout(base.dtype, rows, columns)
    return TensorDescriptor(base, shape or list(base.shape), strides or list(base.stride()), [rows, columns], layout)


def _launch(
    form: str, a: Tensor, b: Tensor, outs: Mapping[str, Tensor | None],
    routed: Routed, columns: int, sizes: tuple[int, int, int], formula: Formula = PLAIN, interleaved: bool = False,
) -> Launch:  # fmt: skip
    starts, counts, pair, slots = routed
    M, N, K = sizes
    backward, weights = form == "gate_backward", form == "weights"
    stages = BACKWARD_STAGES if backward else STAGES
    both = BLOCK if backward and interleaved else PART
    tall = None
    if columns == WIDE and (form == "rows" or (form == "gate_up" and not interleaved and formula == PLAIN)):
        tall = tall_columns(N, *(WIDE, TALL_COLUMNS) if form == "rows" else (WIDE // 2, TALL_COLUMNS // 2))
    named: dict[str, Any] = dict.fromkeys(_OPTIONAL) | {"pair": pair, **outs}
    for name in ("out", "pre"):
        wanted = tall is not None and named[name] is not None
        named[f"tall_{name}"] = block_descriptor(named[name], PART, BLOCK) if wanted else None
    if weights:
        out = named["out"]
        lies, block = (out, (BLOCK, PART)) if out.stride(2) == 1 else (out.mT, (PART, BLOCK))
        each = out.stride(0) // lies.stride(1)
        whole = [(out.shape[0] - 1) * each + lies.shape[1], lies.shape[2]], [lies.stride(1), 1]
        named["out"] = block_descriptor(out, *block, *whole)
        if named["ones"] is not None:
            named["ones"] = block_descriptor(named["ones"], BLOCK, BLOCK)
        shape, strides, across = list(b.shape), list(b.stride()), True
    else:
        for name, part in (("out", both if backward else PART), ("pre", both), ("weighted_h", PART)):
            if (tensor := named[name]) is not None:
                named[name] = block_descriptor(tensor, BLOCK, part)
        shape, strides, each, across = flat(b)
    rest = form == "gate_up" and not interleaved and columns == WIDE
    width, experts = columns // 2 if form == "gate_up" else columns, counts.shape[0]
    P = pair.shape[0] if slots and pair is not None else a.shape[0]
    tokens = a if slots else None
    most = experts * -(-M // ROWS) if weights else P // ROWS
    named |= {"a": None if a is tokens else block_descriptor(a, BLOCK, BLOCK), "tokens": tokens}
    b_rest = block_descriptor(b, PART, BLOCK, shape, strides) if rest else None
    named |= {"b": block_descriptor(b, BLOCK, BLOCK, shape, strides), "b_rest": b_rest}
    named |= {"starts": starts, "counts": counts, "begins": None if len(starts) > experts else starts}
    named |= {"experts": experts, "M": M, "N": N, "K": K, "P": P, "expert_rows": each, "SLOTS": slots}
    pieces = 0 if tokens is None else tokens.stride(0) // PIECE
    named |= {"token_pieces": pieces} | gating(formula, interleaved, experts)
    named |= {"COLUMNS": columns, "TALL": tall, "STAGES": stages, "GROUP": GROUP, "FORM": form, "B_ACROSS": across}
    grid = (min(most * -(-N // width), multiprocessors(a.device)),)
    traps = buffers.lost("ops/experts/hopper_experts.py")
    return Launch(_experts_kernel, grid, named, CONSUMER_WARPS, stages, traps=traps)


def gating(formula: Formula, interleaved: bool, experts: int) -> dict[str, Any]:
    """Return what all these kernels are told of the gate and of how many experts there are."""
    numbers = formula.arguments()
    found = {name: numbers[name] for name in ("alpha", "limit", "up_offset", "FORMULA")}
    return found | {"INTERLEAVED": interleaved, "EXPERTS": max(32, triton.next_power_of_2(experts))}


def gate_up_launch(
    x: Tensor, w_gate_up: Tensor, h: Tensor, pre: Tensor | None, routed: Routed,
    bias: Tensor | None = None, formula: Formula = PLAIN, interleaved: bool = False,
) -> Launch:  # fmt: skip
    """Describe the launch that writes h [P, N], and pre [P, 2 N] where it is kept, in the order of w_gate_up's rows.

    x is [P, K], sorted rows, or with slots [T, K], the tokens; w_gate_up [E, 2 N, K], either of the last two dimensions
    contiguous, with rows of gate and up in turn if interleaved, else first all of gate; bias [E, 2 N] or None.
    """
    across = w_gate_up.stride(2) != 1
    outs = {"out": h, "pre": pre, "bias": bias}
    columns = NARROW if across and not interleaved else WIDE
    sizes = 0, h.shape[1], x.shape[1]
    return _launch("gate_up", x, w_gate_up, outs, routed, columns, sizes, formula, interleaved)


def rows_launch(
    a: Tensor, w: Tensor, out: Tensor, starts: Tensor, counts: Tensor, bias: Tensor | None = None
) -> Launch:
    """Describe the launch that writes out [P, N]: a [P, K], sorted rows, times w [E, N, K] of their experts, plus bias.

    Either of the last two dimensions of w is contiguous; bias is [E, N] or None.
    """
    sizes = 0, out.shape[1], a.shape[1]
    return _launch("rows", a, w, {"out": out, "bias": bias}, (starts, counts, None, 0), WIDE, sizes)


def gate_backward_launch(
    dy: Tensor, w_down: Tensor, pre: Tensor, weights: Tensor, made: tuple[Tensor, Tensor, Tensor], routed: Routed,
    formula: Formula = PLAIN, interleaved: bool = False,
) -> Launch:  # fmt: skip
    """Describe the launch that makes d_pre, weight * h and dots from dy, out's gradient without the routing weights.

    dy is [P, K], sorted rows, or with slots [T, K], the tokens; w_down [E, N, K] as dy is multiplied, the transpose of
    what the forward multiplies by; pre [P, 2 N] as `gate_up_launch` wrote it; weights [T, k], contiguous. `made` is
    written: d_pre [P, 2 N], which may be pre itself, weight * h [P, N], and dots [ceil(N / WIDE), P], fp32, whose sums
    over the first axis are the routing weights' gradients.
    """
    d_pre, weighted_h, dots = made
    outs = {"out": d_pre, "pre": pre, "weighted_h": weighted_h, "weights": weights, "dots": dots}
    sizes = 0, weighted_h.shape[1], dy.shape[1]
    return _launch("gate_backward", dy, w_down, outs, routed, WIDE, sizes, formula, interleaved)


def weights_launch(
    a: Tensor, b: Tensor, out: Tensor, routed: Routed, sums: Tensor | None = None, ones: Tensor | None = None
) -> Launch:
    """Describe the launch that writes out [E, M, N], a^T b of each expert's rows; zero for an expert without rows.

    a is [P, M], sorted rows, or with slots [T, M], the tokens; b [P, N], sorted rows. One of the last two dimensions of
    out is contiguous. `sums` [E, N] are those of b over each expert's rows, wanted only where `has_room_for_sums` says
    so of M: b's product with `ones` [BLOCK, BLOCK], in place of rows of a^T behind M.
    """
    sizes = out.shape[1], out.shape[2], a.shape[0]
    return _launch("weights", a, b, {"out": out, "sums": sums, "ones": ones}, routed, WIDE, sizes)


def has_room_for_sums(rows: int) -> bool:
    """Tell whether the last tile of so many rows of a gradient has a block of rows to spare."""
    return rows % ROWS == BLOCK


def gather(x: Tensor, routing: Routing) -> Tensor:
    """Return x [T, H]: each product copies its rows, or sorts them first where it cannot."""
    return x


def _can_copy(x: Tensor) -> bool:
    """Tell whether products can copy rows of tokens: in pieces that are aligned, with numbers of 32 bits."""
    return fits_tma(x) and x.shape[0] * x.stride(0) // PIECE <= INT32_MAX


def _rows_of(x: Tensor, routing: Routing) -> tuple[Tensor, Routed]:
    """Return what a product takes for the rows of x, [T, K] or sorted [P, K], with slots if these are the tokens."""
    rows, slots = x, 0
    if x.shape[0] != routing.pair.shape[0]:
        rows, slots = (x, routing.slots) if _can_copy(x) else (sort(x, routing), 0)
    return rows, (routing.starts, routing.counts, routing.pair, slots)


def gate_up(
    x: Tensor, w_gate_up: Tensor, routing: Routing, bias: Tensor | None, formula: Formula,
    interleaved: bool, stores: tuple[Store, Store] = (True, False),
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return h [P, I], and pre [P, 2 I] or None."""
    rows, both = routing.pair.shape[0], w_gate_up.shape[1]
    h, pre = stored(stores[0], x, (rows, both // 2)), stored(stores[1], x, (rows, both))
    written = x.new_empty((rows, both // 2)) if h is None else h
    x, routed = _rows_of(x, routing)
    run(gate_up_launch, x, aligned(w_gate_up), written, pre, routed, dense(bias), formula, interleaved)
    return h, pre


def down(h: Tensor, w_down: Tensor, routing: Routing, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return y [P, H] = h w_down[expert]^T + bias[expert]."""
    y = h.new_empty((h.shape[0], w_down.shape[1])) if out is None else out
    run(rows_launch, h, aligned(w_down), y, routing.starts, routing.counts, dense(bias))
    return y


def down_backward(
    dy: Tensor, w_down: Tensor, pre: Tensor, weights: Tensor, routing: Routing,
    formula: Formula, interleaved: bool, stores: tuple[Store, Store, Store] = (True, True, True),
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return d_pre [P, 2 I], weight * h [P, I] or None, and the dots."""
    rows, columns = pre.shape[0], w_down.shape[2]
    d_pre, wh = stored(stores[0], pre, pre.shape), stored(stores[1], pre, (rows, columns))
    written = pre.new_empty((rows, columns)) if wh is None else wh
    dots = stored(stores[2], pre, (-(-columns // WIDE), rows), torch.float32)
    assert isinstance(d_pre, Tensor)
    assert isinstance(dots, Tensor)
    dy, routed = _rows_of(dy, routing)
    given = dy, aligned(w_down).mT, pre, weights.contiguous(), (d_pre, written, dots), routed
    run(gate_backward_launch, *given, formula, interleaved)
    return d_pre, wh, dots


def rows_times(d_pre: Tensor, w_gate_up: Tensor, routing: Routing) -> Tensor:
    """Return d_pre w_gate_up[expert], [P, H]."""
    return down(d_pre, w_gate_up.mT, routing, None)


def weight_grad(
    a: Tensor, b: Tensor, routing: Routing, like: Tensor, with_sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return a^T b over each expert's rows, [E, M, N], with the strides of `like`; tokens are copied on the left.

    With them the sums of a over each expert's rows, [E, M], where they are wanted and tokens have room for them.
    """
    out = torch.empty_like(like)
    of_tokens = a.shape[0] < routing.pair.shape[0]
    left, right, target = (a, b, out) if of_tokens else (b, a, out.mT)
    left, (starts, counts, pair, slots) = _rows_of(left, routing)
    sums = ones = None
    if with_sums and not of_tokens and has_room_for_sums(target.shape[1]):
        sums, ones = a.new_empty(out.shape[:2]), a.new_empty((BLOCK, BLOCK))
        apply(Tensor.fill_, ones, 1)
    run(weights_launch, left, right, target, (starts, counts, pair if slots else None, slots), sums, ones)
    return out, sums


def dense(bias: Tensor | None) -> Tensor | None:
    """Return biases as a kernel by hand reads them, or None for none."""
    return None if bias is None else bias.contiguous()


def aligned(weights: Tensor) -> Tensor:
    """Return weights that begin where TMA can read, a copy if need be."""
    return weights if weights.data_ptr() % ALIGNMENT_BYTES == 0 else weights.clone()
