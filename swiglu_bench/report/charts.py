"""The questions that a report answers about time and errors, each one function from rows to a chart.

Rows are those of one section, as records.csv has them; of one shape where a chart has token counts on an axis. A
chart's title is its question. Where the rows cannot answer it, NoChart says why in one sentence.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from swiglu_bench.charts.style import CHARACTER, WIDTH, Style, linear_range, log_range, token_text
from swiglu_bench.report import drawing, ranking
from swiglu_bench.report.frames import dicts, unique
from swiglu_bench.report.points import NoChart, counts, points_of, timed, titled

CELL_WIDTH, CELL_HEIGHT = 150, 44
WIDE = 12
"""A linear axis that ends at more than so many times its beginning hides the small values."""


def time(rows: pd.DataFrame, style: Style) -> alt.LayerChart:
    """Time of a call over token counts, with the limit."""
    usable = timed(rows).sort_values("time_ms", kind="stable")
    milli = usable["time_ms"].max() >= 1
    scale, unit = (1, "ms") if milli else (1000, "µs")
    points = points_of(usable, usable["time_ms"] * scale)
    by_count = {row["tokens"]: row["limit_ms"] * scale for row in dicts(usable.dropna(subset="limit_ms"))}
    limits = [{"tokens": count, "value": by_count[count]} for count in sorted(by_count)]
    extent = log_range([*(point["value"] for point in points), *(one["value"] for one in limits)])
    title, text = f"time of a call ({unit}), log scale", "format(datum.value, '~g')"
    if counts(usable) == 1:
        line = [drawing.level(one["value"], "x") for one in limits]
        chart = drawing.dots(points, style, extent, title, text, line)
    else:
        fixed = [drawing.dashed(limits).encode(x="tokens:Q", y="value:Q")] if limits else []
        labels = [("limit", limits[-1]["value"])] if limits else []
        chart = drawing.lines(points, style, extent, title, text, fixed, labels)
    return titled(chart, "How long does a call take?", rows, style, "dashed: limit" if limits else "")


def speedup(rows: pd.DataFrame, style: Style) -> alt.LayerChart:
    """The baseline's time over each one's, with the 95% interval; the baseline is the line at 1."""
    usable = ranking.ranked(rows)
    baseline = str(usable["baseline"].iloc[0]) if len(usable) else ""
    usable = usable[usable["implementation"] != baseline]
    if usable.empty:
        named = [name for name in unique(rows["baseline"]) if name]
        why = (
            f"nothing but the baseline {named[0]} has a ratio" if named else "no baseline was timed in the same rounds"
        )
        raise NoChart(f"There is no speed-up to draw: {why}.")
    usable = usable.sort_values("ratio", kind="stable")
    points = points_of(usable, 1 / usable["ratio"], 1 / usable["ratio_high"], 1 / usable["ratio_low"])
    ends = [value for point in points for value in (point["value"], point["low"], point["high"])]
    extent = linear_range(ends, 1.0) if max(ends) / min(ends) < WIDE else log_range([*ends, 1.0])
    title, text = f"{baseline}'s time ÷ time", "format(datum.value, '~g') + '×'"
    if counts(usable) == 1:
        chart = drawing.dots(points, style, extent, title, text, [drawing.level(1, "x")])
    else:
        chart = drawing.lines(points, style, extent, title, text, [drawing.level(1)], [(baseline, 1.0)])
    return titled(chart, f"How much faster than {baseline}?", usable, style, f"bars: 95% intervals; dashed: {baseline}")


def limit(rows: pd.DataFrame, style: Style) -> alt.LayerChart:
    """The limit's time over each one's, in percent."""
    usable = timed(rows).dropna(subset="limit_pct")
    if usable.empty:
        raise NoChart("No limit was measured for these rows, so there is no share of it to draw.")
    usable = usable.sort_values("limit_pct", ascending=False, kind="stable")
    points = points_of(usable, usable["limit_pct"])
    extent = linear_range([point["value"] for point in points], 100.0)
    title, text = "limit's time ÷ time (%)", "datum.value + '%'"
    if counts(usable) == 1:
        chart = drawing.dots(points, style, extent, title, text, [drawing.level(100, "x")])
    else:
        chart = drawing.lines(points, style, extent, title, text, [drawing.level(100)], [("limit", 100.0)])
    what = "dashed: limit, the case's bare matrix products in the same rounds or its bytes at copy bandwidth"
    return titled(chart, "How near to this machine's limit?", usable, style, what)


def error(rows: pd.DataFrame, style: Style) -> alt.LayerChart:
    """Error of the worst tensor over eager's error for it, every case a point."""
    usable = rows[rows["status"].isin(["ok", "incorrect"]) & rows["error"].notna() & (rows["eager_error"] > 0)]
    usable = usable[usable["error"] < float("inf")]
    if usable.empty:
        raise NoChart("These rows carry no error that is a number, so none can be drawn.")
    points = points_of(usable, usable["error"] / usable["eager_error"])
    for point, row in zip(points, dicts(usable), strict=True):
        if row["status"] == "incorrect":
            point["shape"] = "cross"
    ends = [point["value"] for point in points if point["value"] > 0]
    extent = linear_range(ends, 0.0, 1.0) if not ends or max(ends) < WIDE else log_range([*ends, 1.0])
    points = [point for point in points if point["value"] > 0 or not extent.log]
    worst: dict[str, float] = {}
    for point in points:
        worst[point["implementation"]] = max(worst.get(point["implementation"], 0.0), point["value"])
    points.sort(key=lambda point: worst[point["implementation"]])
    chart = drawing.dots(
        points, style, extent, "error ÷ eager's error", "format(datum.value, '~g') + '×'", [drawing.level(1, "x")]
    )
    what = "a point per case: the tensor with the largest error from fp64; dashed: eager" + (
        "; cross: incorrect" if "incorrect" in set(usable["status"]) else ""
    )
    return titled(chart, "How precise, compared with eager?", usable, style, what, whole_section=True)


