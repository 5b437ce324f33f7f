"""CSV files read back, and the one place that says how a value is a cell.

Every line is one row: line breaks inside a text become spaces. A last line without its end is a row that a kill cut
short; readers skip it and say so.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from swiglu_bench.cases.errors import BadInput

Row = TypeVar("Row")


class CutShort(UserWarning):
    """The last row of a file ends in the middle and is left out."""


def cell(value: object) -> str:
    """A value as records.csv writes it: nothing for None, true and false, nine significant figures, one line.

    Of a list the items, and of a dictionary the keys, with spaces between them.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        return " ".join(map(cell, value))
    return f"{value:.9g}" if isinstance(value, float) else " ".join(str(value).split())


def as_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()


def texts(file: Path) -> list[dict[str, str]]:
    """The whole lines of a CSV file by column; a last line without its end was cut short, and a warning says so."""
    text = file.read_text(encoding="utf-8-sig")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        warnings.warn(f"{file} ends in the middle of a row, which is left out.", CutShort, stacklevel=1)
    return list(csv.DictReader(io.StringIO(whole)))


def header(file: Path) -> tuple[str, ...]:
    """The columns of a CSV file; none where it has no lines."""
    with file.open(encoding="utf-8-sig", newline="") as opened:
        return tuple(next(csv.reader(opened), ()))


def read(
    file: Path, kind: type[Row], name: str = "", make: Callable[..., Row] | None = None,
    called: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:  # fmt: skip
    """The whole lines of a CSV file as objects; raises BadInput for one that is not a file called `name`.

    `called` has the fields of columns that are not called as their field; "" for columns that are read over.
    """
    found: list[Row] = []
    try:
        for row in texts(file):
            known = {called.get(column, column): text for column, text in row.items() if called.get(column, column)}
            found.append(typed(kind, known, make))
        return found
    except (OSError, ValueError, TypeError, csv.Error) as error:
        what = f"{name or file.name} that this version can read"
        where = "" if isinstance(error, OSError) else f"line {len(found) + 2}: "
        raise BadInput(f"{file} is not a {what}: {where}{error}.") from None


def typed(kind: type[Row], row: Mapping[str, str], make: Callable[..., Row] | None = None) -> Row:
    """A line as the object that it was; columns that an older version did not write have the field's default.

    `make` builds it from its columns where these are not all that it has. Raises ValueError or TypeError for a line
    that is none of this kind's.
    """
    hints = _hints(typing.cast(Any, kind))
    if None in row or None in row.values():
        raise ValueError("a line has more or fewer cells than the header")
    if unknown := [name for name in row if name not in hints]:
        raise ValueError(f"the column {unknown[0]} is not known")
    return (make or kind)(**{name: _value(hints[name], text) for name, text in row.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(hint: Any, text: str) -> Any:
    if isinstance(hint, types.UnionType):  # of one type with None
        if text == "":
            return None
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return text.lower() == "true" if hint is bool else hint(text)


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in its place whole or not at all; raises OSError where the disk does not take it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def reason(error: OSError) -> str:
    """What the system says about a file that cannot be read or written."""
    return error.strerror or type(error).__name__
