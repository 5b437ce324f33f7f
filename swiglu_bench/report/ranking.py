"""Who is fastest, and who cannot be told apart: by the intervals that the rows carry.

Two implementations tie at a case where the 95% intervals of their ratios overlap, or the ratios are no further apart
than the A/A pair's interval reaches. Against the baseline the row's own verdict counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from swiglu_bench.report.frames import Row, dicts, groups, unique

CASE = ("shape", "tokens")
CROWD = 8
"""More lines than these hide each other; from here on those that tie everywhere are drawn as one."""


@dataclass(frozen=True)
class Place:
    """The outcome of one case."""

    shape: str
    tokens: int
    best: str
    ties: tuple[str, ...]
    """The others that tie with the best; the baseline may be one."""
    speedup: float
    """The baseline's time / the best's; the median over rounds."""
    low: float
    high: float
    runner_up: str
    """The fastest that does not tie; empty where there is none."""
    lead: float
    """How much less time the best takes than the runner-up, as a share of the runner-up's; 0 where there is none."""


def ranked(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that can be ranked: right, timed, doing the baseline's work, with an interval."""
    return rows[(rows["status"] == "ok") & rows["time_ms"].notna() & rows["comparable"] & rows["ratio_low"].notna()]


def places(rows: pd.DataFrame) -> list[Place]:
    """The outcome of every case, in the order of shapes and token counts; none where no baseline was timed."""
    return [_place(case) for _, case in groups(ranked(rows), *CASE) if len(case) > 1]


def tie(one: Row, other: Row, far: float) -> bool:
    """Whether two rows of a case cannot be told apart; `far` is the `reach` of its A/A pair."""
    for row, against in ((one, other), (other, one)):
        if against["implementation"] == row["baseline"]:
            return bool(row["verdict"] == "tie") if row["verdict"] else bool(row["ratio_low"] <= 1 <= row["ratio_high"])
    overlap = one["ratio_low"] <= other["ratio_high"] and other["ratio_low"] <= one["ratio_high"]
    return bool(overlap or abs(one["ratio"] / other["ratio"] - 1) <= far)


def reach(case: pd.DataFrame) -> float:
    """How far from 1 the interval of the case's A/A pair goes; 0 where there was no pair."""
    pair = case[case["aa_low"].notna()]
    return float(max(abs(pair["aa_low"].iloc[0] - 1), abs(pair["aa_high"].iloc[0] - 1))) if len(pair) else 0.0


def alike(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Who stands for whom where there is a crowd: implementations that tie at every case, and in peak memory to 1%.

    The baseline stands for itself alone. Without a crowd, nobody stands for anybody.
    """
    usable = ranked(rows)
    if rows.loc[rows["time_ms"].notna(), "implementation"].nunique() <= CROWD:
        return {}
    cases = [({row["implementation"]: row for row in dicts(case)}, reach(case)) for _, case in groups(usable, *CASE)]
    standing: dict[str, list[str]] = {}
    for name in unique(usable["implementation"]):
        if name in set(usable["baseline"]):
            continue
        first = next((one for one in standing if all(_alike(one, name, *case) for case in cases)), None)
        standing.setdefault(first or name, []).extend([name] if first else [])
    return {name: others for name, others in standing.items() if others}


def _alike(one: str, other: str, rows: dict[str, Row], far: float) -> bool:
    if one not in rows or other not in rows:
        return (one in rows) == (other in rows)
    peaks = [float(rows[name]["peak_bytes"]) if pd.notna(rows[name]["peak_bytes"]) else 0.0 for name in (one, other)]
    return abs(peaks[0] - peaks[1]) <= 0.01 * max(peaks) and tie(rows[one], rows[other], far)


def _place(case: pd.DataFrame) -> Place:
    best, *others = dicts(case.sort_values("ratio", kind="stable"))
    far = reach(case)
    ties = [row["implementation"] for row in others if tie(best, row, far)]
    rest = [row for row in others if row["implementation"] not in ties]
    return Place(
        shape=best["shape"],
        tokens=int(best["tokens"]),
        best=best["implementation"],
        ties=tuple(ties),
        speedup=1 / best["ratio"],
        low=1 / best["ratio_high"],
        high=1 / best["ratio_low"],
        runner_up=rest[0]["implementation"] if rest else "",
        lead=1 - best["ratio"] / rest[0]["ratio"] if rest else 0.0,
    )
