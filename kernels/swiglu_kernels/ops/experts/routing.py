"""Routing: the order in which tokens meet their experts, made on the GPU, and the two passes over rows in that order.

A pair is a token and one of its k slots, number token * k + slot. The rows are the pairs sorted by expert, stable, and
each expert's rows begin at a multiple of tile_rows: a tile of so many rows has one expert, and what is left of an
expert's last tile is padding. How many rows there are is known to the GPU alone; buffers have `capacity` rows. Nothing
here waits for the GPU, adds with atomics or depends on the order in which programs run.

The matrix products on these rows, `portable_experts.py` and any other set of kernels, are a module of these functions:

    gather(x, routing)                                          what the products read rows of tokens from: x itself,
                                                                or a sorted copy of it; padding is zero as far as a
                                                                multiple of ZEROS
    gate_up(x, w_gate_up, routing, bias, formula, interleaved,  -> h [P, I] and pre [P, 2I], None unless wanted
            stores)
    down(h, w_down, routing, bias, out)                         -> y [P, H]
    down_backward(dy, w_down, pre, weights, routing, formula,   -> d_pre [P, 2I], wh [P, I] = weight * h or None, and
                  interleaved, stores)                          dots [parts, P] fp32: the sum over the parts is the
                                                                product h (dy w_down) of a row
    rows_times(d_pre, w_gate_up, routing)                       -> dx in sorted rows [P, H]
    weight_grad(a, b, routing, like, with_sums)                 -> a^T b over each expert's rows, [E, M, N], strides of
                                                                `like`, and the sums of a over them, [E, M], or None
                                                                where they are not wanted or cost more than by
                                                                themselves; zeros for an expert without rows. An
                                                                operand with T rows is one of tokens

x and dy of the others are what `gather` of that module returned. weights are [T, k], w_gate_up is [E, 2I, H], w_down
[E, H, I], their biases are [E, 2I] and [E, H] or None. pre and d_pre are ordered as the rows of w_gate_up, interleaved
or in halves: the products with it need not know. Rows of padding hold anything finite in h and y and zeros in d_pre and
wh as far as a multiple of ZEROS; beyond that they hold anything, NaN as well, and only their like is made of them. Rows
behind the last tile in use are neither written nor read. `stores` says of each output whether it is wanted, or is
where it is written: d_pre may be pre. A product of a part of the rows (`split`) writes that part of its outputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swiglu_kernels.ops.gate.arithmetic import multiple_of, unit_of
from swiglu_kernels.runtime.backend import Capability, capability_of, tl, triton
from swiglu_kernels.runtime.early import starts_early, wait_for_launch_ahead
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.precision import round_to
from swiglu_kernels.runtime.shortcuts.plan import run

ALONE = 4096
"""Up to so many pairs the routing is one launch, whose programs read all pairs each."""
READ = 1024
"""Pairs that a program reads at once, where it reads all; 256 if there are no more."""
SHARE = 32
"""Pairs that a program places then."""
CHUNK, PART = 256, 64
"""Pairs that a program places where there are more, and those that it places at once."""
ELEMENTS = 8192
"""Of the tiles that one program works in."""
ZEROS = 64
"""Rows of an expert's padding are written up to a multiple of it."""
SOME = 8
"""Experts whose pairs one program adds up over all chunks."""
OF_TOKENS = ("pairs", "tiles", "chunks")
"""Integers for which no kernel is compiled anew: what they are divisible by changes no instruction."""


class Routing(NamedTuple):
    """Where each pair's row lies; all tensors are int32, and `tile_expert` says how many tiles there are."""

    pair: Tensor
    """[P] the pair of each row, -1 for padding and behind the last row."""
    row: Tensor
    """[T k] the row of each pair, -1 where its index names no expert."""
    tile_expert: Tensor
    """[P / tile_rows] the expert of each tile, -1 behind the last."""
    starts: Tensor
    """[E + 1] the first row of each expert; the last is the number of rows in use. Of a part, which has none, [E]."""
    counts: Tensor
    """[E] rows of each expert, padding not counted."""
    slots: int
    """k, the experts of a token."""
    tile_rows: int

    @property
    def tokens(self) -> int:
        """T."""
        return self.row.shape[0] // self.slots


