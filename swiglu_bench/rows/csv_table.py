"""A CSV file that only grows by whole lines, written and read back: the one place that says how a value is a cell.

Every line is one row: line breaks inside a text become spaces. A last line without its end is a row that a kill cut
short; readers skip it and the next run that appends removes it, and both say so. Whole rows are removed by writing the
file anew beside the old one and putting it in its place.
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
    """As records.csv writes a value: nothing for None, true and false, nine significant figures, one line.

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


class Table:
    """A CSV file that only grows, by whole lines in one write."""

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        self.path = path
        self._header = _bytes([columns])
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
        """Lines that wait for a disk that takes them."""
        return self._pending.count(b"\n")

    def append(self, rows: Iterable[Iterable[Any]]) -> None:
        """Write what is pending and then `rows`; on OSError the rest stays pending."""
        self._pending += _bytes(rows)
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
                cells = f"{len(row)} cells and not {len(names)}"
                raise BadInput(
                    f"--out: line {number} of {self.path} was cut in the middle ({cells}); delete that line."
                )
        if whole != content:
            os.truncate(self.path, len(whole))
            self.cut_short = True


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
        (hint,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
    return text.lower() == "true" if hint is bool else hint(text)


def _bytes(rows: Iterable[Iterable[Any]]) -> bytes:
    return as_csv(rows).encode("utf-8", errors="backslashreplace")


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
