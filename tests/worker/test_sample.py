"""The modules that one sample passes through are those that CONTRIBUTING lists."""

import re
import sys
from types import FrameType

import pytest
import torch
from places import ROOT
from specimens import small_case

from swiglu_bench.cases.cases import Mode
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.measure.rounds import Rule, run_rounds
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.turns import RoundJudge, contender_of
from swiglu_bench.worker.workbench import Workbench

CPU = torch.device("cpu")
MOST_MODULES = 9
"""Of a sample's way, so that it can be read in one go."""


def test_a_sample_passes_through_the_modules_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, case, drawn = Rule(0, 1, 1, 0.0), small_case(mode=Mode.FORWARD), Drawn.new()
    court = Court(Settings(Task.TIME, CPU, "c", "r", rule=rule), machine.describe(CPU), in_process=True)
    court.judge.begin_case(case, drawn.weights)
    contender = court.contender(pytorch.eager)
    gradients = Admitting(court, case, drawn).build(contender)
    timed = contender_of(contender, RoundJudge(court, lambda _: case.mode.results(gradients)), led=case.mode)
    entered: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        found = re.search(r"/swiglu_bench/(.*\.py)$", frame.f_code.co_filename)
        if event == "call" and found:
            entered.add(found[1])

    def put_back(bench: Workbench) -> None:
        really(bench)  # which takes the profile hook for one that the contender has set
        sys.setprofile(profile)

    really = Workbench._put_back
    monkeypatch.setattr(Workbench, "_put_back", put_back)
    timed.take(0, 100.0)
    entered.clear()
    sys.setprofile(profile)
    try:
        run_rounds([timed], rule)
    finally:
        sys.setprofile(None)
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    told = re.search(r"\*\*A sample\*\* passes through (.*?) and through the implementation", text)
    assert told
    listed = set(re.findall(r"`(\w+/\w+\.py)`", told[1]))
    of_the_implementation = {name for name in entered if name.startswith(("contenders/", "cases/definition"))}
    beside = {"measure/statistics.py"}  # when the rounds are over
    assert entered - of_the_implementation - beside == listed
    assert len(listed) <= MOST_MODULES
