"""Latency, graphs and energy: on a CPU whose calls are recorded by running them again, and on a GPU."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bad_implementations as bad
import pytest
import torch
import user_implementations as mine
from courts import run_here
from specimens import a_bare_record, a_record, small_case

from swiglu_bench.cases.cases import Dtype, Mode, Shape
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.machine.system import NoAnswer
from swiglu_bench.measure import profilers
from swiglu_bench.measure.clock import CpuClock
from swiglu_bench.measure.resources import Graph
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.tasks import time_row
from swiglu_bench.tasks.case import Entry
from swiglu_bench.tasks.selftest.specimen import slow
from swiglu_bench.tasks.time_row import measure_beside, measure_new_tokens
from swiglu_bench.worker import workbench
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.worker import BuildReport

CPU = torch.device("cpu")
RULE = Rule(warmup_rounds=1, min_rounds=4, max_rounds=4, min_s=0.0, budget_s=60.0)


class Meter:
    """A counter of joules that moves at every look, or has no answer."""

    def __init__(self, answer: Exception | None = None) -> None:
        self.joules, self.answer = 0.0, answer

    def energy_j(self) -> float:
        if self.answer:
            raise self.answer
        self.joules += 1.0
        return self.joules


def run_again(call: Callable[[], Any], device: torch.device) -> Graph:
    """A replay runs the call again and leaves its results where the first run's were."""
    kept = call()
    return Graph(lambda: kept.__setitem__(slice(None), call()), kept)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(workbench, "CudaClock", CpuClock)
        monkeypatch.setattr(workbench, "capture", run_again)
        monkeypatch.setattr("swiglu_bench.measure.resources.LOOP_S", 0.01)


def measured(
    implementations: Sequence[Implementation], mode: Mode = Mode.STEP, meter: Meter | None = None, **changes: Any
) -> dict[str, Record]:
    place = Court(Settings(Task.TIME, CPU, "c", "r", rule=RULE, **changes), machine.describe(CPU), in_process=True)
    case, drawn, entries = small_case(mode=mode), Drawn.new(), []
    place.judge.begin_case(case, drawn.weights)
    place.judge.truth(drawn.draws[0], True)
    for one in implementations:
        contender = place.contender(one)
        entries.append(Entry(one, a_record(implementation=one.name, aa_ratio=1.0, aa_low=0.99, aa_high=1.01)))
        entries[-1].contender, entries[-1].gradients = contender, Admitting(place, case, drawn).build(contender)
    place.settings = dataclasses.replace(place.settings, device=torch.device("cuda", 0))
    measure_beside(place, case, entries, meter, lambda *_: None)  # type: ignore[arg-type]
    measure_new_tokens(place, case, entries, lambda *_: None)
    return {entry.record.implementation: entry.record for entry in entries}


@pytest.mark.parametrize("mode", list(Mode))
def test_every_figure_is_there_but_for_a_backward_alone(mode: Mode) -> None:
    for record in measured([pytorch.eager, pytorch.eager_packed, mine.frozen], mode, Meter()).values():
        assert record.latency_us is not None
        if mode is Mode.BACKWARD:
            assert record.graph_us is record.energy_j is None
            assert "backward alone" in record.graph_reason
            continue
        assert record.graph_us is not None
        assert record.graph_reason == record.gpu_note == ""
        assert record.uj_per_token == pytest.approx(record.energy_j / 7 * 1e6)


def test_ratios_in_a_graph_and_with_a_hot_cache_have_verdicts_of_their_own() -> None:
    found = measured([pytorch.eager, slow], Mode.FORWARD, hot_beside=True)
    assert (found["eager"].graph_ratio, found["eager"].hot_ratio, found["eager"].hot_verdict) == (None, None, "")
    for kind in ("graph", "hot"):
        us, ratio = getattr(found["slow"], f"{kind}_us"), getattr(found["slow"], f"{kind}_ratio")
        assert us > getattr(found["eager"], f"{kind}_us")
        assert (ratio > 1, getattr(found["slow"], f"{kind}_verdict")) == (True, "slower")
    assert measured([pytorch.eager], Mode.FORWARD)["eager"].hot_us is None, "it was not asked for"


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_the_longest_first_call_of_further_token_counts(mode: Mode) -> None:
    counts = set[int]()

    @implementation("once", scopes=["glu"], description="takes 40 ms where it has not seen a number of tokens")
    def once(problem: Problem) -> Step:
        step = pytorch.eager.build(problem)

        def forward(x: torch.Tensor) -> torch.Tensor:
            if len(x) not in counts:
                counts.add(len(x))
                time.sleep(0.04)
            return step.forward(x)

        return Step(forward)

    found = measured([pytorch.eager, once], mode, new_tokens=5)
    assert len(counts - {7}) == 5
    assert (found["eager"].worst_new_ms or 0) < 40 <= (found["once"].worst_new_ms or 0)


def test_what_cannot_be_recorded_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(call: Callable[[], Any], device: torch.device) -> Graph:
        monkeypatch.setattr(workbench, "capture", run_again)
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(workbench, "capture", picky)
    found = measured([pytorch.eager, pytorch.eager_packed])
    assert found["eager"].graph_us is None
    assert "RuntimeError: operation not permitted when stream is capturing" in found["eager"].graph_reason
    assert found["eager-packed"].graph_us is not None


