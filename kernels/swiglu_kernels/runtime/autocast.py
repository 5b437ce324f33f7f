"""Autocast for operations with matrix products: they take part in it as torch.nn.functional.linear does."""

from typing import Any

import torch

# Asked once: torch.compile in torch 2.11 cannot trace the question.
_KNOWN = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia")
_DEVICES = tuple(filter(torch.amp.is_autocast_available, _KNOWN))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor as autocast does, which leaves float64 alone; gradients arrive in the dtype from before."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
        return value.to(dtype)
    return value


def operands(x: Any, *others: Any) -> tuple[Any, ...]:
    """Return the operands of a product as they are, or cast where autocast is on."""
    kind = x.device.type if isinstance(x, torch.Tensor) else None
    if kind not in _DEVICES or not torch.is_autocast_enabled(kind):
        return x, *others
    return tuple(_cast(value, torch.get_autocast_dtype(kind)) for value in (x, *others))
