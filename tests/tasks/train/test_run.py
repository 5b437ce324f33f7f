import csv
import dataclasses
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from specimens import a_summary
from trained import BY_NAME, images, permuted, trainee

from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.finished_run import Curve, seeds_of
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.text import CsvFile
from swiglu_bench.tasks.train import run
from swiglu_bench.tasks.train.blocks import FittedModel, SeedTraining, Trainee
from swiglu_bench.tasks.train.run import enter_curve, final, time_steps, train

RULE = Rule(warmup_rounds=1, min_rounds=4, max_rounds=5, min_s=0, budget_s=5)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TURN_S", 0.001)


def everyone() -> list[Trainee]:
    return [trainee("eager"), permuted(), trainee("eager-packed")]


@pytest.mark.timed
def test_everything_is_trained_timed_judged_and_kept_and_one_that_fails_costs_its_own_row(tmp_path: Path) -> None:
    broken = dataclasses.replace(BY_NAME["eager"], build=MagicMock(side_effect=RuntimeError("no kernel for this")))
    trainees, events = [*everyone(), trainee("broken", broken)], list[Record | str]()
    with closing(CsvFile(tmp_path, kind="seeds")) as file:
        for row in train(images(tmp_path / "data"), trainees, [0, 1], RULE, events.append):
            file.write(row)
    eager, twin, packed, failed = (each.row for each in trainees)
    assert (eager.curve, twin.curve, twin.step_ms) == ("", "same", None)
    assert packed.curve in ("same", "within seeds")
    assert packed.ratio
    assert eager.final_loss == pytest.approx(packed.final_loss, rel=1e-3)
    assert (failed.status, failed.reason) == (Status.ERROR, "Seed 0: RuntimeError: no kernel for this.")
    assert [(each.row.failed, each.row.seeds) for each in trainees] == [(False, 2)] * 3 + [(True, 0)]
    assert [len(list(csv.DictReader((tmp_path / name).open()))) for name in ("train.csv", "runs.csv")] == [36, 6]
    read = {(row.implementation, row.seed): row for row in seeds_of(tmp_path)}
    assert read["eager-packed", 1].series["loss"] == pytest.approx(trainees[2].losses[1])
    assert read["eager-packed", 1].metric_mean == pytest.approx(trainees[2].seeds[1].metric_mean)
    assert "timing, round 1" in events


@pytest.mark.timed
def test_what_was_trained_until_an_interruption_is_judged(tmp_path: Path) -> None:
    def stop(event: Record | str) -> None:
        if isinstance(event, Record) and event.implementation == "eager-packed":
            raise KeyboardInterrupt

    trainees, found = everyone(), list[Record]()
    rows: Iterator[Record] = train(images(tmp_path), trainees, [0, 1], RULE, stop)
    with pytest.raises(KeyboardInterrupt):
        found.extend(iter(rows.__next__, None))
    eager, twin, packed = (each.row for each in trainees)
    assert (eager.seeds, twin.seeds, twin.curve, packed.status) == (1, 1, "same", Status.SKIPPED)
    assert "had not been trained to the end" in packed.reason


# What a step costs


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


@pytest.mark.timed
def test_all_take_turns_and_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[FittedModel] = []
    begin = FittedModel.__init__
    monkeypatch.setattr(FittedModel, "__init__", lambda self, *rest: (begin(self, *rest), models.append(self))[0])
    events: list[Any] = []
    experiment, trainees = images(tmp_path), [trainee(name) for name in ("eager", "eager-packed", "unsloth")]
    time_steps(experiment, trainees, RULE, 0, events.append)
    assert "timing, round 1" in events
    rows: list[Any] = [each.row for each in trainees]
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
    for own, fresh in zip(models[1].parameters, unchanged.parameters, strict=True):
        assert torch.equal(own, fresh), "the learning rate is zero"


