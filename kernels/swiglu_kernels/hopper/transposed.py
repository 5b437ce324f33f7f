"""z^T = silu(w_gate x^T) * (w_up x^T) for few hundred tokens, hand-scheduled for Hopper (9.0), in Gluon.

M tokens, N intermediate, K hidden. `forward.py` has tiles of 128 tokens, and with 333 tokens the last row of tiles is
half empty. Here the operands have changed places: the rows of an accumulator are 64 features of gate and the same 64 of
up, its columns are tokens, of which a tile may have any multiple of 16 from 128 to 192. They come as two runs of
COLUMNS tokens each. Programs, producer, consumers and main loop are those of `forward.py`; z leaves the registers
transposed.

With `shares`, the tiles of the last wave, which would leave multiprocessors idle, are computed by as many programs
each: every one sums over its share of K and stores its sums in fp32. A second launch adds them up, always in the same
order, and applies the gate.

Measured on an H200: NOTES.md.
"""

import dataclasses

import torch

from swiglu_kernels.hopper import forward, loop, shared
from swiglu_kernels.hopper.forward import BUFFERS, DEPTH, GROUP, PART, REST, STAGES, WIDE
from swiglu_kernels.hopper.shared import CONSUMER_WARPS, GLUON_MISSING, descriptor
from swiglu_kernels.launches.backend import multiprocessors, tl, triton
from swiglu_kernels.launches.launch import Launch
from swiglu_kernels.launches.tiles import Tile, waves

FEATURES = 64
"""Of gate and of up in a tile, one above the other."""
COLUMNS = (96, 88, 80, 72, 64)
"""Tokens of a run, to choose from."""
MOST_SHARES = 8
"""Of a tile; every share is stored and read again."""
LEAST_TOKENS = 129
"""With fewer, `row.py` and the portable kernel are faster."""
EDGE, JOIN, KEEP = 12, 50 * 4096, 25 * 4096
"""What `tile_for` counts beside tokens times depth: tokens that a tile seems to have beyond its own, and for shared
tiles the second launch, and storing and reading a full wave of shares of 160 tokens."""
TILE = Tile(2 * 96, FEATURES, DEPTH, warps=CONSUMER_WARPS, stages=STAGES, group=GROUP)
"""What is shipped; rows, which are tokens, stages, group and parts may differ."""
_OPTIONAL = (*(f"x_{rows}" for rows in REST), "gate_out", "up_out", "sums")


