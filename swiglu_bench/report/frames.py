"""Data frames taken apart with the types that the rest of the report counts on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pandas as pd

Row = dict[str, Any]
"""A row by the names of its columns."""


def dicts(frame: pd.DataFrame) -> list[Row]:
    """The rows, in order."""
    return cast(list[Row], frame.to_dict("records"))


def groups(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Rows that agree in these columns, with what they agree in, in the order in which they first appear."""
    for key, rows in frame.groupby(list(columns), sort=False):
        yield cast(tuple[Any, ...], key), rows


def unique(values: pd.Series | Sequence[Any]) -> list[str]:
    """Each value once, as text, in the order in which they first appear."""
    return list(dict.fromkeys(str(value) for value in values))
