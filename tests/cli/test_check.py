"""audit, selftest and inspect from the command line to their files and their exit status."""

import json
import os
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
from swiglu_kernels.standalone import compiled
from swiglu_kernels.standalone.compiled import Resources

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


# inspect

INSPECT = ("inspect", "--target", "sm_80, 90a", "--shapes", "24x40", "--tokens", "1,8", "--dtype", "fp16")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Nothing is compiled; the bytes that each kernel spills."""
    spills = {"forward": 0, "dX": 0}

    def report(name: str, tokens: int, hidden: int, intermediate: int, dtype: Any, capability: Any) -> Resources:
        assert (hidden, intermediate) == (24, 40)
        return Resources(name, "{}.{}".format(*capability), str(dtype), tokens, 128, spills[name], 2**16, 5, 0, 7, 3, 0)

    monkeypatch.setattr(compiled, "launches", lambda *_: spills)
    monkeypatch.setattr(compiled, "report", report)
    return spills


def test_every_kernel_is_shown_for_every_target_and_token_count_and_a_spill_exits_1(compiler: dict[str, int]) -> None:
    rows = json.loads(swiglu_bench(*INSPECT, "--format", "json").out)["rows"]
    assert [(row["capability"], row["tokens"], row["kernel"]) for row in rows] == [
        (capability, tokens, name) for capability in ("8.0", "9.0") for tokens in (1, 8) for name in ("forward", "dX")
    ]
    assert swiglu_bench(*INSPECT).code == 0
    assert "8192 tokens" in swiglu_bench("inspect", "--shapes", "24x40").out
    compiler["dX"] = 96
    ran = swiglu_bench(*INSPECT, width=140)
    assert (ran.code, ran.out.count("none"), ran.out.count("96 B")) == (1, 4, 4)
    for text in ("sm_80", "sm_90", "torch.float16", "64 KiB"):
        assert text in ran.out


@pytest.mark.parametrize("end", [lambda: os._exit(134), lambda: int("a kernel of no target")])
def test_a_target_that_the_compiler_does_not_know_is_named(
    monkeypatch: pytest.MonkeyPatch, compiler: dict[str, int], end: Callable[[], object]
) -> None:
    monkeypatch.setattr(compiled, "report", lambda *_: end())
    complaint = swiglu_bench("inspect", "--target", "sm_12").complaint
    assert "--target" in complaint
    assert "sm_12 " in complaint
    assert "sm_90" in complaint
