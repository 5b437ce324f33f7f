"""A run read back: its rows, its contract matrix or its training, and what run.json says of machine and command."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.rows import csv_table
from swiglu_bench.rows.finished_run import latest, read_run
from swiglu_bench.rows.record import LAYOUTS, Record, grouped, unique
from swiglu_bench.rows.run_folder import AUDIT, RECORDS, SPLIT, read_about, read_layout
from swiglu_bench.rows.training import STEPS, FinishedTraining, load_training, training_folder

FILES = (RECORDS, AUDIT, STEPS, SPLIT)
"""Each makes a folder a run."""


@dataclass(frozen=True)
class ReportedRun:
    """One run folder, or one CSV file."""

    path: Path
    about: dict[str, Any]
    """run.json; empty where there is none."""
    records: Sequence[Record] = ()
    """One per device, case and implementation: the last one written."""
    audit: Sequence[Record] = field(default=())
    training: FinishedTraining | None = None
    """What `train` wrote; then there are neither records nor an audit."""

    @property
    def name(self) -> str:
        """The folder's name, which says what was run."""
        return self.path.resolve().name if self.path.is_dir() else self.path.name

    @property
    def implementations(self) -> list[str]:
        """Every name that a row has."""
        trained = self.training.names if self.training else []
        measured = [row.implementation for row in self.records]
        return unique([*measured, *(cell.implementation for cell in self.audit), *trained])

    @property
    def commands(self) -> list[str]:
        """The exact commands that made the rows, oldest first."""
        written = [str(self.about["command"])] if self.about.get("command") else []
        return unique([*(row.command for row in self.records), *written])


def load(path: Path) -> ReportedRun:
    """Read a run's folder, or a records.csv or audit.csv by itself; of a training, the folder or any of its files.

    Raises BadInput where nothing is there, or what is there is neither.
    """
    if not path.exists():
        raise BadInput(f"{path} does not exist; give a run's folder, a {RECORDS} or an {AUDIT}.")
    trained = training_folder(path)
    if trained:
        training = load_training(trained)
        return ReportedRun(trained, training.about, training=training)
    if path.is_dir():
        measured = any((path / name).exists() for name in (RECORDS, SPLIT))
        files = [path if measured else None, path / AUDIT if (path / AUDIT).exists() else None]
        if not any(files):
            raise BadInput(f"{path} holds none of {', '.join(FILES)}; give a run's folder, as results/GPU/DATE/RUN.")
        about = read_about(path)
    else:
        files = [None, path] if _is_audit(path) else [path, None]
        about = read_about(path.parent)
    records, audit = files
    by_device = grouped(read_run(records, beside=False).records if records else (), attrgetter("device"))
    rows = [row for own in by_device.values() for row in latest(own)]
    return ReportedRun(path, about, rows, read_layout(audit, "audit") if audit else ())


def folders(path: Path) -> list[Path]:
    """The path itself or, where it is a folder of runs such as results/GPU/DATE, those runs in order."""
    if not path.is_dir() or any((path / name).exists() for name in FILES):
        return [path]
    found = {file.parent for name in FILES for file in path.rglob(name)}
    return sorted(found) or [path]


def only(runs: Sequence[ReportedRun], patterns: Sequence[str]) -> list[ReportedRun]:
    """The runs with the rows of these implementations alone, names or globs; raises BadInput for one without rows."""
    names = unique(name for run in runs for name in run.implementations)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise BadInput(f"--impl: no row of these runs is of {pattern!r}; {did_you_mean(pattern, names)}")
    wanted = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    kept = (
        dataclasses.replace(
            run,
            records=[row for row in run.records if row.implementation in wanted],
            audit=[cell for cell in run.audit if cell.implementation in wanted],
            training=run.training and run.training.keep(wanted),
        )
        for run in runs
    )
    return [run for run in kept if run.implementations]


def _is_audit(path: Path) -> bool:
    try:
        return csv_table.header(path) == LAYOUTS["audit"].columns()
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {csv_table.reason(error)}.") from None
