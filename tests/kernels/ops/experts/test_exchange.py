"""The kernels that move rows between ranks, on ordinary tensors of one device in the place of several ranks' memory."""

from types import SimpleNamespace

import pytest
import torch
from accuracy import DEVICE

from swiglu_kernels.ops.experts import exchange
from swiglu_kernels.ops.experts.exchange import RankSizes
from swiglu_kernels.ops.experts.parallel import Symmetric

RANKS, EXPERTS, MOST, SLOTS = 3, 2, 5, 3
TOKENS = (5, 0, 3)


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else -9, dtype=dtype, device=DEVICE)


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=DEVICE)


def copied(kind: str, columns: int, *tensors: torch.Tensor | None, size: RankSizes) -> None:
    exchange.copy_launch(kind, columns, *tensors, size).run()


def by_blocks(part: str, of_ranks: list[torch.Tensor], into: torch.Tensor, size: RankSizes) -> None:
    """As copy engines bring the blocks of other ranks."""
    shared = SimpleNamespace(size=size, stream=None, of_ranks={part: [rows.view(-1) for rows in of_ranks]})
    route = Symmetric(torch.zeros(1, SLOTS, device=DEVICE), shared, True)
    route._begin_copies(part, into)
    route.wait()


@pytest.mark.parametrize(("columns", "dtype"), [(37, torch.float32), (64, torch.bfloat16), (2049, torch.float16)])
@pytest.mark.parametrize("number", [torch.int64, torch.int32, torch.uint8])
def test_rows_reach_each_rank_with_one_of_their_experts_and_come_back(columns, dtype, number) -> None:
    source = torch.Generator().manual_seed(columns)
    x = [torch.randn(count, columns, generator=source).to(DEVICE, dtype) for count in TOKENS]
    weights = [torch.rand(count, SLOTS, generator=source).to(DEVICE) for count in TOKENS]
    index = [
        torch.randint(0, RANKS * EXPERTS + 2, (count, SLOTS), generator=source).to(DEVICE, number) for count in TOKENS
    ]
    sizes = [RankSizes(RANKS, rank, EXPERTS, MOST, SLOTS) for rank in range(RANKS)]
    rows = RANKS * MOST
    published = [nan(MOST, columns, dtype=dtype) for _ in TOKENS]
    ids = [nan(MOST, SLOTS, dtype=torch.int32) for _ in TOKENS]
    values = [nan(MOST, SLOTS) for _ in TOKENS]
    results, sums = [nan(rows, columns, dtype=dtype) for _ in TOKENS], [nan(rows, SLOTS) for _ in TOKENS]
    for rank, size in enumerate(sizes):
        given = x[rank], index[rank], weights[rank], published[rank], ids[rank], values[rank]
        copied(exchange.PUBLISH, columns, *given, size=size)
    came = []
    for rank, size in enumerate(sizes):
        out, kept, beside = nan(rows, columns, dtype=dtype), nan(rows, SLOTS, dtype=torch.int32), nan(rows, SLOTS)
        tables = addresses(published), addresses(ids), addresses(values)
        copied(exchange.FETCH, columns, *tables, out, kept, beside, size=size)
        again = nan(rows, columns, dtype=dtype)
        copied(exchange.FETCH_AGAIN, columns, tables[0], kept, None, again, None, None, size=size)
        torch.testing.assert_close(again, out, rtol=0, atol=0, equal_nan=True)
        whole, numbers = nan(rows, columns, dtype=dtype), nan(rows, SLOTS)
        copied(exchange.FETCH + exchange.OWN, columns, *tables, whole, kept, numbers, size=size)
        assert whole[MOST:].isnan().all()
        torch.testing.assert_close(numbers, beside, rtol=0, atol=0, equal_nan=True)
        by_blocks("tokens", published, whole, size)
        torch.testing.assert_close(torch.where(out.isnan(), out, whole), out, rtol=0, atol=0, equal_nan=True)
        for other, count in enumerate(TOKENS):
            block = size.block(other)
            place = slice(block * MOST, block * MOST + count)
            local = index[other].long() - rank * EXPERTS
            wanted = (local >= 0) & (local < EXPERTS)
            assert torch.equal(kept[place], torch.where(wanted, local, -1).int())
            assert (kept[block * MOST + count : (block + 1) * MOST] == -1).all()
            needed = wanted.any(1, keepdim=True)
            assert torch.equal(out[place].isnan(), ~needed.expand(-1, columns)), "only rows of this rank's experts"
            torch.testing.assert_close(out[place].nan_to_num(0), torch.where(needed, x[other], 0), rtol=0, atol=0)
            torch.testing.assert_close(
                beside[place].nan_to_num(0), torch.where(needed, weights[other], 0), rtol=0, atol=0
            )
        came.append((out * (rank + 1), kept, beside * (rank + 1)))
        copied(exchange.RETURN, columns, *came[-1][:1], kept, came[-1][2], results[rank], None, sums[rank], size=size)
        assert results[rank][:MOST].isnan().all(), "its own are added where they are"
    for rank, size in enumerate(sizes):
        out, beside = nan(TOKENS[rank], columns, dtype=dtype), nan(TOKENS[rank], SLOTS)
        own = came[rank][0], addresses(results), index[rank], came[rank][2], addresses(sums), out, beside
        exchange.add_launch(*own, size).run()
        landed, again = nan(rows, columns, dtype=dtype), torch.full_like(out, float("nan"))
        by_blocks("results", results, landed, size)
        exchange.add_launch(own[0], landed, *own[2:5], again, beside, size).run()
        assert torch.equal(again, out)
        owner = index[rank].long() // EXPERTS
        factor = torch.stack([(owner == other).any(1) * (other + 1.0) for other in range(RANKS)]).sum(0)
        expected = x[rank].float() * factor[:, None].to(DEVICE)
        torch.testing.assert_close(out.float(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 2**-9, atol=0)
        there = owner < RANKS
        torch.testing.assert_close(beside, torch.where(there, weights[rank] * (owner + 1), 0))
