"""What a contender hands over: whether it is a plain tensor of the right form, and whether it changes afterwards.

These run in the contender's process, where the tensors are; values are judged elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swiglu_bench.cases.cases import differentiable
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import sizes, torch_dtype


@dataclass(frozen=True)
class Fault:
    """Why a tensor fails without a look at its values: the check's name and a phrase."""

    check: str
    reason: str


def form_fault(
    value: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device, others: Iterable[Tensor] = ()
) -> Fault | None:
    """What is wrong with a result before its values count: no ordinary tensor, another form, or memory of `others`."""
    if value is None:
        return Fault("missing", "missing: no gradient came back")
    if type(value) is not Tensor:
        return Fault("plain tensor", f"is a {type(value).__name__}, expected a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return Fault("plain tensor", f"is a {kind} tensor, expected a dense one")
    if value.is_conj() or value.is_neg():
        return Fault("plain tensor", "is a lazy view (conjugate or negative), expected its values in memory")
    if tuple(value.shape) != tuple(shape):
        return Fault("form", f"has shape {tuple(value.shape)}, expected {tuple(shape)}")
    if value.dtype != dtype:
        return Fault("form", f"has dtype {value.dtype}, expected {dtype}")
    if value.device.type != device.type or device.index not in (None, value.device.index):
        return Fault("form", f"is on {value.device}, expected {device}")
    first, end = _extent(value)
    if value.numel() and (not value.data_ptr() or end - value.untyped_storage().data_ptr() > _storage_bytes(value)):
        return Fault("plain tensor", "has no memory of its own")
    if any(first < other_end and other_first < end for other_first, other_end in map(_extent, others)):
        return Fault("aliasing", "shares memory with an input or a weight")
    return None


def _storage_bytes(value: Tensor) -> int:
    return value.untyped_storage().nbytes()


def _extent(value: Tensor) -> tuple[int, int]:
    """First and one-past-last byte address of what a strided tensor may touch."""
    if value.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (reach + 1) * value.element_size()


AT_ONCE = 2**26
"""Elements of a tensor that are added up together."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(value: Tensor) -> Tensor:
    """Two int64 sums over a tensor's bits, weighted by row and by column, on its device: equal for equal tensors.

    It is queued on the current stream and waits for nothing; NaN counts as the bits that it is.
    """
    bits = value.detach().contiguous().view(_BITS[value.element_size()])
    bits = bits.reshape(-1, bits.shape[-1]) if bits.dim() > 1 else bits.reshape(1, -1)
    rows, columns = [], torch.zeros(bits.shape[1], dtype=torch.int64, device=bits.device)
    for few in bits.split(max(1, AT_ONCE // max(1, bits.shape[1]))):  # a sum copies what it sums up to its own type
        wide = few.long()
        rows.append(wide.sum(1))
        columns += wide.sum(0)
    sums = (torch.cat(rows), columns)
    return torch.stack([(one * torch.arange(1, one.numel() + 1, device=one.device)).sum() for one in sums])


def same_bits(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype are equal bit for bit, NaN included."""
    bits = _BITS[value.element_size()]
    return value.shape == other.shape and torch.equal(
        value.detach().contiguous().view(bits), other.detach().contiguous().view(bits)
    )


def poison(problem: Problem, backward: bool) -> None:
    """Fill memory of the sizes of a call's results with NaN and free it, so that an element never written shows.

    An implementation that allocates its output without writing all of it then returns NaN, not an earlier answer.
    """
    found = sizes(problem.case)
    names = ("upstream", *((*differentiable(problem.case.scope), *problem.parameters) if backward else ()))
    full = partial(torch.full, fill_value=math.nan, dtype=torch_dtype(problem.case), device=problem.device)
    blocks = [full(found[name]) for name in names for _ in range(2)]
    del blocks
