"""How charts are drawn: a colour per implementation, axes with ticks where figures were measured, lines and dots.

A chart has a line per implementation over token counts, or a row of dots for each. A layer called `labels` stands to
the right of the lines; where there is no room for it, it can be left out. The parameter `shown` holds the
implementations that are drawn, the data set `points` what is drawn of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import numpy as np
from scipy.optimize import isotonic_regression

from swiglu_bench.rows.figures import mebibytes, milliseconds, token_text, tokens_text
from swiglu_bench.rows.record import Record, Status, unique

PALETTE = (
    "#7d8590", "#a8754a", "#3f86e0", "#159a94", "#dd7a1c", "#b58d14", "#8b9720", "#dc4453", "#9268da", "#d957a6",
    "#2f9e5b", "#5f70dc", "#5d8ba3", "#b24ec6", "#d9705f", "#1b98c2", "#639c1e", "#c2566f", "#a47bb0", "#a9822f",
)  # fmt: skip
"""Told apart on white and on black, at about 3:1 or more against both."""
FORMS = ("circle", "square", "diamond", "triangle-up")
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3))
PER_FORM = 10
"""After so many colours, points have the next form and lines the next dashes: later hues are like earlier ones."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
WIDTH, HEIGHT = 640, 340
CHARACTER = 6.6
"""Pixels that a letter of a label takes, about."""
LABEL_GAP = 14
"""Pixels between two labels at the ends of lines."""
Point = dict[str, Any]
"""implementation, tokens, value, low, high (None: no interval), and texts for the tooltip under TIPS' keys."""

TIPS = {
    "label": "implementation", "case": "case", "time": "time", "compared": "time ÷ baseline's", "verdict": "verdict",
    "limit": "of the limit", "memory": "memory", "precision": "error",
}  # fmt: skip
DRAWN = "datum.always || indexof(shown, datum.implementation) >= 0"
LABELS, POINTS = "labels", "points"
ROW_HEIGHT = 24
GREY = "#8a8f98"
COLOUR = alt.Color("colour:N", scale=None)
SHAPE = alt.Shape("shape:N", scale=None)

Value = Callable[[Any], float]
"""A figure of a row that has it."""


