"""The loss curves as a picture, and how far each is from eager's."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swiglu_bench.train.blocks import PERMUTED

if TYPE_CHECKING:
    import altair as alt

NEEDS = ("altair", "vl_convert")
POINTS = 300
"""Steps are averaged so that a curve has about as many points."""
Losses = Mapping[str, Mapping[int, Sequence[float]]]


def draw(folder: Path, losses: Losses, title: str, known: Sequence[str], frozen: Collection[str] = ()) -> str:
    """Write curves.png and curves.svg of losses by name and seed; what was written, or why nothing, in one sentence."""
    missing = [module for module in NEEDS if importlib.util.find_spec(module) is None]
    if missing:
        return f"No picture of the curves: {', '.join(missing)} missing; pip install 'swiglu-bench[report]'."
    from swiglu_bench.report.images import picture

    if not any(losses.values()):
        return "No picture of the curves: nothing was trained to the end."
    chart = curves(losses, title, known, frozen)
    try:
        forms: tuple[Literal["png", "svg"], ...] = ("png", "svg")
        for form in forms:
            (folder / f"curves.{form}").write_bytes(picture(chart, form))
    except OSError as error:
        return f"No picture of the curves: {folder} cannot be written: {error.strerror}."
    return f"Curves: {folder / 'curves.png'}"


def curves(losses: Losses, title: str, known: Sequence[str], frozen: Collection[str] = ()) -> alt.VConcatChart:
    """Above the losses, means over seeds and eager's seeds one by one; below the difference to eager of the same seed.

    `known` names the catalogue, for the colours. Those in `frozen` learn less by design: their differences would dwarf
    all others and are left out.
    """
    import altair as alt

    from swiglu_bench.report.look import HEIGHT, WIDTH, Look, slots

    names = [name for name in losses if losses[name]]
    look = Look(slots(names, known))
    scale = alt.Scale(domain=names, range=[look.colour(name) for name in names])
    lines_of = {name: look.dash(name) for name in names} | {PERMUTED: (2, 2)}
    dashes = alt.Scale(domain=names, range=[lines_of[name] for name in names])
    legend = alt.Legend(symbolOpacity=1, symbolStrokeWidth=2)
    colour = alt.Color("implementation:N", scale=scale, title=None, legend=legend)
    dash = alt.StrokeDash("implementation:N", scale=dashes, title=None, sort=names)

    def lines(rows: list[dict[str, Any]], title: str, **mark: Any) -> alt.Chart:
        chart = alt.Chart(alt.Data(values=rows)).mark_line(clip=True, **mark)
        over = alt.X("step:Q", title="step", scale=alt.Scale(nice=False))
        return chart.encode(x=over, y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False)))

    shown = lines([row for name in names for row in _rows(name, _mean(losses[name].values()))], "loss", strokeWidth=1.5)
    each = [row for seed, one in losses.get("eager", {}).items() for row in _rows("eager", one, seed)]
    seeds = lines(each, "loss", strokeWidth=0.75, opacity=0.5).encode(detail="seed:N", color=colour)
    differences = []
    for name in names:
        if name in frozen:
            continue
        pairs = [
            [own - other for own, other in zip(mine, losses["eager"][seed], strict=False)]
            for seed, mine in losses[name].items()
            if name != "eager" and seed in losses.get("eager", {})
        ]
        differences += _rows(name, _mean(pairs)) if pairs else []
    below = lines(differences, "loss - eager's", strokeWidth=1.2).encode(color=colour, strokeDash=dash)
    above = alt.layer(seeds, shown.encode(color=colour, strokeDash=dash)).properties(width=WIDTH, height=HEIGHT)
    return alt.vconcat(above, below.properties(width=WIDTH, height=HEIGHT // 2)).properties(title=title)


def _mean(curves: Any) -> list[float]:
    return [statistics.fmean(at) for at in zip(*curves, strict=False)]


def _rows(name: str, values: Sequence[float], seed: int = 0) -> list[dict[str, Any]]:
    """Points of a curve, each the mean of neighbouring steps; what is no number is left out."""
    every = max(1, len(values) // POINTS)
    points = ((start, values[start : start + every]) for start in range(0, len(values), every))
    means = ((start + (len(part) - 1) / 2, statistics.fmean(part)) for start, part in points)
    return [
        {"implementation": name, "seed": seed, "step": step, "value": value}
        for step, value in means
        if abs(value) < float("inf")
    ]
