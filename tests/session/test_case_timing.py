"""What the rounds of a case say beyond the times: verdicts, the A/A pair, the state of the GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import user_implementations as mine
from specimens import a_record, small_case

from swiglu_bench.implementations import pytorch
from swiglu_bench.machine import ceilings_cache, machine
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.machine.nvml import NoAnswer
from swiglu_bench.measure.clock import CpuClock, Sample
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import GpuState, Record, Status
from swiglu_bench.session import session
from swiglu_bench.session.case_timing import _note_gpu, _Watch
from swiglu_bench.session.session import run
from swiglu_bench.session.settings import Settings, Task
from swiglu_bench.spec.cases import Mode
from swiglu_bench.spec.implementation import Implementation

CPU = torch.device("cpu")
THIS = machine.describe(CPU)


class ScriptedClock(CpuClock):
    """Gives each result of `eager` 1 ms and of the others `other_ms`, a little different in each round."""

    def __init__(self, other_ms: float, jitter: float) -> None:
        self.other_ms, self.jitter, self.count = other_ms, jitter, 0

    def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
        result = call()
        self.count += 1
        noise = self.jitter * (((self.count * 7919) % 101) / 101 - 0.5)
        return Sample((self.other_ms if self.is_other else 1.0) + noise, 10.0, True, result)

    is_other = False


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Record]]:
    def play(
        other_ms: float = 1.0,
        jitter: float = 0.01,
        others: tuple[Implementation, ...] = (mine.mine,),
        mode: Mode = Mode.FORWARD,
        **changes: Any,
    ) -> dict[str, Record]:
        clock = ScriptedClock(other_ms, jitter)
        monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: Ceilings(10.0, 0.1, "2026-01-01T00:00:00Z"))
        monkeypatch.setattr(session, "make_clock", lambda *_: clock)
        real = session.Built.prepare

        def prepare(built: Any, mode: Mode, variant: int) -> Any:
            clock.is_other = built.implementation.name != "eager"
            return real(built, mode, variant)

        monkeypatch.setattr(session.Built, "prepare", prepare)
        rule = Rule(warmup_rounds=1, min_rounds=40, max_rounds=40, budget_s=60.0)
        how = Settings(**({"task": Task.TIME, "device": CPU, "command": "c", "run_id": "r", "rule": rule} | changes))
        rows: Iterator[Record] = run([small_case(mode=mode)], [pytorch.eager, *others], how, THIS)
        return {record.implementation: record for record in rows}

    return play


@pytest.mark.parametrize(("other_ms", "verdict"), [(0.9, "faster"), (1.1, "slower"), (1.0005, "tie")])
def test_a_verdict_for_every_contender(played: Callable[..., dict[str, Record]], other_ms: float, verdict: str) -> None:
    found = played(other_ms)
    assert found["mine"].verdict == verdict
    assert found["eager"].verdict == "", "the baseline is what others are judged by"


def test_the_a_a_pair_is_on_every_row_of_the_case_and_its_samples_are_kept(
    played: Callable[..., dict[str, Record]],
) -> None:
    found = played()
    for record in found.values():
        assert record.aa_ratio is not None
        assert record.aa_low is not None
        assert record.aa_high is not None
        assert record.aa_low <= record.aa_ratio <= record.aa_high
        assert record.aa_ratio == pytest.approx(1.0, abs=0.005)
    assert len(found["eager"].twin_ms) == len(found["eager"].samples_ms) == 40
    assert found["mine"].twin_ms == ()
    assert set(found) == {"eager", "mine"}, "the twin has no row of its own"


def test_without_a_baseline_there_is_no_pair_and_no_verdict(played: Callable[..., dict[str, Record]]) -> None:
    for record in played(baseline="").values():
        assert record.aa_ratio is None
        assert record.verdict == ""


def test_what_does_other_work_has_no_verdict(played: Callable[..., dict[str, Record]]) -> None:
    assert played(0.5, others=(mine.frozen,), mode=Mode.FORWARD)["frozen"].verdict == "faster"
    frozen = played(0.5, others=(mine.frozen,), mode=Mode.STEP)["frozen"]
    assert (frozen.verdict, frozen.comparable) == ("", False)
    assert frozen.aa_ratio is not None


def test_the_regime_and_the_limits_age_are_recorded(played: Callable[..., dict[str, Record]]) -> None:
    assert played()["eager"].regime == "steady"
    assert played()["eager"].ceilings_at == "2026-01-01T00:00:00Z"
    rested = Rule(warmup_rounds=0, min_rounds=4, max_rounds=4, budget_s=60.0, rest_s=0.001)
    assert played(rule=rested)["eager"].regime == "rested"


def test_a_cpu_has_no_state_and_nothing_to_say_about_it(played: Callable[..., dict[str, Record]]) -> None:
    record = played()["eager"]
    assert record.states == ()
    assert record.sm_mhz is record.cycles is record.throttled_share is record.other_processes is None
    assert record.gpu_note == record.throttle == record.graph_reason == ""


# The state of the GPU


class FakeGpu:
    def __init__(self, states: list[GpuState], others: list[int] | NoAnswer) -> None:
        self.states, self.others = iter(states), others

    def state(self) -> GpuState:
        return next(self.states)

    def other_processes(self) -> list[int]:
        if isinstance(self.others, NoAnswer):
            raise self.others
        return self.others


def watched(states: list[GpuState], others: list[int] | NoAnswer) -> Record:
    watch = _Watch(FakeGpu(states, others), "")  # type: ignore[arg-type]
    watch.look_round()
    for _ in states:
        watch.on_round()
    watch.look_round()
    record = a_record(time_ms=2.0)
    _note_gpu(record, watch)
    return record


def test_figures_of_all_rounds_become_one() -> None:
    states = [
        GpuState(1980, 600.0, 50, ""), GpuState(1700, 700.0, 55, "software-power-cap"),
        GpuState(1800, 690.0, 60, "software-power-cap hardware-thermal"), GpuState(1900, 650.0, 58, ""),
    ]  # fmt: skip
    record = watched(states, [])
    assert (record.sm_mhz, record.power_w, record.temperature_c) == (1850.0, 670.0, 58)
    assert record.cycles == pytest.approx(2.0e-3 * 1850e6)
    assert (record.throttle, record.throttled_share) == ("software-power-cap hardware-thermal", 0.5)
    assert record.states == tuple(states)
    assert record.other_processes == 0


def test_figures_that_the_driver_does_not_give_are_missing() -> None:
    record = watched([GpuState(None, None, None, None)] * 3, [])
    assert record.sm_mhz is record.power_w is record.temperature_c is record.cycles is record.throttled_share is None
    assert record.throttle == ""


def test_others_are_counted_or_it_is_said_that_they_are_not_known() -> None:
    assert watched([], [4711, 4712]).other_processes == 2
    unknown = watched([], NoAnswer("as in a container"))
    assert unknown.other_processes is None
    assert unknown.gpu_note == "Who else uses the GPU is not known: as in a container."


@pytest.mark.gpu
def test_a_gpu_s_row_has_its_state() -> None:
    from swiglu_bench.spec.cases import Dtype

    device = torch.device("cuda", 0)
    rule = Rule(warmup_rounds=1, min_rounds=10, max_rounds=10, budget_s=60.0)
    how = Settings(Task.TIME, device, "c", "r", rule=rule)
    (record,) = run([small_case(dtype=Dtype.BFLOAT16)], [pytorch.eager], how, machine.describe(device))
    assert record.status is Status.OK, record.reason
    assert len(record.states) == record.rounds
    assert record.sm_mhz
    assert record.cycles
    assert record.power_w
    assert record.throttled_share is not None
    assert record.regime == "steady"
