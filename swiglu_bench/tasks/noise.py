"""The task `noise`: how often this machine reports a difference where there is none, and the least that it detects."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.measure.rounds import run_rounds
from swiglu_bench.measure.statistics import Interval, Verdict, detectable, noise_interval, percentile, verdict
from swiglu_bench.tasks.case import TWINS
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.turns import RoundJudge, contender_of

PAIRS_OF_A_CREW = 10
"""Pairs for which the same processes are used: new ones may be slower or faster."""


@dataclass(frozen=True)
class Pair:
    """One A/A pair, judged as a sweep judges a contender."""

    time_ms: float
    ratio: Interval
    """The ratio of an implementation to itself in another process."""
    noise: float
    """How far from 1 the interval of a further such process reaches, by the baseline's twins."""
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


def noise(court: Court, case: Case, implementations: Sequence[Implementation]) -> Iterator[Pair]:
    """A/A pairs of one implementation without end: a baseline, its twins and a contender, all the same.

    Which process has which role is drawn by lot. Raises what a contender's process raises.
    """
    (implementation,) = implementations
    while True:
        contenders = _built(court, case, implementation)
        for _ in range(PAIRS_OF_A_CREW):
            yield _pair(court, case, contenders)
        for contender in contenders:
            contender.end()


def _built(court: Court, case: Case, implementation: Implementation) -> list[Contender]:
    members = [(implementation, role) for role in ("", *TWINS, "contender")]
    court.start(members, case)
    contenders = [court.contender(*member) for member in members]
    drawn = Drawn.new()
    reason = court.judge.begin_case(case, drawn.weights)
    for draw in drawn.draws:
        reason = reason or court.judge.truth(draw, False)
    if reason:
        raise RuntimeError(reason)
    admitting = Admitting(court, case, drawn)
    for contender in contenders:
        admitting.build(contender)
    return contenders


def _pair(court: Court, case: Case, contenders: Sequence[Contender]) -> Pair:
    lot = random.SystemRandom()
    baseline, contender, *twins = lot.sample(contenders, len(contenders))
    judge = RoundJudge(court, lambda name: ("output",), full_share=0.0)
    timed = [contender_of(each, judge, led=case.mode) for each in contenders]
    with court.held():
        rounds = run_rounds(
            timed, court.settings.rule, baseline=baseline.name, seed=lot.getrandbits(31),
            on_round=lambda number: judge.judge() or None,
        )  # fmt: skip
    for timing in rounds.timings.values():
        if timing.failure:
            raise timing.failure
    ratio = rounds.ratio(contender.name, baseline.name)
    floor = noise_interval([rounds.ratio(twin.name, baseline.name) for twin in twins])
    assert ratio
    assert floor
    times = rounds.timings[baseline.name].ms
    return Pair(percentile(times, 50), ratio, floor.noise, len(times), rounds.stopped_by)


@dataclass(frozen=True)
class Summary:
    """What many pairs say about a machine."""

    pairs: int
    false_positives: int
    """Pairs with a verdict other than tie."""
    excluding_1: int
    """Pairs whose 95% interval excludes 1: processes differ by more than their samples tell."""
    half_width: float
    """Median half-width of the interval."""
    noise: float
    """Median noise by the baseline's twins."""
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
        noise=percentile([pair.noise for pair in pairs], 50),
        detectable=(percentile(least, 80), percentile(least, 95)),
    )