@pytest.mark.timed
def test_one_that_fails_costs_its_own_row_wherever_it_fails_and_without_eager_nothing_is_timed(tmp_path: Path) -> None:
    experiment = images(tmp_path)
    eager, *broken = [trainee("eager"), failing("built", 0), failing("warmed up", 1), failing("in rounds", 20)]
    time_steps(experiment, [eager, *broken], RULE, 0, lambda _: None)
    assert eager.row.step_ms
    for row in (each.row for each in broken):
        reason = "While it was timed: RuntimeError: broken."
        assert (row.status, row.reason, row.step_ms) == (Status.ERROR, reason, None)
    packed = trainee("eager-packed")
    time_steps(experiment, [failing("eager", 1), packed], RULE, 0, lambda _: None)
    assert (packed.row.status, packed.row.step_ms) == (Status.OK, None)


# Whether it learned the same

EAGER = {0: 1.00, 1: 1.02, 2: 0.98}
PERMUTED = {0: 1.0001, 1: 1.0199, 2: 0.98}
ROW = a_summary("x")
SAME, WITHIN_SEEDS, DIFFERS = Curve.SAME, Curve.WITHIN_SEEDS, Curve.DIFFERS


def compared(own: dict[int, float], eager: dict[int, float], permuted: dict[int, float]) -> Record:
    row = dataclasses.replace(ROW)
    enter_curve(row, own, eager, permuted)
    return row


def moved(by: float) -> dict[int, float]:
    return {seed: loss + by for seed, loss in EAGER.items()}


@pytest.mark.parametrize(
    ("by", "curve"),
    [
        (0.0, SAME), (0.00029, SAME), (-0.00029, SAME), (0.0004, WITHIN_SEEDS), (-0.0199, WITHIN_SEEDS),
        (0.0201, DIFFERS), (-0.0201, DIFFERS), (math.nan, DIFFERS), (math.inf, DIFFERS),
    ],
)  # fmt: skip
def test_a_difference_is_judged_by_rounding_and_by_seeds(by: float, curve: Curve) -> None:
    row = compared(moved(by), EAGER, PERMUTED)
    assert (row.curve, row.rounding, row.eager_spread) == (curve, pytest.approx(0.0001), pytest.approx(0.02))
    assert row.failed is (curve is DIFFERS)
    assert not dataclasses.replace(row, precision="fp8-rowwise").failed, "what is quantised may differ"


def test_the_final_loss_is_of_the_last_fifth() -> None:
    assert [final(losses) for losses in ([9.0] * 8 + [1.0, 3.0], [5.0], [9.0, 9.0, 1.0])] == [2.0, 5.0, 1.0]


def test_seeds_are_paired_and_one_that_is_off_is_not_averaged_away() -> None:
    assert compared(EAGER | {0: 1.0004}, EAGER, PERMUTED).curve is WITHIN_SEEDS
    assert compared({1: 1.03, 7: 5.0}, EAGER, PERMUTED).difference == pytest.approx(0.01)
    assert compared({7: 1.0}, EAGER, PERMUTED).curve == ""
    row = compared({0: 1.01, 1: 1.05, 2: 1.00}, EAGER, PERMUTED)  # differences 0.01, 0.03, 0.02
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (row.difference_low, row.difference_high) == pytest.approx((0.02 - half, 0.02 + half))


def test_with_one_seed_or_without_a_permuted_run_less_can_be_said() -> None:
    single = [compared({0: 1.0 + by}, {0: 1.0}, {0: 1.0001}) for by in (0.0, 0.0002, 0.01)]
    assert [row.curve for row in single] == [SAME, SAME, Curve.UNKNOWN]
    assert (single[0].eager_spread, single[0].difference_low) == (None, None)
    for other_order in ({}, dict.fromkeys(EAGER, math.nan)):
        assert [compared(moved(by), EAGER, other_order).curve for by in (0.0, 1e-9)] == [SAME, WITHIN_SEEDS]
