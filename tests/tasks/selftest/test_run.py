"""Specimens are caught and right implementations raise no alarm; the whole of it is the command `selftest`."""

import random
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from places import ROOT
from rich.console import Console

from swiglu_bench.cases.cases import Mode, Scope
from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.cli.ends import _Interrupted
from swiglu_bench.contenders import fp8, pytorch
from swiglu_bench.machine import machine
from swiglu_bench.tasks.contract import matrix
from swiglu_bench.tasks.selftest import run as selftest
from swiglu_bench.tasks.selftest.specimen import Specimen, slow
from swiglu_bench.worker import environments

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
HARMLESS = Specimen("slow", "nothing", ("relative error",), slow.build, source=slow.source)
CHOSEN = (
    "gate-up-swapped", "found-in-memory", "thief-by-gc", "stale-weights", "works-in-to-canonical",
    "setting-in-the-loop", "side-stream-later", "says-0-ms", "edits-compiled-code", "edits-cached-limits",
)  # fmt: skip
"""Of each class of faults one or two."""


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that would be timed are left out: they take processes."""
    monkeypatch.setattr(selftest, "timed_trials", lambda *given: ())


def test_every_check_has_a_specimen_and_every_specimen_a_known_check() -> None:
    assert len(selftest.SPECIMENS) >= 80
    assert [specimen.implementation.name for specimen in selftest.SPECIMENS.values()] == list(selftest.SPECIMENS)
    assert {check for specimen in selftest.SPECIMENS.values() for check in specimen.caught_by} == set(
        selftest.CHECKS
    ) | {"error"}


@pytest.mark.timed
def test_each_is_caught_by_a_check_that_must_and_a_right_one_by_none() -> None:
    """At one case, so that one set of processes does; a busy machine may leave one undecided, which is said."""
    chosen = [replace(specimen, mode=Mode.FORWARD) for specimen in (*map(selftest.SPECIMENS.get, CHOSEN), HARMLESS)]  # type: ignore
    found = {catch.specimen.name: catch for catch in selftest.run_specimens(CPU, THIS, lambda *_: None, chosen)}
    assert len(found) == len(chosen)
    right, on_gpu = found.pop(HARMLESS.name), found.pop("side-stream-later")
    undecided = {name for name, catch in found.items() if not catch.ran and catch.reason == selftest.TOO_BUSY}
    assert {name: (catch.checks, catch.reason) for name, catch in found.items() if not catch.caught}.keys() == undecided
    assert right.checks == (), right.reason
    assert (on_gpu.ran, on_gpu.caught, "GPU" in on_gpu.reason) == (False, False, True)


def test_a_cache_that_a_specimen_reaches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The specimen that edits compiled code, where it is led to the folders of `compile`."""
    chosen = [replace(selftest.SPECIMENS["edits-compiled-code"], mode=Mode.FORWARD)]
    everyone = environments.of(pytorch.compiled)
    monkeypatch.setattr(environments, "of", lambda known: everyone)
    (catch,) = selftest.run_specimens(CPU, THIS, lambda *_: None, chosen)
    assert "own caches" not in catch.checks


@pytest.mark.gpu
def test_all_are_caught_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = selftest.run_specimens(device, machine.describe(device), lambda *_: None, list(selftest.SPECIMENS.values()))
    through = [catch for catch in found if catch.ran and not catch.caught]
    assert not through, [(catch.specimen.name, catch.checks, catch.reason) for catch in through]


@pytest.mark.parametrize("checks", [(), ("form",), ("relative error",)])
def test_what_gets_through_or_is_caught_by_another_check_alone_fails_the_self_test(
    checks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(selftest, "SPECIMENS", {HARMLESS.name: HARMLESS})
    monkeypatch.setattr(selftest, "run_specimens", lambda *given: [selftest.Catch(HARMLESS, checks, "because")])
    result = selftest.run_selftest([], CPU, 0, 0, True, Console(width=120))
    (row,) = result.specimens
    assert result.passed is row["caught"] is (checks == ("relative error",))
    assert (row["name"], row["checks"], row["expected"]) == ("slow", checks, ["relative error"])
    assert ("expected relative error" in capsys.readouterr().out) is not result.passed


# Right implementations at random cases


def test_random_cases_are_the_same_for_the_same_seed_and_cover_every_scope() -> None:
    first, second = (
        [selftest.draw_case(source, "cpu") for _ in range(60)] for source in (random.Random(3), random.Random(3))
    )
    assert first == second
    assert {case.scope for case, _ in first} == set(Scope)
    assert {extras.bias for _, extras in first} == {extras.packed for _, extras in first} == {True, False}


@pytest.mark.usefixtures("untimed")
def test_right_ones_raise_no_alarm_and_those_that_quantise_have_cases_too() -> None:
    found = list(selftest.run_alarms([pytorch.eager, fp8.scaled_mm], CPU, 0, 8, lambda doing, completed: None))
    assert not [trial for trial in found if trial.alarm]
    assert {trial.implementation: bool(trial.case.precision) for trial in found} == {"eager": False, "scaled-mm": True}


@pytest.mark.usefixtures("untimed")
def test_an_alarm_is_told_and_fails(capsys: Any) -> None:
    def build(problem: Problem) -> Step:
        step = pytorch.eager.build(problem)
        return Step(lambda *given: 1.1 * step.forward(*given))

    wrong = implementation("wrong", scopes=Scope, description="d", offers=("bias", "limit"))(build)
    result = selftest.run_selftest([wrong], CPU, 0, 4, False, Console(width=200))
    assert not result.passed
    assert all(row["alarm"] for row in result.cases)
    out = capsys.readouterr().out
    assert "wrong at " in out
    assert "seed" in out


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RuntimeError("what C++ makes of it")])
def test_what_was_found_before_an_interruption_is_shown(
    end: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = _Interrupted()
    handler.came = isinstance(end, Exception)
    monkeypatch.setattr(signal, "getsignal", lambda number: handler)

    def alarms(*_: Any) -> Any:
        yield selftest.Trial("eager", *selftest.draw_case(random.Random(0), "cpu"), "wrong")
        raise end

    def specimens(device: Any, this: Any, tell: Any, specimens: list[Specimen]) -> Any:
        yield selftest.Catch(specimens[0], specimens[0].caught_by)
        raise end

    monkeypatch.setattr(selftest, "run_alarms", alarms)
    monkeypatch.setattr(selftest, "run_specimens", specimens)
    for with_specimens, told in ((False, "1 false alarms in 1 verifications"), (True, "1 of 1 wrong implementations")):
        result = selftest.run_selftest([], CPU, 0, 9, with_specimens, Console(width=200))
        found = (len(result.specimens), len(result.cases))
        assert (result.interrupted, found) == (True, (1, 0) if with_specimens else (0, 1))
        out = capsys.readouterr().out
        assert told in out
        assert "Interrupted" in out


def test_the_methodology_counts_them_right() -> None:
    text = (ROOT / "docs" / "methodology.md").read_text(encoding="utf-8")
    on_gpu = sum(specimen.needs == "cuda" for specimen in selftest.SPECIMENS.values())
    assert f"sends {len(selftest.SPECIMENS)} wrong or cheating implementations ({on_gpu} of them need a GPU)" in text
    assert f"runs {len(matrix.CHECKS)} checks on each implementation" in text
