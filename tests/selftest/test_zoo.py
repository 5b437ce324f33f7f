"""The zoo is caught, and would not be if the checks were weaker; right implementations raise no alarm."""

import random
from typing import Any

import pytest
import torch
from places import ROOT
from rich.console import Console

from swiglu_bench.audit import matrix
from swiglu_bench.check import judge
from swiglu_bench.implementations import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.rows.record import FAULTS
from swiglu_bench.selftest import cheats
from swiglu_bench.selftest import run as selftest
from swiglu_bench.selftest.alarms import draw_case, run_alarms
from swiglu_bench.selftest.run import CHECKS, run_selftest
from swiglu_bench.selftest.specimen import INDEX_CHECK, glu, specimen
from swiglu_bench.selftest.zoo import SPECIMENS, Catch, run_zoo
from swiglu_bench.spec.cases import Scope
from swiglu_bench.spec.implementation import Step, implementation
from swiglu_bench.spec.problem import Problem

CPU = torch.device("cpu")
THIS = machine.describe(CPU)


@pytest.fixture(scope="module")
def catches() -> dict[str, Catch]:
    return {catch.specimen.name: catch for catch in run_zoo(CPU, THIS, lambda doing: None)}


def test_there_are_enough_and_each_has_a_name_and_a_known_check() -> None:
    names = [one.name for one in SPECIMENS]
    assert len(names) == len(set(names)) >= 24
    assert all(set(one.caught_by) <= set(CHECKS) for one in SPECIMENS)
    assert set(CHECKS) == {*FAULTS, INDEX_CHECK}


def test_every_check_has_a_specimen_that_it_alone_may_catch_or_that_names_it() -> None:
    assert {check for one in SPECIMENS for check in one.caught_by} == set(CHECKS)


@pytest.mark.parametrize("name", [one.name for one in SPECIMENS])
def test_each_is_caught_by_a_check_that_must(catches: dict[str, Catch], name: str) -> None:
    catch = catches[name]
    if catch.specimen.needs_gpu:
        assert (catch.ran, catch.caught, catch.reason) == (False, False, "needs a GPU")
    else:
        assert catch.caught, (catch.checks, catch.reason)


@pytest.mark.gpu
def test_all_are_caught_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = run_zoo(device, machine.describe(device), lambda doing: None)
    through = [one for one in found if one.ran and not one.caught]
    assert not through, [(one.specimen.name, one.checks, one.reason) for one in through]


def test_thieves_would_get_through_if_the_truth_lay_in_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class Open:
        __module__ = "swiglu_bench.check.judge"

        def __init__(self, value: torch.Tensor) -> None:
            self.value, self.shape, self.device = value, value.shape, value.device

        def open(self) -> torch.Tensor:
            return self.value.clone()

    monkeypatch.setattr(judge, "Sealed", Open)
    found = list(run_zoo(CPU, THIS, lambda doing: None, [cheats.thief_by_gc, cheats.thief_by_frame]))
    assert [catch.checks for catch in found] == [(), ()], [catch.reason for catch in found]


def right(problem: Problem) -> Step:
    return glu(problem)


def test_a_right_implementation_is_not_caught_and_that_fails_the_self_test(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    harmless = specimen("harmless", "right", "relative error")(right)
    monkeypatch.setattr(selftest, "SPECIMENS", (harmless,))
    monkeypatch.setattr(selftest, "run_zoo", lambda *given: run_zoo(*given, [harmless]))
    assert not run_selftest([], CPU, 0, 0, True, Console(width=120)).passed
    out = capsys.readouterr().out
    assert "GOT THROUGH" in out
    assert "harmless: not caught, expected relative error" in out


def test_random_cases_are_the_same_for_the_same_seed_and_cover_every_scope() -> None:
    first, second = ([draw_case(source, "cpu") for _ in range(60)] for source in (random.Random(3), random.Random(3)))
    assert first == second
    assert {case.scope for case, _ in first} == set(Scope)
    assert {extras.bias for _, extras in first} == {extras.packed for _, extras in first} == {True, False}


def test_no_false_alarm() -> None:
    found = list(run_alarms([pytorch.eager, pytorch.eager_packed], CPU, 1, 12, lambda doing: None))
    assert len(found) >= 12
    assert not [one for one in found if one.alarm]


def test_an_alarm_is_told_and_fails(capsys: Any) -> None:
    def build(problem: Problem) -> Step:
        step = pytorch.eager.build(problem)
        return Step(lambda *given: 1.1 * step.forward(*given))

    wrong = implementation("wrong", scopes=Scope, description="d", offers=("bias", "limit"))(build)
    assert not run_selftest([wrong], CPU, 0, 4, False, Console(width=200)).passed
    out = capsys.readouterr().out
    assert "wrong at " in out
    assert "seed" in out


def test_the_methodology_counts_them_right() -> None:
    text = (ROOT / "docs" / "methodology.md").read_text(encoding="utf-8")
    assert f"sends {len(SPECIMENS)} wrong or cheating" in text
    assert f"for {len(matrix.CHECKS)} things" in text
