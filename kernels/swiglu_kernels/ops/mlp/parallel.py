"""swiglu_mlp of a rank's part of the intermediate dimension, with what ranks send each other beside the products.

Through memory that the ranks of one host read ("pieces", for ranks that hold a part of the sequence, `by_rows`):

    forward     the others' rows of x are fetched while gate, up and h of the own ones are computed, then of theirs
                h w_down^T of the others' rows first: each part travels while the next is computed; then they are added
    backward    the same fetching of d_out beside d_gate, d_up and h
                dX travels beside all weight gradients, and is added up last

The copy engines move rows, on a stream of their own: the products' kernels have a program on every multiprocessor, and
one more kernel would wait for them or hold them up. Rows lie by rank, so that all of them are one matrix.

By the group's collectives ("beside": several hosts, or all rows on every rank), only the sum of dX is under way while
weight gradients are computed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from swiglu_kernels.ops.gate.formula import PLAIN, check_formula
from swiglu_kernels.ops.glu import block
from swiglu_kernels.ops.glu import operation as glu
from swiglu_kernels.ops.glu.block import SAVED, Chosen, Operands, new
from swiglu_kernels.ops.glu.choice import AUTO, resolve
from swiglu_kernels.ops.mlp.operation import write_gradients
from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.backend import backend_for, capability_of, tl, triton
from swiglu_kernels.runtime.early import starts_early, wait_for_launch_ahead
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.operator import may_overwrite, not_for_dynamo
from swiglu_kernels.runtime.precision import round_to
from swiglu_kernels.runtime.ranks import Group, PeerMemory, copy_beside, join, met, why_not_symmetric
from swiglu_kernels.runtime.shortcuts import plan
from swiglu_kernels.runtime.shortcuts.door import as_matrix, like_leading

Tensor = torch.Tensor
PIECES, BESIDE = "pieces", "beside"
FROM = {(PIECES, False): 4096, (PIECES, True): 16_384, (BESIDE, False): 4096, (BESIDE, True): 4096}
"""Tokens of all ranks from which a way is taken unasked, without and with gradients: as measured on two H200s
(results/nvidia-h200/overlap.txt), whose host takes longer than the GPU for a step of 4,096 tokens in pieces."""
PIECE_ROWS = 512
"""Rows of a rank from which they are a piece of their own; below, all ranks' rows are one piece."""
BLOCK = 2048
"""Elements that a program adds up."""
ONLY_X = "none", "preact"
"""weight_grad and save of a backward that does not read x."""


def way_of(x: Tensor, group: Group, by_rows: bool, overlap: bool | None, aside: str | None) -> tuple[str | None, str]:
    """Return the way of a call, None for collectives before and after it, and why; all ranks of the group ask together.

    Args:
        x: this rank's rows where `by_rows`, else all rows; all ranks have as many.
        group, by_rows: the ranks, and whether each holds its part of the rows.
        overlap: whether one of the ways is taken; None: from `FROM` on.
        aside: why neither can be taken.

    Raises:
        ValueError: overlap is True, and neither can be taken.
    """
    if overlap is False:
        return None, "asked for"
    if torch.compiler.is_compiling() or internals.transforms_active():
        aside = aside or "torch.compile or a transform traces the call"
    elif group.size() == 1 or not x.numel() or backend_for(x) == "torch":
        aside = aside or "there is a single rank, no token, or no kernel for x"
    if aside:
        if overlap:
            raise ValueError(f"overlap: expected None or False, got True: {aside}")
        return None, aside
    why = why_not_symmetric(x, group) if by_rows else "every rank has all rows"
    way, tokens = BESIDE if why else PIECES, x.numel() // x.shape[-1] * (group.size() if by_rows else 1)
    least = FROM[way, torch.is_grad_enabled()]
    if overlap is None and tokens < least:
        return None, f"{tokens} tokens are fewer than {least}"
    return way, why or "ranks read each other's memory"


# Through memory that all ranks read


