"""Autocast for operations with matrix products: they take part in it as torch.nn.functional.linear does."""

from typing import Any

import torch

# Asked once: torch.compile in torch 2.11 cannot trace the question.
_DEVICES = tuple(
    device
    for device in ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia")
    if torch.amp.is_autocast_available(device)
)


def _dtype(x: object) -> torch.dtype | None:
    """Return the dtype that autocast gives to the operands of a product with x, None where it is off."""
    if not isinstance(x, torch.Tensor) or x.device.type not in _DEVICES:
        return None
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor as autocast does, which leaves float64 alone; gradients arrive in the dtype from before."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
        return value.to(dtype)
    return value


def operands(x: Any, *others: Any) -> tuple[Any, ...]:
    """Return the operands of a product as they are, or cast where autocast is on."""
    dtype = _dtype(x)
    if dtype is None:
        return x, *others
    return tuple(_cast(value, dtype) for value in (x, *others))
