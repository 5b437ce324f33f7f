"""Rows as text: what commands print for other programs, and files that neither a kill nor a full disk spoils.

A command whose rows go to stdout prints nothing else there. A CSV file only grows, by whole lines in one write. Whole
rows are removed by writing the file anew beside the old one and putting it in its place.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import statistics
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.console import Console

from swiglu_bench.cases.cases import ACTIVATIONS, WEIGHTS, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.figures import as_csv, cell, figures, reason, write_whole
from swiglu_bench.rows.figures import schema as row_schema
from swiglu_bench.rows.record import LAYOUTS, SCHEMA_VERSION, Record, Status, TensorCheck
from swiglu_bench.rows.run_folder import CHECKS, SAMPLE_COLUMNS, sample_lines
from swiglu_bench.version import __version__

if TYPE_CHECKING:
    import pandas

TABLE = "table"
ROWS = ("json", "jsonl", "csv")


def screen(form: str = TABLE) -> Console:
    """Where people are told things: stdout, unless a program reads that."""
    return Console(stderr=form != TABLE)


def as_json(document: object, indent: int | None = 2) -> str:
    """JSON as the standard has it: figures that are not finite become null."""
    return json.dumps(_finite(document), indent=indent, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def as_text(form: str, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any], columns: Iterable[str]) -> str:
    """Rows as `json` (one object: `about`, and the rows under `rows`), `jsonl` or `csv`."""
    if form == "json":
        return as_json({**about, "rows": rows})
    if form == "jsonl":
        return "".join(as_json(row, indent=None) for row in rows)
    names = list(columns)
    return as_csv([names, *([row.get(name) for name in names] for row in rows)])


def schema(kind: str) -> str:
    """The JSON Schema of what `show RUN --format json` prints of a kind of row, by the declarations of its figures."""
    layout = LAYOUTS[kind]
    row = row_schema(Record, dict(zip(layout.header(), layout.columns(), strict=True)))
    about = {"kind": {"const": kind}, **({"schema": {"const": SCHEMA_VERSION}} if kind == "run" else {})}
    return as_json({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:swiglu-bench:{kind}:{SCHEMA_VERSION}",
        "title": f"swiglu-bench, rows of the kind {kind!r}, schema {SCHEMA_VERSION}",
        "type": "object", "properties": {**about, "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}}},
        "required": [*about, "rows"], "$defs": {"row": row},
    })  # fmt: skip


def exported(form: str, records: Sequence[Record], about: Mapping[str, Any]) -> str:
    """The timed rows of a run in the format of another program, by its name in `EXPORTS`.

    Raises BadInput where the run has nothing that the format can hold.
    """
    if any(record.kind != "run" or record.source for record in records):
        raise BadInput("--export is for runs of forward, backward and step; give one of these.")
    found = EXPORTS[form](records, about)
    if not found:
        raise BadInput(f"--export {form}: no row of the run has a time; give a run that has some.")
    return found


def _label(record: Record) -> str:
    case = f"{record.shape}/{record.scope}/{record.mode}/{record.dtype}/{record.tokens}"
    return f"{case}/{record.implementation}"


def _github_action_benchmark(records: Sequence[Record], about: Mapping[str, Any]) -> str:
    """For its tool `customSmallerIsBetter`: the time of each row, and its ratio to the baseline."""
    found: list[dict[str, Any]] = []
    for record in records:
        if record.time_ms is None:
            continue
        than = "with" if record.verdict == "tie" else "than"
        own = f"{record.verdict} {than} {record.baseline}" if record.verdict else "not compared"
        own = "the baseline" if record.implementation == record.baseline else own
        extra = "\n".join((own, record.device, record.version))
        spread = f"{cell(record.time_p10_ms)} to {cell(record.time_p90_ms)}"
        time = {"name": f"{_label(record)} time", "unit": "ms", "value": record.time_ms, "extra": extra}
        found.append(time | ({"range": spread} if record.time_p90_ms is not None else {}))
        if record.ratio is not None and record.implementation != record.baseline:
            interval = f"{cell(record.ratio_low)} to {cell(record.ratio_high)}"
            unit = f"of {record.baseline}'s time"
            found.append({"name": f"{_label(record)} ratio", "unit": unit, "value": record.ratio, "range": interval,
                          "extra": extra})  # fmt: skip
    return as_json(found) if found else ""


def _pytest_benchmark(records: Sequence[Record], about: Mapping[str, Any]) -> str:
    """The file of its `--benchmark-json`, in seconds; rows whose samples were not kept are left out."""
    machine, found = about.get("machine", {}), []
    for record in records:
        samples = [sample / 1e3 for sample in record.samples_ms]
        if record.time_ms is None or not samples:
            continue
        several = len(samples) > 1
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive") if several else samples * 3
        mean, deviation = statistics.fmean(samples), statistics.stdev(samples) if several else 0.0
        reach = 1.5 * (high - low)
        inside = [sample for sample in samples if low - reach <= sample <= high + reach]
        beyond = sum(abs(sample - mean) > deviation for sample in samples)
        stats = {
            "min": min(samples), "max": max(samples), "mean": mean, "stddev": deviation, "rounds": len(samples),
            "median": middle, "iqr": high - low, "q1": low, "q3": high, "iqr_outliers": len(samples) - len(inside),
            "stddev_outliers": beyond, "outliers": f"{beyond};{len(samples) - len(inside)}", "ld15iqr": min(inside),
            "hd15iqr": max(inside), "ops": 1 / mean, "total": sum(samples), "iterations": 1, "data": samples,
        }  # fmt: skip
        label, kept = _label(record), ("ratio", "ratio_low", "ratio_high", "verdict", "baseline", "version")
        found.append({
            "group": label.rpartition("/")[0], "name": label, "fullname": f"swiglu-bench::{label}", "params": None,
            "param": None, "extra_info": {name: getattr(record, name) for name in kept}, "options": {}, "stats": stats,
        })  # fmt: skip
    if not found and any(record.time_ms is not None for record in records):
        lack = "no samples are beside the rows; give a run's folder with its samples"
        raise BadInput(f"--export pytest-benchmark: {lack}.")
    host = {"node": machine.get("host", ""), "processor": machine.get("cpu", ""), "machine": machine.get("device", "")}
    versions = {"python_version": machine.get("python", ""), "system": machine.get("system", "")}
    whole = {
        "machine_info": {**host, **versions, "cpu": {"brand_raw": machine.get("cpu", "")}},
        "commit_info": {"id": machine.get("version", ""), "dirty": False, "project": "swiglu-bench"},
        "benchmarks": found, "datetime": records[-1].timestamp, "version": about.get("version", __version__),
    }  # fmt: skip
    return as_json(whole) if found else ""


def _flashinfer_trace(records: Sequence[Record], about: Mapping[str, Any]) -> str:
    """A line of its schema Trace for each row that is right, wrong or died; what is not known it cannot say."""
    statuses = {Status.OK: "PASSED", Status.INCORRECT: "INCORRECT_NUMERICAL", Status.ERROR: "RUNTIME_ERROR"}
    found = []
    for record in records:
        if record.status not in statuses or (record.status is Status.OK and record.time_ms is None):
            continue
        scope, libs = Scope(record.scope), {name: getattr(record, name) for name in ("torch", "triton", "cuda")}
        evaluation: dict[str, Any] = {
            "status": statuses[record.status], "timestamp": record.timestamp, "log": record.reason,
            "environment": {"hardware": record.device, "libs": libs},
        }  # fmt: skip
        if record.status is not Status.ERROR:
            largest = [check.max_error for check in record.tensor_checks if check.allowed]
            evaluation["correctness"] = {
                "max_relative_error": max(largest) if largest else math.nan, "max_absolute_error": math.nan,
                "extra": {"of": "the truth's root mean square", "norm_relative_error": record.error,
                          "eager_norm_relative_error": record.eager_error},
            }  # fmt: skip
        if record.time_ms is not None:
            evaluation["performance"] = {"latency_ms": record.time_ms}
            if record.ratio:
                reference_ms, factor = record.time_ms / record.ratio, 1 / record.ratio
                evaluation["performance"] |= {"reference_latency_ms": reference_ms, "speedup_factor": factor}
        sizes = {name: getattr(record, name) for name in ("tokens", "hidden", "intermediate", "experts", "top_k")}
        case = _label(record).rpartition("/")[0]
        definition = f"swiglu_{record.scope}_{record.mode}_{record.dtype}_h{record.hidden}_i{record.intermediate}"
        found.append({
            "definition": definition, "solution": record.implementation, "evaluation": evaluation,
            "workload": {
                "axes": {name: size for name, size in sizes.items() if size is not None},
                "inputs": {name: {"type": "random"} for name in (*ACTIVATIONS[scope], *WEIGHTS[scope])},
                "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"swiglu-bench:{case}")),
            },
        })  # fmt: skip
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # which pydantic reads
    return "".join(json.dumps(_finite(line, names), ensure_ascii=False) + "\n" for line in found)


EXPORTS = {
    "github-action-benchmark": _github_action_benchmark, "pytest-benchmark": _pytest_benchmark,
    "flashinfer-trace": _flashinfer_trace,
}  # fmt: skip


def put(text: str, file: Path | None = None) -> None:
    """Text to stdout, or into a new file; raises BadInput where that cannot be."""
    if file is None:
        sys.stdout.write(text)
        return
    with _new(file) as opened:
        opened.write(text.encode("utf-8", errors="backslashreplace"))


def write_parquet(rows: pandas.DataFrame | Sequence[Mapping[str, Any]], file: Path) -> None:
    """Rows as a new Parquet file; raises BadInput where pandas has no engine for it."""
    import pandas

    buffer = io.BytesIO()
    try:
        pandas.DataFrame(rows).to_parquet(buffer, index=False)
    except ImportError:
        raise BadInput("--format parquet needs pyarrow or fastparquet; install one of them, or choose csv.") from None
    with _new(file) as opened:
        opened.write(buffer.getvalue())


def _new(file: Path) -> BinaryIO:
    try:
        return file.open("xb")
    except FileExistsError:
        raise BadInput(f"--output: {file} is already there; give a new file.") from None
    except OSError as error:
        why = reason(error)
        raise BadInput(f"--output: {file} cannot be written: {why}; give a file that can.") from None


def _finite(value: Any, names: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The value with what is not finite by other names, or None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, names) for item in value]
    return names.get(str(value)) if isinstance(value, float) and not math.isfinite(value) else value


CHECK_FIELDS = tuple(figures(TensorCheck))
KEY = LAYOUTS["run"].key
CHECK_COLUMNS = (*KEY, *CHECK_FIELDS)
"""checks.csv is long: one line per tensor that was checked, with the distribution of its error where `verify` asked."""


class Table:
    """A CSV file that only grows, by whole lines in one write."""

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        self.path = path
        self._header = _encoded([columns])
        self._pending = b""
        self.cut_short = False
        """Whether the file ended in the middle of a row, which was removed."""
        try:
            self._resume()
            self.append([])
        except OSError as error:
            raise BadInput(f"--out: {path} cannot be written: {reason(error)}.") from None

    @property
    def unwritten(self) -> int:
        """The number of lines that could not be written yet."""
        return self._pending.count(b"\n")

    def append(self, rows: Iterable[Iterable[Any]]) -> None:
        """Write what is pending and then `rows`; on OSError the rest stays pending."""
        self._pending += _encoded(rows)
        with self.path.open("ab", buffering=0) as file:
            if file.tell() == 0 and not self._pending.startswith(self._header):
                self._pending = self._header + self._pending
            if not self._pending:
                return
            while self._pending:
                self._pending = self._pending[file.write(self._pending) :]
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, str]]:
        """The rows on the disk."""
        return [row for _, row in self._lines()]

    def keep(self, wanted: Callable[[dict[str, str]], bool]) -> None:
        """Remove all rows but those for which `wanted` is true."""
        lines = self._lines()
        kept = [line for line, row in lines if wanted(row)]
        if len(kept) < len(lines):
            write_whole(self.path, self._header + b"".join(kept))

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
        names, *rows = csv.reader(io.StringIO(whole.decode("utf-8", errors="replace"))) if whole else [[]]
        for number, row in enumerate(rows, 2):
            if len(row) != len(names):
                cut = f"was cut in the middle ({len(row)} cells and not {len(names)})"
                raise BadInput(f"--out: line {number} of {self.path} {cut}; delete that line.")
        if whole != content:
            os.truncate(self.path, len(whole))
            self.cut_short = True


class CsvFile:
    """Appends each record to records.csv, samples.csv and checks.csv, or to the files of another kind of row.

    `write` returns when it is on the disk.

    `warn` hears of the first failed write, such as on a full disk. The rows it could not write are kept in memory and
    tried again with every further record and at the end, so that a disk with room again loses nothing.
    """

    def __init__(self, folder: Path, warn: Callable[[str], object] = warnings.warn, kind: str = "run") -> None:
        """Begin the files in `folder`, or go on with those there; raises BadInput if they are not this version's."""
        layout = LAYOUTS[kind]
        self._beside: dict[Table, Callable[[Record], Iterator[list[Any]]]] = {}
        if layout.samples:
            self._beside[Table(folder / layout.samples, SAMPLE_COLUMNS[kind])] = sample_lines
        if kind == "run":
            self._beside[Table(folder / CHECKS, CHECK_COLUMNS)] = _checks
        self._records = Table(folder / layout.file, layout.header())
        self._tables = (*self._beside, self._records)
        self._owner = itemgetter(*layout.key)
        """What a sample or a check has in common with the row that it belongs to."""
        self._warn = warn
        self._warned = False
        again = "; --resume runs its case again" if kind == "run" else ""
        for table in self._tables:
            if table.cut_short:
                warn(f"{table.path} ended in the middle of a row, which is removed{again}.")

    def write(self, record: Record) -> None:
        """Append the record: samples and checks first, so that every row of records.csv has them."""
        lines = [*(of(record) for of in self._beside.values()), [record.row().values()]]
        for table, rows in zip(self._tables, lines, strict=True):
            try:
                table.append(rows)
            except OSError as error:
                if not self._warned:
                    self._warn(f"{table.path} cannot be written: {reason(error)}; the run goes on and tries again.")
                self._warned = True

    def rows(self) -> list[dict[str, str]]:
        """The rows on the disk as texts, those of earlier runs included."""
        return self._records.rows()

    def drop(self, unwanted: Callable[[dict[str, str]], bool]) -> None:
        """Remove rows, and with them all samples and checks that have no row."""
        try:
            self._records.keep(lambda row: not unwanted(row))
            owners = set(map(self._owner, self._records.rows()))
            for table in self._beside:
                table.keep(lambda row: self._owner(row) in owners)
        except OSError as error:
            self._warn(f"{self._records.path} still has outdated rows: {reason(error)}.")

    @property
    def lost(self) -> bool:
        """Whether rows are not on the disk."""
        return any(table.unwritten for table in self._tables)

    def close(self) -> None:
        """Try the rows that could not be written a last time, and say how many are lost."""
        for table in self._tables:
            try:
                if table.unwritten:
                    table.append([])
            except OSError as error:
                self._warn(f"{table.path} lacks its last {table.unwritten} lines: {reason(error)}.")


def _checks(record: Record) -> Iterator[list[Any]]:
    key = attrgetter(*KEY)(record)
    for check in record.tensor_checks:
        yield [*key, *(getattr(check, name) for name in CHECK_FIELDS)]


def _encoded(rows: Iterable[Iterable[Any]]) -> bytes:
    return as_csv(rows).encode("utf-8", errors="backslashreplace")
