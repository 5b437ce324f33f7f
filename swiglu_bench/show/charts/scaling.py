"""Time and efficiency against the number of GPUs, for a folder that holds several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.show.charts.export import NoPicture, save

if TYPE_CHECKING:
    import altair as alt

PANEL = (300, 190)
SPLIT = {"false": "all tokens", "true": "split sequence"}


def draw(folder: Path, rows: Sequence[Mapping[str, str]], known: Sequence[str]) -> str:
    """Write scaling.png and scaling.svg of the rows of tp.csv; what was written, or why nothing, in one sentence.

    The last row of a case counts. `known` names the catalogue, for the colours.
    """
    points = points_of(rows)
    counts = {one["ranks"] for one in points}
    if len(counts - {1}) < 2 and {1, *counts} != counts:
        return "No scaling figure: it needs rows with several numbers of GPUs, such as --gpus 1,2,4 makes."
    try:
        return f"Scaling: {save(folder, 'scaling', lambda: scaling(points, known))}"
    except NoPicture as reason:
        return f"No scaling figure: {reason}."


def points_of(rows: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """A point for each row with a time, and for the same implementation on one GPU, timed beside the largest group."""
    latest: dict[tuple[str, ...], Mapping[str, str]] = {}
    for row in rows:
        if row["time_ms"]:
            latest[tuple(row[name] for name in (*_CASE, "ranks"))] = row
    points: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(latest.values(), key=lambda row: int(row["ranks"])):
        case = {name: row[name] for name in _CASE}
        what = case | {"split": SPLIT[row["sequence_parallel"]], "tokens": int(row["tokens"])}
        if row["single_ms"]:
            points[*case.values(), 1] = what | {"ranks": 1, "ms": float(row["single_ms"]), "efficiency": 1.0}
        if int(row["ranks"]) > 1:
            efficiency = float(row["efficiency"]) if row["efficiency"] else None
            ranks = int(row["ranks"])
            points[*case.values(), ranks] = what | {
                "ranks": ranks,
                "ms": float(row["time_ms"]),
                "efficiency": efficiency,
            }
    return list(points.values())


_CASE = ("shape", "dtype", "mode", "tokens", "sequence_parallel", "implementation")


def scaling(points: Sequence[dict[str, Any]], known: Sequence[str]) -> alt.VConcatChart:
    """For each shape, mode and token count a pair of panels: time, on log axes beside perfect scaling; efficiency."""
    import altair as alt

    from swiglu_bench.show.charts.style import Style, slots

    names = list(dict.fromkeys(one["implementation"] for one in points))
    style = Style(slots(names, known))
    ticks = sorted({one["ranks"] for one in points})
    over = alt.X("ranks:Q", title="GPUs", scale=alt.Scale(type="log", base=2, nice=False, padding=12),
                 axis=alt.Axis(values=ticks, format="d"))  # fmt: skip
    colour = alt.Color("implementation:N", title=None, sort=names,
                       scale=alt.Scale(domain=names, range=[style.colour(name) for name in names]))  # fmt: skip
    dash = alt.StrokeDash("split:N", title=None,
                          scale=alt.Scale(domain=list(SPLIT.values()), range=[[1, 0], [5, 3]]))  # fmt: skip

    def panel(rows: list[dict[str, Any]], y: alt.Y, title: str, ideal: list[dict[str, Any]]) -> Any:
        base = alt.Chart(alt.Data(values=rows)).encode(x=over, y=y, color=colour)
        lines, marks = base.mark_line(strokeWidth=1.6).encode(strokeDash=dash), base.mark_point(filled=True, size=34)
        dotted = alt.Chart(alt.Data(values=ideal)).mark_line(strokeWidth=1, strokeDash=[1, 3], color="#888888")
        head = alt.TitleParams(title, fontSize=12, fontWeight="normal", frame="group")
        layers = alt.layer(dotted.encode(x=over, y=y), lines, marks)
        return layers.properties(width=PANEL[0], height=PANEL[1], title=head)

    bands = []
    for case in dict.fromkeys((one["shape"], one["mode"], one["dtype"], one["tokens"]) for one in points):
        rows = [one for one in points if (one["shape"], one["mode"], one["dtype"], one["tokens"]) == case]
        shape, mode, dtype, tokens = case
        first = max(one["ms"] * one["ranks"] for one in rows if one["ranks"] == min(ticks))
        ideal = [{"ranks": count, "ms": first / count, "efficiency": 1.0} for count in ticks]
        time = alt.Y("ms:Q", title="ms, log scale", scale=alt.Scale(type="log", nice=False, padding=8))
        share = alt.Y("efficiency:Q", title="efficiency", axis=alt.Axis(format="%"), scale=alt.Scale(domainMin=0))
        known_share = [one for one in rows if one["efficiency"] is not None]
        bands.append(alt.hconcat(
            panel(rows, time, f"{mode} {shape}, {tokens:,} tokens, {dtype}", ideal),
            panel(known_share, share, "time on one GPU / GPUs / time", ideal),
        ))  # fmt: skip
    return alt.vconcat(*bands).properties(title="The MLP on several GPUs, tensor-parallel; dotted: perfect scaling")
