"""A finished run as the tables that its command showed, or one of its figures as a grid."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.record import COLUMNS, FIGURES, LAYOUTS, Record, grouped
from swiglu_bench.show.workload import workload_of
from swiglu_bench.show.writers import tp_tables, training_tables
from swiglu_bench.show.writers.markdown import table as markdown_table
from swiglu_bench.show.writers.tables import TABLE, by, memory_tables, new_table, verify_detail_tables, verify_tables
from swiglu_bench.show.writers.time_tables import time_tables
from swiglu_bench.show.writers.workload_tables import workload_tables

NAME = "implementation"


def tables(run: FinishedRun, width: int, detail: bool) -> Iterator[RenderableType]:
    """The tables of the run's command."""
    if all(record.kind == "training" for record in run.records):
        return training_tables.tables([record.own for record in run.records])
    if all(record.kind == "tp" for record in run.records):
        return tp_tables.tables(run.records)
    if any(record.time_ms is not None for record in run.records):
        shown = time_tables(run.records, width, detail=detail)
        return chain(shown, workload_tables(run.records, workload_of(run.about)))
    if any(record.peak_bytes is not None for record in run.records):
        return memory_tables(run.records, width)
    return (verify_detail_tables if detail else verify_tables)(run.records, width)


def ordered(run: FinishedRun, column: str, reverse: bool) -> FinishedRun:
    """The implementations of each table by the median of a column, those without it last; or by name.

    Raises BadInput for what is not a figure.
    """
    if column == NAME:
        records = sorted(run.records, key=lambda record: record.implementation, reverse=reverse)
        return dataclasses.replace(run, records=records)
    figure(run, column, "--sort")
    records = []
    for group in by(run.records, *TABLE):
        known: list[tuple[float, list[Record]]] = []
        unknown: list[Record] = []
        for own in by(group, NAME):
            values = [value for record in own if (value := getattr(record, column)) is not None]
            if values:
                known.append((statistics.median(values), own))
            else:
                unknown += own
        known.sort(key=itemgetter(0), reverse=reverse)
        records += [record for _, own in known for record in own] + unknown
    return dataclasses.replace(run, records=records)


def figure(run: FinishedRun, column: str, option: str) -> str:
    """The column, where it is a figure of the run's rows; raises BadInput where it is not."""
    own = (name for record in run.records for name in LAYOUTS[record.kind].columns())
    known = [name for name in dict.fromkeys((*COLUMNS, *own)) if FIGURES[name].is_number]
    if column not in known:
        raise BadInput(f"{option}: {column!r} is not a figure of the run's rows; {did_you_mean(column, known)}")
    return column


def pivot(run: FinishedRun, column: str) -> list[dict[str, Any]]:
    """One row per implementation and table, one column per token count: the column's value at that case."""
    tokens = sorted({record.tokens for record in run.records})
    rows = []
    for own in (own for group in by(run.records, *TABLE) for own in by(group, NAME)):
        cells = {record.tokens: getattr(record, column) for record in own}
        if any(value is not None for value in cells.values()):
            head = {name: getattr(own[0], name) for name in (*TABLE, NAME)}
            rows.append(head | {str(count): cells.get(count) for count in tokens})
    return rows


def grid(rows: Sequence[dict[str, Any]], column: str) -> Iterator[RenderableType]:
    """A pivot as a table each for what rows have in common."""
    for head, group in grouped(rows, itemgetter(*TABLE)).items():
        _, *tokens = (name for name in group[0] if name not in TABLE and any(row[name] is not None for row in group))
        table = new_table(["", *tokens], f"{' '.join(head)}: {column}", text={""}, wrap=tokens)
        for row in group:
            table.add_row(*(Text(_short(row[name])) for name in (NAME, *tokens)))
        yield table
    if not rows:
        yield Text(f"No row has {column}.", "yellow")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A pivot as one Markdown table; empty without rows."""
    cells = [list(map(_short, row.values())) for row in rows]
    return markdown_table(list(rows[0]), cells, text={*TABLE, NAME}) if rows else ""


def _short(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
