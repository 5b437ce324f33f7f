"""Whether a trainee learned the same as eager, and whether its step is as fast as its block. Arithmetic without torch.

16-bit training is chaotic: the smallest difference in rounding grows until curves part, which says nothing about which
implementation learns better. What is compared is the mean loss over the last fifth of the steps, with eager's from the
same seed, and it is judged by two things that make no model worse: another summation order, and other seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from swiglu_bench.measure.statistics import mean_half_width
from swiglu_bench.rows.record import Record
from swiglu_bench.rows.training import SAVING_TOLERANCE, Curve, TrainedSeed

WINDOW = 0.2
"""Share of the steps, the last ones, over which losses are averaged."""
ROUNDING = 3.0
"""A difference of up to this many times the effect of another summation order still counts as rounding."""
Finals = Mapping[int, float]


def final(losses: Sequence[float]) -> float:
    """Mean of the last fifth of the steps, at least one."""
    return statistics.fmean(losses[-max(1, round(len(losses) * WINDOW)) :])


def spread(values: Collection[float]) -> float | None:
    """Standard deviation over seeds; None for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else None


def enter_learning(row: Record, seeds: Collection[TrainedSeed], finals: Finals) -> None:
    """Enter how far it learned, as means over seeds; `finals` are the final losses by seed."""
    row.seeds = len(seeds)
    if seeds:
        metrics = [one.metric for one in seeds]
        row.final_loss, row.final_loss_spread = statistics.fmean(finals.values()), spread(finals.values())
        row.held_out_loss = statistics.fmean(one.held_out_loss for one in seeds)
        row.metric_mean, row.metric_spread = statistics.fmean(metrics), spread(metrics)


def enter_curve(row: Record, own: Finals, eager: Finals, permuted: Finals) -> None:
    """Enter how its curves compare with eager's from the same seeds; a loss that is not finite differs."""
    differences = [own[seed] - eager[seed] for seed in sorted(own.keys() & eager.keys())]
    if not differences:
        return
    row.difference, largest = statistics.fmean(differences), max(map(abs, differences))
    if len(differences) > 1 and math.isfinite(row.difference):
        half = mean_half_width(differences)
        row.difference_low, row.difference_high = row.difference - half, row.difference + half
    row.rounding = max((abs(permuted[seed] - eager[seed]) for seed in permuted.keys() & eager.keys()), default=None)
    row.eager_spread = spread(eager.values())
    if not all(map(math.isfinite, differences)):
        row.curve = Curve.DIFFERS
    elif largest == 0 or largest <= ROUNDING * (row.rounding or 0.0):
        row.curve = Curve.SAME
    elif row.eager_spread is None:
        row.curve = Curve.UNKNOWN
    else:
        row.curve = Curve.WITHIN_SEEDS if abs(row.difference) <= row.eager_spread else Curve.DIFFERS


def enter_expectation(row: Record, eager: Record, block_ratio: float) -> None:
    """Enter the ratio that Amdahl's law expects from `block_ratio`, that of one block by itself, and whether it holds.

    Eager's blocks take a share of its step, and the row's take `block_ratio` of their time. What the optimiser does not
    have to do for weights that are not trained is taken off as well. The law does not hold if the saving is off by more
    than a fifth of itself, and by more than the measurement's error.
    """
    if not eager.block_share or row.optimizer_ms is None:
        return
    share, expected = eager.block_share, 1 - eager.block_share + eager.block_share * block_ratio
    if row.frozen:
        eager_ms = ((eager.block_forward_ms or 0.0) + (eager.block_backward_ms or 0.0)) / share
        expected -= ((eager.optimizer_ms or 0.0) - row.optimizer_ms) / eager_ms
    row.block_ratio, row.expected_ratio = block_ratio, expected
    if row.ratio is not None:
        allowed = SAVING_TOLERANCE * max(abs(1 - expected), abs(1 - row.ratio))
        row.as_expected = abs(row.ratio - expected) <= max(allowed, row.half_width, row.noise or 0.0)
