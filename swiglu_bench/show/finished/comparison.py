"""Row by row, the quotient of two runs with an interval, and what it amounts to.

Two runs are two processes at two moments: there are no common rounds, so nothing of them can be paired. What can be is,
in each run by itself, the rounds of a contender and of the baseline. So the figure compared is by default the median
ratio to the baseline: what the machine did between the runs (another clock, a warmer card) hits both and cancels. It
cannot be that where the runs have different baselines, and for the baseline itself; these are compared by time.

The interval of the quotient B/A is made of the ends of two 97.5% intervals, one per run, and reaches at least as far
as the A/A pairs of both runs do. A change is believed only if all of that lies on one side of 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.measure.statistics import Interval, median_interval, quotient
from swiglu_bench.rows.finished_run import FinishedRun, case_label, case_of, kept_ratio, latest
from swiglu_bench.rows.record import Record, Status, unique
from swiglu_bench.show.finished.circumstances import circumstances

EACH = 0.975
"""Confidence of each run's interval, for 95% of their quotient's."""
FEWEST_ROUNDS = 7
"""Of fewer samples not even the smallest and the largest enclose the median with that confidence."""


class ChangeKind(StrEnum):
    """What a row amounts to."""

    FASTER = "faster"
    SLOWER = "slower"
    TIE = "tie"
    """Equal to within what is tolerated, and surely so."""
    UNCLEAR = "unclear"
    LESS = "less"
    MORE = "more"
    """Memory."""
    BROKEN = "broken"
    """It was ok and is not any more."""
    MENDED = "mended"
    DRIFT = "drift"
    """The baseline's time, which depends on the machine as much as on the code, and is not judged."""


class Outcome(StrEnum):
    """Whether a row keeps a change from going in."""

    FINE = "fine"
    REGRESSION = "regression"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True)
class Change:
    """One implementation at one case in both runs."""

    case: tuple[Any, ...]
    implementation: str
    figure: str
    """What `before` and `after` are: `ratio`, `time_ms`, `peak_bytes`, `saved_bytes`, `error_ratio`, or `status`."""
    before: float | None
    after: float | None
    quotient: Interval | None
    """B/A; below 1 is faster, or less."""
    verdict: ChangeKind
    outcome: Outcome
    remark: str = ""


