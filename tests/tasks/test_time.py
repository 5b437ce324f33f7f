"""What the samples of a case say: verdicts, the noise of equal processes, limits, the state of the GPU."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import user_implementations as mine
from courts import run_here
from specimens import a_record, small_case

from swiglu_bench.cases.cases import Mode, Scope
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import ceilings_cache, machine
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.machine.system import NoAnswer
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import GpuState, Record, Status
from swiglu_bench.tasks import time, time_row
from swiglu_bench.tasks.case import Entry
from swiglu_bench.tasks.time_row import GpuWatch
from swiglu_bench.worker import court, turns
from swiglu_bench.worker.admission import Admitting
from swiglu_bench.worker.chains import Chains, Unsettled
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.turns import Turns
from swiglu_bench.worker.worker import SampleReport

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
H200 = machine.Machine(**(THIS.as_dict() | {"device": "NVIDIA H200", "cache_bytes": 0}))
Play = Callable[..., dict[str, Record]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Rows of a case in which every process of eager takes `eager_ms` and all others take `other_ms`, more or less."""

    def play(
        other_ms: float = 1.0, others: tuple[Implementation, ...] = (mine.mine,), eager_ms: float = 1.0,
        jitter: float = 0.01, this: machine.Machine = THIS, case: Any = None, other_mhz: float | None = None,
        **changes: Any,
    ) -> dict[str, Record]:  # fmt: skip
        real, count = court.Contender.ask, 0

        def ask(self: court.Contender, kind: Any, method: str, *arguments: Any) -> Any:
            nonlocal count
            report = real(self, kind, method, *arguments)
            if kind is not SampleReport:
                return report
            count += 1
            ms = eager_ms if self.implementation.name == "eager" else other_ms
            ms *= 1 + jitter * (((count * 7919) % 101) / 101 - 0.5)
            mhz = other_mhz if self.implementation.name != "eager" or other_mhz is None else 2000.0
            return dataclasses.replace(report, ms=ms, host_us=ms * 1e3, mhz=mhz)

        monkeypatch.setattr(court.Contender, "ask", ask)
        monkeypatch.setattr(Chains, "disagreements", lambda *_: {})
        monkeypatch.setattr(Turns, "disagreements", lambda *_: {})
        monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: Ceilings(10.0, 0.1, "2026-01-01T00:00:00Z"))
        rule = Rule(warmup_rounds=0, min_rounds=40, max_rounds=40, min_s=0.0, budget_s=60.0)
        how = Settings(**({"task": Task.TIME, "device": CPU, "command": "c", "run_id": "r", "rule": rule} | changes))
        found = run_here([case or small_case(mode=Mode.FORWARD)], [pytorch.eager, *others], how, this)
        return {record.implementation: record for record in found}

    return play


@pytest.mark.parametrize(("other_ms", "verdict"), [(0.9, "faster"), (1.1, "slower"), (1.0005, "tie")])
def test_a_verdict_for_every_contender(played: Play, other_ms: float, verdict: str) -> None:
    found = played(other_ms)
    assert found["mine"].verdict == verdict
    assert found["eager"].verdict == "", "the baseline is what others are judged by"
    assert set(found) == {"eager", "mine"}, "its further processes have no rows"
    for record in found.values():
        assert record.aa_low is not None
        assert record.aa_high is not None
        assert record.aa_low <= (record.aa_ratio or 0.0) <= record.aa_high
        assert record.aa_ratio == pytest.approx(1.0, abs=0.005)
    assert len(found["eager"].twin_ms) == len(found["eager"].samples_ms) == 40
    assert found["mine"].twin_ms == ()


