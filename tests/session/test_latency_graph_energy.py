"""Latency, graphs and energy on a CPU that is dressed up as a GPU: the device's own part has tests marked gpu."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import user_implementations as mine
from specimens import a_record, small_case
from torch import Tensor

from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.judge import make_judge
from swiglu_bench.implementations import pytorch
from swiglu_bench.machine.nvml import NoAnswer
from swiglu_bench.measure.clock import CpuClock, DeviceLost
from swiglu_bench.measure.graph import Graph
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.session import latency_graph_energy
from swiglu_bench.session.latency_graph_energy import Asides
from swiglu_bench.session.settings import Admitted, Settings, Task
from swiglu_bench.spec.cases import VARIANTS, Mode
from swiglu_bench.spec.implementation import Implementation, Step
from swiglu_bench.spec.problem import Problem

CPU = torch.device("cpu")
RULE = Rule(warmup_rounds=1, min_rounds=4, max_rounds=4, budget_s=60.0)


class DressedClock(CpuClock):
    def flush(self) -> None:
        pass


class FakeGpu:
    def __init__(self, answer: Exception | None = None) -> None:
        self.joules, self.answer = 0.0, answer

    def energy_j(self) -> float:
        if self.answer:
            raise self.answer
        self.joules += 1.0
        return self.joules


def fake_capture(call: Callable[[], Any], device: torch.device) -> Graph:
    """A replay runs the call again and leaves its results where the first run's were."""
    kept = [call()]
    return Graph(lambda: kept.__setitem__(0, call()), lambda: kept[0]())


@pytest.fixture(autouse=True)
def _dressed_up(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(latency_graph_energy, "CudaClock", DressedClock)
    monkeypatch.setattr(latency_graph_energy, "capture", fake_capture)
    monkeypatch.setattr("swiglu_bench.measure.energy.LOOP_S", 0.02)


def measured(
    implementations: Sequence[Implementation],
    mode: Mode = Mode.STEP,
    gpu: FakeGpu | None = None,
    clock: CpuClock | None = None,
    mark: Callable[[str], None] = lambda name: None,
    **settings: Any,
) -> dict[str, Record]:
    problem = make_problem(small_case(mode=mode), CPU)
    judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
    entries = [Admitted(Built(one, problem), a_record(implementation=one.name)) for one in implementations]
    how = Settings(Task.TIME, CPU, "c", "r", rule=RULE, **settings)
    Asides(how, clock or DressedClock(), gpu, mark).measure(problem, entries, judges, lambda *_: None)  # type: ignore[arg-type]
    return {entry.record.implementation: entry.record for entry in entries}


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_every_figure_is_there(mode: Mode) -> None:
    for record in measured([pytorch.eager, pytorch.eager_packed], mode, FakeGpu()).values():
        assert record.latency_us is not None
        assert record.graph_us is not None
        assert record.graph_reason == record.gpu_note == ""
        assert record.energy_j is not None
        assert record.uj_per_token == pytest.approx(record.energy_j / 7 * 1e6)


def test_a_cpu_has_none_of_them() -> None:
    record = measured([pytorch.eager], clock=CpuClock(), gpu=FakeGpu())["eager"]
    assert record.latency_us is record.graph_us is record.energy_j is None
    assert record.graph_reason == ""


def test_a_backward_alone_has_a_latency_and_the_reason_for_the_rest() -> None:
    record = measured([pytorch.eager], Mode.BACKWARD, FakeGpu())["eager"]
    assert record.latency_us is not None
    assert record.graph_us is record.energy_j is None
    assert record.graph_reason.startswith("A backward alone is not recorded")


def test_what_cannot_be_recorded_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def picky(call: Callable[[], Any], device: torch.device) -> Graph:
        tried.append(1)
        if len(tried) == 1:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return fake_capture(call, device)

    monkeypatch.setattr(latency_graph_energy, "capture", picky)
    found = measured([pytorch.eager, pytorch.eager_packed])
    assert found["eager"].graph_us is None
    assert found["eager"].graph_reason == (
        "It cannot be recorded: RuntimeError: operation not permitted when stream is capturing"
    )
    assert found["eager-packed"].graph_us is not None


def test_a_replay_that_gives_yesterday_s_answer_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        latency_graph_energy, "capture", lambda call, device: Graph(lambda: None, call())  # replays do nothing
    )  # fmt: skip
    record = measured([pytorch.eager], Mode.FORWARD)["eager"]
    # Both variants were put into the same inputs; what was computed at the recording is right for none or one of them.
    assert record.graph_us is None
    assert record.graph_reason.startswith("Its replay is incorrect: output: relative error ")


