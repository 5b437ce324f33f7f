"""swiglu_experts_parallel: experts that lie on several ranks, for tokens that do as well.

A token's row travels once to each rank that has any of its experts, with the ids and routing weights (`scatter`).
There `swiglu_experts` skips the ids of other ranks and adds up its own experts' results, of which one row for each
(token, rank) comes back (`gather`). The gradient of either is the other.

With symmetric memory, each rank copies what the others may want into memory that all can read (`exchange.py`), they
wait for each other on the GPU, and read. A token's row lies at token in its rank's block wherever it is routed: nothing
is counted, nothing waits for the host, and buffers have rows for all ranks' tokens. With all-to-all, the host waits
once for the counts, and buffers have the rows that came.

Where `overlap_pays`, copy engines read: no kernel can run beside products that fill every multiprocessor.

    forward     products of gate and up with this rank's tokens while the others' come; then all that the others'
                tokens need; and the down product of this rank's tokens while results travel
    backward    the product with d_out of this rank's tokens while the others' come; both weights' gradients while dX
                and the gradients of the routing weights travel
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from swiglu_kernels.ops.experts import exchange
from swiglu_kernels.ops.experts.exchange import RankSizes
from swiglu_kernels.ops.experts.operation import swiglu_experts, under_way
from swiglu_kernels.ops.fp8.operation import Operand
from swiglu_kernels.runtime import autocast
from swiglu_kernels.runtime.checks import check_experts, check_option
from swiglu_kernels.runtime.operator import not_for_dynamo
from swiglu_kernels.runtime.ranks import Group, PeerMemory, copy_beside, group_of, join, met, why_not_symmetric
from swiglu_kernels.runtime.shortcuts.door import as_matrix, like_leading
from swiglu_kernels.runtime.shortcuts.plan import run

Tensor = torch.Tensor
SYMMETRIC, ALL_TO_ALL = "symmetric", "all-to-all"
ALIGN = 256
"""Bytes: where each part of the memory that all ranks read begins."""
LEAST_BYTES = 32 << 20
"""Of other ranks' rows, from which on products and exchanges overlap: on two H200s 16 MiB gain nothing, 64 MiB 14% of
a forward and 9% of a step (results/nvidia-h200/overlap.txt)."""
BALANCE = 1000
"""Operations of a GPU in the time of half a byte that arrives: 600 TFLOP/s and 300 GB/s, of an H200 with NVLink."""
Dtypes = tuple[torch.dtype, torch.dtype]
"""Of x and of the routing weights."""


class _Travel(torch.autograd.Function):
    """What a route does one way, whose gradients it takes the other way."""

    @staticmethod
    def forward(ctx: Any, route: Any, way: str, rows: Tensor, values: Tensor | None) -> Any:
        ctx.route, ctx.back = route, "gather" if way == "scatter" else "scatter"
        return getattr(route, way)(rows, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, values: Tensor | None) -> Any:
        gradients = rows.contiguous(), None if values is None else values.contiguous()
        return None, None, *getattr(ctx.route, ctx.back)(*gradients)


# Symmetric memory


class Shared(PeerMemory):
    """Memory of a group for calls of one kind, of which every rank can read every other's."""

    def __init__(self, group: Group, device: torch.device, size: RankSizes, columns: int, dtypes: Dtypes) -> None:
        """Allocate it, which all ranks do together."""
        (rows, values), slots = dtypes, size.slots
        parts = {
            "tokens": (rows, size.most, columns), "ids": (torch.int32, size.most, slots),
            "values": (values, size.most, slots), "results": (rows, size.rows, columns),
            "results' values": (values, size.rows, slots),
        }  # fmt: skip
        offsets = [0]
        for dtype, height, width in parts.values():
            offsets.append(offsets[-1] + -(-height * width * dtype.itemsize // ALIGN) * ALIGN)
        super().__init__(group, device, offsets[-1])
        self.size = size
        self.of_ranks: dict[str, list[Tensor]] = {}
        self.own: dict[str, Tensor] = {}
        self.tables: dict[str, Tensor] = {}
        """By part: it on each rank, where this rank writes, and its address on each, int64 [ranks]."""
        for (name, (dtype, height, width)), offset in zip(parts.items(), offsets, strict=False):
            here = slice(offset, offset + height * width * dtype.itemsize)
            self.of_ranks[name] = found = [memory[here].view(dtype) for memory in self.buffers]
            self.own[name] = found[size.rank]
            self.tables[name] = torch.tensor([part.data_ptr() for part in found], device=device)
        self._side, self.recorded = "", False

    def begin(self, side: str) -> None:
        """Wait until no rank reads what is to be written, "tokens" or "results".

        Between exchanges of both sides in turn, the wait in each is enough for that. What a graph repeats, nobody here
        sees: from the first recording on, every exchange waits before it as well.
        """
        self.recorded = self.recorded or torch.cuda.is_current_stream_capturing()
        if self.recorded or self._side in ("", side):
            self.wait()
        self._side = side


class Symmetric:
    """Lets the rows of one call travel through memory that all ranks read.

    Where it overlaps with products it is an `Exchange`, and copies whole blocks of rows, wanted or not.
    """

    def __init__(self, index: Tensor, shared: Shared, overlaps: bool) -> None:
        self._index, self._shared, self.overlaps = index, shared, overlaps
        self.ids, self.first = index.new_empty(0, dtype=torch.int32), shared.size.most
        self._copying = False
        self._landed: Tensor | None = None

    def scatter(self, rows: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return all ranks' rows and values by blocks of ranks, but of rows that no expert here has, anything.

        Where it overlaps, rows of other ranks are there after `wait`.
        """
        shared, size, own = self._shared, self._shared.size, self._shared.own
        came = rows.new_empty(size.rows, rows.shape[1])
        beside = None if values is None else values.new_empty(size.rows, size.slots)
        into, of_values = (None if values is None else part["values"] for part in (own, shared.tables))
        shared.begin("tokens")
        published = rows, self._index, values, own["tokens"], own["ids"], into
        run(exchange.copy_launch, exchange.PUBLISH, rows.shape[1], *published, size)
        shared.wait()
        if self.overlaps:
            self._begin_copies("tokens", came)
        kind, ids, kept = exchange.FETCH_AGAIN, self.ids, None
        if not len(ids):
            self.ids = kept = ids.new_empty(size.rows, size.slots)
            kind, ids = exchange.FETCH, shared.tables["ids"]
        kind += exchange.OWN if self.overlaps else ""
        fetched = shared.tables["tokens"], ids, of_values, came, kept, beside
        run(exchange.copy_launch, kind, rows.shape[1], *fetched, size)
        return came, beside

    def _begin_copies(self, part: str, into: Tensor) -> None:
        """Let copy engines fill all blocks of a tensor but this rank's with rows for it that the other ranks have."""
        size, block, copies = self._shared.size, self._shared.size.most * into.shape[1], []
        for number in range(1, size.ranks):
            rank = (size.rank + number) % size.ranks
            begin = 0 if part == "tokens" else size.block(size.rank, rank) * block
            theirs = self._shared.of_ranks[part][rank][begin:][:block]
            copies.append((into.view(-1)[number * block :][:block], theirs))
        copy_beside(self._shared.stream, *copies)
        self._copying = True

    def wait(self) -> None:
        """Let what is launched from now on wait for copies."""
        if self._copying:
            join(self._shared.stream)
        self._copying = False

    def results(self, columns: int) -> Tensor:
        """Return where results are written that others read, once they have read those of before."""
        self._shared.begin("results")
        return self._shared.own["results"][: self._shared.size.rows * columns].view(-1, columns)

    def send(self, results: Tensor, values: Tensor | None = None) -> None:
        """Let results travel, which lie where `results` said, and values."""
        if values is not None:
            self._shared.own["results' values"].copy_(values.view(-1))
        self._shared.wait()
        landed = self._landed = torch.empty_like(results)
        self._begin_copies("results", landed)

    def gather(self, rows: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return for each token of this rank the sum of what the ranks have for it."""
        shared, own = self._shared, self._shared.own
        out, beside = (None if of is None else of.new_empty(len(self._index), of.shape[1]) for of in (rows, values))
        into, of_values = (None if values is None else part["results' values"] for part in (own, shared.tables))
        self.wait()
        table, self._landed = self._landed, None
        if table is None:
            table = shared.tables["results"]
            shared.begin("results")
            returned = rows, self.ids, values, own["results"], None, into
            run(exchange.copy_launch, exchange.RETURN, rows.shape[1], *returned, shared.size)
            shared.wait()
        run(exchange.add_launch, rows, table, self._index, values, of_values, out, beside, shared.size)
        return out, beside  # type: ignore[return-value]


def overlap_pays(size: RankSizes, hidden: int, intermediate: int, dtype: torch.dtype) -> bool:
    """Tell whether products are to run while rows travel.

    Copy engines move whole blocks, of which 1 - (1 - 1 / ranks)^k is wanted with even routing: what they move for
    nothing must take less time than the products of gate and up with a rank's own tokens, which hide it.
    """
    others = size.ranks - 1
    unwanted = others * (others / size.ranks) ** size.slots
    arriving = others * size.most * hidden * dtype.itemsize
    return arriving >= LEAST_BYTES and unwanted * size.ranks * BALANCE <= size.slots * intermediate


def _shared_for(group: Group, device: torch.device, size: RankSizes, columns: int, dtypes: Dtypes) -> Shared:
    """Return the memory of such calls."""
    of_ranks = {"experts": size.experts, "tokens": size.most, "k": size.slots, "hidden": columns, "dtypes": dtypes}
    make = partial(Shared, group, device, size, columns, dtypes)
    advice = "; where their tokens differ, pass tokens_per_rank, the most of any rank"
    return met("swiglu_experts_parallel", group, device, of_ranks, make, advice)


# All-to-all


class AllToAll:
    """Lets the rows of one call travel by all-to-all; the host waits once for the counts."""

    def __init__(self, index: Tensor, group: Group, experts: int) -> None:
        self._group, ranks = group, group.size()
        owner = torch.where((index >= 0) & (index < experts * ranks), index // experts, -1)
        wanted = (owner == torch.arange(ranks, device=index.device)[:, None, None]).any(-1)  # [ranks, tokens]
        counts = wanted.sum(1)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        self._sent, self._received = torch.stack([counts, coming]).tolist()
        order = wanted.flatten().logical_not().to(torch.uint8).argsort(stable=True)[: sum(self._sent)]
        self._token, self._tokens = order % max(len(index), 1), len(index)
        ids = self._moved(index[self._token].to(torch.int64), False) - group.rank() * experts
        self.ids = torch.where((ids >= 0) & (ids < experts), ids, -1).to(torch.int32)

    def scatter(self, rows: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the rows and values that came, in the order of ranks and then of tokens."""
        came = self._moved(rows[self._token], False)
        return came, None if values is None else self._moved(values[self._token], False)

    def gather(self, rows: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return for each token of this rank the sum of what the ranks have for it."""
        return self._added(rows), None if values is None else self._added(values)

    def _moved(self, rows: Tensor, back: bool) -> Tensor:
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self._group)
        return found

    def _added(self, rows: Tensor) -> Tensor:
        wide = rows.dtype if rows.dtype == torch.float64 else torch.float32
        out = rows.new_zeros(self._tokens, rows.shape[1], dtype=wide)
        came = self._moved(rows, True)
        for token, part in zip(self._token.split(self._sent), came.split(self._sent), strict=True):
            out.index_add_(0, token, part.to(wide))  # a rank has a token once: the order of additions is that of ranks
        return out.to(rows.dtype)


# The operation


def transport_for(x: Tensor, group: Group, transport: str | None = None) -> tuple[str, str | None]:
    """Return how rows of x travel between the ranks of a group, and why not through symmetric memory, or None."""
    if transport is not None:
        check_option("transport", transport, (SYMMETRIC, ALL_TO_ALL))
    why = "asked for" if transport == ALL_TO_ALL else why_not_symmetric(x, group)
    if transport == SYMMETRIC and why:
        raise ValueError(f"transport: expected {ALL_TO_ALL!r} or None, got {SYMMETRIC!r}: {why}")
    return ALL_TO_ALL if why else SYMMETRIC, why


@not_for_dynamo
def swiglu_experts_parallel(
    x: Tensor, w_gate_up: Operand, w_down: Operand, top_k_index: Tensor, top_k_weights: Tensor,
    group: Group | DeviceMesh | None = None, *, tokens_per_rank: int | None = None, transport: str | None = None,
    shared: Callable[[Tensor], Tensor] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Return `swiglu_experts` of this rank's tokens where each of n ranks holds its part of the experts.

    All ranks of the group call it together, in the same order of calls and on one stream; so they do its backward.

    Args:
        x: [..., hidden], this rank's tokens; hidden size, k and dtypes are the same on all ranks.
        w_gate_up, w_down: [experts / n, 2 * intermediate, hidden] and [experts / n, hidden_out, intermediate], experts
            rank * experts / n and on. Their gradients are sums over all ranks' tokens.
        top_k_index: [..., k], any integer dtype: of all ranks' experts, 0 to experts - 1; any other is skipped.
        top_k_weights: [..., k].
        group: the ranks: a process group, a DeviceMesh of one dimension, or None for all.
        tokens_per_rank: the most tokens that any rank has in this call, the same number on all ranks; None: all have as
            many as this one. All-to-all does not need it.
        transport: "symmetric", through PyTorch's `_symmetric_memory`: nothing waits for the host, a CUDA graph can
            record it after a first call of the same sizes, and buffers are those of n * tokens_per_rank tokens; or
            "all-to-all", by the group's own (NCCL, gloo), which waits once for the counts, and has the rows that came.
            None takes the first where it can be had, on GPUs of one host; `explain_experts` says which and why.
        shared: a shared expert, or whatever else tokens pass beside the experts: called once with x, while rows are
            under way, and what it returns, [..., hidden_out], is added to the result.
        options: of `swiglu_experts`; biases are this rank's experts'.

    Returns:
        [..., hidden_out] of this rank's tokens in x's dtype. A rank's sum over its experts is rounded, and so is the
        sum over ranks, in the order of ranks. No token is dropped. Differentiable as `swiglu_experts` is.

    Raises:
        TypeError, ValueError: as `swiglu_experts`; x has more than tokens_per_rank; the ranks' sizes differ when they
            first meet them; symmetric memory is asked for and cannot be had.
        RuntimeError: a CUDA graph is being recorded, and nothing of these sizes was called before.
    """
    group = group_of(group)
    x, *_ = autocast.operands(x)
    if isinstance(w_gate_up, Tensor) and isinstance(w_down, Tensor):
        biases = options.get("b_gate_up"), options.get("b_down")
        _, gate_up, down, b_gate_up, b_down = autocast.operands(x, w_gate_up, w_down, *biases)
        check_experts(x, gate_up, down, top_k_index, top_k_weights, b_gate_up, b_down)
    if group.size() == 1:
        out = swiglu_experts(x, w_gate_up, w_down, top_k_index, top_k_weights, **options)
        return out if shared is None else out + shared(x)
    codes: Any = getattr(w_down, "codes", w_down)
    experts, hidden_out, intermediate = codes.shape
    rows, index, weights = (as_matrix(tensor).contiguous() for tensor in (x, top_k_index, top_k_weights))
    tokens, slots = index.shape
    step = 1 << max(tokens.bit_length() - 4, 0)  # few sizes of memory, up to an eighth too large
    most = -(-tokens // step) * step if tokens_per_rank is None else tokens_per_rank
    if most < tokens:
        raise ValueError(f"tokens_per_rank: expected at least the {tokens} tokens of x, got {most}")
    route: Symmetric | AllToAll
    if transport_for(x, group, transport)[0] == SYMMETRIC and most and slots:
        size, columns = RankSizes(group.size(), group.rank(), experts, most, slots), max(rows.shape[1], hidden_out)
        plain = options.get("precision", "bf16") == "bf16"
        overlaps = plain and overlap_pays(size, rows.shape[1], intermediate, rows.dtype)
        route = Symmetric(index, _shared_for(group, x.device, size, columns, (rows.dtype, weights.dtype)), overlaps)
    else:
        route = AllToAll(index, group, experts)
    came, beside = _Travel.apply(route, "scatter", rows, weights)
    with under_way(route if isinstance(route, Symmetric) and route.overlaps else None):
        with under_way(None):  # which may call experts as well
            added = None if shared is None else shared(x)
        results = swiglu_experts(came, w_gate_up, w_down, route.ids, beside, **options)
    out = like_leading(_Travel.apply(route, "gather", results, None)[0], x)
    return out if added is None else out + added
