"""One line per finished run under a folder, newest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.rows.finished_run import case_of, load_run
from swiglu_bench.rows.grouping import unique
from swiglu_bench.rows.ranking import median_ratios
from swiglu_bench.rows.record import FAILED, Record, Status
from swiglu_bench.rows.run_folder import find_runs
from swiglu_bench.rows.training import Summary, find_trainings, load_training
from swiglu_bench.spec.cases import Scope
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.writers.tables import new_table

COLUMNS = (
    "began", "command", "device", "shapes", "scopes", "dtypes", "tokens", "cases", "implementations", "ok", "skipped",
    "failed", "best", "best_ratio", "version", "folder", "problem",
)  # fmt: skip
SHOWN = ("began", "command", "device", "what", "tokens", "rows", "best", "folder")
DISPENSABLE = ("device", "best", "tokens", "what")
"""What is left out, in this order, until each run fits into one line."""

Line = dict[str, Any]
"""A run under the names of COLUMNS."""


def lines(root: Path) -> list[Line]:
    """What each run was, newest first; one that cannot be read has its `problem`, and stands last."""
    folders = [(file.parent, _measured) for file in find_runs(root)]
    folders += [(folder, _trained) for folder in find_trainings(root)]
    found = []
    for folder, read in folders:
        about = dict.fromkeys(COLUMNS, "") | {"folder": str(folder)}
        try:
            found.append(about | read(folder))
        except BadInput as error:
            found.append(about | {"problem": str(error)})
    return sorted(found, key=lambda line: line["began"], reverse=True)


def _measured(folder: Path) -> Line:
    """A run of a command that measures or checks."""
    run = load_run(folder, beside=False)
    statuses = [record.status for record in run.records]
    columns = {"shapes": "shape", "scopes": "scope", "dtypes": "dtype"}
    return {
        **_common(run.records, median_ratios(run.records)),
        **{name: unique(getattr(record, column) for record in run.records) for name, column in columns.items()},
        "command": run.command,
        "tokens": sorted({record.tokens for record in run.records}),
        "cases": len({case_of(record) for record in run.records}),
        "implementations": len({record.implementation for record in run.records}),
        "ok": statuses.count(Status.OK),
        "skipped": statuses.count(Status.SKIPPED),
        "failed": sum(map(statuses.count, FAILED)),
    }


def _trained(folder: Path) -> Line:
    """A training run: its model is its shape, and its blocks are of the scope mlp."""
    training = load_training(folder)
    rows, settings = training.summaries, training.about.get("settings", {})
    ratios = {one.implementation: one.ratio for one in rows if one.ratio is not None and not (one.frozen or one.failed)}
    return {
        **_common(rows, ratios),
        "command": "train",
        "shapes": unique(one.model for one in rows),
        "scopes": [Scope.MLP.value],
        "dtypes": [settings["dtype"]] if settings.get("dtype") else [],
        "tokens": [],
        "cases": 1,
        "implementations": len(rows),
        "ok": sum(one.status is Status.OK and not one.failed for one in rows),
        "skipped": sum(one.status is Status.SKIPPED for one in rows),
        "failed": sum(one.failed for one in rows),
    }


def _common(rows: Sequence[Record] | Sequence[Summary], ratios: dict[str, float]) -> Line:
    """What the lines of all runs say in one way; `ratios` is what each implementation that may be ranked has."""
    best = min(ratios, key=lambda name: ratios[name], default="")
    return {
        "began": min((row.timestamp for row in rows if row.timestamp), default="").replace("T", " ").rstrip("Z"),
        "device": ", ".join(unique(row.device for row in rows)),
        "best": best,
        "best_ratio": ratios.get(best),
        "version": ", ".join(unique(row.version for row in rows)),
    }


def tables(found: Sequence[Line], root: Path, width: int) -> Iterator[RenderableType]:
    """The runs as a table, folders as seen from `root`; what could not be read under it."""
    rows = [_cells(line, root) for line in found if not line["problem"]]
    wide = {name: max([len(name), *(cells[name].cell_len for cells in rows)]) for name in SHOWN}
    shown = list(SHOWN)
    for name in DISPENSABLE:
        if sum(wide[one] + 3 for one in shown) - 1 > width:
            shown.remove(name)
    table = new_table(shown, text=shown, wrap={"folder"})
    for cells in rows:
        table.add_row(*(cells[name] for name in shown))
    yield table
    for line in found:
        if line["problem"]:
            yield Text(f"not read: {line['problem']}", "yellow")
    if "best" in shown:
        yield Text("best: the implementation with the lowest median ratio to the baseline.", "dim")
    if len(shown) < len(SHOWN):
        left_out = ", ".join(name for name in SHOWN if name not in shown)
        yield Text(f"Not shown in {width} columns: {left_out}.", "dim")


def _cells(line: Line, root: Path) -> dict[str, Text]:
    """What the table shows of a run."""
    rows = Text(f"{line['ok']} ok")
    if line["failed"]:
        rows.append(f", {line['failed']} failed", "bold red")
    return {
        "began": Text(line["began"][:16]),
        "command": Text(line["command"]),
        "device": Text(line["device"]),
        "what": Text(f"{_short(line['shapes'])} {_short(line['scopes'])}"),
        "tokens": Text(_short(line["tokens"])),
        "rows": rows,
        "best": Text.assemble(line["best"], (f" x{line['best_ratio']:.3f}", "dim")) if line["best"] else Text(""),
        "folder": Text(str(Path(line["folder"]).relative_to(root))),
    }


def _short(values: Sequence[Any]) -> str:
    if len(values) > 3 and all(isinstance(one, int) for one in values):
        return f"{values[0]}-{values[-1]} ({len(values)})"
    return ",".join(map(str, values[:3])) + (f" +{len(values) - 3}" if len(values) > 3 else "")
