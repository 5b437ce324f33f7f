"""The questions that a report answers about time and errors, each one function from rows to a chart.

Rows are those of one section, as records.csv has them; of one shape where a chart has token counts on an axis. A
chart's title is its question. Where the rows cannot answer it, NoChart says why in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from swiglu_bench.charts.style import CHARACTER, WIDTH, Style, linear_range, log_range
from swiglu_bench.report import drawing, ranking
from swiglu_bench.report.drawing import NoChart, points_of, timed, titled
from swiglu_bench.rows.grouping import unique
from swiglu_bench.rows.quantities import token_text
from swiglu_bench.rows.record import Record, Status

CELL_WIDTH, CELL_HEIGHT = 150, 44
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


def crossover(rows: Rows, style: Style) -> alt.LayerChart:
    """The best implementation per token count and shape, all shapes of a section; a tie is a tie."""
    found = ranking.places(rows)
    if not found:
        raise NoChart("Nothing was timed beside a baseline in the same rounds, so no winner can be named.")
    ticks = [token_text(count) for count in sorted({place.tokens for place in found})]
    shapes = unique(place.shape for place in found)
    tokens: dict[str, Any] = {"title": "tokens", "sort": ticks}
    shape: dict[str, Any] = {"title": None, "sort": shapes}
    plain = alt.Axis(domain=False, ticks=False)
    top = alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False, labelLimit=CELL_WIDTH)
    if len(shapes) <= len(ticks):
        across, down = shapes, ticks
        x, y = alt.X("shape:N", axis=top, **shape), alt.Y("tokens:N", axis=plain, **tokens)
    else:
        across, down = ticks, shapes
        x, y = alt.X("tokens:N", axis=top, **tokens), alt.Y("shape:N", axis=plain, **shape)
    base = alt.Chart(alt.InlineData(values=[_cell(place, style) for place in found])).encode(x=x, y=y)
    tip = [alt.Tooltip(f"{key}:N", title=key) for key in ("shape", "tokens", "fastest", "speed-up", "next")]
    fill = base.mark_rect(opacity=0.4, cornerRadius=3, xOffset=1, yOffset=1, x2Offset=-1, y2Offset=-1)
    room = alt.expr("bandwidth('x') - 10")
    name = base.mark_text(dy=-8, fontWeight=600, limit=room).encode(text="name:N", tooltip=tip)
    amount = base.mark_text(dy=9, fontSize=11, limit=room).encode(text="amount:N", tooltip=tip)
    width = max(CELL_WIDTH, min(320, WIDTH // len(across)))
    chart = alt.LayerChart(layer=[fill.encode(color=drawing.COLOUR, tooltip=tip), name, amount])
    chart = chart.properties(width=width * len(across), height=CELL_HEIGHT * len(down))
    size = {"columns": len(across), "side_px": round(CHARACTER * max(map(len, down))) + 40}
    what = "grey: a tie for the first place"
    return titled(chart, "Which is fastest where?", rows, style, what, whole_section=True, **size)


def _cell(place: ranking.Place, style: Style) -> dict[str, Any]:
    """One field of the crossover map; implementations that another stands for count as that one."""
    first, baseline = style.standing(place.first), place.baseline
    alone, named = len(first) == 1, " = ".join(first[:3]) + (f" +{len(first) - 3}" if first[3:] else "")
    amount = ["tie"] if not alone else ["baseline"] if first[0] == baseline else []
    amount += [f"{place.speedup:.2f}× {baseline}"] if baseline not in first else []
    _, low, high = place.ratio
    return {
        "shape": place.shape, "tokens": token_text(place.tokens), "name": style.label(first[0]) if alone else named,
        "amount": ", ".join(amount), "colour": style.colour(first[0]) if alone else "#9aa1ab",
        "fastest": " = ".join(place.first),
        "speed-up": f"{place.speedup:.3f}× {baseline} [{1 / high:.3f}, {1 / low:.3f}]",
        "next": f"{place.runner_up}, which takes {place.longer:.1%} longer" if place.runner_up else "none",
    }  # fmt: skip
