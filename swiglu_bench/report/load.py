"""A run read back: its rows, its contract matrix or its training, and what run.json says of machine and command."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from swiglu_bench.report.frames import unique
from swiglu_bench.rows import training_run
from swiglu_bench.rows.audit_cell import CELL_COLUMNS, CellStatus
from swiglu_bench.rows.finished_run import read_about
from swiglu_bench.rows.record import COLUMNS
from swiglu_bench.rows.run_folder import RECORDS, read_records
from swiglu_bench.rows.training import STEPS
from swiglu_bench.rows.training_run import Training
from swiglu_bench.spec.errors import BadInput, did_you_mean
from swiglu_bench.writers.contract import AUDIT

FILES = (RECORDS, AUDIT, STEPS)
"""Each makes a folder a run."""
CASE = ["shape", "tokens", "dtype", "scope", "mode", "implementation"]
"""What names a row within one run on one machine."""


@dataclass(frozen=True)
class ReportedRun:
    """One run folder, or one CSV file."""

    path: Path
    records: pd.DataFrame
    """Empty where there is only an audit. One row per device, case and implementation: the last one written."""
    audit: pd.DataFrame
    """Columns of a cell of the contract matrix; empty where there was no audit."""
    about: dict[str, Any]
    """run.json; empty where there is none."""
    training: Training | None = None
    """What `train` wrote; then there are neither records nor an audit."""

    @property
    def name(self) -> str:
        """The folder's name, which says what was run."""
        return self.path.resolve().name if self.path.is_dir() else self.path.name

    @property
    def implementations(self) -> list[str]:
        """Every name that a row has."""
        trained = self.training.names if self.training else []
        return unique([*self.records["implementation"], *self.audit["implementation"], *trained])

    @property
    def commands(self) -> list[str]:
        """The exact commands that made the rows, oldest first."""
        written = [str(self.about["command"])] if self.about.get("command") else []
        return list(dict.fromkeys([*self.records["command"], *written]))


def load(path: Path) -> ReportedRun:
    """Read a run's folder, or a records.csv or audit.csv by itself; of a training, the folder or any of its files.

    Raises BadInput where nothing is there, or what is there is neither.
    """
    if not path.exists():
        raise BadInput(f"{path} does not exist; give a run's folder, a {RECORDS} or an {AUDIT}.")
    trained = training_run.folder_of(path)
    if trained:
        training = training_run.load(trained)
        return ReportedRun(trained, _no_records(), _cells(None), training.about, training)
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        records, audit = (folder / name if (folder / name).exists() else None for name in (RECORDS, AUDIT))
        if not records and not audit:
            raise BadInput(
                f"{path} holds none of {RECORDS}, {AUDIT} and {STEPS}; give a run's folder, as results/GPU/DATE/RUN."
            )
    else:
        records, audit = (None, path) if _is_audit(path) else (path, None)
    rows = read_records(records) if records else _no_records()
    rows = rows.drop_duplicates(["device", *CASE], keep="last", ignore_index=True)
    return ReportedRun(path, rows, _cells(audit), read_about(folder))


def folders(path: Path) -> list[Path]:
    """The path itself or, where it is a folder of runs such as results/GPU/DATE, those runs in order."""
    if not path.is_dir() or any((path / name).exists() for name in FILES):
        return [path]
    found = {file.parent for name in FILES for file in path.rglob(name)}
    return sorted(found) or [path]


def only(runs: Sequence[ReportedRun], patterns: Sequence[str]) -> list[ReportedRun]:
    """The runs with the rows of these implementations alone, names or globs; raises BadInput for one without rows."""
    names = unique([name for run in runs for name in run.implementations])
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise BadInput(f"--impl: no row of these runs is of {pattern!r}; {did_you_mean(pattern, names)}")
    wanted = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    kept = []
    for run in runs:
        records, audit = (
            table[table["implementation"].isin(wanted)].reset_index(drop=True) for table in (run.records, run.audit)
        )
        training = run.training and run.training.keep(wanted)
        if len(records) or len(audit) or (training and training.names):
            kept.append(dataclasses.replace(run, records=records, audit=audit, training=training))
    return kept


def _no_records() -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(dtype=object) for name in COLUMNS})


def _is_audit(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.readline().strip() == ",".join(CELL_COLUMNS)
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from None


def _cells(path: Path | None) -> pd.DataFrame:
    if path is None:
        return pd.DataFrame(columns=list(CELL_COLUMNS), dtype=str)
    foreign = BadInput(f"{path} is not an {AUDIT} that this version can read.")
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (ValueError, OSError):  # what pandas raises for a malformed file is a ValueError
        raise foreign from None
    if list(frame.columns) != list(CELL_COLUMNS) or not set(frame["verdict"]) <= set(CellStatus):
        raise foreign
    return frame
