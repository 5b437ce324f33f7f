"""Lines of a CSV file read back: as texts, and as the dataclass whose fields its columns are."""

from __future__ import annotations

import csv
import functools
import io
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


def texts(file: Path) -> list[dict[str, str]]:
    """Whole lines; a last one without its end was cut short by a kill."""
    text = file.read_text(encoding="utf-8-sig")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def typed(kind: type[Row], row: Mapping[str, str]) -> Row:
    """A line as the object that it was; columns that an older version did not write have the field's default.

    Raises ValueError or TypeError for a line that is none of this kind's.
    """
    hints = _hints(typing.cast(Any, kind))
    if None in row or None in row.values():
        raise ValueError("a line has more or fewer cells than the head")
    if unknown := [name for name in row if name not in hints]:
        raise ValueError(f"the column {unknown[0]} is not known")
    return kind(**{name: _value(hints[name], text) for name, text in row.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(hint: Any, text: str) -> Any:
    if isinstance(hint, types.UnionType):  # of one type with None
        if text == "":
            return None
        (hint,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
    return text == "true" if hint is bool else hint(text)
