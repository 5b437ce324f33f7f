"""The files of `swiglu-bench tp`, and how its rows say that a block is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swiglu_bench.rows.record import LAYOUTS, Record
from swiglu_bench.rows.run_folder import read_about, read_layout

ROWS, SAMPLES = LAYOUTS["tp"].file, LAYOUTS["tp"].samples
BASELINE = "eager"


def split_row(command: str, **columns: Any) -> Record:
    """A row from the columns of tp.csv; its scope says how it is split, as `mlp-tp4-sp` or `experts-ep4`."""
    scope = f"mlp-tp{columns['ranks']}{'-sp' if columns['sequence_parallel'] else ''}"
    if columns["experts"]:
        scope = f"experts-ep{columns['ranks']}"
    return Record(**columns, command=command, scope=scope, baseline=BASELINE, kind="tp")


def read_split_rows(file: Path) -> list[Record]:
    """The rows of a tp.csv, with the commands that run.json beside it names. Raises BadInput."""
    about = read_about(file.parent)
    commands = {one.get("run_id"): str(one.get("command")) for one in (*about.get("earlier", ()), about)}

    def made(**columns: Any) -> Record:
        command = commands.get(columns["run_id"], "swiglu-bench tp")
        return split_row(command, **{"experts": None, **columns})

    return read_layout(file, "tp", made)
