"""The zoo is caught, and right implementations raise no alarm; the whole of it is the command `selftest`."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from places import ROOT, SUPPORT
from rich.console import Console

from swiglu_bench.cases import registry
from swiglu_bench.cases.cases import Dtype, Mode, Scope
from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.contenders import CATALOGUE, fp8, pytorch
from swiglu_bench.machine import machine
from swiglu_bench.rows.record import FAULTS
from swiglu_bench.tasks.contract import matrix
from swiglu_bench.tasks.selftest import alarms, conduct, gpu, memory, timing, usage, wrong
from swiglu_bench.tasks.selftest import run as selftest
from swiglu_bench.tasks.selftest.alarms import draw_case, run_alarms
from swiglu_bench.tasks.selftest.run import CHECKS, run_selftest
from swiglu_bench.tasks.selftest.specimen import CROWDED_CHECK, INDEX_CHECK, Specimen
from swiglu_bench.tasks.selftest.zoo import SPECIMENS, TOO_BUSY, Catch, run_zoo

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
MINE = registry.load(f"{SUPPORT}/user_implementations.py:mine")
HARMLESS = Specimen(MINE, ("relative error",), Scope.GLU, Dtype.FLOAT32, Mode.FORWARD, "time", needs_gpu=False)
CHOSEN = (
    wrong.swapped, memory.right_while_checked, memory.thief_by_gc, usage.stale_weights, timing.works_in_to_canonical,
    conduct.setting_in_the_loop, gpu.side_stream, HARMLESS,
)  # fmt: skip
"""Of each class of faults one or two, and a right one."""


def test_there_are_enough_and_each_has_a_name_and_a_known_check() -> None:
    names = [one.name for one in SPECIMENS]
    assert len(names) == len(set(names)) >= 60
    assert {check for one in SPECIMENS for check in one.caught_by} <= set(CHECKS) | {"error"}
    assert set(CHECKS) == {*FAULTS, INDEX_CHECK, CROWDED_CHECK}
    assert all(name == name.lower() and text for name, text in CHECKS.items())


def test_every_check_has_a_specimen_that_names_it() -> None:
    assert {check for one in SPECIMENS for check in one.caught_by} >= set(CHECKS)


@pytest.mark.timed
def test_each_is_caught_by_a_check_that_must_and_a_right_one_by_none() -> None:
    """At one case, so that one set of processes does; a busy machine may leave one undecided, which is said."""
    chosen = [replace(one, mode=Mode.FORWARD) for one in CHOSEN]
    found = {catch.specimen.name: catch for catch in run_zoo(CPU, THIS, lambda doing: None, chosen)}
    assert len(found) == len(CHOSEN)
    right, on_gpu = found.pop(HARMLESS.name), found.pop(gpu.side_stream.name)
    undecided = {name for name, one in found.items() if not one.ran and one.reason == TOO_BUSY}
    assert {name: (one.checks, one.reason) for name, one in found.items() if not one.caught}.keys() == undecided
    assert right.checks == (), right.reason
    assert (on_gpu.ran, on_gpu.caught) == (False, False)
    assert "GPU" in on_gpu.reason


@pytest.mark.gpu
def test_all_are_caught_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = run_zoo(device, machine.describe(device), lambda doing: None)
    through = [one for one in found if one.ran and not one.caught]
    assert not through, [(one.specimen.name, one.checks, one.reason) for one in through]


@pytest.mark.parametrize("checks", [(), ("form",), ("relative error",)])
def test_what_gets_through_or_is_caught_by_another_check_alone_fails_the_self_test(
    checks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(selftest, "SPECIMENS", (HARMLESS,))
    monkeypatch.setattr(selftest, "run_zoo", lambda *given: [Catch(HARMLESS, checks, "because")])
    found = run_selftest([], CPU, 0, 0, True, Console(width=120))
    (row,) = found.specimens
    assert found.passed is row["caught"] is (checks == ("relative error",))
    assert (row["name"], row["checks"], row["expected"]) == ("mine", checks, ["relative error"])
    assert ("expected relative error" in capsys.readouterr().out) is not found.passed


# Right implementations at random cases


def test_random_cases_are_the_same_for_the_same_seed_and_cover_every_scope() -> None:
    first, second = ([draw_case(source, "cpu") for _ in range(60)] for source in (random.Random(3), random.Random(3)))
    assert first == second
    assert {case.scope for case, _ in first} == set(Scope)
    assert {extras.bias for _, extras in first} == {extras.packed for _, extras in first} == {True, False}


def test_random_cases_leave_no_row_out() -> None:
    drawn = [draw_case(source, "cuda") for source in [random.Random(0)] for _ in range(50)]
    for one in CATALOGUE:
        asked = [case for case, extras in drawn if not one.refuses(case) and set(extras.offers) <= one.offers]
        assert asked or one.absent, one.name


def test_no_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms._Timing, "trial", lambda *given: ())  # it takes processes
    found = list(run_alarms([pytorch.eager, pytorch.eager_packed], CPU, 1, 6, lambda doing, completed: None))
    assert len(found) >= 6
    assert not [one for one in found if one.alarm]


def test_rows_that_quantise_have_cases_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms._Timing, "trial", lambda *given: ())
    found = list(run_alarms([fp8.scaled_mm], CPU, 0, 20, lambda doing, completed: None))
    assert {one.case.precision for one in found} == fp8.scaled_mm.precisions
    assert not [one for one in found if one.alarm]


def test_an_alarm_is_told_and_fails(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(problem: Problem) -> Step:
        step = pytorch.eager.build(problem)
        return Step(lambda *given: 1.1 * step.forward(*given))

    monkeypatch.setattr(alarms._Timing, "trial", lambda *given: ())
    one = implementation("wrong", scopes=Scope, description="d", offers=("bias", "limit"))(build)
    found = run_selftest([one], CPU, 0, 4, False, Console(width=200))
    assert not found.passed
    assert all(row["alarm"] for row in found.cases)
    out = capsys.readouterr().out
    assert "wrong at " in out
    assert "seed" in out


def test_what_was_found_before_an_interruption_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, extras = alarms.draw_case(random.Random(0), "cpu")

    def interrupted(chosen: Any, device: Any, seed: int, count: int, tell: Any) -> Any:
        tell("case 4", 3)
        yield alarms.Trialled("eager", case, extras, "wrong")
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "run_alarms", interrupted)
    found = run_selftest([], CPU, 0, 9, False, Console(width=200))
    assert (found.interrupted, found.passed, len(found.cases)) == (True, False, 1)
    out = capsys.readouterr().out
    assert "1 false alarms in 1 verifications of 1 implementations at 3 of 9 random cases (seed 0): eager 1" in out
    assert "Interrupted" in out

    def cut(device: Any, this: Any, tell: Any) -> Any:
        yield Catch(SPECIMENS[0], SPECIMENS[0].caught_by)
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "run_zoo", cut)
    found = run_selftest([], CPU, 0, 9, True, Console(width=200))
    assert (found.interrupted, len(found.specimens), found.cases) == (True, 1, [])
    assert "1 of 1 wrong implementations that ran here were caught." in capsys.readouterr().out


def test_the_methodology_counts_them_right() -> None:
    text = (ROOT / "docs" / "methodology.md").read_text(encoding="utf-8")
    assert f"sends {len(SPECIMENS)} wrong or cheating" in text
    assert f"runs {len(matrix.CHECKS)} checks on each implementation" in text
