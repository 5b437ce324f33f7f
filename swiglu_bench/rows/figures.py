"""A column of a run's files, declared once with the field that holds it: files, tables and documents read this.

Below it, how figures read as text, and how a value is a cell of a CSV file. There every line is one row: line breaks
inside a text become spaces. A last line without its end is a row that a kill cut short; readers skip it and say so.
"""

import csv
import dataclasses
import enum
import functools
import io
import math
import os
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

MIB = 2**20
Row = TypeVar("Row")

Number = float | None
Count = int | None
"""Figures; None means: not measured, or does not apply."""
LOWER, HIGHER = "lower", "higher"


@dataclass(frozen=True)
class Figure:
    """The declaration of a column: what it means, its unit, and how it is shown."""

    caption: str
    """What it means, in Markdown, for the reader of a file."""
    unit: str = ""
    better: str = ""
    """`lower` or `higher`; empty where neither is."""
    since: int = 1
    """The schema from which on files have it."""
    head: str = ""
    """Its short name in the head of a table, before the unit."""
    curve: bool = False
    """Whether Weights & Biases draws it over tokens."""
    form: str = ""
    """How a table shows its values, as `format` takes it; empty: as its unit is shown."""
    kind: Any = None
    """Its type."""

    @property
    def is_number(self) -> bool:
        """Whether its values can be sorted and averaged."""
        return self.kind in (int, float, Count, Number)

    def shown(self, value: Any) -> str:
        """A value in a table, whose head has the unit; bytes are shown as MiB."""
        if value is None:
            return ""
        form = self.form or {"B": ",.1f", "share": ".0%"}.get(self.unit, ".3g")
        return format(value / MIB if self.unit == "B" else value, form)

    @property
    def heading(self) -> str:
        """The head of its column in a table: name and unit; bytes are shown as MiB, shares as percentages."""
        return " ".join(filter(None, (self.head, {"B": "MiB", "share": ""}.get(self.unit, self.unit))))

    @property
    def described(self) -> tuple[str, str, str]:
        """How documents describe it: unit, what is better, and what it means."""
        return self.unit, self.better, self.caption + (f"; since schema {self.since}" if self.since > 2 else "")


def figure(caption: str, unit: str = "", better: str = "", *, default: Any = None, **more: Any) -> Any:
    """A field of a row that is a column of its file; `more` is what else `Figure` has: since, head, curve, form."""
    return dataclasses.field(default=default, metadata={"figure": Figure(caption, unit, better, **more)})


key = functools.partial(figure, default=dataclasses.MISSING)
"""A column that has a value in every row."""
text = functools.partial(figure, default="")
"""A column of words."""


@functools.cache
def figures(row: type) -> dict[str, Figure]:
    """The columns of a kind of row by name, in their order; its other fields are kept beside the row."""
    hints = typing.get_type_hints(row)
    declared = {field.name: field.metadata["figure"] for field in dataclasses.fields(row) if "figure" in field.metadata}
    return {name: dataclasses.replace(figure, kind=hints[name]) for name, figure in declared.items()}


def milliseconds(time_ms: float) -> str:
    """A time with four significant figures, in the unit that reads best."""
    if time_ms < 1:
        return f"{time_ms * 1e3:.4g} us"
    return f"{time_ms:.4g} ms" if time_ms < 1e4 else f"{time_ms / 1e3:.4g} s"


def microjoules(energy_uj: float) -> str:
    """An energy with three significant figures, in the unit that reads best."""
    return f"{energy_uj:.3g} uJ" if energy_uj < 1e3 else f"{energy_uj / 1e3:.3g} mJ"


def mebibytes(size_bytes: float | None) -> str:
    """A size in MiB, without the unit; a dash for None."""
    if size_bytes is None:
        return "-"
    mib = size_bytes / MIB
    return f"{mib:.3f}" if mib < 1 else f"{mib:,.1f}"


