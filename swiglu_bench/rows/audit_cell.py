"""The cells of the contract matrix: what an implementation does when asked for something. No torch in here."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass


class CellStatus(enum.StrEnum):
    """How a check of the contract ended."""

    PASS = "pass"
    FAIL = "fail"
    """It ran, and what came out is wrong or not what was promised."""
    UNSUPPORTED = "unsupported"
    """It does not offer this, or refuses it with an error."""
    NOT_RUN = "not run"
    """This machine cannot check it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One check of one implementation at one scope. The columns of audit.csv are these fields."""

    implementation: str
    scope: str
    check: str
    verdict: CellStatus
    reason: str
    """Of every verdict but a plain pass; a pass may carry a remark."""
    dtype: str
    device: str


CELL_COLUMNS = tuple(one.name for one in dataclasses.fields(Cell))
