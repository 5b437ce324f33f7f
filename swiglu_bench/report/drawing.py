"""How figures are drawn: a line per implementation over token counts, or a dot per implementation at one count.

A layer called `labels` stands to the right of the lines; where there is no room for it, it can be left out. The
parameter `shown` holds the implementations that are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from swiglu_bench.charts.style import HEIGHT, LABEL_GAP, WIDTH, Range, Style, spread, token_axis

Point = dict[str, Any]
"""implementation, tokens, value, low, high (None: no interval), and texts for the tooltip under TIPS' keys."""

TIPS = {
    "label": "implementation", "case": "case", "time": "time", "compared": "time ÷ baseline's", "verdict": "verdict",
    "limit": "of the limit", "memory": "memory", "precision": "error",
}  # fmt: skip
DRAWN = "datum.always || indexof(shown, datum.implementation) >= 0"
LABELS = "labels"
ROW_HEIGHT = 24
GREY = "#8a8f98"


def lines(
    points: Sequence[Point], style: Style, extent: Range, title: str, tick_text: str, fixed: Sequence[alt.Chart] = (),
    fixed_labels: Sequence[tuple[str, float]] = (),
) -> alt.LayerChart:  # fmt: skip
    """Lines with points, intervals and names at their ends; `fixed` is drawn below them, with labels of its own.

    `tick_text` is a Vega expression of datum.value.
    """
    y = alt.Y("value:Q", title=title, scale=extent.scale(), axis=_axis(extent, tick_text))
    x = token_axis(point["tokens"] for point in points)
    base = drawn_of(points, style)
    near = alt.selection_point(fields=["implementation"], on="pointerover", clear="pointerout", name="near")
    names = list(dict.fromkeys(point["implementation"] for point in points))
    dash = alt.Scale(domain=names, range=[list(style.dash(name)) for name in names])
    colour = alt.Color("colour:N", scale=None)
    drawn = base.mark_line(strokeWidth=2).encode(
        x=x, y=y, color=colour, detail="implementation:N", opacity=alt.condition(near, alt.value(1), alt.value(0.2)),
        strokeDash=alt.StrokeDash("implementation:N", scale=dash, legend=None),
    )  # fmt: skip
    whiskers = base.transform_filter("datum.low != null").mark_rule(strokeWidth=1.5)
    dots = base.mark_point(filled=True, size=55, opacity=1).encode(
        x=x, y=y, color=colour, shape=alt.Shape("shape:N", scale=None), tooltip=tooltips(points)
    )
    parts = [
        *fixed,
        drawn,
        whiskers.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=colour),
        dots.add_params(near),
        _end_labels(points, style, extent, fixed_labels),
    ]
    return alt.LayerChart(layer=parts).properties(width=WIDTH, height=HEIGHT).add_params(shown(points, style))


def dots(
    points: Sequence[Point], style: Style, extent: Range, title: str, tick_text: str, fixed: Sequence[alt.Chart] = ()
) -> alt.LayerChart:
    """One row per implementation in the order of the points, with intervals; `fixed` is drawn below them."""
    labels = list(dict.fromkeys(style.label(point["implementation"]) for point in points))
    x = alt.X("value:Q", title=title, scale=extent.scale(), axis=_axis(extent, tick_text))
    y = alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(grid=True, ticks=False, domain=False))
    colour = alt.Color("colour:N", scale=None)
    base = drawn_of(points, style)
    whiskers = base.transform_filter("datum.low != null").mark_rule(strokeWidth=2)
    marks = base.mark_point(filled=True, size=70, opacity=0.9).encode(
        x=x, y=y, color=colour, shape=alt.Shape("shape:N", scale=None), tooltip=tooltips(points)
    )
    parts = [*fixed, whiskers.encode(x=alt.X("low:Q"), x2="high:Q", y=y, color=colour), marks]
    return rows(alt.LayerChart(layer=parts), points, style)


