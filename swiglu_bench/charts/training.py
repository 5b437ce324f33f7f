"""The loss curves as charts, and how far each is from eager's."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.charts.export import NoPicture, save
from swiglu_bench.rows.training import PERMUTED

if TYPE_CHECKING:
    import altair as alt

    from swiglu_bench.charts.style import Style

POINTS = 300
"""Steps are averaged so that a curve has about as many points."""
AXIS = 44
"""Pixels of an axis' labels at least, so that both charts begin at one line."""
DOTTED = (2, 2)
"""eager with its sums in another order; the others have the dashes that they have in all charts."""
Losses = Mapping[str, Mapping[int, Sequence[float]]]
"""Of every step, by implementation and seed."""


def draw(folder: Path, losses: Losses, title: str, known: Sequence[str], frozen: Collection[str] = ()) -> str:
    """Write curves.png and curves.svg of losses; what was written, or why nothing, in one sentence.

    `known` names the catalogue, for the colours; `frozen` those whose blocks' weights stay as they were drawn.
    """

    def make() -> alt.VConcatChart:
        from swiglu_bench.charts.style import Style, slots

        names = [name for name in losses if losses[name]]
        if not names:
            raise NoPicture("nothing was trained to the end")
        return curves(losses, names, title, Style(slots(names, known)), frozen)

    try:
        return f"Curves: {save(folder, 'curves', make)}"
    except NoPicture as reason:
        return f"No picture of the curves: {reason}."


def curves(
    losses: Losses, names: Sequence[str], title: str, style: Style, frozen: Collection[str] = ()
) -> alt.VConcatChart:
    """Both charts as one picture; below without the frozen ones, whose differences would flatten the others'."""
    import altair as alt

    above, below = over_steps(losses, names, style), from_eager(losses, names, style, frozen)
    left_out = [name for name in names if name in frozen]
    lines = [f"below: without {', '.join(left_out)}, whose blocks' weights do not learn"] if left_out else []
    return alt.vconcat(above, below).properties(title=alt.TitleParams(text=title, subtitle=lines))


def over_steps(losses: Losses, names: Sequence[str], style: Style) -> alt.LayerChart:
    """The losses, means over seeds, and eager's seeds one by one, thinner."""
    import altair as alt

    from swiglu_bench.charts.style import HEIGHT, WIDTH

    each = [row for seed, one in losses.get("eager", {}).items() for row in _rows("eager", [one], seed)]
    means = [row for name in names for row in _rows(name, list(losses[name].values()))]
    seeds = _lines(each if "eager" in names else [], names, style, "loss", strokeWidth=1, opacity=0.6)
    shown = _lines(means, names, style, "loss", strokeWidth=1.5)
    chart = alt.LayerChart(layer=[seeds.encode(detail="seed:N"), shown])
    return chart.properties(width=WIDTH, height=HEIGHT)


def from_eager(losses: Losses, names: Sequence[str], style: Style, left_out: Collection[str] = ()) -> alt.LayerChart:
    """The difference to eager of the same seed, means over seeds."""
    import altair as alt

    from swiglu_bench.charts.style import HEIGHT, WIDTH

    rows = []
    for name in names:
        pairs = [
            [own - other for own, other in zip(mine, losses["eager"][seed], strict=False)]
            for seed, mine in losses[name].items()
            if name != "eager" and name not in left_out and seed in losses.get("eager", {})
        ]
        rows += _rows(name, pairs)
    lines = _lines(rows, names, style, "loss - eager's", strokeWidth=1.2)
    return alt.LayerChart(layer=[lines]).properties(width=WIDTH, height=HEIGHT // 2)


def dash(name: str, style: Style) -> tuple[int, ...]:
    """Of an implementation's lines."""
    return DOTTED if name == PERMUTED else style.dash(name)


def _lines(rows: list[dict[str, Any]], names: Sequence[str], style: Style, title: str, **mark: Any) -> alt.Chart:
    import altair as alt

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


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(at) for at in zip(*curves, strict=False)]


def _rows(name: str, curves: Sequence[Sequence[float]], seed: int = 0) -> list[dict[str, Any]]:
    """Points of the curves' mean, each the mean of neighbouring steps; what is no number is left out."""
    values = _mean(curves)
    every = max(1, len(values) // POINTS)
    points = ((start, values[start : start + every]) for start in range(0, len(values), every))
    means = ((start + (len(part) - 1) / 2, statistics.fmean(part)) for start, part in points)
    return [
        {"implementation": name, "seed": seed, "step": step, "value": float(f"{value:.6g}")}
        for step, value in means
        if abs(value) < float("inf")
    ]
