"""A routing in two parts: the tiles that need nothing but the first tokens, and the others."""

import pytest
import torch
from accuracy import DEVICE

from swiglu_kernels.ops.experts.routing import route, split


@pytest.mark.parametrize(("tokens", "first"), [(90, 45), (90, 0), (90, 90), (3, 2)])
def test_tiles_of_the_first_tokens_and_the_others_are_all_tiles(tokens: int, first: int) -> None:
    experts, slots, tile_rows = 5, 3, 16
    source = torch.Generator().manual_seed(tokens + first)
    index = torch.randint(-1, experts, (tokens, slots), generator=source).to(DEVICE)
    index[index == 3] = 2  # an expert without rows
    whole = route(index, experts, tile_rows)
    early, late = split(whole, first)
    assert torch.equal(early.counts + late.counts, whole.counts)
    assert torch.equal(early.starts, whole.starts[:-1])
    assert torch.equal(late.starts, early.starts + early.counts)
    of_first = torch.stack([((index[:first] == expert).sum() // tile_rows * tile_rows) for expert in range(experts)])
    assert torch.equal(early.counts.long(), of_first), "whole tiles, and as many as there are"
    tiles = torch.arange(len(whole.tile_expert), device=DEVICE)
    for part in (early, late):
        for expert in range(experts):
            begin, end = part.starts[expert], part.starts[expert] + part.counts[expert]
            mine = (tiles * tile_rows >= begin) & (tiles * tile_rows < end)
            assert torch.equal(part.tile_expert == expert, mine)
    assert torch.equal(torch.maximum(early.tile_expert, late.tile_expert), whole.tile_expert)
