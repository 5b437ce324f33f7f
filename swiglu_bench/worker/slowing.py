"""Whether a contender makes others slow: the baseline's time alone, beside the others, and without one of them.

A process that stands still cannot use a CPU. What it has queued on a GPU goes on, which those notice that come next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from swiglu_bench.check.inputs import Draw, new_seed
from swiglu_bench.measure.statistics import percentile
from swiglu_bench.worker.places import Contender
from swiglu_bench.worker.reports import SampleReport

WARMUPS, SAMPLES = 3, 11
SLOWER = 1.15
FEWEST_TURNS = 6
"""After a contender, that tell anything."""


def alone_ms(baseline: Contender) -> list[float]:
    """Times of the baseline while nobody else is asked."""
    return list(islice(_times(baseline), WARMUPS, WARMUPS + SAMPLES))


def _times(contender: Contender) -> Iterator[float]:
    """Of one call after another, each on new inputs, as they are asked for."""
    lead_us, least_us = 100.0, math.inf
    while True:
        report = contender.ask(SampleReport, "sample", Draw(new_seed()), lead_us)
        least_us = min(least_us, report.queue_us)  # a call that waits for the GPU takes each spin into its next one
        lead_us = 1.2 * least_us
        yield report.ms


def slower(times: Sequence[float], before: Sequence[float]) -> bool:
    """Whether most of some times are longer than most of others, by more than noise and clocks explain."""
    return percentile(times, 25) > SLOWER * percentile(before, 75)


@dataclass(frozen=True)
class Turn:
    """One sample of the rounds, and whose turn it came after."""

    name: str
    after: str
    ms: float


def slow_the_next(turns: Sequence[Turn], equals: Collection[str]) -> list[str]:
    """Those after whose turns the next is slower than after others', the worst first.

    Only turns of `equals`, which are processes of the baseline, are looked at, each relative to its own median.
    """
    medians = {name: percentile([one.ms for one in turns if one.name == name] or [1.0], 50) for name in equals}
    seen = [(one.after, one.ms / medians[one.name]) for one in turns if one.name in medians]
    found = []
    for name in {after for after, _ in seen if after}:
        after, others = [[t for who, t in seen if (who == name) is mine] for mine in (True, False)]
        if min(len(after), len(others)) >= FEWEST_TURNS and slower(after, others):
            found.append((percentile(after, 50), name))
    return [name for _, name in sorted(found, reverse=True)]


def slows_the_next(baseline: Contender, other: Contender) -> bool:
    """Whether the baseline is slower right after a contender's turn than after one of its own."""
    after, again = [], []
    own, others = _times(baseline), _times(other)
    for _ in range(WARMUPS + SAMPLES):
        next(others)
        after.append(next(own))
        again.append(next(islice(own, WARMUPS, None)))
    return slower(after[WARMUPS:], again[WARMUPS:])


def find_culprit(
    baseline: Contender,
    others: Sequence[Contender],
    revive: Callable[[Contender], Contender | None],
    before: Sequence[float],
) -> Contender | None:
    """The contender whose process makes the baseline slower than `before`, or None.

    One after the other is ended; the baseline has to be faster without it, and slower again once it is back. `revive`
    starts and builds one again. All that were asked about have ended by then.
    """
    now = alone_ms(baseline)
    if not slower(now, before):
        return None
    for one in others:
        one.end()
        without = alone_ms(baseline)
        back = revive(one) if slower(now, without) else None
        if back:
            alone_ms(back)
            again = alone_ms(baseline)
            back.end()
            if slower(again, without):
                return one
        now = without
    return None
