"""Inputs of gates with a limit, such that no result depends on the side of it to which a value is rounded."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from swiglu_kernels import reference

GPT_OSS = {"alpha": 1.702, "limit": 1.0, "up_offset": 1.0}
"""The gate of gpt-oss, whose limit is 7: this one is met by many values."""
DISTANCE = 0.01
"""Of the limit: bfloat16 rounds a gate near it by up to 1/256 of it, and its multiple by as much; sums have errors."""


def keep_off_limit(
    gate: dict[str, Any], x: torch.Tensor, weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (), recipe: str | None = None,
) -> None:  # fmt: skip
    """Shrink rows of weights and biases in place until no pre-activation lies within DISTANCE of the gate's limit.

    The derivative jumps there: a value that is rounded to the other side changes gradients by a whole contribution.
    Weights are [..., rows, hidden], of gates, ups or both. With a recipe their products with x are those in fp8.
    Of some 5000 tokens rows shrink to a quarter, and some 0.1% of the values still lie beyond a limit of 1.
    """
    limit = gate.get("limit")
    if limit is None or isinstance(limit, tuple):  # which bounds smoothly
        return
    bounds = {limit, limit / abs(gate.get("gate_multiplier", 1.0))}
    if gate.get("activation") == "silu_clamp":
        sizes = torch.linspace(0, limit + 2, 10001, dtype=torch.float64)
        bounds.add(sizes[torch.nn.functional.silu(sizes) < limit][-1].item())

    def exact(tensor: torch.Tensor, weight: bool = False) -> torch.Tensor:
        matrix = tensor.detach().flatten(0, -2)
        return matrix.double() if recipe is None else reference.dequantise(*reference.quantise(matrix, recipe, weight))

    def rows_near(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        values = exact(x) @ exact(weight, weight=True).T
        sizes = values.add_(0 if bias is None else bias.detach().flatten()).abs_()
        near = [((sizes - bound).abs_() < DISTANCE * bound).any(0) for bound in bounds]
        return torch.stack(near).any(0).view(weight.shape[:-1])

    for weight, bias in itertools.zip_longest(weights, biases):
        while (rows := rows_near(weight, bias)).any():
            for part in (weight, bias):
                if part is not None:
                    part.detach()[rows] *= 0.95
