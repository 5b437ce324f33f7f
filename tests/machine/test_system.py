"""What other programs do with the CPUs, and what the GPU's driver says."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from fake_nvml import FakeNvml, NVMLError, install

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import system as module
from swiglu_bench.machine.machine import without_torch
from swiglu_bench.machine.system import THROTTLES, Gpu, LoadWatch, NoAnswer, look
from swiglu_bench.options import TimingOptions
from swiglu_bench.request import _locked
from swiglu_bench.rows.record import GpuState, Load
from swiglu_bench.worker.ahead import competitors

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="the load is read from /proc")
SPIN = "import time\nwhile time.process_time() < 1.0: pass"


@needs_proc
def test_what_this_process_and_its_children_use_is_not_others() -> None:
    watch = LoadWatch()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    mine = watch._read()
    assert mine
    assert watch.before
    assert mine.own - watch.before.own > 0.5, "of the second of CPU time that the child has used"


@needs_proc
def test_what_leaves_a_group_is_known_with_what_it_starts() -> None:
    in_a_session = "import os, subprocess; os.setsid(); print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    offspring = module.Offspring(os.getpid())
    before = set(offspring.escaped())
    with subprocess.Popen([sys.executable, "-c", f"{in_a_session}; os.wait()"], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            started = {child.pid, int(child.stdout.readline())}
            assert set(offspring.escaped()) - before == started
        finally:
            os.killpg(child.pid, signal.SIGKILL)


@needs_proc
def test_programs_that_compete_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (Load(16, 0.5, 0.0), False, False), (Load(16, 3.0, 0.0), True, False), (Load(16, 14.5, 0.0), True, True),
        (Load(16, 0.0, 0.1), True, True),
    ],
)  # fmt: skip
def test_a_gpu_needs_a_few_cpus_and_a_cpu_all_of_them(load: Load, on_cpu: bool, on_gpu: bool) -> None:
    assert (bool(load.reason("cpu")), bool(load.reason("cuda"))) == (on_cpu, on_gpu)


CUDA = torch.device("cuda", 0)


def gpu(monkeypatch: pytest.MonkeyPatch, pids: list[int] | None = None, **answers: Any) -> Gpu:
    install(monkeypatch, FakeNvml(pids, **answers))
    return Gpu(CUDA)


@pytest.mark.parametrize("answer", [NVMLError("Not Supported"), None])
def test_a_question_that_is_not_answered(monkeypatch: pytest.MonkeyPatch, answer: Exception | None) -> None:
    one = gpu(monkeypatch, TotalEnergyConsumption=answer)
    assert one.maybe(one.energy_j) is None
    with pytest.raises(NoAnswer):
        one.energy_j()
    with pytest.raises(NoAnswer, match=r"^NVML does not answer: Driver Not Loaded$"):
        gpu(monkeypatch, Init=NVMLError("Driver Not Loaded"))


@pytest.mark.parametrize(
    ("answers", "names"),
    [
        ({"CurrentClocksEventReasons": 3}, []),  # choices: idle, application clocks
        ({"CurrentClocksEventReasons": 0x1FF}, list(THROTTLES.values())),
        ({"CurrentClocksEventReasons": None, "CurrentClocksThrottleReasons": 0x20}, ["software-thermal"]),
    ],
)
def test_throttling_has_names(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], names: list[str]) -> None:
    assert gpu(monkeypatch, **answers).throttles() == names


def test_a_state_has_the_units_of_its_names_and_lacks_only_what_is_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = gpu(monkeypatch)
    assert (card.state(), card.power_limit_w(), card.energy_j()) == (GpuState(1980, 120.5, 40, ""), 700.0, 5000.0)
    silent = gpu(monkeypatch, PowerUsage=NVMLError("Not Supported"), CurrentClocksEventReasons=None)
    assert silent.state() == GpuState(1980, None, 40, None)


def test_a_clock_is_held_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    card, calls = gpu(monkeypatch), list[Any]()
    card.nvml.nvmlDeviceSetGpuLockedClocks = lambda handle, *mhz: calls.append(mhz)
    card.nvml.nvmlDeviceResetGpuLockedClocks = lambda handle: calls.append("reset")
    with card.locked(1410):
        assert calls == [(1410, 1410)]
    assert calls == [(1410, 1410), "reset"]
    monkeypatch.setattr("swiglu_bench.machine.system.Gpu", lambda device: card)
    options = TimingOptions(lock_clocks=1410)
    with _locked(options, CUDA):
        assert len(calls) == 3
    card.nvml.nvmlDeviceSetGpuLockedClocks = MagicMock(side_effect=NVMLError("Insufficient Permissions"))
    refused = r"1410: the driver refuses it \(Insufficient Permissions\); run as root"
    with pytest.raises(BadInput, match=refused), _locked(options, CUDA):
        pass
    with pytest.raises(BadInput, match="holds the clock of one GPU"), _locked(options, torch.device("cpu")):
        pass


def test_this_process_and_its_children_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert gpu(monkeypatch, [1, os.getpid(), child.pid]).other_processes() == [1]
    child.kill()
    child.wait()


def test_in_a_child_process_the_others_of_the_suite_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's parent of a child is the fork server, process 200; the suite's first process is 100."""
    parents = {200: 100, 300: 200, os.getpid(): 200, 400: 1, 100: 1, 1: 0}
    texts = {Path(f"/proc/{pid}/status"): f"Name:\tpython\nPPid:\t{parent}\n" for pid, parent in parents.items()}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[path])
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=100))
    assert gpu(monkeypatch, [100, 200, 300, 400, os.getpid()]).other_processes() == [400]


def test_in_a_container_nobody_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoAnswer, match="as in a container"):
        gpu(monkeypatch, [1]).other_processes()
    assert gpu(monkeypatch, []).other_processes() == []


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    torch.zeros(1, device=CUDA)
    one = Gpu(CUDA)
    assert None not in (one.state().sm_mhz, one.state().throttle)
    before = one.energy_j()
    torch.cuda._sleep(2_000_000_000)
    torch.cuda.synchronize()
    assert one.energy_j() > before


@pytest.mark.parametrize(("visible", "listed"), [
    (None, ["9.0", "9.0"]), ("1", ["9.0"]), ("1,7", ["9.0"]), ("", []), ("-1", []), ("GPU-1", None), ("0,0", None),
])  # fmt: skip
def test_gpus_without_torch(visible: str | None, listed: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    answers = {"Count": 2, "HandleByIndex": "a GPU", "UUID": "GPU-1", "Name": "NVIDIA H200", "Index": 0}
    install(monkeypatch, FakeNvml(CudaComputeCapability=(9, 0), **answers))
    monkeypatch.setattr(module, "file_value", lambda *_: "None")
    assert module.visible_gpus() == [], "a PyTorch for CPUs"
    monkeypatch.setattr(module, "file_value", lambda *_: "'13.0'")
    found = module.visible_gpus()
    assert (found and [gpu.capability() for gpu in found]) == listed
    if found:
        this = without_torch(found[0])
        assert (this["device"], this["gpu_uuid"], this["cuda"]) == ("NVIDIA H200", "GPU-1", "13.0")
        assert (this["memory_bytes"], this["compute_capability"]) == (140 * 2**30, "9.0")
    monkeypatch.setattr(module.ctypes, "CDLL", MagicMock(side_effect=OSError))
    install(monkeypatch, FakeNvml(Init=NVMLError("no driver")))
    assert module.visible_gpus() == []
