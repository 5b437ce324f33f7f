"""A run's folder, its CSV files and run.json, written so that neither a kill nor a full disk loses a row.

Every line of the CSV files is one row: line breaks inside a text become spaces. A last line without its end is a row
that a kill cut short; readers skip it and the next run that appends removes it. Whole rows are removed by writing the
file anew beside the old one and putting it in its place.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import os
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.rows.record import (
    COLUMNS,
    SCHEMA_VERSION,
    Record,
    TensorCheck,
    columns,
)
from swiglu_bench.spec.errors import BadInput

if TYPE_CHECKING:
    import pandas

RECORDS = "records.csv"
SAMPLES = "samples.csv"
CHECKS = "checks.csv"
RUN = "run.json"

SAMPLE_KEY = ("run_id", "shape", "tokens", "dtype", "scope", "mode", "implementation")
"""What names the record that a sample or a check belongs to."""
SAMPLE_COLUMNS = (
    *SAMPLE_KEY, "round", "time_ms", "twin_ms", "sm_mhz", "power_w", "temperature_c", "throttle",
)  # fmt: skip
"""samples.csv is long: one line per sample, with the state of the GPU after its round."""

CHECK_FIELDS = tuple(one.name for one in dataclasses.fields(TensorCheck))
CHECK_COLUMNS = (*SAMPLE_KEY, *CHECK_FIELDS)
"""checks.csv is long: one line per tensor that was checked, with the distribution of its error where `verify` asked."""

_DTYPES = {int: "int64", int | None: "Int64", float | None: "float64", bool: "bool"}


class CsvFile:
    """Appends each record to records.csv, samples.csv and checks.csv, on the disk when `write` returns.

    `warn` hears of the first failed write, such as on a full disk. The rows it could not write are kept in memory and
    tried again with every further record and at the end, so that a disk with room again loses nothing.
    """

    def __init__(self, folder: Path, warn: Callable[[str], object] = warnings.warn) -> None:
        """Begin the files in `folder`, or go on with those there; raises BadInput if they are not this version's."""
        self._samples = Table(folder / SAMPLES, SAMPLE_COLUMNS)
        self._checks = Table(folder / CHECKS, CHECK_COLUMNS)
        self._records = Table(folder / RECORDS, COLUMNS)
        self._warn = warn
        self._warned = False

    def write(self, record: Record) -> None:
        """Append the record: samples and checks first, so that every row of records.csv has them."""
        samples, checks = _samples(record), _checks(record)
        for table, rows in ((self._samples, samples), (self._checks, checks), (self._records, [record.row().values()])):
            try:
                table.append(rows)
            except OSError as error:
                if not self._warned:
                    self._warn(f"{table.path} cannot be written: {_reason(error)}; the run goes on and tries again.")
                self._warned = True

    def rows(self) -> list[dict[str, str]]:
        """The rows of records.csv as texts, those of earlier runs included."""
        return self._records.rows()

    def drop(self, unwanted: Callable[[dict[str, str]], bool]) -> None:
        """Remove rows, and with them all samples and checks that have no row."""
        try:
            self._records.keep(lambda row: not unwanted(row))
            owners = {_owner(row) for row in self._records.rows()}
            for table in (self._samples, self._checks):
                table.keep(lambda row: _owner(row) in owners)
        except OSError as error:
            self._warn(f"{self._records.path} still has outdated rows: {_reason(error)}.")

    @property
    def lost(self) -> bool:
        """Whether rows are not on the disk."""
        return any(table.unwritten for table in (self._samples, self._checks, self._records))

    def close(self) -> None:
        """Try the rows that could not be written a last time, and say how many are lost."""
        for table in (self._samples, self._checks, self._records):
            try:
                if table.unwritten:
                    table.append([])
            except OSError as error:
                self._warn(f"{table.path} lacks its last {table.unwritten} lines: {_reason(error)}.")


