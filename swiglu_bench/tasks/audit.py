"""The task `audit`: every implementation through the checks of the contract, and the command that shows the matrix."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from swiglu_bench import loop
from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.options import AuditOptions, given
from swiglu_bench.output import folder_of, logs
from swiglu_bench.request import INTERRUPTED, command_line, say_on_stderr
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import LAYOUTS, AuditVerdict, Record
from swiglu_bench.show.console import Bar
from swiglu_bench.show.csv_file import Table
from swiglu_bench.show.tables import contract_tables
from swiglu_bench.tasks.contract import matrix
from swiglu_bench.tasks.contract.matrix import AuditBench, Check
from swiglu_bench.tasks.contract.subject import CheckOutcome, failed, not_run
from swiglu_bench.worker.child import ContenderFailed, Died
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.places import OneDevice, Work
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.worker import CheckReport, Malformed


@dataclass(frozen=True)
class Asked:
    """What is checked of each implementation, in the place of a case."""

    scopes: Sequence[Scope]
    dtype: Dtype | None = None
    """The dtype of checks that have none of their own; None: bf16 on a GPU and fp32 on a CPU."""
    only: Sequence[str] = ()
    """Names of checks; all where there is none."""


def audit(court: Court, case: Asked, implementations: Sequence[Implementation]) -> Iterator[Record]:
    """Every check of every implementation at every scope that it has, in the implementation's process.

    A check that its process dies of has failed. In one process, a check that breaks the device ends the others.
    """
    device, lost = court.settings.device, ""
    for index, implementation in enumerate(implementations):
        why = matrix.unavailable(implementation, device)
        for scope in (scope for scope in case.scopes if scope in implementation.scopes):
            for check in matrix.checks_of(scope, case.only):
                court.tell(f"{implementation.name} {scope}: {check.name}", index / len(implementations))
                try:
                    reason = lost or why
                    outcome = not_run(reason) if reason else _outcome(court, implementation, scope, case.dtype, check)
                except DeviceLost as error:  # only in this process
                    lost = f"the device was lost in {check.name!r} of {implementation.name} at {scope}"
                    outcome = failed(str(error))
                yield matrix.cell(implementation, scope, check.name, outcome, device, case.dtype)
        if not why:
            court.end_contender(implementation)


def _outcome(
    court: Court, implementation: Implementation, scope: Scope, dtype: Dtype | None, check: Check
) -> CheckOutcome:
    try:
        contender = court.contender(implementation)
    except Died as death:  # it never began: not the implementation's doing
        return not_run(f"{death}")
    try:
        report = contender.ask(CheckReport, "audit", scope, dtype, check.name)
    except BadInput as error:  # its file is not what it was when the audit began
        return not_run(f"{error}")
    except (Died, ContenderFailed, Malformed) as error:
        return failed(f"{error}")
    return CheckOutcome(AuditVerdict(report.verdict), report.reason)


def audit_here(implementations: Sequence[Implementation], asked: Asked, device: torch.device) -> Iterator[Record]:
    """Audit trusted implementations in this process."""
    court = Court(_settings(device, "audit"), machine.describe(device), bench=AuditBench, in_process=True)
    return audit(court, asked, implementations)


def _settings(device: torch.device, command: str) -> Settings:
    return Settings(Task.VERIFY, device, command, "")


def run_audit(
    chosen: Sequence[Implementation], asked: Asked, device: torch.device, options: AuditOptions, console: Console
) -> tuple[int, dict[str, Any], list[Record]]:
    """Run every check: the exit status, the content of run.json, and the cells.

    The status is 1 with --strict and a fail, and 130 when interrupted.
    """
    places = OneDevice(device, say_on_stderr, options.in_process)
    this, cells, interrupted = places.assemble(), list[Record](), False
    about = {"command": command_line(), "options": given(options), "machine": this.as_dict()}
    folder = folder_of("audit", options, this, machine.now())
    file = _opened(folder, about) if folder else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        matrix.ignore_warnings_of_values()
        place = stack.enter_context(logs(folder, lambda: any(cell.verdict is AuditVerdict.FAIL for cell in cells)))
        settings = _settings(device, command_line())
        work = Work(audit, chosen, settings, options.timeout, place, options.wait, AuditBench)
        total = sum(len(matrix.checks_of(scope)) for known in chosen for scope in asked.scopes if scope in known.scopes)
        bar = stack.enter_context(Bar(console, total))
        found = loop.rows(places, [asked], work, lambda at: bar.tell(at.doing, len(cells)), console.print)
        try:
            with contextlib.closing(found):
                for cell in found:
                    cells.append(cell)
                    if file:
                        file.append([cell.row().values()])
        except KeyboardInterrupt:
            interrupted = True
        except OSError as error:
            raise BadInput(f"--out: {folder} cannot be written: {error.strerror}.") from None
    counts = {verdict: sum(cell.verdict is verdict for cell in cells) for verdict in AuditVerdict}
    _show(cells, counts, folder, console)
    if interrupted:
        console.print(f"Interrupted: {len(cells)} cells were kept.", style="yellow")
        return INTERRUPTED, about, cells
    return int(options.strict and counts[AuditVerdict.FAIL] > 0), about, cells


def _opened(folder: Path, about: dict[str, Any]) -> Table:
    if run_folder.has_rows(folder, run_folder.AUDIT):
        raise BadInput(f"--out: {folder} has the cells of an earlier audit; give another folder.")
    run_folder.create_folder(folder)
    run_folder.write_run_file(folder, about)
    return Table(folder / run_folder.AUDIT, LAYOUTS["audit"].columns())


def _show(cells: Sequence[Record], counts: dict[AuditVerdict, int], folder: Path | None, console: Console) -> None:
    console.width = max(console.width, 80)
    for part in contract_tables(cells, {check.name: check.about for check in matrix.CHECKS}):
        console.print(part, soft_wrap=not hasattr(part, "columns"))
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if folder:
        console.print(f"Cells and machine: {folder}", markup=False, highlight=False, soft_wrap=True)
