"""The best choice at each case, how sure that is, and what it takes to have it.

The best is the row with the lowest ratio to the baseline of those that do the baseline's whole work, are right, and fit
the memory. Each other row is then compared with it in the rounds that they have in common, and judged as a sweep judges
a contender: by the interval of that ratio and by the A/A pair of the case. What is not slower by that ties with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiglu_bench.measure.statistics import Interval, Verdict, verdict
from swiglu_bench.rows import rebase
from swiglu_bench.rows.finished_run import FinishedRun, case_of, latest
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.spec import costs
from swiglu_bench.spec.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.writers.tables import by


@dataclass(frozen=True)
class Memory:
    """What a training step takes above inputs and weights at most."""

    peak_bytes: int | None
    measured: bool
    """Else by arithmetic."""


@dataclass(frozen=True)
class Choice:
    """What to take at one case."""

    record: Record | None
    """The best row; None: nothing qualifies."""
    case: tuple[Any, ...]
    memory: Memory
    ties: tuple[str, ...] = ()
    """Those that are as fast as far as these rounds can tell, best first."""
    runner_up: str = ""
    """The best of those that are slower."""
    margin: Interval | None = None
    """Its time over the best's."""
    unsure: tuple[str, ...] = ()
    """Those that could not be compared in common rounds."""
    excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why others do not qualify."""
    usage: str = ""

    @property
    def confidence(self) -> str:
        """`clear`, `tie` or `unsure`."""
        return "unsure" if self.unsure else "tie" if self.ties else "clear" if self.record else "none"


def recommend(
    runs: Sequence[FinishedRun], catalogue: Mapping[str, Implementation], max_memory_bytes: int | None = None
) -> list[Choice]:
    """A choice for each case that the runs have timed; raises BadInput where they have timed nothing.

    Memory is taken from those of the runs that measured it, else from what the implementation declares.
    """
    timed = latest(
        record
        for run in runs
        if any(record.time_ms is not None for record in run.records)
        for record in run.records
        if record.peak_bytes is None
    )
    if not timed:
        raise BadInput("No row has a time; give a run of forward, backward or step, or leave --run out to measure now.")
    measured = {
        (*case_of(record)[:4], *case_of(record)[5:], record.implementation): record.peak_bytes
        for run in runs
        for record in run.records
        if record.peak_bytes is not None
    }
    return [
        _choose(group, measured, catalogue, max_memory_bytes)
        for group in by(timed, "shape", "hidden", "intermediate", "scope", "mode", "dtype", "tokens")
    ]


def _choose(
    rows: Sequence[Record],
    measured: Mapping[Any, int | None],
    catalogue: Mapping[str, Implementation],
    most: int | None,
) -> Choice:
    excluded: dict[str, str] = {}
    able: list[Record] = []
    for row in rows:
        memory = _memory(row, measured, catalogue)
        if row.status is not Status.OK:
            excluded[row.implementation] = f"{row.status}: {row.reason}"
        elif not row.comparable:
            excluded[row.implementation] = f"fewer gradients than {row.baseline} yields"
        elif row.time_ms is None:
            excluded[row.implementation] = "not timed"
        elif most is not None and memory.peak_bytes is None:
            excluded[row.implementation] = "its memory is neither measured nor declared"
        elif most is not None and (memory.peak_bytes or 0) > most:
            excluded[row.implementation] = (
                f"peak {_mib(memory.peak_bytes)}{'' if memory.measured else ' by arithmetic'}"
            )
        else:
            able.append(row)
    case = case_of(rows[0])
    if not able:
        return Choice(None, case, Memory(None, False), excluded=excluded)
    able.sort(key=lambda row: row.ratio if row.ratio is not None else row.time_ms or 0.0)
    best, others = able[0], able[1:]
    ties, unsure, slower = [], [], []
    for other in others:
        against = rebase.ratio(other, best)
        if against is None:
            unsure.append(other.implementation)
        elif verdict(against, rebase.noise(best) or 0.0) is Verdict.SLOWER:
            slower.append((against, other.implementation))
        else:
            ties.append(other.implementation)
    margin, runner_up = min(slower, key=lambda one: one[0].median, default=(None, ""))
    known = catalogue.get(best.implementation)
    usage = known.usage if known else ""
    return Choice(
        best, case, _memory(best, measured, catalogue), tuple(ties), runner_up, margin, tuple(unsure), excluded, usage
    )  # fmt: skip


def _memory(row: Record, measured: Mapping[Any, int | None], catalogue: Mapping[str, Implementation]) -> Memory:
    case = case_of(row)
    peak = measured.get((*case[:4], *case[5:], row.implementation))
    if peak is not None:
        return Memory(peak, True)
    known = catalogue.get(row.implementation)
    footprint = known.footprints.get(Scope(row.scope)) if known else None
    if footprint is None:
        return Memory(None, False)
    shape = Shape(row.shape, row.hidden, row.intermediate, "", ())
    step = Case(shape, row.tokens, Dtype(row.dtype), Scope(row.scope), Mode.STEP)
    return Memory(costs.predicted_memory(step, footprint)[1], False)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f} MiB"


def sentence(choice: Choice) -> str:
    """How sure it is, in words."""
    if choice.record is None:
        return "nothing qualifies"
    parts = []
    if choice.ties:
        parts.append(f"tie with {', '.join(choice.ties)}")
    if choice.margin and choice.runner_up:
        low, high = (100 * (end - 1) for end in (choice.margin.low, choice.margin.high))
        parts.append(f"{choice.runner_up} takes {low:.1f} to {high:.1f}% longer")
    if choice.unsure:
        parts.append(f"not compared in common rounds: {', '.join(choice.unsure)}")
    return "; ".join(parts) or "nothing else qualifies"


COLUMNS = (
    "shape", "scope", "mode", "dtype", "tokens", "implementation", "time_ms", "ratio", "baseline", "confidence", "ties",
    "runner_up", "runner_up_low", "runner_up_high", "unsure", "peak_bytes", "peak_is_measured", "usage", "excluded",
)  # fmt: skip


def rows(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """One flat row per case, for a program."""
    found = []
    for choice in choices:
        shape, _, _, scope, mode, dtype, tokens = choice.case
        best = choice.record
        found.append({
            "shape": shape, "scope": scope, "mode": mode, "dtype": dtype, "tokens": tokens,
            "implementation": best.implementation if best else None,
            "time_ms": best.time_ms if best else None,
            "ratio": best.ratio if best else None,
            "baseline": best.baseline if best else None,
            "confidence": choice.confidence, "ties": list(choice.ties), "runner_up": choice.runner_up or None,
            "runner_up_low": choice.margin.low if choice.margin else None,
            "runner_up_high": choice.margin.high if choice.margin else None,
            "unsure": list(choice.unsure),
            "peak_bytes": choice.memory.peak_bytes, "peak_is_measured": choice.memory.measured,
            "usage": choice.usage, "excluded": dict(choice.excluded),
        })  # fmt: skip
    return found
