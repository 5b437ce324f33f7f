"""The loss curves as charts, and how far each is from eager's. Importing this needs the extra `report`."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Any

import altair as alt

from swiglu_bench.rows.record import BASELINE
from swiglu_bench.rows.training import PERMUTED, Losses
from swiglu_bench.show.charts.style import HEIGHT, WIDTH, Style

POINTS = 300
"""Steps are averaged so that a curve has about as many points."""
AXIS = 44
"""Pixels of an axis' labels at least, so that the axes of both charts are aligned."""
DOTTED = (2, 2)
"""eager with another summation order; the others have the dashes that they have in all charts."""


def curves(
    losses: Losses, names: Sequence[str], title: str, style: Style, frozen: Collection[str] = ()
) -> alt.VConcatChart:
    """Both charts as one picture; the lower one leaves out `frozen`, whose differences would flatten the others'."""
    above, below = over_steps(losses, names, style), from_eager(losses, names, style, frozen)
    left_out = [name for name in names if name in frozen]
    lines = [f"below: without {', '.join(left_out)}, whose blocks' weights are not trained"] if left_out else []
    return alt.vconcat(above, below).properties(title=alt.TitleParams(text=title, subtitle=lines))


def over_steps(losses: Losses, names: Sequence[str], style: Style) -> alt.LayerChart:
    """The losses as means over seeds, and each of eager's seeds as a thinner line."""
    each = [row for seed, one in losses.get(BASELINE, {}).items() for row in _rows(BASELINE, [one], seed)]
    means = [row for name in names for row in _rows(name, list(losses[name].values()))]
    seeds = _lines(each if BASELINE in names else [], names, style, "loss", strokeWidth=1, opacity=0.6)
    shown = _lines(means, names, style, "loss", strokeWidth=1.5)
    chart = alt.LayerChart(layer=[seeds.encode(detail="seed:N"), shown])
    return chart.properties(width=WIDTH, height=HEIGHT)


def from_eager(losses: Losses, names: Sequence[str], style: Style, left_out: Collection[str] = ()) -> alt.LayerChart:
    """The difference from eager of the same seed, means over seeds."""
    rows = []
    for name in names:
        pairs = [
            [own - other for own, other in zip(mine, losses[BASELINE][seed], strict=False)]
            for seed, mine in losses[name].items()
            if name != BASELINE and name not in left_out and seed in losses.get(BASELINE, {})
        ]
        rows += _rows(name, pairs)
    lines = _lines(rows, names, style, "loss - eager's", strokeWidth=1.2)
    return alt.LayerChart(layer=[lines]).properties(width=WIDTH, height=HEIGHT // 2)


def dash(name: str, style: Style) -> tuple[int, ...]:
    """The dash pattern of an implementation's lines."""
    return DOTTED if name == PERMUTED else style.dash(name)


def _lines(rows: list[dict[str, Any]], names: Sequence[str], style: Style, title: str, **mark: Any) -> alt.Chart:
    colours = alt.Scale(domain=list(names), range=[style.colour(name) for name in names])
    legend = alt.Legend(symbolStrokeWidth=2)
    dashes = alt.Scale(domain=list(names), range=[list(dash(name, style)) for name in names])
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(clip=True, **mark)
        .encode(
            x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(minExtent=AXIS)),
            color=alt.Color("implementation:N", scale=colours, title=None, legend=legend),
            strokeDash=alt.StrokeDash("implementation:N", scale=dashes, title=None, sort=list(names)),
            tooltip=alt.Tooltip("implementation:N"),
        )
    )


def _rows(name: str, curves: Sequence[Sequence[float]], seed: int = 0) -> list[dict[str, Any]]:
    """Points of the curves' mean, each the mean of neighbouring steps; values that are not finite are left out."""
    values = [statistics.fmean(at) for at in zip(*curves, strict=False)]
    every = max(1, len(values) // POINTS)
    points = ((start, values[start : start + every]) for start in range(0, len(values), every))
    means = ((start + (len(part) - 1) / 2, statistics.fmean(part)) for start, part in points)
    return [
        {"implementation": name, "seed": seed, "step": step, "value": float(f"{value:.6g}")}
        for step, value in means
        if abs(value) < float("inf")
    ]
