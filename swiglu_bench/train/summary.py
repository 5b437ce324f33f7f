"""What a training came to, entered into the row of its implementation. No torch in here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from swiglu_bench.rows.training import Summary
from swiglu_bench.train import amdahl
from swiglu_bench.train.verdict import Comparison, spread

if TYPE_CHECKING:
    from swiglu_bench.train.breakdown import Breakdown
    from swiglu_bench.train.paired import Speed


def note_training(row: Summary, finals: Sequence[float], held_out: Sequence[float], metrics: Sequence[float]) -> None:
    """Enter what its seeds came to."""
    row.seeds = len(finals)
    if finals:
        row.final_loss, row.final_loss_spread = statistics.fmean(finals), spread(finals)
        row.held_out_loss = statistics.fmean(held_out)
        row.metric_mean, row.metric_spread = statistics.fmean(metrics), spread(metrics)


def note_curve(row: Summary, comparison: Comparison | None) -> None:
    """Enter how its curves compare with eager's."""
    if comparison:
        row.difference, row.rounding = comparison.difference, comparison.rounding
        row.eager_spread, row.curve = comparison.spread, comparison.curve.value


def note_speed(row: Summary, speed: Speed, units_per_step: int) -> None:
    """Enter what its steps cost."""
    row.step_ms, row.rate = speed.step_ms, units_per_step / speed.step_ms * 1e3
    if speed.ratio:
        row.ratio, row.ratio_low, row.ratio_high = speed.ratio.median, speed.ratio.low, speed.ratio.high
    row.verdict, row.rounds, row.stopped_by = speed.verdict, speed.rounds, speed.stopped_by
    row.aa_low, row.aa_high = speed.twin.low, speed.twin.high
    row.block_share, row.optimizer_ms = speed.parts.share, speed.parts.optimizer_ms
    row.block_forward_ms, row.block_backward_ms = speed.parts.block_forward_ms, speed.parts.block_backward_ms
    row.saved_bytes, row.peak_bytes = speed.memory.saved_bytes, speed.memory.peak_bytes


def note_expectation(row: Summary, block_ratio: float, eager: Breakdown, speed: Speed) -> None:
    """Enter what Amdahl's law makes of the block's own ratio, and whether it came so."""
    spared = (eager.optimizer_ms - speed.parts.optimizer_ms) / eager.step_ms if row.frozen else 0.0
    row.block_ratio, row.expected_ratio = block_ratio, amdahl.expected(eager.share, block_ratio, spared)
    if speed.ratio:
        row.as_expected = not amdahl.disagrees(row.expected_ratio, speed.ratio, speed.twin.noise)


def in_order(found: Mapping[str, Summary], names: Sequence[str]) -> list[Summary]:
    """Summaries as the catalogue has the implementations."""
    return [found[name] for name in names if name in found]
