import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiglu_bench.measure import statistics
from swiglu_bench.measure.statistics import Interval, Verdict, median_interval, noise_interval, ratio_interval

times = st.floats(min_value=1e-3, max_value=1e3)


def test_the_ratio_is_that_of_pairs() -> None:
    """Both drift by a factor of four; within each round one takes half as long. Medians alone would not know."""
    baseline = [1.0, 2.0, 4.0, 1.5, 3.0]
    assert ratio_interval([value / 2 for value in baseline], baseline) == Interval(0.5, 0.5, 0.5)
    assert ratio_interval([1, 2, 9], [1, 2, 3]).median == 1.0
    assert ratio_interval([2, 9, 1], [1, 2, 3]).median == 2.0
    with pytest.raises(ValueError, match="broadcast"):
        ratio_interval([1.0, 2.0, 3.0], [1.0, 2.0])


@given(st.lists(st.tuples(times, times), min_size=1, max_size=30))
def test_the_median_lies_in_its_interval(pairs: list[tuple[float, float]]) -> None:
    mine, base = zip(*pairs, strict=True)
    interval = ratio_interval(mine, base)
    ratios = np.asarray(mine) / np.asarray(base)
    assert interval.median == pytest.approx(float(np.median(ratios)))
    rounding = 1e-12 * ratios.max()
    assert math.isfinite(interval.half_width)
    ordered = [ratios.min(), interval.low, interval.median, interval.high, ratios.max()]
    assert all(first <= second + rounding for first, second in itertools.pairwise(ordered))


def alike(count: int, neighbours: float, generator: np.random.Generator) -> np.ndarray:
    """Heavy-tailed values around 1, each related to the one before."""
    values = 0.01 * generator.standard_t(2.5, count)
    for index in range(1, count):
        values[index] = neighbours * values[index - 1] + math.sqrt(1 - neighbours**2) * values[index]
    return 1 + values


@pytest.mark.parametrize("count", [10, 30])
@pytest.mark.parametrize(("neighbours", "most_missed"), [(0.0, 0.055), (0.2, 0.085), (0.4, 0.14)])
def test_it_misses_the_truth_as_rarely_as_it_says(count: int, neighbours: float, most_missed: float) -> None:
    """600 experiments; 95% means 5%. Rounds that are alike cost some of it where there are few of them."""
    generator = np.random.default_rng(count)
    missed = sum(median_interval(alike(count, neighbours, generator)).excludes(1.0) for _ in range(600))
    assert missed <= 600 * most_missed


def test_independent_rounds_have_the_sign_test_s_ranks() -> None:
    """Of 10 values the second and the ninth: between them the median lies in 97.9% of experiments."""
    values = [5.0, 1.0, 6.0, 2.0, 7.0, 3.0, 8.0, 4.0, 10.0, 0.5]
    assert median_interval(values) == Interval(4.5, 1.0, 8.0)


@pytest.mark.parametrize(
    ("interval", "noise", "expected"),
    [
        (Interval(0.9, 0.89, 0.91), 0.001, Verdict.FASTER),
        (Interval(1.1, 1.09, 1.11), 0.001, Verdict.SLOWER),
        (Interval(0.99, 0.97, 1.01), 0.0, Verdict.TIE),  # the interval holds 1
        (Interval(0.998, 0.997, 0.999), 0.003, Verdict.TIE),  # sure of it, but an A/A pair differs as much
    ],
)
def test_verdicts(interval: Interval, noise: float, expected: Verdict) -> None:
    assert statistics.verdict(interval, noise) is expected


@given(st.floats(0.99, 1.01), st.floats(0.0001, 0.01), st.floats(0.0, 0.01))
def test_what_is_detectable_gets_a_verdict_and_less_does_not(middle: float, half: float, noise: float) -> None:
    least = statistics.detectable(Interval(middle, middle - half, middle + half), noise)

    def at(factor: float) -> Verdict:
        return statistics.verdict(Interval(middle * factor, (middle - half) * factor, (middle + half) * factor), noise)

    assert at(1 - least - 1e-6) is Verdict.FASTER
    assert at(1 + least + 1e-6) is Verdict.SLOWER
    if least > 1e-6:
        assert Verdict.TIE in {at(1 - least + 1e-6), at(1 + least - 1e-6)}


def test_the_quotient_of_two_intervals_holds_all_that_both_allow() -> None:
    found = statistics.quotient(Interval(2.0, 1.9, 2.2), Interval(1.0, 0.8, 1.1))
    assert (found.median, found.low, found.high) == (2.0, 1.9 / 1.1, 2.2 / 0.8)


def test_one_alias_says_no_more_than_its_own_interval() -> None:
    assert noise_interval([]) is noise_interval([None, None]) is None
    alias = Interval(1.02, 1.01, 1.03)
    found = noise_interval([None, alias])
    assert found is not None
    assert found.median == pytest.approx(1.02**0.5), "half way between the alias and the baseline, which is 1"
    assert (found.low, found.high) == (min(alias.low, found.median), alias.high)


@given(st.lists(st.floats(0.8, 1.25), min_size=2, max_size=5), st.floats(0.0, 0.05))
def test_it_is_as_wide_as_every_alias_and_reaches_1_where_they_scatter(medians: list[float], half: float) -> None:
    aliases = [Interval(median, median - half, median + half) for median in medians]
    found = noise_interval(aliases)
    assert found is not None
    assert found.low <= min(alias.low for alias in aliases) + 1e-9
    assert found.high >= max(alias.high for alias in aliases) - 1e-9


@pytest.mark.parametrize("aliases", [2, 3])
def test_it_holds_the_ratio_of_one_more_process_as_often_as_it_says(aliases: int) -> None:
    """2,000 machines on which each process has a speed of its own; samples that tell everything."""
    generator, missed = np.random.default_rng(aliases), 0
    for _ in range(2000):
        baseline, *others, one_more = np.exp(0.01 * generator.standard_normal(aliases + 2))
        found = noise_interval([Interval(*3 * (float(other / baseline),)) for other in others])
        assert found is not None
        missed += found.excludes(float(one_more / baseline))
    assert 0.03 * 2000 < missed < 0.07 * 2000
