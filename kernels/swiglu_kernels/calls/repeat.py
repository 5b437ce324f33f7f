"""Calls that were made before: without a gradient only the launch is left of them, with one an autograd function.

A call checks its arguments, chooses kernels and goes through PyTorch's dispatcher, which takes longer than a small
kernel runs. All of it has the same outcome for arguments of a kind: the same sizes, strides, dtypes, devices,
alignment and options. So the first call of a kind is remembered, and the next ones do without, where nobody watches
what the dispatcher does: no trace, transform, mode, autocast or profiler.
"""

from collections.abc import Callable
from typing import Any

import torch

from swiglu_kernels.launches import plan
from swiglu_kernels.launches.backend import INTERPRETING
from swiglu_kernels.launches.internals import watched
from swiglu_kernels.launches.precision import float32_dot_precision

Kind = tuple[Any, ...]
Again = Callable[..., torch.Tensor]
"""Takes the tensors of a call, x as a matrix, and returns its result."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def kind_of(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Kind | None:
    """Return what a call has in common with others of its kind; None where it has to take the long way.

    Args:
        name: of the function.
        tensors: what it was given as tensors, or None; unchecked.
        options: what else it was given; unchecked.
    """
    if INTERPRETING or torch.compiler.is_compiling() or watched() or tensors[0] is None:
        return None
    with_gradients = torch.is_grad_enabled()
    # With types, because True equals 1 and is no number here.
    kind: list[Any] = [name, with_gradients, options, tuple(map(type, options))]
    for tensor in tensors:
        if tensor is None:
            kind.append(None)
            continue
        if type(tensor) not in _PLAIN or not on_gpu(tensor):
            return None
        if tensor.is_neg() or tensor.layout is not torch.strided:  # its memory does not hold its elements as they are
            return None
        kind += tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16
        if with_gradients:
            kind.append(tensor.requires_grad)
    if tensors[0].dtype == torch.float32:
        kind.append(float32_dot_precision())
    return tuple(kind)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Tell whether kernels may run on a tensor."""
    return tensor.is_cuda


def known(kind: Kind | None) -> Again | None:
    """Return what makes a call of a kind again."""
    if kind is None:
        return None
    try:
        return plan.calls.get(kind)
    except TypeError:  # an option that cannot be hashed is a wrong one
        return None


def remember(kind: Kind, again: Again) -> None:
    """Keep what makes a call of a kind again; it may hold no tensor."""
    plan.keep(plan.calls, kind, again)
