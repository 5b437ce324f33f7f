"""The files of a run's folder: their names, how the folder is made, run.json, rows and samples read back.

A file of rows has the columns of its layout. What these do not say follows from them and from run.json.

A named baseline is a run that is kept to compare later ones with, under its name and what was run.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.rows import csv_table
from swiglu_bench.rows.csv_table import reason
from swiglu_bench.rows.record import COLUMNS, FIGURES, LAYOUTS, SCHEMA_VERSION, Record, row_of

if TYPE_CHECKING:
    import pandas

RECORDS = LAYOUTS["run"].file
SAMPLES = LAYOUTS["run"].samples
CHECKS = "checks.csv"
TOTALS = LAYOUTS["workload"].file
AUDIT = LAYOUTS["audit"].file
SPLIT, SPLIT_SAMPLES = LAYOUTS["tp"].file, LAYOUTS["tp"].samples
"""Of `tp`."""
RUN = "run.json"
_DTYPES = {int: "int64", int | None: "Int64", float | None: "float64", bool: "bool", bool | None: "boolean"}
BASELINES = Path(".swiglu-bench") / "baselines"
"""Below the working directory, so that the baselines of a project stay with it."""


def create_folder(folder: Path) -> None:
    """Make the folder and prove that it takes files, before the work starts; raises BadInput if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"probe")
            probe.flush()
    except FileExistsError:
        raise BadInput(f"--out: {folder} is a file; give a folder.") from None
    except OSError as error:
        raise BadInput(f"--out: {folder} cannot be written: {reason(error)}; give a folder that can.") from None


def has_rows(folder: Path, name: str = RECORDS) -> bool:
    """Whether a command has left rows in the file `name` there, or a part of one."""
    try:
        return len((folder / name).read_bytes().splitlines()) > 1
    except OSError:
        return False


def remove_rows(folder: Path) -> None:
    """Remove records.csv and what belongs to its rows; raises BadInput where that cannot be."""
    try:
        for name in (RECORDS, SAMPLES, CHECKS, TOTALS):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"--force: the rows of {folder} cannot be removed: {reason(error)}; remove them.") from None


def write_run_file(folder: Path, run: dict[str, Any]) -> None:
    """Write run.json (command, settings, machine) whole or not at all; raises BadInput if it cannot be written."""
    document = json.dumps(run, indent=2, ensure_ascii=False, default=str) + "\n"
    try:
        csv_table.write_whole(folder / RUN, document.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise BadInput(f"--out: {folder / RUN} cannot be written: {reason(error)}.") from None


def read_about(folder: Path) -> dict[str, Any]:
    """run.json of a folder; empty where there is none. Raises BadInput for one that is broken."""
    file = folder / RUN
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read: {error}; fix or delete it.") from None
    if not isinstance(about, dict):
        raise BadInput(f"{file} holds no JSON object; fix or delete it.")
    if not isinstance(about.get("machine", {}), dict):
        raise BadInput(f"{file} names a machine that is not a JSON object; fix or delete it.")
    return about


def records_file(path: Path) -> Path:
    """The records.csv that a path means: itself, or the one in that folder; raises BadInput where there is none."""
    if not path.exists():
        raise BadInput(f"{path} does not exist; give the folder of a run, or its {RECORDS}.")
    file = path / RECORDS if path.is_dir() else path
    if file.exists():
        return file
    if (path / AUDIT).exists():
        raise BadInput(f"{path} is an audit and has no {RECORDS}; give the folder of a run that has one.")
    below = min(path.rglob(RECORDS), default=None)
    hint = f"a folder below it has, such as {below.parent}" if below else "give the folder of a run"
    raise BadInput(f"{path} has no {RECORDS}; {hint}.")


def read_rows(path: Path) -> list[Record]:
    """Read a records.csv, given as the file or its folder; columns that an older version did not have are empty.

    Raises BadInput for a file that is missing, not a records.csv, or of a newer schema.
    """
    return read_layout(records_file(path), "run")


def read_layout(file: Path, kind: str) -> list[Record]:
    """The rows of a file of the layout of this kind. Raises BadInput as above."""
    layout = LAYOUTS[kind]
    foreign = BadInput(f"{file} is not a {layout.file} that this version can read.")
    try:
        names = csv_table.header(file)
        ours = {"run_id", "schema"} <= set(names)
        schemas = [row["schema"] for row in csv_table.texts(file)] if ours else []
    except (OSError, ValueError, csv.Error):
        raise foreign from None
    newest = max((int(schema) for schema in schemas if str(schema).isdecimal()), default=0)
    if newest > SCHEMA_VERSION:
        raise BadInput(
            f"{file} was written by a newer swiglu-bench (schema {newest}; this one reads up to {SCHEMA_VERSION})."
        )
    if layout.figures(names) not in {layout.columns(schema) for schema in range(1, SCHEMA_VERSION + 1)}:
        raise foreign
    about = {} if kind == "run" else read_about(file.parent)
    return csv_table.read(file, Record, layout.file, partial(row_of, kind, about), layout.called)


def frame_of(records: Sequence[Record]) -> pandas.DataFrame:
    """Records as a data frame, with a type per column: those of records.csv, then those that their own file has."""
    import pandas

    own = (name for record in records for name in LAYOUTS[record.kind].columns())
    names = tuple(dict.fromkeys((*COLUMNS, *own)))
    rows = [[getattr(record, name) for name in names] for record in records]
    frame = pandas.DataFrame(rows, columns=list(names), dtype=object)
    frame["status"] = [record.status.value for record in records]
    return frame.astype({name: _DTYPES.get(FIGURES[name].kind, "str") for name in names})


def baseline_place(name: str, what: str) -> Path:
    """The folder of a baseline; `what` is the command or the test that made it. Raises BadInput for a bad name."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise BadInput(f"{name!r} is not a valid baseline name; give letters, digits, '.', '_' and '-', such as main.")
    return BASELINES / name / what


def save_baseline(name: str, what: str, run: Path) -> Path:
    """Keep a copy of a run's folder as a baseline, in place of an earlier one, and say where. Raises OSError."""
    target = baseline_place(name, what)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as new:
        copy = shutil.copytree(run, Path(new) / what, ignore=shutil.ignore_patterns("logs", "traces"))
        if target.exists():
            target.rename(Path(new) / "old")
        copy.rename(target)
    return target


def baseline_commands(name: str) -> list[str]:
    """The commands of which a baseline was saved. Raises BadInput where there is none of that name."""
    found = sorted(file.parent.name for file in baseline_place(name, "").glob(f"*/{RECORDS}"))
    if not found:
        known = sorted({file.parent.parent.name for file in BASELINES.rglob(RECORDS)})
        near = did_you_mean(name, known) if known else f"save one: swiglu-bench forward --save-baseline {name}"
        raise BadInput(f"There is no run and no baseline {name!r}; {near.rstrip('.?')}.")
    return found


def find_baseline(name: str, what: str) -> Path:
    """The folder of a baseline that was saved. Raises BadInput where there is none, naming those that are there."""
    found = baseline_place(name, what)
    if not (found / RECORDS).exists():
        known = sorted(file.parent.parent.name for file in BASELINES.rglob(RECORDS) if file.parent.name == what)
        near = did_you_mean(name, known) if known else f"save one: swiglu-bench {what} --save-baseline {name}"
        raise BadInput(f"There is no run and no baseline {name!r} of {what}; {near.rstrip('.?')}.")
    return found
