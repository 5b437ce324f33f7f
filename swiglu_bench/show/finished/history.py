"""One line per finished run under a folder, newest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.finished_run import case_of, find_runs, load_run
from swiglu_bench.rows.ranking import median_ratios
from swiglu_bench.rows.record import FAILED, Status, unique
from swiglu_bench.show.writers.tables import new_table

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
    found = []
    for folder in find_runs(root):
        about = dict.fromkeys(COLUMNS, "") | {"folder": str(folder)}
        try:
            found.append(about | _line(folder))
        except BadInput as error:
            found.append(about | {"problem": str(error)})
    return sorted(found, key=lambda line: line["began"], reverse=True)


def _line(folder: Path) -> Line:
    """What a run was, of whichever command."""
    run = load_run(folder, beside=False)
    rows, ratios = run.records, median_ratios(run.records)
    statuses, best = [row.status for row in rows], min(ratios, key=lambda name: ratios[name], default="")
    columns = {"shapes": "shape", "scopes": "scope", "dtypes": "dtype", "device": "device", "version": "version"}
    found = {name: unique(getattr(row, column) for row in rows) for name, column in columns.items()}
    return {
        **found,
        "began": min((row.timestamp for row in rows if row.timestamp), default="").replace("T", " ").rstrip("Z"),
        "command": run.command,
        "device": ", ".join(found["device"]),
        "tokens": sorted({row.tokens for row in rows}),
        "cases": len({case_of(row) for row in rows}),
        "implementations": len({row.implementation for row in rows}),
        "ok": statuses.count(Status.OK),
        "skipped": statuses.count(Status.SKIPPED),
        "failed": sum(map(statuses.count, FAILED)),
        "best": best,
        "best_ratio": ratios.get(best),
        "version": ", ".join(found["version"]),
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
