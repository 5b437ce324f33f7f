"""Outputs and gradients in, verdict out. Every tolerance of the suite is in this file.

An implementation may lose MARGIN times what eager PyTorch loses in the same dtype, measured from fp64 on the same
inputs, plus a rounding floor: one rounding to the dtype, and what an fp32 sum of that length loses in any order
(sqrt(n) times fp32's unit roundoff, the probabilistic bound of Higham and Mary 2019). Two errors are judged per tensor:

* the relative error ||value - truth|| / ||truth||, which sees a systematic loss and a wrong row or column, and
* the largest element error over the truth's root mean square, which sees a single wrong element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench.record import TensorCheck

MARGIN = 1.5
"""Allowed relative error in units of eager's."""
MAX_MARGIN = 3.0
"""Allowed largest element error in units of eager's; an extreme of many elements scatters more than their norm."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding one number to a dtype: half its machine epsilon."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class TensorError:
    """Distance of one tensor from the truth."""

    relative: float
    maximum: float
    finite: bool


def tensor_error(value: Tensor, truth: Tensor) -> TensorError:
    """Measure a tensor against its fp64 truth of the same shape; empty tensors have no error."""
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
    return TensorError(relative, difference.abs_().max().item() / scale, True)


def check(
    name: str, value: Tensor | None, truth: Tensor, eager: TensorError, dtype: torch.dtype, longest_sum: int
) -> TensorCheck:
    """The verdict on one tensor.

    `eager` is eager PyTorch's error on it, the yardstick; `longest_sum` the terms of the longest sum in it.
    """
    roundoff = unit_roundoff(dtype)
    summation = math.sqrt(longest_sum) * unit_roundoff(torch.float32)
    peak = truth.abs().max().item() / (truth.norm().item() / math.sqrt(truth.numel()) or 1.0) if truth.numel() else 0.0
    allowed = MARGIN * eager.relative + roundoff / 2 + summation
    max_allowed = MAX_MARGIN * eager.maximum + (roundoff + summation) * peak
    error, reason = TensorError(math.inf, math.inf, False), ""
    if value is None:
        reason = "missing: no gradient came back"
    elif tuple(value.shape) != tuple(truth.shape):
        reason = f"has shape {tuple(value.shape)}, expected {tuple(truth.shape)}"
    elif value.dtype != dtype:
        reason = f"has dtype {value.dtype}, expected {dtype}"
    else:
        error = tensor_error(value, truth)
        if not error.finite:
            reason = f"NaN or Inf in {int((~torch.isfinite(value)).sum())} of {value.numel()} elements"
        elif error.relative > allowed:
            reason = f"relative error {error.relative:.2e} exceeds {allowed:.2e} (eager loses {eager.relative:.2e})"
        elif error.maximum > max_allowed:
            reason = f"largest element error {error.maximum:.2e} x rms exceeds {max_allowed:.2e}"
    return TensorCheck(
        tensor=name,
        ok=not reason,
        error=error.relative,
        eager_error=eager.relative,
        allowed=allowed,
        max_error=error.maximum,
        eager_max_error=eager.maximum,
        max_allowed=max_allowed,
        reason=reason,
    )


def poison(shapes: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Fill memory that the allocator is about to hand out again with NaN, so that an unwritten element shows.

    Blocks of the shapes of the tensors to come are allocated, filled and freed; an implementation that allocates its
    output without writing all of it then returns NaN, not the previous contender's right answer.
    """
    blocks = [torch.full_like(value, math.nan, dtype=dtype) for value in shapes.values() for _ in range(2)]
    del blocks
