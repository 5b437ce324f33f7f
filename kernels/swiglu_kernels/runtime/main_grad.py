"""Gradients of weights that are added to `weight.main_grad` in fp32: gradient accumulation fusion, as in Megatron-LM.

A backward adds to it, marks the parameter by `grad_added_to_main_grad = True`, and hands autograd a tensor of the
weight's shape, so that hooks run. A parameter that came with the mark, as Megatron-LM's do, gets memory that was never
written, which Megatron-LM drops, and zeros where its `zero_out_wgrad` is set; any other gets zeros, and has that set.
"""

from typing import Any

import torch

MARK = "main_grad "
"""Before the option of an operator by which its weight gradients are made, where these go into main_grad."""
HALF = (torch.bfloat16, torch.float16)
"""The dtypes of operands whose products a kernel adds to main_grad; other products are added behind it."""


def _owner_of(weight: torch.Tensor) -> Any:
    return weight if weight._base is None else weight._base


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Return what the gradient of a weight is added to, for a view of a parameter the same view; None without any.

    Raises ValueError where it is not float32 that lies as the parameter does.
    """
    owner = _owner_of(weight)
    main: torch.Tensor | None = getattr(owner, "main_grad", None)
    if main is None:
        return None
    if main.dtype != torch.float32 or (main.shape, main.stride()) != (owner.shape, owner.stride()):
        expected = f"float32 {tuple(owner.shape)} with the parameter's strides"
        raise ValueError(f"main_grad: expected {expected}, got {main.dtype} {tuple(main.shape)}")
    first = main.storage_offset() + weight.storage_offset() - owner.storage_offset()
    return main.as_strided(weight.shape, weight.stride(), first)


def stand_in(weight: torch.Tensor) -> torch.Tensor:
    """Mark that the gradient was added, and return what autograd gets in its place."""
    owner = _owner_of(weight)
    if not hasattr(owner, "grad_added_to_main_grad"):
        owner.zero_out_wgrad = True
    owner.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(owner, "zero_out_wgrad", False) else torch.empty_like(weight)
