"""From rows to what a chart draws: points with the texts of their tooltips, and what is said above the chart."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from swiglu_bench.charts.style import Style, tokens_text
from swiglu_bench.report.drawing import Point
from swiglu_bench.report.frames import Row, dicts, unique

MIB = 2**20


class NoChart(Exception):
    """The rows cannot answer the question; the message says why, in one sentence."""


def timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose time counts."""
    usable = rows[(rows["status"] == "ok") & rows["time_ms"].notna()]
    if usable.empty:
        raise NoChart("No row has a time.")
    return usable


def counts(rows: pd.DataFrame) -> int:
    """How many token counts the rows have."""
    return int(rows["tokens"].nunique())


def points_of(
    rows: pd.DataFrame, values: pd.Series, lows: pd.Series | None = None, highs: pd.Series | None = None
) -> list[Point]:
    """What `marks` draws, with the texts of the tooltip; floats with the digits that a picture can show."""
    points: list[Point] = []
    no_ends = [None] * len(rows)
    ends = zip(values, no_ends if lows is None else lows, no_ends if highs is None else highs, strict=True)
    for row, (value, low, high) in zip(dicts(rows), ends, strict=True):
        point: Point = {
            "implementation": row["implementation"],
            "tokens": int(row["tokens"]),
            "value": _digits(value),
            "low": None if low is None else _digits(low),
            "high": None if high is None else _digits(high),
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
            point["memory"] = memory_text(row)
        if pd.notna(row["error"]) and pd.notna(row["eager_error"]):
            point["precision"] = f"{row['error']:.2e}, eager's {row['eager_error']:.2e}"
            if pd.notna(row["error_ratio"]):
                point["precision"] += f"; {row['error_ratio']:.0%} of the allowed"
        points.append(point)
    return points


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def memory_text(row: Row) -> str:
    """Peak, saved and workspace, as far as they were measured."""
    named = {"peak": row["peak_bytes"], "saved": row["saved_bytes"], "workspace": row["workspace_bytes"]}
    return ", ".join(f"{name} {value / MIB:,.1f} MiB" for name, value in named.items() if pd.notna(value))


def titled(
    chart: alt.LayerChart, question: str, rows: pd.DataFrame, style: Style, what: str = "", whole_section: bool = False,
    **about: Any,
) -> alt.LayerChart:  # fmt: skip
    """The question above the chart; under it what the rows have in common, what is drawn how, and the marks of names.

    `usermeta` tells a page what it cannot take from the title: `what`, and `about`.
    """
    first = rows.iloc[0]
    common = [first["mode"], first["scope"]]
    common += (
        [] if whole_section else [f"{first['shape']} (hidden {first['hidden']}, intermediate {first['intermediate']})"]
    )
    common += [", ".join(unique(rows["dtype"]))]
    common += [tokens_text(rows["tokens"])] if counts(rows) == 1 else []
    names = set(rows["implementation"])
    lines = [", ".join(str(one) for one in [*common, first["device"]] if one), *([what] if what else [])]
    lines += ["+N alike: N others tie with it in every case, and are not drawn"] if names & set(style.alike) else []
    lines += ["*: fewer gradients than the baseline, not ranked"] if names & style.lesser else []
    known = {} if chart.usermeta is alt.Undefined else chart.usermeta
    return chart.properties(
        title=alt.TitleParams(text=question, subtitle=lines), usermeta={**known, "about": what, **about}
    )
