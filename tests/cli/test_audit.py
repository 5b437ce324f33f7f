import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from command_line import swiglu_bench
from specimens import a_cell

from swiglu_bench import loop
from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.rows.record import AuditVerdict, Record
from swiglu_bench.tasks.contract import matrix

AUDIT = ("audit", "--impl", "eager", "--scope", "activation", "--device", "cpu")


@pytest.fixture(autouse=True)
def _few_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matrix, "CHECKS", matrix.CHECKS[:2])


def test_an_audit_leaves_its_cells_and_says_what_it_counted() -> None:
    ran = swiglu_bench(*AUDIT, "--in-process", "--out", "audit")
    assert (ran.code, ran.err) == (0, "")
    assert {path.name for path in Path("audit").iterdir()} == {"audit.csv", "run.json"}
    assert "2 pass, 0 fail, 0 unsupported, 0 not run" in ran.out
    assert ran.out.rstrip().endswith("Cells and machine: audit")
    head, *lines = Path("audit/audit.csv").read_text(encoding="utf-8").splitlines()
    assert (head, len(lines)) == ("implementation,scope,check,verdict,reason,dtype,device", 2)
    about = json.loads(Path("audit/run.json").read_text())
    assert (about["options"]["impl"], about["options"]["in_process"]) == (["eager"], True)
    assert about["machine"]["device_type"] == "cpu"


def cells(*verdicts: AuditVerdict, interrupt: bool = False) -> Callable[..., Generator[Record]]:
    """An audit in child processes that finds these."""

    def rows(places: Any, cases: Any, work: Any, show: Any, warn: Any) -> Generator[Record]:
        (asked,) = cases
        assert [known.name for known in work.implementations] == ["eager"]
        assert (asked.scopes, asked.dtype, work.timeout_s) == ([Scope.ACTIVATION], Dtype.BFLOAT16, 600.0)
        assert work.logs.is_dir()
        for verdict in verdicts:
            yield a_cell("eager", "activation", matrix.CHECKS[0].name, verdict, "why")
        if interrupt:
            raise KeyboardInterrupt

    return rows


@pytest.mark.parametrize(
    ("found", "more", "code"),
    [
        (cells(AuditVerdict.PASS, AuditVerdict.UNSUPPORTED), ["--strict"], 0),
        (cells(AuditVerdict.PASS, AuditVerdict.FAIL), [], 0),
        (cells(AuditVerdict.PASS, AuditVerdict.FAIL), ["--strict"], 1),
        (cells(AuditVerdict.FAIL, interrupt=True), ["--strict"], 130),
    ],
)
def test_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, found: Callable[..., Generator[Record]], more: list[str], code: int
) -> None:
    monkeypatch.setattr(loop, "rows", found)
    monkeypatch.setattr("swiglu_bench.worker.forkserver.start", lambda *_: None)
    ran = swiglu_bench(*AUDIT, "--dtype", "bf16", "--no-csv", "--format", "json", *more)
    assert ran.code == code
    assert ("Interrupted: 1 cells were kept." in ran.err) == (code == 130)
    assert (f"✗ {matrix.CHECKS[0].name}: why" in ran.err) == ('"fail"' in ran.out)
    told = json.loads(ran.out)
    assert (told["kind"], told["options"]["dtype"]) == ("audit", "bf16")
    assert len(told["rows"]) == (1 if code == 130 else 2)
    assert not Path("results").exists()


def test_a_self_test_counts_its_cases() -> None:
    ran = swiglu_bench("selftest", "--no-zoo", "--false-alarms", "2", "--impl", "eager", "--device", "cpu")
    assert (ran.code, ran.err) == (0, "")
    assert "0 false alarms in " in ran.out
    assert "at 2 random cases (seed 0)" in ran.out
