"""What one implementation at one case came to in a comparison of two runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from swiglu_bench.measure.statistics import Interval

By = Literal["ratio", "time", "memory", "status"]


class ChangeKind(StrEnum):
    """What a row amounts to."""

    FASTER = "faster"
    SLOWER = "slower"
    TIE = "tie"
    """Equal to within what is tolerated, and surely so."""
    UNCLEAR = "unclear"
    LESS = "less"
    MORE = "more"
    """Memory."""
    BROKEN = "broken"
    """It was ok and is not any more."""
    MENDED = "mended"
    DRIFT = "drift"
    """The baseline's time: the machine's doing as much as its own, and not judged."""


class Outcome(StrEnum):
    """Whether a row keeps a change from going in."""

    FINE = "fine"
    REGRESSION = "regression"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True)
class Change:
    """One implementation at one case in both runs."""

    case: tuple[Any, ...]
    implementation: str
    figure: str
    """What `before` and `after` are: `ratio`, `time_ms`, `peak_bytes`, `saved_bytes`, `error_ratio`, or `status`."""
    before: float | None
    after: float | None
    quotient: Interval | None
    """B/A; below 1 is faster, or less."""
    verdict: ChangeKind
    outcome: Outcome
    remark: str = ""
