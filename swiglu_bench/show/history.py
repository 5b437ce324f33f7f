"""Finished runs for a reader who looks for one: a line for each, its rows in order, one of its figures as a grid."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.rows.finished_run import FinishedRun, case_of, find_runs, load_run
from swiglu_bench.rows.record import COLUMNS as ROW
from swiglu_bench.rows.record import FAILED, FIGURES, LAYOUTS, SCHEMA_VERSION, Record, Status, grouped, unique
from swiglu_bench.show import text
from swiglu_bench.show.ranking import median_ratios, totals, workload_of
from swiglu_bench.show.table import TABLE, Cell, Grid, by

NAME = "implementation"
COLUMNS = (
    "began", "command", "device", "shapes", "scopes", "dtypes", "tokens", "cases", "implementations", "ok", "skipped",
    "failed", "best", "best_ratio", "version", "code", "folder", "problem",
)  # fmt: skip
"""What is told of each run; of one that cannot be read only its folder and the problem."""
Line = dict[str, Any]
SHOWN = ("began", "command", "device", "what", "tokens", "rows", "best", "folder")
DISPENSABLE = ("device", "best", "tokens", "what")
"""What is left out, in this order, until each run fits into one line."""


def lines(root: Path) -> list[Line]:
    """What each run was, newest first; one that cannot be read stands last."""
    found = []
    for folder in find_runs(root):
        told = dict.fromkeys(COLUMNS, "") | {"folder": str(folder)}
        try:
            found.append(told | _line(load_run(folder, beside=False)))
        except BadInput as error:
            found.append(told | {"problem": str(error)})
    return sorted(found, key=itemgetter("began"), reverse=True)


def _line(run: FinishedRun) -> Line:
    rows = run.records
    statuses, ratios = [row.status for row in rows], median_ratios(rows)
    best = min(ratios, key=lambda name: ratios[name], default="")

    def each(column: str) -> list[Any]:
        return unique(getattr(row, column) for row in rows)

    return {
        "began": min((row.timestamp for row in rows if row.timestamp), default="").replace("T", " ").rstrip("Z"),
        "command": run.command, "device": ", ".join(each("device")), "shapes": each("shape"), "scopes": each("scope"),
        "dtypes": each("dtype"), "tokens": sorted(each("tokens")), "cases": len({case_of(row) for row in rows}),
        "implementations": len(each(NAME)), "ok": statuses.count(Status.OK),
        "skipped": statuses.count(Status.SKIPPED), "failed": sum(map(statuses.count, FAILED)), "best": best,
        "best_ratio": ratios.get(best), "version": ", ".join(each("version")),
        "code": ", ".join(unique(f"{row.implementation} {row.code}" for row in rows if row.code)),
    }  # fmt: skip


def history_tables(found: Sequence[Line], root: Path, width: int) -> Iterator[RenderableType]:
    """The runs as a table, folders as seen from `root`; what could not be read under it."""
    rows = [_cells(line, root) for line in found if not line["problem"]]
    wide = {name: max([len(name), *(cells[name].cell_len for cells in rows)]) for name in SHOWN}
    shown = list(SHOWN)
    for name in DISPENSABLE:
        if sum(wide[column] + 3 for column in shown) - 1 > width:
            shown.remove(name)
    yield Grid(shown, [[cells[name] for name in shown] for cells in rows], text=shown, wrap={"folder"}).terminal()
    for line in found:
        if line["problem"]:
            yield Text(f"not read: {line['problem']}", "yellow")
    if "best" in shown:
        yield Text("best: the implementation with the lowest median ratio to the baseline.", "dim")
    if len(shown) < len(SHOWN):
        left_out = ", ".join(name for name in SHOWN if name not in shown)
        yield Text(f"Not shown in {width} columns: {left_out}.", "dim")


def _cells(line: Line, root: Path) -> dict[str, Text]:
    rows = Text.assemble(f"{line['ok']} ok", (f", {line['failed']} failed" if line["failed"] else "", "bold red"))
    best = Text.assemble(line["best"], (f" x{line['best_ratio']:.3f}" if line["best"] else "", "dim"))
    texts = {
        "began": line["began"][:16], "command": line["command"], "device": line["device"],
        "what": f"{_listed(line['shapes'])} {_listed(line['scopes'])}", "tokens": _listed(line["tokens"]),
        "folder": str(Path(line["folder"]).relative_to(root)),
    }  # fmt: skip
    return {**{name: Text(of) for name, of in texts.items()}, "rows": rows, "best": best}


def _listed(values: Sequence[Any]) -> str:
    if len(values) > 3 and all(isinstance(value, int) for value in values):
        return f"{values[0]}-{values[-1]} ({len(values)})"
    return ",".join(map(str, values[:3])) + (f" +{len(values) - 3}" if len(values) > 3 else "")


def as_text(run: FinishedRun, form: str) -> str:
    """A run as `json`, `jsonl` or `csv`: the columns of its own file, one row per case and implementation."""
    rows = [record.own.row() for record in run.records]
    kind = run.records[0].kind if run.records else "run"
    about: dict[str, Any] = {"kind": kind, **({"schema": SCHEMA_VERSION} if kind == "run" else {}), **run.about}
    if workload := workload_of(run.about):
        about["workload_totals"] = [total.row() for total in totals(run.records, workload)]
    return text.as_text(form, rows, about, rows[0] if rows else ROW)


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
        known, unknown = list[tuple[float, list[Record]]](), list[tuple[float, list[Record]]]()
        for own in by(group, NAME):
            values = [value for record in own if (value := getattr(record, column)) is not None]
            (known if values else unknown).append((statistics.median(values) if values else 0, own))
        known.sort(key=itemgetter(0), reverse=reverse)
        records += [record for _, own in (*known, *unknown) for record in own]
    return dataclasses.replace(run, records=records)


def figure(run: FinishedRun, column: str, option: str) -> str:
    """The column, where it is a figure of the run's rows; raises BadInput where it is not."""
    own = (name for record in run.records for name in LAYOUTS[record.kind].columns())
    known = [name for name in unique((*ROW, *own)) if FIGURES[name].is_number]
    if column not in known:
        raise BadInput(f"{option}: {column!r} is not a figure of the run's rows; {did_you_mean(column, known)}")
    return column


