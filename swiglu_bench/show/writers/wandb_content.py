"""What a Weights & Biases run holds: figures over tokens, tables, charts, and a summary that runs can be sorted by."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from swiglu_bench.rows.figures import MIB
from swiglu_bench.rows.finished_run import case_of as work_of
from swiglu_bench.rows.ranking import median_ratios, ranked
from swiglu_bench.rows.record import COLUMNS, Record, Status, grouped, unique

FIGURES = (
    "time_ms", "ratio", "tflops", "gbps", "limit_pct", "latency_us", "graph_us", "uj_per_token", "error_ratio",
    "saved_mib", "peak_mib", "workspace_mib", "efficiency", "hidden_share", "bus_gbps",
)  # fmt: skip
"""What is drawn over tokens, as <figure>/<scope>/<mode>/<shape>/<dtype>/<implementation>."""

CHARTS = {"time_ms": "time, ms", "ratio": "time / baseline", "limit_pct": "% of limit", "peak_mib": "peak, MiB"}
"""Figures that get a line chart over tokens, all implementations in one."""
STANDING = ("fastest_at", "median_ratio", "best_ratio", "worst_error_ratio", *(f"rows_{status}" for status in Status))
"""What is told of each implementation over the whole run."""
TRAINED = ("final_loss", "metric_mean", "step_ms", "curve", "verdict")
"""What the summary says of each implementation that was trained."""
FACTS = {
    "shapes": "shape", "scopes": "scope", "routings": "routing", "modes": "mode", "dtypes": "dtype", "tokens": "tokens",
    "implementations": "implementation", "baselines": "baseline", "hosts": "host", "gpus": "gpu_uuid",
}  # fmt: skip


def figures(record: Record) -> dict[str, float]:
    """Those figures that the record has."""
    values = {name: getattr(record, name.replace("_mib", "_bytes")) for name in FIGURES}
    known = {name: value for name, value in values.items() if value is not None}
    return {name: value / MIB if name.endswith("_mib") else value for name, value in known.items()}


def case_of(record: Record) -> str:
    """What curves of one chart have in common."""
    return f"{record.scope}/{record.mode}/{record.shape}/{record.dtype}"


def facts(records: Sequence[Record]) -> dict[str, Any]:
    """What was run, as lists to filter runs by."""
    values = {name: unique(getattr(record, column) for record in records) for name, column in FACTS.items()}
    return {name: [value for value in found if value not in (None, "")] for name, found in values.items()}


def standing(records: Sequence[Record]) -> dict[str, dict[str, float | None]]:
    """Of each implementation the columns of STANDING: cases won, ratios, worst error, and how many rows ended how."""
    cases = (ranked(same) for same in grouped(records, work_of).values())
    wins = Counter(first.implementation for first, *_ in filter(None, cases) if first.ratio is not None)
    medians, found = median_ratios(records), {}
    for name, own in grouped(records, attrgetter("implementation")).items():
        ratios = [record.ratio for record in own if record.ratio is not None and record.status is Status.OK]
        errors = [record.error_ratio for record in own if record.error_ratio is not None]
        figures = (
            wins[name], medians.get(name), min(ratios, default=None),
            max(errors, key=lambda error: (math.isnan(error), error), default=None),
            *(sum(record.status is status for record in own) for status in Status),
        )  # fmt: skip
        found[name] = dict(zip(STANDING, figures, strict=True))
    return found


def summarize(records: Sequence[Record]) -> dict[str, float | str]:
    """The figures of a whole run: where each implementation stands, the best over all, and how many rows failed."""
    summary: dict[str, float | str] = {}
    for name, own in standing(records).items():
        without = {"fastest_at"} if own["best_ratio"] is None else ()
        summary |= {f"{key}/{name}": value for key, value in own.items() if value is not None and key not in without}
    for record in records:
        if record.kind == "training":
            own = {f"{name}/{record.implementation}": getattr(record, name) for name in TRAINED}
            summary |= {name: value for name, value in own.items() if value is not None}
    medians = median_ratios(records)
    if medians:
        summary["best_implementation"] = min(medians, key=lambda name: medians[name])
        summary["best_median_ratio"] = min(medians.values())
    summary["failures"] = sum(record.failed for record in records)
    return summary


def tables(records: Sequence[Record]) -> dict[str, Any]:
    """`records`: every row and column; `standing`: one line each; `not_ok`: why a row has no figures; `remarks`."""
    import wandb

    rows = [[_plain(getattr(record, name)) for name in COLUMNS] for record in records]
    found = {"records": wandb.Table(columns=list(COLUMNS), data=rows)}
    heads = ["implementation", *(column.removeprefix("rows_") for column in STANDING)]
    lines = [[name, *own.values()] for name, own in standing(records).items()]
    found["standing"] = wandb.Table(columns=heads, data=lines)
    for table, column, wanted in (
        ("not_ok", "reason", lambda record: record.status is not Status.OK),
        ("remarks", "remarks", attrgetter("remarks")),
    ):
        noted = [
            [record.implementation, case_of(record), record.tokens, record.status.value, getattr(record, column)]
            for record in filter(wanted, records)
        ]
        if noted:
            found[table] = wandb.Table(columns=["implementation", "case", "tokens", "status", column], data=noted)
    return found


def charts(records: Sequence[Record]) -> dict[str, Any]:
    """W&B's own charts: per case a line chart over tokens for each figure, and bars at the most tokens."""
    import wandb

    found: dict[str, Any] = {}
    for case, rows in grouped((record for record in records if record.status is Status.OK), case_of).items():
        for figure, label in CHARTS.items():
            known = [
                (record.implementation, record.tokens, value)
                for record in rows
                if (value := figures(record).get(figure)) is not None
            ]
            if not known:
                continue
            lines = {name: sorted(point[1:] for point in own) for name, own in grouped(known, lambda p: p[0]).items()}
            xs, ys = ([[point[axis] for point in line] for line in lines.values()] for axis in (0, 1))
            title = f"{case}: {label}"
            if max(map(len, xs)) > 1:
                found[f"charts/{figure}/{case}"] = wandb.plot.line_series(xs, ys, list(lines), title, "tokens")
            most = max(tokens for _, tokens, _ in known)
            bars = sorted((line[-1][1], name) for name, line in lines.items() if line[-1][0] == most)
            table = wandb.Table(columns=["implementation", figure], data=[[name, value] for value, name in bars])
            found[f"bars/{figure}/{case}"] = wandb.plot.bar(table, "implementation", figure, f"{title}, {most} tokens")
    return found


def _plain(value: object) -> object:
    """W&B takes an enumeration's member, in a column of texts, for another type."""
    return value.value if isinstance(value, enum.Enum) else value