def size(size_bytes: float) -> str:
    """A size in GiB, or below one in MiB, with the unit."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / MIB:.1f} MiB"


def plus_minus(ratio: float, low: float, high: float) -> str:
    """A ratio with half of its interval, '0.800 ± 0.010', or with both ends where these are far or not alike."""
    below, above = ratio - low, high - ratio
    if max(below, above) > 0.01 and (max(below, above) > 2 * min(below, above) or high - low > 0.2 * ratio):
        return f"{ratio:.3f} ({low:.3f} to {high:.3f})" if high < 100 else f"{ratio:.3f} ({low:.3g} to {high:.3g})"
    return f"{ratio:.3f} ± {(high - low) / 2:.3f}"


def up_to(low: float, high: float) -> str:
    """'1.05 to 1.09', or one figure where both read the same."""
    return f"{high:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def token_text(count: int) -> str:
    """A token count as the command line takes it: 8k for 8192."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def tokens_text(counts: Iterable[int]) -> str:
    """'1, 16 and 1k tokens'."""
    texts = [token_text(count) for count in sorted(set(counts))]
    return f"{together(texts)} token{'' if texts == ['1'] else 's'}"


def together(names: Sequence[str], between: str = "and") -> str:
    """'a, b and c'."""
    return f" {between} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


SIGNED = frozenset({"", "share", "nats", "°C", "UTC"})
"""Units of figures that may be negative or, where something is wrong, not finite."""
RATIOS = frozenset({"ratio", "ratio_low", "ratio_high", "aa_ratio", "aa_low", "aa_high"})
_hints = functools.cache(typing.get_type_hints)


class CutShort(UserWarning):
    """The last row of a file ends in the middle and is left out."""


def cell(value: object) -> str:
    """A value as records.csv writes it, on one line: nine significant figures, a list's items, a dictionary's keys."""
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


def typed(kind: type[Row], row: Mapping[str, str], make: Callable[..., Row] | None = None) -> Row:
    """A line as the object that it was, by `make` unless by `kind`; columns of newer versions have the field's default.

    Raises ValueError or TypeError for a line of another kind.
    """
    hints = _hints(typing.cast(Any, kind))
    if None in row or None in row.values():
        raise ValueError("a line has more or fewer cells than the header")
    if unknown := [name for name in row if name not in hints]:
        raise ValueError(f"the column {unknown[0]} is not known")
    values = {name: _value(hints[name], text) for name, text in row.items()}
    for name, value in values.items():
        of_ratio, measured = name in RATIOS, name in _measured(typing.cast(Any, kind))
        if value is not None and ((of_ratio and not value > 0) or (measured and not 0 <= value < math.inf)):
            raise ValueError(f"{name} is {row[name]}")
    ends = [value for name in ("ratio_low", "ratio", "ratio_high") if (value := values.get(name)) is not None]
    if ends != sorted(ends):
        raise ValueError(f"ratio is {row['ratio']}, outside its interval")
    return (make or kind)(**values)


@functools.cache
def _measured(kind: Any) -> frozenset[str]:
    return frozenset(name for name, figure in figures(kind).items() if figure.unit not in SIGNED)


def _value(hint: Any, text: str) -> Any:
    if isinstance(hint, types.UnionType):  # of one type with None
        if text == "":
            return None
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return text.lower() == "true" if hint is bool else hint(text)


JSON_TYPES = {bool: "boolean", str: "string", int: "integer", float: "number"}


def schema(kind: type, columns: Mapping[str, str]) -> dict[str, Any]:
    """The JSON Schema of a row; `columns` has the figure of each column by the column's name."""
    properties, known = {}, figures(kind)
    for column, name in columns.items():
        figure, optional = known[name], isinstance(known[name].kind, types.UnionType)
        of = next(each for each in typing.get_args(figure.kind) or (figure.kind,) if each is not types.NoneType)
        json_type = next(json_type for base, json_type in JSON_TYPES.items() if issubclass(of, base))
        has_null = optional or of is float  # what is not finite is null, too
        told: dict[str, Any] = {"description": figure.caption, "type": [json_type, "null"] if has_null else json_type}
        if issubclass(of, enum.Enum):
            told["enum"] = [member.value for member in of]
        if name in RATIOS:
            told["exclusiveMinimum"] = 0
        elif json_type in ("integer", "number") and name in _measured(kind):
            told["minimum"] = 0
        told |= {f"x-{key}": value for key in ("unit", "better") if (value := getattr(figure, key))}
        properties[column] = told
    return {"type": "object", "properties": properties, "required": list(columns), "additionalProperties": False}


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
