"""Outputs and gradients in, verdict out. Every tolerance of the suite is in this file.

An implementation may lose MARGIN times what eager PyTorch loses in the same dtype, measured from fp64 on the same
inputs, plus a rounding floor: one rounding to the dtype, and what an fp32 sum of that length loses in any order
(sqrt(n) times fp32's unit roundoff, the probabilistic bound of Higham and Mary 2019). Two errors are judged per tensor:

* the relative error ||value - truth|| / ||truth||, which sees a systematic loss and a wrong row or column, and
* the largest element error over the truth's root mean square, which sees a single wrong element.

Eager's loss on few elements is chance: on three it may be a tenth of what it is on three thousand. A tensor of fewer
than about 140 elements has a larger factor than MARGIN: the one that the ratio of two errors of one size exceeds once
in a million (F distribution), at most FEW_MARGIN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import scipy.stats
import torch
from torch import Tensor

from swiglu_bench.rows.record import TensorCheck

MARGIN = 1.5
"""Allowed relative error in units of eager's."""
MAX_MARGIN = 3.0
"""Allowed largest element error in units of eager's; an extreme of many elements scatters more than their norm."""


FEW_MARGIN = 20.0
"""The most that either factor grows to for tensors of few elements."""


@functools.cache
def scatter(elements: int) -> float:
    """What the ratio of two root mean squares, of as many normal errors of the same size, exceeds once in a million."""
    if elements >= 1000:
        return 1.0
    return min(FEW_MARGIN, math.sqrt(scipy.stats.f.isf(1e-6, elements, elements))) if elements else 1.0


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding one number to a dtype: half its machine epsilon."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class TensorError:
    """Distance of one tensor from the truth."""

    relative: float
    maximum: float
    finite: bool
    median: float | None = None
    p999: float | None = None
    worst_index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fault:
    """Why a tensor fails without a look at its values: the check's name and a phrase."""

    check: str
    reason: str


def tensor_error(value: Tensor, truth: Tensor, distribution: bool = False) -> TensorError:
    """Measure a tensor against its fp64 truth of the same shape; empty tensors have no error.

    `distribution` adds the median and the 99.9th percentile of the elements' errors and the place of the largest.
    """
    if truth.numel() == 0:
        return TensorError(0.0, 0.0, True)
    difference = value.detach().to(truth.device, torch.float64, copy=True).sub_(truth)
    finite = bool(torch.isfinite(difference).all())
    scale = truth.norm().item() / math.sqrt(truth.numel())
    if not finite:
        return TensorError(math.inf, math.inf, False)
    if scale == 0.0:
        zero = bool((difference == 0).all())
        return TensorError(0.0 if zero else math.inf, 0.0 if zero else math.inf, True)
    relative = difference.norm().item() / (scale * math.sqrt(truth.numel()))
    errors = difference.abs_().flatten()
    maximum = errors.max().item() / scale
    if not distribution:
        return TensorError(relative, maximum, True)
    place = _index(int(errors.argmax()), truth.shape)
    ordered = (errors / scale).float().sort().values
    ranks = ((ordered.numel() - 1) // 2, math.ceil(0.999 * ordered.numel()) - 1)
    median, p999 = (ordered[rank].item() for rank in ranks)
    return TensorError(relative, maximum, True, median, p999, place)


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def form_fault(
    value: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, others: Iterable[Tensor] = ()
) -> Fault | None:
    """What is wrong with a result before its values count: no ordinary tensor, another form, or memory of `others`."""
    if value is None:
        return Fault("missing", "missing: no gradient came back")
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return Fault("plain tensor", f"is a {type(value).__name__}, layout {value.layout}, expected an ordinary tensor")
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


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(value: Tensor) -> Tensor:
    """Two int64 sums over a tensor's bits, weighted by row and by column, on its device: equal for equal tensors.

    It is queued on the current stream and waits for nothing; NaN counts as the bits that it is.
    """
    bits = value.detach().contiguous().view(_BITS[value.element_size()])
    bits = bits.reshape(-1, bits.shape[-1]) if bits.dim() > 1 else bits.reshape(1, -1)
    sums = [bits.sum(dim, dtype=torch.int64) for dim in (1, 0)]
    return torch.stack([(one * torch.arange(1, one.numel() + 1, device=one.device)).sum() for one in sums])


def same_bits(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype are equal bit for bit, NaN included."""
    bits = _BITS[value.element_size()]
    return value.shape == other.shape and torch.equal(
        value.detach().contiguous().view(bits), other.detach().contiguous().view(bits)
    )


def check(
    name: str,
    value: Tensor | None,
    truth: Tensor,
    eager: TensorError,
    dtype: torch.dtype,
    longest_sum: int,
    others: Iterable[Tensor] = (),
    distribution: bool = False,
) -> TensorCheck:
    """The verdict on one tensor.

    `eager` is eager PyTorch's error on it, the judge; `longest_sum` the terms of the longest sum in it; `others`
    are tensors whose memory it must not share.
    """
    roundoff = unit_roundoff(dtype)
    summation = math.sqrt(longest_sum) * unit_roundoff(torch.float32)
    peak = truth.abs().max().item() / (truth.norm().item() / math.sqrt(truth.numel()) or 1.0) if truth.numel() else 0.0
    chance = scatter(truth.numel())
    few = max(1.0, chance / MARGIN)
    allowed = max(MARGIN, chance) * eager.relative + few * (roundoff / 2 + summation)
    max_allowed = max(MAX_MARGIN, chance) * eager.maximum + few * (roundoff + summation) * peak
    error = TensorError(math.inf, math.inf, False)
    fault = form_fault(value, truth.shape, dtype, truth.device, others)
    if not fault:
        assert value is not None
        error = tensor_error(value, truth, distribution)
        if not error.finite:
            wrong = int((~torch.isfinite(value)).sum())
            fault = Fault("finite", f"NaN or Inf in {wrong} of {value.numel()} elements")
        elif error.relative > allowed:
            text = f"relative error {error.relative:.2e} exceeds {allowed:.2e} (eager loses {eager.relative:.2e})"
            fault = Fault("relative error", text)
        elif error.maximum > max_allowed:
            text = f"largest element error {error.maximum:.2e} x rms exceeds {max_allowed:.2e}"
            fault = Fault("largest element", text)
    return TensorCheck(
        tensor=name,
        ok=fault is None,
        error=error.relative,
        eager_error=eager.relative,
        allowed=allowed,
        max_error=error.maximum,
        eager_max_error=eager.maximum,
        max_allowed=max_allowed,
        reason=fault.reason if fault else "",
        check=fault.check if fault else "",
        median_error=error.median,
        p999_error=error.p999,
        worst_index=error.worst_index,
    )


def poison(shapes: Iterable[Sequence[int]], dtype: torch.dtype, device: torch.device) -> None:
    """Fill memory that the allocator is about to hand out again with NaN, so that an unwritten element shows.

    Blocks of the shapes of the tensors to come are allocated, filled and freed; an implementation that allocates its
    output without writing all of it then returns NaN, not the previous contender's right answer.
    """
    blocks = [torch.full(shape, math.nan, dtype=dtype, device=device) for shape in shapes for _ in range(2)]
    del blocks
