"""The charts of a report, for the page and as picture files: what each one asks, and how it is drawn.

A chart is made of the rows of one section, as records.csv has them; of one shape where it has token counts on an axis.
Its title is its question. Where the rows cannot answer it, NoChart says why.
"""

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from swiglu_bench.rows.figures import MIB, mebibytes, milliseconds, token_text, tokens_text
from swiglu_bench.rows.finished_run import PERMUTED, FinishedRun, Losses
from swiglu_bench.rows.record import BASELINE, Record, Status, grouped, unique
from swiglu_bench.show import ranking
from swiglu_bench.show.sections import Section, sections

Rows = Sequence[Record]
Chart = alt.LayerChart
Picture = alt.LayerChart | alt.VConcatChart
Point = dict[str, Any]
"""`name` (as the legend has it), `tokens`, `value`, and where there is an interval `low` and `high`; TIPS' texts."""
Value = Callable[[Any], Any]

PALETTE = (
    "#7d8590", "#a8754a", "#3f86e0", "#159a94", "#5d8ba3", "#b58d14", "#8b9720", "#dc4453", "#9268da", "#d957a6",
    "#2f9e5b", "#5f70dc", "#dd7a1c", "#b24ec6", "#d9705f", "#1b98c2", "#639c1e", "#c2566f", "#a47bb0", "#a9822f",
)  # fmt: skip
"""Told apart on white and on black, at about 3:1 or more against both."""
FORMS = ("circle", "square", "diamond", "triangle-up")
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3))
PER_FORM = 10
"""After so many colours, points have the next form and lines the next dashes: later hues are like earlier ones."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
WIDTH, HEIGHT, ROW_HEIGHT = 640, 340, 24
GREY = "#8a8f98"
WIDE = 12
"""A linear axis that ends at more than so many times its beginning hides the small values."""
TIPS = {
    "name": "implementation", "case": "case", "time": "time", "compared": "time ÷ baseline's", "verdict": "verdict",
    "limit": "of the limit", "memory": "memory", "precision": "error",
}  # fmt: skip
TIMES, SIZES, PLAIN = "format(datum.value, '~g') + '×'", "format(datum.value, ',~f')", "format(datum.value, '~g')"
TOKENS = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : datum.value"


class NoChart(Exception):
    """The rows cannot answer the question; the message says why, in one sentence."""


@dataclass(frozen=True)
class Style:
    """How implementations appear, the same in every chart of a report."""

    slots: Mapping[str, int]
    """Implementation -> number of its colour, from 0."""
    lesser: frozenset[str] = frozenset()
    """Those that do less than the baseline, and are not ranked."""

    def colour(self, name: str) -> str:
        """The colour of an implementation, as #rrggbb."""
        return PALETTE[self.slots[name] % len(PALETTE)]

    def shape(self, name: str) -> str:
        """The form of an implementation's points."""
        return FORMS[self.slots[name] // PER_FORM % len(FORMS)]

    def dash(self, name: str) -> tuple[int, ...]:
        """The dash pattern of an implementation's lines; of eager with another summation order, dots."""
        return (2, 2) if name == PERMUTED else DASHES[self.slots[name] // PER_FORM % len(DASHES)]

    def label(self, name: str) -> str:
        """The name, with a star where it is not ranked."""
        return f"{name} *" if name in self.lesser else name

    def channels(self, names: Iterable[str], lines: bool = False, legend: bool = True) -> dict[str, Any]:
        """Colour and form of points, or dashes of lines, by `name`, which share one legend."""
        names = list(names)
        labels, shown = [self.label(name) for name in names], {} if legend else {"legend": None}
        parts: list[tuple[Any, str, Value]] = [(alt.Color, "color", self.colour)]
        parts += [(alt.StrokeDash, "strokeDash", self.dash) if lines else (alt.Shape, "shape", self.shape)]
        return {
            channel: kind("name:N", title=None, scale=alt.Scale(domain=labels, range=list(map(of, names))), **shown)
            for kind, channel, of in parts
        }


def slots(names: Iterable[str], known: Sequence[str]) -> dict[str, int]:
    """A colour number per name: a known one always has its own, the others get the first that are free."""
    names = unique(names)
    fixed = {name: known.index(name) for name in names if name in known}
    free = (number for number in range(len(names) + len(known)) if number not in fixed.values())
    return fixed | {name: next(free) for name in names if name not in fixed}


def colours(runs: Sequence[FinishedRun]) -> dict[str, int]:
    """The number of each implementation's colour: one in all sections."""
    from swiglu_bench.contenders import CATALOGUE

    names = [name for run in runs for name in run.implementations]
    return slots(names, [implementation.name for implementation in CATALOGUE])


def style_of(section: Section, numbers: Mapping[str, int]) -> Style:
    """How a section is drawn."""
    return Style(numbers, frozenset(row.implementation for row in section.ok if not row.comparable))


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
        "legend": {"labelColor": text, "symbolOpacity": 1, "labelFontSize": 12, "labelLimit": 400, "symbolSize": 80},
        "rule": {"color": faint},
    }  # fmt: skip


def time(rows: Rows, style: Style) -> Chart:
    """Time of a call over token counts, with the limit."""
    usable = sorted(timed(rows), key=lambda row: row.time_ms or 0.0)
    scale, unit = (1, "ms") if (usable[-1].time_ms or 0.0) >= 1 else (1000, "µs")
    limits = {row.tokens: row.limit_ms * scale for row in usable if row.limit_ms is not None}
    axis = _axis(f"time of a call ({unit}), log scale", PLAIN, log=True)
    chart = _over_tokens(usable, style, axis, lambda row: row.time_ms * scale, limits)
    return _titled(chart, "How long does a call take?", rows, "dashed: limit" if limits else "")


def speedup(rows: Rows, style: Style) -> Chart:
    """The baseline's time over each one's, with the 95% interval; the baseline is the line at 1."""
    usable = [row for row in ranking.with_intervals(rows) if row.implementation != row.baseline]
    if not usable:
        named = [name for name in unique(row.baseline for row in rows) if name]
        why = f"only the baseline {named[0]} has a ratio" if named else "no baseline was timed in the same rounds"
        raise NoChart(f"There is no speed-up to draw: {why}.")
    baseline = usable[0].baseline
    log = max(row.ratio or 1.0 for row in usable) / min(row.ratio or 1.0 for row in usable) > WIDE
    chart = _over_tokens(
        usable, style, _axis(f"{baseline}'s time ÷ time", TIMES, log), lambda row: 1 / row.ratio,
        dict.fromkeys((row.tokens for row in usable), 1.0), lambda row: (1 / row.ratio_high, 1 / row.ratio_low),
    )  # fmt: skip
    return _titled(chart, f"How much faster than {baseline}?", usable, f"bars: 95% intervals; dashed: {baseline}")


def limit(rows: Rows, style: Style) -> Chart:
    """The limit's time over each one's, in percent."""
    usable = [row for row in timed(rows) if row.limit_pct is not None]
    if not usable:
        raise NoChart("No limit was measured for these rows, so there is no share of it to draw.")
    usable.sort(key=lambda row: -(row.limit_pct or 0.0))
    axis, level = _axis("limit's time ÷ time (%)", "datum.value + '%'"), {row.tokens: 100.0 for row in usable}
    chart = _over_tokens(usable, style, axis, lambda row: row.limit_pct, level)
    what = "dashed: limit, the case's bare matrix products in the same rounds or its bytes at copy bandwidth"
    return _titled(chart, "How near to this machine's limit?", usable, what)


def error(rows: Rows, style: Style) -> Chart:
    """Error of the worst tensor over eager's error for it, every case a point."""
    checked = [row for row in rows if row.status in {Status.OK, Status.INCORRECT} and (row.eager_error or 0.0) > 0]
    usable = [row for row in checked if row.error is not None and row.error < math.inf]
    if not usable:
        raise NoChart("These rows carry no error that is a number, so none can be drawn.")

    def value(row: Record) -> float:
        return (row.error or 0.0) / (row.eager_error or 1.0)

    log = max(map(value, usable)) >= WIDE
    by_name = grouped(usable, lambda row: row.implementation).values()
    shown = [row for own in sorted(by_name, key=lambda own: max(map(value, own))) for row in own]
    forms = {Status.INCORRECT: {"form": "cross"}}
    points = [_point(row, style, value) | forms.get(row.status, {}) for row in shown if value(row) > 0 or not log]
    names, axis = unique(row.implementation for row in shown), _axis("error ÷ eager's error", TIMES, log)
    chart = _dots(points, style, names, axis, [1.0])
    what = "a point per case: the tensor with the largest error from fp64; dashed: eager"
    what += "; cross: incorrect" if any(row.status is Status.INCORRECT for row in usable) else ""
    return _titled(chart, "How precise, compared with eager?", usable, what, whole_section=True)


def pareto(rows: Rows, style: Style) -> Chart:
    """Peak memory against time at one token count; the line joins those that none beats at both."""
    usable = [row for row in timed(rows) if row.comparable and row.peak_bytes is not None]
    if len(usable) < 2:
        if (mode := rows[0].mode) == "step":
            raise NoChart("No run in this report measured the memory of these cases: swiglu-bench memory does.")
        why = f"there is no memory to plot against the time of a {mode}"
        raise NoChart(f"swiglu-bench memory measures whole steps: {why}.")
    points = [_point(row, style, lambda row: row.time_ms) | {"mib": _mib(row.peak_bytes)} for row in usable]
    room = alt.Scale(zero=False, padding=20)
    x = alt.X("mib:Q", title="peak memory (MiB), smaller is better", scale=room, axis=alt.Axis(labelExpr=SIZES))
    y = alt.Y("value:Q", title="time of a step (ms), smaller is better", scale=room)
    best, front = math.inf, []
    for point in sorted(points, key=lambda point: (point["mib"], point["value"])):
        if point["value"] < best:
            best = point["value"]
            front.append({"mib": point["mib"], "value": point["value"]})
    names = unique(row.implementation for row in usable)
    dots = _chart(points).mark_point(filled=True, size=90, opacity=1)
    dots = dots.encode(x=x, y=y, tooltip=_tooltips(points), **style.channels(names))
    chart = _layers(_dashed(front).encode(x=x, y=y, order="mib:Q"), dots).properties(width=WIDTH, height=HEIGHT)
    what = "dashed: no other is both faster and smaller, by the medians"
    return _titled(chart, "What does speed cost in memory?", usable, what)


def memory(rows: Rows, style: Style) -> Chart:
    """Peak and saved memory of a step at one token count, and what arithmetic predicts for the peak."""
    usable = [row for row in rows if row.status is Status.OK and row.peak_bytes is not None]
    if not usable:
        raise NoChart("No memory was measured in these rows.")
    usable.sort(key=lambda row: row.peak_bytes or 0)
    names = unique(row.implementation for row in usable)
    points = [
        {name: _mib(getattr(row, f"{name}_bytes")) for name in ("peak", "saved", "predicted_peak")}
        | {"name": style.label(row.implementation), "memory": _memory_text(row)}
        for row in usable
    ]
    base = _chart(points).encode(y=_rows(style, names), tooltip=_tooltips(points))
    colour = style.channels(names, legend=False)["color"]
    x = alt.X("peak:Q", title="MiB, smaller is better", axis=alt.Axis(labelExpr=SIZES))
    peak = base.mark_bar(opacity=0.35, height=16).encode(x=x, color=colour)
    saved = base.mark_bar(height=16).encode(x="saved:Q", color=colour)
    tick = base.mark_tick(thickness=2, height=20, color=GREY).encode(x="predicted_peak:Q")
    chart = _layers(peak, saved, tick).properties(width=WIDTH, height=ROW_HEIGHT * len(names))
    what = "bar: peak above inputs and weights; full colour: of it saved for backward; tick: predicted peak"
    return _titled(chart, "How much memory does a step need?", usable, what)


def timed(rows: Iterable[Record]) -> list[Record]:
    """The rows whose time counts; raises NoChart where there is none."""
    usable = [row for row in rows if row.status is Status.OK and row.time_ms is not None]
    if not usable:
        raise NoChart("No row has a time.")
    return usable


def _over_tokens(
    rows: Rows, style: Style, axis: dict[str, Any], value: Value, levels: Mapping[int, float],
    ends: Value | None = None,
) -> Chart:  # fmt: skip
    """Lines over token counts with intervals, and a dashed line of `levels`; rows of dots where there is one count."""
    points, names = [_point(row, style, value, ends) for row in rows], unique(row.implementation for row in rows)
    counts = sorted({row.tokens for row in rows})
    if len(counts) == 1:
        return _dots(points, style, names, axis, levels.values())
    x = alt.X(
        "tokens:Q", title="tokens in a call, log scale",
        scale=alt.Scale(type="log", base=2, domain=[counts[0], counts[-1]], nice=False, padding=10),
        axis=alt.Axis(values=counts, labelExpr=TOKENS, labelOverlap="greedy", labelSeparation=3),
    )  # fmt: skip
    y, compared = alt.Y("value:Q", **axis), [{"tokens": count, "value": level} for count, level in levels.items()]
    near, faded = _by_legend()
    base, line = _chart(points), style.channels(names, lines=True)
    line["color"].legend = alt.Legend(symbolStrokeWidth=0)  # the form of the points, without dashes around it
    whiskers = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5)
    marks = base.mark_point(filled=True, size=55)
    return _layers(
        _dashed(compared).encode(x=x, y=y),
        base.mark_line(strokeWidth=2).encode(x=x, y=y, opacity=faded, **line).add_params(near),
        whiskers.encode(x=x, y=alt.Y("low:Q", **axis), y2="high:Q", opacity=faded, color=line["color"]),
        marks.encode(x=x, y=y, opacity=faded, tooltip=_tooltips(points), **style.channels(names)),
    ).properties(width=WIDTH, height=HEIGHT)