def crossover(rows: pd.DataFrame, style: Style) -> alt.LayerChart:
    """The best implementation per token count and shape, all shapes of a section; a tie is a tie."""
    found = ranking.places(rows)
    if not found:
        raise NoChart("Nothing was timed beside a baseline in the same rounds, so no winner can be named.")
    values = [_cell(place, rows, style) for place in found]
    ticks = [token_text(count) for count in sorted({place.tokens for place in found})]
    shapes = unique([place.shape for place in found])
    tokens: dict[str, Any] = {"title": "tokens", "sort": ticks}
    shape: dict[str, Any] = {"title": None, "sort": shapes}
    upright = len(shapes) <= len(ticks)
    x = alt.X("shape:N" if upright else "tokens:N", **(shape if upright else tokens),
              axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False, labelLimit=CELL_WIDTH))  # fmt: skip
    y = alt.Y(
        "tokens:N" if upright else "shape:N", **(tokens if upright else shape), axis=alt.Axis(domain=False, ticks=False)
    )
    base = alt.Chart(alt.InlineData(values=values)).encode(x=x, y=y)
    tip = [alt.Tooltip(f"{key}:N", title=key) for key in ("shape", "tokens", "fastest", "speed-up", "next")]
    fill = base.mark_rect(opacity=0.4, cornerRadius=3, xOffset=1, yOffset=1, x2Offset=-1, y2Offset=-1)
    room = alt.expr("bandwidth('x') - 10")
    name = base.mark_text(dy=-8, fontWeight=600, limit=room).encode(text="name:N", tooltip=tip)
    amount = base.mark_text(dy=9, fontSize=11, limit=room).encode(text="amount:N", tooltip=tip)
    across, down = (shapes, ticks) if upright else (ticks, shapes)
    width = max(CELL_WIDTH, min(320, WIDTH // len(across)))
    chart = alt.LayerChart(layer=[fill.encode(color=alt.Color("colour:N", scale=None), tooltip=tip), name, amount])
    side = round(CHARACTER * max(map(len, down))) + 40
    chart = chart.properties(width=width * len(across), height=CELL_HEIGHT * len(down))
    size = {"columns": len(across), "side_px": side}
    what = "grey: a tie for the first place"
    return titled(chart, "Which is fastest where?", rows, style, what, whole_section=True, **size)


def _cell(place: ranking.Place, rows: pd.DataFrame, style: Style) -> dict[str, Any]:
    """One field of the crossover map; implementations that another stands for count as that one."""
    stands = {other: name for name, others in style.alike.items() for other in others}
    first = sorted({stands.get(name, name) for name in (place.best, *place.ties)}, key=list(style.slots).index)
    baseline = str(ranking.ranked(rows)["baseline"].iloc[0])
    alone, named = len(first) == 1, " = ".join(first[:3]) + (f" +{len(first) - 3}" if first[3:] else "")
    amount = ["tie"] if not alone else ["baseline"] if first[0] == baseline else []
    amount += [f"{place.speedup:.2f}× {baseline}"] if baseline not in first else []
    return {
        "shape": place.shape, "tokens": token_text(place.tokens), "name": style.label(first[0]) if alone else named,
        "amount": ", ".join(amount), "colour": style.colour(first[0]) if alone else "#9aa1ab",
        "fastest": " = ".join((place.best, *place.ties)),
        "speed-up": f"{place.speedup:.3f}× {baseline} [{place.low:.3f}, {place.high:.3f}]",
        "next": f"{place.runner_up}, which takes {1 / (1 - place.lead) - 1:.1%} longer" if place.runner_up else "none",
    }  # fmt: skip