@dataclass(frozen=True)
class Style:
    """How implementations appear, the same in every chart of a report."""

    slots: Mapping[str, int]
    """Implementation -> number of its colour, from 0."""
    alike: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Implementation -> others that it stands for."""
    lesser: frozenset[str] = frozenset()
    """Those that do less than the baseline, and are not ranked."""

    def colour(self, name: str) -> str:
        """As #rrggbb."""
        return PALETTE[self.slots[name] % len(PALETTE)]

    def shape(self, name: str) -> str:
        """Of its points."""
        return FORMS[self.slots[name] // PER_FORM % len(FORMS)]

    def dash(self, name: str) -> tuple[int, ...]:
        """Of its lines."""
        return DASHES[self.slots[name] // PER_FORM % len(DASHES)]

    def label(self, name: str) -> str:
        """The name, and how many others it stands for; a star for one that is not ranked."""
        others = self.alike.get(name, ())
        return f"{name} +{len(others)} alike" if others else f"{name} *" if name in self.lesser else name

    def hidden(self) -> set[str]:
        """Those that another stands for."""
        return {name for others in self.alike.values() for name in others}

    def standing(self, names: Iterable[str]) -> tuple[str, ...]:
        """The names, or those that stand for them, in the order of the colours."""
        stands = {other: name for name, others in self.alike.items() for other in others}
        return tuple(sorted({stands.get(name, name) for name in names}, key=list(self.slots).index))


def slots(names: Iterable[str], known: Sequence[str]) -> dict[str, int]:
    """A colour number per name: a known one always has its own, the others get the first that are free."""
    names = list(dict.fromkeys(names))
    fixed = {name: known.index(name) for name in names if name in known}
    free = (number for number in range(len(names) + len(known)) if number not in fixed.values())
    return fixed | {name: next(free) for name in names if name not in fixed}


def theme(dark: bool, background: str | None = None) -> dict[str, Any]:
    """Vega-Lite's config. A background of None leaves the page's own."""
    text, faint, grid = ("#e6e8eb", "#a4abb5", "#33383f") if dark else ("#1c2026", "#5b636e", "#e3e6ea")
    return {
        "background": background or "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "title": {
            "anchor": "start", "fontSize": 16, "fontWeight": 600, "color": text, "offset": 14,
            "subtitleColor": faint, "subtitleFontSize": 12, "subtitlePadding": 5,
        },
        "axis": {
            "labelColor": faint, "titleColor": faint, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 400,
            "gridColor": grid, "domainColor": faint, "tickColor": faint, "titlePadding": 8, "labelLimit": 400,
        },
        "legend": {"labelColor": text, "symbolOpacity": 1, "labelFontSize": 12},
        "text": {"color": text, "fontSize": 12},
        "rule": {"color": faint},
        "style": {"halo": {"stroke": background or ("#14171b" if dark else "#ffffff"), "strokeWidth": 4}},
    }  # fmt: skip


def token_axis(counts: Iterable[int]) -> alt.X:
    """log2 with a tick at every measured count."""
    ticks = sorted({int(count) for count in counts})
    names = " : ".join(f"datum.value == {count} ? '{token_text(count)}'" for count in ticks)
    return alt.X(
        "tokens:Q",
        title="tokens in a call, log scale",
        scale=alt.Scale(type="log", base=2, domain=[ticks[0], ticks[-1]], nice=False, padding=10),
        axis=alt.Axis(values=ticks, labelExpr=f"{names} : ''", labelOverlap="greedy", labelSeparation=3),
    )


@dataclass(frozen=True)
class Range:
    """The vertical extent of a chart and its ticks, fixed so that labels can be placed by arithmetic."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def scale(self) -> alt.Scale:
        """For Vega-Lite."""
        domain = [self.low, self.high]
        if self.log:
            return alt.Scale(type="log", domain=domain, nice=False)
        return alt.Scale(domain=domain, nice=False, zero=False)

    def pixel(self, value: float, height: int = HEIGHT) -> float:
        """Distance of a value from the top of a chart that is `height` pixels high."""
        place = math.log if self.log else float
        low, high = place(self.low), place(self.high)
        return height * (1 - (place(value) - low) / (high - low))


def log_range(values: Iterable[float]) -> Range:
    """Ticks at 1, 2 and 5 times powers of ten; all three only where they do not crowd."""
    low, high = _ends(values)
    low, high = low / 1.12, high * 1.12
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) <= 8:
            break
    return Range(low, high, ticks, log=True)


def linear_range(values: Iterable[float], *include: float) -> Range:
    """Round ticks, at most nine, and a margin around the values."""
    low, high = _ends([*values, *include])
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin
    step = 10.0 ** math.floor(math.log10(high - low)) / 10
    while (high - low) / step > 9:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    first = math.ceil(low / step)
    return Range(low, high, [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)])


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near as possible to the wanted ones, in their order, at least `gap` apart and within low..high.

    Where they do not all fit, the gap shrinks.
    """
    count = len(wanted)
    steps = min(gap, (high - low) / max(1, count - 1)) * np.arange(count)
    if not count:
        return []
    order = np.argsort(wanted, kind="stable")
    # Without the gaps, the positions nearest to the wanted ones are an isotonic regression.
    nearest = isotonic_regression(np.asarray(wanted, dtype=float)[order] - steps).x
    placed = np.empty(count)
    placed[order] = np.clip(nearest, low, high - steps[-1]) + steps
    return [float(place) for place in placed]


def _ends(values: Iterable[float]) -> tuple[float, float]:
    finite = [float(value) for value in values if math.isfinite(value)]
    return min(finite), max(finite)


class NoChart(Exception):
    """The rows cannot answer the question; the message says why, in one sentence."""


def timed(rows: Iterable[Record]) -> list[Record]:
    """The rows whose time counts; raises NoChart where there is none."""
    usable = [row for row in rows if row.status is Status.OK and row.time_ms is not None]
    if not usable:
        raise NoChart("No row has a time.")
    return usable


def counts(rows: Iterable[Record]) -> int:
    """How many token counts the rows have."""
    return len({row.tokens for row in rows})


def points_of(rows: Iterable[Record], value: Value, low: Value | None = None, high: Value | None = None) -> list[Point]:
    """What is drawn of each row, and the texts of its tooltip; floats with the digits that a picture can show."""
    return [
        {
            "implementation": row.implementation,
            "tokens": row.tokens,
            "value": _digits(value(row)),
            "low": low and _digits(low(row)),
            "high": high and _digits(high(row)),
            **_texts(row),
        }
        for row in rows
    ]


def _texts(row: Record) -> dict[str, str]:
    """The tooltip, by the keys of TIPS."""
    texts = {"case": f"{row.shape}, {row.dtype}, {row.tokens} tokens"}
    if row.time_ms is not None:
        texts["time"] = milliseconds(row.time_ms).replace("us", "µs")
    if row.interval and row.implementation != row.baseline:
        texts["compared"] = "{:.3f} [{:.3f}, {:.3f}]".format(*row.interval)
        texts["verdict"] = row.verdict
    if not row.comparable:
        texts["verdict"] = "not ranked: fewer gradients than the baseline"
    if row.limit_pct is not None:
        texts["limit"] = f"{row.limit_pct:.1f}% ({row.limit_kind})"
    if row.peak_bytes is not None:
        texts["memory"] = memory_text(row)
    if row.error is not None and row.eager_error is not None:
        texts["precision"] = f"{row.error:.2e}, eager's {row.eager_error:.2e}"
        if row.error_ratio is not None:
            texts["precision"] += f"; {row.error_ratio:.0%} of the allowed"
    return texts


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def memory_text(row: Record) -> str:
    """Peak, saved and workspace, as far as they were measured."""
    named = {"peak": row.peak_bytes, "saved": row.saved_bytes, "workspace": row.workspace_bytes}
    return ", ".join(f"{name} {mebibytes(value)} MiB" for name, value in named.items() if value is not None)


def titled(
    chart: alt.LayerChart, question: str, rows: Sequence[Record], style: Style, what: str = "",
    whole_section: bool = False,
) -> alt.LayerChart:  # fmt: skip
    """The question above the chart; under it what the rows have in common, what is drawn how, and the marks of names.

    `usermeta` tells a page what it cannot take from the title.
    """
    first, names = rows[0], {row.implementation for row in rows}
    common = [first.mode, first.scope]
    common += [] if whole_section else [f"{first.shape} ({first.sizes})"]
    common += [", ".join(unique(row.dtype for row in rows))]
    common += [tokens_text(row.tokens for row in rows)] if counts(rows) == 1 else []
    lines = [", ".join(part for part in [*common, first.device] if part), *([what] if what else [])]
    lines += ["+N alike: N others tie with it in every case, and are not drawn"] if names & set(style.alike) else []
    lines += ["*: fewer gradients than the baseline, not ranked"] if names & style.lesser else []
    known = {} if chart.usermeta is alt.Undefined else chart.usermeta
    chart.title, chart.usermeta = alt.TitleParams(text=question, subtitle=lines), {**known, "about": what}
    return chart


def over_tokens(
    points: Sequence[Point], style: Style, extent: Range, title: str, tick_text: str, reference: Mapping[int, float],
    name: str,
) -> alt.LayerChart:  # fmt: skip
    """Lines with intervals and names at their ends, and a dashed reference line; rows of dots where there is one count.

    `tick_text` is a Vega expression of datum.value; `reference` is by token count, and called `name`.
    """
    counts = [point["tokens"] for point in points]
    if len(set(counts)) == 1:
        return dots(points, style, extent, title, tick_text, reference.values())
    x, y = token_axis(counts), alt.Y("value:Q", title=title, scale=extent.scale(), axis=_axis(extent, tick_text))
    near = alt.selection_point(fields=["implementation"], on="pointerover", clear="pointerout", name="near")
    names = unique(point["implementation"] for point in points)
    dash = alt.Scale(domain=names, range=[list(style.dash(name)) for name in names])
    lines = drawn().mark_line(strokeWidth=2).encode(
        x=x, y=y, color=COLOUR, detail="implementation:N", opacity=alt.condition(near, alt.value(1), alt.value(0.2)),
        strokeDash=alt.StrokeDash("implementation:N", scale=dash, legend=None),
    )  # fmt: skip
    whiskers = drawn().transform_filter("datum.low != null").mark_rule(strokeWidth=1.5)
    marks = drawn().mark_point(filled=True, size=55, opacity=1)
    compared = [{"tokens": count, "value": reference[count]} for count in sorted(reference)]
    parts = [
        *([dashed(compared).encode(x="tokens:Q", y="value:Q")] if compared else []),
        lines,
        whiskers.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=COLOUR),
        marks.encode(x=x, y=y, color=COLOUR, shape=SHAPE, tooltip=tooltips(points)).add_params(near),
        _end_labels(points, style, extent, [(name, level["value"]) for level in compared[-1:]]),
    ]
    return filled(alt.LayerChart(layer=parts).properties(width=WIDTH, height=HEIGHT), points, style)


