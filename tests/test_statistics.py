import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiglu_bench.measure.statistics import Interval, percentile, ratio_interval

times = st.floats(min_value=1e-3, max_value=1e3)


def noisy(count: int, scale: float, sigma: float = 0.05, seed: int = 0) -> list[float]:
    return list(scale * np.random.default_rng(seed).lognormal(sigma=sigma, size=count))


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0], 50, 3.0), ([1, 2, 3, 4], 50, 2.5), ([4, 1, 3, 2], 0, 1), ([4, 1, 3, 2], 100, 4), ([0, 10], 10, 1)],
)
def test_percentiles(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)
    assert isinstance(percentile(values, percent), float)


@given(st.lists(times, min_size=1), st.floats(min_value=0, max_value=100))
def test_a_percentile_lies_among_its_values(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(values, percent) <= max(values)


def test_half_width() -> None:
    assert Interval(1.0, 0.9, 1.2).half_width == pytest.approx(0.15)


def test_the_ratio_is_that_of_pairs() -> None:
    """Both drift by a factor of four; within each round one takes half as long. Medians alone would not know."""
    baseline = [1.0, 2.0, 4.0, 1.5, 3.0]
    interval = ratio_interval([value / 2 for value in baseline], baseline)
    assert interval == Interval(0.5, 0.5, 0.5)


def test_the_order_of_pairs_matters() -> None:
    assert ratio_interval([1, 2, 9], [1, 2, 3]).median == 1.0
    assert ratio_interval([9, 2, 1], [1, 2, 3]).median == 1.0
    assert ratio_interval([2, 9, 1], [1, 2, 3]).median == 2.0


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        ratio_interval([1.0, 2.0, 3.0], [1.0, 2.0])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_samples_give_an_interval_all_the_same(count: int) -> None:
    interval = ratio_interval(noisy(count, 2.0), noisy(count, 1.0, seed=1))
    assert interval.low <= interval.median <= interval.high
    assert math.isfinite(interval.half_width)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=30))
def test_the_median_lies_in_its_interval(pairs: list[tuple[float, float]]) -> None:
    mine, base = zip(*pairs, strict=True)
    interval = ratio_interval(mine, base)
    ratios = np.asarray(mine) / np.asarray(base)
    assert interval.median == pytest.approx(float(np.median(ratios)))
    rounding = 1e-12 * ratios.max()
    ordered = [ratios.min(), interval.low, interval.median, interval.high, ratios.max()]
    assert all(first <= second + rounding for first, second in itertools.pairwise(ordered))


def test_the_same_samples_give_the_same_interval() -> None:
    mine, base = noisy(20, 2.0), noisy(20, 1.0, seed=1)
    np.random.seed(5)
    assert ratio_interval(mine, base) == ratio_interval(mine, base)


def test_more_samples_and_less_noise_narrow_it() -> None:
    few = ratio_interval(noisy(12, 2.0), noisy(12, 1.0, seed=1)).half_width
    many = ratio_interval(noisy(300, 2.0), noisy(300, 1.0, seed=1)).half_width
    calm = ratio_interval(noisy(12, 2.0, 0.001), noisy(12, 1.0, 0.001, seed=1)).half_width
    assert many < few / 2
    assert calm < few / 10


def test_it_covers_the_true_ratio_as_often_as_it_says() -> None:
    """Of 100 experiments of 30 noisy pairs with a true ratio of 2, about 95 intervals hold it."""
    held = 0
    for seed in range(100):
        interval = ratio_interval(noisy(30, 2.0, seed=2 * seed), noisy(30, 1.0, seed=2 * seed + 1))
        held += interval.low <= 2.0 <= interval.high
    assert 87 <= held <= 100
