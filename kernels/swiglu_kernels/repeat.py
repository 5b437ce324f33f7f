"""Calls that were made before: without a gradient only the launch is left of them, with one an autograd function.

A call checks its arguments, chooses kernels and goes through PyTorch's dispatcher, which takes longer than a small
kernel runs. All of it has the same outcome for arguments of a kind: the same sizes, strides, dtypes, devices,
alignment and options. So the first call of a kind is remembered, and the next ones do without, where nobody watches
what the dispatcher does: no trace, transform, mode, autocast or profiler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad

from swiglu_kernels import plan
from swiglu_kernels.backend import INTERPRETING
from swiglu_kernels.formula import Formula
from swiglu_kernels.glu_forward import Biases, forward_launch
from swiglu_kernels.launch import on_device
from swiglu_kernels.precision import float32_dot_precision

Kind = tuple[Any, ...]


@dataclass(frozen=True)
class Launched:
    """A call without a gradient: the forward's launch."""

    plan: plan.Plan
    launch: Callable[..., None]


@dataclass(frozen=True)
class Chosen:
    """A call with a gradient: the operator's arguments that are no tensors, checked and chosen."""

    options: tuple[Any, ...]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def kind_of(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Kind | None:
    """Return what a call has in common with others of its kind; None where it has to take the long way.

    Args:
        name: of the function.
        tensors: what it was given as tensors, or None; unchecked.
        options: what else it was given; unchecked.
    """
    if INTERPRETING or torch.compiler.is_compiling() or _is_watched():
        return None
    wants_grad = torch.is_grad_enabled()
    parts: list[Any] = [name]
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
            continue
        if type(tensor) not in _PLAIN or not on_gpu(tensor):
            return None
        if tensor.is_neg() or tensor.layout is not torch.strided:  # its memory does not hold its elements as they are
            return None
        parts += tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16
        parts.append(wants_grad and tensor.requires_grad)
    if tensors[0].dtype is torch.float32:
        parts.append(float32_dot_precision())
    parts += options
    parts += map(type, options)  # True is no number here, though it equals one
    return tuple(parts)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Tell whether kernels may run on a tensor."""
    return tensor.is_cuda


def _is_watched() -> bool:
    return bool(
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
        or torch.is_autocast_enabled("cuda")
        or _profiler_enabled()
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def known(kind: Kind | None) -> Launched | Chosen | None:
    """Return what is remembered of a kind."""
    if kind is None:
        return None
    try:
        return plan.calls.get(kind)
    except TypeError:  # an option that cannot be hashed is a wrong one
        return None


def launch(
    again: Launched, x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, biases: Biases
) -> torch.Tensor | None:
    """Return silu(x w_gate^T) * (x w_up^T) as the remembered call made it; None where its output lies otherwise."""
    z = x.new_empty((x.shape[0], w_gate.shape[0]))
    if z.data_ptr() % 16:
        return None
    with on_device(x.device):
        again.launch(*again.plan.arguments([x, w_gate, w_up, z, *(bias for bias in biases if bias is not None)]))
    return z


def remember_launch(
    kind: Kind,
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    z: torch.Tensor | None,
    biases: Biases,
    options: dict[str, Any],
) -> None:
    """Keep what a call of a kind came down to, which has just launched the forward on these.

    `z` is None where it is gone: then its memory is free, and such a tensor is made again. `options` are the gate's.
    """
    z = x.new_empty((x.shape[0], w_gate.shape[0])) if z is None else z
    arguments = x, w_gate, w_up, z, None, None, biases, Formula(**options)
    found = None if z.data_ptr() % 16 else plan.known(forward_launch, *arguments)
    if found is not None:
        remember(kind, Launched(*found))


def remember(kind: Kind, call: Launched | Chosen) -> None:
    """Keep what a call of a kind came down to."""
    if len(plan.calls) >= plan.MOST_PLANS:
        plan.calls.clear()
    plan.calls[kind] = call
