"""One row per implementation: what came of its training and what its steps cost. No torch in here.

summary.csv's columns are exactly these fields; results/README.md describes them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swiglu_bench.rows.record import Status
from swiglu_bench.train import amdahl
from swiglu_bench.train.verdict import Comparison, Curve, spread

if TYPE_CHECKING:
    from swiglu_bench.train.breakdown import Breakdown
    from swiglu_bench.train.paired import Speed


@dataclass
class Summary:
    """None means: not measured, or does not apply."""

    run_id: str
    task: str
    model: str
    implementation: str
    trains: str
    """everything, or inputs: its block's weights stay as they were drawn."""
    status: Status
    reason: str = ""
    seeds: int = 0
    """Seeds from which it was trained to the end."""
    steps: int | None = None
    parameters: int | None = None
    """Weights that learn."""

    # does it train the same
    final_loss: float | None = None
    """Mean over seeds of the mean loss over the last fifth of the steps."""
    final_loss_spread: float | None = None
    difference: float | None = None
    rounding: float | None = None
    eager_spread: float | None = None
    curve: str = ""
    held_out_loss: float | None = None
    metric: str = ""
    metric_mean: float | None = None
    metric_spread: float | None = None

    # does it train faster
    step_ms: float | None = None
    rate: float | None = None
    unit: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    verdict: str = ""
    aa_low: float | None = None
    aa_high: float | None = None
    rounds: int | None = None
    stopped_by: str = ""
    block_share: float | None = None
    block_forward_ms: float | None = None
    block_backward_ms: float | None = None
    optimizer_ms: float | None = None
    block_ratio: float | None = None
    """Of the block by itself, to eager's."""
    expected_ratio: float | None = None
    as_expected: bool | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None

    # machine
    device: str = ""
    torch: str = ""
    triton: str = ""
    version: str = ""
    timestamp: str = ""

    def row(self) -> dict[str, Any]:
        """The CSV row: every column, in order."""
        return {name: getattr(self, name) for name in COLUMNS}

    def note_training(self, finals: Sequence[float], held_out: Sequence[float], metrics: Sequence[float]) -> None:
        """Enter what its seeds came to."""
        self.seeds = len(finals)
        if finals:
            self.final_loss, self.final_loss_spread = statistics.fmean(finals), spread(finals)
            self.held_out_loss = statistics.fmean(held_out)
            self.metric_mean, self.metric_spread = statistics.fmean(metrics), spread(metrics)

    def note_curve(self, comparison: Comparison | None) -> None:
        """Enter how its curves compare with eager's."""
        if comparison:
            self.difference, self.rounding = comparison.difference, comparison.rounding
            self.eager_spread, self.curve = comparison.spread, comparison.curve.value

    def note_speed(self, speed: Speed, units_per_step: int) -> None:
        """Enter what its steps cost."""
        self.step_ms, self.rate = speed.step_ms, units_per_step / speed.step_ms * 1e3
        if speed.ratio:
            self.ratio, self.ratio_low, self.ratio_high = speed.ratio.median, speed.ratio.low, speed.ratio.high
        self.verdict, self.rounds, self.stopped_by = speed.verdict, speed.rounds, speed.stopped_by
        self.aa_low, self.aa_high = speed.twin.low, speed.twin.high
        self.block_share, self.optimizer_ms = speed.parts.share, speed.parts.optimizer_ms
        self.block_forward_ms, self.block_backward_ms = speed.parts.block_forward_ms, speed.parts.block_backward_ms
        self.saved_bytes, self.peak_bytes = speed.memory.saved_bytes, speed.memory.peak_bytes

    def note_expectation(self, block_ratio: float, eager: Breakdown, speed: Speed) -> None:
        """Enter what Amdahl's law makes of the block's own ratio, and whether it came so."""
        spared = (eager.optimizer_ms - speed.parts.optimizer_ms) / eager.step_ms if self.frozen else 0.0
        self.block_ratio, self.expected_ratio = block_ratio, amdahl.expected(eager.share, block_ratio, spared)
        if speed.ratio:
            self.as_expected = not amdahl.disagrees(self.expected_ratio, speed.ratio, speed.twin.noise)

    @property
    def frozen(self) -> bool:
        """Whether its blocks' weights stay as they were drawn, so that it learns less by design and does less work."""
        return self.trains == "inputs"

    @property
    def failed(self) -> bool:
        """Whether it ended in an error, or trains everything and yet learns otherwise than eager."""
        otherwise = self.curve == Curve.DIFFERS and not self.frozen
        return self.status is Status.ERROR or otherwise


COLUMNS = tuple(one.name for one in dataclasses.fields(Summary))


def in_order(found: Mapping[str, Summary], names: Sequence[str]) -> list[Summary]:
    """Summaries as the catalogue has the implementations."""
    return [found[name] for name in names if name in found]
