"""The files of `swiglu-bench tp`, and how its rows say that a block is split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swiglu_bench.rows.record import LAYOUTS, Record
from swiglu_bench.rows.run_folder import read_layout

ROWS, SAMPLES = LAYOUTS["tp"].file, "tp_samples.csv"
BASELINE = "eager"
KEY = ("run_id", "shape", "tokens", "dtype", "mode", "ranks", "sequence_parallel", "implementation")
PARTS = ("compute_ms", "comm_ms", "single_ms")
SAMPLE_FIELDS = ("time_ms", "twin_ms", *PARTS)


def split_row(command: str, **columns: Any) -> Record:
    """A row from the columns of tp.csv; its scope says how it is split, as `mlp-tp4-sp` or `experts-ep4`."""
    scope = f"mlp-tp{columns['ranks']}{'-sp' if columns['sequence_parallel'] else ''}"
    if columns["experts"]:
        scope = f"experts-ep{columns['ranks']}"
    return Record(**columns, command=command, scope=scope, baseline=BASELINE, kind="tp")


def read_split_rows(file: Path, commands: Mapping[str, str] | None = None) -> list[Record]:
    """The rows of a tp.csv; `commands` are those of its runs, by run_id. Raises BadInput."""

    def made(**columns: Any) -> Record:
        command = (commands or {}).get(columns["run_id"], "swiglu-bench tp")
        return split_row(command, **{"experts": None, **columns})

    return read_layout(file, "tp", made)
