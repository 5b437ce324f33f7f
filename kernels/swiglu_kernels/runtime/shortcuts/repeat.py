"""Calls that were made before: without a gradient only the launch is left of them, with one an autograd function.

A call checks its arguments, chooses kernels and goes through PyTorch's dispatcher, which takes longer than a small
kernel runs. All of it has the same outcome for arguments of a kind: tensors of the same kind (`kinds.py`) and the same
options. So the first call of a kind is remembered, and the next ones do without, where nobody watches what the
dispatcher does: no trace, transform, mode, autocast or profiler.
"""

from collections.abc import Callable
from typing import Any

import torch

from swiglu_kernels.runtime.internals import watched
from swiglu_kernels.runtime.shortcuts import door, plan

Kind = tuple[tuple[Any, ...], list[torch.Tensor]]
"""What calls are looked up by, and the tensors that are compared then."""
Again = Callable[..., torch.Tensor]
"""Takes the tensors of a call and returns its result."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def find(
    name: str, tensors: tuple[Any, ...], optional: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Kind | None, Again | None]:
    """Return what a call has in common with others of its kind, and what makes such a call again, if one is remembered.

    Both are None where the call has to take the long way.

    Args:
        name: of the function.
        tensors: what it was given as tensors, unchecked.
        optional: what it was given as tensors, or None; unchecked.
        options: what else it was given; unchecked.
    """
    if not door.is_open() or plan.survey is not None or torch.compiler.is_compiling() or watched():
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
        return (key, given), plan.calls.get(key, given)
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
    plan.calls.add(*kind, again)
