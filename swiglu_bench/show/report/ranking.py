"""Who is fastest, and who cannot be told apart: by the intervals that the rows carry.

Two implementations tie at a case where the 95% intervals of their ratios overlap, or the ratios are no further apart
than the A/A pair's interval reaches. Against the baseline the row's own verdict counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from swiglu_bench.rows import ranking
from swiglu_bench.rows.record import Record, grouped, unique

CROWD = 8
"""More lines than these hide each other; from here on those that tie everywhere are drawn as one."""

Ratio = tuple[float, float, float]
"""The median over rounds, and the ends of its 95% interval."""


@dataclass(frozen=True)
class Place:
    """Who is first at one case."""

    shape: str
    tokens: int
    baseline: str
    best: str
    ties: tuple[str, ...]
    """The others that tie with the best; the baseline may be one."""
    ratio: Ratio
    """The best's to the baseline."""
    runner_up: str
    """The fastest that does not tie; empty where there is none."""
    longer: float
    """How much more time the runner-up takes than the best, as a share of the best's; 0 where there is none."""

    @property
    def first(self) -> tuple[str, ...]:
        """The best and all that tie with it."""
        return (self.best, *self.ties)

    @property
    def speedup(self) -> float:
        """The baseline's time / the best's."""
        return 1 / self.ratio[0]


def ranked(rows: Iterable[Record]) -> list[Record]:
    """The rows that can be ranked, the best first: right, timed, doing the baseline's work, with an interval."""
    return [row for row in ranking.ranked(rows) if row.interval]


def by_case(rows: Iterable[Record]) -> list[list[Record]]:
    """The rows that can be ranked, those of each case together, in the order of shapes and token counts."""
    cases = grouped(rows, attrgetter("shape", "tokens")).values()
    return [able for case in cases if (able := ranked(case))]


def places(rows: Iterable[Record]) -> list[Place]:
    """Who is first at every case; none where no baseline was timed."""
    return [_place(case) for case in by_case(rows) if len(case) > 1]


def tie(one: Ratio, other: Ratio, noise: float) -> bool:
    """Whether two ratios to one baseline cannot be told apart; `noise` is how far the case's A/A pair reaches."""
    overlap = one[1] <= other[2] and other[1] <= one[2]
    return overlap or abs(one[0] / other[0] - 1) <= noise


def verdict(row: Record) -> str:
    """The row's verdict against the baseline or, where an older version wrote none, what its interval says."""
    if row.verdict or not row.interval:
        return row.verdict
    _, low, high = row.interval
    return "faster" if high < 1 else "slower" if low > 1 else "tie"


def _tie(one: Record, other: Record, noise: float) -> bool:
    for row, against in ((one, other), (other, one)):
        if against.implementation == row.baseline:
            return verdict(row) == "tie"
    return bool(one.interval and other.interval and tie(one.interval, other.interval, noise))


def _noise(case: Sequence[Record]) -> float:
    """How far the case's A/A pair reaches from 1; 0 where there was no pair."""
    return next((row.noise for row in case if row.noise is not None), 0.0)


def alike(rows: Sequence[Record]) -> dict[str, list[str]]:
    """Who stands for whom where there is a crowd: implementations that tie at every case, and in peak memory to 1%.

    The baseline stands for itself alone. Without a crowd, nobody stands for anybody.
    """
    if len({row.implementation for row in rows if row.time_ms is not None}) <= CROWD:
        return {}
    cases = by_case(rows)
    able = {row.implementation for case in cases for row in case}
    baselines = {row.baseline for case in cases for row in case}
    of_case = [({row.implementation: row for row in case}, _noise(case)) for case in cases]
    standing: dict[str, list[str]] = {}
    for name in unique(row.implementation for row in rows if row.implementation in able - baselines):
        first = next((one for one in standing if all(_alike(one, name, *case) for case in of_case)), None)
        standing.setdefault(first or name, []).extend([name] if first else [])
    return {name: others for name, others in standing.items() if others}


def _alike(one: str, other: str, rows: dict[str, Record], noise: float) -> bool:
    if one not in rows or other not in rows:
        return (one in rows) == (other in rows)
    peaks = [rows[name].peak_bytes or 0 for name in (one, other)]
    return abs(peaks[0] - peaks[1]) <= 0.01 * max(peaks) and _tie(rows[one], rows[other], noise)


def _place(case: Sequence[Record]) -> Place:
    best, *others = case
    ties = [row.implementation for row in others if _tie(best, row, _noise(case))]
    rest = [row for row in others if row.implementation not in ties]
    assert best.interval
    runner_up, longer = "", 0.0
    if rest and rest[0].interval:
        runner_up, longer = rest[0].implementation, rest[0].interval[0] / best.interval[0] - 1
    return Place(
        best.shape, best.tokens, best.baseline, best.implementation, tuple(ties), best.interval, runner_up, longer
    )  # fmt: skip
