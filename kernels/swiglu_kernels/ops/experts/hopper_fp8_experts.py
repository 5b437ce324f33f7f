"""The forward's products of a mixture of experts with operands in fp8 by rows, hand-scheduled for Hopper, in Gluon.

    gate_up         h = silu(gate) * up, and pre = (gate, up), from x w_gate_up^T
    rows            y = h w_down^T

Rows, rings, producer and epilogue are `hopper_experts.py`'s, codes in pairs and the main loop `hopper_fp8.py`'s: both
consumers share a tile, 64 rows each, whose sums of each stage's 128 of depth they add in fp32 registers. Scales are
applied to the finished sums, those of x by the token of a row.

Measured on an H200: NOTES.md, "Experts by rows".
"""

from typing import Any

import torch
from torch import Tensor

from swiglu_kernels.hopper import buffers
from swiglu_kernels.hopper.shared import CONSUMER_WARPS, GLUON_MISSING
from swiglu_kernels.ops.experts import hopper_experts
from swiglu_kernels.ops.experts.hopper_epilogue import BLOCK, BUFFERS, PART
from swiglu_kernels.ops.experts.hopper_experts import GROUP, ROWS, STAGES, WIDE, Routed, block_descriptor, flat
from swiglu_kernels.ops.experts.routing import Routing, gather
from swiglu_kernels.ops.fp8.portable_codes import lines_of
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.runtime.backend import multiprocessors
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.shortcuts.plan import run

