"""Audits in child processes: as in one process, but for what a death costs."""

from pathlib import Path

import deadly_implementations as deadly
import pytest
import torch
from from_files import from_file

from swiglu_bench.audit import matrix
from swiglu_bench.implementations import fused, pytorch
from swiglu_bench.processes import audit_parent
from swiglu_bench.rows.audit_cell import Cell, CellStatus
from swiglu_bench.spec.cases import Scope
from swiglu_bench.spec.implementation import Implementation

CPU = torch.device("cpu")
FEW = tuple(check for check in matrix.CHECKS if check.name in {"float32", "1 token", "zeros", "CUDA graph"})


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "CHECKS", FEW)


def cells(logs: Path, one: Implementation, timeout_s: float = 60.0) -> list[Cell]:
    return list(audit_parent.audit([one], [Scope.GLU], CPU, None, lambda doing: None, timeout_s=timeout_s, logs=logs))


@pytest.mark.parametrize("one", [pytorch.eager, fused.ROWS["fused"]], ids=lambda one: one.name)
def test_the_same_cells_as_in_one_process(tmp_path: Path, one: Implementation) -> None:
    assert cells(tmp_path, one) == list(matrix.audit([one], [Scope.GLU], CPU))


def test_a_death_costs_one_cell_and_says_how(tmp_path: Path) -> None:
    found = cells(tmp_path, from_file(deadly.aborts))
    assert [cell.check for cell in found] == [check.name for check in FEW]
    assert [cell.verdict for cell in found] == [CellStatus.FAIL] * 3 + [CellStatus.NOT_RUN]
    assert all(cell.reason.startswith("its process was killed by SIGABRT; ") for cell in found[:3])


def test_a_check_that_hangs_costs_one_cell(tmp_path: Path) -> None:
    found = cells(tmp_path, from_file(deadly.hangs), timeout_s=4.0)
    assert [cell.verdict for cell in found] == [CellStatus.FAIL] * 3 + [CellStatus.NOT_RUN]
    assert found[0].reason.startswith("it took longer than 4 s (--timeout); ")


def test_what_has_no_such_scope_has_no_cell(tmp_path: Path) -> None:
    nothing = audit_parent.audit(
        [from_file(deadly.sound)], [Scope.MLP], CPU, None, pytest.fail, timeout_s=1.0, logs=tmp_path
    )
    assert list(nothing) == []


def test_a_process_that_cannot_be_started_is_told_once_for_all(tmp_path: Path) -> None:
    found = cells(tmp_path / "missing", from_file(deadly.sound))
    assert [cell.verdict for cell in found] == [CellStatus.NOT_RUN] * 4
    assert "cannot be written" in found[0].reason
