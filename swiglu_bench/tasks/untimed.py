"""The tasks that time nothing: `verify` holds results against fp64, several contenders at a time; `sanitize` makes
calls under compute-sanitizer; `memory` measures what is kept and needed, beside the bytes that arithmetic predicts;
`audit` asks for the contract, and is shown as a matrix.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console

from swiglu_bench import loop
from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Dtype, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.options import AuditOptions, given
from swiglu_bench.output import folder_of, logs
from swiglu_bench.request import INTERRUPTED, command_line, say_on_stderr
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import LAYOUTS, AuditVerdict, Record, Status, row_of
from swiglu_bench.show.console import Bar, Screen
from swiglu_bench.show.tables import contract_tables
from swiglu_bench.show.text import Table
from swiglu_bench.tasks.case import TWINS, CaseRun, Entry
from swiglu_bench.tasks.contract import matrix
from swiglu_bench.tasks.contract.inputs import Check, CheckOutcome, failed, not_run
from swiglu_bench.tasks.contract.matrix import AuditBench
from swiglu_bench.worker import one_call, policy
from swiglu_bench.worker.admission import failure
from swiglu_bench.worker.child import Contender, ContenderFailed, Died
from swiglu_bench.worker.court import Court, log_name, name_of
from swiglu_bench.worker.places import OneDevice, Work
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.worker import CheckReport, Malformed, MemoryReport


def verify(court: Court, case: Case, implementations: Sequence[Implementation]) -> Iterator[Record]:
    """Each implementation checked; nothing is timed, so as many are checked side by side as there is room for."""
    return _VerifyCase(court, case).rows(implementations)


class _VerifyCase(CaseRun):
    def start_early(self, able: Sequence[Entry]) -> None:
        if len(able) <= min(self.seats, os.cpu_count() or 1):
            self.start([known.implementation for known in able])

    def measure(self, able: Sequence[Entry]) -> Iterator[Record]:
        at_once = max(1, min(len(able), self.seats, os.cpu_count() or 1))
        done = self.court.side_by_side([partial(self._check, known, len(able)) for known in able], at_once)
        self.court.tell(f"checking {able[0].implementation.name}", 0.0)
        for index, record in enumerate(done, 1):
            yield record
            if index < len(able):
                self.court.tell(f"checking {able[index].implementation.name}", index / len(able))

    def _check(self, known: Entry, contenders: int) -> Record:
        self.admit(known)
        if self.seats < contenders:
            self.court.judge.close_letterboxes(name_of(known.implementation, ""))
            with contextlib.suppress(Exception):  # its process may have ended
                self.court.contender(known.implementation).tell("forget")
        return known.record


def sanitize(court: Court, case: Case, implementations: Sequence[Implementation]) -> Iterator[Record]:
    """Each implementation called once under a tool of compute-sanitizer, in a process of its own without a judge."""
    settings, tool = court.settings, court.settings.sanitizer
    for index, implementation in enumerate(implementations):
        court.tell(f"{tool} of {implementation.name}", index / len(implementations))
        record = policy.blank(settings, court.machine, case, implementation)
        reason = policy.inapplicable(settings, court.machine, case, implementation)
        if reason:
            yield record.end(Status.SKIPPED, reason)
            continue
        log = court.logs / log_name(f"{implementation.name} {case.label}")
        try:
            wrong = one_call.findings(settings, implementation, case, court.timeout_s, log)
        except one_call.NoVerdict as reason_why:
            yield record.end(Status.ERROR, str(reason_why))
            continue
        record.tensor_checks = (dataclasses.replace(failure("sanitizer", wrong), tensor=tool, ok=not wrong),)
        yield record.end(Status.INCORRECT, f"{tool}: {wrong}.") if wrong else record


def memory(court: Court, case: Case, implementations: Sequence[Implementation]) -> Iterator[Record]:
    """Each implementation checked, and the memory that it uses measured."""
    return _MemoryCase(court, case).rows(implementations)


class _MemoryCase(CaseRun):
    def measure(self, able: Sequence[Entry]) -> Iterator[Record]:
        for known, _ in self.admitted(able, together=len(able) + len(TWINS) <= self.seats):
            yield known.record

    def once_admitted(self, record: Record, contender: Contender) -> None:
        use = contender.ask(MemoryReport, "memory", self.drawn.draws[0])
        record.saved_bytes, record.peak_bytes, record.workspace_bytes = use.saved_bytes, use.peak_bytes, use.kept_bytes
        footprint = contender.implementation.footprints.get(self.case.scope)
        if footprint:
            record.predicted_saved_bytes, record.predicted_peak_bytes = costs.predicted_memory(self.case, footprint)
            record.predicted_workspace_bytes = 0


# The contract


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
                dtype = case.dtype or matrix.default_dtype(device)
                yield row_of(
                    "audit", {}, implementation=implementation.name, scope=scope.value, check=check.name,
                    verdict=outcome.verdict, reason=outcome.reason, dtype=dtype.value, device=device.type,
                )  # fmt: skip
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
    court = Court(
        Settings(Task.VERIFY, device, "audit", ""), machine.describe(device), bench=AuditBench, in_process=True
    )
    return audit(court, asked, implementations)


def run_audit(
    chosen: Sequence[Implementation], asked: Asked, device: torch.device, options: AuditOptions, console: Console
) -> tuple[int, dict[str, Any], list[Record]]:
    """Run every check: the exit status, the content of run.json, and the cells.

    The status is 1 with --strict and a fail, and 130 when interrupted.
    """
    places = OneDevice(device, say_on_stderr, options.in_process)
    this, cells, screen = places.assemble(), list[Record](), Screen(console)
    ending = loop.Ending(screen, {})
    about = {"command": command_line(), "options": given(options), "machine": this.as_dict()}
    folder = folder_of("audit", options, this, machine.now())
    if folder:
        run_folder.create_folder(folder)
        run_folder.write_run_file(folder, about)
    file = Table(folder / run_folder.AUDIT, LAYOUTS["audit"].columns()) if folder else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        matrix.ignore_warnings_of_values()
        place = stack.enter_context(logs(folder, lambda: any(cell.verdict is AuditVerdict.FAIL for cell in cells)))
        settings = Settings(Task.VERIFY, device, command_line(), "")
        work = Work(audit, chosen, settings, options.timeout, place, options.wait, AuditBench)
        total = sum(len(matrix.checks_of(scope)) for known in chosen for scope in asked.scopes if scope in known.scopes)
        bar = stack.enter_context(Bar(console, total))
        found = loop.rows(places, [asked], work, lambda at: bar.tell(at.doing, len(cells)), console.print)
        try:
            with ending, contextlib.closing(found):
                for cell in found:
                    cells.append(cell)
                    if file:
                        file.append([cell.row().values()])
        except OSError as error:
            raise BadInput(f"--out: {folder} cannot be written: {error.strerror}.") from None
    counts = {verdict: sum(cell.verdict is verdict for cell in cells) for verdict in AuditVerdict}
    console.width = max(console.width, 80)
    for part in contract_tables(cells, {check.name: check.about for check in matrix.CHECKS}):
        console.print(part, soft_wrap=not hasattr(part, "columns"))
    screen.say(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if folder:
        screen.say(f"Cells and machine: {folder}")
    if ending.interrupted:
        console.print(f"Interrupted: {len(cells)} cells were kept.", style="yellow")
        return INTERRUPTED, about, cells
    return int(options.strict and counts[AuditVerdict.FAIL] > 0), about, cells
