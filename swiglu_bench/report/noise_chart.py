"""The A/A pairs of `swiglu-bench noise` as a picture: how far from 1 a ratio strays where there is no difference."""

from __future__ import annotations

from pathlib import Path

import altair as alt
import pandas as pd

from swiglu_bench.charts.style import HEIGHT, PALETTE, WIDTH
from swiglu_bench.spec.errors import BadInput

TIE, SEEN = PALETTE[2], PALETTE[7]


def pairs(path: Path) -> tuple[alt.LayerChart, str]:
    """The chart, and what it shows in one sentence. Raises BadInput for a file that `noise` did not write."""
    try:
        rows = pd.read_csv(path)
        rows = rows.sort_values("ratio", kind="stable").assign(place=range(1, len(rows) + 1))
        for name in ("ratio", "ratio_low", "ratio_high"):
            rows[name] = (rows[name] - 1) * 100
        seen = int((rows["verdict"] != "tie").sum())
        without_1 = int(((rows["ratio_low"] > 0) | (rows["ratio_high"] < 0)).sum())
        floor = 100 * float(rows["noise"].median())
    except (OSError, KeyError, ValueError) as error:
        raise BadInput(f"{path}: expected a CSV that `swiglu-bench noise` wrote, got {error}.") from None
    said = (
        f"{len(rows)} pairs of the same call under two names: {without_1} of the 95% intervals exclude no difference, "
        f"and {seen} pairs get a verdict."
    )
    data = rows[["place", "ratio", "ratio_low", "ratio_high", "verdict"]].to_dict("records")
    colour = alt.condition("datum.verdict == 'tie'", alt.value(TIE), alt.value(SEEN))
    place = alt.X("place:Q", title="pair, sorted by its ratio", scale=alt.Scale(nice=False, padding=8))
    base = alt.Chart(alt.Data(values=data))
    axis = alt.Y("ratio_low:Q", title="difference in time (%), with its 95% interval")
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.55).encode(x=place, y=axis, y2="ratio_high:Q", color=colour)
    dots = base.mark_circle(size=22, opacity=1).encode(x=place, y="ratio:Q", color=colour)
    lines = alt.Chart(alt.Data(values=[{"y": floor}, {"y": -floor}])).mark_rule(strokeDash=[5, 3]).encode(y="y:Q")
    zero = alt.Chart(alt.Data(values=[{"y": 0}])).mark_rule().encode(y="y:Q")
    title = alt.Title(
        "What does the same call differ by from itself?",
        subtitle=f"{len(rows)} A/A pairs, {without_1} intervals without 0, {seen} verdicts; dashed: median noise floor",
    )
    chart = alt.LayerChart(layer=[zero, lines, bars, dots])
    chart.width, chart.height, chart.title = WIDTH, HEIGHT * 3 // 4, title
    return chart, said
