"""A/A pairs on a simulated GPU: its clock drifts, its samples are heavy-tailed, and neighbours in time are alike."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from swiglu_bench.measure import rounds as rounds_module
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.noise import Pair, measure_pair, summarise
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.measure.statistics import Interval, Verdict

PAIRS = 250


class SimulatedGpu:
    """A kernel of about 2 ms on a card at its power limit.

    Each sample: a drift that all share (5% in all), its own noise (0.7%, Student's t with 3 degrees of freedom), what
    is left of the sample before (`alike`), and now and then an interruption. What a call returns scales it.
    """

    cache = "simulated"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, alike: float, noise: float = 0.007, seed: int = 0) -> None:
        self.generator = np.random.default_rng(seed)
        self.now_s = 0.0
        self.alike, self.noise = alike, noise
        self.kept: list[float] = []
        self.before = 0.0
        monkeypatch.setattr(rounds_module.time, "perf_counter", lambda: self.now_s)

    def _own(self) -> float:
        if not self.kept:
            values = self.noise * self.generator.standard_t(3, 5000)
            values[self.generator.random(5000) < 0.01] += 0.5
            self.kept = values.tolist()
        return self.kept.pop()

    def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
        self.before = self.alike * self.before + (1 - self.alike**2) ** 0.5 * self._own()
        drift = 0.05 * np.sin(self.now_s / 0.7)
        ms = 2.0 * call() * (1 + drift + self.before)
        self.now_s += ms / 1e3 + 5e-4
        return Sample(ms, 50.0, True, None)

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(
    ("alike", "rule", "most_excluding_1"),
    [
        (0.0, Rule(), 0.06),
        (0.5, Rule(), 0.06),
        (0.0, Rule(min_s=0.0), 0.07),  # stops for precision alone, which may be chance
    ],
    ids=["independent samples", "samples like their neighbours", "no least time"],
)
def test_a_pair_of_the_same_is_a_tie_and_half_a_percent_is_seen(
    monkeypatch: pytest.MonkeyPatch, alike: float, rule: Rule, most_excluding_1: float
) -> None:
    """At most 5% false positives, and with the rule of sweeps at least 80% of differences of 0.5% seen."""
    gpu = SimulatedGpu(monkeypatch, alike)
    pairs = [measure_pair(lambda: 1.0, gpu, rule, seed) for seed in range(PAIRS)]
    summary = summarise(pairs)
    assert summary.excluding_1 <= most_excluding_1 * PAIRS
    assert summary.false_positives <= 0.02 * PAIRS, "the noise floor makes verdicts surer than intervals"
    assert {pair.stopped_by for pair in pairs} == {"precision"}
    if rule == Rule():
        assert summary.half_width < 0.002
        assert summary.detectable[0] <= 0.005


def test_a_pair_holds_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu(monkeypatch, 0.0, noise=1e-6)
    pair = measure_pair(lambda: 3.0, gpu, Rule(min_rounds=20, max_rounds=20), seed=1)
    assert pair.time_ms == pytest.approx(6.0, rel=0.06)
    assert (pair.rounds, pair.stopped_by) == (20, "rounds")
    with pytest.raises(ZeroDivisionError):
        measure_pair(lambda: 1 / 0, gpu, Rule(), seed=0)


def test_pairs_are_counted() -> None:
    tie = Pair(2.0, Interval(1.0, 0.999, 1.001), 0.001, 50, "precision")
    sure_but_noisy = Pair(2.0, Interval(1.002, 1.001, 1.003), 0.004, 50, "precision")
    wrong = Pair(2.0, Interval(0.99, 0.985, 0.995), 0.001, 50, "precision")
    summary = summarise([tie, sure_but_noisy, wrong, tie])
    assert (summary.pairs, summary.false_positives, summary.excluding_1) == (4, 1, 2)
    assert wrong.verdict is Verdict.FASTER
    assert summary.half_width == pytest.approx(0.001)
    assert tie.detectable == pytest.approx(0.001001, rel=1e-2)
    assert sum(summary.detectable) > 2 * tie.detectable