def _dots(
    points: Sequence[Point], style: Style, names: Sequence[str], axis: dict[str, Any], levels: Iterable[float]
) -> Chart:
    """One row per implementation in the order of the names, with intervals; dashed lines across them at `levels`."""
    x, base = alt.X("value:Q", **axis), _chart(points).encode(y=_rows(style, names))
    look = style.channels(names, legend=False)
    look["shape"] = alt.Shape("form:N", scale=None)
    level = _chart([{"value": value} for value in levels])
    whiskers = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2)
    return _layers(
        level.mark_rule(strokeDash=[5, 4], strokeWidth=1.5).encode(x=x),
        whiskers.encode(x=alt.X("low:Q", **axis), x2="high:Q", color=look["color"]),
        base.mark_point(filled=True, size=70, opacity=0.9).encode(x=x, tooltip=_tooltips(points), **look),
    ).properties(width=WIDTH, height=ROW_HEIGHT * len(names))


def _axis(title: str, text: str, log: bool = False) -> dict[str, Any]:
    """An axis of figures; `text` is the Vega expression of its labels."""
    scale = alt.Scale(type="log", nice=False, padding=8) if log else alt.Scale(zero=False, padding=8)
    return {"title": title, "scale": scale, "axis": alt.Axis(labelExpr=text, labelOverlap="greedy")}


