"""z^T = silu(w_gate x^T) * (w_up x^T) for few hundred tokens, hand-scheduled for Hopper (9.0), in Gluon.

M tokens, N intermediate, K hidden. `hopper_forward.py` has tiles of 128 tokens, and with 333 tokens the last row of
tiles is half empty. Here the operands have changed places: the rows of an accumulator are 64 features of gate and the
same 64 of up, its columns are tokens, of which a tile may have any multiple of 16 from 64 to 192. From 128 on they come
as two runs of half as many, below as one. Programs, producer, consumers and main loop are those of `hopper_forward.py`;
z leaves the registers transposed, 32 tokens at a time, the last 16 of an odd multiple through their own descriptor.

With `shares`, the tiles of the last wave, which would leave multiprocessors idle, are computed by as many programs
each: every one sums over its share of K and stores its sums in fp32. A second launch adds them up, always in the same
order, and applies the gate.

Measured on an H200: NOTES.md.
"""

import dataclasses
from typing import Any

import torch

from swiglu_kernels.hopper import shared
from swiglu_kernels.hopper.shared import CONSUMER_WARPS, GLUON_MISSING, SIZES, position
from swiglu_kernels.ops.glu import hopper_forward
from swiglu_kernels.ops.glu.hopper_forward import BUFFERS, DEPTH, GROUP, PART, REST, STAGES, WIDE
from swiglu_kernels.runtime.backend import multiprocessors, tl, triton
from swiglu_kernels.runtime.early import wait_for_launch_ahead
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.rules import Tile, waves

FEATURES = 64
"""Of gate and of up in a tile, one above the other."""
TOKENS = (192, 176, 160, 144, 128, 112, 96, 80, 64)
"""Of a tile, to choose from."""
MOST_SHARES = 8
"""Of a tile; every share is stored and read again."""
LEAST_TOKENS = 129
"""With fewer, `hopper_row.py` and the portable kernel are faster."""
EDGE, JOIN, KEEP = 12, 35 * 4096, 35 * 4096
"""What `tile_for` counts beside tokens times depth: tokens that a tile seems to have beyond its own, and for shared
tiles the second launch, and storing and reading a full wave of shares of 160 tokens. Fitted to ragged.csv."""
LEAST_GAIN = 0.985
"""Of the time of `hopper_forward.py`'s kernel that is counted, at most: nearer, that is the faster of the two."""
TILE = Tile(TOKENS[0], FEATURES, DEPTH, warps=CONSUMER_WARPS, stages=STAGES, group=GROUP)
"""What is shipped; rows, which are tokens, stages, group and parts may differ."""
_OUTPUTS = ("z", "gate_out", "up_out")
_OPTIONAL = (*(f"x_{rows}" for rows in REST), *_OUTPUTS, *(f"{name}_tail" for name in _OUTPUTS), "sums")


def _run_of(tokens: int) -> int:
    """Return how many tokens each run of a tile has; from 2 WIDE tokens on there are two."""
    return tokens // 2 if tokens >= 2 * WIDE else tokens


