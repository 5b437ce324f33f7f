"""Outputs and gradients in, verdict out. Every tolerance of the suite is in this file.

An implementation may lose MARGIN times what eager PyTorch loses in the same dtype, measured from fp64 on the same
inputs, plus a rounding floor: one rounding to the dtype, and what an fp32 sum of that length loses in any order
(sqrt(n) times fp32's unit roundoff, the probabilistic bound of Higham and Mary 2019). Three errors are judged:

* the relative error ||value - truth|| / ||truth||, which sees a wrong row or column,
* the largest element error over the truth's root mean square, which sees a single wrong element, and
* the bias, the errors away from zero over the sum of all absolute values, which sees a small systematic loss.

Eager's loss on few elements is chance: on three it may be a tenth of what it is on three thousand. A tensor of fewer
than about 140 elements has a larger factor than MARGIN: the one that the ratio of two errors of one size exceeds once
in a million (F distribution), at most FEW_MARGIN. So has one of any size that comes from few elements of h: of one
token, a weight's gradient is an outer product, and each error in h's gradient stands in a whole row of it. Elements of
h, products of a gate and an up, are so uneven that UNEVEN of them count as one.

Far in the tail of a sigmoid, values are exponentials of the gate: rounding a gate of -40 to bf16 changes them by 8%. A
few features with the largest gates make all of a token's gradient then, so that such errors have one direction, and
eager's may be small by chance. What two such roundings of the gate and the fp32 sum behind it lose is allowed in any
case.

A bias of experts that is gathered for each token (transformers) gets its gradient by an index, which PyTorch adds up in
the dtype on a CPU and in fp32 on a GPU: there as many roundings are allowed as there are tokens.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.costs import longest_sum
from swiglu_bench.check.results import Fault
from swiglu_bench.rows.record import TensorCheck

MARGIN = 1.5
"""Allowed relative error in units of eager's."""
MAX_MARGIN = 3.0
"""Allowed largest element error in units of eager's; an extreme of many elements scatters more than their norm."""
BIAS_SHARE = 0.15
"""Allowed bias as a share of the allowed relative error: errors of rounding have none but by chance."""
CHANCE = 6.0
"""Standard deviations of a bias that has no direction, which count for nothing."""
TAIL_ROUNDINGS = 2
"""Of the gate to the dtype, and of alpha times the gate."""
FEW_MARGIN = 200.0
"""The most that either factor grows to, with one or two elements: there a sum may cancel to next to nothing."""
UNEVEN = 10
"""Elements of h whose errors scatter, summed up, like that of one normal number: for normal gate and up, half of what
the kurtosis of silu(gate) * up, 21.8, exceeds 1 by."""


@functools.cache
def scatter(elements: int) -> float:
    """What the ratio of two root mean squares, of as many normal errors of the same size, exceeds once in a million."""
    if elements >= 1000:
        return 1.0
    import scipy.special  # which no contender's process needs

    # F of equal degrees of freedom is as likely above a value as below its reciprocal.
    return min(FEW_MARGIN, 1 / math.sqrt(scipy.special.fdtri(elements, elements, 1e-6))) if elements else 1.0


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding one number to a dtype: half its machine epsilon."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class TensorError:
    """Distance of one tensor from the truth."""

    relative: float
    maximum: float
    finite: bool
    bias: float = 0.0
    """Sum of the errors away from zero, over the sum of the truth's absolute values."""
    bias_by_chance: float = 0.0
    """One standard deviation of what that would be if errors had no direction."""
    median: float | None = None
    p999: float | None = None
    worst_index: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Expected:
    """An fp64 truth and how large it is, worked out once for all that are held against it."""

    truth: Tensor
    norm: float
    """Root of the sum of its squares."""
    total: float
    """Sum of its absolute values."""
    peak: float
    """Its largest absolute value."""

    @classmethod
    def of(cls, truth: Tensor | Expected) -> Expected:
        """Measure a truth, unless that is done already; all sizes of an empty one are 0."""
        if isinstance(truth, Expected):
            return truth
        if not truth.numel():
            return cls(truth, 0.0, 0.0, 0.0)
        norms = [torch.linalg.vector_norm(truth, order) for order in (2, 1, math.inf)]
        return cls(truth, *torch.stack(norms).tolist())  # with one wait for the GPU

    @property
    def rms(self) -> float:
        """Root mean square of the truth."""
        return self.norm / math.sqrt(self.truth.numel() or 1)