def _rows(style: Style, names: Sequence[str]) -> alt.Y:
    labels = [style.label(name) for name in names]
    return alt.Y("name:N", title=None, sort=labels, axis=alt.Axis(grid=True, ticks=False, domain=False))


def _by_legend() -> tuple[Any, Any]:
    """A choice of names by clicks on the legend, and the opacity that fades the others."""
    near = alt.selection_point(fields=["name"], bind="legend", name="near")
    return near, alt.condition(near, alt.value(1), alt.value(0.15))


def _layers(*parts: alt.Chart) -> Chart:
    return alt.LayerChart(layer=list(parts))


def _chart(points: Sequence[Point]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(points)))


def _dashed(values: Sequence[dict[str, Any]]) -> alt.Chart:
    return _chart(values).mark_line(strokeDash=[5, 4], strokeWidth=1.5, color=GREY)


def _tooltips(points: Sequence[Point]) -> list[alt.Tooltip]:
    has = {key for point in points for key, value in point.items() if value}
    return [alt.Tooltip(f"{key}:N", title=title) for key, title in TIPS.items() if key in has]


def _point(row: Record, style: Style, value: Value, ends: Value | None = None) -> Point:
    """What is drawn of a row, and the texts of its tooltip; floats with the digits that a picture can show."""
    name = row.implementation
    point: Point = {"name": style.label(name), "form": style.shape(name), "tokens": row.tokens}
    figures = dict(zip(("value", "low", "high"), (value(row), *(ends(row) if ends else ())), strict=False))
    point |= {key: float(f"{figure:.6g}") for key, figure in figures.items()}
    point["case"] = f"{row.shape}, {row.dtype}, {row.tokens} tokens"
    if row.time_ms is not None:
        point["time"] = milliseconds(row.time_ms).replace("us", "µs")
    if row.interval and name != row.baseline:
        point["compared"], point["verdict"] = "{:.3f} [{:.3f}, {:.3f}]".format(*row.interval), row.verdict
    if not row.comparable:
        point["verdict"] = "not ranked: fewer gradients than the baseline"
    if row.limit_pct is not None:
        point["limit"] = f"{row.limit_pct:.1f}% ({row.limit_kind})"
    point["memory"] = _memory_text(row)
    if row.error is not None and row.eager_error is not None:
        allowed = f"; {row.error_ratio:.0%} of the allowed" if row.error_ratio is not None else ""
        point["precision"] = f"{row.error:.2e}, eager's {row.eager_error:.2e}{allowed}"
    return point


