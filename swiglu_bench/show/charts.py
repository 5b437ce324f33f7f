"""What a report asks of each kind of section, and the charts that answer, for the page and as picture files.

A chart is made of the rows of one section, as records.csv has them; of one shape where it has token counts on an axis.
A chart's title is its question. Where the rows cannot answer it, NoChart says why.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from swiglu_bench.rows.figures import MIB, token_text
from swiglu_bench.rows.finished_run import PERMUTED, FinishedRun, FinishedTraining, Losses
from swiglu_bench.rows.record import BASELINE, Record, Status, grouped, unique
from swiglu_bench.show import drawing, ranking
from swiglu_bench.show.drawing import NoChart, Point, Style, linear_range, log_range, points_of, timed, titled
from swiglu_bench.show.sections import Section, sections

Rows = Sequence[Record]
Picture = alt.LayerChart | alt.VConcatChart
WIDE = 12
"""A linear axis that ends at more than so many times its beginning hides the small values."""
TIMES, SIZES, PLAIN = "format(datum.value, '~g') + '×'", "format(datum.value, ',~f')", "format(datum.value, '~g')"


def time(rows: Rows, style: Style) -> alt.LayerChart:
    """Time of a call over token counts, with the limit."""
    usable = sorted(timed(rows), key=lambda row: row.time_ms or 0.0)
    scale, unit = (1, "ms") if (usable[-1].time_ms or 0.0) >= 1 else (1000, "µs")
    points = points_of(usable, lambda row: row.time_ms * scale)
    limits = {row.tokens: row.limit_ms * scale for row in usable if row.limit_ms is not None}
    extent = log_range([*(point["value"] for point in points), *limits.values()])
    title = f"time of a call ({unit}), log scale"
    chart = drawing.over_tokens(points, style, extent, title, PLAIN, limits, "limit")
    return titled(chart, "How long does a call take?", rows, style, "dashed: limit" if limits else "")


def speedup(rows: Rows, style: Style) -> alt.LayerChart:
    """The baseline's time over each one's, with the 95% interval; the baseline is the line at 1."""
    usable = [row for row in ranking.with_intervals(rows) if row.implementation != row.baseline]
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


def pareto(rows: Rows, style: Style) -> alt.LayerChart:
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
    times = alt.Axis(values=down.ticks, labelExpr=PLAIN)
    x = alt.X("mib:Q", title="peak memory (MiB), smaller is better", scale=across.scale(), axis=sizes)
    y = alt.Y("value:Q", title="time of a step (ms), smaller is better", scale=down.scale(), axis=times)
    base = drawing.drawn()
    line = drawing.dashed(_front(points))
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=x, y=y, color=drawing.COLOUR, shape=drawing.SHAPE, tooltip=drawing.tooltips(points)
    )
    names = []
    for side, align, dx in (("right", "left", 10), ("left", "right", -10)):
        here = base.transform_filter(f"datum.side == '{side}'").encode(
            x=x, y=alt.Y("place:Q", scale=None), text="label:N"
        )
        text: dict[str, Any] = {"align": align, "dx": dx, "baseline": "middle"}
        names += [here.mark_text(style="halo", **text), here.mark_text(**text).encode(color=drawing.COLOUR)]
    labels = alt.LayerChart(layer=names).properties(name=drawing.LABELS)
    chart = alt.LayerChart(layer=[line.encode(x=x, y=y, order="mib:Q"), labels, dots])
    chart = drawing.filled(chart.properties(width=drawing.WIDTH, height=drawing.HEIGHT), points, style)
    what = "dashed: no other is both faster and smaller, by the medians"
    return titled(chart, "What does speed cost in memory?", usable, style, what)


def memory(rows: Rows, style: Style) -> alt.LayerChart:
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
            "memory": drawing.memory_text(row),
        }
        for row in usable
    ]
    base, tip = drawing.drawn(), drawing.tooltips(points)
    labels = [style.label(row.implementation) for row in usable]
    y = alt.Y("label:N", title=None, sort=labels, axis=alt.Axis(ticks=False, domain=False))
    axis = alt.Axis(tickCount=8, labelExpr=SIZES, labelOverlap="greedy")
    x = alt.X("peak:Q", title="MiB, smaller is better", axis=axis)
    peak = base.mark_bar(opacity=0.35, height=16).encode(x=x, y=y, color=drawing.COLOUR, tooltip=tip)
    saved = base.mark_bar(height=16).encode(x=alt.X("saved:Q"), y=y, color=drawing.COLOUR, tooltip=tip)
    tick = base.transform_filter("datum.predicted != null").mark_tick(thickness=2, height=20, color=drawing.GREY)
    chart = alt.LayerChart(layer=[peak, saved, tick.encode(x=alt.X("predicted:Q"), y=y, tooltip=tip)])
    what = "bar: peak above inputs and weights; full colour: of it saved for backward; tick: predicted peak"
    return titled(drawing.in_rows(chart, points, style), "How much memory does a step need?", usable, style, what)


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


def _roomy(values: Sequence[float], margin: float = 0.0) -> drawing.Range:
    """An axis with room for names at both ends."""
    low, high = min(values), max(values)
    room = margin * (high - low)
    if low > 0 and high / low > 2:
        return log_range([low / (high / low) ** margin, high * (high / low) ** margin])
    return linear_range([low - room, high + room])


def _beside(
    points: Sequence[Point], style: Style, down: drawing.Range, across: drawing.Range
) -> list[tuple[float, str]]:
    """Where names stand: how far from the top, and on which side of their points, so that few overlap."""
    tops = [down.pixel(point["value"]) for point in points]
    lefts = [drawing.WIDTH - across.pixel(point["mib"], drawing.WIDTH) for point in points]
    widths = [drawing.CHARACTER * len(style.label(point["implementation"])) + 14 for point in points]
    sides = []
    for top, left, width in zip(tops, lefts, widths, strict=True):
        blocked = any(
            left + 4 < x < left + width and abs(y - top) < drawing.LABEL_GAP for x, y in zip(lefts, tops, strict=True)
        )
        sides.append("left" if (left + width > drawing.WIDTH or blocked) and left > width else "right")
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
        for index, place in zip(
            group, drawing.spread([tops[i] for i in group], drawing.LABEL_GAP, 6, drawing.HEIGHT - 6), strict=True
        ):
            places[index] = place
    return list(zip(places, sides, strict=True))


EACH: dict[str, Callable[[Any], str]] = {
    "shape": str,
    "dtype": str,
    "tokens": lambda count: f"{token_text(count)} tokens",
}
"""What charts of one question may differ in, and what tells them apart."""


@dataclass(frozen=True)
class Question:
    """What one kind of chart answers."""

    name: str
    draw: Callable[[Rows, Style], alt.LayerChart]
    each: tuple[str, ...] = ()
    """Columns whose values have a chart each: of EACH."""


ERROR = Question("error", error, ("dtype",))
QUESTIONS = {
    "time": (
        Question("speed-up", speedup, ("shape",)),
        Question("time", time, ("shape",)),
        Question("limit", limit, ("shape",)),
        Question("memory-and-time", pareto, ("shape", "tokens")),
        ERROR,
    ),
    "memory": (Question("memory", memory, ("shape", "tokens")), ERROR),
    "verify": (ERROR,),
}
"""What each kind of section asks, the most important first."""


@dataclass(frozen=True)
class Answer:
    """The charts of one question, or why there is none."""

    name: str
    charts: list[tuple[str, alt.LayerChart]] = field(default_factory=list)
    """What tells them apart, and the chart."""
    reason: str = ""


def answers(section: Section, style: Style) -> Iterator[Answer]:
    """Every question of a section, answered or with the reason why not."""
    for question in QUESTIONS[section.kind]:
        found, reasons = [], []
        for text, rows in _parts(section.rows, question.each):
            try:
                found.append((text, question.draw(rows, style)))
            except NoChart as reason:
                reasons.append(str(reason))
        yield Answer(question.name, found, "" if found else reasons[0])


def _parts(rows: Rows, each: tuple[str, ...]) -> Iterator[tuple[str, Rows]]:
    """The rows that have a chart each, the largest token count first, with what tells the charts apart."""
    several = [column for column in each if len({getattr(row, column) for row in rows}) > 1]
    parts = grouped(rows, lambda row: tuple(getattr(row, column) for column in each)).values()
    for part in sorted(parts, key=lambda part: -part[0].tokens if "tokens" in each else 0):
        yield ", ".join(EACH[column](getattr(part[0], column)) for column in several), part


def colours(runs: Sequence[FinishedRun]) -> dict[str, int]:
    """The number of each implementation's colour: one in all sections."""
    from swiglu_bench.contenders import CATALOGUE

    names = [name for run in runs for name in run.implementations]
    return drawing.slots(names, [implementation.name for implementation in CATALOGUE])


