"""Figures from samples: percentiles, intervals of medians that allow for correlated rounds, and verdicts."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

CONFIDENCE = 0.95


class Verdict(StrEnum):
    """What a ratio to the baseline means."""

    FASTER = "faster"
    SLOWER = "slower"
    TIE = "tie"


@dataclass(frozen=True)
class Interval:
    """A median and its confidence interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2

    @property
    def noise(self) -> float:
        """How far from 1 the interval of a ratio reaches whose true value is 1."""
        return max(abs(self.low - 1), abs(self.high - 1))

    def excludes(self, value: float) -> bool:
        """Whether the value lies outside the interval."""
        return not self.low <= value <= self.high


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, linearly interpolated."""
    return float(np.percentile(np.asarray(values), percent))


def ratio_interval(values: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Median of the pairwise ratios and its interval; pairs are (values[i], baseline[i]), in order of rounds."""
    return median_interval(np.asarray(values, dtype=np.float64) / np.asarray(baseline, dtype=np.float64), confidence)


def median_interval(values: Sequence[float] | np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """The median and its interval by the sign test, by default of 95%: two of the sorted values.

    It holds for any distribution. For independent values it is exact (conservative: the binomial distribution is
    discrete). Where neighbours in the sequence correlate, n values say as much as fewer independent ones, and the ranks
    move outwards accordingly. A bootstrap of the median is too narrow in both cases: at 12 independent rounds its 95%
    interval misses the truth in 6 to 7% of experiments.
    """
    values = np.asarray(values, dtype=np.float64)
    count, middle = len(values), float(np.median(values))
    effective = max(1, int(count / _inflation(np.sign(values - middle))))
    below = max(0, int((_rank(effective, confidence) - 0.5) / effective * count))
    ordered = np.sort(values)
    return Interval(middle, float(ordered[below]), float(ordered[count - 1 - below]))


@functools.cache
def _rank(count: int, confidence: float) -> int:
    """The largest rank such that the true median lies below that value with at most (1 - confidence) / 2; else 0."""
    import scipy.special  # which no contender's process needs

    return math.ceil(scipy.special.bdtrik((1 - confidence) / 2, count, 0.5))


def quotient(after: Interval, before: Interval) -> Interval:
    """The quotient of two medians: two intervals of 97.5% confidence give one of 95%.

    It assumes neither a distribution of the samples nor that the two sets are independent (Bonferroni). For independent
    sets of about the same spread it is 1.4 times as wide as necessary.
    """
    return Interval(after.median / before.median, after.low / before.high, after.high / before.low)


def _inflation(signs: np.ndarray) -> float:
    """Variance of the signs' sum relative to that of independent signs (Newey and West 1987), at least 1.

    The number of lags is about the cube root of the count; more would add noise.
    """
    count = len(signs)
    lags = min(round(count ** (1 / 3)) + 1, count - 1)
    tapered = ((1 - lag / (lags + 1)) * float(signs[:-lag] @ signs[lag:]) / count for lag in range(1, lags + 1))
    return max(1.0, 1 + 2 * sum(tapered))


def _quantile(degrees: int) -> float:
    import scipy.special

    return float(scipy.special.stdtrit(degrees, (1 + CONFIDENCE) / 2))


def mean_half_width(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of a normal sample, two values at least (Student's t)."""
    return float(_quantile(len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def noise_interval(aliases: Sequence[Interval | None]) -> Interval | None:
    """What the ratio of one more process of the baseline would be, with 95% confidence, from those of a few.

    Processes differ by more than their samples tell: by where the system lets each run, above all on a busy machine.
    The aliases' logarithms and the baseline's own, 0, are taken for a normal sample (prediction interval with Student's
    quantile), and the interval is at least as wide as each alias's own, which the samples tell. None without aliases.
    """
    if not (known := [alias for alias in aliases if alias is not None]):
        return None
    logs = np.log([1.0, *(alias.median for alias in known)])
    quantile = _quantile(len(known)) if len(known) > 1 else 0.0
    middle, reach = float(logs.mean()), float(quantile * logs.std(ddof=1) * math.sqrt(1 + 1 / len(logs)))
    low = min(math.exp(middle - reach), *(alias.low for alias in known))
    high = max(math.exp(middle + reach), *(alias.high for alias in known))
    return Interval(math.exp(middle), low, high)


def verdict(ratio: Interval, noise: float) -> Verdict:
    """Faster or slower only if the interval excludes 1 and the ratio is further from 1 than an A/A pair's `noise`."""
    if not ratio.excludes(1.0) or abs(ratio.median - 1) <= noise:
        return Verdict.TIE
    return Verdict.FASTER if ratio.median < 1 else Verdict.SLOWER


def detectable(ratio: Interval, noise: float) -> float:
    """The least true difference that an A/A pair with this ratio and noise would have shown, be it faster or slower."""
    faster = max(1 - 1 / ratio.high, 1 - (1 - noise) / ratio.median)
    slower = max(1 / ratio.low - 1, (1 + noise) / ratio.median - 1)
    return max(0.0, faster, slower)
