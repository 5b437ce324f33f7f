"""Which experts each token has: drawn for every call, and how evenly they are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Experts, Routing

TILE_ROWS = 128
"""Of the tiles whose padding is told."""


def draw_experts(experts: Experts, place: Tensor, source: torch.Generator) -> None:
    """Fill int64 [tokens, top_k] with the experts of each token: all different, and in no order."""
    (tokens, top_k), device = place.shape, place.device
    order = torch.rand(experts.count, device=device, generator=source).argsort()
    if experts.routing is Routing.SINGLE:
        place.copy_(order[:top_k].expand(tokens, top_k))
    elif experts.routing is Routing.BALANCED:
        turns = torch.arange(tokens * top_k, device=device).view(tokens, top_k)
        shuffled = torch.rand(tokens, device=device, generator=source).argsort()
        place.copy_(order[turns[shuffled] % experts.count])
    else:  # the top_k largest of log(weight) plus Gumbel noise are a draw by weight without replacement
        scores = torch.rand(tokens, experts.count, device=device, generator=source).log_().neg_().log_().neg_()
        if experts.routing is Routing.ZIPF:
            scores -= (order + 1).log()
        place.copy_(scores.topk(top_k).indices)


@dataclass(frozen=True)
class Load:
    """How many tokens the experts have in one call."""

    least: int
    median: float
    most: int
    idle: int
    """Experts without a token."""
    padding: float
    """The share of rows that are padding where every expert's are filled up to whole tiles of TILE_ROWS."""


def load_of(experts: Experts, index: Tensor) -> Load:
    """The load of a call's top_k_index."""
    counts = index.flatten().bincount(minlength=experts.count)
    rows = (counts + TILE_ROWS - 1).div(TILE_ROWS, rounding_mode="floor").sum().item() * TILE_ROWS
    return Load(
        least=int(counts.min()),
        median=counts.double().quantile(0.5).item(),
        most=int(counts.max()),
        idle=int((counts == 0).sum()),
        padding=1 - index.numel() / rows if rows else 0.0,
    )
