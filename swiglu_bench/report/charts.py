"""The questions that a report answers, each one function from rows to a chart.

Rows are those of one section and one shape, as records.csv has them; the memory charts take those of one token count.
A chart's title is its question. Where the rows cannot answer it, NoChart says why in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from swiglu_bench.report import marks, ranking
from swiglu_bench.report.look import (
    CHARACTER,
    HEIGHT,
    LABEL_GAP,
    WIDTH,
    Look,
    Range,
    linear_range,
    log_range,
    spread,
    token_text,
    tokens_text,
)
from swiglu_bench.report.marks import Point

MIB = 2**20
CELL_WIDTH, CELL_HEIGHT = 150, 44
WIDE = 12
"""A linear axis that ends at more than so many times its beginning hides the small values."""


class NoChart(Exception):
    """The rows cannot answer the question; the message says why, in one sentence."""


def time(rows: pd.DataFrame, look: Look) -> alt.LayerChart:
    """Time of a call over token counts, with the limit."""
    timed = _timed(rows)
    milli = timed["time_ms"].max() >= 1
    scale, unit = (1, "ms") if milli else (1000, "µs")
    timed = timed.sort_values("time_ms", kind="stable")
    points = _points(timed, timed["time_ms"] * scale)
    limits = [
        {"tokens": int(count), "value": float(value) * scale}
        for count, value in timed.dropna(subset="limit_ms").groupby("tokens")["limit_ms"].first().items()
    ]
    extent = log_range([*(point["value"] for point in points), *(one["value"] for one in limits)])
    title, text = f"time of a call ({unit}), log scale", "format(datum.value, '~g')"
    if _counts(timed) == 1:
        line = [marks.level(one["value"], "x") for one in limits]
        chart = marks.dots(points, look, extent, f"{title}; dashed: limit" if line else title, text, line)
    else:
        curve = alt.Chart(alt.Data(values=limits)).mark_line(strokeDash=[5, 4], strokeWidth=1.5, color="#8a8f98")
        fixed = [curve.encode(x="tokens:Q", y="value:Q")] if limits else []
        labels = [("limit", limits[-1]["value"])] if limits else []
        chart = marks.lines(points, look, extent, title, text, fixed, labels)
    return _titled(chart, "How long does a call take?", rows, look)


def speedup(rows: pd.DataFrame, look: Look) -> alt.LayerChart:
    """The baseline's time over each one's, with the 95% interval; the baseline is the line at 1."""
    usable = ranking.ranked(rows)
    baseline = str(usable["baseline"].iloc[0]) if len(usable) else ""
    usable = usable[usable["implementation"] != baseline]
    if usable.empty:
        named = [name for name in dict.fromkeys(rows["baseline"]) if name]
        why = f"nothing but the baseline {named[0]} has a ratio" if named else "no baseline was timed in the same rounds"
        raise NoChart(f"There is no speed-up to draw: {why}.")
    usable = usable.sort_values("ratio", kind="stable")
    points = _points(usable, 1 / usable["ratio"], 1 / usable["ratio_high"], 1 / usable["ratio_low"])
    ends = [value for point in points for value in (point["value"], point["low"], point["high"])]
    extent = linear_range(ends, 1.0) if max(ends) / min(ends) < WIDE else log_range([*ends, 1.0])
    title, text = f"{baseline}'s time ÷ time, with 95% interval", "format(datum.value, '~g') + '×'"
    if _counts(usable) == 1:
        chart = marks.dots(points, look, extent, f"{title}; dashed: {baseline}", text, [marks.level(1, "x")])
    else:
        chart = marks.lines(points, look, extent, title, text, [marks.level(1)], [(baseline, 1.0)])
    return _titled(chart, f"How much faster than {baseline}?", usable, look)


def limit(rows: pd.DataFrame, look: Look) -> alt.LayerChart:
    """The limit's time over each one's, in percent."""
    usable = _timed(rows).dropna(subset="limit_pct")
    if usable.empty:
        raise NoChart("No limit was measured for these rows, so there is no share of it to draw.")
    usable = usable.sort_values("limit_pct", ascending=False, kind="stable")
    points = _points(usable, usable["limit_pct"])
    extent = linear_range([point["value"] for point in points], 100.0)
    title, text = "limit's time ÷ time (%)", "datum.value + '%'"
    if _counts(usable) == 1:
        chart = marks.dots(points, look, extent, f"{title}; dashed: limit", text, [marks.level(100, "x")])
    else:
        chart = marks.lines(points, look, extent, title, text, [marks.level(100)], [("limit", 100.0)])
    what = "limit: the case's bare matrix products in the same rounds, or its bytes at copy bandwidth"
    return _titled(chart, "How near to this machine's limit?", usable, look, what)


def pareto(rows: pd.DataFrame, look: Look) -> alt.LayerChart:
    """Peak memory against time at one token count; the line joins those that none beats at both."""
    usable = _timed(rows)
    usable = usable[usable["comparable"]].dropna(subset="peak_bytes")
    if len(usable) < 2:
        raise NoChart(_no_memory(rows))
    points = _points(usable, usable["time_ms"])
    for point, row in zip(points, usable.to_dict("records"), strict=True):
        point["mib"] = row["peak_bytes"] / MIB
    drawn = [point for point in points if point["implementation"] not in look.hidden()]
    down, across = _roomy([point["value"] for point in points]), _roomy([point["mib"] for point in points], 0.25)
    for point, (place, side) in zip(drawn, _beside(drawn, look, down, across), strict=True):
        point["place"], point["side"] = place, side
    x = alt.X("mib:Q", title="peak memory (MiB), smaller is better", scale=across.scale(),
              axis=alt.Axis(values=across.ticks, labelExpr="format(datum.value, ',~f')", labelOverlap="greedy"))  # fmt: skip
    y = alt.Y("value:Q", title="time of a step (ms), smaller is better", scale=down.scale(),
              axis=alt.Axis(values=down.ticks, labelExpr="format(datum.value, '~g')"))  # fmt: skip
    base = alt.Chart(alt.Data(values=[one | marks.appearance(one, look) for one in points]))
    base = base.transform_filter(marks.DRAWN)
    colour = alt.Color("colour:N", scale=None)
    line = alt.Chart(alt.Data(values=_front(points))).mark_line(strokeDash=[5, 4], strokeWidth=1.5, color="#8a8f98")
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=x, y=y, color=colour, shape=alt.Shape("shape:N", scale=None), tooltip=marks.tooltips(points)
    )
    names = []
    for side, align, dx in (("right", "left", 10), ("left", "right", -10)):
        here = base.transform_filter(f"datum.side == '{side}'").encode(
            x=x, y=alt.Y("place:Q", scale=None), text="label:N"
        )
        text = {"align": align, "dx": dx, "baseline": "middle"}
        names += [here.mark_text(style="halo", **text), here.mark_text(**text).encode(color=colour)]
    names = alt.layer(*names).properties(name=marks.LABELS)
    chart = alt.layer(line.encode(x=x, y=y, order="mib:Q"), names, dots)
    chart = chart.properties(width=WIDTH, height=HEIGHT).add_params(marks.shown(points, look))
    what = "dashed: no other is both faster and smaller, by the medians"
    return _titled(chart, "What does speed cost in memory?", usable, look, what)


def memory(rows: pd.DataFrame, look: Look) -> alt.LayerChart:
    """Peak and saved memory of a step at one token count, and what arithmetic predicts for the peak."""
    usable = rows[(rows["status"] == "ok") & rows["peak_bytes"].notna()].sort_values("peak_bytes")
    if usable.empty:
        raise NoChart("No memory was measured in these rows.")
    values = [
        {
            "implementation": row["implementation"], "peak": row["peak_bytes"] / MIB,
            "saved": _mib(row["saved_bytes"]), "predicted": _mib(row["predicted_peak_bytes"]),
            "colour": look.colour(row["implementation"]), "label": look.label(row["implementation"]),
            "memory": _memory_text(row),
        }
        for row in usable.to_dict("records")
    ]  # fmt: skip
    base = alt.Chart(alt.Data(values=values)).transform_filter(marks.DRAWN)
    y = alt.Y("label:N", title=None, sort=[one["label"] for one in values], axis=alt.Axis(ticks=False, domain=False))
    colour, tip = alt.Color("colour:N", scale=None), marks.tooltips(values)
    x = alt.X("peak:Q", title="MiB, smaller is better",
              axis=alt.Axis(tickCount=8, labelExpr="format(datum.value, ',~f')", labelOverlap="greedy"))  # fmt: skip
    peak = base.mark_bar(opacity=0.35, height=16).encode(x=x, y=y, color=colour, tooltip=tip)
    saved = base.mark_bar(height=16).encode(x=alt.X("saved:Q"), y=y, color=colour, tooltip=tip)
    tick = base.transform_filter("datum.predicted != null").mark_tick(thickness=2, height=20, color="#8a8f98")
    chart = alt.layer(peak, saved, tick.encode(x=alt.X("predicted:Q"), y=y, tooltip=tip))
    chart = marks.rows(chart, values, look)
    what = "bar: peak above inputs and weights; full colour: of it saved for backward; tick: predicted peak"
    return _titled(chart, "How much memory does a step need?", usable, look, what)


def error(rows: pd.DataFrame, look: Look) -> alt.LayerChart:
    """Error of the worst tensor over eager's error for it, every case a point."""
    usable = rows[rows["status"].isin(["ok", "incorrect"]) & rows["error"].notna() & (rows["eager_error"] > 0)]
    usable = usable[usable["error"] < float("inf")]
    if usable.empty:
        raise NoChart("These rows carry no error that is a number, so none can be drawn.")
    points = _points(usable, usable["error"] / usable["eager_error"])
    for point, row in zip(points, usable.to_dict("records"), strict=True):
        if row["status"] == "incorrect":
            point["shape"] = "cross"
    ends = [point["value"] for point in points if point["value"] > 0]
    extent = linear_range(ends, 0.0, 1.0) if not ends or max(ends) < WIDE else log_range([*ends, 1.0])
    points = [point for point in points if point["value"] > 0 or not extent.log]
    worst: dict[str, float] = {}
    for point in points:
        worst[point["implementation"]] = max(worst.get(point["implementation"], 0.0), point["value"])
    points.sort(key=lambda point: worst[point["implementation"]])
    chart = marks.dots(points, look, extent, "error ÷ eager's error", "format(datum.value, '~g') + '×'", [marks.level(1, "x")])
    what = "a point per case: the tensor with the largest error from fp64; dashed: eager" + ("; cross: incorrect" if "incorrect" in set(usable["status"]) else "")
    return _titled(chart, "How precise, compared with eager?", usable, look, what, whole_section=True)


