"""A GPU that another program keeps busy: nobody honest is called incorrect, and no cheat gets a time."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from courts import run_here

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.machine import machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Status
from swiglu_bench.tasks.selftest.run import SPECIMENS, run_specimens
from swiglu_bench.worker.policy import Settings, Task

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
COMPETITOR = """
import time, torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
print("at work", flush=True)
while True:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    time.sleep(0.002)
"""
HONEST = ("eager", "compile", "liger", "fused-auto")
CHEATS = ("side-stream-not-joined", "side-stream-later", "late-thread", "background-thread")


@pytest.fixture(autouse=True, scope="module")
def _competitor() -> Iterator[None]:
    """Another user's program: nobody here is its parent, or it would count as one of the suite's own."""
    read, write = os.pipe()
    starter = os.fork()
    if starter == 0:
        program = subprocess.Popen([sys.executable, "-c", COMPETITOR], stdout=write, start_new_session=True)
        os.write(write, f"{program.pid}\n".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(starter, 0)
    with open(read) as said:
        pid = int(said.readline())
        try:
            assert said.readline() == "at work\n"
            yield
        finally:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_honest_implementations_end_ok_or_unsettled(mode: Mode, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    case = Case(Shape("busy", 2048, 4096, "made up", (512,)), 512, Dtype.BFLOAT16, Scope.GLU, mode)
    rule = Rule(warmup_rounds=2, min_rounds=15, max_rounds=40, min_s=0.0, budget_s=60.0)
    chosen = [entry for entry in CATALOGUE if entry.name in HONEST]
    assert len(chosen) == len(HONEST)
    settings, this = Settings(Task.TIME, device, "c", "r", rule=rule, energy=False), machine.describe(device)
    for row in run_here([case], chosen, settings, this, logs=tmp_path, timeout_s=120.0):
        assert row.status in {Status.OK, Status.UNSETTLED}, f"{row.implementation}: {row.reason}"
        assert row.other_processes or "Another process" in row.reason, "the other program is not named"


def test_cheats_get_no_time() -> None:
    device = torch.device("cuda", 0)
    chosen = [SPECIMENS[name] for name in CHEATS]
    for catch in run_specimens(device, machine.describe(device), lambda *_: None, chosen):
        assert catch.caught or not catch.ran, f"{catch.specimen.name}: {catch.reason}"
