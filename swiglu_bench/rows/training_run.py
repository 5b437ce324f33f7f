"""A training run read back from its folder: what came of it, its losses, and what run.json says. No torch in here."""

from __future__ import annotations

import csv
import dataclasses
import fnmatch
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from swiglu_bench.rows.csv_table import texts, typed
from swiglu_bench.rows.finished_run import read_about
from swiglu_bench.rows.training import RUNS, STEPS, SUMMARY, End, Judged, Row, Summary
from swiglu_bench.spec.errors import BadInput, did_you_mean

Line = TypeVar("Line")
Losses = dict[str, dict[int, list[float]]]
"""Of every step, by implementation and seed."""


@dataclass(frozen=True)
class Training:
    """A training run that has ended."""

    path: Path
    summaries: list[Summary]
    losses: Losses
    """Of what was trained to the end, whoever is shown: eager's are what the others' are compared with."""
    about: dict[str, Any]
    """run.json; empty where there is none."""

    @property
    def names(self) -> list[str]:
        """Implementations, in the order of the tables."""
        return [one.implementation for one in self.summaries]

    def only(self, patterns: Sequence[str]) -> Training:
        """With the summaries that a name or glob chooses, or all; raises BadInput for one that chooses none."""
        for pattern in patterns:
            if not fnmatch.filter(self.names, pattern):
                raise BadInput(f"{self.path} has no implementation {pattern!r}; {did_you_mean(pattern, self.names)}")
        wanted = [name for name in self.names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        return self.keep(wanted) if patterns else self

    def keep(self, names: Collection[str]) -> Training:
        """With the summaries of these alone."""
        return dataclasses.replace(self, summaries=[one for one in self.summaries if one.implementation in names])


def folder_of(path: Path) -> Path | None:
    """The folder of the training run that a path means: the folder itself, or one of its CSV files."""
    folder = path.parent if path.name in (STEPS, RUNS, SUMMARY) and path.is_file() else path
    return folder if (folder / STEPS).is_file() else None


def find(root: Path) -> Iterator[Path]:
    """The folder of every training run under a folder."""
    yield from sorted(file.parent for file in root.rglob(STEPS))


def load(folder: Path) -> Training:
    """Read a training run's folder; raises BadInput for one that has not ended or that this version cannot read."""
    if not (folder / SUMMARY).exists():
        raise BadInput(
            f"{folder} is a training run that has not ended: it has no {SUMMARY}; "
            "end it with its own command, --out and --resume, or leave it out."
        )
    summaries = _read(folder / SUMMARY, Summary)
    losses: Losses = {}
    for (name, seed), (mine, _, _) in ended(_read(folder / STEPS, Row), _read(folder / RUNS, End)).items():
        losses.setdefault(name, {})[seed] = mine
    return Training(folder, summaries, losses, read_about(folder))


def ended(steps: Iterable[Row], runs: Iterable[End]) -> dict[tuple[str, int], tuple[list[float], Judged, int]]:
    """By implementation and seed: the losses of all steps, the held-out figures, the weights that learnt.

    Without those whose steps are not all there.
    """
    losses: dict[tuple[str, int], list[float]] = {}
    for row in steps:
        losses.setdefault((row.implementation, row.seed), []).append(row.loss)
    return {
        key: (losses[key], Judged(one.held_out_loss, one.metric), one.parameters)
        for one in runs
        if len(losses.get(key := (one.implementation, one.seed), [])) == one.steps
    }


def _read(file: Path, kind: type[Line]) -> list[Line]:
    try:
        return [typed(kind, row) for row in texts(file)]
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise BadInput(f"{file} is not a {file.name} that this version can read: {error}.") from None
