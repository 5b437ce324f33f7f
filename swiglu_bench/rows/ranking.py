"""Which rows are the fastest of those that may be ranked.

A row may be ranked if it is ok, has a time, and yields all gradients that the baseline yields. Which others tie with
the fastest is judged by `report.ranking` from the rows, and by `finished.recommendation` from their samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from operator import attrgetter

from swiglu_bench.rows.record import Record, Status, grouped


def ranked(rows: Iterable[Record]) -> list[Record]:
    """The rows of a case that may be ranked, the lowest ratio to the baseline first; where there is none, by time."""
    return sorted(filter(_counts, rows), key=lambda row: row.ratio if row.ratio is not None else row.time_ms or 0.0)


def quickest(rows: Iterable[Record]) -> Record | None:
    """The row of a case that ranks first, which a table of times marks; None where there is no other."""
    able = ranked(rows)
    return able[0] if len(able) > 1 else None


def median_ratios(rows: Iterable[Record]) -> dict[str, float]:
    """Of each implementation with a ratio, the median over its cases."""
    compared = (row for row in rows if row.status is Status.OK and row.comparable and row.ratio is not None)
    by_name = grouped(compared, attrgetter("implementation"))
    return {name: statistics.median(row.ratio or 0.0 for row in own) for name, own in by_name.items()}


def _counts(row: Record) -> bool:
    return row.status is Status.OK and row.time_ms is not None and row.comparable
