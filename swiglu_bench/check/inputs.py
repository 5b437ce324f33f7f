"""The tensors of a case drawn from its seed, laid out for a call, and put back where a contender changed them."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from swiglu_bench.spec.cases import ACTIVATIONS, BIASES, PLAIN, VARIANTS, WEIGHTS, Case, Extras, Scope
from swiglu_bench.spec.problem import Problem


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


def lay_out(problem: Problem, variant: int) -> tuple[list[Tensor], Tensor]:
    """Put a variant on the desk: activations and the gradient of the output, as new tensors over the same memory.

    Contenders work on these, so that nobody spoils another's inputs, and whoever takes an address for an answer is
    wrong.
    """
    values = (*problem.activations[variant], problem.upstream[variant])
    if not problem.desk:
        problem.desk.extend(torch.empty_like(value) for value in values)
    for place, value in zip(problem.desk, values, strict=True):
        place.copy_(value)
    *activations, upstream = (place.detach() for place in problem.desk)
    return activations, upstream


def restore_parameters(problem: Problem) -> None:
    """Draw weights and biases again, in place, after a contender changed them."""
    again = make_problem(problem.case, problem.device, problem.extras)
    with torch.no_grad():
        for name, value in again.parameters.items():
            problem.parameters[name].copy_(value)