@triton.jit(do_not_specialize=("M", "tiles", "whole", "shares"))
def _join_kernel(
    sums, z_ptr, gate_ptr, up_ptr, M, N, tiles, whole, shares,
    RUN: tl.constexpr, RUNS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, PART: tl.constexpr,
    STORE_PREACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add up the shares of PART tokens of a tile, apply the gate and store them."""
    wait_for_launch_ahead(EARLY)
    tile, run = whole + tl.program_id(0), tl.program_id(1)
    token_tiles = tl.cdiv(M, RUNS * RUN)
    token_tile, feature_tile = position(tile, token_tiles, tiles // token_tiles, GROUP)
    inside = tl.minimum(PART * tl.program_id(2), RUN - PART)
    token = tl.maximum(tl.minimum((RUNS * token_tile + run) * RUN, M - RUN), 0) + inside + tl.arange(0, PART)
    feature = tl.minimum(feature_tile * FEATURES, N - FEATURES) + tl.arange(0, FEATURES)
    at = tl.arange(0, FEATURES)[:, None] * (RUNS * RUN) + (run * RUN + inside + tl.arange(0, PART))[None, :]
    sums += tl.program_id(0).to(tl.int64) * shares * (2 * FEATURES * RUNS * RUN)
    gate = tl.zeros((FEATURES, PART), dtype=tl.float32)
    up = tl.zeros((FEATURES, PART), dtype=tl.float32)
    for _ in range(shares):
        gate += tl.load(sums + at)
        up += tl.load(sums + FEATURES * RUNS * RUN + at)
        sums += 2 * FEATURES * RUNS * RUN
    gate, up = tl.trans(gate), tl.trans(up)
    target = token.to(tl.int64)[:, None] * N + feature[None, :]
    exists = (token < M)[:, None]
    z = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(z_ptr + target, z.to(z_ptr.dtype.element_ty), mask=exists)
    if STORE_PREACT:
        tl.store(gate_ptr + target, gate.to(z_ptr.dtype.element_ty), mask=exists)
        tl.store(up_ptr + target, up.to(z_ptr.dtype.element_ty), mask=exists)


if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

    from swiglu_kernels.hopper.buffers import set_up
    from swiglu_kernels.hopper.loop import multiply
    from swiglu_kernels.hopper.shared import halves, load, load_rest, sigmoid, start, synchronize, view, write

    _DEPTH, _WIDE, _PART, _FEATURES = (gl.constexpr(size) for size in (DEPTH, WIDE, PART, FEATURES))
    _BUFFERS = gl.constexpr(BUFFERS)
    _run = gluon.constexpr_function(_run_of)

    @gluon.jit
    def _unit(unit, whole, shares, depth_tiles, SHARED: gl.constexpr):
        """Return the tile of a unit of work, and where its share of the depth begins and ends."""
        tile, first, last = unit, unit * 0, depth_tiles
        if SHARED:
            beyond = max(unit - whole, 0)
            share = beyond % shares
            is_whole = unit < whole
            tile = gl.where(is_whole, unit, whole + beyond // shares)
            first = gl.where(is_whole, 0, share * depth_tiles // shares)
            last = gl.where(is_whole, depth_tiles, (share + 1) * depth_tiles // shares)
        return tile, first, last

    @gluon.jit
    def _produce(
        operands, sizes, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr
    ):
        w_gate, w_up, x, x_rest, w_ring, x_ring, barriers = operands
        M, N, units, whole, shares, token_tiles, feature_tiles, depth_tiles = sizes
        RUN: gl.constexpr = _run(TOKENS)
        LAST: gl.constexpr = RUN - _WIDE
        step = 0
        for unit in range(gl.program_id(0), units, gl.num_programs(0)):
            tile, begin, end = _unit(unit, whole, shares, depth_tiles, SHARED)
            row, column = position(tile, token_tiles, feature_tiles, GROUP)
            token_0, token_1 = start(TOKENS // RUN * row, RUN, M), start(2 * row + 1, RUN, M)
            feature = start(column, _FEATURES, N)
            for depth in range(begin, end):
                stage = step % STAGES
                at = depth * _DEPTH
                full = barriers.index(stage)
                mbarrier.wait(barriers.index(STAGES + stage), (step // STAGES + 1) & 1)  # passes in the first round
                mbarrier.expect(full, (2 * _FEATURES + TOKENS) * _DEPTH * 2)  # elements of 16 bits
                load(w_gate, [feature, at], full, w_ring.index(2 * stage))
                load(w_up, [feature, at], full, w_ring.index(2 * stage + 1))
                load(x, [token_0, at], full, x_ring.index(3 * stage))
                if RUN == TOKENS:
                    load_rest(x_rest, token_0 + _WIDE, at, full, x_ring.index(3 * stage + 1), 0, LAST)
                else:
                    load(x, [token_1, at], full, x_ring.index(3 * stage + 1))
                    both = x_ring.index(3 * stage + 2)
                    load_rest(x_rest, token_0 + _WIDE, at, full, both, 0, LAST)
                    load_rest(x_rest, token_1 + _WIDE, at, full, both, LAST, LAST)
                step += 1

    @gluon.jit
    def _put(
        gate, up, outs, token, feature, buffers, FIRST: gl.constexpr, PART: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """Store a part of a tile as it lies in z: [tokens, features], half as many tokens for the tail."""
        z, gate_out, up_out = outs
        NEWER: gl.constexpr = _BUFFERS - 1  # buffers are taken in turn
        STEP: gl.constexpr = _PART // gate.shape[1]  # of the tail, `buffers` are halves
        gate = gate.permute((1, 0))
        up = up.permute((1, 0))
        if STORE_PREACT:
            write(gate, gate_out, token, feature, buffers.index(STEP * FIRST), NEWER)
            write(up, up_out, token, feature, buffers.index(STEP * (FIRST + 1)), NEWER)
            write(gate * sigmoid(gate) * up, z, token, feature, buffers.index(STEP * (FIRST + 2)), NEWER)
        else:
            write(gate * sigmoid(gate) * up, z, token, feature, buffers.index(STEP * (FIRST + PART % _BUFFERS)), NEWER)

    @gluon.jit
    def _put_block(
        gate, up, outs, tails, token_0, token_1, feature, buffers, tail_buffers, COUNT: gl.constexpr,
        FIRST: gl.constexpr, PART: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """Store COUNT columns of a block; its halves begin at two tokens."""
        gate_0, gate_1 = halves(gate, _FEATURES, _PART)
        up_0, up_1 = halves(up, _FEATURES, _PART)
        if COUNT >= _PART:
            _put(gate_0, up_0, outs, token_0, feature, buffers, FIRST, PART, STORE_PREACT)
        elif COUNT > 0:
            gate_0, _unused = halves(gate_0, _FEATURES, _PART // 2)
            up_0, _unused_too = halves(up_0, _FEATURES, _PART // 2)
            _put(gate_0, up_0, tails, token_0, feature, tail_buffers, FIRST, PART, STORE_PREACT)
        if COUNT >= 2 * _PART:
            _put(gate_1, up_1, outs, token_1, feature, buffers, FIRST, PART + 1, STORE_PREACT)
        elif COUNT > _PART:
            gate_1, _unused = halves(gate_1, _FEATURES, _PART // 2)
            up_1, _unused_too = halves(up_1, _FEATURES, _PART // 2)
            _put(gate_1, up_1, tails, token_1, feature, tail_buffers, FIRST, PART + 1, STORE_PREACT)

    @gluon.jit
    def _put_tile(
        products, outs, tails, token_0, token_1, feature, buffers, tail_buffers, TOKENS: gl.constexpr,
        FIRST: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """Apply the gate to a tile and store it."""
        gate_0, gate_1, gate_2, up_0, up_1, up_2 = products
        RUN: gl.constexpr = _run(TOKENS)
        PARTS: gl.constexpr = 6 if TOKENS > 2 * _WIDE else (TOKENS + _PART - 1) // _PART
        COUNT: gl.constexpr = _WIDE if TOKENS > RUN else TOKENS - _WIDE  # columns of the second block
        _put_block(
            gate_0, up_0, outs, tails, token_0, token_0 + _PART, feature, buffers, tail_buffers, _WIDE,
            FIRST, 0, STORE_PREACT,
        )  # fmt: skip
        _put_block(
            gate_1, up_1, outs, tails, token_1, token_1 + _PART, feature, buffers, tail_buffers, COUNT,
            FIRST, 2, STORE_PREACT,
        )  # fmt: skip
        if PARTS == 6:
            token_0 += RUN - _PART
            token_1 += RUN - _PART
            _put_block(
                gate_2, up_2, outs, tails, token_0, token_1, feature, buffers, tail_buffers, _WIDE,
                FIRST, 4, STORE_PREACT,
            )  # fmt: skip
        if PARTS % _BUFFERS != 0 and not STORE_PREACT:
            tma.store_wait(0)  # the next tile begins with a buffer that one of the last parts leaves from

    @gluon.jit
    def _keep(block, sums, PRODUCT: gl.constexpr, COLUMN_0: gl.constexpr, COLUMN_1: gl.constexpr, TOKENS: gl.constexpr):
        """Store the halves of a block of sums, [gate and up, features, tokens], at two columns; no more than TOKENS."""
        left, right = halves(block, _FEATURES, _PART)
        rows = gl.arange(0, _FEATURES, gl.SliceLayout(1, left.type.layout))
        columns = gl.arange(0, _PART, gl.SliceLayout(0, left.type.layout))
        at = (PRODUCT * _FEATURES + rows)[:, None] * TOKENS + columns[None, :]
        inside = rows[:, None] >= 0
        gl.store(sums + COLUMN_0 + at, left, mask=inside & (columns < TOKENS - COLUMN_0)[None, :])
        gl.store(sums + COLUMN_1 + at, right, mask=inside & (columns < TOKENS - COLUMN_1)[None, :])

    @gluon.jit
    def _consume(
        given, sizes, ME: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
        SHARED: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        z, gate_out, up_out, z_tail, gate_tail, up_tail, sums, w_at, x_at, barriers_at, buffers, tail_buffers = given
        M, N, units, whole, shares, token_tiles, feature_tiles, depth_tiles = sizes
        FIRST: gl.constexpr = ME * _BUFFERS
        RUN: gl.constexpr = _run(TOKENS)
        SECOND: gl.constexpr = RUN if TOKENS > RUN else _WIDE  # column of the second block
        outs, tails = (z, gate_out, up_out), (z_tail, gate_tail, up_tail)
        programs = gl.num_programs(0)
        mine = (units - gl.program_id(0) + programs - 1) // programs
        for number in range(ME, mine, 2):
            unit = gl.program_id(0) + number * programs
            tile, begin, end = _unit(unit, whole, shares, depth_tiles, SHARED)
            row, column = position(tile, token_tiles, feature_tiles, GROUP)
            parity = (number // 2 + 1 - ME) & 1  # the first unit's turn passes at once
            gate_0, gate_1, gate_2, up_0, up_1, up_2 = multiply(
                w_at, x_at, barriers_at, number * depth_tiles, end - begin, parity, z.dtype, TOKENS, ME, STAGES
            )
            token_0 = start(TOKENS // RUN * row, RUN, M)
            token_1 = start(2 * row + 1, RUN, M) if TOKENS > RUN else token_0 + _WIDE
            feature = start(column, _FEATURES, N)
            if SHARED:
                if unit < whole:
                    _put_tile(
                        (gate_0, gate_1, gate_2, up_0, up_1, up_2), outs, tails, token_0, token_1, feature, buffers,
                        tail_buffers, TOKENS, FIRST, STORE_PREACT,
                    )  # fmt: skip
                else:
                    mine_at = sums + (unit - whole).to(gl.int64) * (2 * _FEATURES * TOKENS)
                    _keep(gate_0, mine_at, 0, 0, _PART, TOKENS)
                    _keep(up_0, mine_at, 1, 0, _PART, TOKENS)
                    if TOKENS > _WIDE:
                        _keep(gate_1, mine_at, 0, SECOND, SECOND + _PART, TOKENS)
                        _keep(up_1, mine_at, 1, SECOND, SECOND + _PART, TOKENS)
                    if TOKENS > 2 * _WIDE:
                        _keep(gate_2, mine_at, 0, RUN - _PART, 2 * RUN - _PART, TOKENS)
                        _keep(up_2, mine_at, 1, RUN - _PART, 2 * RUN - _PART, TOKENS)
            else:
                _put_tile(
                    (gate_0, gate_1, gate_2, up_0, up_1, up_2), outs, tails, token_0, token_1, feature, buffers,
                    tail_buffers, TOKENS, FIRST, STORE_PREACT,
                )  # fmt: skip
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=(*SIZES, "shares"))
    def _transposed_kernel(
        w_gate, w_up, x, x_32, x_16, x_8, z, gate_out, up_out, z_tail, gate_out_tail, up_out_tail, sums,
        M, N, K, shares,
        TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr,
        PROGRAMS: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        token_tiles, feature_tiles = gl.cdiv(M, TOKENS), gl.cdiv(N, _FEATURES)
        depth_tiles = gl.cdiv(K, _DEPTH)
        tiles = token_tiles * feature_tiles
        whole = tiles // PROGRAMS * PROGRAMS if SHARED else tiles
        units = whole + (tiles - whole) * shares
        w_ring = gl.allocate_shared_memory(x.dtype, [2 * STAGES, _FEATURES, _DEPTH], w_gate.layout)
        x_ring = gl.allocate_shared_memory(x.dtype, [3 * STAGES, _WIDE, _DEPTH], x.layout)
        buffers = gl.allocate_shared_memory(x.dtype, [2 * _BUFFERS, _PART, _FEATURES], z.layout)
        tail_buffers = buffers
        if z_tail is not None:
            LAYOUT: gl.constexpr = z_tail.layout
            tail_buffers = view(buffers, x.dtype, [4 * _BUFFERS, _PART // 2, _FEATURES], LAYOUT)
        w_at, x_at, barriers_at, barriers = set_up(w_ring, x_ring, STAGES, TURNS=True)
        fence_async_shared()
        synchronize()
        given = (
            z, gate_out, up_out, z_tail, gate_out_tail, up_out_tail, sums, w_at, x_at, barriers_at, buffers,
            tail_buffers,
        )  # fmt: skip
        operands = (w_gate, w_up, x, (x_32, x_16, x_8), w_ring, x_ring, barriers)
        sizes = (M, N, units, whole, shares, token_tiles, feature_tiles, depth_tiles)
        gl.warp_specialize(
            [
                (_consume, (given, sizes, 0, TOKENS, STAGES, GROUP, SHARED, STORE_PREACT)),
                (_consume, (given, sizes, 1, TOKENS, STAGES, GROUP, SHARED, STORE_PREACT)),
                (_produce, (operands, sizes, TOKENS, STAGES, GROUP, SHARED)),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [240, 24],  # their registers; the first consumer gets the rest, 240
        )  # fmt: skip


def last_wave(tokens: int, intermediate: int, rows: int, processors: int) -> tuple[int, int]:
    """Return how many waves of tiles of so many rows, which are tokens, are full, and how many tiles are left."""
    return divmod(-(-tokens // rows) * -(-intermediate // FEATURES), processors)


def most_shares(tokens: int, intermediate: int, hidden: int, rows: int, processors: int) -> int:
    """Return how many programs can share a tile of the last wave."""
    _, rest = last_wave(tokens, intermediate, rows, processors)
    return min(processors // rest, MOST_SHARES, -(-hidden // DEPTH)) if rest else 1


def tile(rows: int, shares: int = 1) -> Tile:
    """Return the tile of so many tokens, and of so many shares of the last wave's."""
    return dataclasses.replace(TILE, rows=rows, parts=shares)


def tiles(tokens: int, hidden: int, intermediate: int, processors: int) -> list[Tile]:
    """Return every tile there is for so many tokens: alone and with as many shares as there can be."""
    if tokens < LEAST_TOKENS or intermediate < FEATURES:
        return []
    most = {rows: most_shares(tokens, intermediate, hidden, rows, processors) for rows in TOKENS}
    return [tile(rows, shares) for rows in TOKENS for shares in sorted({1, most[rows]})]


def tile_for(tokens: int, hidden: int, intermediate: int, processors: int, stores_preact: bool) -> Tile | None:
    """Return the tile that takes the least time, or None where that is one of `hopper_forward.py`.

    A wave takes as long as its tiles are wide and deep, and below 128 tokens reading the weights counts as well; where
    the last wave's tiles are shared, it takes that much less.
    """

    def cost(tile: Tile) -> float:
        full, rest = last_wave(tokens, intermediate, tile.rows, processors)
        shared = rest * tile.parts / processors if tile.parts > 1 else 0
        depths = full + (1 / tile.parts if rest else 0)
        width = tile.rows + EDGE + max(0, 128 - tile.rows) / 4
        return depths * width * hidden + (JOIN if shared else 0) + KEEP * shared * tile.rows / 160

    best = min(tiles(tokens, hidden, intermediate, processors), key=cost, default=None)
    columns = hopper_forward.tile_for(tokens, intermediate, processors, stores_preact).columns
    ping_pong = waves(tokens, intermediate, hopper_forward.ROWS, columns, processors) * (2 * columns + EDGE) * hidden
    return best if best and cost(best) < LEAST_GAIN * ping_pong else None


def shares_of(tile: Tile, x: torch.Tensor, intermediate: int) -> int:
    """Return among how many programs a launch shares the last wave's tiles."""
    programs = multiprocessors(x.device)
    _, rest = last_wave(x.shape[0], intermediate, tile.rows, programs)
    shares = min(tile.parts, -(-x.shape[1] // DEPTH))  # the main loop waits for ever for a share of no depth
    return shares if 0 < rest * shares <= programs else 1


def forward_launch(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None, tile: Tile,
) -> Launch:  # fmt: skip
    """Describe the launch, for one of `tiles`; ask `hopper_forward.why_not` first.

    Args:
        x, w_gate, w_up, z, preactivations: as of `portable_forward.forward_launch`.
        tile: its rows, stages, group and parts are taken; a share has some depth, whatever the parts.
    """
    (M, K), N = x.shape, w_gate.shape[0]
    programs, run = multiprocessors(x.device), _run_of(tile.rows)
    (full, rest), shares = last_wave(M, N, tile.rows, programs), shares_of(tile, x, N)
    whole = full * programs
    blocks = {"x": (x, WIDE, DEPTH), "w_gate": (w_gate, FEATURES, DEPTH), "w_up": (w_up, FEATURES, DEPTH)}
    blocks |= {f"x_{rows}": (x, rows, DEPTH) for rows in REST if (run - WIDE) & rows}
    for name, output in shared.forward_outputs(z, preactivations).items():
        blocks[name] = output, PART, FEATURES
        if tile.rows == run and run % PART:
            blocks[f"{name}_tail"] = output, PART // 2, FEATURES
    sums = x.new_empty((rest * shares, 2, FEATURES, tile.rows), dtype=torch.float32) if shares > 1 else None
    others: dict[str, Any] = {"M": M, "N": N, "shares": shares, "GROUP": tile.group}
    others |= {"STORE_PREACT": preactivations is not None}
    join = None
    if sums is not None:  # adds up the shares of the last wave's tiles and applies the gate
        gate, up = preactivations or (z, z)  # never touched without STORE_PREACT
        arguments = {"sums": sums, "z_ptr": z, "gate_ptr": gate, "up_ptr": up, "tiles": whole + rest, "whole": whole}
        arguments |= {"RUN": run, "RUNS": tile.rows // run, "FEATURES": FEATURES, "PART": PART, "EARLY": True} | others
        join = Launch(_join_kernel, (rest, tile.rows // run, -(-run // PART)), arguments, num_warps=4, num_stages=1)
    others |= {"sums": sums, "K": K, "TOKENS": tile.rows, "SHARED": shares > 1, "PROGRAMS": programs}
    return hopper_forward.launch_of(
        _transposed_kernel, min(whole + rest * shares, programs), tile, blocks, dict.fromkeys(_OPTIONAL) | others,
        "ops/glu/hopper_transposed.py", then=join, scratch=sums,
    )  # fmt: skip