def tensor_error(value: Tensor, truth: Tensor | Expected, distribution: bool = False) -> TensorError:
    """Measure a tensor against its fp64 truth of the same shape; empty tensors have no error.

    `distribution` adds the median and the 99.9th percentile of the elements' errors and the place of the largest.
    """
    expected = Expected.of(truth)
    truth, scale = expected.truth, expected.rms
    if truth.numel() == 0:
        return TensorError(0.0, 0.0, True)
    difference = torch.sub(value.detach().to(truth.device), truth)  # in fp64
    norms = [torch.linalg.vector_norm(difference, order) for order in (2, math.inf)]
    norm, largest, away = torch.stack([*norms, truth.sign().mul_(difference).sum()]).tolist()
    if not math.isfinite(norm):
        return TensorError(math.inf, math.inf, False)
    if scale == 0.0:
        return TensorError(math.inf if largest else 0.0, math.inf if largest else 0.0, True)
    relative, maximum = norm / expected.norm, largest / scale
    bias, by_chance = away / expected.total, norm / expected.total
    if not distribution:
        return TensorError(relative, maximum, True, bias, by_chance)
    errors = difference.abs_().flatten()
    place = tuple(int(index) for index in torch.unravel_index(errors.argmax(), truth.shape))
    ordered = (errors / scale).float().sort().values
    ranks = ((ordered.numel() - 1) // 2, math.ceil(0.999 * ordered.numel()) - 1)
    median, p999 = (ordered[rank].item() for rank in ranks)
    return TensorError(relative, maximum, True, bias, by_chance, median, p999, place)


@dataclass(frozen=True)
class Arithmetic:
    """What the errors of a call's results come from."""

    dtype: torch.dtype
    longest_sum: int
    """Terms of the longest sum behind a result."""
    hidden_elements: int
    """Of h; no result has more errors of its own."""
    tail: float = 0.0
    """How far in the tail of the gate's sigmoid a result comes from: it is like exp(-tail)."""
    additions: int = 0
    """Of a sum, each rounded to the dtype, as PyTorch's gradients of an index are on a CPU."""

    @property
    def lost_anyway(self) -> float:
        """The relative error that is allowed whatever eager loses."""
        roundoff = unit_roundoff(self.dtype)
        return self.tail * (TAIL_ROUNDINGS * roundoff + self.summation) + math.sqrt(self.additions) * roundoff

    @property
    def summation(self) -> float:
        """What an fp32 sum of the longest one's length loses in any order."""
        return math.sqrt(self.longest_sum) * unit_roundoff(torch.float32)


def arithmetic_of(case: Case, dtype: torch.dtype, sums: int = 1) -> Arithmetic:
    """The arithmetic of a case whose results are in a dtype; `sums` of the longest sum follow each other."""
    return Arithmetic(dtype, sums * longest_sum(case), case.pairs * case.shape.intermediate)


@dataclass(frozen=True)
class Budget:
    """What an implementation may lose on one tensor."""

    relative: float
    maximum: float


def budget_of(truth: Tensor | Expected, eager: TensorError, arithmetic: Arithmetic) -> Budget:
    """The errors allowed on a tensor, from eager's."""
    expected, roundoff, anyway = Expected.of(truth), unit_roundoff(arithmetic.dtype), arithmetic.lost_anyway
    peak = expected.peak / (expected.rms or 1.0)
    chance = scatter(min(expected.truth.numel(), max(1, arithmetic.hidden_elements // UNEVEN)))
    few = max(1.0, chance / MARGIN)
    norm_floor, element_floor = (few * (part * roundoff + arithmetic.summation) + anyway for part in (0.5, 1.0))
    relative = max(MARGIN, chance) * eager.relative + norm_floor
    return Budget(relative, max(MAX_MARGIN, chance) * eager.maximum + element_floor * peak)


def check(
    name: str, value: Tensor | None, truth: Tensor | Expected, eager: TensorError, arithmetic: Arithmetic,
    fault: Fault | None = None, distribution: bool = False,
) -> TensorCheck:  # fmt: skip
    """The verdict on one tensor, which has the truth's shape unless it has a `fault`.

    `eager` is eager PyTorch's error on the same inputs.
    """
    expected = Expected.of(truth)
    budget = budget_of(expected, eager, arithmetic)
    error = TensorError(math.inf, math.inf, False)
    if not fault:
        assert value is not None
        error = tensor_error(value, expected, distribution)
        alike = expected.truth.numel() / max(1, arithmetic.hidden_elements)  # errors that may have one direction
        systematic = max(0.0, abs(error.bias) - CHANCE * error.bias_by_chance * math.sqrt(max(1.0, alike)))
        if not error.finite:
            wrong = int((~torch.isfinite(value)).sum())
            fault = Fault("finite", f"NaN or Inf in {wrong} of {value.numel()} elements")
        elif error.relative > budget.relative:
            beyond = f"exceeds {budget.relative:.2e} (eager loses {eager.relative:.2e})"
            fault = Fault("relative error", f"relative error {error.relative:.2e} {beyond}")
        elif error.maximum > budget.maximum:
            text = f"largest element error {error.maximum:.2e} x rms exceeds {budget.maximum:.2e}"
            fault = Fault("largest element", text)
        elif systematic > BIAS_SHARE * budget.relative + MARGIN * abs(eager.bias) + arithmetic.lost_anyway:
            text = f"its values are off by {error.bias:+.2e} on average, away from zero (eager's by {eager.bias:+.2e})"
            fault = Fault("bias", text)
    return TensorCheck(
        tensor=name, ok=fault is None, error=error.relative, eager_error=eager.relative, allowed=budget.relative,
        max_error=error.maximum, eager_max_error=eager.maximum, max_allowed=budget.maximum,
        reason=fault.reason if fault else "", check=fault.check if fault else "", median_error=error.median,
        p999_error=error.p999, worst_index=error.worst_index,
    )  # fmt: skip
