"""An audit from its implementations to its exit status: each cell goes at once to audit.csv, the matrix comes last."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import machine
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import LAYOUTS, AuditVerdict, Record
from swiglu_bench.show.writers.console import Bar
from swiglu_bench.show.writers.contract import contract_tables
from swiglu_bench.show.writers.csv_file import Table
from swiglu_bench.sweep.options import AuditOptions, given
from swiglu_bench.sweep.output import folder_of, logs
from swiglu_bench.sweep.request import INTERRUPTED, command_line, held
from swiglu_bench.worker import audit_parent
from swiglu_bench.worker.audit import matrix


def run_audit(
    chosen: Sequence[Implementation],
    scopes: Sequence[Scope],
    device: torch.device,
    dtype: Dtype | None,
    options: AuditOptions,
    console: Console,
) -> tuple[int, dict[str, Any], list[Record]]:
    """Run every check: the exit status, the content of run.json, and the cells.

    The status is 1 with --strict and a fail, and 130 when interrupted.
    """
    this, cells, interrupted = machine.describe(device), list[Record](), False
    about = {"command": command_line(), "options": given(options), "machine": this.as_dict()}
    folder, file = folder_of("audit", options, this, machine.now()), None
    if folder:
        if run_folder.has_rows(folder, run_folder.AUDIT):
            raise BadInput(f"--out: {folder} has the cells of an earlier audit; give another folder.")
        run_folder.create_folder(folder)
        run_folder.write_run_file(folder, about)
        file = Table(folder / run_folder.AUDIT, LAYOUTS["audit"].columns())
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(device, options.wait))
        stack.enter_context(warnings.catch_warnings())
        matrix.ignore_warnings_of_values()
        scopes_of = [[scope for scope in scopes if scope in one.scopes] for one in chosen]
        bar = stack.enter_context(Bar(console, sum(map(len, scopes_of)) * len(matrix.CHECKS)))
        place = stack.enter_context(logs(folder, lambda: any(cell.verdict is AuditVerdict.FAIL for cell in cells)))
        asked = (chosen, scopes, device, dtype)

        def tell(doing: str) -> None:
            bar.tell(doing, len(cells))

        if options.in_process:
            found = matrix.audit(*asked, tell=tell)
        else:
            found = audit_parent.audit(*asked, tell, timeout_s=options.timeout, logs=place)
        try:
            for cell in found:
                cells.append(cell)
                if file:
                    file.append([cell.row().values()])
        except KeyboardInterrupt:
            interrupted = True
        except OSError as error:
            raise BadInput(f"--out: {folder} cannot be written: {error.strerror}.") from None
    console.width = max(console.width, 80)
    for part in contract_tables(cells, {check.name: check.about for check in matrix.CHECKS}):
        console.print(part, soft_wrap=not hasattr(part, "columns"))
    counts = {verdict: sum(cell.verdict is verdict for cell in cells) for verdict in AuditVerdict}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if folder:
        console.print(f"Cells and machine: {folder}", markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        console.print(f"Interrupted: {len(cells)} cells were kept.", style="yellow")
        return INTERRUPTED, about, cells
    return int(options.strict and counts[AuditVerdict.FAIL] > 0), about, cells