@pytest.mark.parametrize("mhz", [None, 2000.0, 1800.0])
def test_a_verdict_that_the_clock_explains_is_not_confirmed(played: Play, mhz: float | None) -> None:
    """Of two that take 1 and 1.11 ms at 2000 and 1800 MHz, none needs more cycles."""
    found = played(2000 / 1800, other_mhz=mhz)["mine"]
    assert found.verdict == "slower"
    assert found.cycles_ratio == (pytest.approx(mhz / 1800, rel=0.01) if mhz else None)
    assert ("is not confirmed in cycles" in found.remarks) == (mhz == 1800.0)


@pytest.mark.parametrize("lacking", [1, 3])
def test_fewer_processes_of_the_baseline_than_wanted(
    played: Play, monkeypatch: pytest.MonkeyPatch, lacking: int
) -> None:
    real = Admitting.build

    def build(self: Admitting, contender: Contender) -> tuple[str, ...]:
        if contender.name in [f"eager (twin {number})" for number in (3, 2, 1)[:lacking]]:
            raise RuntimeError("out of memory")
        return real(self, contender)

    monkeypatch.setattr(Admitting, "build", build)
    found = played(0.9)
    if lacking < 3:
        assert (found["mine"].verdict, found["eager"].remarks) == ("faster", "")
    else:
        assert (found["mine"].ratio, found["mine"].verdict) == (None, "")
        assert "no second process of eager, which would measure the noise, could be built" in found["eager"].remarks
        assert "out of memory" in found["eager"].remarks


@pytest.mark.parametrize("scope", [Scope.ACTIVATION, Scope.GLU])
def test_rates_above_the_datasheet_are_rejected(played: Play, scope: Scope) -> None:
    case = small_case(scope=scope)
    record = played(others=(), eager_ms=1e-9, this=H200, case=case)["eager"]
    assert (record.status, "494 and 4800" in record.reason) == (Status.ERROR, True)
    assert record.time_ms is record.ratio is record.tflops is record.gbps is None
    assert record.samples_ms == record.twin_ms == ()
    assert played(others=(), this=H200, case=case)["eager"].status is Status.OK
    assert played(others=(), eager_ms=1e-9, case=case)["eager"].status is Status.OK, "nothing is known of this CPU"


