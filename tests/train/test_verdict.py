import math

import pytest

from swiglu_bench.rows.training import Curve
from swiglu_bench.train.verdict import compare, final, spread

EAGER = {0: 1.00, 1: 1.02, 2: 0.98}
PERMUTED = {0: 1.0001, 1: 1.0199, 2: 0.98}


def moved(by: float) -> dict[int, float]:
    return {seed: loss + by for seed, loss in EAGER.items()}


def test_the_final_loss_is_of_the_last_fifth() -> None:
    assert final([9.0] * 8 + [1.0, 3.0]) == 2.0
    assert final([5.0]) == 5.0
    assert final([9.0, 9.0, 1.0]) == 1.0


def test_spread_needs_two() -> None:
    assert spread([1.0]) is None
    assert spread([1.0, 3.0]) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("by", "curve"),
    [
        (0.0, Curve.SAME),
        (0.00029, Curve.SAME),
        (-0.00029, Curve.SAME),
        (0.0004, Curve.WITHIN_SEEDS),
        (-0.0199, Curve.WITHIN_SEEDS),
        (0.0201, Curve.DIFFERS),
        (-0.0201, Curve.DIFFERS),
        (math.nan, Curve.DIFFERS),
        (math.inf, Curve.DIFFERS),
    ],
)
def test_a_difference_is_judged_by_rounding_and_by_seeds(by: float, curve: Curve) -> None:
    found = compare(moved(by), EAGER, PERMUTED)
    assert found
    assert found.curve is curve
    assert found.rounding == pytest.approx(0.0001)
    assert found.spread == pytest.approx(0.02)


def test_one_seed_that_is_off_is_not_averaged_into_the_same() -> None:
    found = compare(EAGER | {0: 1.0004}, EAGER, PERMUTED)
    assert found
    assert found.curve is Curve.WITHIN_SEEDS


def test_with_one_seed_only_what_rounding_does_is_known() -> None:
    one = {0: 1.0}
    for by, curve in ((0.0, Curve.SAME), (0.0002, Curve.SAME), (0.01, Curve.UNKNOWN)):
        found = compare({0: 1.0 + by}, one, {0: 1.0001})
        assert found
        assert found.curve is curve
        assert found.spread is None


def test_without_the_permuted_run_only_equal_curves_are_the_same() -> None:
    for by, curve in ((0.0, Curve.SAME), (1e-9, Curve.WITHIN_SEEDS)):
        found = compare(moved(by), EAGER, {})
        assert found
        assert found.curve is curve


def test_seeds_are_paired_and_none_shared_is_no_verdict() -> None:
    found = compare({1: 1.03, 7: 5.0}, EAGER, PERMUTED)
    assert found
    assert found.difference == pytest.approx(0.01)
    assert compare({7: 1.0}, EAGER, PERMUTED) is None