def _memory_text(row: Record) -> str:
    named = {name: getattr(row, f"{name}_bytes") for name in ("peak", "saved", "workspace")}
    return ", ".join(f"{name} {mebibytes(value)} MiB" for name, value in named.items() if value is not None)


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB


def _titled(chart: Chart, question: str, rows: Rows, what: str, whole_section: bool = False) -> Chart:
    """The question above the chart; under it what the rows have in common, and what is drawn how."""
    first = rows[0]
    common = [first.mode, first.scope, *([] if whole_section else [f"{first.shape} ({first.sizes})"])]
    common += [", ".join(unique(row.dtype for row in rows))]
    common += [tokens_text([first.tokens])] if len({row.tokens for row in rows}) == 1 else []
    lines = [", ".join(filter(None, [*common, first.device])), *filter(None, [what])]
    if any(not row.comparable for row in rows):
        lines += ["*: fewer gradients than the baseline, not ranked"]
    return chart.properties(title=alt.TitleParams(text=question, subtitle=lines), usermeta={"about": what})


Question = tuple[Callable[[Rows, Style], Chart], tuple[str, ...]]
"""What draws the chart, and the columns whose values have a chart each."""
ERROR: dict[str, Question] = {"error": (error, ("dtype",))}
QUESTIONS: dict[str, dict[str, Question]] = {
    "time": {
        "speed-up": (speedup, ("shape",)),
        "time": (time, ("shape",)),
        "limit": (limit, ("shape",)),
        "memory-and-time": (pareto, ("shape", "tokens")),
        **ERROR,
    },
    "memory": {"memory": (memory, ("shape", "tokens")), **ERROR},
    "verify": ERROR,
}
"""What each kind of section asks by name, the most important first."""


