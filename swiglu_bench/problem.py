"""A case made real: the seeded tensors that every contender of the case shares."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swiglu_bench.cases import ACTIVATIONS, BIASES, PLAIN, VARIANTS, WEIGHTS, Case, Extras, Scope


@dataclass(frozen=True)
class Problem:
    """Tensors of one case. Contenders share them and must not change them.

    `weights` are [out_features, in_features], as nn.Linear has them; `activations[v]` and `upstream[v]` are variant v
    of the inputs, in the order of `cases.ACTIVATIONS`, and of the gradient of the output. Variant 0 is drawn from the
    case's seed, as the weights are; the others from `unannounced`, a seed that no contender can know before the run.
    """

    case: Case
    device: torch.device
    weights: dict[str, Tensor]
    activations: tuple[tuple[Tensor, ...], ...]
    upstream: tuple[Tensor, ...]
    extras: Extras = PLAIN
    biases: dict[str, Tensor] = field(default_factory=dict)
    """[out_features] each, by the names of `cases.BIASES`; empty unless `extras.bias`."""
    unannounced: int = 0
    desk: list[Tensor] = field(default_factory=list)
    """The activations and the upstream gradient of the run at hand, at the same addresses for every run."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Weights and biases."""
        return self.weights | self.biases

    def lay_out(self, variant: int) -> tuple[list[Tensor], Tensor]:
        """Put a variant on the desk: activations and the gradient of the output, as new tensors over the same memory.

        Contenders work on these, so that nobody spoils another's inputs, and whoever takes an address for an answer
        is wrong.
        """
        values = (*self.activations[variant], self.upstream[variant])
        if not self.desk:
            self.desk.extend(torch.empty_like(value) for value in values)
        for place, value in zip(self.desk, values, strict=True):
            place.copy_(value)
        *activations, upstream = (place.detach() for place in self.desk)
        return activations, upstream

    def for_building(self) -> Problem:
        """What an implementation's build sees: everything but activations, so that no answer can be made beforehand."""
        return dataclasses.replace(self, activations=(), upstream=(), unannounced=0, desk=[])

    def with_leaves(self, requires_grad: bool) -> Problem:
        """The same tensors with fresh leaf weights, so that each contender collects gradients of its own."""

        def leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.detach().requires_grad_(requires_grad) for name, value in values.items()}

        return dataclasses.replace(self, weights=leaves(self.weights), biases=leaves(self.biases))

    def restore_parameters(self) -> None:
        """Draw weights and biases again, in place, after somebody changed them."""
        again = make_problem(self.case, self.device, self.extras)
        with torch.no_grad():
            for name, value in again.parameters.items():
                self.parameters[name].copy_(value)


def torch_dtype(case: Case) -> torch.dtype:
    """The torch dtype of a case."""
    dtype: torch.dtype = getattr(torch, case.dtype.value)
    return dtype


def make_problem(
    case: Case, device: torch.device | str, extras: Extras = PLAIN, unannounced: int | None = None
) -> Problem:
    """Draw the tensors of a case on a device from its seed.

    Activations are standard normal and weights normal with variance 1 / in_features, so that gate and up are of unit
    size, where SiLU is neither linear nor flat, as in a trained model. Biases are normal with a tenth of that size.
    `unannounced` makes the variants after the first again; None draws a new seed for them.
    """
    device = torch.device(device)
    unannounced = secrets.randbits(31) if unannounced is None else unannounced
    known = torch.Generator(device=device).manual_seed(case.seed)
    unknown = torch.Generator(device=device).manual_seed(unannounced)
    hidden, intermediate = case.shape.hidden, case.shape.intermediate
    sizes: dict[str, tuple[int, ...]] = {
        "x": (case.tokens, hidden),
        "gate": (case.tokens, intermediate),
        "up": (case.tokens, intermediate),
        "w_gate": (intermediate, hidden),
        "w_up": (intermediate, hidden),
        "w_down": (hidden, intermediate),
        "bias_gate": (intermediate,),
        "bias_up": (intermediate,),
        "bias_down": (hidden,),
    }
    output = (case.tokens, hidden if case.scope is Scope.MLP else intermediate)

    def draw(size: tuple[int, ...], generator: torch.Generator, scale: float = 1.0) -> Tensor:
        values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        return values.mul_(scale).to(torch_dtype(case))

    weights = {name: draw(sizes[name], known, sizes[name][1] ** -0.5) for name in WEIGHTS[case.scope]}
    generators = (known, *(unknown for _ in range(VARIANTS - 1)))
    activations = tuple(tuple(draw(sizes[name], one) for name in ACTIVATIONS[case.scope]) for one in generators)
    upstream = tuple(draw(output, one) for one in generators)
    biases = {name: draw(sizes[name], known, 0.1) for name in BIASES[case.scope]} if extras.bias else {}
    return Problem(case, device, weights, activations, upstream, extras, biases, unannounced)
