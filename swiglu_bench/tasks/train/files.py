"""The folder of a training run: losses of every step, what each seed came to, checkpoints. No torch in here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows import run_folder, training
from swiglu_bench.rows.csv_table import typed
from swiglu_bench.rows.figures import figures
from swiglu_bench.rows.record import LAYOUTS, Record
from swiglu_bench.rows.training import TrainedSeed, TrainingStep
from swiglu_bench.show.writers.csv_file import Table

CHECKPOINTS = "checkpoints"
WRITE_EVERY_S = 1.0
MAY_CHANGE = ("seeds", "budget_s", "step_run", "checkpoint_every")
"""Settings that a resumed run may change."""


class TrainingFolder:
    """Writes steps within a second and seeds at once."""

    def __init__(self, path: Path, about: dict[str, Any], resume: bool, warn: Callable[[str], object]) -> None:
        """Begin in a folder, or resume its run; raises BadInput where that is not possible."""
        self.path = path
        self._warn = warn
        self._pending: list[TrainingStep] = []
        self._written_at = time.monotonic()
        run_folder.create_folder(path)
        if resume:
            _check_same(path, about)
        elif (path / training.STEPS).exists():
            raise BadInput(f"--out: {path} holds a training run; give --resume to continue it, or another folder.")
        self._steps = Table(path / training.STEPS, figures(TrainingStep))
        self._seeds = Table(path / training.SEEDS, figures(TrainedSeed))
        run_folder.write_run_file(path, about)

    def finished(self) -> training.Ended:
        """What was trained to the end."""
        steps, seeds = self._steps.rows(), self._seeds.rows()
        return training.ended([typed(TrainingStep, row) for row in steps], [typed(TrainedSeed, row) for row in seeds])

    def losses_before(self, name: str, seed: int, step: int) -> list[float]:
        """The losses of a seed's first steps; later ones are removed from the file."""
        mine = (name, str(seed))
        self._steps.keep(lambda row: (row["implementation"], row["seed"]) != mine or int(row["step"]) < step)
        return [float(row["loss"]) for row in self._steps.rows() if (row["implementation"], row["seed"]) == mine]

    def checkpoint(self, name: str, seed: int) -> Path:
        """The file of a seed's state until its training ends."""
        return self.path / CHECKPOINTS / f"{name.replace(', ', '-')}-seed{seed}.pt"

    def write(self, step: TrainingStep) -> None:
        """Write a step, within a second."""
        self._pending.append(step)
        if time.monotonic() - self._written_at > WRITE_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write all steps now."""
        steps, self._pending, self._written_at = self._pending, [], time.monotonic()
        self._append(self._steps, map(dataclasses.astuple, steps))

    def end(self, seed: TrainedSeed) -> None:
        """Write that a seed was trained to the end, and remove its checkpoint."""
        self.flush()
        self._append(self._seeds, [dataclasses.astuple(seed)])
        checkpoint = self.checkpoint(seed.implementation, seed.seed)
        checkpoint.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not there, or holds another checkpoint
            checkpoint.parent.rmdir()

    def summarise(self, summaries: Sequence[Record]) -> None:
        """Write summary.csv anew."""
        path = self.path / training.SUMMARY
        path.unlink(missing_ok=True)
        self._append(Table(path, LAYOUTS["training"].columns()), [summary.row().values() for summary in summaries])

    def _append(self, table: Table, rows: Iterable[Iterable[Any]]) -> None:
        try:
            table.append(rows)
        except OSError as error:
            self._warn(f"{table.path} cannot be written: {error.strerror}; the run continues and tries again.")


def _check_same(path: Path, about: dict[str, Any]) -> None:
    """Raise BadInput unless the folder holds a run with these settings on this machine."""
    try:
        old = _compared(json.loads((path / run_folder.RUN).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"--resume: {path} holds no training run; leave --resume out to start one.") from None
    for name, value in _compared(json.loads(json.dumps(about, default=str))).items():
        if name not in MAY_CHANGE and old.get(name) != value:
            raise BadInput(
                f"--resume: {path} was run with {name} = {old.get(name)!r}, now it is {value!r}; "
                "give the same, or another folder."
            )


def _compared(about: dict[str, Any]) -> dict[str, Any]:
    return about["settings"] | {f"machine's {name}": value for name, value in about["machine"].items()}
