"""A finished training run: the row of each implementation, and its losses."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows import samples
from swiglu_bench.rows.record import LAYOUTS, Record, Status
from swiglu_bench.rows.run_folder import read_about, read_layout

Losses = Mapping[str, Mapping[int, Sequence[float]]]
"""Of every step, by implementation and seed."""
SUMMARY, SEEDS, STEPS = LAYOUTS["training"].file, LAYOUTS["seeds"].file, LAYOUTS["seeds"].samples
PERMUTED = "eager, permuted"
"""eager with its intermediate features in another order: the same model, rounded differently."""


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
        raise BadInput(f"{folder} is a training run that has not ended: it has no {SUMMARY}; leave it out.")
    summaries = read_layout(folder / SUMMARY, "training")
    losses: dict[str, dict[int, Sequence[float]]] = {}
    for row in seeds_of(folder):
        losses.setdefault(row.implementation, {})[row.seed] = row.series["loss"]
    return FinishedTraining(folder, summaries, losses, read_about(folder))


def seeds_of(folder: Path) -> list[Record]:
    """A row with all steps for each implementation and seed that was trained to the end; none in other folders."""
    if not (folder / STEPS).is_file():
        return []
    rows = read_layout(folder / SEEDS, "seeds")
    if rows:
        samples.attach(rows, folder)
    return [row for row in rows if len(row.series.get("loss", ())) == row.steps]