Codes = tuple[Tensor, Tensor]
"""Codes in pairs, of the output's 16-bit dtype with half as many columns, and scales as `Quantised` has them."""

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

    from swiglu_kernels.hopper.buffers import set_up
    from swiglu_kernels.hopper.loop import multiply_fp8
    from swiglu_kernels.hopper.shared import synchronize
    from swiglu_kernels.ops.experts.hopper_epilogue import finish
    from swiglu_kernels.ops.experts.hopper_producer import produce
    from swiglu_kernels.ops.experts.hopper_tiles import find, rows_of, tiles_in_all

    _BLOCK, _PART, _WIDE = (gl.constexpr(size) for size in (BLOCK, PART, WIDE))
    _BUFFERS = gl.constexpr(BUFFERS)

    @gluon.jit
    def _scaled(block, of_rows, w_scales, left, right):
        """Return a block times its scales: of column c w_scales[left + c], in the right half w_scales[right + c]."""
        columns = gl.arange(0, _BLOCK, gl.SliceLayout(0, block.type.layout))
        of_columns = gl.load(w_scales + gl.where(columns < _PART, left, right) + columns)
        return block * (of_rows[:, None] * of_columns[None, :])

    @gluon.jit
    def _consume(
        given, ME: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
        INTERLEAVED: gl.constexpr, FORMULA: gl.constexpr, EXPERTS: gl.constexpr,
    ):  # fmt: skip
        (
            out, pre, bias, pair, a_scales, w_scales, a_at, b_at, barriers_at, buffers, counts, units, experts,
            depth_tiles, N, slots, numbers,
        ) = given  # fmt: skip
        BOTH: gl.constexpr = 2 if FORM == "gate_up" else 1
        STEP: gl.constexpr = 2 if INTERLEAVED else 1
        step = 0
        for unit in range(gl.program_id(0), units, gl.num_programs(0)):
            row, first, expert, _ = find(unit, rows_of(counts, experts, EXPERTS, 4), 0, N, _WIDE, None, FORM, GROUP)
            row += ME * _BLOCK
            third_0, third_1, third_2 = multiply_fp8(
                (a_at, b_at, barriers_at), step, depth_tiles, row, first, _WIDE, ME, STAGES, False
            )
            step += depth_tiles
            rows = row + gl.arange(0, _BLOCK, gl.SliceLayout(1, third_0.type.layout))
            if pair is None:
                of_rows = gl.load(a_scales + rows)
            else:
                pairs = gl.load(pair + rows)
                of_rows = gl.load(a_scales + pairs // slots, mask=pairs >= 0, other=0.0)
            at = BOTH * expert * N + STEP * first
            if FORM == "gate_up" and not INTERLEAVED:
                third_0 = _scaled(third_0, of_rows, w_scales, at, at)
                third_1 = _scaled(third_1, of_rows, w_scales, at + N, at + N)
                third_2 = _scaled(third_2, of_rows, w_scales, at + _BLOCK, at + N + _BLOCK - _PART)
            else:
                third_0 = _scaled(third_0, of_rows, w_scales, at, at)
                third_1 = _scaled(third_1, of_rows, w_scales, at + _BLOCK, at + _BLOCK)
                third_2 = _scaled(third_2, of_rows, w_scales, at + 2 * _BLOCK, at + 2 * _BLOCK)
            finish(
                (third_0, third_1, third_2), (out, pre, bias), row, first, N, at, numbers, buffers, _WIDE,
                ME * _BUFFERS, FORM, INTERLEAVED, FORMULA,
            )  # fmt: skip
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=("K", "P"))
    def _experts_fp8_kernel(
        a, b, b_rest, out, pre, bias, pair, a_scales, w_scales, starts, counts,
        experts, N, K, P, expert_rows, slots, alpha, limit, up_offset,
        STAGES: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr, INTERLEAVED: gl.constexpr,
        FORMULA: gl.constexpr, EXPERTS: gl.constexpr,
    ):  # fmt: skip
        numbers = alpha, limit, up_offset
        depth_tiles = gl.cdiv(K, _BLOCK)
        units = tiles_in_all(counts, experts, 0, N, _WIDE, None, FORM, EXPERTS, 4)
        a_ring = gl.allocate_shared_memory(a.dtype, [2 * STAGES, _BLOCK, _BLOCK], a.layout)
        b_ring = gl.allocate_shared_memory(a.dtype, [3 * STAGES, _BLOCK, _BLOCK], b.layout)
        buffers = gl.allocate_shared_memory(a.dtype, [2 * _BUFFERS, _BLOCK, _PART], out.layout)
        a_at, b_at, barriers_at, barriers = set_up(a_ring, b_ring, STAGES, TURNS=False)
        fence_async_shared()
        synchronize()
        given = (
            out, pre, bias, pair, a_scales, w_scales, a_at, b_at, barriers_at, buffers, counts, units, experts,
            depth_tiles, N, slots, numbers,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (_consume, (given, 0, STAGES, GROUP, FORM, INTERLEAVED, FORMULA, EXPERTS)),
                (_consume, (given, 1, STAGES, GROUP, FORM, INTERLEAVED, FORMULA, EXPERTS)),
                (
                    produce,
                    (
                        0,
                        (
                            a, b, b_rest, None, a_ring, b_ring, barriers, starts, counts, None, units, experts, 0, N, K,
                            P, expert_rows, None, None, None, None, None, None,
                        ),
                        _WIDE, None, STAGES, GROUP, FORM, False, INTERLEAVED, EXPERTS, 0,
                    ),
                ),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [240, 24],  # their registers; the first consumer gets the rest, 240
        )  # fmt: skip


