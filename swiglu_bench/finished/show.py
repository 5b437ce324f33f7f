"""A finished run as the tables that its command showed, or one of its figures as a grid."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.record import COLUMNS, Record
from swiglu_bench.spec.errors import BadInput, did_you_mean
from swiglu_bench.writers.tables import by, memory_tables, verify_detail_tables, verify_tables
from swiglu_bench.writers.time_tables import time_tables

TABLE = ("shape", "scope", "mode", "dtype")
"""What the rows of one table have in common."""


def tables(run: FinishedRun, width: int, detail: bool) -> Iterator[RenderableType]:
    """The tables of the run's command."""
    if any(record.time_ms is not None for record in run.records):
        return time_tables(run.records, width, detail=detail)
    if any(record.peak_bytes is not None for record in run.records):
        return memory_tables(run.records, width)
    return (verify_detail_tables if detail else verify_tables)(run.records, width)


def ordered(run: FinishedRun, column: str, reverse: bool) -> FinishedRun:
    """The implementations of each table by the median of a column, those without it last; or by name.

    Raises BadInput for what is not a figure.
    """
    if column == "implementation":
        return FinishedRun(sorted(run.records, key=lambda r: r.implementation, reverse=reverse), run.about, run.place)
    figure(column, "--sort")
    records: list[Record] = []
    for group in by(run.records, *TABLE):
        median: dict[str, float] = {}
        for own in by(group, "implementation"):
            values = [value for record in own if (value := getattr(record, column)) is not None]
            if values:
                median[own[0].implementation] = statistics.median(values)
        known = [record for record in group if record.implementation in median]
        known.sort(key=lambda record: median[record.implementation], reverse=reverse)
        records += known + [record for record in group if record.implementation not in median]
    return FinishedRun(records, run.about, run.place)


def figure(column: str, option: str) -> str:
    """The column, where it is a figure; raises BadInput where it is not."""
    figures = [name for name in COLUMNS if name not in TABLE and _is_figure(name)]
    if column not in figures:
        raise BadInput(f"{option}: {column!r} is not a figure of records.csv; {did_you_mean(column, figures)}")
    return column


def pivot(run: FinishedRun, column: str) -> list[dict[str, Any]]:
    """One row per implementation and table, one column per token count: the column's value at that case."""
    tokens = sorted({record.tokens for record in run.records})
    rows = []
    for group in by(run.records, *TABLE):
        for own in by(group, "implementation"):
            cells = {record.tokens: getattr(record, column) for record in own}
            if any(value is not None for value in cells.values()):
                head = {name: getattr(own[0], name) for name in (*TABLE, "implementation")}
                rows.append(head | {str(count): cells.get(count) for count in tokens})
    return rows


def grid(rows: Sequence[dict[str, Any]], column: str) -> Iterator[RenderableType]:
    """A pivot as a table each for what rows have in common."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(" ".join(str(row[name]) for name in TABLE), []).append(row)
    for head, group in groups.items():
        table = Table(title=f"{head}: {column}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        names = [name for name in group[0] if name not in TABLE]
        for name in names:
            is_name = name == "implementation"
            table.add_column("" if is_name else name, justify="left" if is_name else "right", no_wrap=is_name)
        for row in group:
            table.add_row(*(Text(_short(row[name])) for name in names))
        yield table
    if not rows:
        yield Text(f"No row has {column}.", "yellow")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A pivot as one Markdown table."""
    names = list(rows[0]) if rows else []
    lines = [
        f"| {' | '.join(names)} |",
        "|" + " --- |" * len(TABLE) + " --- |" + " ---: |" * (len(names) - len(TABLE) - 1),
    ]
    return "\n".join([*lines, *(f"| {' | '.join(_short(row[name]) for name in names)} |" for row in rows)])


def _is_figure(name: str) -> bool:
    annotation = Record.__dataclass_fields__[name].type
    return annotation in {"int", "float", "int | None", "float | None"}


def _short(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