def rows(chart: alt.LayerChart, points: Sequence[Point], style: Style) -> alt.LayerChart:
    """A chart with a row per implementation that is drawn; the page makes it higher or lower with their number."""
    names = list(dict.fromkeys(point["implementation"] for point in points))
    height = ROW_HEIGHT * len([name for name in names if name not in style.hidden()])
    about = {"row_px": ROW_HEIGHT, "rows": names}
    return chart.properties(width=WIDTH, height=height, usermeta=about).add_params(shown(points, style))


def drawn_of(points: Sequence[Point], style: Style) -> alt.Chart:
    """A chart without a mark of the points whose implementations are drawn."""
    values = [point | appearance(point, style) for point in points]
    return alt.Chart(alt.InlineData(values=values)).transform_filter(DRAWN)


def level(value: float, orient: str = "y") -> alt.Chart:
    """A dashed line across the chart at a value."""
    rule = alt.Chart(alt.InlineData(values=[{"value": value}])).mark_rule(strokeDash=[5, 4], strokeWidth=1.5)
    return rule.encode(**{orient: alt.X("value:Q") if orient == "x" else alt.Y("value:Q")})


def dashed(values: Sequence[dict[str, float]]) -> alt.Chart:
    """A dashed grey line that is no implementation."""
    return alt.Chart(alt.InlineData(values=values)).mark_line(strokeDash=[5, 4], strokeWidth=1.5, color=GREY)


def shown(points: Sequence[Point], style: Style) -> alt.Parameter:
    """Who is drawn at first: all but those that another stands for."""
    names = dict.fromkeys(point["implementation"] for point in points)
    return alt.param(name="shown", value=[name for name in names if name not in style.hidden()])


def appearance(point: Point, style: Style) -> dict[str, Any]:
    """Colour, shape and label of a point's implementation."""
    name = point["implementation"]
    return {"colour": style.colour(name), "shape": point.get("shape", style.shape(name)), "label": style.label(name)}


def tooltips(points: Sequence[Point]) -> list[alt.Tooltip]:
    """All texts that any of the points has."""
    has = {"label", *(key for point in points for key, value in point.items() if value)}
    return [alt.Tooltip(f"{key}:N", title=title) for key, title in TIPS.items() if key in has]


def _axis(extent: Range, tick_text: str) -> alt.Axis:
    return alt.Axis(values=list(extent.ticks), labelExpr=tick_text, labelOverlap="greedy")


def _end_labels(
    points: Sequence[Point], style: Style, extent: Range, others: Sequence[tuple[str, float]]
) -> alt.LayerChart:
    """Names beside the last points, moved apart where they would overlap, each with a short line to its point."""
    last = {point["implementation"]: point for point in sorted(points, key=lambda point: point["tokens"])}
    ends: list[dict[str, Any]] = [
        {
            "implementation": name,
            "text": style.label(name),
            "colour": style.colour(name),
            "end": extent.pixel(one["value"]),
        }
        for name, one in last.items()
        if name not in style.hidden()
    ]
    ends += [{"always": True, "text": text, "end": extent.pixel(value)} for text, value in others]
    for one, place in zip(ends, spread([end["end"] for end in ends], LABEL_GAP, 0, HEIGHT), strict=True):
        one["place"] = place
    base = alt.Chart(alt.InlineData(values=ends)).transform_filter(DRAWN)
    colour = alt.Color("colour:N", scale=None)
    pixel = alt.Y("place:Q", scale=None)
    leader = base.mark_rule(strokeWidth=1, opacity=0.6).encode(
        x=alt.XValue(alt.expr("width + 3")), x2=alt.X2Value(alt.expr("width + 14")),
        y=alt.Y("end:Q", scale=None), y2="place:Q", color=colour,
    )  # fmt: skip
    named = base.transform_filter("datum.colour").mark_text(align="left", dx=17, baseline="middle")
    plain = base.transform_filter("!datum.colour").mark_text(align="left", dx=17, baseline="middle", fontStyle="italic")
    at_end = {"x": alt.XValue("width"), "y": pixel, "text": "text:N"}
    parts = [leader, named.encode(color=colour, **at_end), plain.encode(**at_end)]
    return alt.LayerChart(layer=parts).properties(name=LABELS)
