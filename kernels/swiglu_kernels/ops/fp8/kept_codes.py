"""Codes of weights that serve many calls: forwards, recomputations and backwards until a weight changes.

A weight is known by its memory and its version, which every write to it raises but one through `.data`. The step of any
torch.optim.Optimizer ends what is kept as well, for optimisers that write in such ways.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from swiglu_kernels.runtime import internals

SUFFIX = " kept"
"""Behind the recipe that operators are given, where the weights' codes may be kept."""
T = TypeVar("T")


class _Entry:
    """A weight, whose memory no other gets meanwhile, and its codes with the stream that they were made on."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.known, self.alias, self.trains = _known_by(weight), weight.detach(), weight.requires_grad
        self.codes: dict[Hashable, tuple[Any, Any]] = {}


_entries: "weakref.WeakValueDictionary[int, _Entry]" = weakref.WeakValueDictionary()
"""By address; a `KeptCodes` holds them."""


def _known_by(weight: torch.Tensor) -> tuple[Any, ...]:
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, version


def _capturing(weight: torch.Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


class KeptCodes:
    """Where the codes of a layer's weights are held; `kept` of `swiglu_mlp_fp8` and `swiglu_experts`.

    They take as much memory as 16-bit weights: half for the forward, half for the backward. Weights are quantised in
    every call, as without it, under torch.compile and torch.func, where modules are managed by FSDP, and where autocast
    casts them. A CUDA graph quantises them as well, so that a replay reads the weights as they are, unless they need no
    gradient: then it reads the kept codes, which stay allocated. Replays of a step may write weights unseen: where one
    was captured, nothing is kept from then on.
    """

    def __init__(self) -> None:
        self._held: list[_Entry] = []
        self._pinned: list[_Entry] = []
        self._unseen = False
        _watch_optimizers()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins empty."""
        return KeptCodes, ()

    def clear(self) -> None:
        """Drop the codes: call it after writes through `.data`."""
        for entry in self._held:
            entry.codes.clear()

    def take(self, *weights: torch.Tensor | None) -> bool:
        """Whether codes of these weights may be kept from now on; those of others are dropped."""
        if torch.compiler.is_compiling() or internals.transforms_active() or internals.fsdp_is_used():
            return False
        given = [weight for weight in weights if weight is not None]
        roots = [weight if weight._base is None else weight._base for weight in given]
        if not all(root.is_leaf and type(root) in (torch.Tensor, torch.nn.Parameter) for root in roots):
            return False  # a cast copy, or a part of what FSDP gathers
        if any(map(_capturing, given)):
            self._unseen |= torch.is_grad_enabled() and any(weight.requires_grad for weight in given)
            self._pinned += self._held
        if not self._unseen:
            self._held = list(map(_entry_of, given))
        return not self._unseen


def _entry_of(weight: torch.Tensor) -> _Entry:
    found = _entries.get(weight.data_ptr())
    if found is None or found.known != _known_by(weight):
        found = _entries[weight.data_ptr()] = _Entry(weight)
    return found


def find(weight: torch.Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` returned earlier for the same weight and key on this stream, else what it does now."""
    entry, capturing = _entries.get(weight.data_ptr()), _capturing(weight)
    if entry is None or entry.known != _known_by(weight) or (capturing and entry.trains):
        return make()
    stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
    of_stream, codes = entry.codes.get(key, (None, None))
    if codes is None or (of_stream != stream and not capturing):
        codes = make()
        if not capturing:
            entry.codes[key] = stream, codes
    return codes


@functools.cache
def _watch_optimizers() -> None:
    @internals.constant_in_graphs  # a compiled step raises versions
    def drop_all(*_: Any) -> None:
        for entry in list(_entries.values()):
            entry.codes.clear()

    register_optimizer_step_post_hook(drop_all)
