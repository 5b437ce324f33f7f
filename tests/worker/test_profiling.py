"""Traces and counters of contenders, here on a CPU and with a stand-in for ncu."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import torch
from specimens import a_bare_record, small_case

from swiglu_bench.cases.cases import Mode
from swiglu_bench.contenders.pytorch import eager
from swiglu_bench.machine import machine
from swiglu_bench.measure import profilers
from swiglu_bench.tasks import beside
from swiglu_bench.tasks.case import Entry
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.one_call import program
from swiglu_bench.worker.settings import Settings, Task

CPU = torch.device("cpu")
SETTINGS = Settings(Task.TIME, CPU, "forward", "run", energy=False)


def profiled(settings: Settings, mode: Mode = Mode.STEP) -> Entry:
    place, case = Court(settings, machine.describe(CPU), in_process=True), small_case(mode=mode)
    contender = place.contender(eager)
    contender.tell("build", case, 7)
    entry = Entry(contender, a_bare_record(implementation="eager", mode=mode.value), eager.gradients(case.scope))
    beside.profile(place, case, [entry], lambda doing, share: None)
    return entry


@pytest.mark.parametrize("mode", list(Mode))
def test_a_trace_has_the_calls_and_what_is_in_them(tmp_path: Path, mode: Mode) -> None:
    record = profiled(dataclasses.replace(SETTINGS, trace=True, folder=tmp_path), mode).record
    assert record.profile_note == ""
    events = json.loads((tmp_path / record.trace).read_text(encoding="utf-8"))["traceEvents"]
    calls = [event for event in events if event.get("name") == f"swiglu {mode}" and event.get("ph") == "X"]
    assert len(calls) == beside.TRACED_CALLS
    products = [event for event in events if event.get("name") in {"aten::mm", "aten::addmm"}]
    inside = [one for one in products if any(0 <= one["ts"] - call["ts"] <= call["dur"] for call in calls)]
    assert len(inside) >= beside.TRACED_CALLS
    assert all(event["dur"] >= 0 for event in calls)


def test_what_cannot_be_traced_says_so(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("in the way", encoding="utf-8")
    record = profiled(dataclasses.replace(SETTINGS, trace=True, folder=tmp_path)).record
    assert record.trace == ""
    assert record.profile_note.startswith("There is no trace: ")


def test_counters_are_entered_or_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(SETTINGS, ncu=True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "not on the PATH" in profiled(settings).record.profile_note
    monkeypatch.setattr("shutil.which", lambda name: "/opt/ncu")
    monkeypatch.setattr(profilers, "counters", lambda path, command: profilers.Counters(70.0, 5, 6, 168))
    record = profiled(settings).record
    assert (record.tensor_pct, record.dram_bytes, record.l2_bytes, record.registers_per_thread) == (70.0, 5, 6, 168)


def test_nothing_is_done_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilers, "counters", lambda path, command: pytest.fail("not asked for"))
    assert profiled(SETTINGS).record == a_bare_record(implementation="eager", mode="step")


def test_the_program_for_ncu_makes_the_call() -> None:
    done = subprocess.run(program(SETTINGS, eager, small_case()), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