def style_of(section: Section, numbers: Mapping[str, int]) -> Style:
    """How a section is drawn."""
    alike = ranking.alike(section.rows) if section.kind == "time" else {}
    return Style(numbers, alike, frozenset(row.implementation for row in section.ok if not row.comparable))


def pictures(runs: Sequence[FinishedRun]) -> Iterator[tuple[str, Picture | str]]:
    """A file name without its ending, and the chart or why there is none; no name comes twice."""
    numbers, taken = colours(runs), set[str]()

    def new(name: str) -> str:
        while name in taken:
            name += "-again"
        taken.add(name)
        return name

    for section in sections(runs):
        for answer in answers(section, style_of(section, numbers)):
            what = section.mode if section.kind == "time" else section.kind
            parts = [section.names, section.scope, what, section.dtype, answer.name]
            stem = "-".join(dict.fromkeys(map(_slug, parts)))
            if answer.reason:
                yield stem, answer.reason
            for text, chart in answer.charts:
                yield new("-".join(filter(None, (stem, _slug(text))))), chart
    for run in runs:
        if run.training:
            yield new(f"{_slug(run.label)}-curves"), training_picture(run.training, Style(numbers))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


POINTS = 300
"""Steps are averaged so that a curve has about as many points."""
AXIS = 44
"""Pixels of an axis' labels at least, so that the axes of both charts are aligned."""
DOTTED = (2, 2)
"""eager with another summation order; the others have the dashes that they have in all charts."""
NO_CURVE = "Nothing was trained to the end, so there is no curve."


