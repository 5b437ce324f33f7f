"""How often this machine sees a difference where there is none, and how small a difference it can see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiglu_bench.measure.clock import Clock
from swiglu_bench.measure.rounds import Contender, Rule, run_rounds
from swiglu_bench.measure.statistics import Interval, Verdict, detectable, percentile, verdict

SEEN_BY = (80, 95)
"""Percent of pairs in which the smallest detectable difference would have been seen."""


@dataclass(frozen=True)
class Pair:
    """One A/A pair, judged as a sweep judges a contender."""

    time_ms: float
    ratio: Interval
    """Of a call to itself under another name."""
    noise: float
    """How far from 1 the interval of another such pair in the same rounds reaches."""
    rounds: int
    stopped_by: str

    @property
    def verdict(self) -> Verdict:
        """Anything but a tie is a false positive."""
        return verdict(self.ratio, self.noise)

    @property
    def detectable(self) -> float:
        """The least true difference that this pair would have shown, faster or slower."""
        return detectable(self.ratio, self.noise)


def measure_pair(call: Callable[[], object], clock: Clock, rule: Rule, seed: int) -> Pair:
    """Time one call under three names: a baseline, its twin and a contender."""

    def prepare(number: int) -> Callable[[], object]:
        del number
        return call

    names = ("baseline", "twin", "contender")
    rounds = run_rounds([Contender(name, prepare) for name in names], clock, rule, baseline="baseline", seed=seed)
    for timing in rounds.timings.values():
        if timing.failure:
            raise timing.failure
    ratio, twin = rounds.ratio("contender", "baseline"), rounds.ratio("twin", "baseline")
    assert ratio
    assert twin
    baseline_ms = rounds.timings["baseline"].ms
    return Pair(percentile(baseline_ms, 50), ratio, twin.noise, len(baseline_ms), rounds.stopped_by)


@dataclass(frozen=True)
class Summary:
    """What many pairs say about a machine."""

    pairs: int
    false_positives: int
    """Pairs with a verdict other than tie."""
    excluding_1: int
    """Pairs whose 95% interval excludes 1; 5% are to be expected at most."""
    half_width: float
    """Median half-width of the interval."""
    detectable: tuple[float, ...]
    """The difference that is seen in 80% and in 95% of the pairs."""


def summarise(pairs: Sequence[Pair]) -> Summary:
    """Count and condense."""
    least = [pair.detectable for pair in pairs]
    return Summary(
        pairs=len(pairs),
        false_positives=sum(pair.verdict is not Verdict.TIE for pair in pairs),
        excluding_1=sum(pair.ratio.excludes(1.0) for pair in pairs),
        half_width=percentile([pair.ratio.half_width for pair in pairs], 50),
        detectable=tuple(percentile(least, share) for share in SEEN_BY),
    )
