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
from typing import Any, Literal

from swiglu_bench.finished.change import By, Change, ChangeKind, Outcome
from swiglu_bench.finished.circumstances import circumstances
from swiglu_bench.measure.statistics import Interval, median_interval, quotient
from swiglu_bench.rows import rebase
from swiglu_bench.rows.finished_run import FinishedRun, case_label, case_of, latest
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.spec.errors import BadInput

EACH = 0.975
"""Confidence of each run's interval, for 95% of their quotient's."""
FEWEST_ROUNDS = 7
"""Of fewer samples not even the smallest and the largest enclose the median with that confidence."""


@dataclass(frozen=True)
class Comparison:
    """All rows that both runs have, and what a reader has to know before believing them."""

    before: FinishedRun
    after: FinishedRun
    by: By
    tolerance: float
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst of all rows: a regression is worse than not knowing."""
        found = {change.outcome for change in self.changes}
        return next((one for one in (Outcome.REGRESSION, Outcome.UNKNOWN) if one in found), Outcome.FINE)


def compare(
    before: FinishedRun, after: FinishedRun, tolerance: float, by: Literal["ratio", "time"] | None = None
) -> Comparison:
    """Compare two runs; `tolerance` is the regression that is let through, 0.02 for 2%.

    Raises BadInput where they measured different things: other scopes or modes, times and memory, no case in common.
    """
    kind = _kind(before, after)
    mine, theirs = ({(case_of(r), r.implementation): r for r in latest(run.records)} for run in (before, after))
    common = [key for key in theirs if key in mine]
    if not common:
        raise BadInput(
            f"{before.name} and {after.name} have no case and implementation in common; compare two that do."
        )
    baselines = [{r.baseline for r in run.records if r.baseline} for run in (before, after)]
    if by == "ratio" and baselines[0] != baselines[1]:
        names = " and ".join(", ".join(sorted(names)) or "none" for names in baselines)
        raise BadInput(f"--by ratio: the runs have other baselines ({names}); compare them by time.")
    same_baseline = baselines[0] == baselines[1] and len(baselines[0]) == 1
    chosen: By = kind if kind != "time" else by or ("ratio" if same_baseline else "time")
    partners = [
        {case_of(r): r for r in latest(run.records) if r.implementation == r.baseline} for run in (before, after)
    ]

    changes: list[Change] = []
    for case, name in common:
        a, b = mine[case, name], theirs[case, name]
        if a.status is not Status.OK or b.status is not Status.OK:
            changes += _of_status(a, b)
        elif chosen == "memory":
            changes += _of_memory(a, b, tolerance)
        elif chosen == "status":
            both = (a.error_ratio, b.error_ratio)
            changes.append(Change(case, name, "error_ratio", *both, None, ChangeKind.TIE, Outcome.FINE))
        elif a.time_ms is not None and b.time_ms is not None:
            changes.append(_of_time(a, b, partners[0].get(case), partners[1].get(case), chosen, tolerance))
    warnings = (*circumstances(before, after, chosen, changes), *_unmatched(mine, theirs))
    return Comparison(before, after, chosen, tolerance, tuple(changes), warnings)


def _kind(before: FinishedRun, after: FinishedRun) -> Literal["time", "memory", "status"]:
    """What the runs have measured; raises BadInput where it is not the same."""
    for column in ("scope", "mode"):
        sets = [sorted({str(getattr(record, column)) for record in run.records}) for run in (before, after)]
        if sets[0] != sets[1]:
            what = " and ".join(
                f"{', '.join(names) or 'nothing'} ({run.name})"
                for names, run in zip(sets, (before, after), strict=True)
            )
            raise BadInput(f"The runs have other {column}s: {what}; choose what both have with --{column}.")
    kinds = [_measured(run) for run in (before, after)]
    if kinds[0] != kinds[1]:
        raise BadInput(
            f"{before.name} has {kinds[0]}, {after.name} has {kinds[1]}; compare two runs of the same command."
        )
    return kinds[0]


def _measured(run: FinishedRun) -> Literal["time", "memory", "status"]:
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
    broken = b.status in {Status.INCORRECT, Status.ERROR}
    yield dataclasses.replace(
        change,
        verdict=ChangeKind.BROKEN if broken else ChangeKind.UNCLEAR,
        outcome=Outcome.REGRESSION if broken else Outcome.UNKNOWN,
        remark=f"{b.status}: {b.reason}",
    )


def _of_memory(a: Record, b: Record, tolerance: float) -> Iterator[Change]:
    """Bytes are counted, not sampled: what differs differs."""
    for figure in ("saved_bytes", "peak_bytes"):
        old, new = getattr(a, figure), getattr(b, figure)
        if old is None or new is None:
            continue
        times = new / old if old else float("inf") if new else 1.0
        outcome = Outcome.REGRESSION if times > 1 + tolerance else Outcome.FINE
        verdict = ChangeKind.TIE if old == new else ChangeKind.LESS if new < old else ChangeKind.MORE
        yield Change(
            case_of(b), b.implementation, figure, old, new, Interval(times, times, times), verdict, outcome
        )  # fmt: skip


def _of_time(a: Record, b: Record, base_a: Record | None, base_b: Record | None, by: By, tolerance: float) -> Change:
    is_baseline = b.implementation == b.baseline
    ratios = (_ratio(a, base_a), _ratio(b, base_b)) if by == "ratio" and not is_baseline else (None, None)
    old, new = ratios if ratios[0] and ratios[1] else (_time(a), _time(b))
    assert old is not None
    assert new is not None
    floor, remark = _floor(a, b)
    if by == "ratio" and not is_baseline and not ratios[0]:
        remark = "by time: it has no ratio to the baseline in both runs"
    if by == "time" and not is_baseline and base_a and base_b and base_a.time_ms and base_b.time_ms:
        drift = base_b.time_ms / base_a.time_ms
        floor = max(floor, drift - 1, 1 / drift - 1)
        remark = f"{b.baseline} itself changed x{drift:.3f}"
    found = reaching(quotient(new, old), floor)
    figure = "ratio" if ratios[0] and ratios[1] else "time_ms"
    verdict, outcome = judge(found, tolerance)
    few = min(a.rounds or 0, b.rounds or 0)
    if few < FEWEST_ROUNDS:
        verdict, outcome, remark = ChangeKind.UNCLEAR, Outcome.UNKNOWN, f"{few} rounds are too few for an interval"
    if by == "ratio" and is_baseline:
        verdict, outcome = ChangeKind.DRIFT, Outcome.FINE
    return Change(case_of(b), b.implementation, figure, old.median, new.median, found, verdict, outcome, remark)


def _ratio(record: Record, baseline: Record | None) -> Interval | None:
    """The ratio to the baseline, from the rounds where they were kept, else as the row has it (then of 95%)."""
    found = rebase.ratio(record, baseline, EACH) if baseline else None
    if found:
        return found
    if record.ratio is None or record.ratio_low is None or record.ratio_high is None:
        return None
    return Interval(record.ratio, record.ratio_low, record.ratio_high)


def _time(record: Record) -> Interval:
    """The median time; without samples, from the 10th to the 90th percentile, which is far wider than need be."""
    if record.samples_ms:
        return median_interval(record.samples_ms, EACH)
    assert record.time_ms is not None
    return Interval(record.time_ms, record.time_p10_ms or record.time_ms, record.time_p90_ms or record.time_ms)


def _floor(a: Record, b: Record) -> tuple[float, str]:
    """How far from 1 the noise of both runs may bring a quotient, by their A/A pairs; and which of them is missing."""
    known = [noise for record in (a, b) if (noise := rebase.noise(record)) is not None]
    if not known:
        return 0.0, "no A/A pair"
    one, other = (known * 2)[:2]  # the noise of a run without a pair is taken for the other's
    return (1 + one) * (1 + other) - 1, "" if len(known) == 2 else "one run has no A/A pair"


def reaching(found: Interval, floor: float) -> Interval:
    """The interval, extended so that it reaches at least `floor` to either side of its median."""
    return Interval(
        found.median, min(found.low, found.median / (1 + floor)), max(found.high, found.median * (1 + floor))
    )  # fmt: skip


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
            names = ", ".join(dict.fromkeys(row.implementation for row in alone))
            yield f"Only the {which} run has {len(alone)} rows, such as {case_label(case_of(alone[0]))}, of {names}."
