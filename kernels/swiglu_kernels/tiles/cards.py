"""What is chosen by the model of a GPU, and on which model it was measured: `cards.json`.

A card of compute capability 9.0 that is not in that file takes the same forward, whose machine code and relative times
were alike on an H100 and an H200, and PyTorch's products for weight gradients, until `swiglu-bench tune` ran on it.
In the tiles of an H200, weight gradients by hand of large layers take 1.03 to 1.63 times as long as PyTorch's on an
H100, whose L2 cache delivers less (results/nvidia-h100/parts.csv): there they have tiles of their own.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

from swiglu_kernels.runtime.internals import constant_in_graphs

H200 = "NVIDIA H200"


@functools.cache
def _measured() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    return found


def measured_on(card: str) -> str:
    """Say on which card the choice of weight gradients for this one was measured."""
    if card in _measured():
        return f"measured on an {card}"
    return f"measured on {' and '.join(_measured())}, not on this {card}: `swiglu-bench tune` measures it"


@constant_in_graphs  # data that ships with this package
def _bounds(card: str) -> tuple[tuple[float, float], ...]:
    """(most tokens, most elements of a weight) up to which weight gradients by hand are faster on a card."""
    found = _measured().get(card, {}).get("weight_grad_by_hand", ())
    return tuple((bound.get("most_tokens", math.inf), bound.get("most_elements", math.inf)) for bound in found)


def weight_grad_by_hand(card: str, tokens: int, elements: int) -> bool:
    """Tell whether weight gradients by hand, sums over tokens, are faster than PyTorch's for hidden x intermediate."""
    return any(tokens <= most_tokens and elements <= most_elements for most_tokens, most_elements in _bounds(card))


@constant_in_graphs
def weight_grad_tile(card: str) -> dict[str, int]:
    """Return the stages and the group of weight gradients by hand on a card, where they are not those of an H200."""
    return dict(_measured().get(card, {}).get("weight_grad_tile", {}))


@constant_in_graphs
def cooperative_from(card: str) -> float:
    """Return the elements of a weight from which on `hopper_weights.py` makes both gradients on a card."""
    return float(_measured().get(card, {}).get("weight_grad_cooperative_from", math.inf))