@pytest.mark.parametrize("again", [True, False])
def test_a_second_try_decides_whether_it_is_certain(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    tries = iter([True, again])
    monkeypatch.setattr(turns, "slow_the_next", lambda *_: ["mine"])
    monkeypatch.setattr(turns, "slows_the_next", lambda *_: next(tries))
    base, mine = (
        SimpleNamespace(contender=SimpleNamespace(name=name, implementation=SimpleNamespace(name=name)))
        for name in ("eager", "mine")
    )
    this: Any = SimpleNamespace(_ready=lambda _: True)
    assert time._TimedCase._slows_others(this, base, [base, mine], []) == (mine, again)  # type: ignore[arg-type, list-item]


def test_what_no_clock_confirms_is_shown_and_is_no_time(played: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"mine": Unsettled("the machine is busy")}
    monkeypatch.setattr(time._TimedCase, "_check_chains", lambda case, entries, *_: [
        case._close(entry, busy.get(entry.contender.name)) for entry in entries
    ])  # fmt: skip
    found = played(2.0)
    row = found["mine"]
    assert (row.status, row.time_ms, row.ratio, row.samples_ms) == (Status.UNSETTLED, None, None, ())
    assert row.unconfirmed_ms == pytest.approx(2.0, rel=0.01)
    assert (found["eager"].unconfirmed_ms, "repeated" in row.remarks) == (None, True)
    assert row.end(Status.INCORRECT, "wrong").unconfirmed_ms is None


def test_where_one_slows_all_the_others_are_timed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the wall clock confirmed nobody's samples beside it."""
    tries, beside = list[list[str]](), [Entry(known, a_record(implementation=known.name)) for known in (
        pytorch.eager, pytorch.eager_packed, mine.mine,
    )]  # fmt: skip
    for entry in beside:
        entry.contender = SimpleNamespace(name=entry.record.implementation)  # type: ignore[assignment]

    def fill_rows(members: Any, *_: Any) -> list[Any]:
        tries.append([entry.record.implementation for entry in members])
        for entry in members if len(tries) == 1 else ():
            entry.record.end(Status.UNSETTLED, "The machine is busy.")
        return []

    this: Any = SimpleNamespace(
        seats=9, case=None, court=None, _twins=lambda *_: [], _nvml=lambda: (None, ""), _fill_rows=fill_rows,
        _check_again=lambda entry: None, _ready=lambda entry: True, _tell_timing=None,
        _slows_others=lambda base, members, turns: (beside[2], True) if len(members) == 3 else (None, False),
    )  # fmt: skip
    this._time_together = lambda members, base: time._TimedCase._time_together(this, members, base)
    for name in ("measure_beside", "measure_new_tokens", "profile"):
        monkeypatch.setattr(time_row, name, lambda *_: None)
    this._time_together(beside, beside[0])
    assert tries == [["eager", "eager-packed", "mine"], ["eager", "eager-packed"]]
    assert [entry.record.status for entry in beside] == [Status.OK, Status.OK, Status.INCORRECT]
    assert "beside it, eager is slower" in beside[2].record.reason


# The state of the GPU


class Driver:
    """Answers as NVML does."""

    def __init__(self, states: list[GpuState], others: list[int] | NoAnswer) -> None:
        self.states, self.others = iter(states), others

    def state(self) -> GpuState:
        return next(self.states)

    def other_processes(self) -> list[int]:
        if isinstance(self.others, NoAnswer):
            raise self.others
        return self.others


def watched(states: list[GpuState], others: list[int] | NoAnswer) -> Record:
    watch = GpuWatch(Driver(states, others), "")  # type: ignore[arg-type]
    watch.look_round()
    for _ in states:
        watch.on_round()
    watch.look_round()
    record = a_record(time_ms=2.0)
    watch.note(record)
    return record


def test_there_is_a_state_for_each_sample_and_none_of_rounds_that_are_played_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = GpuWatch(Driver([GpuState(1980, 600.0, 50, "")] * 3, []), "")  # type: ignore[arg-type]
    this: Any = SimpleNamespace(
        court=SimpleNamespace(settings=SimpleNamespace(rule=Rule())), case=SimpleNamespace(seed=0),
        _tell_timing=lambda *_: None,
    )  # fmt: skip
    judge: Any = SimpleNamespace(judge=dict)
    monkeypatch.setattr(time, "run_rounds", lambda *_, on_round, **__: [on_round(number) for number in range(-2, 3)])
    for before in (None, SimpleNamespace(as_many=lambda rule: rule)):
        time._TimedCase._play(this, [], judge, "", watch, before)  # type: ignore[arg-type]
    assert len(watch.states) == 3


def test_figures_of_all_rounds_become_one_and_those_not_given_are_missing() -> None:
    states = [
        GpuState(1980, 600.0, 50, ""), GpuState(1700, 700.0, 55, "software-power-cap"),
        GpuState(1800, 690.0, 60, "software-power-cap hardware-thermal"), GpuState(1900, 650.0, 58, ""),
    ]  # fmt: skip
    record = watched(states, [4711, 4712])
    assert (record.sm_mhz, record.power_w, record.temperature_c) == (1850.0, 670.0, 58)
    assert record.cycles == pytest.approx(2.0e-3 * 1850e6)
    assert (record.throttle, record.throttled_share) == ("software-power-cap hardware-thermal", 0.5)
    assert (record.states, record.other_processes) == (tuple(states), 2)
    record = watched([GpuState(None, None, None, None)] * 3, NoAnswer("as in a container"))
    figures = (record.sm_mhz, record.power_w, record.temperature_c, record.cycles, record.throttled_share)
    assert (*figures, record.other_processes) == (None,) * 6
    assert "as in a container" in record.gpu_note