def drawn(training: FinishedTraining) -> list[str]:
    """The implementations with curves: those trained to the end from at least one seed."""
    return [name for name in training.names if training.losses.get(name)]


def frozen(training: FinishedTraining) -> set[str]:
    """The implementations that are hidden at first: frozen ones learn less and would flatten the other curves."""
    return {row.implementation for row in training.summaries if row.frozen}


def training_charts(training: FinishedTraining, style: Style) -> Iterator[tuple[str, str, alt.LayerChart | str]]:
    """Question, what is drawn how, and the chart or why there is none; who is drawn is the page's choice."""
    names = drawn(training)
    question = "How does the loss fall?"
    if names:
        about = "means over seeds; thin: eager's seeds one by one" if BASELINE in names else "means over seeds"
        yield question, about, _choosable(over_steps(training.losses, names, style), training)
    else:
        yield question, "", NO_CURVE
    question, others = "How far is each loss from eager's?", [name for name in names if name != BASELINE]
    if others and BASELINE in training.losses:
        about = "loss minus eager's from the same seed and at the same step, mean over seeds"
        about += f"; dotted: {PERMUTED}, its sums in another order" if PERMUTED in others else ""
        yield question, about, _choosable(from_eager(training.losses, names, style), training)
    else:
        yield question, "", "Nothing was trained beside eager, so there is no difference to draw."


def training_picture(training: FinishedTraining, style: Style) -> alt.VConcatChart | str:
    """Both charts as one, or why there is none."""
    names = drawn(training)
    if not names:
        return NO_CURVE
    title = f"{training.summaries[0].task}: loss over steps"
    return curves(training.losses, names, title, style, frozen(training))


