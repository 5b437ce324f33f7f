import dataclasses
import math

import pytest
from specimens import a_summary

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.rows.training import Curve
from swiglu_bench.tasks.train.verdicts import enter_curve, enter_expectation, final, spread

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


def test_the_final_loss_is_of_the_last_fifth_and_its_spread_needs_two_seeds() -> None:
    assert [final(losses) for losses in ([9.0] * 8 + [1.0, 3.0], [5.0], [9.0, 9.0, 1.0])] == [2.0, 5.0, 1.0]
    assert spread([1.0]) is None
    assert spread([1.0, 3.0]) == pytest.approx(math.sqrt(2))


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


def test_seeds_are_paired_and_one_that_is_off_is_not_averaged_away() -> None:
    assert compared(EAGER | {0: 1.0004}, EAGER, PERMUTED).curve is WITHIN_SEEDS
    assert compared({1: 1.03, 7: 5.0}, EAGER, PERMUTED).difference == pytest.approx(0.01)
    assert compared({7: 1.0}, EAGER, PERMUTED).curve == ""


def test_the_difference_has_an_interval_over_seeds() -> None:
    row = compared({0: 1.01, 1: 1.05, 2: 1.00}, EAGER, PERMUTED)  # differences 0.01, 0.03, 0.02
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (row.difference_low, row.difference_high) == pytest.approx((0.02 - half, 0.02 + half))
    assert compared({0: 1.01}, EAGER, PERMUTED).difference_low is None


def test_what_is_quantised_may_differ() -> None:
    row = compared(moved(0.05), EAGER, PERMUTED)
    assert (row.curve, row.failed) == (DIFFERS, True)
    assert not dataclasses.replace(row, precision="fp8-rowwise").failed
    assert dataclasses.replace(row, precision="fp8-rowwise", status=Status.ERROR).failed


def test_with_one_seed_or_without_a_permuted_run_less_can_be_said() -> None:
    single = [compared({0: 1.0 + by}, {0: 1.0}, {0: 1.0001}) for by in (0.0, 0.0002, 0.01)]
    assert [row.curve for row in single] == [SAME, SAME, Curve.UNKNOWN]
    assert single[0].eager_spread is None
    for permuted in ({}, dict.fromkeys(EAGER, math.nan)):
        assert [compared(moved(by), EAGER, permuted).curve for by in (0.0, 1e-9)] == [SAME, WITHIN_SEEDS]


def expecting(ratio: float = 0.9, noise: float = 0.001, trains: str = "everything") -> Record:
    """A row with this ratio against an eager whose blocks are half of its step and whose optimiser takes a tenth."""
    eager = dataclasses.replace(ROW, block_share=0.5, block_forward_ms=2.0, block_backward_ms=3.0, optimizer_ms=1.0)
    row = dataclasses.replace(ROW, trains=trains, optimizer_ms=0.5, ratio=ratio, aa_low=1.0, aa_high=1 + noise)
    row.ratio_low, row.ratio_high = ratio - 0.002, ratio + 0.002
    enter_expectation(row, eager, 0.8)
    return row


@pytest.mark.parametrize(
    ("measured", "noise", "as_expected"),
    [
        (0.90, 0.001, True), (0.915, 0.001, True), (0.925, 0.001, False), (0.87, 0.001, False), (0.88, 0.001, True),
        (0.95, 0.06, True),
    ],
)  # fmt: skip
def test_off_by_a_fifth_of_the_saving_and_more_than_noise(measured: float, noise: float, as_expected: bool) -> None:
    row = expecting(measured, noise)
    assert row.expected_ratio == pytest.approx(0.9), "half of the step takes 0.8 of its time"
    assert row.as_expected is as_expected
    frozen = expecting(measured, noise, trains="inputs")
    assert frozen.expected_ratio == pytest.approx(0.85), "and the optimiser takes half of its tenth"
