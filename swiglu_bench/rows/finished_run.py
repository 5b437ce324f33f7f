"""Finished runs, read back: a folder that a command wrote, or its records.csv, as rows with samples and checks."""

from __future__ import annotations

import csv
import fnmatch
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.rows import text as formats
from swiglu_bench.rows.csv_table import texts, typed
from swiglu_bench.rows.record import COLUMNS, SCHEMA_VERSION, GpuState, Record, TensorCheck
from swiglu_bench.rows.run_folder import CHECKS, RECORDS, RUN, SAMPLE_KEY, SAMPLES, frame_of, read_records
from swiglu_bench.spec.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    import pandas

Key = tuple[str, ...]
FILTERS = ("implementation", "shape", "tokens", "dtype", "scope", "mode")
"""The columns that rows can be chosen by."""


@dataclass(frozen=True)
class FinishedRun:
    """The rows of one command, in the order in which they were made, and what they were made with."""

    records: Sequence[Record]
    about: dict[str, Any]
    """run.json: command, settings, machine; empty where there is none."""
    place: Path | None = None
    """Where it was read from or written to; None: nowhere."""

    @property
    def frame(self) -> pandas.DataFrame:
        """All rows, typed as `read_records` types them."""
        return frame_of(self.records)

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return str(self.place) if self.place else str(self.about.get("run_id", "this run"))

    @property
    def command(self) -> str:
        """`forward` of `swiglu-bench forward --shapes smoke`; of several commands in one file, the last."""
        return verb(self.records[-1].command) if self.records else verb(str(self.about.get("command", "")))

    def only(self, **wanted: Sequence[str]) -> FinishedRun:
        """The rows whose columns match one of the values given for each, globs included; an empty list is no filter.

        Raises BadInput where a value matches no row, naming what there is.
        """
        kept = list(self.records)
        for column, patterns in wanted.items():
            known = list(dict.fromkeys(str(getattr(record, column)) for record in self.records))
            for pattern in patterns:
                if not fnmatch.filter(known, pattern):
                    raise BadInput(f"{self.name} has no {column} {pattern!r}; {did_you_mean(pattern, known)}")
            if patterns:
                kept = [r for r in kept if any(fnmatch.fnmatch(str(getattr(r, column)), p) for p in patterns)]
        if self.records and not kept:
            raise BadInput(f"{self.name} has no row that all of the filters choose; leave one of them out.")
        return FinishedRun(kept, self.about, self.place)


class Collected:
    """A writer that keeps rows in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        """Keep the row."""
        self.records.append(record)

    def close(self) -> None:
        """Nothing is open."""


def as_text(run: FinishedRun, form: str) -> str:
    """A run as `json`, `jsonl` or `csv`: the columns of records.csv, one row per case and implementation."""
    return formats.as_text(
        form, [r.row() for r in run.records], {"kind": "run", "schema": SCHEMA_VERSION, **run.about}, COLUMNS
    )


def verb(command: str) -> str:
    """The subcommand of a command line."""
    return next((word for word in command.split()[1:] if not word.startswith("-")), command)


def load_run(path: Path, beside: bool = True) -> FinishedRun:
    """Read a run's folder, or its records.csv and, unless told otherwise, samples and checks that lie beside it.

    Raises BadInput for what is not a run, or one that this version cannot read.
    """
    file = records_file(path)
    read_records(file)  # judges the header, the schema and every cell
    samples, checks = (_beside(file, SAMPLES), _beside(file, CHECKS)) if beside else ({}, {})
    records = [typed(Record, row) for row in texts(file)]
    for record in records:
        key = tuple(str(getattr(record, name)) for name in SAMPLE_KEY)
        mine = samples.get(key, [])
        record.samples_ms = tuple(float(row["time_ms"]) for row in mine)
        record.twin_ms = tuple(float(row["twin_ms"]) for row in mine if row.get("twin_ms"))
        record.states = tuple(_state(row) for row in mine if row.get("sm_mhz") or row.get("power_w"))
        record.tensor_checks = tuple(_check(row) for row in checks.get(key, []))
    return FinishedRun(records, read_about(file.parent), file.parent)


def records_file(path: Path) -> Path:
    """The records.csv that a user means by a path; raises BadInput where it is no run."""
    if not path.exists():
        raise BadInput(f"{path} does not exist; give the folder of a run, or its {RECORDS}.")
    file = path / RECORDS if path.is_dir() else path
    if file.exists():
        return file
    if (path / "audit.csv").exists():
        raise BadInput(f"{path} is an audit and has no {RECORDS}; give the folder of a run that has one.")
    below = next(find_runs(path), None)
    hint = f"a folder below it has, such as {below.parent}" if below else "give the folder of a run"
    raise BadInput(f"{path} has no {RECORDS}; {hint}.")


def find_runs(root: Path) -> Iterator[Path]:
    """The records.csv of every run under a folder."""
    yield from sorted(root.rglob(RECORDS))


def read_about(folder: Path) -> dict[str, Any]:
    """run.json of a folder; empty where there is none. Raises BadInput for one that is broken."""
    file = folder / RUN
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read: {error}; mend or remove it.") from None
    if not isinstance(about, dict):
        raise BadInput(f"{file} holds no object; mend or remove it.")
    if not isinstance(about.get("machine", {}), dict):
        raise BadInput(f"{file} names a machine that is no object; mend or remove it.")
    return about


def latest(records: Iterable[Record]) -> list[Record]:
    """Of rows of the same case and implementation the last: several runs may share a file."""
    return list({(case_of(record), record.implementation): record for record in records}.values())


def case_of(record: Record) -> tuple[Any, ...]:
    """What two rows have to agree in to be of the same work; the seed changes the numbers and not the work."""
    return (
        record.shape, record.hidden, record.intermediate, record.scope, record.mode, record.dtype, record.tokens,
    )  # fmt: skip


def case_label(case: tuple[Any, ...]) -> str:
    """A case in a line of text."""
    shape, _, _, scope, mode, dtype, tokens = case
    return f"{shape} {scope} {mode} {dtype} tokens={tokens}"


def _beside(records: Path, name: str) -> dict[Key, list[dict[str, str]]]:
    """The rows of another file of the run by the record that they belong to, in the file's order."""
    file, found = records.with_name(name), dict[Key, list[dict[str, str]]]()
    if not file.exists():
        return found
    try:
        for row in texts(file):
            found.setdefault(tuple(row[column] for column in SAMPLE_KEY), []).append(row)
    except (OSError, ValueError, KeyError, csv.Error) as error:
        reason = f"it has no column {error}" if isinstance(error, KeyError) else str(error)
        raise BadInput(f"{file} cannot be read: {reason}; mend or remove it.") from None
    return found


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def _state(row: dict[str, str]) -> GpuState:
    clock, power, temperature = (_number(row.get(name)) for name in ("sm_mhz", "power_w", "temperature_c"))
    return GpuState(clock, power, temperature, row.get("throttle"))


def _check(row: dict[str, str]) -> TensorCheck:
    """A line of checks.csv."""
    place = row.get("worst_index", "").strip("()").split(",")
    return TensorCheck(
        tensor=row["tensor"],
        ok=row["ok"] == "true",
        **{
            name: float(row[name])
            for name in ("error", "eager_error", "allowed", "max_error", "eager_max_error", "max_allowed")
        },
        reason=row.get("reason", ""),
        check=row.get("check", ""),
        median_error=_number(row.get("median_error")),
        p999_error=_number(row.get("p999_error")),
        worst_index=tuple(int(part) for part in place if part.strip()),
    )