def test_a_replay_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(latency_graph_energy, "capture", lambda call, device: Graph(broken, call()))
    assert measured([pytorch.eager])["eager"].graph_reason == "Its replay fails: RuntimeError: launch failed"


def test_who_runs_is_named_before_every_call_and_nobody_afterwards() -> None:
    told: list[str] = []
    running: list[str] = []

    def build(problem: Problem) -> Step:
        step = pytorch.eager.build(problem)

        def forward(*activations: Tensor) -> Tensor:
            running.append(told[-1] if told else "")
            return step.forward(*activations)

        return Step(forward, step.parameters)

    watched = dataclasses.replace(pytorch.eager, name="watched", build=build)
    measured([watched, pytorch.eager_packed], gpu=FakeGpu(), mark=told.append)
    assert set(running) == {"watched"}
    assert told[-1] == ""
    assert set(told) == {"watched", "eager-packed", ""}


@pytest.mark.parametrize("stage", ["capture", "joules_per_call"])
def test_who_breaks_the_device_is_named_and_no_figure_stands(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    class Lost(DressedClock):
        broken = False

        def synchronize(self) -> None:
            if self.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    clock, told = Lost(), list[str]()

    def breaks(*arguments: Any) -> Any:
        clock.broken = True
        raise RuntimeError("it broke")

    monkeypatch.setattr(latency_graph_energy, stage, breaks)
    with pytest.raises(DeviceLost, match="RuntimeError: it broke"):
        measured([pytorch.eager], gpu=FakeGpu(), clock=clock, mark=told.append)
    assert told[-1] == "eager"


def test_a_replaced_clock_takes_these_figures_away() -> None:
    def build(problem: Problem) -> Step:
        step, original = pytorch.eager.build(problem), time.perf_counter

        def forward(*activations: Tensor) -> Tensor:
            time.perf_counter = lambda: original() / 2
            return step.forward(*activations)

        return Step(forward, step.parameters)

    before = time.perf_counter
    cheat = dataclasses.replace(pytorch.eager, name="cheat", build=build)
    for record in measured([cheat, pytorch.eager], gpu=FakeGpu()).values():
        assert record.latency_us is record.graph_us is record.energy_j is record.uj_per_token is None
        assert record.graph_reason == "Meanwhile somebody replaced time.perf_counter."
    assert time.perf_counter is before


def test_energy_only_when_it_is_wanted() -> None:
    assert measured([pytorch.eager], gpu=FakeGpu(), energy=False)["eager"].energy_j is None
    assert measured([pytorch.eager], gpu=None)["eager"].energy_j is None


def test_a_driver_without_an_energy_counter_is_noted() -> None:
    record = measured([pytorch.eager], gpu=FakeGpu(NoAnswer("Not Supported")))["eager"]
    assert record.energy_j is None
    assert record.gpu_note == "There is no energy: NoAnswer: Not Supported."
    assert record.graph_us is not None


def test_what_yields_fewer_gradients_is_recorded_too() -> None:
    assert measured([mine.frozen])["frozen"].graph_us is not None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_on_a_gpu(mode: Mode) -> None:
    from swiglu_bench.implementations import CATALOGUE
    from swiglu_bench.machine import machine
    from swiglu_bench.session.session import run
    from swiglu_bench.spec.cases import Dtype, Shape

    device = torch.device("cuda", 0)
    case = small_case(mode=mode, shape=Shape("s", 256, 512, "made up", (1,)), tokens=64, dtype=Dtype.BFLOAT16)
    how = Settings(Task.TIME, device, "c", "r", rule=RULE)
    eager = next(
        one for one in run([case], [one for one in CATALOGUE if one.name == "eager"], how, machine.describe(device))
    )
    assert eager.status is Status.OK, eager.reason
    assert eager.graph_us is not None, eager.graph_reason
    assert eager.latency_us is not None
    assert eager.latency_us > eager.graph_us
    assert eager.energy_j is not None, eager.gpu_note
    assert eager.sm_mhz is not None
    assert eager.aa_ratio is not None
