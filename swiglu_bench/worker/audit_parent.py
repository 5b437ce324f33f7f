"""The audit with every implementation's code in a child process: a check that kills it costs one cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.rows.record import AuditVerdict, Record
from swiglu_bench.worker import worker
from swiglu_bench.worker.audit import matrix
from swiglu_bench.worker.audit.subject import Outcome, failed, not_run
from swiglu_bench.worker.child import Child, Died
from swiglu_bench.worker.crew import log_name
from swiglu_bench.worker.places import ContenderFailed
from swiglu_bench.worker.reports import Malformed, OutcomeReport


def audit(
    implementations: Sequence[Implementation],
    scopes: Sequence[Scope],
    device: torch.device,
    dtype: Dtype | None,
    tell: Callable[[str], None],
    *,
    timeout_s: float,
    logs: Path,
) -> Iterator[Record]:
    """As `matrix.audit`; `timeout_s` is for one check, and what implementations print goes to files in `logs`."""
    for one in implementations:
        if matrix.unavailable(one, device):
            yield from matrix.audit([one], scopes, device, dtype)
            continue
        asked = _Asked(one, device, dtype, timeout_s, logs / log_name(one.name))
        try:
            for scope in (scope for scope in scopes if scope in one.scopes):
                for check in matrix.checks_of(scope):
                    tell(f"{one.name} {scope}: {check.name}")
                    yield matrix.cell(one, scope, check.name, asked.outcome(scope, check.name), device, dtype)
        finally:
            asked.end()


class _Asked:
    """An implementation's process, a new one after each death."""

    def __init__(
        self, implementation: Implementation, device: torch.device, dtype: Dtype | None, timeout_s: float, log: Path
    ) -> None:
        self._declared, self._device, self._dtype = implementation.declared(), device, dtype
        self._timeout_s, self._log = timeout_s, log
        self._child: Child | None = None

    def outcome(self, scope: Scope, check: str) -> Outcome:
        """How a check ends; one that the process dies of has failed."""
        try:
            if self._child is None or self._child.ended:
                self._child = Child(worker.CONTENDER, self._log)
        except Died as death:  # it never began: not the implementation's doing
            return not_run(f"{death}")
        try:
            asked = (self._declared, scope, self._device, self._dtype, check)
            report = OutcomeReport.checked(self._child.ask(self._timeout_s, "audit", *asked))
        except BadInput as error:  # its file is not what it was when the audit began
            return not_run(f"{error}")
        except (Died, ContenderFailed, Malformed) as error:
            return failed(f"{error}")
        return Outcome(AuditVerdict(report.verdict), report.reason)

    def end(self) -> None:
        """Kill the process."""
        if self._child:
            self._child.end()
