"""Interleaved rounds: each contender once a round, in an order shuffled per round, so that drift affects all alike."""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiglu_bench.measure.clock import Clock, DeviceLost, Sample
from swiglu_bench.measure.statistics import Interval, median_interval, percentile, ratio_interval

RETRIES = 3
"""Attempts at a sample without a gap in the queue, each behind a longer spin; the last one is kept and marked.

A contender for which all of them failed has one attempt a round, until one succeeds."""


@dataclass
class Lead:
    """How long the spin before a contender's calls has to be."""

    us: float = 100.0
    least_us: float = math.inf
    """The host's fastest turn so far."""
    waits: bool = False
    """No spin was long enough: its call waits for the GPU, spin included, as every `.item()` does."""


@dataclass(frozen=True)
class TimedCall:
    """A contender's name, and how to take a sample of it: in a round, by a host that needs about so many us."""

    name: str
    take: Callable[[int, float], Sample]
    lead: Lead = field(default_factory=Lead)
    """It goes on from one set of rounds to the next."""


def on_clock(name: str, clock: Clock, prepare: Callable[[int], Callable[[], Any]]) -> TimedCall:
    """A contender in this process: `prepare` readies the call of a round untimed and returns it."""
    return TimedCall(name, lambda number, lead_us: clock.sample(prepare(number), lead_us))


@dataclass(frozen=True)
class Rule:
    """When to stop: once every ratio is known to `precision`, or the budget or the rounds are spent.

    `min_s` gives short cases more rounds than `precision` asks for: clocks and power vary over some hundred
    milliseconds, and stopping at a fixed time does not depend on the samples, as stopping for precision does.
    """

    warmup_rounds: int = 3
    """Rounds that run first and are not kept: caches fill, clocks settle."""
    min_rounds: int = 10
    """At least these, whatever the budget."""
    max_rounds: int = 500
    min_s: float = 2.0
    """Precision does not stop the rounds earlier."""
    budget_s: float = 10.0
    precision: float = 0.005
    """Half-width of the ratio's 95% interval, relative to the ratio."""
    rest_s: float = 0.0
    """Pause before each sample, in which the device cools; 0: the steady state without pauses."""


@dataclass
class Timing:
    """The samples of one contender, in order of rounds."""

    samples: list[Sample] = field(default_factory=list)
    failure: BaseException | None = None
    """The exception that it raised, if any; it then takes no further part."""

    @property
    def ms(self) -> list[float]:
        """Time of each sample."""
        return [sample.ms for sample in self.samples]

    @property
    def cycles(self) -> list[float]:
        """Thousands of cycles of each sample; empty where the clock of one is not known."""
        found = [sample.ms * sample.mhz for sample in self.samples if sample.mhz]
        return found if len(found) == len(self.samples) else []


@dataclass(frozen=True)
class Rounds:
    """All samples of one set of contenders."""

    timings: dict[str, Timing]
    stopped_by: str
    """precision | budget | rounds"""

    def as_many(self, rule: Rule) -> Rule:
        """The rule for as many rounds again, without a warm-up."""
        most = max(len(timing.samples) for timing in self.timings.values())
        return dataclasses.replace(rule, warmup_rounds=0, min_rounds=most, max_rounds=most, budget_s=0.0)

    def ratio(self, name: str, baseline: str, in_cycles: bool = False) -> Interval | None:
        """Per-round ratio of a contender to a baseline: median and 95% interval; None without samples.

        `in_cycles` of the GPU's clock, which differs from call to call where it is not locked; None without one.
        """
        mine, base = self.timings[name], self.timings[baseline]
        if mine.failure or base.failure or not mine.samples:
            return None
        values, others = (mine.cycles, base.cycles) if in_cycles else (mine.ms, base.ms)
        return ratio_interval(values, others) if values and others else None

    def note(self, name: str, row: Any) -> None:
        """Enter a contender's median and spread into a Record, and how they were measured; it must have samples."""
        timing = self.timings[name]
        row.time_ms = percentile(timing.ms, 50)
        row.time_p10_ms, row.time_p90_ms = percentile(timing.ms, 10), percentile(timing.ms, 90)
        row.rounds, row.stopped_by = len(timing.samples), self.stopped_by
        row.host_us = percentile([sample.host_us for sample in timing.samples], 50)
        row.queue_filled = sum(sample.queue_filled for sample in timing.samples) / len(timing.samples)


