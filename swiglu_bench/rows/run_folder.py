"""The files of a run's folder: what they are called, how the folder is made, run.json, and records.csv as a frame."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tempfile
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.rows.csv_table import reason
from swiglu_bench.rows.record import COLUMNS, SCHEMA_VERSION, Record, columns
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

_DTYPES = {int: "int64", int | None: "Int64", float | None: "float64", bool: "bool"}


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
        raise BadInput(f"--out: {folder / RUN} cannot be written: {reason(error)}.") from None


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
        raise BadInput(f"{file} cannot be read: {reason(error)}.") from None
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
