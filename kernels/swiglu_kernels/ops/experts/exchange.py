"""Rows of tokens between ranks that read each other's memory: two kernels, for ranks that hold experts.

Of R ranks each has E experts, numbered rank * E and on, and up to `most` tokens. A token's row travels once to each
rank that has any of its experts:

    copy   out[rank, token] = rows[rank, token] where any of the row's k ids lies in [first, first + count). Rows, ids
           and values, k for each row, lie here or on each rank. Ids less `first` are written too, -1 for the others.
    add    out[token] = the sum over the ranks with any of the token's experts of their rows [this rank, token]

Rows of all ranks lie in blocks of `most`, this rank's first, then those of the ranks after it (`RankSizes.block`).
What is not wanted is neither read nor written. Sums are fp32 in the order of ranks: the bits are the same on every run.
"""

from dataclasses import dataclass
from typing import Any

import torch

from swiglu_kernels.ops.experts.routing import as_mask
from swiglu_kernels.runtime.backend import capability_of, tl, triton
from swiglu_kernels.runtime.early import starts_early, wait_for_launch_ahead
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.precision import round_to

BLOCK = 2048
"""Columns that a program moves, 32 bytes of bf16 for each thread: a row takes a microsecond or two to arrive."""
OF_TOKENS = ("tokens", "most")


@triton.jit
def _of_rank(table_ptr, rank, like_ptr):
    """Return a rank's address in a table, as a pointer like another; memory of ranks begins at multiples of 16."""
    return tl.multiple_of(tl.load(table_ptr + rank).to(like_ptr.dtype), 16)


