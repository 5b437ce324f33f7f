"""Which tokens each expert has, of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def by_expert(index: Tensor, experts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each expert the tokens of top_k_index [tokens, top_k] that have it, and in which slots, in their order.

    The GPU is waited for once, not once for each expert.
    """
    flat = index.flatten()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=experts).tolist()
    for pairs in order.split(counts):
        yield pairs // index.shape[1], pairs % index.shape[1]
