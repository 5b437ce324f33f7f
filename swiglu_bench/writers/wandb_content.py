"""What a Weights & Biases run holds: figures over tokens, tables, charts, and a summary that runs can be sorted by."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from swiglu_bench.rows.record import COLUMNS, Record, Status

FIGURES: dict[str, Callable[[Record], float | None]] = {
    "time_ms": lambda record: record.time_ms,
    "ratio": lambda record: record.ratio,
    "tflops": lambda record: record.tflops,
    "gbps": lambda record: record.gbps,
    "limit_pct": lambda record: record.limit_pct,
    "latency_us": lambda record: record.latency_us,
    "graph_us": lambda record: record.graph_us,
    "uj_per_token": lambda record: record.uj_per_token,
    "error_ratio": lambda record: record.error_ratio,
    "saved_mib": lambda record: _mib(record.saved_bytes),
    "peak_mib": lambda record: _mib(record.peak_bytes),
    "workspace_mib": lambda record: _mib(record.workspace_bytes),
}
"""What is drawn over tokens, as <figure>/<scope>/<mode>/<shape>/<dtype>/<implementation>."""

CHARTS = {"time_ms": "time, ms", "ratio": "time / baseline", "limit_pct": "% of limit", "peak_mib": "peak, MiB"}
"""Figures that get a line chart over tokens, all implementations in one."""
STANDING = (
    "implementation", "fastest_at", "median_ratio", "best_ratio", "worst_error_ratio", "ok", "skipped",
    "incorrect", "error",
)  # fmt: skip


def figures(record: Record) -> dict[str, float]:
    """Those figures that the record has."""
    return {name: value for name, get in FIGURES.items() if (value := get(record)) is not None}


def case_of(record: Record) -> str:
    """What curves of one chart have in common."""
    return f"{record.scope}/{record.mode}/{record.shape}/{record.dtype}"


def facts(records: Sequence[Record]) -> dict[str, Any]:
    """What was run, as lists to filter runs by."""
    names = {"shapes": "shape", "scopes": "scope", "modes": "mode", "dtypes": "dtype", "tokens": "tokens",
             "implementations": "implementation", "baselines": "baseline",
             "hosts": "host", "gpus": "gpu_uuid"}  # fmt: skip
    return {
        name: list(dict.fromkeys(value for record in records if (value := getattr(record, column)) not in (None, "")))
        for name, column in names.items()
    }


def summarize(records: Sequence[Record]) -> dict[str, float | str]:
    """The figures of a whole run: per implementation its ratios, its worst error and how many rows ended how.

    Over all: which implementation has the best median ratio, and how many rows failed.
    """
    summary: dict[str, float | str] = {}
    for name, own in _by_name(records):
        ratios, errors = _ratios(own), _errors(own)
        if ratios:
            summary[f"best_ratio/{name}"] = min(ratios)
            summary[f"median_ratio/{name}"] = statistics.median(ratios)
            summary[f"fastest_at/{name}"] = _wins(records, name)
        if errors:
            summary[f"worst_error_ratio/{name}"] = _worst(errors)
        for status in Status:
            summary[f"rows_{status}/{name}"] = sum(record.status is status for record in own)
    medians = {name: statistics.median(ratios) for name, own in _by_name(records) if (ratios := _ratios(own))}
    if medians:
        summary["best_implementation"] = min(medians, key=lambda name: medians[name])
        summary["best_median_ratio"] = min(medians.values())
    summary["failures"] = sum(record.status in {Status.INCORRECT, Status.ERROR} for record in records)
    return summary


def tables(records: Sequence[Record]) -> dict[str, Any]:
    """`records`: every row and column; `standing`: one line each; `not_ok`: what has no figures, and why."""
    import wandb

    rows = [[_plain(value) for value in record.row().values()] for record in records]
    found = {"records": wandb.Table(columns=list(COLUMNS), data=rows)}
    standing = [
        [
            name, _wins(records, name), statistics.median(ratios) if ratios else None, min(ratios, default=None),
            _worst(errors) if errors else None, *(sum(record.status is status for record in own) for status in Status),
        ]
        for name, own in _by_name(records)
        for ratios, errors in [(_ratios(own), _errors(own))]
    ]  # fmt: skip
    found["standing"] = wandb.Table(columns=list(STANDING), data=standing)
    lost = [
        [record.implementation, case_of(record), record.tokens, record.status.value, record.reason]
        for record in records
        if record.status is not Status.OK
    ]
    if lost:
        found["not_ok"] = wandb.Table(columns=["implementation", "case", "tokens", "status", "reason"], data=lost)
    return found


def charts(records: Sequence[Record]) -> dict[str, Any]:
    """W&B's own charts: per case a line chart over tokens for each figure, and bars at the most tokens."""
    import wandb

    found: dict[str, Any] = {}
    for case in dict.fromkeys(map(case_of, records)):
        for figure, label in CHARTS.items():
            lines: dict[str, list[tuple[int, float]]] = {}
            for record in records:
                value = figures(record).get(figure)
                if case_of(record) == case and record.status is Status.OK and value is not None:
                    lines.setdefault(record.implementation, []).append((record.tokens, value))
            if not lines:
                continue
            points = {name: sorted(line) for name, line in lines.items()}
            xs, ys = ([[point[axis] for point in line] for line in points.values()] for axis in (0, 1))
            title = f"{case}: {label}"
            if max(map(len, xs)) > 1:
                found[f"charts/{figure}/{case}"] = wandb.plot.line_series(xs, ys, list(points), title, "tokens")
            most = max(tokens for line in xs for tokens in line)
            bars = sorted((line[-1][1], name) for name, line in points.items() if line[-1][0] == most)
            data = [[name, value] for value, name in bars]
            table = wandb.Table(columns=["implementation", figure], data=data)
            found[f"bars/{figure}/{case}"] = wandb.plot.bar(table, "implementation", figure, f"{title}, {most} tokens")
    return found


def _by_name(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    for name in dict.fromkeys(record.implementation for record in records):
        yield name, [record for record in records if record.implementation == name]


def _ratios(records: Sequence[Record]) -> list[float]:
    return [record.ratio for record in records if record.ratio is not None and record.status is Status.OK]


def _errors(records: Sequence[Record]) -> list[float]:
    return [record.error_ratio for record in records if record.error_ratio is not None]


def _worst(errors: Sequence[float]) -> float:
    return max(errors, key=lambda error: (math.isnan(error), error))


def _wins(records: Sequence[Record], name: str) -> int:
    """At how many cases its ratio is the smallest."""
    best: dict[tuple[str, int], Record] = {}
    for record in records:
        key = (case_of(record), record.tokens)
        if (
            record.ratio is not None
            and record.status is Status.OK
            and (key not in best or record.ratio < (best[key].ratio or 0))
        ):
            best[key] = record
    return sum(record.implementation == name for record in best.values())


def _plain(value: object) -> object:
    """W&B takes an enumeration's member, in a column of texts, for another type."""
    return value.value if isinstance(value, enum.Enum) else value


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20