def run_rounds(
    contenders: Sequence[TimedCall],
    rule: Rule,
    *,
    baseline: str | None = None,
    seed: int = 0,
    before_inspection: Callable[[int], None] = lambda number: None,
    inspect: Callable[[str, int, Any], None] | None = None,
    on_round: Callable[[int], Mapping[str, Exception] | None] = lambda number: None,
    now: Callable[[], float] | None = None,
    device_works: Callable[[], bool] = lambda: True,
) -> Rounds:
    """Time all contenders in interleaved rounds.

    `inspect(name, round, result)` sees what the calls of the last round returned, each before the next call; no
    contender can know which round is the last. `before_inspection(round)` is called before each of these calls is
    prepared. `on_round` is called after each round, warm-up included (negative numbers); contenders that it returns
    take no further part. `now` returns the seconds that the rule counts, by default those of the wall clock. Raises
    DeviceLost where a contender fails and `device_works` says that it broke the device for all.
    """
    now = now or time.perf_counter
    shuffle = random.Random(seed)
    timings = {contender.name: Timing() for contender in contenders}

    def play(number: int, keep: bool, inspected: bool) -> None:
        for contender in shuffle.sample(contenders, len(contenders)):
            timing = timings[contender.name]
            if timing.failure:
                continue
            if rule.rest_s:
                time.sleep(rule.rest_s)
            if inspected:
                before_inspection(number)
            try:
                sample = _take(contender, number)
                if inspected and inspect:
                    inspect(contender.name, number, sample.result)
            except Exception as error:  # a contender may raise anything; the others go on
                if not device_works():
                    raise DeviceLost(f"{type(error).__name__}: {error}") from error
                timing.failure = error
                continue
            if keep:
                timing.samples.append(dataclasses.replace(sample, result=None))
            del sample  # or the next contender could find this one's result in memory
        for name, failure in (on_round(number) or {}).items():
            timings[name].failure = timings[name].failure or failure

    for number in range(-rule.warmup_rounds, 0):
        play(number, keep=False, inspected=False)
    began, number, next_check, stopped_by = now(), 0, rule.min_rounds, ""
    while not stopped_by:
        play(number, keep=True, inspected=False)
        number += 1
        rounds, spent_s = number + 1, now() - began  # with the inspected one
        stopped_by = _spent(rule, rounds, spent_s * rounds / number)
        if not stopped_by and rounds >= next_check and spent_s >= rule.min_s:
            next_check = math.ceil(1.25 * rounds)  # frequent checks would mistake chance for precision sooner
            if _precise(timings, rule, baseline):
                stopped_by = "precision"
    play(number, keep=True, inspected=True)
    return Rounds(timings, stopped_by)


def _take(contender: TimedCall, number: int) -> Sample:
    lead = contender.lead
    for _ in range(1 if lead.waits else RETRIES):
        sample = contender.take(number, lead.us)
        lead.least_us = min(lead.least_us, sample.queue_us)
        lead.us = max(0.8 * lead.us, 1.2 * sample.queue_us)
        if sample.queue_filled:
            break
        lead.us *= 2
    lead.waits = not sample.queue_filled
    if lead.waits:
        lead.us = 1.2 * lead.least_us  # enough for one that was only disturbed, and has a filled queue next time
    return sample


def _spent(rule: Rule, rounds: int, expected_s: float) -> str:
    """Which allowance is spent with so many rounds, which take about `expected_s`, or ""."""
    spent = "rounds" if rounds >= rule.max_rounds else "budget" if expected_s >= rule.budget_s else ""
    return spent if rounds >= rule.min_rounds else ""


def _precise(timings: dict[str, Timing], rule: Rule, baseline: str | None) -> bool:
    """Whether every ratio is known to the rule's precision; where there is no ratio, every time."""
    working = {name: timing.ms for name, timing in timings.items() if not timing.failure}
    base = working.get(baseline or "")
    if base is None or len(working) == 1:
        intervals = [median_interval(ms) for ms in working.values()]
    else:
        intervals = [ratio_interval(ms, base) for name, ms in working.items() if name != baseline]
    return all(interval.half_width <= rule.precision * interval.median for interval in intervals)
