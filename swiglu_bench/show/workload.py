"""The rows of a workload's token counts summed up as one figure per implementation, and a run as text with these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from swiglu_bench.measure.statistics import CONFIDENCE, Interval, verdict
from swiglu_bench.rows import csv_table
from swiglu_bench.rows.finished_run import FinishedRun, kept_ratio
from swiglu_bench.rows.record import COLUMNS as ROW
from swiglu_bench.rows.record import LAYOUTS, SCHEMA_VERSION, Record, Status, grouped
from swiglu_bench.rows.run_folder import TOTALS
from swiglu_bench.show import text

WORK = ("shape", "scope", "mode", "dtype")
ByTokens = Mapping[int, Record]


def workload_of(about: Mapping[str, Any]) -> dict[int, float]:
    """The workload that run.json names; empty where it names none."""
    found = about.get("workload")
    return {int(tokens): float(weight) for tokens, weight in found.items()} if isinstance(found, dict) else {}


def write_totals(folder: Path, found: Iterable[Record]) -> None:
    """Write workload.csv, whole or not at all."""
    lines = [LAYOUTS["workload"].columns(), *(one.row().values() for one in found)]
    csv_table.write_whole(folder / TOTALS, csv_table.as_csv(lines).encode())


def as_text(run: FinishedRun, form: str) -> str:
    """A run as `json`, `jsonl` or `csv`: the columns of its own file, one row per case and implementation."""
    rows = [record.own.row() for record in run.records]
    kind = run.records[0].kind if run.records else "run"
    about: dict[str, Any] = {"kind": kind, **({"schema": SCHEMA_VERSION} if kind == "run" else {}), **run.about}
    workload = workload_of(run.about)
    if workload:
        about["workload_totals"] = [one.row() for one in totals(run.records, workload)]
    return text.as_text(form, rows, about, rows[0] if rows else ROW)


def totals(records: Iterable[Record], workload: Mapping[int, float]) -> list[Record]:
    """One total per kind of work and implementation that was tried at any of the workload's token counts."""
    rows = [row for row in records if row.tokens in workload and row.status is not Status.SKIPPED]
    found = []
    for same in grouped(rows, attrgetter(*WORK)).values():
        by_name = {
            name: {row.tokens: row for row in own} for name, own in grouped(same, attrgetter("implementation")).items()
        }
        found += [_total(own, by_name, workload) for own in by_name.values()]
    return found


def _total(own: ByTokens, by_name: Mapping[str, ByTokens], workload: Mapping[int, float]) -> Record:
    first = next(iter(own.values()))
    baseline = next((row.baseline for row in own.values() if row.baseline), "")
    work = {name: getattr(first, name) for name in WORK}
    total = Record(**work, implementation=first.implementation, baseline=baseline, kind="workload")
    times = _times(own, workload)
    missing = [str(tokens) for tokens in workload if tokens not in times]
    if missing:
        return dataclasses.replace(total, reason=f"no time at {', '.join(missing)} tokens")
    mean_ms = sum(weight * times[tokens] for tokens, weight in workload.items()) / sum(workload.values())
    total = dataclasses.replace(total, time_ms=mean_ms)
    base = by_name.get(baseline, {})
    base_times = _times(base, workload)
    ratios = {
        tokens: kept_ratio(row, base[tokens], 1 - (1 - CONFIDENCE) / len(workload))
        for tokens, row in own.items()
        if tokens in base_times and row.comparable
    }
    known = {tokens: one for tokens, one in ratios.items() if one}
    if len(known) < len(workload):
        return dataclasses.replace(total, reason="no ratio at every token count")
    shares = {tokens: weight * base_times[tokens] for tokens, weight in workload.items()}

    def weighted(value: Callable[[int], float]) -> float:
        return sum(share * value(tokens) for tokens, share in shares.items()) / sum(shares.values())

    median, low = weighted(lambda tokens: known[tokens].median), weighted(lambda tokens: known[tokens].low)
    between = Interval(median, low, weighted(lambda tokens: known[tokens].high))
    noises = {tokens: own[tokens].noise for tokens in workload}
    judged = first.implementation != baseline and None not in noises.values()
    return dataclasses.replace(
        total, ratio=between.median, ratio_low=between.low, ratio_high=between.high,
        verdict=verdict(between, weighted(lambda tokens: noises[tokens] or 0.0)).value if judged else "",
    )  # fmt: skip


def _times(own: ByTokens, workload: Mapping[int, float]) -> dict[int, float]:
    found = {tokens: own[tokens].time_ms for tokens in workload if tokens in own}
    return {tokens: time_ms for tokens, time_ms in found.items() if time_ms is not None}
