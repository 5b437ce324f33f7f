"""Kinds of tensors: all that their addresses do not say, so that what is right for some is right for all of a kind."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.precision import float32_dot_precision

MOST_KEYS = 4096
"""About 2 KB each. Beyond, the oldest is forgotten: a new number of tokens in every call would fill any memory."""
MOST_KINDS = 32
"""Of one key; they are asked one after the other. Beyond, the oldest is forgotten."""
Value = TypeVar("Value")
Check = Callable[..., bool]


class Kinds(Generic[Value]):
    """Values by a key and by a kind of tensors.

    Tensors of a kind have the same types, sizes, strides, dtypes, devices and wish for gradients; and, where they are
    float32, the same precision of products. A key has as many tensors each time. No tensor is kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[Check, Value]]] = {}

    def get(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> Value | None:
        """Return the value of a key and of these tensors' kind."""
        if tensors[0].dtype == torch.float32:
            key = key, float32_dot_precision()
        for check, value in self._known.get(key, ()):
            if check(*tensors):
                return value
        return None

    def add(self, key: Hashable, tensors: Sequence[torch.Tensor], value: Value) -> None:
        """Remember a value for a key and these tensors' kind, which has none."""
        if tensors[0].dtype == torch.float32:
            key = key, float32_dot_precision()
        known = self._known.get(key, [])[-MOST_KINDS + 1 :]
        # A new list, as another thread may be reading the old one.
        keep(self._known, key, [*known, (internals.guard(tensors) or _guard(tensors), value)])

    def values(self) -> list[Value]:
        """Return all values."""
        return [value for known in self._known.values() for _, value in known]

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()

    def __len__(self) -> int:
        return len(self.values())


def keep(memory: dict[Any, Any], key: Hashable, value: Any) -> None:
    """Remember a value; of at most MOST_KEYS, the newest."""
    while len(memory) >= MOST_KEYS and key not in memory:
        memory.pop(next(iter(memory), key), None)  # the oldest; another thread may be as quick
    memory[key] = value


def _guard(tensors: Sequence[torch.Tensor]) -> Check:
    """Return what `internals.guard` does, in Python."""

    def described(tensor: torch.Tensor) -> tuple[Any, ...]:
        if tensor.layout is not torch.strided:
            return (tensor.layout,)
        layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        return type(tensor), *layout, tensor.requires_grad, tensor.is_neg()

    wanted = [described(tensor) for tensor in tensors]

    def check(*others: torch.Tensor) -> bool:
        return [described(tensor) for tensor in others] == wanted

    return check
