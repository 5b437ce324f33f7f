"""The tables of a page: figures, rows without figures, the contract matrix, machines. Plain data for the template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from swiglu_bench.machine.sources import standing
from swiglu_bench.rows.figures import plus_minus, size, token_text
from swiglu_bench.rows.record import AuditVerdict, Record, Status, grouped, unique
from swiglu_bench.show.report.load import ReportedRun
from swiglu_bench.show.writers.contract import SYMBOLS

MACHINE = ("device", "driver", "cuda", "torch", "triton", "version")
"""What rows say of the machine, where there is no run.json."""
BEHIND = "†"


def figures(shape: str, rows: Iterable[Record]) -> dict[str, Any]:
    """Time and ratio of every case of a shape."""
    by_name = {
        name: {row.tokens: _figures(row) for row in own}
        for name, own in grouped(rows, attrgetter("implementation")).items()
    }
    counts = sorted({count for cells in by_name.values() for count in cells})
    lines = [(name, [cells.get(count) for count in counts]) for name, cells in by_name.items()]
    return {"shape": shape, "counts": [token_text(count) for count in counts], "lines": lines}


def _figures(row: Record) -> dict[str, str]:
    ratio = ""
    if row.implementation == row.baseline:
        ratio = "baseline"
    elif not row.comparable:
        ratio = "fewer gradients"
    elif row.interval:
        ratio = plus_minus(*row.interval)
    return {"time": row.shown("time_ms"), "ratio": ratio, "verdict": row.verdict}


def problems(rows: Iterable[Record]) -> list[dict[str, Any]]:
    """Every row without figures, those with the same status and reason together; failures first."""
    failed = grouped((row for row in rows if row.status is not Status.OK), attrgetter("status", "reason"))
    return [
        {
            "status": status,
            "reason": reason,
            "names": unique(row.implementation for row in same),
            "where": [
                f"{shape}, {dtype}, {', '.join(map(token_text, sorted({row.tokens for row in own})))} tokens"
                for (shape, dtype), own in grouped(same, attrgetter("shape", "dtype")).items()
            ],
        }
        for (status, reason), same in sorted(failed.items(), key=lambda one: one[0][0] is Status.SKIPPED)
    ]


def audit(run: ReportedRun) -> dict[str, Any]:
    """The contract matrix: checks down, implementations across, a matrix per scope."""
    matrices = []
    for scope, cells in grouped(run.audit, attrgetter("scope")).items():
        names = unique(cell.implementation for cell in cells)
        by_key = {(cell.check, cell.implementation): cell for cell in cells}
        lines = [
            (check, [by_key.get((check, name)) for name in names]) for check in unique(cell.check for cell in cells)
        ]
        matrices.append({"scope": scope, "names": names, "lines": lines})
    given = grouped(
        (cell for cell in run.audit if cell.reason and cell.verdict is not AuditVerdict.PASS),
        attrgetter("verdict", "check", "reason"),
    )
    order = [AuditVerdict.FAIL, AuditVerdict.UNSUPPORTED, AuditVerdict.NOT_RUN]
    counts = {one: sum(cell.verdict is one for cell in run.audit) for one in AuditVerdict}
    return {
        "run": run.name,
        "matrices": matrices,
        "counts": ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        "symbols": {verdict: symbol for verdict, (symbol, _) in SYMBOLS.items()},
        "reasons": [(*key, _who(same)) for key, same in sorted(given.items(), key=lambda one: order.index(one[0][0]))],
    }


def _who(cells: Iterable[Record]) -> list[str]:
    return unique(f"{cell.implementation} ({cell.scope})" for cell in cells)


def machines(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """What differs between the machines and versions of runs, a line for those that agree; and what does not differ."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        described = unique(tuple((name, getattr(row, name)) for name in MACHINE) for row in run.records)
        for one in [run.about["machine"]] if "machine" in run.about else map(dict, described):
            facts = tuple(_fact(name, value) for name, value in one.items() if value not in (None, ""))
            found.setdefault(facts, []).append(marked_run(run))
    lines = [(dict(facts), unique(names)) for facts, names in found.items()]
    values = {name: unique(facts[name] for facts, _ in lines if name in facts) for name in unique(_names(lines))}
    differ = [name for name, own in values.items() if len(own) > 1]
    return {
        "differ": differ,
        "lines": [(names, [facts.get(name, "") for name in differ]) for facts, names in lines],
        "same": {name: own[0] for name, own in values.items() if name not in differ},
    }


def _names(lines: Iterable[tuple[dict[str, str], list[str]]]) -> list[str]:
    return [name for facts, _ in lines for name in facts]


def marked(name: str, rows: Iterable[Record], version: object = "") -> str:
    """The name, with a mark where rows, or a version, are of other kernels than those of this checkout."""
    return name + BEHIND if any(standing(str(one))[1] for one in {version, *(row.version for row in rows)}) else name


def marked_run(run: ReportedRun) -> str:
    """The name of a run, with such a mark."""
    return marked(run.name, run.records, run.about.get("machine", {}).get("version", ""))


def _fact(name: str, value: Any) -> tuple[str, str]:
    """A field of run.json's machine with its unit beside the figure instead of in the name."""
    if name == "version":
        return name, " ".join(filter(None, (str(value), standing(str(value))[0])))
    if name.endswith("_bytes") and isinstance(value, int):
        return name.removesuffix("_bytes").replace("_", " "), size(value)
    if name.endswith("_w") and isinstance(value, int | float):
        return name.removesuffix("_w").replace("_", " "), f"{value:g} W"
    return name.replace("_", " "), str(value)