def dots(
    points: Sequence[Point], style: Style, extent: Range, title: str, tick_text: str, levels: Iterable[float]
) -> alt.LayerChart:
    """One row per implementation in the order of the points, with intervals; dashed lines across them at `levels`."""
    labels = unique(style.label(point["implementation"]) for point in points)
    x = alt.X("value:Q", title=title, scale=extent.scale(), axis=_axis(extent, tick_text))
    y = alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(grid=True, ticks=False, domain=False))
    level = alt.Chart(alt.InlineData(values=[{"value": value} for value in levels]))
    whiskers = drawn().transform_filter("datum.low != null").mark_rule(strokeWidth=2)
    marks = drawn().mark_point(filled=True, size=70, opacity=0.9)
    layers = [
        level.mark_rule(strokeDash=[5, 4], strokeWidth=1.5).encode(x=alt.X("value:Q")),
        whiskers.encode(x=alt.X("low:Q"), x2="high:Q", y=y, color=COLOUR),
        marks.encode(x=x, y=y, color=COLOUR, shape=SHAPE, tooltip=tooltips(points)),
    ]
    return in_rows(alt.LayerChart(layer=layers), points, style)


def in_rows(chart: alt.LayerChart, points: Sequence[Point], style: Style) -> alt.LayerChart:
    """A chart with a row per implementation that is drawn; the page makes it higher or lower with their number."""
    names = unique(point["implementation"] for point in points)
    about = {"row_px": ROW_HEIGHT, "rows": names}
    height = ROW_HEIGHT * len(set(names) - style.hidden())
    return filled(chart.properties(width=WIDTH, height=height, usermeta=about), points, style)


