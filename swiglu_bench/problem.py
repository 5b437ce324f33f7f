"""A case made real: the seeded tensors that every contender of the case shares."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench.cases import ACTIVATIONS, VARIANTS, WEIGHTS, Case, Scope


@dataclass(frozen=True)
class Problem:
    """Tensors of one case. Contenders share them and must not change them.

    `weights` are [out_features, in_features], as nn.Linear has them; `activations[v]` and `upstream[v]` are variant v
    of the inputs, in the order of `cases.ACTIVATIONS`, and of the gradient of the output.
    """

    case: Case
    device: torch.device
    weights: dict[str, Tensor]
    activations: tuple[tuple[Tensor, ...], ...]
    upstream: tuple[Tensor, ...]

    def with_leaves(self, requires_grad: bool) -> Problem:
        """The same tensors with fresh leaf weights, so that each contender collects gradients of its own."""
        leaves = {name: value.detach().requires_grad_(requires_grad) for name, value in self.weights.items()}
        return dataclasses.replace(self, weights=leaves)


def torch_dtype(case: Case) -> torch.dtype:
    """The torch dtype of a case."""
    dtype: torch.dtype = getattr(torch, case.dtype.value)
    return dtype


def make_problem(case: Case, device: torch.device | str) -> Problem:
    """Draw the tensors of a case on a device from its seed.

    Activations are standard normal and weights normal with variance 1 / in_features, so that gate and up are of unit
    size, where SiLU is neither linear nor flat, as in a trained model.
    """
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(case.seed)
    hidden, intermediate = case.shape.hidden, case.shape.intermediate
    sizes = {
        "x": (case.tokens, hidden),
        "gate": (case.tokens, intermediate),
        "up": (case.tokens, intermediate),
        "w_gate": (intermediate, hidden),
        "w_up": (intermediate, hidden),
        "w_down": (hidden, intermediate),
    }
    output = (case.tokens, hidden if case.scope is Scope.MLP else intermediate)

    def draw(size: tuple[int, int], scale: float = 1.0) -> Tensor:
        values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        return values.mul_(scale).to(torch_dtype(case))

    weights = {name: draw(sizes[name], sizes[name][1] ** -0.5) for name in WEIGHTS[case.scope]}
    activations = tuple(tuple(draw(sizes[name]) for name in ACTIVATIONS[case.scope]) for _ in range(VARIANTS))
    upstream = tuple(draw(output) for _ in range(VARIANTS))
    return Problem(case, device, weights, activations, upstream)
