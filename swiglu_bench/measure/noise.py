"""How often this machine reports a difference where there is none, and how small a difference it can detect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiglu_bench.measure.clock import Clock
from swiglu_bench.measure.rounds import Contender, Rule, run_rounds
from swiglu_bench.measure.statistics import Interval, Verdict, detectable, percentile, verdict


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
    contenders = [Contender(name, lambda number: call) for name in ("baseline", "twin", "contender")]
    rounds = run_rounds(contenders, clock, rule, baseline="baseline", seed=seed)
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
    """Pairs whose 95% interval excludes 1; at most 5% are to be expected."""
    half_width: float
    """Median half-width of the interval."""
    detectable: tuple[float, float]
    """The difference that 80% of the pairs would have shown, and that 95% would have."""


def summarise(pairs: Sequence[Pair]) -> Summary:
    """Count false positives and condense the pairs to a few figures."""
    least = [pair.detectable for pair in pairs]
    return Summary(
        pairs=len(pairs),
        false_positives=sum(pair.verdict is not Verdict.TIE for pair in pairs),
        excluding_1=sum(pair.ratio.excludes(1.0) for pair in pairs),
        half_width=percentile([pair.ratio.half_width for pair in pairs], 50),
        detectable=(percentile(least, 80), percentile(least, 95)),
    )
