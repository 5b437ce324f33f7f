"""What an implementation is built on: one case's tensors. torch is imported for its types only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swiglu_bench.spec.cases import PLAIN, Case, Extras

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Tensors of one case. Contenders share them and must not change them.

    `weights` are [out_features, in_features] as in nn.Linear; `activations[v]` and `upstream[v]` are variant v of the
    inputs, in the order of `cases.ACTIVATIONS`, and of the gradient of the output. The weights and variant 0 are drawn
    from the case's seed; the other variants from `unannounced`, a seed that no contender can know before the run.
    """

    case: Case
    device: torch.device
    weights: dict[str, Tensor]
    activations: tuple[tuple[Tensor, ...], ...] = ()
    upstream: tuple[Tensor, ...] = ()
    extras: Extras = PLAIN
    biases: dict[str, Tensor] = field(default_factory=dict)
    """[out_features] each, by the names of `cases.BIASES`; empty unless `extras.bias`."""
    unannounced: int = 0
    desk: list[Tensor] = field(default_factory=list)
    """The activations and the upstream gradient of the current run, at the same addresses for every run."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Weights and biases."""
        return self.weights | self.biases

    def for_building(self) -> Problem:
        """What an implementation's build sees: no activations, so that no answer can be computed in advance."""
        return dataclasses.replace(self, activations=(), upstream=(), unannounced=0, desk=[])

    def with_leaves(self, requires_grad: bool) -> Problem:
        """The same tensors with fresh leaf weights, so that each contender collects gradients of its own."""

        def leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.detach().requires_grad_(requires_grad) for name, value in values.items()}

        return dataclasses.replace(self, weights=leaves(self.weights), biases=leaves(self.biases))
