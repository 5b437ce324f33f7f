"""The folder of a tp run: tp.csv, tp_samples.csv, run.json. Rows are on the disk when a case has ended."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from swiglu_bench.rows import run_folder
from swiglu_bench.rows.csv_table import Table
from swiglu_bench.rows.ranks import KEY, ROWS, SAMPLE_FIELDS, SAMPLES
from swiglu_bench.rows.record import LAYOUTS, Record
from swiglu_bench.spec.errors import BadInput


class Folder:
    """Begins in a folder, or adds to the runs of `tp` in it: groups of other sizes make one scaling figure."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        """Raises BadInput where the folder cannot be written, or holds something else."""
        self.path = path
        self._warn = warn
        run_folder.create_folder(path)
        self._earlier = self._runs()
        self._rows, self._samples = (
            Table(path / ROWS, LAYOUTS["tp"].columns()),
            Table(path / SAMPLES, (*KEY, "round", *SAMPLE_FIELDS)),
        )

    def _runs(self) -> list[dict[str, Any]]:
        file = self.path / run_folder.RUN
        if not file.exists():
            return []
        try:
            run = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            run = None
        if not (self.path / ROWS).exists() or not isinstance(run, dict):
            raise BadInput(f"--out: {self.path} holds a run of another command; give another folder.")
        return [*run.pop("earlier", []), run]

    def describe(self, about: dict[str, Any]) -> None:
        """Write run.json: this run, and under `earlier` those before it."""
        run_folder.write_run_file(self.path, about | ({"earlier": self._earlier} if self._earlier else {}))

    def write(self, rows: Sequence[Record]) -> None:
        """Keep the rows of a case, samples first."""
        samples = []
        for row in rows:
            of_rounds = {"time_ms": row.samples_ms, "twin_ms": row.twin_ms, **row.parts_ms}
            rounds = itertools.zip_longest(*(of_rounds.get(name, ()) for name in SAMPLE_FIELDS))
            samples += [[*attrgetter(*KEY)(row), number, *times] for number, times in enumerate(rounds)]
        for table, lines in ((self._samples, samples), (self._rows, [row.row().values() for row in rows])):
            try:
                table.append(lines)
            except OSError as error:
                self._warn(f"{table.path} cannot be written: {error.strerror}; the run goes on and tries again.")

    def rows(self) -> list[dict[str, str]]:
        """All rows of the folder, as texts."""
        return self._rows.rows()