def _choosable(chart: alt.LayerChart, training: FinishedTraining) -> alt.LayerChart:
    """A chart whose legend is the page's list of names."""
    chart.layer = [layer.transform_filter(drawing.DRAWN) for layer in chart.layer]  # each may have data of its own
    for layer in chart.layer:
        layer.encoding.color.legend = layer.encoding.strokeDash.legend = None
    shown = [name for name in drawn(training) if name not in frozen(training)]
    return chart.add_params(alt.param(name="shown", value=shown)).properties(usermeta={})


def curves(
    losses: Losses, names: Sequence[str], title: str, style: Style, without: Collection[str] = ()
) -> alt.VConcatChart:
    """Both charts as one picture; the lower one leaves out `without`, whose differences would flatten the others'."""
    above, below = over_steps(losses, names, style), from_eager(losses, names, style, without)
    left_out = [name for name in names if name in without]
    lines = [f"below: without {', '.join(left_out)}, whose blocks' weights are not trained"] if left_out else []
    return alt.vconcat(above, below).properties(title=alt.TitleParams(text=title, subtitle=lines))


def over_steps(losses: Losses, names: Sequence[str], style: Style) -> alt.LayerChart:
    """The losses as means over seeds, and each of eager's seeds as a thinner line."""
    each = [point for seed, curve in losses.get(BASELINE, {}).items() for point in _means(BASELINE, [curve], seed)]
    means = [point for name in names for point in _means(name, list(losses[name].values()))]
    seeds = _lines(each if BASELINE in names else [], names, style, "loss", strokeWidth=1, opacity=0.6)
    shown = _lines(means, names, style, "loss", strokeWidth=1.5)
    chart = alt.LayerChart(layer=[seeds.encode(detail="seed:N"), shown])
    return chart.properties(width=drawing.WIDTH, height=drawing.HEIGHT)


def from_eager(losses: Losses, names: Sequence[str], style: Style, left_out: Collection[str] = ()) -> alt.LayerChart:
    """The difference from eager of the same seed, means over seeds."""
    points = []
    for name in names:
        pairs = [
            [own - other for own, other in zip(mine, losses[BASELINE][seed], strict=False)]
            for seed, mine in losses[name].items()
            if name != BASELINE and name not in left_out and seed in losses.get(BASELINE, {})
        ]
        points += _means(name, pairs)
    lines = _lines(points, names, style, "loss - eager's", strokeWidth=1.2)
    return alt.LayerChart(layer=[lines]).properties(width=drawing.WIDTH, height=drawing.HEIGHT // 2)


def dash(name: str, style: Style) -> tuple[int, ...]:
    """The dash pattern of an implementation's curve."""
    return DOTTED if name == PERMUTED else style.dash(name)


def _lines(points: list[Point], names: Sequence[str], style: Style, title: str, **mark: Any) -> alt.Chart:
    colour = alt.Scale(domain=list(names), range=[style.colour(name) for name in names])
    legend = alt.Legend(symbolStrokeWidth=2)
    dashes = alt.Scale(domain=list(names), range=[list(dash(name, style)) for name in names])
    return (
        alt.Chart(alt.Data(values=points))
        .mark_line(clip=True, **mark)
        .encode(
            x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(minExtent=AXIS)),
            color=alt.Color("implementation:N", scale=colour, title=None, legend=legend),
            strokeDash=alt.StrokeDash("implementation:N", scale=dashes, title=None, sort=list(names)),
            tooltip=alt.Tooltip("implementation:N"),
        )
    )


