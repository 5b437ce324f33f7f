"""The rows of a training run (one per step, per seed and per implementation), and a finished run read back."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.csv_table import read
from swiglu_bench.rows.figures import key
from swiglu_bench.rows.record import LAYOUTS, Record, Status
from swiglu_bench.rows.run_folder import read_about, read_layout

Losses = dict[str, dict[int, list[float]]]
"""Of every step, by implementation and seed."""
Ended = dict[tuple[str, int], tuple["TrainedSeed", list[float]]]
"""What was trained to the end, by implementation and seed, and its losses."""

STEPS, SEEDS, SUMMARY = "train.csv", "runs.csv", LAYOUTS["training"].file
PERMUTED = "eager, permuted"
"""eager with its intermediate features in another order: the same model, rounded differently."""
SAVING_TOLERANCE = 0.2
"""How far the measured saving may be from the expected one, as a share of the saving."""


@dataclass(frozen=True)
class TrainingStep:
    """One step: a line of train.csv."""

    # fmt: off
    implementation: str = key("name in `swiglu-bench list`, or `eager, permuted`: eager with its sums in another order")
    seed: int = key("seed of the weights and of the order of the data")
    step: int = key("number of the step, from 0")
    loss: float = key("mean over the batch", "nats")
    learning_rate: float = key("learning rate of this step")
    step_ms: float = key("wall-clock time until the loss is known, including compilation in the first step; contenders "
        "ran one after another, so these times cannot be compared", "ms")
    # fmt: on


@dataclass(frozen=True)
class TrainedSeed:
    """An implementation trained from one seed to the end: a line of runs.csv."""

    implementation: str = key("as in train.csv")
    seed: int = key("as in train.csv")
    steps: int = key("steps of the run")
    parameters: int = key("number of trained weights")
    held_out_loss: float = key("loss after the last step, over data that was never trained on", "nats")
    metric: float = key("accuracy, or perplexity, on the same data")
    seconds: float = key("duration since its start, or since it was resumed, checks and checkpoints included", "s")


class Curve(enum.StrEnum):
    """How a loss curve compares with eager's."""

    SAME = "same"
    """It differs no more than rounding in another order does."""
    WITHIN_SEEDS = "within seeds"
    """It differs more than that, or rounding is not known, and no more than the spread of eager's seeds."""
    DIFFERS = "differs"
    """It differs more than both."""
    UNKNOWN = "unknown"
    """It differs more than rounding does, and a single seed has no spread."""


def as_of_all_runs(row: Record) -> Record:
    """The row as those of all runs are read: a step is its time, and a curve that differs makes it incorrect."""
    wrong = row.failed and row.status is Status.OK
    return dataclasses.replace(
        row, status=Status.INCORRECT if wrong else row.status,
        reason="Its loss curve differs from eager's." if wrong else row.reason,
        time_ms=None if wrong else row.step_ms, ratio=1.0 if row.verdict == "baseline" else row.ratio, source=row,
    )  # fmt: skip


@dataclass(frozen=True)
class FinishedTraining:
    """A training run that has ended, read from its folder."""

    path: Path
    summaries: list[Record]
    losses: Losses
    """Of everything trained to the end, including what is not shown: differences are taken from eager's losses."""
    about: dict[str, Any]
    """run.json; empty where there is none."""

    @property
    def names(self) -> list[str]:
        """Implementations, in the order of the tables."""
        return [row.implementation for row in self.summaries]

    def keep(self, names: Collection[str]) -> FinishedTraining:
        """Keep the summaries of these implementations."""
        return dataclasses.replace(self, summaries=[row for row in self.summaries if row.implementation in names])


def training_folder(path: Path) -> Path | None:
    """The folder of the training run that a path names: the folder itself, or one of its CSV files."""
    folder = path.parent if path.name in (STEPS, SEEDS, SUMMARY) and path.is_file() else path
    return folder if (folder / STEPS).is_file() else None


def load_training(folder: Path) -> FinishedTraining:
    """Read a training run's folder; raises BadInput for one that has not ended or that this version cannot read."""
    if not (folder / SUMMARY).exists():
        raise BadInput(
            f"{folder} is a training run that has not ended: it has no {SUMMARY}; "
            "resume it with its own command, --out and --resume, or leave it out."
        )
    summaries = read_layout(folder / SUMMARY, "training")
    finished = ended(steps_of(folder), read(folder / SEEDS, TrainedSeed))
    losses: Losses = {}
    for (name, seed), (_, of_steps) in finished.items():
        losses.setdefault(name, {})[seed] = of_steps
    return FinishedTraining(folder, summaries, losses, read_about(folder))


def steps_of(folder: Path) -> list[TrainingStep]:
    """All steps of a training run's folder; none in a folder of another command."""
    return read(folder / STEPS, TrainingStep) if (folder / STEPS).is_file() else []


def ended(steps: Iterable[TrainingStep], seeds: Iterable[TrainedSeed]) -> Ended:
    """The seeds trained to the end, all of whose steps are there."""
    losses: dict[tuple[str, int], list[float]] = {}
    for step in steps:
        losses.setdefault((step.implementation, step.seed), []).append(step.loss)
    keyed = {(trained.implementation, trained.seed): trained for trained in seeds}
    return {key: (seed, losses[key]) for key, seed in keyed.items() if len(losses.get(key, ())) == seed.steps}
