"""Equal contenders on a simulated machine: its clock drifts, neighbours in time are alike, and processes differ."""

import numpy as np
import pytest
from specimens import a_bare_record

from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rule, TimedCall, run_rounds
from swiglu_bench.measure.statistics import noise_interval
from swiglu_bench.rows.record import Record
from swiglu_bench.tasks.noise import judged, summarise

pytestmark = pytest.mark.timed

PAIRS = 200
NAMES = ("baseline", "twin 1", "twin 2", "twin 3", "contender")


class SimulatedMachine:
    """A call of about 2 ms.

    Each sample: a drift that all share (5% in all), its own noise (0.7%, Student's t with 3 degrees of freedom), what
    is left of the sample before (`alike`), and now and then an interruption. `apart`: how far each process is off.
    """

    def __init__(self, alike: float, apart: float, seed: int = 0) -> None:
        self.generator = np.random.default_rng(seed)
        self.now_s, self.before = 0.0, 0.0
        self.alike, self.apart = alike, apart

    def pair(self, rule: Rule, seed: int) -> Record:
        """One A/A pair, in processes of its own."""
        off = dict(zip(NAMES, np.exp(self.apart * self.generator.standard_normal(len(NAMES))), strict=True))

        def contender(name: str) -> TimedCall:
            return TimedCall(name, lambda number, lead_us: self.sample(off[name]))

        contenders = [contender(name) for name in NAMES]
        rounds = run_rounds(contenders, rule, baseline="baseline", seed=seed, now=lambda: self.now_s)
        ratio = rounds.ratio("contender", "baseline")
        noise = noise_interval([rounds.ratio(name, "baseline") for name in NAMES[1:4]])
        assert ratio
        assert noise
        return judged(a_bare_record(), rounds.timings["baseline"].ms, ratio, noise.noise)

    def sample(self, off: float) -> Sample:
        own = 0.007 * self.generator.standard_t(3) + (0.5 if self.generator.random() < 0.01 else 0.0)
        self.before = self.alike * self.before + (1 - self.alike**2) ** 0.5 * own
        ms = 2.0 * off * (1 + 0.05 * np.sin(self.now_s / 0.7) + self.before)
        self.now_s += ms / 1e3 + 5e-4
        return Sample(ms, 50.0, 50.0, True, None)


@pytest.mark.parametrize("apart", [0.0, 0.01, 0.2], ids=["equal processes", "1% apart", "20% apart"])
@pytest.mark.parametrize("alike", [0.0, 0.5], ids=["independent samples", "samples like their neighbours"])
def test_at_most_one_in_twenty_equal_pairs_gets_a_verdict(alike: float, apart: float) -> None:
    machine = SimulatedMachine(alike, apart)
    pairs = [machine.pair(Rule(min_rounds=30, max_rounds=60, min_s=0.0), seed) for seed in range(PAIRS)]
    summary = summarise(pairs)
    assert summary.false_positives <= 0.05 * PAIRS
    if apart == 0.0:
        assert summary.detectable[0] < 0.02
    if apart == 0.2:
        assert summary.excluding_1 > 0.5 * PAIRS, "intervals alone would call most of them different"
