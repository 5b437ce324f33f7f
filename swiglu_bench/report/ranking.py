"""Who is fastest, and who cannot be told apart: by the intervals that the rows carry.

Two implementations tie at a case where the 95% intervals of their ratios overlap, or the ratios are no further apart
than the A/A pair's interval reaches. Against the baseline the row's own verdict counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

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
    return [_place(case) for _, case in ranked(rows).groupby(["shape", "tokens"], sort=False) if len(case) > 1]


def tie(one: pd.Series, other: pd.Series, reach: float) -> bool:
    """Whether two rows of a case cannot be told apart; `reach` is how far from 1 the A/A pair's interval goes."""
    for row, against in ((one, other), (other, one)):
        if against["implementation"] == row["baseline"]:
            return bool(row["verdict"] == "tie") if row["verdict"] else bool(row["ratio_low"] <= 1 <= row["ratio_high"])
    overlap = one["ratio_low"] <= other["ratio_high"] and other["ratio_low"] <= one["ratio_high"]
    return bool(overlap or abs(one["ratio"] / other["ratio"] - 1) <= reach)


def reach(case: pd.DataFrame) -> float:
    """How far from 1 the interval of the case's A/A pair goes; 0 where there was no pair."""
    pair = case[case["aa_low"].notna()]
    return float(max(abs(pair["aa_low"].iloc[0] - 1), abs(pair["aa_high"].iloc[0] - 1))) if len(pair) else 0.0


def alike(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Who stands for whom where there is a crowd: implementations that tie at every case, and in peak memory to 1%.

    The baseline stands for itself alone. Without a crowd, nobody stands for anybody.
    """
    usable = ranked(rows)
    names = list(dict.fromkeys(rows.loc[rows["time_ms"].notna(), "implementation"]))
    if len(names) <= CROWD:
        return {}
    cases = {key: case.set_index("implementation", drop=False) for key, case in usable.groupby(["shape", "tokens"])}
    standing: dict[str, list[str]] = {}
    for name in dict.fromkeys(usable["implementation"]):
        if name in set(usable["baseline"]):
            continue
        first = next((one for one in standing if _always_tie(one, name, cases)), None)
        standing.setdefault(first or name, []).extend([name] if first else [])
    return {name: others for name, others in standing.items() if others}


def _always_tie(one: str, other: str, cases: dict[object, pd.DataFrame]) -> bool:
    for case in cases.values():
        if (one in case.index) != (other in case.index):
            return False
        if one not in case.index:
            continue
        a, b = case.loc[one], case.loc[other]
        peaks = [float(row["peak_bytes"]) if pd.notna(row["peak_bytes"]) else 0.0 for row in (a, b)]
        same_memory = abs(peaks[0] - peaks[1]) <= 0.01 * max(peaks)
        if not same_memory or not tie(a, b, reach(case)):
            return False
    return True


def _place(case: pd.DataFrame) -> Place:
    case = case.sort_values("ratio", kind="stable")
    best, others, far = case.iloc[0], [row for _, row in case.iloc[1:].iterrows()], reach(case)
    ties = [row for row in others if tie(best, row, far)]
    rest = [row for row in others if not any(row is one for one in ties)]
    return Place(
        shape=str(best["shape"]),
        tokens=int(best["tokens"]),
        best=str(best["implementation"]),
        ties=tuple(str(row["implementation"]) for row in ties),
        speedup=1 / best["ratio"],
        low=1 / best["ratio_high"],
        high=1 / best["ratio_low"],
        runner_up=str(rest[0]["implementation"]) if rest else "",
        lead=1 - best["ratio"] / rest[0]["ratio"] if rest else 0.0,
    )
