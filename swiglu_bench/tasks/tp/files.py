"""The folder of a tp run: tp.csv, tp_samples.csv, run.json. Rows are on the disk when a case has ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows import run_folder
from swiglu_bench.show.csv_file import CsvFile


class Folder(CsvFile):
    """Begins in a folder, or adds to the runs of `tp` in it: groups of other sizes make one scaling figure."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        """Raises BadInput where the folder cannot be written, or holds something else."""
        self.path = path
        run_folder.create_folder(path)
        self._earlier = self._runs()
        super().__init__(path, warn, "tp")

    def _runs(self) -> list[dict[str, Any]]:
        file = self.path / run_folder.RUN
        if not file.exists():
            return []
        try:
            run = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            run = None
        if not (self.path / run_folder.SPLIT).exists() or not isinstance(run, dict):
            raise BadInput(f"--out: {self.path} holds a run of another command; give another folder.")
        return [*run.pop("earlier", []), run]

    def describe(self, about: dict[str, Any]) -> None:
        """Write run.json: this run, and under `earlier` those before it."""
        run_folder.write_run_file(self.path, about | ({"earlier": self._earlier} if self._earlier else {}))
