"""A run's folder, its CSV files and run.json, written so that neither a kill nor a full disk loses a row.

Every line of the CSV files is one row: line breaks inside a text become spaces. A last line without its end is a row
that a kill cut short; readers skip it and the next run that appends removes it.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases import BadInput
from swiglu_bench.record import COLUMNS, SCHEMA_VERSION, Record, TensorCheck

if TYPE_CHECKING:
    import pandas

RECORDS = "records.csv"
SAMPLES = "samples.csv"
CHECKS = "checks.csv"
RUN = "run.json"

SAMPLE_COLUMNS = ("run_id", "shape", "tokens", "dtype", "scope", "mode", "implementation", "round", "time_ms")
"""samples.csv is long: one line per sample. All but the last two name the record that it belongs to."""

CHECK_COLUMNS = (*SAMPLE_COLUMNS[:-2], *(one.name for one in dataclasses.fields(TensorCheck)))
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
        key = [getattr(record, name) for name in SAMPLE_COLUMNS[:-2]]
        samples = [[*key, number, time_ms] for number, time_ms in enumerate(record.samples_ms)]
        names = CHECK_COLUMNS[len(key) :]
        checks = [[*key, *(getattr(check, name) for name in names)] for check in record.tensor_checks]
        for table, rows in ((self._samples, samples), (self._checks, checks), (self._records, [record.row().values()])):
            try:
                table.append(rows)
            except OSError as error:
                if not self._warned:
                    self._warn(f"{table.path} cannot be written: {_reason(error)}; the run goes on and tries again.")
                self._warned = True

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

    def _resume(self) -> None:
        """Check that an existing file has these columns and remove a row that a kill cut short."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        same = whole.replace(b"\r\n", b"\n").startswith(self._header) if whole else self._header.startswith(content)
        if not same:
            raise BadInput(f"--out: {self.path} has other columns than this version writes; choose another folder.")
        if whole != content:
            os.truncate(self.path, len(whole))


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

    Missing figures are NaN or NA, missing texts empty. Raises BadInput for a file that is missing, not a records.csv,
    or of a newer schema.
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
    if names != COLUMNS:
        raise foreign

    hints = typing.get_type_hints(Record)
    dtypes = {name: _DTYPES.get(hints[name], "str") for name in COLUMNS}
    missing = {name: ["", "nan"] for name, dtype in dtypes.items() if dtype != "str"}
    try:
        return pandas.read_csv(io.StringIO(text), dtype=dtypes, keep_default_na=False, na_values=missing)
    except ValueError:
        raise foreign from None


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