def drawn() -> alt.Chart:
    """A chart without a mark, of the points whose implementations are drawn."""
    return alt.Chart(alt.NamedData(POINTS)).transform_filter(DRAWN)


def filled(chart: alt.LayerChart, points: Sequence[Point], style: Style) -> alt.LayerChart:
    """The chart with its points; at first all are drawn but those that another stands for."""
    names = [name for name in unique(point["implementation"] for point in points) if name not in style.hidden()]
    chart = chart.add_params(alt.param(name="shown", value=names))
    chart.datasets = {POINTS: [point | _appearance(point, style) for point in points]}
    return chart


def _appearance(point: Point, style: Style) -> dict[str, Any]:
    name = point["implementation"]
    return {"colour": style.colour(name), "shape": point.get("shape", style.shape(name)), "label": style.label(name)}


def dashed(values: Sequence[dict[str, float]]) -> alt.Chart:
    """A dashed grey line that is no implementation."""
    return alt.Chart(alt.InlineData(values=values)).mark_line(strokeDash=[5, 4], strokeWidth=1.5, color=GREY)


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
            "end": extent.pixel(point["value"]),
        }
        for name, point in last.items()
        if name not in style.hidden()
    ]
    ends += [{"always": True, "text": text, "end": extent.pixel(value)} for text, value in others]
    for end, place in zip(ends, spread([end["end"] for end in ends], LABEL_GAP, 0, HEIGHT), strict=True):
        end["place"] = place
    base = alt.Chart(alt.InlineData(values=ends)).transform_filter(DRAWN)
    leader = base.mark_rule(strokeWidth=1, opacity=0.6).encode(
        x=alt.XValue(alt.expr("width + 3")), x2=alt.X2Value(alt.expr("width + 14")),
        y=alt.Y("end:Q", scale=None), y2="place:Q", color=COLOUR,
    )  # fmt: skip
    named = base.transform_filter("datum.colour").mark_text(align="left", dx=17, baseline="middle")
    plain = base.transform_filter("!datum.colour").mark_text(align="left", dx=17, baseline="middle", fontStyle="italic")
    at_end = {"x": alt.XValue("width"), "y": alt.Y("place:Q", scale=None), "text": "text:N"}
    parts = [leader, named.encode(color=COLOUR, **at_end), plain.encode(**at_end)]
    return alt.LayerChart(layer=parts).properties(name=LABELS)
