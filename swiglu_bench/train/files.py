"""The folder of a training run: losses of every step, what each run from one seed came to, checkpoints."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swiglu_bench.rows import run_folder
from swiglu_bench.rows.csv_table import Table, typed
from swiglu_bench.rows.training import (
    RUN_COLUMNS,
    RUNS,
    STEP_COLUMNS,
    STEPS,
    SUMMARY,
    SUMMARY_COLUMNS,
    End,
    Judged,
    Row,
    Summary,
)
from swiglu_bench.rows.training_run import ended
from swiglu_bench.spec.errors import BadInput

CHECKPOINTS = "checkpoints"
WRITE_EVERY_S = 1.0
FREE = ("seeds", "budget_s", "step_run", "checkpoint_every")
"""Settings that may be others when a run goes on."""


class Folder:
    """Steps are kept within a second, runs at once; a run whose steps are there but which did not end is cut short."""

    def __init__(self, path: Path, about: dict[str, Any], resume: bool, warn: Callable[[str], object]) -> None:
        """Begin in a folder, or go on; raises BadInput where that is not possible."""
        self.path = path
        self._warn = warn
        self._pending: list[Row] = []
        self._written_at = time.monotonic()
        run_folder.create_folder(path)
        if resume:
            _check_same(path, about)
        elif (path / STEPS).exists():
            raise BadInput(f"--out: {path} holds a training run; give --resume to go on with it, or another folder.")
        self._steps = Table(path / STEPS, STEP_COLUMNS)
        self._runs = Table(path / RUNS, RUN_COLUMNS)
        run_folder.write_run_file(path, about)

    def finished(self) -> dict[tuple[str, int], tuple[list[float], Judged, int]]:
        """By implementation and seed: the losses of all steps, the held-out figures, the weights that learnt."""
        steps, runs = self._steps.rows(), self._runs.rows()
        return ended([typed(Row, row) for row in steps], [typed(End, row) for row in runs])

    def losses_before(self, name: str, seed: int, step: int) -> list[float]:
        """Of the first steps of a run; later ones are removed from the file."""
        mine = (name, str(seed))
        self._steps.keep(lambda row: (row["implementation"], row["seed"]) != mine or int(row["step"]) < step)
        rows = [row for row in self._steps.rows() if (row["implementation"], row["seed"]) == mine]
        return [float(row["loss"]) for row in rows]

    def checkpoint(self, name: str, seed: int) -> Path:
        """Where the state of a run is kept until it ends."""
        folder = self.path / CHECKPOINTS
        folder.mkdir(exist_ok=True)
        return folder / f"{name.replace(', ', '-')}-seed{seed}.pt"

    def write(self, row: Row) -> None:
        """Keep a step, within a second."""
        self._pending.append(row)
        if time.monotonic() - self._written_at > WRITE_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Keep all steps now."""
        rows, self._pending, self._written_at = self._pending, [], time.monotonic()
        self._append(self._steps, [dataclasses.astuple(row) for row in rows])

    def end(self, one: End) -> None:
        """A run is complete; its checkpoint goes."""
        self.flush()
        self._append(self._runs, [dataclasses.astuple(one)])
        self.checkpoint(one.implementation, one.seed).unlink(missing_ok=True)

    def summarise(self, summaries: Sequence[Summary]) -> None:
        """Write summary.csv anew."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        self._append(Table(self.path / SUMMARY, SUMMARY_COLUMNS), [summary.row().values() for summary in summaries])

    def close(self) -> None:
        """Keep what is pending, and leave no empty folder."""
        self.flush()
        folder = self.path / CHECKPOINTS
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def _append(self, table: Table, rows: Sequence[Any]) -> None:
        try:
            table.append(rows)
        except OSError as error:
            self._warn(f"{table.path} cannot be written: {error.strerror}; the run goes on and tries again.")


def _check_same(path: Path, about: dict[str, Any]) -> None:
    """Raise BadInput unless the folder holds a run with these settings on this machine."""
    try:
        before = json.loads((path / run_folder.RUN).read_text(encoding="utf-8"))
        old = before["settings"] | {f"machine's {name}": value for name, value in before["machine"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"--resume: {path} holds no training run; leave --resume out to begin one.") from None
    new = json.loads(json.dumps(about["settings"], default=str))
    new |= {f"machine's {name}": value for name, value in about["machine"].items()}
    for name in new:
        if name not in FREE and old.get(name) != new[name]:
            raise BadInput(
                f"--resume: {path} was run with {name} = {old.get(name)!r}, now it is {new[name]!r}; "
                "give the same, or another folder."
            )