def answers(section: Section, style: Style) -> Iterator[tuple[str, list[tuple[str, Chart]], str]]:
    """Every question of a section with its charts and what tells them apart, or without any and the reason why."""
    for name, (draw, each) in QUESTIONS[section.kind].items():
        found, reasons = [], []
        for text, rows in _parts(section.rows, each):
            try:
                found.append((text, draw(rows, style)))
            except NoChart as reason:
                reasons.append(str(reason))
        yield name, found, "" if found else reasons[0]


def _parts(rows: Rows, each: tuple[str, ...]) -> Iterator[tuple[str, Rows]]:
    """The rows that have a chart each, the largest token count first, with what tells the charts apart."""
    several = [column for column in each if len({getattr(row, column) for row in rows}) > 1]
    parts = grouped(rows, lambda row: tuple(getattr(row, column) for column in each)).values()
    for part in sorted(parts, key=lambda part: -part[0].tokens if "tokens" in each else 0):
        own = {column: str(getattr(part[0], column)) for column in several}
        own |= {"tokens": f"{token_text(part[0].tokens)} tokens"} if "tokens" in own else {}
        yield ", ".join(own.values()), part


def pictures(runs: Sequence[FinishedRun]) -> Iterator[tuple[str, Picture | str]]:
    """A file name without its ending, and the chart or why there is none; no name comes twice."""
    numbers, taken = colours(runs), set[str]()

    def new(name: str) -> str:
        while name in taken:
            name += "-again"
        taken.add(name)
        return name

    for section in sections(runs):
        for question, charts, reason in answers(section, style_of(section, numbers)):
            what = section.mode if section.kind == "time" else section.kind
            parts = [section.names, section.scope, what, section.dtype, question]
            stem = "-".join(unique(map(_slug, parts)))
            if reason:
                yield stem, reason
            for text, chart in charts:
                yield new("-".join(filter(None, (stem, _slug(text))))), chart
    for run in runs:
        if run.losses is not None:
            yield new(f"{_slug(run.label)}-curves"), training_picture(run, Style(numbers))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