@triton.jit(do_not_specialize=OF_TOKENS)
def _copy_kernel(
    rows_ptr, index_ptr, values_ptr, out_ptr, kept_ptr, values_out_ptr, tokens, most, columns, first, count,
    RANKS: tl.constexpr, RANK: tl.constexpr, FROM: tl.constexpr, OWN: tl.constexpr, FAR: tl.constexpr,
    FAR_INDEX: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row, of blocks from FROM on; OWN: values of all, but rows of this rank's block alone.

    Ranks take turns, so that not all read from the same one.
    """
    wait_for_launch_ahead(EARLY)
    block, token = tl.program_id(0) % RANKS, tl.program_id(0) // RANKS
    rank, row = (block + RANK) % RANKS, (block * most + token).to(tl.int64)
    source = token.to(tl.int64) if FAR else row
    slot = tl.arange(0, WIDE)
    ids_ptr = _of_rank(index_ptr, rank, kept_ptr) if FAR_INDEX else index_ptr
    ids_ptr += (token.to(tl.int64) if FAR_INDEX else row) * SLOTS
    inside = (slot < SLOTS) & as_mask(token < tokens)
    index = tl.load(ids_ptr + slot, mask=inside, other=0)
    wanted = (index >= first) & (index < first + count) & inside
    begins = tl.program_id(1) == 0
    if kept_ptr is not None:
        kept = tl.where(wanted, index - first, -1).to(tl.int32)
        tl.store(kept_ptr + row * SLOTS + slot, kept, mask=(slot < SLOTS) & as_mask(begins))
    if (tl.max(wanted.to(tl.int32), 0) > 0) & (block >= FROM):
        if block < (1 if OWN else RANKS):
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            from_ptr = _of_rank(rows_ptr, rank, out_ptr) if FAR else rows_ptr
            moved = tl.load(from_ptr + source * columns + column, mask=column < columns)
            tl.store(out_ptr + row * columns + column, moved, mask=column < columns)
        if values_ptr is not None:
            beside_ptr = _of_rank(values_ptr, rank, values_out_ptr) if FAR else values_ptr
            numbers = (slot < SLOTS) & as_mask(begins)
            values = tl.load(beside_ptr + source * SLOTS + slot, mask=numbers)
            tl.store(values_out_ptr + row * SLOTS + slot, values, mask=numbers)


@triton.jit(do_not_specialize=OF_TOKENS)
def _add_kernel(
    own_ptr, table_ptr, index_ptr, own_values_ptr, values_table_ptr, out_ptr, values_out_ptr, most, columns, experts,
    RANKS: tl.constexpr, RANK: tl.constexpr, LANDED: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token; RANK's own rows are read where its product has written them.

    LANDED: the other ranks' lie here, in the block of each, and not in this rank's block on each.
    """
    wait_for_launch_ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, WIDE)
    index = tl.load(index_ptr + token * SLOTS + slot, mask=slot < SLOTS, other=-1)
    out = tl.zeros((BLOCK,), tl.float32)
    values = tl.zeros((WIDE,), tl.float32)
    for rank in tl.static_range(RANKS):
        there = (RANK + RANKS - rank) % RANKS * most + token
        row = (rank + RANKS - RANK) % RANKS * most + token if LANDED else there
        wanted = (index >= rank * experts) & (index < (rank + 1) * experts) & (slot < SLOTS)
        needed = as_mask(tl.max(wanted.to(tl.int32), 0) > 0)
        from_ptr = own_ptr if rank == RANK else table_ptr if LANDED else _of_rank(table_ptr, rank, out_ptr)
        out += tl.load(from_ptr + row * columns + column, mask=(column < columns) & needed, other=0.0).to(tl.float32)
        if values_out_ptr is not None:
            beside_ptr = own_values_ptr if rank == RANK else _of_rank(values_table_ptr, rank, values_out_ptr)
            values += tl.load(beside_ptr + there * SLOTS + slot, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * columns + column, round_to(out, out_ptr.dtype.element_ty), mask=column < columns)
    if values_out_ptr is not None:
        mask = (slot < SLOTS) & as_mask(tl.program_id(1) == 0)
        tl.store(values_out_ptr + token * SLOTS + slot, round_to(values, values_out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class RankSizes:
    """What all ranks have alike, and which of them this is."""

    ranks: int
    rank: int
    experts: int
    """Of each rank."""
    most: int
    """The most tokens of a rank."""
    slots: int
    """Experts of a token."""

    @property
    def rows(self) -> int:
        """That may arrive: all tokens of all ranks."""
        return self.ranks * self.most

    def block(self, rank: int, of: int | None = None) -> int:
        """Return which block of rows on a rank, this one unless `of` names another, is that of a rank's tokens."""
        return (rank - (self.rank if of is None else of)) % self.ranks

    def of_launch(self, columns: int, device: torch.device) -> dict[str, Any]:
        """Return what both kernels are given."""
        return {
            "most": self.most, "columns": columns, "RANKS": self.ranks, "RANK": self.rank, "SLOTS": self.slots,
            "WIDE": max(2, triton.next_power_of_2(self.slots)), "BLOCK": min(BLOCK, triton.next_power_of_2(columns)),
            "EARLY": starts_early(capability_of(device)),
        }  # fmt: skip


PUBLISH, RETURN, FETCH, FETCH_AGAIN = "publish", "return", "fetch", "fetch again"
"""This rank's tokens, and its results for the others, into memory that all read; tokens of all ranks, and rows of
their gradients, for which the ids are here, from there."""
OWN = ", own rows"
"""Behind a kind: ids and values of all, but this rank's rows alone."""


def copy_launch(
    kind: str, columns: int, rows: torch.Tensor, index: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor,
    kept: torch.Tensor | None, values_out: torch.Tensor | None, size: RankSizes,
) -> Launch:  # fmt: skip
    """Describe the launch that copies rows of one of the four kinds.

    rows, values, index: what is read, contiguous; tables of addresses, int64 [ranks], where FETCH reads each rank's,
    as FETCH_AGAIN its rows and values. out, kept, values_out: what is written, contiguous; kept is for PUBLISH and
    FETCH, which write ids.
    """
    given, own, kind = size.of_launch(columns, out.device), kind.endswith(OWN), kind.removesuffix(OWN)
    far, publishes = kind in (FETCH, FETCH_AGAIN), kind == PUBLISH
    if publishes:  # the tokens are this rank's, which stand in for all ranks'
        given |= {"RANKS": 1, "RANK": 0}
    first = size.rank * size.experts if kind == FETCH else 0
    count = size.experts * size.ranks if publishes else size.experts
    arguments: dict[str, Any] = given | {
        "rows_ptr": rows, "index_ptr": index, "values_ptr": values, "out_ptr": out, "kept_ptr": kept,
        "values_out_ptr": values_out, "tokens": index.shape[0] if publishes else size.most, "first": first,
        "count": count, "FROM": int(kind == RETURN), "OWN": own, "FAR": far, "FAR_INDEX": kind == FETCH,
    }  # fmt: skip
    grid = (size.most * given["RANKS"], triton.cdiv(columns, given["BLOCK"]))
    return Launch(_copy_kernel, grid, arguments, num_warps=4, num_stages=1)


def add_launch(
    own: torch.Tensor, table: torch.Tensor, index: torch.Tensor, own_values: torch.Tensor | None,
    values_table: torch.Tensor | None, out: torch.Tensor, values_out: torch.Tensor | None, size: RankSizes,
) -> Launch:  # fmt: skip
    """Describe the launch that adds up what the ranks have for this rank's tokens.

    own, own_values: [ranks * most, H] and [ranks * most, k], this rank's; table, values_table: addresses of the other
    ranks', int64 [ranks], or as table their rows [ranks * most, H]. index: [T, k], contiguous. out, values_out: [T, H]
    and [T, k], contiguous.
    """
    given, landed = size.of_launch(out.shape[1], out.device), table.dtype != torch.int64
    arguments: dict[str, Any] = given | {
        "own_ptr": own, "table_ptr": table, "index_ptr": index, "own_values_ptr": own_values,
        "values_table_ptr": values_table, "out_ptr": out, "values_out_ptr": values_out, "experts": size.experts,
        "LANDED": landed, "EARLY": given["EARLY"] and not landed,  # copies are no launch ahead
    }  # fmt: skip
    grid = (out.shape[0], triton.cdiv(out.shape[1], arguments["BLOCK"]))
    return Launch(_add_kernel, grid, arguments, num_warps=4, num_stages=1)
