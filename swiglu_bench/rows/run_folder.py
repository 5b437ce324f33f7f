"""The files of a run's folder: their names, how the folder is made, run.json, rows and samples read back.

A file of rows has the columns of its layout. What these do not say follows from them and from run.json. Their samples,
a line per round, or per step of a training, are in a file beside them.

A named baseline is a run that is kept to compare later ones with, under its name and what was run.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.rows.figures import Figure, cell, header, reason, texts, typed, write_whole
from swiglu_bench.rows.record import COLUMNS, FIGURES, LAYOUTS, SCHEMA_VERSION, GpuState, Record, row_of

if TYPE_CHECKING:
    import pandas

Line = TypeVar("Line")
Key = tuple[str, ...]

RECORDS = LAYOUTS["run"].file
SAMPLES = LAYOUTS["run"].samples
CHECKS = "checks.csv"
TOTALS = LAYOUTS["workload"].file
AUDIT = LAYOUTS["audit"].file
SPLIT, SPLIT_SAMPLES = LAYOUTS["tp"].file, LAYOUTS["tp"].samples
"""Of `tp`."""
RUN = "run.json"
_DTYPES = {int: "int64", int | None: "Int64", float | None: "float64", bool: "bool", bool | None: "boolean"}
STATE = ("sm_mhz", "power_w", "temperature_c", "throttle")
"""Of the GPU after the round."""
PARTS = ("compute_ms", "comm_ms", "single_ms")
OF_STEPS = ("loss", "learning_rate", "step_ms")
OF_ROUNDS = {"run": ("time_ms", "twin_ms", *STATE), "tp": ("time_ms", "twin_ms", *PARTS), "seeds": OF_STEPS}
"""What is known of each round or step, by kind of row."""
SAMPLE_COLUMNS = {
    kind: (*LAYOUTS[kind].key, "step" if kind == "seeds" else "round", *names) for kind, names in OF_ROUNDS.items()
}
SAMPLE_FIGURES = {
    "round": Figure("number of the round, from 0; samples of two implementations in the same round form one ratio"),
    "twin_ms": Figure("on the baseline's rows: the sample of the first additional baseline process (A/A)", "ms"),
    "step": Figure("number of the step, from 0"),
    "loss": Figure("mean over the batch", "nats", "lower"),
    "learning_rate": Figure("learning rate of this step"),
    "step_ms": Figure(
        "wall-clock time until the loss is known, including compilation in the first step; contenders "
        "ran one after another, so these times cannot be compared",
        "ms",
    ),
}
"""What rows do not have."""
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


def check_out(folder: Path | None, resume: bool, force: bool) -> None:
    """Raise BadInput for an --out that is a file, or that has rows which neither option speaks of; and for the two."""
    for name, given in (("resume", resume), ("force", force)):
        if given and not folder:
            raise BadInput(f"--{name} needs a folder that has rows; give it as --out FOLDER.")
    if resume and force:
        raise BadInput("--resume was given together with --force; leave one of them out.")
    if folder and os.path.isfile(folder):
        raise BadInput(f"--out: {folder} is a file; give a folder.")
    if folder and not (resume or force) and has_rows(folder):
        advice = "add --resume to keep them and run what is missing, or --force to delete them and start again"
        raise BadInput(f"--out: {folder} has rows of an earlier run; {advice}, or give another folder.")


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
        write_whole(folder / RUN, document.encode("utf-8", errors="backslashreplace"))
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
    """Read a records.csv, given as the file or its folder; raises BadInput where it is none, or of a newer schema."""
    return read_layout(records_file(path), "run")


def read_layout(file: Path, kind: str) -> list[Record]:
    """The rows of a file of the layout of this kind. Raises BadInput as above."""
    layout, found = LAYOUTS[kind], list[Record]()
    foreign = f"{file} is not a {layout.file} that this version can read"
    try:
        names = header(file)
        known = layout.figures(names) in {layout.columns(schema) for schema in range(1, SCHEMA_VERSION + 1)}
        rows = texts(file) if known or {"run_id", "schema"} <= set(names) else []
    except (OSError, ValueError, csv.Error):
        raise BadInput(f"{foreign}.") from None
    newest = max((int(row["schema"]) for row in rows if str(row.get("schema")).isdecimal()), default=0)
    if newest > SCHEMA_VERSION:
        schemas = f"schema {newest}; this one reads up to {SCHEMA_VERSION}"
        raise BadInput(f"{file} was written by a newer swiglu-bench ({schemas}).")
    if not known:
        raise BadInput(f"{foreign}.")
    make = partial(row_of, kind, {} if kind == "run" else read_about(file.parent))
    try:
        for row in rows:
            called = {layout.called.get(column, column): text for column, text in row.items()}
            found.append(typed(Record, {name: text for name, text in called.items() if name != ""}, make))
    except (ValueError, TypeError) as error:
        raise BadInput(f"{foreign}: line {len(found) + 2}: {error}.") from None
    return found


def sample_lines(record: Record) -> Iterator[list[Any]]:
    """The lines of a row in the file of samples."""
    known: dict[str, Sequence[Any]] = {"time_ms": record.samples_ms, "twin_ms": record.twin_ms, **record.series}
    known |= {name: [getattr(state, name) for state in record.states] for name in STATE}
    key = attrgetter(*LAYOUTS[record.kind].key)(record)
    rounds = itertools.zip_longest(*(known.get(name, ()) for name in OF_ROUNDS[record.kind]))
    for number, values in enumerate(rounds):
        yield [*key, number, *values]


def attach(records: Sequence[Record], folder: Path) -> None:
    """Give rows that were read their samples, from the file beside theirs. Raises BadInput for one that is broken."""
    kind = records[0].kind
    rounds = beside(folder / LAYOUTS[kind].samples, partial(_round, kind), LAYOUTS[kind].key)
    for record in records:
        own = rounds.get(key_of(record), [])
        known = {name: tuple(round[name] for round in own if round.get(name) is not None) for name in OF_ROUNDS[kind]}
        record.samples_ms, record.twin_ms = known.get("time_ms", ()), known.get("twin_ms", ())
        record.series = {name: known[name] for name in (*PARTS, *OF_STEPS) if known.get(name)}
        states = [GpuState(*map(round.get, STATE)) for round in own]
        record.states = tuple(state for state in states if state.sm_mhz is not None or state.power_w is not None)


def _round(kind: str, line: Mapping[str, str]) -> dict[str, Any]:
    """What a line says of its round or step. Old files of samples lack columns; those of `tp` and `train` never did."""
    first, *_ = names = OF_ROUNDS[kind]
    cells = {name: line.get(name) if kind == "run" and name != first else line[name] for name in names}
    numbers = {name: float(text) if text else None for name, text in cells.items() if name != "throttle"}
    for name, value in numbers.items():
        if value is not None and name.endswith("_ms") and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {cells[name]}")
    return {"throttle": cells.get("throttle"), **numbers, first: float(line[first])}


def key_of(record: Record) -> Key:
    """What names the row in the files beside its own."""
    return tuple(cell(getattr(record, name)) for name in LAYOUTS[record.kind].key)


def beside(file: Path, made: Callable[[dict[str, str]], Line], key: Sequence[str]) -> dict[Key, list[Line]]:
    """The lines of another file of the run by the record that they belong to, in the file's order."""
    found: dict[Key, list[Line]] = {}
    try:
        for row in texts(file):
            found.setdefault(tuple(row[column] for column in key), []).append(made(row))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        reason = f"it has no column {error}" if isinstance(error, KeyError) else str(error)
        raise BadInput(f"{file} cannot be read: {reason}; fix or delete it.") from None
    return found


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
    return found or _no_baseline(name, "*")


def find_baseline(name: str, what: str) -> Path:
    """The folder of a baseline that was saved. Raises BadInput where there is none, naming those that are there."""
    found = baseline_place(name, what)
    return found if (found / RECORDS).exists() else _no_baseline(name, what)


def _no_baseline(name: str, what: str) -> NoReturn:
    known = sorted({file.parent.parent.name for file in BASELINES.glob(f"*/{what}/{RECORDS}")})
    command, of_what = ("forward", "") if what == "*" else (what, f" of {what}")
    near = did_you_mean(name, known) if known else f"save one: swiglu-bench {command} --save-baseline {name}"
    raise BadInput(f"There is no run and no baseline {name!r}{of_what}; {near.rstrip('.?')}.")
