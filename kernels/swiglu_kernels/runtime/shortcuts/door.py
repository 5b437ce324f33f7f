"""Whether shortcuts are taken, and the calls that were made before: the one place that whole calls and `plan.run` ask.

A call checks its arguments, chooses kernels and goes through PyTorch's dispatcher, which takes longer than a small
kernel runs. All of it has the same outcome for arguments of a kind: tensors of the same kind and the same options. The
first call of a kind is therefore remembered. Without a gradient only the launches are left of the next ones, with one
an autograd function. `plan.py` keeps launches, `series.py` records what whole calls do.

This is done where nobody watches what the dispatcher does (no trace, transform, mode, autocast or profiler). With the
environment variable SWIGLU_KERNELS_SHORTCUTS=off, or while `closed`, every launch is described anew and goes through
Triton: the same kernels and bits, in more of the host's time. In Triton's interpreter it is always so.
"""

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.backend import INTERPRETING

VARIABLE = "SWIGLU_KERNELS_SHORTCUTS"
MOST_KEYS = 4096
"""About 2 KB each. Beyond, the oldest is forgotten: a new number of tokens in every call would fill any memory."""
MOST_KINDS = 32
"""Of one key; they are asked one after the other. Beyond, the oldest is forgotten."""
Kind = tuple[tuple[Any, ...], list[torch.Tensor]]
"""What calls are looked up by, and the tensors that are compared then."""
Again = Callable[..., torch.Tensor]
"""Takes the tensors of a call and returns its result."""
Value = TypeVar("Value")
Check = Callable[..., bool]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_shut = INTERPRETING or os.environ.get(VARIABLE) == "off"


def is_open() -> bool:
    """Tell whether shortcuts are taken."""
    return not _shut


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Take none meanwhile, in all threads; what was remembered stays."""
    global _shut
    before, _shut = _shut, True
    try:
        yield
    finally:
        _shut = before


def watched() -> bool:
    """Tell whether anybody may watch what the dispatcher does: a trace, transform, mode, autocast or the profiler."""
    return not internals.can_see_watchers or bool(
        internals.dispatch_modes()
        or internals.function_modes()
        or internals.transforms()
        or torch.is_autocast_enabled("cuda")
        or internals.profiler()
        or internals.tracing() is not None
        or internals.dual_level() >= 0
    )


class Kinds(Generic[Value]):
    """Values by a key and by a kind of tensors: all that their addresses do not say.

    Tensors of a kind have the same types, sizes, strides, dtypes, devices and wish for gradients; and, where they are
    float32, the same precision of products. A key has as many tensors each time. No tensor is kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[Check, Value]]] = {}

    def get(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> Value | None:
        """Return the value of a key and of these tensors' kind."""
        if tensors[0].dtype == torch.float32:
            key = key, torch.backends.cuda.matmul.fp32_precision
        for check, value in self._known.get(key, ()):
            if check(*tensors):
                return value
        return None

    def add(self, key: Hashable, tensors: Sequence[torch.Tensor], value: Value) -> None:
        """Remember a value for a key and these tensors' kind, which has none."""
        if tensors[0].dtype == torch.float32:
            key = key, torch.backends.cuda.matmul.fp32_precision
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
    return lambda *others: [described(tensor) for tensor in others] == wanted


calls: Kinds[Again] = Kinds()
"""What makes whole calls again, by what they were called with; forgotten together with the plans (`plan.forget`)."""


def find(
    name: str, tensors: tuple[Any, ...], optional: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Kind | None, Again | None]:
    """Return what a call has in common with others of its kind, and what makes such a call again, if one is remembered.

    Both are None where the call has to take the long way. `name` is the function's, the others are what it was given,
    unchecked: as tensors, as tensors or None, and as options.
    """
    if _shut or torch.compiler.is_compiling() or watched():
        return None, None
    x, weight = tensors[:2]
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or x.layout is not torch.strided:
        return None, None
    given, which = list(tensors), 1
    for tensor in optional:
        which *= 2
        if tensor is not None:
            which += 1
            given.append(tensor)
    # With types, because True equals 1 and is no number here. Some of the sizes, so that few kinds have the same key.
    types = tuple(map(type, options))
    key = name, torch.is_grad_enabled(), which, options, types, x.shape, weight.shape, x.data_ptr() % 16
    try:
        return (key, given), calls.get(key, given)
    except TypeError:  # an option that cannot be hashed is a wrong one, and a tensor may be none
        return None, None


def on_gpu(tensor: torch.Tensor) -> bool:
    """Tell whether kernels may run on a tensor."""
    return tensor.is_cuda


def remember(kind: Kind, again: Again) -> None:
    """Keep what makes a call of a kind again; it may hold no tensor."""
    for tensor in kind[1]:
        # Kernels read the memory of these, which holds their elements as they are.
        if type(tensor) not in _PLAIN or not on_gpu(tensor) or tensor.is_neg() or tensor.layout is not torch.strided:
            return
    calls.add(*kind, again)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """View x [..., hidden] as [tokens, hidden], or copy it where its leading dimensions do not collapse."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def like_leading(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Give [tokens, features] the leading dimensions of x."""
    if x.dim() == 2:
        return out
    return out.unflatten(0, x.shape[:-1]) if x.dim() > 1 else out[0]


def of_matrix(x: torch.Tensor, again: Again) -> Again:
    """Let what makes a call again for a matrix x do so for a tensor with as many dimensions as this one."""
    return again if x.dim() == 2 else lambda x, *others: like_leading(again(as_matrix(x), *others), x)
