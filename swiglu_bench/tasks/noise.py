"""The task `noise`: how often this machine reports a difference where there is none, and the least that it detects."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.measure.rounds import run_rounds
from swiglu_bench.measure.statistics import Interval, Verdict, detectable, noise_interval, percentile, verdict
from swiglu_bench.rows.record import Record
from swiglu_bench.tasks.case import TWINS
from swiglu_bench.worker import policy
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.turns import RoundJudge, contender_of

PAIRS_OF_A_CREW = 10
"""Pairs for which the same processes are used: new ones may be slower or faster."""


def noise(court: Court, case: Case, implementations: Sequence[Implementation]) -> Iterator[Record]:
    """A/A pairs of one implementation without end: a baseline, its twins and a contender, all the same.

    Which process has which role is drawn by lot. Raises what a contender's process raises.
    """
    (implementation,) = implementations
    numbers = itertools.count()
    while True:
        contenders = _built(court, case, implementation)
        for number in itertools.islice(numbers, PAIRS_OF_A_CREW):
            row = policy.blank(court.settings, court.machine, case, implementation)
            yield dataclasses.replace(_pair(court, case, contenders, row), pair=number)
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


def _pair(court: Court, case: Case, contenders: Sequence[Contender], row: Record) -> Record:
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
    row = dataclasses.replace(row, stopped_by=rounds.stopped_by)
    return judged(row, rounds.timings[baseline.name].ms, ratio, floor.noise)


def judged(row: Record, times_ms: Sequence[float], ratio: Interval, noise: float) -> Record:
    """The row of an A/A pair, judged as a sweep judges a contender: a verdict that is no tie is a false positive."""
    return dataclasses.replace(
        row, kind="noise", time_ms=percentile(times_ms, 50), rounds=len(times_ms), ratio=ratio.median,
        ratio_low=ratio.low, ratio_high=ratio.high, floor=noise, verdict=verdict(ratio, noise).value,
        detectable=detectable(ratio, noise),
    )  # fmt: skip


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


def summarise(pairs: Sequence[Record]) -> Summary:
    """Count false positives and condense the pairs to a few figures."""
    least = [pair.detectable or 0.0 for pair in pairs]
    ratios = [Interval(pair.ratio or 0.0, pair.ratio_low or 0.0, pair.ratio_high or 0.0) for pair in pairs]
    return Summary(
        pairs=len(pairs),
        false_positives=sum(pair.verdict != Verdict.TIE for pair in pairs),
        excluding_1=sum(ratio.excludes(1.0) for ratio in ratios),
        half_width=percentile([ratio.half_width for ratio in ratios], 50),
        noise=percentile([pair.floor or 0.0 for pair in pairs], 50),
        detectable=(percentile(least, 80), percentile(least, 95)),
    )