def crossover(rows: pd.DataFrame, look: Look) -> alt.LayerChart:
    """The best implementation per token count and shape, all shapes of a section; a tie is a tie."""
    found = ranking.places(rows)
    if not found:
        raise NoChart("Nothing was timed beside a baseline in the same rounds, so no winner can be named.")
    values = [_cell(place, rows, look) for place in found]
    counts = [token_text(count) for count in sorted({place.tokens for place in found})]
    shapes = list(dict.fromkeys(place.shape for place in found))
    tokens = {"title": "tokens", "sort": counts}
    shape: dict[str, Any] = {"title": None, "sort": shapes}
    upright = len(shapes) <= len(counts)
    x = alt.X("shape:N" if upright else "tokens:N", **(shape if upright else tokens),
              axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False, labelLimit=CELL_WIDTH))  # fmt: skip
    y = alt.Y("tokens:N" if upright else "shape:N", **(tokens if upright else shape), axis=alt.Axis(domain=False, ticks=False))
    base = alt.Chart(alt.Data(values=values)).encode(x=x, y=y)
    tip = [alt.Tooltip(f"{key}:N", title=key) for key in ("shape", "tokens", "fastest", "speed-up", "next")]
    fill = base.mark_rect(opacity=0.4, cornerRadius=3, xOffset=1, yOffset=1, x2Offset=-1, y2Offset=-1)
    room = alt.expr("bandwidth('x') - 10")
    name = base.mark_text(dy=-8, fontWeight=600, limit=room).encode(text="name:N", tooltip=tip)
    amount = base.mark_text(dy=9, fontSize=11, limit=room).encode(text="amount:N", tooltip=tip)
    across, down = (shapes, counts) if upright else (counts, shapes)
    width = max(CELL_WIDTH, min(320, WIDTH // len(across)))
    chart = alt.layer(fill.encode(color=alt.Color("colour:N", scale=None), tooltip=tip), name, amount)
    chart = chart.properties(width=width * len(across), height=CELL_HEIGHT * len(down))
    return _titled(chart, "Which is fastest where?", rows, look, "grey: a tie for the first place", whole_section=True, columns=len(across))


def _cell(place: ranking.Place, rows: pd.DataFrame, look: Look) -> dict[str, Any]:
    """One field of the crossover map; implementations that another stands for count as that one."""
    stands = {other: name for name, others in look.alike.items() for other in others}
    first = list(dict.fromkeys(stands.get(name, name) for name in (place.best, *place.ties)))
    baseline = str(ranking.ranked(rows)["baseline"].iloc[0])
    name = look.label(first[0]) if len(first) == 1 else " = ".join(first[:3]) + (f" +{len(first) - 3}" if first[3:] else "")
    amount = f"{place.speedup:.2f}× {baseline}"
    return {
        "shape": place.shape, "tokens": token_text(place.tokens), "name": name,
        "amount": amount if len(first) == 1 else f"tie, {amount}",
        "colour": look.colour(first[0]) if len(first) == 1 else "#9aa1ab",
        "fastest": " = ".join((place.best, *place.ties)),
        "speed-up": f"{place.speedup:.3f}× {baseline} [{place.low:.3f}, {place.high:.3f}]",
        "next": f"{place.runner_up}, which takes {1 / (1 - place.lead) - 1:.1%} longer" if place.runner_up else "none",
    }  # fmt: skip


def _timed(rows: pd.DataFrame) -> pd.DataFrame:
    timed = rows[(rows["status"] == "ok") & rows["time_ms"].notna()]
    if timed.empty:
        raise NoChart("No row has a time.")
    return timed


def _counts(rows: pd.DataFrame) -> int:
    return int(rows["tokens"].nunique())


def _points(
    rows: pd.DataFrame, values: pd.Series, lows: pd.Series | None = None, highs: pd.Series | None = None
) -> list[Point]:
    """What `marks` draws, with the texts of the tooltip; floats with the digits that a picture can show."""
    points: list[Point] = []
    for index, row in rows.iterrows():
        point: Point = {
            "implementation": row["implementation"],
            "tokens": int(row["tokens"]),
            "value": _digits(values[index]),
            "low": _digits(lows[index]) if lows is not None else None,
            "high": _digits(highs[index]) if highs is not None else None,
            "case": f"{row['shape']}, {row['dtype']}, {row['tokens']} tokens",
        }
        if pd.notna(row["time_ms"]):
            point["time"] = f"{row['time_ms']:.4g} ms" if row["time_ms"] >= 1 else f"{row['time_ms'] * 1e3:.4g} µs"
        if pd.notna(row["ratio_low"]) and row["implementation"] != row["baseline"]:
            point["compared"] = f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
            point["verdict"] = row["verdict"]
        if not row["comparable"]:
            point["verdict"] = "not ranked: fewer gradients than the baseline"
        if pd.notna(row["limit_pct"]):
            point["limit"] = f"{row['limit_pct']:.1f}% ({row['limit_kind']})"
        if pd.notna(row["peak_bytes"]):
            point["memory"] = _memory_text(row)
        if pd.notna(row["error"]) and pd.notna(row["eager_error"]):
            point["precision"] = f"{row['error']:.2e}, eager's {row['eager_error']:.2e}"
            if pd.notna(row["error_ratio"]):
                point["precision"] += f"; {row['error_ratio']:.0%} of what is allowed"
        points.append(point)
    return points


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def _mib(value: Any) -> float | None:
    return float(value) / MIB if pd.notna(value) else None


def _memory_text(row: Any) -> str:
    named = {"peak": row["peak_bytes"], "saved": row["saved_bytes"], "workspace": row["workspace_bytes"]}
    return ", ".join(f"{name} {value / MIB:,.1f} MiB" for name, value in named.items() if pd.notna(value))


def _no_memory(rows: pd.DataFrame) -> str:
    mode = str(rows["mode"].iloc[0])
    if mode != "step":
        return f"Memory is measured for whole steps by swiglu-bench memory, and so not set against the time of a {mode}."
    return "No run in this report measured the memory of these cases: swiglu-bench memory does."


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
    if high / low > 2:
        return log_range([low / (high / low) ** margin, high * (high / low) ** margin])
    return linear_range([low - room, high + room])


def _beside(points: Sequence[Point], look: Look, down: Range, across: Range) -> list[tuple[float, str]]:
    """Where names stand: how far from the top, and on which side of their points, so that few overlap."""
    tops = [down.pixel(point["value"]) for point in points]
    lefts = [WIDTH - across.pixel(point["mib"], WIDTH) for point in points]
    widths = [CHARACTER * len(look.label(point["implementation"])) + 14 for point in points]
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


def _titled(
    chart: alt.LayerChart, question: str, rows: pd.DataFrame, look: Look, what: str = "", whole_section: bool = False,
    **about: Any,
) -> alt.LayerChart:  # fmt: skip
    """The question above the chart; under it what the rows have in common, what is drawn how, and the marks of names.

    `usermeta` tells a page what it cannot take from the title: `what`, and `about`.
    """
    first = rows.iloc[0]
    common = [first["mode"], first["scope"]]
    common += [] if whole_section else [f"{first['shape']} (hidden {first['hidden']}, intermediate {first['intermediate']})"]
    common += [", ".join(dict.fromkeys(rows["dtype"]))]
    common += [tokens_text(rows["tokens"])] if _counts(rows) == 1 else []
    names = set(rows["implementation"])
    lines = [", ".join(str(one) for one in [*common, first["device"]] if one), *([what] if what else [])]
    lines += ["+N alike: N others tie with it in every case, and are not drawn"] if names & set(look.alike) else []
    lines += ["*: fewer gradients than the baseline, not ranked"] if names & look.lesser else []
    known = {} if chart.usermeta is alt.Undefined else chart.usermeta
    return chart.properties(
        title=alt.TitleParams(text=question, subtitle=lines), usermeta={**known, "about": what, **about}
    )