POINTS = 300
"""Steps are averaged so that a curve has about as many points."""
NO_CURVE = "Nothing was trained to the end, so there is no curve."


def training_charts(run: FinishedRun, style: Style) -> Iterator[tuple[str, Chart | str]]:
    """Each question and its chart, or why there is none."""
    losses, names, frozen = _drawn(run)
    fall: Chart | str = NO_CURVE
    if names:
        about = "means over seeds" + ("; thin: eager's seeds one by one" if BASELINE in names else "")
        fall = _explained(over_steps(losses, names, style), about)
    yield "How does the loss fall?", fall
    distance: Chart | str = "Nothing was trained beside eager, so there is no difference to draw."
    if any(name != BASELINE for name in names) and BASELINE in losses:
        about = "loss minus eager's from the same seed and at the same step, mean over seeds"
        about += f"; dotted: {PERMUTED}, its sums in another order" if PERMUTED in names else ""
        about += f"; without {', '.join(frozen)}, whose blocks' weights are not trained" if frozen else ""
        distance = _explained(from_eager(losses, names, style, frozen), about)
    yield "How far is each loss from eager's?", distance


def _explained(chart: Chart, about: str) -> Chart:
    near, faded = _by_legend()
    chart.layer[-1] = chart.layer[-1].encode(opacity=faded).add_params(near)
    return chart.properties(usermeta={"about": about})


def _drawn(run: FinishedRun) -> tuple[Losses, list[str], list[str]]:
    """The losses, who was trained to the end from at least one seed, and of them the frozen, which learn less."""
    losses = run.losses or {}
    names = [row.implementation for row in run.records if losses.get(row.implementation)]
    return losses, names, [row.implementation for row in run.records if row.frozen and row.implementation in names]


def training_picture(run: FinishedRun, style: Style) -> alt.VConcatChart | str:
    """Both charts as one, or why there is none."""
    losses, names, frozen = _drawn(run)
    if not names:
        return NO_CURVE
    return curves(losses, names, f"{run.summaries[0].task}: loss over steps", style, frozen)


