"""SwiGLU by definition, in plain PyTorch and in the dtype of its inputs: never optimised.

Eager's results, and with them every budget, come from here, so that it imports nothing that is judged. A test holds it
and `swiglu_kernels.reference` equal bit by bit. Parameters are by the names of `cases`; `variant` is `Extras.variant`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of plain SwiGLU."""
    return silu(gate) * up


def gate_mul(
    gate: Tensor, up: Tensor, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0
) -> Tensor:
    """The gate of any variant: with a limit, gate is at most that and up between -limit and limit."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if up_offset != 0.0:
        up = up + up_offset
    return silu_mul(gate, up) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate) * up


def block(
    x: Tensor, parameters: Mapping[str, Tensor], product: Callable[..., Tensor] = linear, **variant: Any
) -> Tensor:
    """x [..., hidden] -> [..., intermediate] or, with w_down, [..., hidden]"""

    def project(value: Tensor, name: str) -> Tensor:
        return product(value, parameters[f"w_{name}"], parameters.get(f"bias_{name}"))

    hidden = gate_mul(project(x, "gate"), project(x, "up"), **variant)
    return project(hidden, "down") if "w_down" in parameters else hidden


def experts(x: Tensor, index: Tensor, weights: Tensor, parameters: Mapping[str, Tensor], **variant: Any) -> Tensor:
    """The sum of each token's blocks by its routing weights, as models add it up: expert by expert in x's dtype."""
    rows, index, weights = (value.flatten(0, -2) for value in (x, index, weights))
    output = torch.zeros_like(rows)
    each = zip(*(value.unbind(0) for value in parameters.values()), strict=True)
    for (token, slot), own in zip(by_expert(index, len(parameters["w_gate"])), each, strict=True):
        found = block(rows[token], dict(zip(parameters, own, strict=True)), _product, **variant)
        output.index_add_(0, token, (found * weights[token, slot, None]).to(output.dtype))
    return output.view_as(x)


def by_expert(index: Tensor, experts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each expert the tokens of top_k_index [tokens, top_k] that have it, and in which slots, in their order.

    An index outside of 0 to experts - 1 is an expert of another rank, and skipped. The GPU is waited for once, not once
    for each expert.
    """
    flat = index.flatten()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=experts + 1).tolist()[:experts]
    for pairs in order[: sum(counts)].split(counts):
        yield pairs // index.shape[1], pairs % index.shape[1]


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The bias is added to the rounded product: torch's grouped product takes none, so what is built on it does so."""
    product = rows @ weight.T
    return product if bias is None else product.add_(bias)
