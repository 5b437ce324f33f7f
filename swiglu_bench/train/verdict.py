"""Whether two loss curves are the same. Pure arithmetic over losses.

16-bit training is chaotic: the least difference in rounding grows until curves part, and says nothing about who learns
better. What is compared is the mean loss over the last fifth of the steps, with eager's from the same seed, and it is
judged by two things that make no model worse: the same model with its sums in another order, and other seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swiglu_bench.rows.training import Curve

WINDOW = 0.2
"""Share of the steps, the last ones, over which losses are averaged."""
ROUNDING = 3.0
"""How many times the effect of another order of sums still passes for rounding."""


@dataclass(frozen=True)
class Comparison:
    """A contender's curves against eager's from the same seeds."""

    difference: float
    """Mean over seeds of: final loss minus eager's."""
    rounding: float | None
    """The largest such difference, over seeds, that another order of sums makes; None: it was not run."""
    spread: float | None
    """Standard deviation over seeds of eager's final loss; None with one seed."""
    curve: Curve


def final(losses: Sequence[float]) -> float:
    """Mean of the last fifth of the steps, at least one."""
    return statistics.fmean(losses[-max(1, round(len(losses) * WINDOW)) :])


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds; None for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else None


def compare(own: Mapping[int, float], eager: Mapping[int, float], permuted: Mapping[int, float]) -> Comparison | None:
    """Judge final losses by seed; None without a seed that both have. A loss that is no number differs."""
    shared = sorted(own.keys() & eager.keys())
    if not shared:
        return None
    differences = [own[seed] - eager[seed] for seed in shared]
    difference = statistics.fmean(differences)
    controls = [abs(permuted[seed] - eager[seed]) for seed in permuted.keys() & eager.keys()]
    rounding = max(controls) if controls else None
    seeds = spread(list(eager.values()))
    return Comparison(difference, rounding, seeds, _judge(differences, rounding, seeds))


def _judge(differences: Sequence[float], rounding: float | None, seeds: float | None) -> Curve:
    if not all(map(math.isfinite, differences)):
        return Curve.DIFFERS
    if rounding is not None and max(map(abs, differences)) <= ROUNDING * rounding:
        return Curve.SAME
    if max(map(abs, differences)) == 0:
        return Curve.SAME
    if seeds is None:
        return Curve.UNKNOWN
    return Curve.WITHIN_SEEDS if abs(statistics.fmean(differences)) <= seeds else Curve.DIFFERS