@triton.jit
def _join_kernel(
    sums, z_ptr, gate_ptr, up_ptr, M, N, tiles, whole, shares,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, PART: tl.constexpr,
    STORE_PREACT: tl.constexpr,
):  # fmt: skip
    """Add up the shares of PART tokens of a tile, apply the gate and store them."""
    tile, run = whole + tl.program_id(0), tl.program_id(1)
    token_tiles = tl.cdiv(M, 2 * COLUMNS)
    per_group = GROUP * (tiles // token_tiles)  # as `position` in hopper/shared.py
    first_tile = tile // per_group * GROUP
    in_group = tl.minimum(token_tiles - first_tile, GROUP)
    token_tile, feature_tile = first_tile + tile % per_group % in_group, tile % per_group // in_group
    inside = tl.minimum(PART * tl.program_id(2), COLUMNS - PART)
    token = tl.maximum(tl.minimum((2 * token_tile + run) * COLUMNS, M - COLUMNS), 0) + inside + tl.arange(0, PART)
    feature = tl.minimum(feature_tile * FEATURES, N - FEATURES) + tl.arange(0, FEATURES)
    at = tl.arange(0, FEATURES)[:, None] * (2 * COLUMNS) + (run * COLUMNS + inside + tl.arange(0, PART))[None, :]
    sums += tl.program_id(0).to(tl.int64) * shares * (2 * FEATURES * 2 * COLUMNS)
    gate = tl.zeros((FEATURES, PART), dtype=tl.float32)
    up = tl.zeros((FEATURES, PART), dtype=tl.float32)
    for _ in range(shares):
        gate += tl.load(sums + at)
        up += tl.load(sums + FEATURES * 2 * COLUMNS + at)
        sums += 2 * FEATURES * 2 * COLUMNS
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

    from swiglu_kernels.hopper.forward import finish_part
    from swiglu_kernels.hopper.loop import locate_all, multiply
    from swiglu_kernels.hopper.shared import halves, load, load_rest, position, start, synchronize, view

    _DEPTH, _WIDE, _PART, _FEATURES = (gl.constexpr(size) for size in (DEPTH, WIDE, PART, FEATURES))
    _BUFFERS, _RELEASES = gl.constexpr(BUFFERS), gl.constexpr(loop.RELEASES)

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
        w_gate, w_up, x, x_rest, w_ring, x_ring, barriers,
        M, N, units, whole, shares, token_tiles, feature_tiles, depth_tiles,
        COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr,
    ):  # fmt: skip
        LAST: gl.constexpr = COLUMNS - _WIDE
        step = 0
        for unit in range(gl.program_id(0), units, gl.num_programs(0)):
            tile, begin, end = _unit(unit, whole, shares, depth_tiles, SHARED)
            row, column = position(tile, token_tiles, feature_tiles, GROUP)
            token_0, token_1 = start(2 * row, COLUMNS, M), start(2 * row + 1, COLUMNS, M)
            feature = start(column, _FEATURES, N)
            for depth in range(begin, end):
                stage = step % STAGES
                at = depth * _DEPTH
                full = barriers.index(stage)
                mbarrier.wait(barriers.index(STAGES + stage), (step // STAGES + 1) & 1)  # passes in the first round
                mbarrier.expect(full, 2 * (_FEATURES + COLUMNS) * _DEPTH * 2)  # elements of 16 bits
                load(w_gate, [feature, at], full, w_ring.index(2 * stage))
                load(w_up, [feature, at], full, w_ring.index(2 * stage + 1))
                load(x, [token_0, at], full, x_ring.index(3 * stage))
                load(x, [token_1, at], full, x_ring.index(3 * stage + 1))
                if LAST > 0:
                    both = x_ring.index(3 * stage + 2)
                    load_rest(x_rest, token_0 + _WIDE, at, full, both, 0, LAST)
                    load_rest(x_rest, token_1 + _WIDE, at, full, both, LAST, LAST)
                step += 1

    @gluon.jit
    def _put(
        gate, up, z, gate_out, up_out, token, feature, buffers,
        FIRST: gl.constexpr, PART: gl.constexpr, NEWER: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """Store a part of a tile as it lies in z: [tokens, features]."""
        finish_part(
            gate.permute((1, 0)), up.permute((1, 0)), z, gate_out, up_out, token, feature, buffers,
            FIRST, PART, NEWER, STORE_PREACT,
        )  # fmt: skip

    @gluon.jit
    def _put_block(
        gate, up, z, gate_out, up_out, token_0, token_1, feature, buffers,
        FIRST: gl.constexpr, PART: gl.constexpr, NEWER: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """Store the halves of a block, whose tokens begin at two places."""
        ONE: gl.constexpr = PART % _BUFFERS
        OTHER: gl.constexpr = (PART + 1) % _BUFFERS
        gate_0, gate_1 = halves(gate, _FEATURES, _PART)
        up_0, up_1 = halves(up, _FEATURES, _PART)
        _put(gate_0, up_0, z, gate_out, up_out, token_0, feature, buffers, FIRST, ONE, NEWER, STORE_PREACT)
        _put(gate_1, up_1, z, gate_out, up_out, token_1, feature, buffers, FIRST, OTHER, NEWER, STORE_PREACT)

    @gluon.jit
    def _put_tile(
        gate_0, gate_1, gate_2, up_0, up_1, up_2, z, gate_out, up_out, token_0, token_1, feature, buffers,
        COLUMNS: gl.constexpr, FIRST: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """Apply the gate to a tile and store it."""
        NEWER: gl.constexpr = _BUFFERS - 1  # buffers are taken in turn
        _put_block(
            gate_0, up_0, z, gate_out, up_out, token_0, token_0 + _PART, feature, buffers, FIRST, 0, NEWER, STORE_PREACT
        )
        _put_block(
            gate_1, up_1, z, gate_out, up_out, token_1, token_1 + _PART, feature, buffers, FIRST, 2, NEWER, STORE_PREACT
        )
        if COLUMNS > _WIDE:
            token_0 += COLUMNS - _PART
            token_1 += COLUMNS - _PART
            _put_block(
                gate_2, up_2, z, gate_out, up_out, token_0, token_1, feature, buffers, FIRST, 4, NEWER, STORE_PREACT
            )
        elif not STORE_PREACT:
            tma.store_wait(0)  # the next tile begins with the buffer that the last part leaves from

    @gluon.jit
    def _keep(block, sums, PRODUCT: gl.constexpr, column_0, column_1, COLUMNS: gl.constexpr):
        """Store the halves of a block of sums, [gate and up, features, tokens]."""
        left, right = halves(block, _FEATURES, _PART)
        rows = gl.arange(0, _FEATURES, gl.SliceLayout(1, left.type.layout))
        columns = gl.arange(0, _PART, gl.SliceLayout(0, left.type.layout))
        at = (PRODUCT * _FEATURES + rows)[:, None] * (2 * COLUMNS) + columns[None, :]
        gl.store(sums + column_0 + at, left)
        gl.store(sums + column_1 + at, right)

    @gluon.jit
    def _consume(
        z, gate_out, up_out, sums, w_at, x_at, barriers_at, buffers,
        M, N, units, whole, shares, token_tiles, feature_tiles, depth_tiles, ME: gl.constexpr, COLUMNS: gl.constexpr,
        STAGES: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        FIRST: gl.constexpr = ME * _BUFFERS
        programs = gl.num_programs(0)
        mine = (units - gl.program_id(0) + programs - 1) // programs
        for number in range(ME, mine, 2):
            unit = gl.program_id(0) + number * programs
            tile, begin, end = _unit(unit, whole, shares, depth_tiles, SHARED)
            row, column = position(tile, token_tiles, feature_tiles, GROUP)
            parity = (number // 2 + 1 - ME) & 1  # the first unit's turn passes at once
            gate_0, gate_1, gate_2, up_0, up_1, up_2 = multiply(
                w_at, x_at, barriers_at, number * depth_tiles, end - begin, parity, z.dtype, 2 * COLUMNS, ME, STAGES
            )
            token_0, token_1 = start(2 * row, COLUMNS, M), start(2 * row + 1, COLUMNS, M)
            feature = start(column, _FEATURES, N)
            if SHARED:
                if unit < whole:
                    _put_tile(
                        gate_0, gate_1, gate_2, up_0, up_1, up_2, z, gate_out, up_out, token_0, token_1, feature,
                        buffers, COLUMNS, FIRST, STORE_PREACT,
                    )  # fmt: skip
                else:
                    mine_at = sums + (unit - whole).to(gl.int64) * (2 * _FEATURES * 2 * COLUMNS)
                    _keep(gate_0, mine_at, 0, 0, _PART, COLUMNS)
                    _keep(gate_1, mine_at, 0, COLUMNS, COLUMNS + _PART, COLUMNS)
                    _keep(up_0, mine_at, 1, 0, _PART, COLUMNS)
                    _keep(up_1, mine_at, 1, COLUMNS, COLUMNS + _PART, COLUMNS)
                    if COLUMNS > _WIDE:
                        _keep(gate_2, mine_at, 0, COLUMNS - _PART, 2 * COLUMNS - _PART, COLUMNS)
                        _keep(up_2, mine_at, 1, COLUMNS - _PART, 2 * COLUMNS - _PART, COLUMNS)
            else:
                _put_tile(
                    gate_0, gate_1, gate_2, up_0, up_1, up_2, z, gate_out, up_out, token_0, token_1, feature,
                    buffers, COLUMNS, FIRST, STORE_PREACT,
                )  # fmt: skip
        tma.store_wait(0)

    @gluon.jit
    def _transposed_kernel(
        w_gate, w_up, x, x_32, x_16, x_8, z, gate_out, up_out, sums, M, N, K, shares,
        COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr,
        PROGRAMS: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        token_tiles, feature_tiles = gl.cdiv(M, 2 * COLUMNS), gl.cdiv(N, _FEATURES)
        depth_tiles = gl.cdiv(K, _DEPTH)
        tiles = token_tiles * feature_tiles
        whole = tiles // PROGRAMS * PROGRAMS if SHARED else tiles
        units = whole + (tiles - whole) * shares
        w_ring = gl.allocate_shared_memory(x.dtype, [2 * STAGES, _FEATURES, _DEPTH], w_gate.layout)
        x_ring = gl.allocate_shared_memory(x.dtype, [3 * STAGES, _WIDE, _DEPTH], x.layout)
        buffers = gl.allocate_shared_memory(x.dtype, [2 * _BUFFERS, _PART, _FEATURES], z.layout)
        place = gl.allocate_shared_memory(x.dtype, [8, _DEPTH], w_gate.layout)
        w_at, x_at, barriers_at = locate_all(w_ring.index(0), x_ring.index(0), place)
        # `full` of every stage, `empty` of every stage, `turn` of both consumers
        barriers = view(place, gl.int64, [_DEPTH * 2, 1], mbarrier.MBarrierLayout())  # more than there are
        for stage in gl.static_range(STAGES):
            mbarrier.init(barriers.index(stage), count=1)
            mbarrier.init(barriers.index(STAGES + stage), count=_RELEASES)
        for consumer in gl.static_range(2):
            mbarrier.init(barriers.index(2 * STAGES + consumer), count=_RELEASES)
        fence_async_shared()
        synchronize()
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        z, gate_out, up_out, sums, w_at, x_at, barriers_at, buffers,
                        M, N, units, whole, shares, token_tiles, feature_tiles, depth_tiles,
                        0, COLUMNS, STAGES, GROUP, SHARED, STORE_PREACT,
                    ),
                ),
                (
                    _consume,
                    (
                        z, gate_out, up_out, sums, w_at, x_at, barriers_at, buffers,
                        M, N, units, whole, shares, token_tiles, feature_tiles, depth_tiles,
                        1, COLUMNS, STAGES, GROUP, SHARED, STORE_PREACT,
                    ),
                ),
                (
                    _produce,
                    (
                        w_gate, w_up, x, (x_32, x_16, x_8), w_ring, x_ring, barriers,
                        M, N, units, whole, shares, token_tiles, feature_tiles, depth_tiles,
                        COLUMNS, STAGES, GROUP, SHARED,
                    ),
                ),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [240, 24],  # their registers; the first consumer gets the rest, 240
        )  # fmt: skip


def last_wave(tokens: int, intermediate: int, run: int, processors: int) -> tuple[int, int]:
    """Return how many waves of tiles are full, and how many tiles are left."""
    return divmod(-(-tokens // (2 * run)) * -(-intermediate // FEATURES), processors)


def most_shares(tokens: int, intermediate: int, hidden: int, run: int, processors: int) -> int:
    """Return how many programs can share a tile of the last wave."""
    _, rest = last_wave(tokens, intermediate, run, processors)
    return min(processors // rest, MOST_SHARES, -(-hidden // DEPTH)) if rest else 1


def tile(run: int, shares: int = 1) -> Tile:
    """Return the tile of two runs of so many tokens, and of so many shares of the last wave's."""
    return dataclasses.replace(TILE, rows=2 * run, parts=shares)


def tiles(tokens: int, hidden: int, intermediate: int, processors: int) -> list[Tile]:
    """Return every tile there is for so many tokens: each run, alone and with as many shares as there can be."""
    if tokens < LEAST_TOKENS or intermediate < FEATURES:
        return []
    return [
        tile(run, shares)
        for run in COLUMNS
        for shares in sorted({1, most_shares(tokens, intermediate, hidden, run, processors)})
    ]


def tile_for(tokens: int, hidden: int, intermediate: int, processors: int, stores_preact: bool) -> Tile | None:
    """Return the tile that takes the least time, or None where that is one of `forward.py`.

    A wave takes as long as its tiles are wide and deep; where the last one's are shared, that much less of it.
    """

    def cost(tile: Tile) -> float:
        full, rest = last_wave(tokens, intermediate, tile.rows // 2, processors)
        shared = rest * tile.parts / processors if tile.parts > 1 else 0
        depths = full + (1 / tile.parts if rest else 0)
        return depths * (tile.rows + EDGE) * hidden + (JOIN if shared else 0) + KEEP * shared * tile.rows / 160

    best = min(tiles(tokens, hidden, intermediate, processors), key=cost, default=None)
    columns = forward.tile_for(tokens, intermediate, processors, stores_preact).columns
    ping_pong = waves(tokens, intermediate, forward.ROWS, columns, processors) * (2 * columns + EDGE) * hidden
    return best if best and cost(best) < ping_pong else None


def forward_launch(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None,
    tile: Tile,
) -> Launch:
    """Describe the launch, for one of `tiles`; ask `forward.why_not` first.

    Args:
        x: [M, K].
        w_gate: [N, K].
        w_up: [N, K].
        z: [M, N], contiguous, written.
        preactivations: gate and up, [M, N] and contiguous, written; None stores z alone.
        tile: its rows, stages, group and parts are taken.
    """
    (M, K), N = x.shape, w_gate.shape[0]
    programs = multiprocessors(x.device)
    run = tile.rows // 2
    full, rest = last_wave(M, N, run, programs)
    shares = tile.parts if 0 < rest * tile.parts <= programs else 1
    whole = full * programs
    last = run - WIDE
    blocks = {"x": (x, WIDE, DEPTH), "w_gate": (w_gate, FEATURES, DEPTH), "w_up": (w_up, FEATURES, DEPTH)}
    blocks |= {f"x_{rows}": (x, rows, DEPTH) for rows in REST if last & rows}
    outputs = shared.forward_outputs(z, preactivations)
    blocks |= {name: (output, PART, FEATURES) for name, output in outputs.items()}
    sums = x.new_empty((rest * shares, 2, FEATURES, 2 * run), dtype=torch.float32) if shares > 1 else None
    return Launch(
        kernel=_transposed_kernel,
        grid=(min(whole + rest * shares, programs),),
        arguments=dict.fromkeys(_OPTIONAL)
        | {name: descriptor(*block) for name, block in blocks.items()}
        | {"sums": sums, "M": M, "N": N, "K": K, "shares": shares}
        | {"COLUMNS": run, "STAGES": tile.stages, "GROUP": tile.group, "SHARED": shares > 1, "PROGRAMS": programs}
        | {"STORE_PREACT": preactivations is not None},
        num_warps=CONSUMER_WARPS,
        num_stages=tile.stages,
        traps=loop.lost("hopper/transposed.py"),
        then=None if sums is None else _join_launch(sums, z, preactivations, tile, whole, rest, shares),
        scratch=sums,
    )


def _join_launch(
    sums: torch.Tensor,
    z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None,
    tile: Tile,
    whole: int,
    rest: int,
    shares: int,
) -> Launch:
    """Describe the launch that adds up the shares of the last wave's tiles and applies the gate."""
    (M, N), run = z.shape, tile.rows // 2
    gate, up = preactivations or (z, z)  # never touched without STORE_PREACT
    return Launch(
        kernel=_join_kernel,
        grid=(rest, 2, -(-run // PART)),
        arguments={"sums": sums, "z_ptr": z, "gate_ptr": gate, "up_ptr": up, "M": M, "N": N}
        | {"tiles": whole + rest, "whole": whole, "shares": shares, "COLUMNS": run, "GROUP": tile.group}
        | {"FEATURES": FEATURES, "PART": PART, "STORE_PREACT": preactivations is not None},
        num_warps=4,
        num_stages=1,
    )
