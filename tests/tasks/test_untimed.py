"""Audits in child processes: as in one process, but for what a death costs."""

from pathlib import Path

import bad_implementations as bad
import pytest
import torch
from from_files import from_file

from swiglu_bench.cases.cases import Scope
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.rows.record import AuditVerdict, Record
from swiglu_bench.tasks.contract import matrix
from swiglu_bench.tasks.untimed import Asked, audit, audit_here
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.policy import Settings, Task

pytestmark = pytest.mark.timed

CPU = torch.device("cpu")
FEW = tuple(check for check in matrix.CHECKS if check.name in {"float32", "zeros", "CUDA graph"})


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "CHECKS", FEW)


def cells(logs: Path, one: Implementation, timeout_s: float = 60.0, scope: Scope = Scope.GLU) -> list[Record]:
    settings = Settings(Task.VERIFY, CPU, "audit", "")
    court = Court(settings, machine.describe(CPU), timeout_s, logs, bench=matrix.AuditBench)
    try:
        return list(audit(court, Asked([scope]), [one]))
    finally:
        court.end()


def test_the_same_cells_as_in_one_process(tmp_path: Path) -> None:
    assert cells(tmp_path, pytorch.eager) == list(audit_here([pytorch.eager], Asked([Scope.GLU]), CPU))


def test_a_death_costs_one_cell_and_says_how(tmp_path: Path) -> None:
    found = cells(tmp_path, from_file(bad.aborts))
    assert [cell.check for cell in found] == [check.name for check in FEW]
    assert [cell.verdict for cell in found] == [AuditVerdict.FAIL] * 2 + [AuditVerdict.NOT_RUN]
    assert all(cell.reason.startswith("its process was killed by SIGABRT; ") for cell in found[:2])


def test_a_check_that_hangs_costs_one_cell(tmp_path: Path) -> None:
    *hung, last = cells(tmp_path, from_file(bad.hangs), timeout_s=3.0)
    assert [cell.verdict for cell in hung] == [AuditVerdict.FAIL] * 2
    assert all(cell.reason.startswith("it took longer than 3 s (--timeout); ") for cell in hung)
    if "longer than" in last.reason:
        pytest.skip("the machine is too busy to start a process in 3 s")
    assert last.verdict is AuditVerdict.NOT_RUN


def test_a_process_that_cannot_be_started_is_told_once_for_all(tmp_path: Path) -> None:
    found = cells(tmp_path / "missing", from_file(bad.sound))
    assert [cell.verdict for cell in found] == [AuditVerdict.NOT_RUN] * 3
    assert "cannot be written" in found[0].reason
