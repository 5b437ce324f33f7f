"""The tasks that time nothing: `verify` holds results against fp64, several contenders at a time; `sanitize` makes
calls under compute-sanitizer; `memory` measures what is kept and needed, beside the bytes that arithmetic predicts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.tasks.case import TWINS, Able, CaseRun
from swiglu_bench.worker import one_call, policy
from swiglu_bench.worker.admission import failure
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Court, log_name, name_of
from swiglu_bench.worker.reports import MemoryReport


def verify(court: Court, case: Case, implementations: Sequence[Implementation]) -> Iterator[Record]:
    """Each implementation checked; nothing is timed, so as many are checked side by side as there is room for."""
    return _VerifyCase(court, case).rows(implementations)


class _VerifyCase(CaseRun):
    def start_early(self, able: Sequence[Able]) -> None:
        if len(able) <= min(self.seats, os.cpu_count() or 1):
            self.start([known.implementation for known in able])

    def measure(self, able: Sequence[Able]) -> Iterator[Record]:
        at_once = max(1, min(len(able), self.seats, os.cpu_count() or 1))
        done = self.court.side_by_side([partial(self._check, known, len(able)) for known in able], at_once)
        self.court.tell(f"checking {able[0].implementation.name}", 0.0)
        for index, record in enumerate(done, 1):
            yield record
            if index < len(able):
                self.court.tell(f"checking {able[index].implementation.name}", index / len(able))

    def _check(self, known: Able, contenders: int) -> Record:
        """One contender's row; where not all fit on the device, its process then frees its memory."""
        self.admit(known)
        if self.seats < contenders:
            self.court.judge.close_letterboxes(name_of(known.implementation, ""))
            with suppress(Exception):  # its process may have ended
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
    def measure(self, able: Sequence[Able]) -> Iterator[Record]:
        for known, _ in self.admitted(able, together=len(able) + len(TWINS) <= self.seats):
            yield known.record

    def once_admitted(self, record: Record, contender: Contender) -> None:
        use = contender.ask(MemoryReport, "memory", self.drawn.draws[0])
        record.saved_bytes, record.peak_bytes, record.workspace_bytes = use.saved_bytes, use.peak_bytes, use.kept_bytes
        footprint = contender.implementation.footprints.get(self.case.scope)
        if footprint:
            record.predicted_saved_bytes, record.predicted_peak_bytes = costs.predicted_memory(self.case, footprint)
            record.predicted_workspace_bytes = 0
