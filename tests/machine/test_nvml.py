import os
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from fake_nvml import FakeNvml, NVMLError, install

from swiglu_bench.machine import nvml
from swiglu_bench.machine.nvml import THROTTLES, Gpu, NoAnswer
from swiglu_bench.processes import forkserver
from swiglu_bench.rows.record import GpuState

CUDA = torch.device("cuda", 0)


def gpu(monkeypatch: pytest.MonkeyPatch, pids: list[int] | None = None, **answers: Any) -> Gpu:
    install(monkeypatch, FakeNvml(pids, **answers))
    return Gpu(CUDA)


def test_figures_come_in_the_units_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    one = gpu(monkeypatch)
    assert (one.sm_mhz(), one.max_sm_mhz(), one.temperature_c()) == (1980, 1980, 40)
    assert (one.power_w(), one.power_limit_w(), one.energy_j()) == (120.5, 700.0, 5000.0)
    assert one.driver() == "580.1"


@pytest.mark.parametrize(("uuid", "name"), [("12-34", "GPU-12-34"), ("GPU-12", "GPU-12"), ("MIG-12", "MIG-12")])
def test_the_gpu_is_found_by_its_identifier(monkeypatch: pytest.MonkeyPatch, uuid: str, name: str) -> None:
    install(monkeypatch, FakeNvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: type("P", (), {"uuid": uuid}))
    assert Gpu(CUDA).handle == name


def test_no_driver_is_one_phrase(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoAnswer, match=r"^NVML does not answer: Driver Not Loaded$"):
        gpu(monkeypatch, Init=NVMLError("Driver Not Loaded"))


@pytest.mark.parametrize("answer", [NVMLError("Not Supported"), None])
def test_a_question_that_is_not_answered(monkeypatch: pytest.MonkeyPatch, answer: Exception | None) -> None:
    one = gpu(monkeypatch, TotalEnergyConsumption=answer)
    with pytest.raises(NoAnswer):
        one.energy_j()
    assert one.maybe(one.energy_j) is None


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0, []), (1, []), (2, []), (4, ["software-power-cap"]), (0x44, ["software-power-cap", "hardware-thermal"]),
        (0x1FF, list(THROTTLES.values())),
    ],
)  # fmt: skip
def test_what_holds_the_clocks_down_has_names(monkeypatch: pytest.MonkeyPatch, bits: int, names: list[str]) -> None:
    assert gpu(monkeypatch, CurrentClocksEventReasons=bits).throttles() == names


def test_older_drivers_call_them_throttle_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    one = gpu(monkeypatch, CurrentClocksEventReasons=None, CurrentClocksThrottleReasons=0x20)
    assert one.throttles() == ["software-thermal"]


def test_a_state_lacks_only_what_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu(monkeypatch).state() == GpuState(1980, 120.5, 40, "")
    silent = gpu(monkeypatch, PowerUsage=NVMLError("Not Supported"), CurrentClocksEventReasons=None)
    assert silent.state() == GpuState(1980, None, 40, None)


def test_this_process_and_its_children_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert gpu(monkeypatch, [os.getpid(), child.pid]).other_processes() == []
        assert gpu(monkeypatch, [1, os.getpid()]).other_processes() == [1]
    finally:
        child.communicate()


def _ask_about_the_family(pipe: Connection, sibling: int) -> None:
    pipe.send([nvml._is_ours(pid) for pid in (os.getpid(), os.getppid(), sibling, 1)])
    pipe.recv()


def test_in_a_child_process_the_others_of_the_suite_are_not_others() -> None:
    """Children are forked from a process in between, which is the parent that the system knows."""
    ours, theirs = forkserver.CONTEXT.Pipe()
    sibling = forkserver.fork(_ask_about_the_family, theirs, 1)
    ours.recv()
    mine, childs = forkserver.CONTEXT.Pipe()
    child = forkserver.fork(_ask_about_the_family, childs, sibling.pid)
    assert mine.recv() == [True, True, True, False]
    for pipe, process in ((ours, sibling), (mine, child)):
        pipe.send(None)
        process.join()


def test_in_a_container_nobody_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoAnswer, match="as in a container"):
        gpu(monkeypatch, [1]).other_processes()
    assert gpu(monkeypatch, []).other_processes() == []


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    torch.zeros(1, device=CUDA)
    one = Gpu(CUDA)
    state = one.state()
    assert state.sm_mhz is not None
    assert state.throttle is not None
    before = one.energy_j()
    torch.cuda._sleep(2_000_000_000)
    torch.cuda.synchronize()
    assert one.energy_j() > before
