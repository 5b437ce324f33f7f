"""Which of the kernels' gates a module applies: its own forward is called on a few numbers, and compared with them.

The numbers of a gate, such as its limit, are read from the attributes that models keep them in; no class is known here
by its name.
"""

import ctypes
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from swiglu_kernels.ops.gate.definition import gate_mul
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.runtime.internals import constant_in_graphs

LIMITS, ALPHAS, CAPS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha"), ("gate_softcap", "up_softcap")
"""Attributes that hold these numbers; the caps are submodules of the activation, whose `softcap` is the number."""
_TOLERANCE = 1e-5
T = TypeVar("T")


def gate_shown(module: nn.Module, shown: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Formula | None:
    """Return the gate that gives the same results as `shown`; None where the kernels have no such gate.

    Args:
        module: has the numbers of its gate as attributes.
        shown: shown(gate, up), both [numbers, 1] in float32 on the CPU, returns the module's result of that shape.
    """
    limits = _numbers(module, LIMITS)
    reach = 4.0 * max([5.0, *limits]) if limits else 20.0
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        numbers = torch.linspace(-reach, reach, 97, dtype=torch.float32, device="cpu")
        gate, up = (grid.reshape(-1, 1) for grid in torch.meshgrid(numbers, numbers[::8], indexing="ij"))
        found = shown(gate.clone(), up.clone())
        for formula in _candidates(module, limits):
            if torch.allclose(found, gate_mul(gate, up, **formula.options), rtol=_TOLERANCE, atol=_TOLERANCE):
                return formula
    return None


def gate_of_mlp(module: nn.Module, gated: tuple[str, ...], down: str) -> Formula | None:
    """Return the gate of an MLP with these projections; None where the kernels lack it, or its forward cannot tell.

    The forward of its class runs on a copy whose projections hand single numbers through: weights do not matter.
    """
    twin = object.__new__(type(module))
    twin.__dict__ |= {name: value for name, value in module.__dict__.items() if name not in ("_modules", "forward")}
    twin.__dict__ |= {"_modules": dict(module._modules), "training": False}
    single = torch.ones(1, 1, device="cpu", dtype=torch.float32)
    weights = torch.block_diag(single, single).split(2 // len(gated))
    for name, weight in zip((*gated, down), (*weights, single), strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")  # which draws no random numbers
        linear.weight = nn.Parameter(weight)
        twin._modules[name] = linear
    try:
        with torch.random.fork_rng([]):
            return gate_shown(module, lambda gate, up: twin.forward(torch.cat((gate, up), -1)))
    except Exception:
        return None


def once_for_a_module(find: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return a function that asks `find` of each module once; in graphs, which cannot hold the result, a constant."""
    found: weakref.WeakKeyDictionary[nn.Module, T] = weakref.WeakKeyDictionary()

    @constant_in_graphs
    def at(address: int) -> T:
        """Of the module that lies there: the Dynamo of PyTorch 2.11 hands no module to a function marked so."""
        module = ctypes.cast(address, ctypes.py_object).value
        if module not in found:
            found[module] = find(module)
        return found[module]

    return functools.wraps(find)(lambda module: at(id(module)))


def _numbers(owner: object, names: tuple[str, ...]) -> list[float]:
    values = [getattr(owner, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, (int, float)) and value and math.isfinite(value)]


def _candidates(module: nn.Module, limits: list[float]) -> Iterator[Formula]:
    """Yield plain SwiGLU first, then what the numbers of a module allow."""
    yield PLAIN
    for alpha, limit, offset in itertools.product({1.0, *_numbers(module, ALPHAS)}, [None, *limits], (0.0, 1.0)):
        yield Formula("silu", 1.0, alpha, limit, offset)
        if alpha == 1.0:
            yield Formula("gelu_tanh", 1.0, 1.0, limit, offset)
            yield Formula("silu_clamp", 1.0, 1.0, limit, offset)
    activation = getattr(module, "act_fn", module)
    caps = [cap for name in CAPS for cap in _numbers(getattr(activation, name, None), ("softcap",))]
    if len(caps) == len(CAPS):
        yield Formula("silu_softcap", limit=(caps[0], caps[1]))
