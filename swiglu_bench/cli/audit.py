"""An audit from its implementations to its exit status: cells at once to the file, the matrix at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from swiglu_bench.audit.matrix import CHECKS
from swiglu_bench.machine import machine
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.audit_cell import Cell, CellStatus
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.sweep.output import default_folder, logs
from swiglu_bench.writers.contract import ContractFile, contract_tables

INTERRUPTED = 130


Ask = Callable[[Callable[[str], None], Path], Iterator[Cell]]
"""The cells of an audit, given who hears what it is doing and a folder for what implementations print."""


def run_audit(ask: Ask, about: dict[str, Any], folder: Path | None, csv: bool, strict: bool, console: Console) -> int:
    """Run every check; 0, or 1 where `strict` and a cell is a fail, or 130 when interrupted.

    `folder` None means results/GPU/DATE/TIME-audit; without `csv` nothing is written.
    """
    this: machine.Machine = about["machine"]
    folder = (folder or default_folder(this, "audit", machine.now())) if csv else None
    file = None
    if folder:
        run_folder.create_folder(folder)
        run_folder.write_run_file(folder, about | {"machine": this.as_dict()})
        file = ContractFile(folder)
    cells: list[Cell] = []
    interrupted = False
    kept = logs(folder, wanted=lambda: any(cell.verdict is CellStatus.FAIL for cell in cells))
    with warnings.catch_warnings(), console.status("") as status, kept as place:
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
        try:
            for cell in ask(lambda doing: status.update(doing), place):
                cells.append(cell)
                if file:
                    file.write(cell)
        except KeyboardInterrupt:
            interrupted = True
        except OSError as error:
            raise BadInput(f"--out: {folder} cannot be written: {error.strerror}.") from None
    console.width = max(console.width, 80)
    for part in contract_tables(cells, {check.name: check.about for check in CHECKS}):
        console.print(part, soft_wrap=not hasattr(part, "columns"))
    counts = {one: sum(cell.verdict is one for cell in cells) for one in CellStatus}
    console.print(", ".join(f"{count} {one}" for one, count in counts.items()))
    if folder:
        console.print(f"Cells and machine: {folder}", markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        console.print(f"Interrupted: {len(cells)} cells were kept.", style="yellow")
        return INTERRUPTED
    return int(strict and counts[CellStatus.FAIL] > 0)
