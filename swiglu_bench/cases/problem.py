"""What an implementation is built on: the weights of one case. torch is imported for its types only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swiglu_bench.cases.cases import PLAIN, Case, Extras

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """The weights of one case. Activations are not part of it: they are drawn for each call, after the build.

    `weights` are [out_features, in_features] as in nn.Linear.
    """

    case: Case
    device: torch.device
    weights: dict[str, Tensor]
    biases: dict[str, Tensor] = field(default_factory=dict)
    """[out_features] each, by the names of `cases.BIASES`; empty unless `extras.bias`."""
    extras: Extras = PLAIN

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Weights and biases."""
        return self.weights | self.biases

    def with_leaves(self, requires_grad: bool) -> Problem:
        """The same values as fresh leaf tensors over the same memory, which collect gradients of their own."""
        return self.mapped(lambda value: value.detach().requires_grad_(requires_grad))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """The same problem with the weights and biases that `change` makes of these."""
        weights, biases = ({n: change(value) for n, value in of.items()} for of in (self.weights, self.biases))
        return dataclasses.replace(self, weights=weights, biases=biases)
