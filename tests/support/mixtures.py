"""Layers of experts, drawn, and the experts of their tokens."""

import torch
from accuracy import DEVICE, random_tensor

GPT_OSS = {"alpha": 1.702, "limit": 1.0, "up_offset": 1.0, "interleaved": True}


def drawn(tokens: int, slots: int, count: int, beyond: int = 0) -> torch.Tensor:
    """Indices of experts, also of so many on either side that do not exist."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(-beyond, count + beyond, (tokens, slots), generator=generator).to(DEVICE)


def layer(
    index: torch.Tensor, count: int, hidden: int, intermediate: int, dtype: torch.dtype, layout: str = "contiguous",
    out: int | None = None, sizes: torch.Tensor | float = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """Draw x, both weights (times `sizes`), the routing weights and both biases, everything around 1 on the way."""
    out = hidden if out is None else out
    return [
        random_tensor(index.shape[0], hidden, dtype=dtype, layout=layout),
        random_tensor(count, 2 * intermediate, hidden, dtype=dtype, layout=layout, scale=hidden**-0.5, seed=1) * sizes,
        random_tensor(count, out, intermediate, dtype=dtype, layout=layout, scale=intermediate**-0.5, seed=2) * sizes,
        random_tensor(*index.shape, dtype=dtype, layout=layout, seed=3),
        random_tensor(count, 2 * intermediate, dtype=dtype, seed=4),
        random_tensor(count, out, dtype=dtype, seed=5),
    ]
