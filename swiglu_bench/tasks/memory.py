"""The task `memory`: what a forward and backward keep and need, beside the bytes that arithmetic predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.rows.record import Record
from swiglu_bench.tasks.case import TWINS, Able, CaseRun
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.worker import MemoryReport


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