@pytest.mark.parametrize(("replay", "told"), [(None, "incorrect"), (RuntimeError("launch failed"), "launch failed")])
def test_a_replay_that_is_wrong_or_fails_has_no_time(
    monkeypatch: pytest.MonkeyPatch, replay: Exception | None, told: str
) -> None:
    """None: the results are those of the recording, which were right for other inputs."""
    run = bad.raises(replay) if replay else lambda: None
    monkeypatch.setattr(workbench, "capture", lambda call, device: Graph(run, call()))
    record = measured([pytorch.eager], Mode.FORWARD)["eager"]
    assert (record.graph_us, told in record.graph_reason) == (None, True)
    assert record.latency_us is not None


def test_layers_of_a_graph_share_its_time_and_any_of_them_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, replay_us, builds = 8, 8e3, []

    def slow(call: Callable[[], Any], device: torch.device) -> Graph:
        graph = run_again(call, device)

        def replay() -> None:
            time.sleep(replay_us / 1e6)
            graph.replay()

        return Graph(replay, graph.result)

    def first_is_right(problem: Problem) -> Step:
        builds.append(problem)
        right = pytorch.eager.build(problem).forward
        return Step(right if len(builds) == 1 else lambda x: 2 * right(x))

    monkeypatch.setattr(workbench, "capture", slow)
    wrong = dataclasses.replace(pytorch.eager, name="wrong", build=first_is_right)
    found = measured([pytorch.eager, wrong], Mode.FORWARD, layers=layers)
    assert replay_us / layers <= found["eager"].graph_us < replay_us
    assert f"one of {layers} layers" in found["eager"].remarks
    assert len({problem.weights["w_up"].data_ptr() for problem in builds}) == layers
    assert found["wrong"].graph_us is None
    assert "incorrect" in found["wrong"].graph_reason


def test_energy_only_where_it_is_wanted_and_the_driver_counts_it() -> None:
    assert measured([pytorch.eager], meter=Meter(), energy=False)["eager"].energy_j is None
    assert measured([pytorch.eager])["eager"].energy_j is None
    record = measured([pytorch.eager], meter=Meter(NoAnswer("Not Supported")))["eager"]
    assert (record.energy_j, "Not Supported" in record.gpu_note) == (None, True)
    assert record.graph_us is not None


# Traces and counters, here with a stand-in for ncu

PLAIN_SETTINGS = Settings(Task.TIME, CPU, "forward", "run", energy=False)


def profiled(settings: Settings, mode: Mode = Mode.STEP) -> Entry:
    place, case = Court(settings, machine.describe(CPU), in_process=True), small_case(mode=mode)
    contender = place.contender(pytorch.eager)
    contender.ask(BuildReport, "build", case, 7)
    entry = Entry(pytorch.eager, a_bare_record(implementation="eager", mode=mode.value))
    entry.contender, entry.gradients = contender, pytorch.eager.gradients(case.scope)
    time_row.profile(place, case, [entry], lambda doing, share: None)
    return entry


@pytest.mark.parametrize("mode", list(Mode))
def test_a_trace_has_the_calls_and_what_is_in_them_or_says_why_there_is_none(tmp_path: Path, mode: Mode) -> None:
    settings = dataclasses.replace(PLAIN_SETTINGS, trace=True, folder=tmp_path)
    record = profiled(settings, mode).record
    assert record.profile_note == ""
    events = json.loads((tmp_path / record.trace).read_text(encoding="utf-8"))["traceEvents"]
    calls = [event for event in events if event.get("name") == f"swiglu {mode}" and event.get("ph") == "X"]
    assert len(calls) == time_row.TRACED_CALLS
    products = [event for event in events if event.get("name") in {"aten::mm", "aten::addmm"}]
    inside = [one for one in products if any(0 <= one["ts"] - call["ts"] <= call["dur"] for call in calls)]
    assert len(inside) >= time_row.TRACED_CALLS
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    record = profiled(dataclasses.replace(settings, folder=tmp_path / "file"), mode).record
    assert (record.trace, record.profile_note.startswith("There is no trace: ")) == ("", True)


def test_counters_are_entered_or_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(PLAIN_SETTINGS, ncu=True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "not on the PATH" in profiled(settings).record.profile_note
    monkeypatch.setattr("shutil.which", lambda name: "/opt/ncu")
    monkeypatch.setattr(profilers, "counters", lambda path, command: profilers.Counters(70.0, 5, 6, 168))
    record = profiled(settings).record
    assert (record.tensor_pct, record.dram_bytes, record.l2_bytes, record.registers_per_thread) == (70.0, 5, 6, 168)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(("mode", "layers"), [(Mode.FORWARD, 1), (Mode.STEP, 1), (Mode.FORWARD, 3), (Mode.STEP, 3)])
def test_on_a_gpu(mode: Mode, layers: int) -> None:
    device = torch.device("cuda", 0)
    case = small_case(mode=mode, shape=Shape("s", 256, 512, "made up", (1,)), tokens=64, dtype=Dtype.BFLOAT16)
    how = Settings(Task.TIME, device, "c", "r", rule=RULE, layers=layers)
    (eager,) = run_here([case], [pytorch.eager], how, machine.describe(device))
    assert eager.status is Status.OK, eager.reason
    assert eager.graph_us is not None, eager.graph_reason
    assert eager.latency_us is not None
    assert eager.latency_us > eager.graph_us
    assert eager.energy_j is not None, eager.gpu_note
    assert eager.aa_ratio is not None
    assert len(eager.states) == eager.rounds
    assert eager.sm_mhz
    assert eager.cycles
    assert eager.power_w
    assert eager.throttled_share is not None