Store = Tensor | bool | None
"""Where an output is written, or whether it is made; None is as False."""


def stored(store: Store, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor | None:
    """Return where an output is written, which is allocated if need be, or None where it is not wanted."""
    made = like.new_empty(shape, dtype=dtype) if store is True else store
    return made if isinstance(made, Tensor) else None


def capacity(pairs: int, experts: int, tile_rows: int) -> int:
    """Return the most rows that so many pairs can take: all experts but one have a tile that is not full."""
    return tile_rows * (-(-pairs // tile_rows) + min(experts, pairs))


@triton.jit
def _experts_of(index_ptr, first, last, experts, PAIRS: tl.constexpr):
    """Return the numbers of PAIRS pairs, the expert of each or 0, and whether it has one."""
    pair = first + tl.arange(0, PAIRS)
    index = tl.load(index_ptr + pair, mask=pair < last, other=-1)
    routed = (index >= 0) & (index < experts)
    return pair, tl.where(routed, index, 0).to(tl.int32), routed


@triton.jit
def _starts_of(counts, TILE_ROWS: tl.constexpr):
    """Return the first row of each expert, and the first behind its tiles."""
    padded = tl.cdiv(counts, TILE_ROWS) * TILE_ROWS
    ends = tl.cumsum(padded, 0)
    return ends - padded, ends


@triton.jit
def _place(index_ptr, pair_ptr, row_ptr, next_row, first, last, experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Write the rows of PAIRS pairs, and the pairs of these rows; next_row is each expert's first that is free.

    Returns next_row behind these pairs.
    """
    pair, expert, routed = _experts_of(index_ptr, first, last, experts, PAIRS)
    before = (expert[:, None] == expert[None, :]) & routed[None, :] & (pair[None, :] < pair[:, None])
    row = tl.gather(next_row, expert, 0) + tl.sum(before.to(tl.int32), 1)
    tl.store(row_ptr + pair, tl.where(routed, row, -1), mask=pair < last)
    tl.store(pair_ptr + row, pair, mask=routed)
    return next_row + tl.histogram(expert, EXPERTS, mask=routed)


@triton.jit
def _place_rest(pair_ptr, tile_expert_ptr, starts_ptr, counts_ptr, counts, starts, ends, experts, tiles,
                TILES: tl.constexpr, TILE_ROWS: tl.constexpr, EXPERTS: tl.constexpr):  # fmt: skip
    """Write this program's share of the tiles' experts and of the rows without a pair, and the first what experts have.

    counts, starts, ends: of each expert. counts_ptr: None if the counts are written.
    """
    expert = tl.arange(0, EXPERTS)
    known = expert < experts
    if tl.program_id(0) == 0:
        if counts_ptr is not None:
            tl.store(counts_ptr + expert, counts, mask=known)
        tl.store(starts_ptr + expert, starts, mask=known)
        tl.store(starts_ptr + experts, tl.max(ends, 0))
    for first in range(tl.program_id(0) * TILES, tiles, tl.num_programs(0) * TILES):
        tile = first + tl.arange(0, TILES)
        of_tile = tl.sum(((ends[None, :] <= tile[:, None] * TILE_ROWS) & known[None, :]).to(tl.int32), 1)
        used = tl.sum(tl.where(of_tile[:, None] == expert[None, :], (starts + counts)[None, :], 0), 1)
        used = tl.where(of_tile < experts, used, 0)
        tl.store(tile_expert_ptr + tile, tl.where(of_tile < experts, of_tile, -1), mask=tile < tiles)
        row = tile[:, None] * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :]
        rest = (row >= used[:, None]) & (tile < tiles)[:, None]
        tl.store(pair_ptr + row, tl.full(row.shape, -1, tl.int32), mask=rest)


@triton.jit(do_not_specialize=OF_TOKENS)
def _route_kernel(index_ptr, pair_ptr, row_ptr, tile_expert_ptr, starts_ptr, counts_ptr, pairs, experts, tiles,
                  READ: tl.constexpr, SHARE: tl.constexpr, TILES: tl.constexpr, TILE_ROWS: tl.constexpr,
                  EXPERTS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """All in one launch: a program counts all pairs, and those before its own SHARE."""
    wait_for_launch_ahead(EARLY)
    mine = tl.program_id(0) * SHARE
    counts, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, pairs, READ):
        pair, expert, routed = _experts_of(index_ptr, first, pairs, experts, READ)
        counts += tl.histogram(expert, EXPERTS, mask=routed)
        before += tl.histogram(expert, EXPERTS, mask=routed & (pair < mine))
    starts, ends = _starts_of(counts, TILE_ROWS)
    _place(index_ptr, pair_ptr, row_ptr, starts + before, mine, pairs, experts, SHARE, EXPERTS)
    _place_rest(pair_ptr, tile_expert_ptr, starts_ptr, counts_ptr, counts, starts, ends, experts, tiles, TILES,
                TILE_ROWS, EXPERTS)  # fmt: skip


@triton.jit(do_not_specialize=OF_TOKENS)
def _count_kernel(index_ptr, chunk_ptr, pairs, experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
                  EARLY: tl.constexpr):  # fmt: skip
    """Write how many pairs of each expert a chunk has."""
    wait_for_launch_ahead(EARLY)
    _, of_pair, routed = _experts_of(index_ptr, tl.program_id(0) * CHUNK, pairs, experts, CHUNK)
    expert = tl.arange(0, EXPERTS)
    found = tl.histogram(of_pair, EXPERTS, mask=routed)
    tl.store(chunk_ptr + tl.program_id(0) * experts + expert, found, mask=expert < experts)


@triton.jit(do_not_specialize=OF_TOKENS)
def _sum_kernel(chunk_ptr, counts_ptr, experts, chunks, CHUNKS: tl.constexpr, SOME: tl.constexpr, EARLY: tl.constexpr):
    """Turn the counts of chunks into those of the chunks before, and count the pairs of SOME experts."""
    wait_for_launch_ahead(EARLY)
    expert = tl.program_id(0) * SOME + tl.arange(0, SOME)
    known = expert < experts
    counts = tl.zeros((SOME,), dtype=tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        inside = (chunk < chunks)[:, None] & known[None, :]
        at = chunk_ptr + chunk[:, None] * experts + expert[None, :]
        found = tl.load(at, mask=inside, other=0)
        tl.store(at, counts[None, :] + tl.cumsum(found, 0) - found, mask=inside)
        counts += tl.sum(found, 0)
    tl.store(counts_ptr + expert, counts, mask=known)


@triton.jit(do_not_specialize=OF_TOKENS)
def _place_kernel(index_ptr, chunk_ptr, pair_ptr, row_ptr, tile_expert_ptr, starts_ptr, counts_ptr, pairs, experts,
                  tiles, CHUNK: tl.constexpr, PART: tl.constexpr, TILES: tl.constexpr, TILE_ROWS: tl.constexpr,
                  EXPERTS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Place a chunk's pairs behind those of the chunks before."""
    wait_for_launch_ahead(EARLY)
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + expert, mask=expert < experts, other=0)
    before = tl.load(chunk_ptr + tl.program_id(0) * experts + expert, mask=expert < experts, other=0)
    starts, ends = _starts_of(counts, TILE_ROWS)
    next_row, mine = starts + before, tl.program_id(0) * CHUNK
    for first in range(mine, tl.minimum(mine + CHUNK, pairs), PART):
        next_row = _place(index_ptr, pair_ptr, row_ptr, next_row, first, pairs, experts, PART, EXPERTS)
    _place_rest(pair_ptr, tile_expert_ptr, starts_ptr, None, counts, starts, ends, experts, tiles, TILES,
                TILE_ROWS, EXPERTS)  # fmt: skip


def route_launch(
    index: Tensor, pair: Tensor, row: Tensor, tile_expert: Tensor, starts: Tensor,
    counts: Tensor, tile_rows: int, capability: Capability | None = None,
) -> Launch:  # fmt: skip
    """Describe the launches that write a routing, of `index` [T, k], contiguous.

    capability: of the GPU; None for that of the tensors' device. So it is for the others.
    """
    early = {"EARLY": starts_early(capability or capability_of(index.device))}
    pairs, experts, tiles = index.numel(), counts.shape[0], tile_expert.shape[0]
    wide = max(32, triton.next_power_of_2(experts))
    of_pairs = {"index_ptr": index, "pairs": pairs, "experts": experts, "EXPERTS": wide} | early
    of_rows = of_pairs | {
        "pair_ptr": pair, "row_ptr": row, "tile_expert_ptr": tile_expert, "starts_ptr": starts, "counts_ptr": counts,
        "tiles": tiles, "TILES": max(1, ELEMENTS // 4 // max(wide, tile_rows)), "TILE_ROWS": tile_rows,
    }  # fmt: skip
    if pairs <= ALONE:
        sizes = {"READ": READ if pairs > READ // 4 else READ // 4, "SHARE": SHARE}
        programs = max(1, triton.cdiv(pairs, SHARE))
        return Launch(_route_kernel, (programs,), of_rows | sizes, num_warps=4, num_stages=1)
    chunks = triton.cdiv(pairs, CHUNK)
    chunk = index.new_empty((chunks, experts), dtype=torch.int32)
    placed = of_rows | {"chunk_ptr": chunk, "CHUNK": CHUNK, "PART": PART}
    third = Launch(_place_kernel, (chunks,), placed, num_warps=4, num_stages=1)
    sums = {"chunk_ptr": chunk, "counts_ptr": counts, "experts": experts, "chunks": chunks, "SOME": SOME} | early
    sums["CHUNKS"] = min(ELEMENTS // SOME, triton.next_power_of_2(chunks))
    second = Launch(_sum_kernel, (triton.cdiv(experts, SOME),), sums, num_warps=8, num_stages=1, then=third)
    counted = of_pairs | {"chunk_ptr": chunk, "CHUNK": CHUNK}
    return Launch(_count_kernel, (chunks,), counted, num_warps=4, num_stages=1, then=second, scratch=chunk)


def new_routing(index: Tensor, experts: int, tile_rows: int) -> Routing:
    """Allocate the routing of `index` [T, k]."""
    pairs = index.shape[0] * index.shape[1]
    rows = capacity(pairs, experts, tile_rows)
    sizes = (rows, pairs, rows // tile_rows, experts + 1, experts)
    pair, row, tile_expert, starts, counts = (index.new_empty(size, dtype=torch.int32) for size in sizes)
    return Routing(pair, row, tile_expert, starts, counts, index.shape[1], tile_rows)


def route(index: Tensor, experts: int, tile_rows: int) -> Routing:
    """Sort the pairs of `index` [T, k], any integer dtype, contiguous, by expert.

    One outside of 0 to experts - 1 names none: its pair has no row. tile_rows is a power of two.
    """
    routing = new_routing(index, experts, tile_rows)
    if experts:
        run(route_launch, index, *routing[:5], tile_rows)
    return routing


@triton.jit(do_not_specialize=("first", "tiles"))
def _split_kernel(
    pair_ptr, starts_ptr, counts_ptr, early_ptr, late_ptr, late_starts_ptr, early_counts_ptr, late_counts_ptr,
    first, tiles, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The tiles of one expert; the last program's are those that none has."""
    wait_for_launch_ahead(EARLY)
    expert, known = tl.program_id(0), tl.program_id(0) < tl.num_programs(0) - 1
    start = tl.load(starts_ptr + expert)
    count = tl.load(counts_ptr + expert, mask=as_mask(known), other=0)
    of_tile = tl.where(known, expert, -1)
    begin = start // TILE_ROWS
    end = tl.where(known, begin + tl.cdiv(count, TILE_ROWS), tiles)
    rows = tl.full([], 0, tl.int32)
    for at in range(begin, end, BLOCK):
        tile = at + tl.arange(0, BLOCK)
        last = tl.load(pair_ptr + (tile + 1).to(tl.int64) * TILE_ROWS - 1, mask=tile < end, other=-1)
        early = (last >= 0) & (last < first)  # pairs are sorted: so are all before
        tl.store(early_ptr + tile, tl.where(early, of_tile, -1), mask=tile < end)
        tl.store(late_ptr + tile, tl.where(early, -1, of_tile), mask=tile < end)
        rows += tl.sum(early.to(tl.int32), 0) * TILE_ROWS
    if known:
        tl.store(late_starts_ptr + expert, start + rows)
        tl.store(early_counts_ptr + expert, rows)
        tl.store(late_counts_ptr + expert, count - rows)


def split_launch(
    pair: Tensor, starts: Tensor, counts: Tensor, early: tuple[Tensor, Tensor],
    late: tuple[Tensor, Tensor, Tensor], first: int, capability: Capability | None = None,
) -> Launch:  # fmt: skip
    """Describe the launch that writes two parts: the tiles' experts and the counts of each, and starts of the late one.

    Early tiles have none but pairs before `first`.
    """
    tiles, (early_tiles, early_counts), (late_tiles, late_starts, late_counts) = early[0].shape[0], early, late
    arguments = {
        "pair_ptr": pair, "starts_ptr": starts, "counts_ptr": counts, "early_ptr": early_tiles, "late_ptr": late_tiles,
        "late_starts_ptr": late_starts, "early_counts_ptr": early_counts, "late_counts_ptr": late_counts,
        "first": first, "tiles": tiles, "TILE_ROWS": pair.shape[0] // tiles, "BLOCK": 128,
        "EARLY": starts_early(capability or capability_of(pair.device)),
    }  # fmt: skip
    return Launch(_split_kernel, (starts.shape[0],), arguments, num_warps=4, num_stages=1)


def split(routing: Routing, tokens: int) -> tuple[Routing, Routing]:
    """Return two parts of a routing: the tiles whose rows are all of the first `tokens`, and the other tiles.

    An expert's rows are in the order of tokens: each part of them is one piece, and no tile is in both parts.
    """
    starts, (tiles, late_tiles) = routing.starts[:-1], (torch.empty_like(routing.tile_expert) for _ in range(2))
    counts, late_starts, late_counts = (torch.empty_like(routing.counts) for _ in range(3))
    outs = (tiles, counts), (late_tiles, late_starts, late_counts)
    run(split_launch, routing.pair, routing.starts, routing.counts, *outs, tokens * routing.slots)
    early = routing._replace(tile_expert=tiles, starts=starts, counts=counts)
    return early, routing._replace(tile_expert=late_tiles, starts=late_starts, counts=late_counts)


@triton.jit
def as_mask(condition):
    """Return a scalar condition to combine with masks.

    By constants: the interpreter spreads a comparison itself as integers, which that of Triton 3.9 takes for no mask.
    """
    return tl.where(condition, True, False)


@triton.jit(do_not_specialize=("tokens",))
def _gather_kernel(
    x_ptr, out_ptr, row_ptr, starts_ptr, counts_ptr, tokens, columns, x_row, x_column,
    SLOTS: tl.constexpr, ZEROS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    columns, x_row = multiple_of(columns, UNIT), multiple_of(x_row, UNIT)
    wait_for_launch_ahead(EARLY)
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    if program < tokens:
        x = tl.load(x_ptr + program.to(tl.int64) * x_row + column.to(tl.int64) * x_column, mask=inside)
        for slot in tl.static_range(SLOTS):
            row = tl.load(row_ptr + program.to(tl.int64) * SLOTS + slot).to(tl.int64)
            tl.store(out_ptr + row * columns + column, x, mask=inside & as_mask(row >= 0))
    else:
        count = tl.load(counts_ptr + program - tokens)
        first = (tl.load(starts_ptr + program - tokens) + count).to(tl.int64)
        zero = tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty)
        for more in range(tl.cdiv(count, ZEROS) * ZEROS - count):
            tl.store(out_ptr + (first + more) * columns + column, zero, mask=inside)


def gather_launch(
    x: Tensor, out: Tensor, row: Tensor, starts: Tensor, counts: Tensor, slots: int,
    tile_rows: int, capability: Capability | None = None,
) -> Launch:  # fmt: skip
    """Describe the launch that writes the sorted copy [P, H], contiguous, of x [T, H], any strides.

    A program reads a token once and writes all of its rows; one for each expert writes zeros.
    """
    block = min(1024, triton.next_power_of_2(max(x.shape[1], 1)))
    arguments = {
        "x_ptr": x, "out_ptr": out, "row_ptr": row, "starts_ptr": starts, "counts_ptr": counts,
        "tokens": x.shape[0], "columns": x.shape[1], "x_row": x.stride(0), "x_column": x.stride(1),
        "SLOTS": slots, "ZEROS": min(ZEROS, tile_rows), "BLOCK": block,
        "EARLY": starts_early(capability or capability_of(x.device)), "UNIT": unit_of(x.shape[1], x.stride(0)),
    }  # fmt: skip
    grid = (x.shape[0] + counts.shape[0], triton.cdiv(x.shape[1], block))
    return Launch(_gather_kernel, grid, arguments, num_warps=4, num_stages=1)


def gather(x: Tensor, routing: Routing) -> Tensor:
    """Return x [T, H] in sorted rows [P, H]; padding is zero as far as a multiple of ZEROS, and then not written."""
    out = x.new_empty((routing.pair.shape[0], x.shape[1]))
    run(gather_launch, x, out, *routing[1:2], *routing[3:])
    return out


@triton.jit
def _combine_kernel(
    y_ptr, weights_ptr, row_ptr, out_ptr, columns, slots, weights_token, weights_slot, BLOCK: tl.constexpr,
    EARLY: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token; with four tokens a program 87 us in place of 76 (H200, 8192 tokens, 8 x 2048)."""
    columns = multiple_of(columns, UNIT)
    wait_for_launch_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    out = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(slots):
        row = tl.load(row_ptr + token * slots + slot).to(tl.int64)
        routed = as_mask(row >= 0)
        y = tl.load(y_ptr + row * columns + column, mask=inside & routed, other=0.0).to(tl.float32)
        if weights_ptr is not None:  # masked as well: the weight of a pair without a row may be anything
            weight = tl.load(weights_ptr + token * weights_token + slot * weights_slot, mask=routed, other=0.0)
            y *= weight.to(tl.float32)
        out += y
    tl.store(out_ptr + token * columns + column, round_to(out, out_ptr.dtype.element_ty), mask=inside)


def combine_launch(
    y: Tensor, weights: Tensor | None, row: Tensor, out: Tensor, slots: int, capability: Capability | None = None
) -> Launch:
    """Describe the launch that writes out [T, H], each token's sum of its rows of y [P, H], both contiguous."""
    block = min(1024, triton.next_power_of_2(max(y.shape[1], 1)))
    token, slot = (None, None) if weights is None else weights.stride()
    arguments = {
        "y_ptr": y, "weights_ptr": weights, "row_ptr": row, "out_ptr": out, "columns": y.shape[1], "slots": slots,
        "weights_token": token, "weights_slot": slot,
        "BLOCK": block, "EARLY": starts_early(capability or capability_of(y.device)), "UNIT": unit_of(y.shape[1]),
    }  # fmt: skip
    grid = (out.shape[0], triton.cdiv(y.shape[1], block))
    return Launch(_combine_kernel, grid, arguments, num_warps=4, num_stages=1)


def combine(
    y: Tensor, weights: Tensor | None, routing: Routing, out: Tensor | None = None, tokens: slice | None = None
) -> Tensor:
    """Return [T, H]: fp32 sums of each token's rows of y [P, H] in the order of slots, by its weights [T, k] or 1.

    out: where they are written, if not to a new tensor. tokens: of which they are written, if not of all.
    """
    if out is None:
        out = y.new_empty((routing.tokens, y.shape[1]))
    row, written = routing.row, out
    if tokens is not None:
        row, written = row.unflatten(0, (-1, routing.slots))[tokens].flatten(), out[tokens]
        weights = None if weights is None else weights[tokens]
    run(combine_launch, y, weights, row, written, routing.slots)
    return out