class Table:
    """A CSV file that only grows, by whole lines in one write."""

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        self.path = path
        self._header = _lines([columns])
        self._pending = b""
        try:
            self._resume()
            self.append([])
        except OSError as error:
            raise BadInput(f"--out: {path} cannot be written: {_reason(error)}.") from None

    @property
    def unwritten(self) -> int:
        """Lines that wait for a disk that takes them."""
        return self._pending.count(b"\n")

    def append(self, rows: Iterable[Iterable[Any]]) -> None:
        """Write what is pending and then `rows`; on OSError the rest stays pending."""
        self._pending += _lines(rows)
        with self.path.open("ab", buffering=0) as file:
            if file.tell() == 0 and not self._pending.startswith(self._header):
                self._pending = self._header + self._pending
            if not self._pending:
                return
            while self._pending:
                self._pending = self._pending[file.write(self._pending) :]
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, str]]:
        """The rows that are on the disk."""
        return [row for _, row in self._lines()]

    def keep(self, wanted: Callable[[dict[str, str]], bool]) -> None:
        """Remove all other rows."""
        lines = self._lines()
        kept = [line for line, row in lines if wanted(row)]
        if len(kept) == len(lines):
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                file.write(self._header + b"".join(kept))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _lines(self) -> list[tuple[bytes, dict[str, str]]]:
        """Each line on the disk, as it is there and as a row; every row is one line."""
        if not self.path.exists():
            return []
        header, *lines = self.path.read_bytes().splitlines(keepends=True)
        names = next(csv.reader([header.decode()]))
        cells = csv.reader(line.decode("utf-8", errors="replace") for line in lines)
        return [(line, dict(zip(names, row, strict=False))) for line, row in zip(lines, cells, strict=True)]

    def _resume(self) -> None:
        """Check that an existing file has these columns and remove a row that a kill cut short."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        same = whole.replace(b"\r\n", b"\n").startswith(self._header) if whole else self._header.startswith(content)
        if not same:
            raise BadInput(f"--out: {self.path} has other columns than this version writes; choose another folder.")
        if whole != content:
            os.truncate(self.path, len(whole))


def _owner(row: dict[str, str]) -> tuple[str, ...]:
    """What a sample or a check and the row it belongs to have in common."""
    return tuple(row[name] for name in SAMPLE_KEY)


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
        raise BadInput(f"--out: {folder} cannot be written: {_reason(error)}; give a folder that can.") from None


def write_run_file(folder: Path, run: dict[str, Any]) -> None:
    """Write run.json (command, settings, machine) whole or not at all; raises BadInput if it cannot be written."""
    temporary = folder / f".{RUN}.{os.getpid()}"
    try:
        text = json.dumps(run, indent=2, ensure_ascii=False, default=str) + "\n"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(folder / RUN)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise BadInput(f"--out: {folder / RUN} cannot be written: {_reason(error)}.") from None


def read_records(path: Path) -> pandas.DataFrame:
    """Read a records.csv, given as the file or its folder, with a type per column as Record has it.

    Missing figures are NaN or NA, missing texts empty, and so are columns that an older version did not have. Raises
    BadInput for a file that is missing, not a records.csv, or of a newer schema.
    """
    import pandas

    file = path / RECORDS if path.is_dir() else path
    foreign = BadInput(f"{file} is not a {RECORDS} that this version can read.")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist; give a {RECORDS} or a folder that holds one.") from None
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {_reason(error)}.") from None
    except UnicodeDecodeError:
        raise foreign from None
    text = text[: text.rfind("\n") + 1]

    try:
        rows = csv.DictReader(io.StringIO(text))
        names = tuple(rows.fieldnames or ())
        ours = {"run_id", "schema"} <= set(names)
        newest = max((int(row["schema"]) for row in rows if ours and str(row["schema"]).isdecimal()), default=0)
    except csv.Error:
        raise foreign from None
    if newest > SCHEMA_VERSION:
        raise BadInput(
            f"{file} was written by a newer swiglu-bench (schema {newest}; this one reads up to {SCHEMA_VERSION})."
        )
    if names not in {columns(schema) for schema in range(1, SCHEMA_VERSION + 1)}:
        raise foreign

    dtypes = _dtypes()
    missing = {name: ["", "nan"] for name, dtype in dtypes.items() if dtype != "str"}
    try:
        frame = pandas.read_csv(
            io.StringIO(text),
            dtype={name: dtypes[name] for name in names},
            keep_default_na=False,
            na_values={name: values for name, values in missing.items() if name in names},
        )
    except ValueError:
        raise foreign from None
    for name in set(COLUMNS) - set(names):
        frame[name] = pandas.Series(["" if dtypes[name] == "str" else None] * len(frame), dtype=dtypes[name])
    return frame[list(COLUMNS)]


def frame_of(records: Iterable[Record]) -> pandas.DataFrame:
    """Records as a table that is typed as `read_records` types a file."""
    import pandas

    rows = [{**record.row(), "status": record.status.value} for record in records]
    return pandas.DataFrame(rows, columns=list(COLUMNS)).astype(_dtypes())


def _dtypes() -> dict[str, str]:
    hints = typing.get_type_hints(Record)
    return {name: _DTYPES.get(hints[name], "str") for name in COLUMNS}


def _samples(record: Record) -> list[list[Any]]:
    key = [getattr(record, name) for name in SAMPLE_KEY]
    beside = itertools.zip_longest(record.samples_ms, record.twin_ms, record.states)
    return [
        [*key, number, time_ms, twin_ms, *(dataclasses.astuple(state) if state else [None] * 4)]
        for number, (time_ms, twin_ms, state) in enumerate(beside)
    ]


def _checks(record: Record) -> list[list[Any]]:
    key = [getattr(record, name) for name in SAMPLE_KEY]
    return [[*key, *(getattr(check, name) for name in CHECK_FIELDS)] for check in record.tensor_checks]


def _lines(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue().encode("utf-8", errors="backslashreplace")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.9g}"
    return " ".join(str(value).split())


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