@dataclass(frozen=True)
class Comparison:
    """All rows that both runs have, and what a reader has to know before believing them."""

    before: FinishedRun
    after: FinishedRun
    by: str
    """ratio, time, memory or status."""
    tolerance: float
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst of all rows: a regression is worse than not knowing."""
        found = {change.outcome for change in self.changes}
        return next((one for one in (Outcome.REGRESSION, Outcome.UNKNOWN) if one in found), Outcome.FINE)


def compare(before: FinishedRun, after: FinishedRun, tolerance: float, by: str = "auto") -> Comparison:
    """Compare two runs by `ratio`, `time` or what suits them (`auto`); `tolerance` is 0.02 for a regression of 2%.

    Raises BadInput where they measured different things: other scopes or modes, times and memory, no case in common.
    """
    runs = (before, after)
    kind = _kind(before, after)
    mine, theirs = ({(case_of(r), r.implementation): r for r in latest(run.records)} for run in runs)
    common = [key for key in theirs if key in mine]
    if not common:
        raise BadInput(
            f"{before.name} and {after.name} have no case and implementation in common; compare two that do."
        )
    baselines = [{r.baseline for r in run.records if r.baseline} for run in runs]
    if by == "ratio" and baselines[0] != baselines[1]:
        names = " and ".join(", ".join(sorted(names)) or "none" for names in baselines)
        raise BadInput(f"--by ratio: the runs have different baselines ({names}); compare them by time.")
    same_baseline = baselines[0] == baselines[1] and len(baselines[0]) == 1
    if kind == "time":
        kind = by if by != "auto" else "ratio" if same_baseline else "time"

    changes: list[Change] = []
    for case, name in common:
        a, b = mine[case, name], theirs[case, name]
        if a.status is not Status.OK or b.status is not Status.OK:
            changes += _of_status(a, b)
        elif kind == "memory":
            changes += _of_memory(a, b, tolerance)
        elif kind == "status":
            both = (a.error_ratio, b.error_ratio)
            changes.append(Change(case, name, "error_ratio", *both, None, ChangeKind.TIE, Outcome.FINE))
        elif a.time_ms is not None and b.time_ms is not None:
            partners = (mine.get((case, a.baseline)), theirs.get((case, b.baseline)))
            changes.append(_of_time(a, b, *partners, kind, tolerance))
    drift = [one.quotient.median for one in changes if one.verdict is ChangeKind.DRIFT and one.quotient]
    warnings = (*circumstances(before, after, kind, drift), *_unmatched(mine, theirs))
    return Comparison(before, after, kind, tolerance, tuple(changes), warnings)


def _kind(before: FinishedRun, after: FinishedRun) -> str:
    """What the runs have measured; raises BadInput where it is not the same."""
    for column in ("scope", "mode"):
        sets = [sorted({str(getattr(record, column)) for record in run.records}) for run in (before, after)]
        if sets[0] != sets[1]:
            one, other = (", ".join(names) or "nothing" for names in sets)
            raise BadInput(
                f"The runs have different {column}s: {one} ({before.name}) and {other} ({after.name}); "
                f"choose what both have with --{column}."
            )
    kinds = [_measured(run) for run in (before, after)]
    if kinds[0] != kinds[1]:
        raise BadInput(
            f"{before.name} has {kinds[0]}, {after.name} has {kinds[1]}; compare two runs of the same command."
        )
    return kinds[0]


def _measured(run: FinishedRun) -> str:
    if any(record.time_ms is not None for record in run.records):
        return "time"
    return "memory" if any(record.peak_bytes is not None for record in run.records) else "status"


def _of_status(a: Record, b: Record) -> Iterator[Change]:
    """A row that is not ok in one of the runs."""
    change = Change(case_of(b), b.implementation, "status", None, None, None, ChangeKind.MENDED, Outcome.FINE)
    if a.status is not Status.OK:
        if b.status is Status.OK:
            yield dataclasses.replace(change, remark=f"was {a.status}: {a.reason}")
        return
    verdict, outcome = ChangeKind.UNCLEAR, Outcome.UNKNOWN
    if b.status in {Status.INCORRECT, Status.ERROR}:
        verdict, outcome = ChangeKind.BROKEN, Outcome.REGRESSION
    yield dataclasses.replace(change, verdict=verdict, outcome=outcome, remark=f"{b.status}: {b.reason}")


def _of_memory(a: Record, b: Record, tolerance: float) -> Iterator[Change]:
    """Bytes are counted, not sampled: what differs differs."""
    for figure in ("saved_bytes", "peak_bytes"):
        old, new = getattr(a, figure), getattr(b, figure)
        if old is None or new is None:
            continue
        times = new / old if old else float("inf") if new else 1.0
        outcome = Outcome.REGRESSION if times > 1 + tolerance else Outcome.FINE
        verdict = ChangeKind.TIE if old == new else ChangeKind.LESS if new < old else ChangeKind.MORE
        between = Interval(times, times, times)
        yield Change(case_of(b), b.implementation, figure, old, new, between, verdict, outcome)


def _of_time(a: Record, b: Record, base_a: Record | None, base_b: Record | None, by: str, tolerance: float) -> Change:
    is_baseline = b.implementation == b.baseline
    figure, old, new = "time_ms", _time(a), _time(b)
    floor, remark = _floor(a, b)
    if by == "ratio" and not is_baseline:
        ratio_a, ratio_b = kept_ratio(a, base_a, EACH), kept_ratio(b, base_b, EACH)
        if ratio_a and ratio_b:
            figure, old, new = "ratio", ratio_a, ratio_b
        else:
            remark = "by time: it has no ratio to the baseline in both runs"
    if by == "time" and not is_baseline and base_a and base_b and base_a.time_ms and base_b.time_ms:
        drift = base_b.time_ms / base_a.time_ms
        floor = max(floor, drift - 1, 1 / drift - 1)
        remark = f"{b.baseline} itself changed x{drift:.3f}"
    found = reaching(quotient(new, old), floor)
    verdict, outcome = judge(found, tolerance)
    few = min(a.rounds or 0, b.rounds or 0)
    if few < FEWEST_ROUNDS:
        verdict, outcome, remark = ChangeKind.UNCLEAR, Outcome.UNKNOWN, f"{few} rounds are too few for an interval"
    if figure == "time_ms" and any(one.time_p10_ms is None for one in (a, b)):
        verdict, outcome, remark = ChangeKind.UNCLEAR, Outcome.UNKNOWN, "the spread of its times was not kept"
    if by == "ratio" and is_baseline:
        verdict, outcome = ChangeKind.DRIFT, Outcome.FINE
    return Change(case_of(b), b.implementation, figure, old.median, new.median, found, verdict, outcome, remark)


def _time(record: Record) -> Interval:
    """The median time; without samples, from the 10th to the 90th percentile, which is far wider than need be."""
    if record.samples_ms:
        return median_interval(record.samples_ms, EACH)
    assert record.time_ms is not None
    return Interval(record.time_ms, record.time_p10_ms or record.time_ms, record.time_p90_ms or record.time_ms)


def _floor(a: Record, b: Record) -> tuple[float, str]:
    """How far from 1 the noise of both runs may bring a quotient, by their A/A pairs; and which of them is missing."""
    known = [record.noise for record in (a, b) if record.noise is not None]
    if not known:
        return 0.0, "no A/A pair"
    one, other = (known * 2)[:2]  # the noise of a run without a pair is taken for the other's
    return (1 + one) * (1 + other) - 1, "" if len(known) == 2 else "one run has no A/A pair"


def reaching(found: Interval, floor: float) -> Interval:
    """The interval, extended so that it reaches at least `floor` to either side of its median."""
    low, high = found.median / (1 + floor), found.median * (1 + floor)
    return Interval(found.median, min(found.low, low), max(found.high, high))


def judge(found: Interval, tolerance: float) -> tuple[ChangeKind, Outcome]:
    """A quotient's verdict, and whether it is a regression beyond `tolerance`."""
    limit = 1 + tolerance
    outcome = Outcome.FINE if found.high <= limit else Outcome.REGRESSION if found.low > limit else Outcome.UNKNOWN
    if found.excludes(1.0):
        return (ChangeKind.FASTER if found.median < 1 else ChangeKind.SLOWER), outcome
    return (ChangeKind.TIE if found.high <= limit and found.low >= 1 / limit else ChangeKind.UNCLEAR), outcome


def _unmatched(mine: dict[Any, Record], theirs: dict[Any, Record]) -> Iterator[str]:
    """Which rows only one run has."""
    for which, rows, others in (("first", mine, theirs), ("second", theirs, mine)):
        alone = [row for key, row in rows.items() if key not in others and row.status is not Status.SKIPPED]
        if alone:
            names = ", ".join(unique(row.implementation for row in alone))
            yield f"Only the {which} run has {len(alone)} rows, such as {case_label(case_of(alone[0]))}, of {names}."
