import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from places import RESULTS
from trained import BY_NAME, CPU, images, trainee

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Status
from swiglu_bench.tasks.train import step_costs
from swiglu_bench.tasks.train.blocks import Trainee
from swiglu_bench.tasks.train.loop import FittedModel, SeedTraining
from swiglu_bench.tasks.train.step_costs import Moments, measure_ratios, read_ratios, time_steps

pytestmark = pytest.mark.timed

RULE = Rule(warmup_rounds=1, min_rounds=4, max_rounds=5, min_s=0, budget_s=5)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "TURN_S", 0.001)


def failing(name: str, after: int) -> Trainee:
    """eager that raises at a call, or when it is built."""
    calls = iter(range(10**6))

    def build(problem: Problem) -> Step:
        step = BY_NAME["eager"].build(problem)

        def forward(x: Any) -> Any:
            if next(calls) >= after:
                raise RuntimeError("broken")
            return step.forward(x)

        return Step(forward) if after else forward(None)

    return trainee(name, dataclasses.replace(BY_NAME["eager"], build=build))


def test_all_take_turns_and_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[FittedModel] = []
    begin = FittedModel.__init__
    monkeypatch.setattr(FittedModel, "__init__", lambda self, *rest: (begin(self, *rest), models.append(self))[0])
    events: list[str] = []
    experiment, trainees = images(tmp_path), [trainee(name) for name in ("eager", "eager-packed", "unsloth")]
    time_steps(experiment, trainees, RULE, 0, events.append)
    assert "timing, round 1" in events
    rows: list[Any] = [one.row for one in trainees]
    assert (rows[0].ratio, rows[0].verdict) == (None, "baseline")
    for row in rows[1:]:
        assert row.ratio_low <= row.ratio <= row.ratio_high
        assert row.verdict in ("faster", "slower", "tie")
    for row in rows:
        assert row.status is Status.OK
        assert row.rate == pytest.approx(16e3 / row.step_ms)
        assert 0 < row.block_share < 1
        assert min(row.block_forward_ms, row.block_backward_ms, row.optimizer_ms) > 0
        assert row.peak_bytes > row.saved_bytes > 0

    assert models[0].optimizer is models[2].optimizer, "the same parameters need only one optimiser's state"
    assert models[0].optimizer is not models[1].optimizer
    unchanged = SeedTraining(experiment, trainee("eager-packed"), 0)
    assert all(parameter.grad is None for model in models for parameter in model.parameters)
    for one, other in zip(models[1].parameters, unchanged.parameters, strict=True):
        assert torch.equal(one, other), "the learning rate is zero"


def test_one_that_fails_costs_its_own_row_wherever_it_fails_and_without_eager_nothing_is_timed(tmp_path: Path) -> None:
    experiment = images(tmp_path)
    eager, *broken = [trainee("eager"), failing("built", 0), failing("warmed up", 1), failing("in rounds", 20)]
    time_steps(experiment, [eager, *broken], RULE, 0, lambda _: None)
    assert eager.row.step_ms
    for row in (one.row for one in broken):
        reason = "While it was timed: RuntimeError: broken."
        assert (row.status, row.reason, row.step_ms) == (Status.ERROR, reason, None)
    packed = trainee("eager-packed")
    time_steps(experiment, [failing("eager", 1), packed], RULE, 0, lambda _: None)
    assert (packed.row.status, packed.row.step_ms) == (Status.OK, None)


def test_moments_of_all_blocks_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", itertools.count(0.0, 0.002).__next__)
    moments = Moments(CPU)
    for what in ("start", "enter", "leave", "enter", "leave", "end"):
        moments.note(what)
    assert moments.between_ms("enter", "leave") == pytest.approx(4.0)
    assert moments.between_ms("start", "end") == pytest.approx(10.0)


def test_ratios_measured_now(tmp_path: Path) -> None:
    glu = dataclasses.replace(BY_NAME["eager"], scopes=frozenset({Scope.GLU}))
    trainees, case = [trainee("eager"), trainee("eager-packed"), trainee("glu", glu)], images(tmp_path).case
    found = measure_ratios(trainees, case, CPU, RULE)
    assert found.keys() == {"eager-packed"}, "the other has no scope mlp"
    assert found["eager-packed"] > 0
    assert measure_ratios(trainees[1:], case, CPU, RULE) == {}


def test_ratios_of_an_earlier_run() -> None:
    case = Case(Shape("llama7b", 4096, 11008, "", ()), 1024, Dtype.BFLOAT16, Scope.MLP, Mode.STEP)
    found = read_ratios(RESULTS / "step-mlp", case)
    assert 0.5 < found["fused-mlp-auto"] < 1.1
    assert "compile" in found
    with pytest.raises(BadInput, match="no row of this block; make one with: swiglu-bench step --scope mlp"):
        read_ratios(RESULTS / "step-mlp", dataclasses.replace(case, tokens=77))
    with pytest.raises(BadInput, match="does not exist"):
        read_ratios(RESULTS / "none", case)