def curves(
    losses: Losses, names: Sequence[str], title: str, style: Style, without: Collection[str] = ()
) -> alt.VConcatChart:
    """Both charts as one picture; the lower one leaves out `without`, whose differences would flatten the others'."""
    left_out = [name for name in names if name in without]
    lines = [f"below: without {', '.join(left_out)}, whose blocks' weights are not trained"] if left_out else []
    both = alt.vconcat(over_steps(losses, names, style), from_eager(losses, names, style, without))
    return both.properties(title=alt.TitleParams(text=title, subtitle=lines))


def over_steps(losses: Losses, names: Sequence[str], style: Style) -> Chart:
    """The losses as means over seeds, and each of eager's seeds as a thinner line."""
    own = losses.get(BASELINE, {}) if BASELINE in names else {}
    each = [point for seed, curve in own.items() for point in _means(BASELINE, [curve], seed)]
    means = [point for name in names for point in _means(name, list(losses[name].values()))]
    seeds = _lines(each, names, style, "loss", strokeWidth=1, opacity=0.6)
    layers = (seeds.encode(detail="seed:N"), _lines(means, names, style, "loss", strokeWidth=1.5))
    return _layers(*layers).properties(width=WIDTH, height=HEIGHT)


def from_eager(losses: Losses, names: Sequence[str], style: Style, left_out: Collection[str] = ()) -> Chart:
    """The difference from eager of the same seed, means over seeds."""
    points, eager = list[Point](), losses.get(BASELINE, {})
    for name in (name for name in names if name not in (BASELINE, *left_out)):
        pairs = ((mine, eager[seed]) for seed, mine in losses[name].items() if seed in eager)
        points += _means(name, [[own - other for own, other in zip(*pair, strict=False)] for pair in pairs])
    lines = _lines(points, names, style, "loss - eager's", strokeWidth=1.2)
    return _layers(lines).properties(width=WIDTH, height=HEIGHT // 2)


def _lines(points: list[Point], names: Sequence[str], style: Style, title: str, **mark: Any) -> alt.Chart:
    x = alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=alt.Axis(tickMinStep=1))
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(minExtent=44))
    look = style.channels(names, lines=True)
    return _chart(points).mark_line(clip=True, **mark).encode(x=x, y=y, tooltip=alt.Tooltip("name:N"), **look)


