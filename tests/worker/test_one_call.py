"""Implementations called under compute-sanitizer; here under a program that has its command line and its output."""

import sys
from pathlib import Path

import pytest
import torch
from courts import run_here
from specimens import small_case

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.worker import one_call
from swiglu_bench.worker.policy import Settings, Task

pytestmark = pytest.mark.timed

CPU = torch.device("cpu")
TOOL = """#!{python}
import subprocess, sys
at = sys.argv.index({python!r})
options = dict(zip(sys.argv[1:at:2], sys.argv[2:at:2]))
print("========= COMPUTE-SANITIZER")
if not {finds} and not {races}:  # else this program's own findings count, not the call
    status = subprocess.run(sys.argv[at:]).returncode
    if status:
        sys.exit(status)
if {races}:
    print("Triton's dispatch of warps: kernels.py:10, kernels.py:30")
    for line in (10, {races}):
        print(f"========= Error: Race reported between Read access at kernel+0x90 in kernels.py:10")
        print(f"=========     and Write access at kernel+0x10 in kernels.py:{{line}} [8 hazards]")
        print("========= ")
    print("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)")
    sys.exit(int(options["--error-exitcode"]))
if {finds}:
    print("========= Invalid __global__ write of size 2 bytes")
    print("=========     at kernel+0x90")
    print("========= ERROR SUMMARY: 1 error")
    sys.exit(int(options["--error-exitcode"]))
print("========= ERROR SUMMARY: 0 errors")
"""


def rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, finds: bool, timeout_s: float = 60.0, races: int = 0
) -> list[Record]:
    program = folder / one_call.PROGRAM
    program.write_text(TOOL.format(python=sys.executable, finds=finds, races=races))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    settings = Settings(Task.VERIFY, CPU, "c", "r", sanitizer="racecheck" if races else "memcheck")
    this, everyone = machine.describe(CPU), [pytorch.eager]
    return list(run_here([small_case()], everyone, settings, this, logs=folder, timeout_s=timeout_s))


def test_what_the_tool_finds_is_in_the_row_and_a_clean_call_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (clean,) = rows(tmp_path, monkeypatch, finds=False)
    assert clean.status is Status.OK, clean.reason
    assert [check.tensor for check in clean.tensor_checks] == ["memcheck"]
    assert {path.name for path in tmp_path.iterdir()} == {one_call.PROGRAM}
    (row,) = rows(tmp_path, monkeypatch, finds=True)
    assert (row.status, "Invalid __global__ write of size 2 bytes" in row.reason) == (Status.INCORRECT, True)
    (log,) = tmp_path.glob("*.log")
    assert str(log) in row.reason


def test_only_the_dispatch_of_warps_may_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (known,) = rows(tmp_path, monkeypatch, finds=False, races=30)
    assert known.status is Status.OK, known.reason
    (real,) = rows(tmp_path, monkeypatch, finds=False, races=31)
    assert real.status is Status.INCORRECT
    assert "in kernels.py:10 and Write access at kernel+0x10 in kernels.py:31 [8 hazards]" in real.reason


def test_a_call_that_fails_or_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (late,) = rows(tmp_path, monkeypatch, finds=False, timeout_s=0.1)
    assert late.status is Status.ERROR
    monkeypatch.setattr(one_call, "program", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    (broken,) = rows(tmp_path, monkeypatch, finds=False)
    assert broken.status is Status.ERROR


def test_where_it_cannot_run_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="the device is cpu"):
        one_call.check("memcheck", CPU)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInput, match="CUDA toolkit"):
        one_call.check("memcheck", torch.device("cuda"))