def _means(name: str, of_seeds: Sequence[Sequence[float]], seed: int = 0) -> list[Point]:
    """Points of the curves' mean, each the mean of neighbouring steps; values that are not finite are left out."""
    values = [statistics.fmean(at) for at in zip(*of_seeds, strict=False)]
    every = max(1, len(values) // POINTS)
    parts = ((start, values[start : start + every]) for start in range(0, len(values), every))
    means = ((start + (len(part) - 1) / 2, statistics.fmean(part)) for start, part in parts)
    return [
        {"implementation": name, "seed": seed, "step": step, "value": float(f"{value:.6g}")}
        for step, value in means
        if abs(value) < float("inf")
    ]


PANEL = (300, 190)
SPLIT = {False: "all tokens", True: "split sequence"}


def scaling_points(rows: Rows) -> list[Point]:
    """A point for each row with a time, and for the same implementation on one GPU, timed beside the largest group."""
    key = ("shape", "dtype", "mode", "tokens", "sequence_parallel", "implementation")
    latest = {tuple(getattr(row, name) for name in (*key, "ranks")): row for row in rows if row.time_ms is not None}
    points: dict[tuple[Any, ...], Point] = {}
    for row in sorted(latest.values(), key=lambda row: row.ranks):
        case = {name: getattr(row, name) for name in key}
        what = case | {"split": SPLIT[row.sequence_parallel]}
        if row.single_ms:
            points[*case.values(), 1] = what | {"ranks": 1, "ms": row.single_ms, "efficiency": 1.0}
        if row.ranks > 1:
            points[*case.values(), row.ranks] = what | {
                "ranks": row.ranks, "ms": row.time_ms, "efficiency": row.efficiency,
            }  # fmt: skip
    return list(points.values())


def scaling(points: Sequence[Point], known: Sequence[str]) -> alt.VConcatChart:
    """For each shape, mode and token count a pair of panels: time, on log axes beside perfect scaling; efficiency."""
    names = unique(point["implementation"] for point in points)
    style = Style(drawing.slots(names, known))
    ticks = sorted({point["ranks"] for point in points})
    over = alt.X("ranks:Q", title="GPUs", scale=alt.Scale(type="log", base=2, nice=False, padding=12),
                 axis=alt.Axis(values=ticks, format="d"))  # fmt: skip
    colour = alt.Color("implementation:N", title=None, sort=names,
                       scale=alt.Scale(domain=names, range=[style.colour(name) for name in names]))  # fmt: skip
    dashes = alt.StrokeDash("split:N", title=None,
                            scale=alt.Scale(domain=list(SPLIT.values()), range=[[1, 0], [5, 3]]))  # fmt: skip

    def panel(own: list[Point], y: alt.Y, title: str, ideal: list[Point]) -> Any:
        base = alt.Chart(alt.Data(values=own)).encode(x=over, y=y, color=colour)
        lines, marks = base.mark_line(strokeWidth=1.6).encode(strokeDash=dashes), base.mark_point(filled=True, size=34)
        dotted = alt.Chart(alt.Data(values=ideal)).mark_line(strokeWidth=1, strokeDash=[1, 3], color="#888888")
        head = alt.TitleParams(title, fontSize=12, fontWeight="normal", frame="group")
        layers = alt.layer(dotted.encode(x=over, y=y), lines, marks)
        return layers.properties(width=PANEL[0], height=PANEL[1], title=head)

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


def pairs(data: Sequence[Mapping[str, Any]], floor: float, subtitle: str) -> alt.LayerChart:
    """The A/A pairs of `noise`, sorted by their differences in percent; `floor` is the median noise floor."""
    colour = alt.condition("datum.verdict == 'tie'", alt.value(drawing.PALETTE[2]), alt.value(drawing.PALETTE[7]))
    place = alt.X("place:Q", title="pair, sorted by its ratio", scale=alt.Scale(nice=False, padding=8))
    base = alt.Chart(alt.Data(values=list(data)))
    axis = alt.Y("ratio_low:Q", title="difference in time (%), with its 95% interval")
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.55).encode(x=place, y=axis, y2="ratio_high:Q", color=colour)
    dots = base.mark_circle(size=22, opacity=1).encode(x=place, y="ratio:Q", color=colour)
    lines = alt.Chart(alt.Data(values=[{"y": floor}, {"y": -floor}])).mark_rule(strokeDash=[5, 3]).encode(y="y:Q")
    zero = alt.Chart(alt.Data(values=[{"y": 0}])).mark_rule().encode(y="y:Q")
    chart = alt.LayerChart(layer=[zero, lines, bars, dots])
    chart.width, chart.height = drawing.WIDTH, drawing.HEIGHT * 3 // 4
    chart.title = alt.Title("What does the same call differ by from itself?", subtitle=subtitle)
    return chart
