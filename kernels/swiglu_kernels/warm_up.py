"""warm_up: compile before the first request what it would wait for."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from swiglu_kernels.experts_interface import NAMES, takes_part
from swiglu_kernels.modules import FusedModule, FusedSwiGLUExperts
from swiglu_kernels.operations.glu import swiglu_glu
from swiglu_kernels.operations.mlp import swiglu_mlp


def warm_up(
    module_or_shapes: nn.Module | Iterable[tuple[int, int]],
    tokens: Iterable[int],
    *,
    top_k: int | None = None,
    gradients: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> int:
    """Make one call for each token count, on zeros: kernels are compiled and chosen, and the next calls are quick.

    Args:
        module_or_shapes: a model, whose FusedSwiGLU, FusedSwiGLUMLP, FusedSwiGLUPackedMLP, FusedSwiGLUExperts and
            experts that transformers runs on `swiglu_experts` are called, one of each kind; or (hidden, intermediate)
            of `swiglu_glu` and `swiglu_mlp` with contiguous weights.
        tokens: counts that calls will have, each at least 1. Other counts may need other kernels: small ones
            have other tiles than large ones and, but for the kernels by hand, so have those that are no multiple of 16.
        top_k: experts of a token; None: as the model's configuration says. Routing weights of the module's dtype and
            of fp32 are both tried.
        gradients: call with gradients and run the backward, too. No `.grad` is touched.
        dtype: of x and weights, for shapes.
        device: for shapes.

    Returns:
        The number of calls. Modules are called under the autocast that is on, with x in the dtype of their weights.

    Raises:
        ValueError: a token count is below 1; the model has none of these modules; or nothing says top_k.
    """
    counts = sorted(set(tokens))
    if not counts or counts[0] < 1:
        raise ValueError(f"tokens: expected counts of at least 1, got {counts}")
    if isinstance(module_or_shapes, nn.Module):
        calls = _of_modules(module_or_shapes, top_k)
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
                    out = call(x)
                    torch.autograd.grad(out, wanted, torch.zeros_like(out), allow_unused=True)
                made += 1
    return made


Call = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[int], torch.Tensor], list[torch.Tensor]]
"""What is called, what makes its x of a token count, and its other operands."""


def _of_modules(model: nn.Module, top_k: int | None) -> list[Call]:
    found: dict[object, list[Call]] = {}
    for module in model.modules():
        own: list[torch.Tensor] = list(module.parameters())
        alike: list[object] = [type(module), *((one.shape, one.stride(), one.dtype, one.device, one.requires_grad)
                               for one in own)]  # fmt: skip
        if isinstance(module, FusedModule):
            found[(*alike, module.options, module.gate_activation)] = [(module, partial(_zeros_like, own[0]), own)]
        elif isinstance(module, FusedSwiGLUExperts) or _runs_on_ours(module):
            found[(*alike, str(getattr(module, "options", "")))] = _of_experts(module, own, top_k)
    if not found:
        raise ValueError(f"{type(model).__name__} has no fused module: patch_model puts them in")
    return [call for calls in found.values() for call in calls]


def _runs_on_ours(module: Any) -> bool:
    return takes_part(module) and module.config._experts_implementation in NAMES.values()


def _of_experts(module: Any, own: list[torch.Tensor], top_k: int | None) -> list[Call]:
    slots = top_k or getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    if not slots:
        raise ValueError(f"top_k: {type(module).__name__} does not say how many experts a token has; give it")
    weight, count = module.gate_up_proj, module.gate_up_proj.shape[0]
    hidden = weight.shape[1 if getattr(module, "is_transposed", False) else 2]

    def call(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        index = torch.arange(x.shape[0] * slots, device=x.device).view(-1, slots) % count
        out: torch.Tensor = module(x, index, torch.ones_like(index, dtype=dtype).requires_grad_(x.requires_grad))
        return out

    dtypes = dict.fromkeys((weight.dtype, torch.float32))
    return [(partial(call, dtype=dtype), lambda tokens: weight.new_zeros(tokens, hidden), own) for dtype in dtypes]


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