def _launch(
    form: str, a: Codes, w: Codes, outs: dict[str, Tensor | None], routed: Routed, columns: int,
    formula: Formula = PLAIN, interleaved: bool = False,
) -> Launch:  # fmt: skip
    (pairs, a_scales), (of_weights, w_scales), (starts, counts, pair, slots) = a, w, routed
    *matrix, each, _ = flat(of_weights)
    rest = form == "gate_up" and not interleaved
    arguments: dict[str, Any] = dict.fromkeys(("pre", "bias")) | outs
    for name in ("out", "pre"):
        if (tensor := arguments[name]) is not None:
            arguments[name] = block_descriptor(tensor, BLOCK, PART)
    width, experts = WIDE // 2 if form == "gate_up" else WIDE, counts.shape[0]
    arguments |= {"a": block_descriptor(pairs, BLOCK, BLOCK), "b": block_descriptor(of_weights, BLOCK, BLOCK, *matrix)}
    arguments |= {"b_rest": block_descriptor(of_weights, PART, BLOCK, *matrix) if rest else None, "pair": pair}
    arguments |= {"a_scales": a_scales, "w_scales": w_scales, "starts": starts, "counts": counts, "experts": experts}
    arguments |= {"N": columns, "K": pairs.shape[1], "P": pairs.shape[0], "expert_rows": each, "slots": slots}
    arguments |= {"STAGES": STAGES, "GROUP": GROUP, "FORM": form} | hopper_experts.gating(formula, interleaved, experts)
    grid = (min(pairs.shape[0] // ROWS * -(-columns // width), multiprocessors(pairs.device)),)
    traps = buffers.lost("ops/experts/hopper_fp8_experts.py")
    return Launch(_experts_fp8_kernel, grid, arguments, CONSUMER_WARPS, STAGES, traps=traps)


def gate_up_launch(
    x: Codes, w_gate_up: Codes, h: Tensor, pre: Tensor | None, routed: Routed,
    bias: Tensor | None = None, formula: Formula = PLAIN, interleaved: bool = False,
) -> Launch:  # fmt: skip
    """Describe the launch that writes h [P, N], and pre [P, 2 N] where it is kept; as `hopper_experts` has it.

    x are sorted rows [P, K / 2] and the scales of tokens [T]; w_gate_up [E, 2 N, K / 2] and [E, 2 N], contiguous.
    """
    outs = {"out": h, "pre": pre, "bias": bias}
    return _launch("gate_up", x, w_gate_up, outs, routed, h.shape[1], formula, interleaved)


def rows_launch(a: Codes, w: Codes, out: Tensor, starts: Tensor, counts: Tensor, bias: Tensor | None = None) -> Launch:
    """Describe the launch that writes out [P, N]: sorted rows [P, K / 2] with scales [P] times their experts' weights.

    The weights are [E, N, K / 2] and [E, N], contiguous, as bias [E, N] is.
    """
    return _launch("rows", a, w, {"out": out, "bias": bias}, (starts, counts, None, 1), out.shape[1])


def gate_up_of_codes(
    x: Codes, w_gate_up: Codes, routing: Routing, bias: Tensor | None, formula: Formula, interleaved: bool,
    dtype: torch.dtype, store_pre: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return h [P, I], and pre [P, 2 I] or None, of codes [T, H] and [E, 2 I, H]."""
    rows, both = routing.pair.shape[0], w_gate_up[0].shape[1]
    pairs = x[0].view(dtype)
    pairs = gather(lines_of(pairs), routing)[:, : pairs.shape[1]]  # sorted rows lie as far apart
    h = pairs.new_empty((rows, both // 2))
    pre = pairs.new_empty((rows, both)) if store_pre else None
    weights = hopper_experts.aligned(w_gate_up[0].view(dtype)), w_gate_up[1]
    routed = routing.starts, routing.counts, routing.pair, routing.slots
    run(gate_up_launch, (pairs, x[1]), weights, h, pre, routed, hopper_experts.dense(bias), formula, interleaved)
    return h, pre


def down_of_codes(h: Codes, w_down: Codes, routing: Routing, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return y [P, H] of codes [P, I] and [E, H, I]."""
    y = h[1].new_empty((h[0].shape[0], w_down[0].shape[1]), dtype=dtype)
    pairs, weights = (h[0].view(dtype), h[1]), (hopper_experts.aligned(w_down[0].view(dtype)), w_down[1])
    run(rows_launch, pairs, weights, y, routing.starts, routing.counts, hopper_experts.dense(bias))
    return y
