"""The tables of a page: figures, rows without figures, the contract matrix, machines. Plain data for the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from swiglu_bench.charts.style import token_text
from swiglu_bench.report.frames import Row, dicts, groups, unique
from swiglu_bench.report.load import ReportedRun
from swiglu_bench.rows.audit_cell import CellStatus
from swiglu_bench.writers.tables import size

SYMBOLS = {CellStatus.PASS: "✓", CellStatus.FAIL: "✗", CellStatus.UNSUPPORTED: "–", CellStatus.NOT_RUN: "·"}


def figures(shape: str, rows: pd.DataFrame) -> dict[str, Any]:
    """Time and ratio of every case of a shape."""
    counts = sorted(set(rows["tokens"]))
    lines = []
    for (name,), mine in groups(rows, "implementation"):
        by_count = {row["tokens"]: row for row in dicts(mine)}
        lines.append((name, [_figures(by_count[count]) if count in by_count else None for count in counts]))
    return {"shape": shape, "counts": [token_text(count) for count in counts], "lines": lines}


def _figures(row: Row) -> dict[str, str]:
    ratio = ""
    if row["implementation"] == row["baseline"]:
        ratio = "baseline"
    elif not row["comparable"]:
        ratio = "fewer gradients"
    elif pd.notna(row["ratio_low"]):
        ratio = f"{row['ratio']:.3f} ± {(row['ratio_high'] - row['ratio_low']) / 2:.3f}"
    return {"time": f"{row['time_ms']:.4g}", "ratio": ratio, "verdict": row["verdict"]}


def problems(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Every row without figures, those with the same status and reason together; failures first."""
    rows = rows[rows["status"] != "ok"]
    found = []
    for (status, reason), same in groups(rows, "status", "reason"):
        cases: dict[tuple[str, str], list[int]] = {}
        for shape, dtype, tokens in zip(same["shape"], same["dtype"], same["tokens"], strict=True):
            cases.setdefault((shape, dtype), []).append(int(tokens))
        where = [
            f"{shape}, {dtype}, {', '.join(map(token_text, sorted(set(counts))))} tokens"
            for (shape, dtype), counts in cases.items()
        ]
        names = unique(same["implementation"])
        found.append({"status": status, "reason": reason, "names": names, "where": where, "rows": len(same)})
    return sorted(found, key=lambda one: one["status"] == "skipped")


def audit(run: ReportedRun) -> dict[str, Any]:
    """The contract matrix: checks down, implementations across, a matrix per scope."""
    matrices = []
    for (scope,), cells in groups(run.audit, "scope"):
        names = unique(cells["implementation"])
        by_key = {(cell["check"], cell["implementation"]): cell for cell in dicts(cells)}
        lines = [(check, [_mark(by_key.get((check, name))) for name in names]) for check in unique(cells["check"])]
        matrices.append({"scope": scope, "names": names, "lines": lines})
    given = run.audit[(run.audit["reason"] != "") & (run.audit["verdict"] != CellStatus.PASS)]
    reasons = [
        {
            "verdict": verdict,
            "check": check,
            "reason": reason,
            "names": unique([f"{row['implementation']} ({row['scope']})" for row in dicts(same)]),
        }
        for (verdict, check, reason), same in groups(given, "verdict", "check", "reason")
    ]
    order = [CellStatus.FAIL, CellStatus.UNSUPPORTED, CellStatus.NOT_RUN]
    counts = [f"{(run.audit['verdict'] == one).sum()} {one}" for one in CellStatus]
    return {
        "run": run.name,
        "matrices": matrices,
        "counts": ", ".join(counts),
        "symbols": [(SYMBOLS[one], one) for one in CellStatus],
        "reasons": sorted(reasons, key=lambda one: order.index(one["verdict"])),
    }


def _mark(cell: Row | None) -> dict[str, str] | None:
    if cell is None:
        return None
    verdict = CellStatus(cell["verdict"])
    return {"symbol": SYMBOLS[verdict], "verdict": verdict, "reason": cell["reason"]}


def machines(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Every machine once, with the runs that were made on it; of a CSV file alone, what its rows say."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        machine = run.about.get("machine")
        if machine is None:
            columns = ["device", "driver", "cuda", "torch", "triton", "version"]
            described = dicts(run.records[columns].drop_duplicates())
        else:
            described = [machine]
        for one in described:
            facts = {name: value for name, value in one.items() if value not in (None, "") and name != "version"}
            readable = dict(_fact(name, value) for name, value in facts.items())
            entry = found.setdefault(str(facts), {"facts": readable, "runs": []})
            entry["runs"].append({"name": run.name, "version": one.get("version", "")})
    return list(found.values())


def _fact(name: str, value: Any) -> tuple[str, str]:
    """A field of run.json's machine with its unit beside the figure instead of in the name."""
    if name.endswith("_bytes") and isinstance(value, int):
        return name.removesuffix("_bytes").replace("_", " "), size(value)
    if name.endswith("_w") and isinstance(value, int | float):
        return name.removesuffix("_w").replace("_", " "), f"{value:g} W"
    return name.replace("_", " "), str(value)