@triton.jit
def _add_kernel(
    own_ptr, came_ptr, out_ptr, count, RANKS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """BLOCK elements of the sum over ranks, in their order and in fp32; RANK's own are not among those that came."""
    wait_for_launch_ahead(EARLY)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        from_ptr = own_ptr if rank == RANK else came_ptr
        out += tl.load(from_ptr + at, mask=at < count).to(tl.float32)
        came_ptr += count
    tl.store(out_ptr + at, round_to(out, out_ptr.dtype.element_ty), mask=at < count)


def add_launch(own: Tensor, came: Tensor, out: Tensor, ranks: int, rank: int) -> Launch:
    """Describe the launch that adds own [T, H] and what came of the others, [ranks * T, H], into out; contiguous."""
    arguments = {
        "own_ptr": own, "came_ptr": came, "out_ptr": out, "count": out.numel(), "RANKS": ranks, "RANK": rank,
        "BLOCK": BLOCK, "EARLY": starts_early(capability_of(out.device)),
    }  # fmt: skip
    return Launch(_add_kernel, (triton.cdiv(out.numel(), BLOCK),), arguments, num_warps=8, num_stages=1)


SHOWN, CAME = 0, 1
"""The halves of a rank's memory: rows that the others fetch, beside those that were fetched; and what they sent."""


class InPieces:
    """Lets rows of calls of one size travel through memory that all ranks read, which one call uses after the other.

    Each call waits for all ranks twice. Before the first wait a rank writes the rows that it shows, which nobody reads
    any more: all had fetched the last call's before that one's second wait. Behind the first, parts are sent to where
    the last call's were added before it. So nothing else is waited for, whatever sizes calls have or graphs repeat.
    """

    def __init__(self, group: Group, rows: int, shared: PeerMemory) -> None:
        self.shared, self._ranks, self._rank = shared, group.size(), group.rank()
        self.total = rows * self._ranks
        order = [(self._rank + step) % self._ranks for step in range(self._ranks)]  # no two fetch from the same
        self._slots = [(rank, slice(rank * rows, (rank + 1) * rows)) for rank in order]
        self._own = self._slots[0][1]

    @property
    def pieces(self) -> list[slice]:
        """Which rows are computed at a time, the own ones first."""
        whole = self.total < PIECE_ROWS * self._ranks
        return [slice(0, self.total)] if whole else [slot for _, slot in self._slots]

    def gather(self, own: Tensor, keep: bool) -> tuple[Tensor, Iterator[tuple[slice, Tensor]]]:
        """Return all ranks' rows, in memory that the next call overwrites unless they are to be kept; and by piece."""
        whole = shown = self._view(self._rank, SHOWN, own)
        shown[self._own].copy_(own)
        if keep:
            whole = new(own, self.total, own.shape[1])
            copy_beside(self.shared.stream, (whole[self._own], own))  # while ranks wait for each other
        self.shared.wait()
        shows = [(whole[slot], self._view(rank, SHOWN, own)[slot]) for rank, slot in self._slots[1:]]
        fetched = [copy_beside(self.shared.stream, rows) for rows in shows]
        return whole, self._arriving(own, whole, fetched)

    def _arriving(self, own: Tensor, whole: Tensor, fetched: list[Any]) -> Iterator[tuple[slice, Tensor]]:
        first, *others = self.pieces
        if others:
            yield first, own
        for (_, slot), event in zip(self._slots[1:], fetched, strict=True):
            if event is not None:
                event.wait()
            if others:
                yield slot, whole[slot]
        if not others:
            yield first, whole

    def send(self, parts: Tensor, piece: slice) -> None:
        """Let a piece of what has been computed of all ranks' rows travel to those whose rows they are."""
        for rank, slot in self._slots[1:]:
            if piece.start <= slot.start < piece.stop:
                copy_beside(self.shared.stream, (self._view(rank, CAME, parts)[self._own], parts[slot]))

    def summed(self, parts: Tensor | None) -> Any:
        """Return the sum of all ranks' parts of this rank's rows, once they are here; of None, nothing."""
        join(self.shared.stream)
        self.shared.wait()
        if parts is None:
            return None
        own = parts[self._own]
        out = torch.empty_like(own)
        plan.run(add_launch, own, self._view(self._rank, CAME, parts), out, self._ranks, self._rank)
        return out

    def _view(self, rank: int, half: int, like: Tensor) -> Tensor:
        """Return a rank's half as a matrix of all rows, with the columns of another."""
        first, size_bytes = half * (self.shared.size_bytes // 2), self.total * like.shape[1] * like.element_size()
        return self.shared.buffers[rank][first : first + size_bytes].view(like.dtype).view(self.total, like.shape[1])


_largest: dict[tuple[Any, ...], PeerMemory] = {}
"""By group and device: calls of all sizes share memory, which is as large as a power of two."""


def _in_pieces(group: Group, x: Tensor, columns: int) -> InPieces:
    """Return what lets rows like those of x travel, of at most so many columns; all ranks make it together."""
    size_bytes = 2 << max(group.size() * len(x) * columns * x.element_size() - 1, 255).bit_length()
    shared = _largest.get((group, x.device))
    if shared is None or shared.size_bytes < size_bytes:
        shared = _largest[group, x.device] = PeerMemory(group, x.device, size_bytes)
    return InPieces(group, len(x), shared)


class Collectives:
    """Lets rows travel by the group's collectives: all before the products, and sums while others are computed."""

    def __init__(self, group: Group, rows: int, by_rows: bool) -> None:
        self._group, self._by_rows = group, by_rows
        self.total = rows * group.size() if by_rows else rows
        self.pieces = [slice(0, self.total)]
        self._sum: tuple[Any, Any] = None, None

    def gather(self, own: Tensor, keep: bool) -> tuple[Tensor, Iterable[tuple[slice, Tensor]]]:
        """As InPieces's; what it returns is kept."""
        whole = own = own.contiguous()
        if self._by_rows:
            whole = new(own, self.total, own.shape[1])
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, own, group=self._group)
        return whole, [(self.pieces[0], whole)]

    def send(self, parts: Tensor, piece: slice) -> None:
        """Begin to add the ranks' parts."""
        if self._by_rows:
            out = new(parts, self.total // self._group.size(), parts.shape[1])
            scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            self._sum = scatter(out, parts, group=self._group, async_op=True), out
        else:
            self._sum = dist.all_reduce(parts, group=self._group, async_op=True), parts

    def summed(self, parts: Tensor | None) -> Any:
        """As InPieces's."""
        (work, out), self._sum = self._sum, (None, None)
        if work is not None:
            work.wait()
        return out


# The operation


@dataclass(frozen=True)
class Ranks:
    """Who shares a call, and by which way."""

    group: Group
    by_rows: bool
    way: str

    def route(self, x: Tensor, columns: int) -> InPieces | Collectives:
        """Return what lets rows like those of x travel, of at most so many columns."""
        if self.way == BESIDE:
            return Collectives(self.group, len(x), self.by_rows)
        sizes = {"tokens": len(x), "hidden": columns, "dtype": x.dtype}
        make = partial(_in_pieces, self.group, x, columns)
        return met("swiglu_mlp on several ranks", self.group, x.device, sizes, make)


def _forward(route: Any, given: Any, options: Chosen, keeps: bool) -> tuple[Tensor, ...]:
    """Return this rank's result, all rows of x, gate and up; what a backward does not read may be anything."""
    kept, reads_x = keeps and options.save == "preact", (options.weight_grad, options.save) != ONLY_X
    h, *stored = (new(given.x, rows, len(given.w_gate)) for rows in (route.total, *[route.total * kept] * 2))
    whole, pieces = route.gather(given.x, keeps and reads_x)
    for rows, x in pieces:
        pair = (stored[0][rows], stored[1][rows]) if kept else None
        glu.write_forward(x, given.w_gate, given.w_up, h[rows], pair, (given.bias_gate, given.bias_up), options.formula)
    parts = new(given.x, route.total, len(given.w_down))
    for rows in (*route.pieces[1:], route.pieces[0]):
        plan.apply(glu.multiply, h[rows], given.w_down, None, parts[rows])
        route.send(parts, rows)
    return route.summed(parts), whole, *stored


def _backward(
    route: Any, d_out: Tensor, given: Any, preactivations: Any, needs: tuple[bool, ...], options: Chosen, in_place: bool
) -> block.Gradients:
    """Return the gradients of this rank's rows of x, and of its weights and gate's and up's biases."""
    whole, pieces = route.gather(d_out, False)
    results = block.Gradients(whole, given, needs, options, False)
    write_gradients(whole, given, preactivations, results, options, in_place, pieces, route.send)
    results["x"] = route.summed(results["x"] if results.wants("x") else None)
    return results


class _Parallel(torch.autograd.Function):
    """Both, with what is kept between them."""

    @staticmethod
    def forward(ctx: Any, route: Any, options: Chosen, *tensors: Any) -> Tensor:
        out, x, gate, up = _forward(route, Operands(*tensors), options, True)
        ctx.route, ctx.options, ctx.keeps_to_itself = route, options, True
        ctx.save_for_backward(x if (options.weight_grad, options.save) != ONLY_X else None, *tensors[1:], gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        if torch.is_grad_enabled():  # autograd enables gradients in a backward for create_graph alone
            raise RuntimeError("swiglu_mlp on several ranks has first derivatives only: expected create_graph=False")
        d_out = getattr(d_out, "wait", d_out.contiguous)()  # of a collective that may be under way
        saved, needs, options = ctx.saved_tensors, ctx.needs_input_grad[2:], ctx.options
        in_place = may_overwrite(ctx, saved, 2)
        if in_place:
            increment_version(saved[-2:])
        pair = saved[-2].contiguous(), saved[-1].contiguous()  # which a hook may have made otherwise
        made = _backward(ctx.route, d_out.contiguous(), Operands(*saved[:SAVED]), pair, needs, options, in_place)
        wanted = block.wanted_of(needs, options.weight_grad)
        return None, None, *(made[name] if name in wanted else None for name in block.NAMES[:SAVED])


@not_for_dynamo
def swiglu_mlp_parallel(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None, bias_down: None = None, *, ranks: Ranks, **options: Any,
) -> Tensor:  # fmt: skip
    """Return this rank's rows of the sum over ranks of `swiglu_mlp`, each of its part of the intermediate dimension.

    All ranks call it together, in the same order of calls and on one stream; so they do its backward.

    Args:
        x: [..., hidden]; as many rows on all ranks: with `ranks.by_rows` each one's part, else all on each. Autograd's
            gradient of it is summed over ranks.
        w_gate, w_up, w_down, bias_gate, bias_up: as for `swiglu_mlp`, of this rank's part.
        bias_down: None, as it is added once, to the sum.
        ranks: the group, and the way that `way_of` has returned.
        options: of `swiglu_mlp`, without chunk_tokens and accumulate_into_main_grad.

    All ranks' rows of x are kept for the backward, and with save="preact" gate and up. In "pieces", memory that ranks
    share is as large as all rows twice, once for all calls, and the forward has all rows' parts of out beside it. The
    sum over ranks is in their order, fp32, rounded once: the same bits on every run. "beside" has the collective's.

    Raises:
        TypeError, ValueError: as for `swiglu_mlp`; the ranks' sizes differ when they first meet them.
        RuntimeError: a CUDA graph is being recorded, and nothing of these sizes was called before.
    """
    formula = check_formula(*(options.pop(name, default) for name, default in PLAIN.options.items()))
    asked = {"weight_grad": AUTO, "save": AUTO, "input_grad": AUTO} | options
    given = block.check_operands((x, w_gate, w_up, bias_gate, bias_up, w_down, bias_down), block.SEPARATE, True)
    if asked["weight_grad"] == "none":
        given = block.frozen(given)
    given = given._replace(x=as_matrix(x))
    route = ranks.route(given.x, max(given.x.shape[1], len(w_down)))
    weight_grad, save, input_grad = resolve(x=given.x[:1].expand(route.total, -1), intermediate=len(w_gate), **asked)
    if asked["weight_grad"] == AUTO and weight_grad == "triton":
        weight_grad = AUTO  # d_w_down is chosen for itself
    chosen = Chosen(weight_grad if block.trains(given) else "none", save, input_grad, formula.numbers)
    if block.needs_backward(*given):
        return like_leading(_Parallel.apply(route, chosen, *given[:SAVED]), x)
    return like_leading(_forward(route, given, chosen, False)[0], x)
