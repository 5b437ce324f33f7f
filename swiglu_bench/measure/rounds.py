"""Interleaved rounds: every contender once a round, in an order shuffled per round, so that drift hits all alike."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiglu_bench.measure.clock import Clock, Sample
from swiglu_bench.measure.statistics import Interval, ratio_interval

RETRIES = 3
"""How often a sample with a gap in the queue is taken again, behind a longer spin, before it is kept and marked."""


@dataclass(frozen=True)
class Contender:
    """A name and a function that prepares one call untimed (inputs of that round, a fresh forward) and returns it."""

    name: str
    prepare: Callable[[int], Callable[[], Any]]


@dataclass(frozen=True)
class Rule:
    """When to stop: after `min_rounds`, once every ratio is known to `precision`, or budget or rounds are spent."""

    warmup_rounds: int = 3
    """Run first and not kept: caches fill, clocks settle."""
    min_rounds: int = 10
    max_rounds: int = 200
    budget_s: float = 10.0
    precision: float = 0.005
    """Half-width of the ratio's 95% interval, relative to the ratio."""


@dataclass
class Timing:
    """The samples of one contender, in order of rounds."""

    samples: list[Sample] = field(default_factory=list)
    failure: BaseException | None = None
    """What it raised, if it did; it then takes no further part."""

    @property
    def ms(self) -> list[float]:
        """Time of each sample."""
        return [sample.ms for sample in self.samples]


@dataclass(frozen=True)
class Rounds:
    """All samples of one set of contenders."""

    timings: dict[str, Timing]
    stopped_by: str
    """precision | budget | rounds"""

    def ratio(self, name: str, baseline: str) -> Interval | None:
        """Per-round ratio of a contender to a baseline: median and 95% bootstrap interval; None without samples."""
        mine, base = self.timings[name], self.timings[baseline]
        if mine.failure or base.failure or not mine.samples:
            return None
        return ratio_interval(mine.ms, base.ms)


def run_rounds(
    contenders: Sequence[Contender],
    clock: Clock,
    rule: Rule,
    *,
    baseline: str | None = None,
    seed: int = 0,
    before_inspection: Callable[[int], None] = lambda number: None,
    inspect: Callable[[str, int, Any], None] | None = None,
    inspected_rounds: int = 1,
    on_round: Callable[[int], None] | None = None,
) -> Rounds:
    """Time all contenders in interleaved rounds.

    `inspect(name, round, result)` sees what the calls of the last `inspected_rounds` rounds returned, each before the
    next call; which rounds are the last is not known to any contender. `before_inspection(round)` is called before each
    call that will be inspected is prepared. `on_round` is called after each round.
    """
    shuffle = random.Random(seed)
    timings = {contender.name: Timing() for contender in contenders}
    lead_us = dict.fromkeys(timings, 100.0)

    def play(number: int, keep: bool, look: bool) -> None:
        for contender in shuffle.sample(contenders, len(contenders)):
            timing = timings[contender.name]
            if timing.failure:
                continue
            if look:
                before_inspection(number)
            try:
                sample = _take(contender, clock, number, lead_us)
                if look and inspect:
                    inspect(contender.name, number, sample.result)
            except Exception as error:  # a contender may raise anything; the others go on
                timing.failure = error
                continue
            if keep:
                timing.samples.append(dataclasses.replace(sample, result=None))
            del sample  # or the next contender could find this one's answer to the same question

    for number in range(rule.warmup_rounds):
        play(number, keep=False, look=False)
    began, number, last, stopped_by = time.perf_counter(), 0, 0, ""
    while not stopped_by or number < last:
        play(number, keep=True, look=bool(stopped_by))
        number += 1
        if on_round:
            on_round(number)
        if not stopped_by:
            last = number + inspected_rounds
            stopped_by = _stop(timings, rule, baseline, number, last, time.perf_counter() - began)
    return Rounds(timings, stopped_by)


def _take(contender: Contender, clock: Clock, number: int, lead_us: dict[str, float]) -> Sample:
    for _ in range(RETRIES):
        call = contender.prepare(number)
        sample = clock.sample(call, lead_us[contender.name])
        lead_us[contender.name] = max(0.8 * lead_us[contender.name], 1.2 * sample.host_us)
        if sample.queue_filled:
            break
        lead_us[contender.name] *= 2
    return sample


def _stop(timings: dict[str, Timing], rule: Rule, baseline: str | None, number: int, last: int, spent_s: float) -> str:
    """Why to stop after this many rounds, or "" to go on. The inspected rounds follow and bring it to `last`."""
    if last < rule.min_rounds:
        return ""
    if last >= rule.max_rounds:
        return "rounds"
    if spent_s * last / number >= rule.budget_s:
        return "budget"
    if number % 5:
        return ""
    working = {name: timing.ms for name, timing in timings.items() if not timing.failure}
    base = working.get(baseline or "")
    if base is None or len(working) == 1:  # no ratios: the times themselves have to be known
        intervals = [ratio_interval(ms, [1.0] * len(ms)) for ms in working.values()]
    else:
        intervals = [ratio_interval(ms, base) for name, ms in working.items() if name != baseline]
    precise = all(interval.half_width <= rule.precision * interval.median for interval in intervals)
    return "precision" if precise else ""