def _means(name: str, of_seeds: Sequence[Sequence[float]], seed: int = 0) -> list[Point]:
    """Points of the curves' mean, each the mean of neighbouring steps; values that are not finite are left out."""
    values = [statistics.fmean(at) for at in zip(*of_seeds, strict=False)]
    every = max(1, len(values) // POINTS)
    parts = ((start, values[start : start + every]) for start in range(0, len(values), every))
    means = ((start + (len(part) - 1) / 2, statistics.fmean(part)) for start, part in parts)
    finite = ((step, float(f"{value:.6g}")) for step, value in means if math.isfinite(value))
    return [{"name": name, "seed": seed, "step": step, "value": value} for step, value in finite]


SPLIT = {False: "all tokens", True: "split sequence"}


def scaling_points(rows: Rows) -> list[Point]:
    """A point for each row with a time, and for the same implementation on one GPU, timed beside the largest group."""
    key = ("shape", "dtype", "mode", "tokens", "sequence_parallel", "implementation")
    latest = {tuple(getattr(row, name) for name in (*key, "ranks")): row for row in rows if row.time_ms is not None}
    points: dict[tuple[Any, ...], Point] = {}
    for row in sorted(latest.values(), key=lambda row: row.ranks):
        case = {name: getattr(row, name) for name in key}
        what = case | {"split": SPLIT[row.sequence_parallel], "name": row.implementation}
        if row.single_ms:
            points[*case.values(), 1] = what | {"ranks": 1, "ms": row.single_ms, "efficiency": 1.0}
        if row.ranks > 1:
            figures = {"ranks": row.ranks, "ms": row.time_ms, "efficiency": row.efficiency}
            points[*case.values(), row.ranks] = what | figures
    return list(points.values())


def scaling(points: Sequence[Point], known: Sequence[str]) -> alt.VConcatChart:
    """For each shape, mode and token count a pair of panels: time, on log axes beside perfect scaling; efficiency."""
    names, ticks = unique(point["name"] for point in points), sorted({point["ranks"] for point in points})
    colour = Style(slots(names, known)).channels(names)["color"]
    over = alt.X("ranks:Q", title="GPUs", scale=alt.Scale(type="log", base=2, nice=False, padding=12),
                 axis=alt.Axis(values=ticks, format="d"))  # fmt: skip
    dashes = alt.StrokeDash("split:N", title=None,
                            scale=alt.Scale(domain=list(SPLIT.values()), range=[[1, 0], [5, 3]]))  # fmt: skip

    def panel(own: list[Point], y: alt.Y, title: str, ideal: list[Point]) -> Any:
        base = _chart(own).encode(x=over, y=y, color=colour)
        lines, marks = base.mark_line(strokeWidth=1.6).encode(strokeDash=dashes), base.mark_point(filled=True, size=34)
        dotted = _chart(ideal).mark_line(strokeWidth=1, strokeDash=[1, 3], color=GREY)
        head = alt.TitleParams(title, fontSize=12, fontWeight="normal", frame="group")
        return _layers(dotted.encode(x=over, y=y), lines, marks).properties(width=300, height=190, title=head)

    bands = []
    cases = grouped(points, lambda point: (point["shape"], point["mode"], point["dtype"], point["tokens"]))
    for (shape, mode, dtype, tokens), own in cases.items():
        first = max(point["ms"] * point["ranks"] for point in own if point["ranks"] == min(ticks))
        ideal = [{"ranks": count, "ms": first / count, "efficiency": 1.0} for count in ticks]
        times = alt.Y("ms:Q", title="ms, log scale", scale=alt.Scale(type="log", nice=False, padding=8))
        share = alt.Y("efficiency:Q", title="efficiency", axis=alt.Axis(format="%"), scale=alt.Scale(domainMin=0))
        shares = [point for point in own if point["efficiency"] is not None]
        bands.append(alt.hconcat(
            panel(own, times, f"{mode} {shape}, {tokens:,} tokens, {dtype}", ideal),
            panel(shares, share, "time on one GPU / GPUs / time", ideal),
        ))  # fmt: skip
    return alt.vconcat(*bands).properties(title="The MLP on several GPUs, tensor-parallel; dotted: perfect scaling")


def pairs(data: Sequence[Point], floor: float, subtitle: str) -> Chart:
    """The A/A pairs of `noise`, sorted by their differences in percent; `floor` is the median noise floor."""
    colour = alt.condition("datum.verdict == 'tie'", alt.value(PALETTE[2]), alt.value(PALETTE[7]))
    place = alt.X("place:Q", title="pair, sorted by its ratio", scale=alt.Scale(nice=False, padding=8))
    axis = alt.Y("ratio_low:Q", title="difference in time (%), with its 95% interval")
    bars = _chart(data).mark_rule(strokeWidth=1.5, opacity=0.55)
    dots = _chart(data).mark_circle(size=22, opacity=1).encode(x=place, y="ratio:Q", color=colour)
    lines = _chart([{"y": floor}, {"y": -floor}]).mark_rule(strokeDash=[5, 3]).encode(y="y:Q")
    zero = _chart([{"y": 0}]).mark_rule().encode(y="y:Q")
    chart = _layers(zero, lines, bars.encode(x=place, y=axis, y2="ratio_high:Q", color=colour), dots)
    title = alt.Title("How much do two equal contenders differ?", subtitle=[subtitle])
    return chart.properties(width=WIDTH, height=HEIGHT * 3 // 4, title=title)
