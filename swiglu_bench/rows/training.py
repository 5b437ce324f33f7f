"""What a training run keeps: a line of train.csv per step, of runs.csv per seed, of summary.csv per implementation."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from swiglu_bench.rows.record import Status

STEPS, RUNS, SUMMARY = "train.csv", "runs.csv", "summary.csv"
PERMUTED = "eager, permuted"
"""eager with the rows of gate and up, and the columns of down, in another order: the same model, rounded otherwise."""
SAVING_TOLERANCE = 0.2
"""Of the saving: how far what was measured may be from what was expected."""


@dataclass(frozen=True)
class Row:
    """One step: a line of train.csv."""

    implementation: str
    seed: int
    step: int
    loss: float
    learning_rate: float
    step_ms: float
    """Wall clock until the loss is known, compilation in the first; not interleaved, so not for comparing."""


@dataclass(frozen=True)
class Judged:
    """Of the held-out data after the last step."""

    loss: float
    metric: float
    """Accuracy, or perplexity."""


@dataclass(frozen=True)
class End:
    """A contender trained from one seed to the end: a line of runs.csv."""

    implementation: str
    seed: int
    steps: int
    parameters: int
    """Weights that learnt."""
    held_out_loss: float
    metric: float
    seconds: float
    """Since it was begun, or gone on with, checks and checkpoints included."""


class Curve(enum.StrEnum):
    """What the difference to eager amounts to."""

    SAME = "same"
    """No more than rounding in another order does."""
    WITHIN_SEEDS = "within seeds"
    """More than that, or not told from it, and no more than the spread of eager's seeds."""
    DIFFERS = "differs"
    """More than both."""
    UNKNOWN = "unknown"
    """More than rounding does, and one seed has no spread."""


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
        return {name: getattr(self, name) for name in SUMMARY_COLUMNS}

    @property
    def frozen(self) -> bool:
        """Whether its blocks' weights stay as they were drawn, so that it learns less by design and does less work."""
        return self.trains == "inputs"

    @property
    def failed(self) -> bool:
        """Whether it ended in an error, or trains everything and yet learns otherwise than eager."""
        otherwise = self.curve == Curve.DIFFERS and not self.frozen
        return self.status is Status.ERROR or otherwise


STEP_COLUMNS = tuple(one.name for one in dataclasses.fields(Row))
RUN_COLUMNS = tuple(one.name for one in dataclasses.fields(End))
SUMMARY_COLUMNS = tuple(one.name for one in dataclasses.fields(Summary))
