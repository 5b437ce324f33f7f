"""One line per finished run under a folder, newest first."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows import training_run
from swiglu_bench.rows.finished_run import find_runs, load_run
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.rows.training_run import Training
from swiglu_bench.spec.cases import Scope
from swiglu_bench.spec.errors import BadInput

COLUMNS = (
    "began", "command", "device", "shapes", "scopes", "dtypes", "tokens", "cases", "implementations", "ok", "skipped",
    "failed", "best", "best_ratio", "version", "folder", "problem",
)  # fmt: skip
SHOWN = ("began", "command", "device", "what", "tokens", "rows", "best", "folder")
DISPENSABLE = ("device", "best", "tokens", "what")
"""What is left out, in this order, until each run fits into one line."""


def lines(root: Path) -> list[dict[str, Any]]:
    """What each run was, newest first; one that cannot be read has its `problem`, and stands last."""
    found = []
    for file in find_runs(root):
        try:
            run = load_run(file, beside=False)
        except BadInput as error:
            found.append(_unread(file.parent, error))
            continue
        found.append(_line(run.records, run.command, file.parent))
    for folder in training_run.find(root):
        try:
            found.append(_trained(training_run.load(folder)))
        except BadInput as error:
            found.append(_unread(folder, error))
    return sorted(found, key=lambda line: line["began"], reverse=True)


def tables(found: Sequence[dict[str, Any]], root: Path, width: int) -> Iterator[RenderableType]:
    """The runs as a table, folders as seen from `root`; what could not be read under it."""
    rows = [_cells(line, root) for line in found if not line["problem"]]
    wide = {name: max([len(name), *(cells[name].cell_len for cells in rows)]) for name in SHOWN}
    shown = list(SHOWN)
    for name in DISPENSABLE:
        if sum(wide[one] + 3 for one in shown) - 1 > width:
            shown.remove(name)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in shown:
        table.add_column(name, overflow="fold", no_wrap=name != "folder")
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


def _cells(line: dict[str, Any], root: Path) -> dict[str, Text]:
    """What the table shows of a run."""
    rows = Text(f"{line['ok']} ok")
    if line["failed"]:
        rows.append(f", {line['failed']} failed", "bold red")
    return {
        "began": Text(line["began"][:16]),
        "command": Text(line["command"]),
        "device": Text(line["device"]),
        "what": Text(f"{_cell(line['shapes'])} {_cell(line['scopes'])}"),
        "tokens": Text(_cell(line["tokens"])),
        "rows": rows,
        "best": Text.assemble(line["best"], (f" x{line['best_ratio']:.3f}", "dim")) if line["best"] else Text(""),
        "folder": Text(str(Path(line["folder"]).relative_to(root))),
    }


def _line(records: Sequence[Record], command: str, folder: Path) -> dict[str, Any]:
    def every(column: str) -> list[Any]:
        return list(dict.fromkeys(getattr(record, column) for record in records))

    ratios: dict[str, list[float]] = {}
    for record in records:
        if record.ratio is not None and record.comparable and record.status is Status.OK:
            ratios.setdefault(record.implementation, []).append(record.ratio)
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    best = min(medians, key=lambda name: medians[name], default="")
    statuses = [record.status for record in records]
    cases = {(r.shape, r.hidden, r.intermediate, r.tokens, r.dtype, r.scope, r.mode) for r in records}
    return {
        "began": min(filter(None, every("timestamp")), default="").replace("T", " ").rstrip("Z"),
        "command": command,
        "device": ", ".join(every("device")),
        "shapes": every("shape"),
        "scopes": every("scope"),
        "dtypes": every("dtype"),
        "tokens": sorted(every("tokens")),
        "cases": len(cases),
        "implementations": len(every("implementation")),
        "ok": statuses.count(Status.OK),
        "skipped": statuses.count(Status.SKIPPED),
        "failed": statuses.count(Status.INCORRECT) + statuses.count(Status.ERROR),
        "best": best,
        "best_ratio": medians.get(best),
        "version": ", ".join(every("version")),
        "folder": str(folder),
        "problem": "",
    }


def _trained(training: Training) -> dict[str, Any]:
    """A training run: its model is its shape, and its blocks are of the scope mlp."""
    rows, settings = training.summaries, training.about.get("settings", {})
    ratios = {one.implementation: one.ratio for one in rows if one.ratio is not None and not (one.frozen or one.failed)}
    best = min(ratios, key=lambda name: ratios[name], default="")
    failed = sum(one.failed for one in rows)
    return {
        "began": min((one.timestamp for one in rows), default="").replace("T", " ").rstrip("Z"),
        "command": "train",
        "device": ", ".join(dict.fromkeys(one.device for one in rows)),
        "shapes": list(dict.fromkeys(one.model for one in rows)),
        "scopes": [Scope.MLP.value],
        "dtypes": [settings["dtype"]] if settings.get("dtype") else [],
        "tokens": [],
        "cases": 1,
        "implementations": len(rows),
        "ok": sum(one.status is Status.OK and not one.failed for one in rows),
        "skipped": sum(one.status is Status.SKIPPED for one in rows),
        "failed": failed,
        "best": best,
        "best_ratio": ratios.get(best),
        "version": ", ".join(dict.fromkeys(one.version for one in rows)),
        "folder": str(training.path),
        "problem": "",
    }


def _unread(folder: Path, error: BadInput) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS, "") | {"folder": str(folder), "problem": str(error)}


def _cell(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    if len(value) > 3 and all(isinstance(one, int) for one in value):
        return f"{value[0]}-{value[-1]} ({len(value)})"
    return ",".join(map(str, value[:3])) + (f" +{len(value) - 3}" if len(value) > 3 else "")
