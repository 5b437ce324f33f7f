"""warm_up: compile before the first request what it would wait for."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from swiglu_kernels.glu import swiglu_glu
from swiglu_kernels.mlp import swiglu_mlp
from swiglu_kernels.modules import FusedModule


def warm_up(
    module_or_shapes: nn.Module | Iterable[tuple[int, int]],
    tokens: Iterable[int],
    *,
    gradients: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> int:
    """Make one call for each token count, on zeros: kernels are compiled and chosen, and the next calls are quick.

    Args:
        module_or_shapes: a model, whose FusedSwiGLU, FusedSwiGLUMLP and FusedSwiGLUPackedMLP are called, of several
            alike one; or (hidden, intermediate) of `swiglu_glu` and `swiglu_mlp` with contiguous weights.
        tokens: counts that calls will have, each at least 1. Others may need kernels of their own: sizes that are no
            multiple of 16 do, and small ones have other tiles than large ones.
        gradients: call with gradients and run the backward, too. No `.grad` is touched.
        dtype: of x and weights, for shapes.
        device: for shapes.

    Returns:
        The number of calls. Modules are called under the autocast that is on, with x in the dtype of their weights.

    Raises:
        ValueError: a token count is below 1; or the model has none of these modules.
    """
    counts = sorted(set(tokens))
    if not counts or counts[0] < 1:
        raise ValueError(f"tokens: expected counts of at least 1, got {counts}")
    if isinstance(module_or_shapes, nn.Module):
        calls = _of_modules(module_or_shapes)
    else:
        calls = [one for shape in module_or_shapes for one in _of_shape(*shape, dtype, device)]
    made = 0
    for call, x_of, operands in calls:
        for count in counts:
            with torch.no_grad():
                call(x_of(count))
            made += 1
            if gradients:
                with torch.enable_grad():
                    x = x_of(count).requires_grad_()
                    wanted = [x, *(one for one in operands if one.requires_grad)]
                    torch.autograd.grad(call(x).sum(), wanted, allow_unused=True)
                made += 1
    return made


Call = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[int], torch.Tensor], list[torch.Tensor]]
"""What is called, what makes its x of a token count, and its other operands."""


def _of_modules(model: nn.Module) -> list[Call]:
    found: dict[object, tuple[FusedModule, list[torch.Tensor]]] = {}
    for module in model.modules():
        if isinstance(module, FusedModule):
            own: list[torch.Tensor] = list(module.parameters())
            kinds = tuple((one.shape, one.stride(), one.dtype, one.device, one.requires_grad) for one in own)
            found.setdefault((type(module), module.options, module.gate_activation, kinds), (module, own))
    if not found:
        raise ValueError(f"{type(model).__name__} has no fused module: patch_model puts them in")
    return [(module, partial(_zeros_like, own[0]), own) for module, own in found.values()]


def _zeros_like(weight: torch.Tensor, count: int) -> torch.Tensor:
    return weight.new_zeros(count, weight.shape[1])


def _of_shape(hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device | str) -> list[Call]:
    def zeros(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=dtype, device=device, requires_grad=True)

    gate, up, down = zeros(intermediate, hidden), zeros(intermediate, hidden), zeros(hidden, intermediate)
    x_of = partial(_zeros_like, gate)
    return [
        (lambda x: swiglu_glu(x, gate, up), x_of, [gate, up]),
        (lambda x: swiglu_mlp(x, gate, up, down), x_of, [gate, up, down]),
    ]
