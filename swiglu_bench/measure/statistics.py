"""Figures from samples: percentiles and bootstrap intervals of medians."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats

RESAMPLES = 1000
CONFIDENCE = 0.95


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


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, linearly interpolated."""
    return float(np.percentile(np.asarray(values), percent))


def ratio_interval(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Median of the pairwise ratios and its 95% percentile-bootstrap interval; pairs are (values[i], baseline[i]).

    The resampling is seeded, so the same samples always give the same interval.
    """
    ratios = np.asarray(values, dtype=np.float64) / np.asarray(baseline, dtype=np.float64)
    median = float(np.median(ratios))
    if len(ratios) < 2 or np.ptp(ratios) == 0:
        return Interval(median, median, median)
    interval = scipy.stats.bootstrap(
        (ratios,), np.median, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=0
    ).confidence_interval
    return Interval(median, float(interval.low), float(interval.high))
