"""What commands print for other programs: JSON, JSON lines, CSV, Parquet. Then stdout carries that and nothing else."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.rows import figures

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

TABLE = "table"
ROWS = ("json", "jsonl", "csv")


def check(option: str, value: str, *known: str) -> str:
    """The value of an option; raises BadInput for one that it does not have."""
    if value not in known:
        near = did_you_mean(value, known)
        raise BadInput(f"{option}: {value!r} is not one of {', '.join(known)}{'; ' + near if 'mean' in near else '.'}")
    return value


def screen(form: str = TABLE) -> Console:
    """Where people are told things: stdout, unless a program reads that."""
    from rich.console import Console

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
    return figures.as_csv([names, *([row.get(name) for name in names] for row in rows)])


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
        reason = figures.reason(error)
        raise BadInput(f"--output: {file} cannot be written: {reason}; give a file that can.") from None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
