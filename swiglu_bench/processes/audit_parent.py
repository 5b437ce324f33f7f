"""The audit with every implementation's code in a child process: a check that kills it costs one cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from swiglu_bench.audit import matrix
from swiglu_bench.audit.subject import Outcome
from swiglu_bench.processes.child import Child, Died
from swiglu_bench.processes.parent import log_name
from swiglu_bench.processes.worker import NOBODY, Audit
from swiglu_bench.rows.audit_cell import Cell, CellStatus
from swiglu_bench.spec.cases import Dtype, Scope
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.spec.implementation import Implementation


def audit(
    implementations: Sequence[Implementation],
    scopes: Sequence[Scope],
    device: torch.device,
    dtype: Dtype | None,
    tell: Callable[[str], None],
    *,
    timeout_s: float,
    logs: Path,
) -> Iterator[Cell]:
    """As `matrix.audit`; `timeout_s` is for one check, and what implementations print goes to files in `logs`."""
    for implementation in implementations:
        if matrix.unavailable(implementation, device):
            yield from matrix.audit([implementation], scopes, device, dtype)
        else:
            one = _Audited(implementation, device, dtype, tell, timeout_s, logs)
            try:
                for scope in scopes:
                    yield from one.cells(scope)
            finally:
                one.end()


class _Audited:
    """An implementation under audit and its process, a new one after each death."""

    def __init__(
        self,
        implementation: Implementation,
        device: torch.device,
        dtype: Dtype | None,
        tell: Callable[[str], None],
        timeout_s: float,
        logs: Path,
    ) -> None:
        self._implementation = implementation
        self._device = device
        self._dtype = dtype
        self._tell = tell
        self._timeout_s = timeout_s
        self._log = logs / log_name(implementation.name)
        self._child: Child | None = None

    def end(self) -> None:
        """Kill the process."""
        if self._child:
            self._child.end()

    def cells(self, scope: Scope) -> Iterator[Cell]:
        """Every check at a scope; one that the process dies of fails, and the others are asked in a new process."""
        left = [check.name for check in matrix.CHECKS] if scope in self._implementation.scopes else []
        while left:
            count = len(left)
            try:
                if self._child is None or self._child.ended:
                    self._child = Child(self._log)
                job = Audit(self._implementation.declared(), scope, self._device, self._dtype, tuple(left))
                for cell in self._child.ask(job, self._timeout_s, lambda doing, fraction: self._tell(doing)):
                    left.remove(cell.check)
                    yield cell
            except Died as death:
                if death.culprit != NOBODY:
                    yield self._cell(scope, left.pop(0), CellStatus.FAIL, f"{death}")
                elif len(left) == count:  # it is not the implementation's doing, and a new process would end the same
                    yield from (self._cell(scope, check, CellStatus.NOT_RUN, f"{death}") for check in left)
                    return
            except BadInput as error:  # its file is not what it was when the audit began
                yield from (self._cell(scope, check, CellStatus.NOT_RUN, str(error)) for check in left)
                return

    def _cell(self, scope: Scope, check: str, verdict: CellStatus, reason: str) -> Cell:
        return matrix.cell(self._implementation, scope, check, Outcome(verdict, reason), self._device, self._dtype)
