"""The questions that a report answers about time and errors, each one function from rows to a chart.

Rows are those of one section, as records.csv has them; of one shape where a chart has token counts on an axis. A
chart's title is its question. Where the rows cannot answer it, NoChart says why in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from swiglu_bench.rows.record import Record, Status, unique
from swiglu_bench.show.charts.style import Style, linear_range, log_range
from swiglu_bench.show.report import drawing, ranking
from swiglu_bench.show.report.drawing import NoChart, points_of, timed, titled

WIDE = 12
"""A linear axis that ends at more than so many times its beginning hides the small values."""
TIMES = "format(datum.value, '~g') + '×'"
Rows = Sequence[Record]


def time(rows: Rows, style: Style) -> alt.LayerChart:
    """Time of a call over token counts, with the limit."""
    usable = sorted(timed(rows), key=lambda row: row.time_ms or 0.0)
    scale, unit = (1, "ms") if (usable[-1].time_ms or 0.0) >= 1 else (1000, "µs")
    points = points_of(usable, lambda row: row.time_ms * scale)
    limits = {row.tokens: row.limit_ms * scale for row in usable if row.limit_ms is not None}
    extent = log_range([*(point["value"] for point in points), *limits.values()])
    title, text = f"time of a call ({unit}), log scale", "format(datum.value, '~g')"
    chart = drawing.over_tokens(points, style, extent, title, text, limits, "limit")
    return titled(chart, "How long does a call take?", rows, style, "dashed: limit" if limits else "")


def speedup(rows: Rows, style: Style) -> alt.LayerChart:
    """The baseline's time over each one's, with the 95% interval; the baseline is the line at 1."""
    usable = [row for row in ranking.ranked(rows) if row.implementation != row.baseline]
    if not usable:
        named = [name for name in unique(row.baseline for row in rows) if name]
        why = f"only the baseline {named[0]} has a ratio" if named else "no baseline was timed in the same rounds"
        raise NoChart(f"There is no speed-up to draw: {why}.")
    baseline = usable[0].baseline
    points = points_of(
        usable, lambda row: 1 / row.ratio, lambda row: 1 / row.ratio_high, lambda row: 1 / row.ratio_low
    )  # fmt: skip
    ends = [point[key] for point in points for key in ("value", "low", "high")]
    extent = linear_range(ends, 1.0) if max(ends) / min(ends) < WIDE else log_range([*ends, 1.0])
    level = {point["tokens"]: 1.0 for point in points}
    chart = drawing.over_tokens(points, style, extent, f"{baseline}'s time ÷ time", TIMES, level, baseline)
    return titled(chart, f"How much faster than {baseline}?", usable, style, f"bars: 95% intervals; dashed: {baseline}")


def limit(rows: Rows, style: Style) -> alt.LayerChart:
    """The limit's time over each one's, in percent."""
    usable = [row for row in timed(rows) if row.limit_pct is not None]
    if not usable:
        raise NoChart("No limit was measured for these rows, so there is no share of it to draw.")
    usable.sort(key=lambda row: -(row.limit_pct or 0.0))
    points = points_of(usable, lambda row: row.limit_pct)
    extent = linear_range([point["value"] for point in points], 100.0)
    title, level = "limit's time ÷ time (%)", {point["tokens"]: 100.0 for point in points}
    chart = drawing.over_tokens(points, style, extent, title, "datum.value + '%'", level, "limit")
    what = "dashed: limit, the case's bare matrix products in the same rounds or its bytes at copy bandwidth"
    return titled(chart, "How near to this machine's limit?", usable, style, what)


def error(rows: Rows, style: Style) -> alt.LayerChart:
    """Error of the worst tensor over eager's error for it, every case a point."""
    checked = [row for row in rows if row.status in {Status.OK, Status.INCORRECT} and (row.eager_error or 0.0) > 0]
    usable = [row for row in checked if row.error is not None and row.error < float("inf")]
    if not usable:
        raise NoChart("These rows carry no error that is a number, so none can be drawn.")
    points = points_of(usable, lambda row: row.error / row.eager_error)
    for point, row in zip(points, usable, strict=True):
        if row.status is Status.INCORRECT:
            point["shape"] = "cross"
    ends = [point["value"] for point in points if point["value"] > 0]
    extent = linear_range(ends, 0.0, 1.0) if not ends or max(ends) < WIDE else log_range([*ends, 1.0])
    points = [point for point in points if point["value"] > 0 or not extent.log]
    worst: dict[str, float] = {}
    for point in points:
        worst[point["implementation"]] = max(worst.get(point["implementation"], 0.0), point["value"])
    points.sort(key=lambda point: worst[point["implementation"]])
    chart = drawing.dots(points, style, extent, "error ÷ eager's error", TIMES, [1.0])
    what = "a point per case: the tensor with the largest error from fp64; dashed: eager"
    what += "; cross: incorrect" if any(row.status is Status.INCORRECT for row in usable) else ""
    return titled(chart, "How precise, compared with eager?", usable, style, what, whole_section=True)
