"""A column of a run's files, declared once with the field that holds it: files, tables and documents read this."""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any

from swiglu_bench.rows.quantities import MIB

Number = float | None
Count = int | None
"""Figures; None means: not measured, or does not apply."""
LOWER, HIGHER = "lower", "higher"


@dataclass(frozen=True)
class Figure:
    """What is declared of a column."""

    caption: str
    """What it means, in Markdown, for the reader of a file."""
    unit: str = ""
    better: str = ""
    """`lower` or `higher`; empty where neither is."""
    since: int = 1
    """The schema from which on files have it."""
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
    def described(self) -> tuple[str, str, str]:
        """How documents describe it: unit, what is better, and what it means."""
        since = f"; since schema {self.since}" if self.since > 2 else ""
        return self.unit, self.better, self.caption + since


def figure(
    caption: str, unit: str = "", better: str = "", *, default: Any = None, since: int = 1, form: str = ""
) -> Any:
    """A field of a row that is a column of its file."""
    declared = Figure(caption, unit, better, since, form)
    return dataclasses.field(default=default, metadata={"figure": declared})


key = functools.partial(figure, default=dataclasses.MISSING)
"""A column that has a value in every row."""
text = functools.partial(figure, default="")
"""A column of words."""


@functools.cache
def figures(row: type) -> dict[str, Figure]:
    """The columns of a kind of row by name, in their order; its other fields are kept beside the row."""
    hints = typing.get_type_hints(row)
    declared = {one.name: one.metadata["figure"] for one in dataclasses.fields(row) if "figure" in one.metadata}
    return {name: dataclasses.replace(one, kind=hints[name]) for name, one in declared.items()}
