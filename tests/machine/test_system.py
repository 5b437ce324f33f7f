"""What other programs do with the CPUs, and what is made of it."""

import os
import subprocess
import sys

import pytest

from swiglu_bench.machine import system as module
from swiglu_bench.machine.system import LoadWatch, look
from swiglu_bench.rows.record import Load
from swiglu_bench.worker.ahead import competitors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the load is read from /proc")
SPIN = "import time\nwhile time.process_time() < 1.0: pass"


def test_what_this_process_and_its_children_use_is_not_others() -> None:
    watch = LoadWatch()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    mine = watch._read()
    assert mine
    assert watch._before
    assert mine.own - watch._before.own > 0.5, "of the second of CPU time that the child has used"


def test_programs_that_compete_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(module, "descendants", lambda *_: [])  # so that those that this test starts are not its own
    with competitors(torch.device("cpu")) as count:
        assert count == len(os.sched_getaffinity(0))
        for _ in range(50):
            load = look(0.5)
            assert load
            if load.reason("cpu"):
                break
    assert f"of {count} CPUs" in load.reason("cpu")


@pytest.mark.parametrize(
    ("load", "on_cpu", "on_gpu"),
    [
        (Load(16, 0.5, 0.0), False, False),
        (Load(16, 3.0, 0.0), True, False),
        (Load(16, 14.5, 0.0), True, True),
        (Load(2, 1.2, 0.0), True, True),
        (Load(16, 0.0, 0.1), True, True),
    ],
)
def test_a_gpu_needs_a_few_cpus_and_a_cpu_all_of_them(load: Load, on_cpu: bool, on_gpu: bool) -> None:
    assert (bool(load.reason("cpu")), bool(load.reason("cuda"))) == (on_cpu, on_gpu)


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Path", lambda name: type("Gone", (), {"read_text": lambda self: "cpu 1 2"})())
    assert look(0.0) is None