def pivot(run: FinishedRun, column: str) -> list[Line]:
    """One row per implementation and table, one column per token count: the column's value at that case."""
    tokens = sorted({record.tokens for record in run.records})
    rows = []
    for own in (own for group in by(run.records, *TABLE) for own in by(group, NAME)):
        cells = {record.tokens: getattr(record, column) for record in own}
        if any(value is not None for value in cells.values()):
            head = {name: getattr(own[0], name) for name in (*TABLE, NAME)}
            rows.append(head | {str(count): cells.get(count) for count in tokens})
    return rows


def pivot_tables(rows: Sequence[Line], column: str) -> Iterator[RenderableType]:
    """A pivot as a table each for what rows have in common."""
    for head, group in grouped(rows, itemgetter(*TABLE)).items():
        _, *tokens = (name for name in group[0] if name not in TABLE and any(row[name] is not None for row in group))
        cells = [[_short(row[name]) for name in (NAME, *tokens)] for row in group]
        yield Grid(["", *tokens], cells, f"{' '.join(head)}: {column}", text={""}, wrap=tokens).terminal()
    if not rows:
        yield Text(f"No row has {column}.", "yellow")


def pivot_markdown(rows: Sequence[Line]) -> str:
    """A pivot as one Markdown table; empty without rows."""
    cells: list[list[Cell]] = [list(map(_short, row.values())) for row in rows]
    return Grid(list(rows[0]), cells, text={*TABLE, NAME}).markdown() if rows else ""


def _short(value: object) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.4g}" if isinstance(value, float) else str(value))
