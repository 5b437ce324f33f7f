"""The charts of memory: rows of one shape and one token count, as records.csv has them, to a chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from swiglu_bench.rows.figures import MIB
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.charts.style import (
    CHARACTER,
    HEIGHT,
    LABEL_GAP,
    WIDTH,
    Range,
    Style,
    linear_range,
    log_range,
    spread,
)
from swiglu_bench.show.report import drawing
from swiglu_bench.show.report.drawing import COLOUR, NoChart, Point, memory_text, points_of, timed, titled

SIZES = "format(datum.value, ',~f')"


def pareto(rows: Sequence[Record], style: Style) -> alt.LayerChart:
    """Peak memory against time at one token count; the line joins those that none beats at both."""
    usable = [row for row in timed(rows) if row.comparable and row.peak_bytes is not None]
    if len(usable) < 2:
        mode = rows[0].mode
        raise NoChart(
            "No run in this report measured the memory of these cases: swiglu-bench memory does."
            if mode == "step"
            else "Memory is measured for whole steps by swiglu-bench memory, and so not set against the time of a "
            f"{mode}."
        )
    points = points_of(usable, lambda row: row.time_ms)
    for point, row in zip(points, usable, strict=True):
        point["mib"] = _mib(row.peak_bytes)
    drawn = [point for point in points if point["implementation"] not in style.hidden()]
    down, across = _roomy([point["value"] for point in points]), _roomy([point["mib"] for point in points], 0.25)
    for point, (place, side) in zip(drawn, _beside(drawn, style, down, across), strict=True):
        point["place"], point["side"] = place, side
    sizes = alt.Axis(values=across.ticks, labelExpr=SIZES, labelOverlap="greedy")
    times = alt.Axis(values=down.ticks, labelExpr="format(datum.value, '~g')")
    x = alt.X("mib:Q", title="peak memory (MiB), smaller is better", scale=across.scale(), axis=sizes)
    y = alt.Y("value:Q", title="time of a step (ms), smaller is better", scale=down.scale(), axis=times)
    base = drawing.drawn()
    line = drawing.dashed(_front(points))
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=x, y=y, color=COLOUR, shape=drawing.SHAPE, tooltip=drawing.tooltips(points)
    )
    names = []
    for side, align, dx in (("right", "left", 10), ("left", "right", -10)):
        here = base.transform_filter(f"datum.side == '{side}'").encode(
            x=x, y=alt.Y("place:Q", scale=None), text="label:N"
        )
        text: dict[str, Any] = {"align": align, "dx": dx, "baseline": "middle"}
        names += [here.mark_text(style="halo", **text), here.mark_text(**text).encode(color=COLOUR)]
    labels = alt.LayerChart(layer=names).properties(name=drawing.LABELS)
    chart = alt.LayerChart(layer=[line.encode(x=x, y=y, order="mib:Q"), labels, dots])
    chart = drawing.filled(chart.properties(width=WIDTH, height=HEIGHT), points, style)
    what = "dashed: no other is both faster and smaller, by the medians"
    return titled(chart, "What does speed cost in memory?", usable, style, what)


def memory(rows: Sequence[Record], style: Style) -> alt.LayerChart:
    """Peak and saved memory of a step at one token count, and what arithmetic predicts for the peak."""
    usable = [row for row in rows if row.status is Status.OK and row.peak_bytes is not None]
    if not usable:
        raise NoChart("No memory was measured in these rows.")
    usable.sort(key=lambda row: row.peak_bytes or 0)
    points: list[Point] = [
        {
            "implementation": row.implementation,
            "peak": _mib(row.peak_bytes),
            "saved": _mib(row.saved_bytes),
            "predicted": _mib(row.predicted_peak_bytes),
            "memory": memory_text(row),
        }
        for row in usable
    ]
    base, tip = drawing.drawn(), drawing.tooltips(points)
    labels = [style.label(row.implementation) for row in usable]
    y = alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(ticks=False, domain=False))
    axis = alt.Axis(tickCount=8, labelExpr=SIZES, labelOverlap="greedy")
    x = alt.X("peak:Q", title="MiB, smaller is better", axis=axis)
    peak = base.mark_bar(opacity=0.35, height=16).encode(x=x, y=y, color=COLOUR, tooltip=tip)
    saved = base.mark_bar(height=16).encode(x=alt.X("saved:Q"), y=y, color=COLOUR, tooltip=tip)
    tick = base.transform_filter("datum.predicted != null").mark_tick(thickness=2, height=20, color=drawing.GREY)
    chart = alt.LayerChart(layer=[peak, saved, tick.encode(x=alt.X("predicted:Q"), y=y, tooltip=tip)])
    what = "bar: peak above inputs and weights; full colour: of it saved for backward; tick: predicted peak"
    return titled(drawing.rows(chart, points, style), "How much memory does a step need?", usable, style, what)


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB


def _front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both; the smallest first."""
    best, front = float("inf"), []
    for point in sorted(points, key=lambda point: (point["mib"], point["value"])):
        if point["value"] < best:
            best = point["value"]
            front.append({"mib": point["mib"], "value": point["value"]})
    return front


def _roomy(values: Sequence[float], margin: float = 0.0) -> Range:
    """An axis with room for names at both ends."""
    low, high = min(values), max(values)
    room = margin * (high - low)
    if low > 0 and high / low > 2:
        return log_range([low / (high / low) ** margin, high * (high / low) ** margin])
    return linear_range([low - room, high + room])


def _beside(points: Sequence[Point], style: Style, down: Range, across: Range) -> list[tuple[float, str]]:
    """Where names stand: how far from the top, and on which side of their points, so that few overlap."""
    tops = [down.pixel(point["value"]) for point in points]
    lefts = [WIDTH - across.pixel(point["mib"], WIDTH) for point in points]
    widths = [CHARACTER * len(style.label(point["implementation"])) + 14 for point in points]
    sides = []
    for top, left, width in zip(tops, lefts, widths, strict=True):
        blocked = any(
            left + 4 < x < left + width and abs(y - top) < LABEL_GAP for x, y in zip(lefts, tops, strict=True)
        )
        sides.append("left" if (left + width > WIDTH or blocked) and left > width else "right")
    spans = [
        (left, left + width) if side == "right" else (left - width, left)
        for left, width, side in zip(lefts, widths, sides, strict=True)
    ]
    places, order = list(tops), sorted(range(len(points)), key=lambda index: spans[index])
    while order:  # names one above the other, from left to right as long as they overlap
        group, end = [], spans[order[0]][1]
        while order and spans[order[0]][0] < end:
            group.append(order.pop(0))
            end = max(end, spans[group[-1]][1])
        for index, place in zip(group, spread([tops[i] for i in group], LABEL_GAP, 6, HEIGHT - 6), strict=True):
            places[index] = place
    return list(zip(places, sides, strict=True))
