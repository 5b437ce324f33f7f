"""The best choice at each case, how sure that is, and what it takes to have it.

The best is the row with the lowest ratio to the baseline of those that do the baseline's whole work, are right, and fit
the memory. Each other row is then compared with it in the rounds that they have in common, and judged as a sweep judges
a contender: by the interval of that ratio and by the A/A pair of the case. What is not slower by that ties with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.measure.statistics import Interval, Verdict, verdict
from swiglu_bench.rows.figures import mebibytes, milliseconds
from swiglu_bench.rows.finished_run import FinishedRun, case_of, latest, ratio, table_label
from swiglu_bench.rows.ranking import ranked
from swiglu_bench.rows.record import Record, Status, grouped
from swiglu_bench.show.writers.tables import by_reason, new_table

Peaks = Mapping[tuple[Any, ...], int]
"""Measured peaks of a training step, by case without its mode, and implementation."""
Catalogue = Mapping[str, Implementation]
STYLES = {"clear": "green", "tie": "yellow", "unsure": "yellow", "none": "bold red"}


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
    ties: list[str] = field(default_factory=list)
    """Those that are as fast as far as these rounds can tell, best first."""
    runner_up: str | None = None
    """The best of those that are slower."""
    margin: Interval | None = None
    """Its time over the best's."""
    unsure: list[str] = field(default_factory=list)
    """Those that could not be compared in common rounds."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Why others do not qualify."""
    usage: str = ""

    @property
    def confidence(self) -> str:
        """`clear`, `tie` or `unsure`; `none` where nothing qualifies."""
        return "unsure" if self.unsure else "tie" if self.ties else "clear" if self.record else "none"


def recommend(runs: Sequence[FinishedRun], catalogue: Catalogue, max_memory_bytes: int | None = None) -> list[Choice]:
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
    records = (record for run in runs for record in run.records)
    peaks = {_step_of(record): record.peak_bytes for record in records if record.peak_bytes is not None}
    return [_choose(rows, peaks, catalogue, max_memory_bytes) for rows in grouped(timed, case_of).values()]


def _choose(rows: Sequence[Record], peaks: Peaks, catalogue: Catalogue, most: int | None) -> Choice:
    excluded: dict[str, str] = {}
    able: list[Record] = []
    for row in rows:
        memory = _memory(row, peaks, catalogue)
        if row.status is not Status.OK:
            excluded[row.implementation] = f"{row.status}: {row.reason}"
        elif not row.comparable:
            excluded[row.implementation] = f"fewer gradients than {row.baseline} yields"
        elif row.time_ms is None:
            excluded[row.implementation] = "not timed"
        elif most is not None and memory.peak_bytes is None:
            excluded[row.implementation] = "its memory is neither measured nor declared"
        elif most is not None and (memory.peak_bytes or 0) > most:
            how = "" if memory.measured else " by arithmetic"
            excluded[row.implementation] = f"peak {mebibytes(memory.peak_bytes)} MiB{how}"
        else:
            able.append(row)
    case = case_of(rows[0])
    if not able:
        return Choice(None, case, Memory(None, False), excluded=excluded)
    best, *others = ranked(able)
    ties, unsure, slower = [], [], []
    for other in others:
        against = ratio(other, best)
        if against is None:
            unsure.append(other.implementation)
        elif verdict(against, best.noise or 0.0) is Verdict.SLOWER:
            slower.append((against, other.implementation))
        else:
            ties.append(other.implementation)
    margin, runner_up = min(slower, key=lambda one: one[0].median, default=(None, None))
    known = catalogue.get(best.implementation)
    usage, memory = known.usage if known else "", _memory(best, peaks, catalogue)
    return Choice(best, case, memory, ties, runner_up, margin, unsure, excluded, usage)


def _step_of(row: Record) -> tuple[Any, ...]:
    """What memory is measured of: a case whatever its mode, and the implementation."""
    shape, hidden, intermediate, scope, _, dtype, tokens = case_of(row)
    return shape, hidden, intermediate, scope, dtype, tokens, row.implementation


def _memory(row: Record, peaks: Peaks, catalogue: Catalogue) -> Memory:
    peak = peaks.get(_step_of(row))
    if peak is not None:
        return Memory(peak, True)
    known = catalogue.get(row.implementation)
    footprint = known.footprints.get(Scope(row.scope)) if known else None
    if footprint is None:
        return Memory(None, False)
    shape = Shape(row.shape, row.hidden, row.intermediate, "", ())
    step = Case(shape, row.tokens, Dtype(row.dtype), Scope(row.scope), Mode.STEP)
    return Memory(costs.predicted_memory(step, footprint)[1], False)


def sentence(choice: Choice) -> str:
    """How sure it is, in words."""
    if choice.record is None:
        return "nothing qualifies"
    parts = []
    if choice.ties:
        parts.append(f"tie with {', '.join(choice.ties)}")
    if choice.margin:
        low, high = (100 * (end - 1) for end in (choice.margin.low, choice.margin.high))
        parts.append(f"{choice.runner_up} takes {low:.1f} to {high:.1f}% longer")
    if choice.unsure:
        parts.append(f"not compared in common rounds: {', '.join(choice.unsure)}")
    return "; ".join(parts) or "nothing else qualifies"


def tables(choices: Sequence[Choice], runs: Sequence[FinishedRun]) -> Iterator[RenderableType]:
    """A table per shape, scope, mode and dtype, what does not qualify, and the line of Python for each choice."""
    text = {"use", "how sure"}
    for case, group in grouped(choices, lambda choice: choice.case[:-1]).items():
        heads = ("tokens", "use", "time", "ratio", "peak", "how sure")
        table = new_table(heads, table_label(case), text=text, wrap={"how sure"})
        for choice in group:
            best, peak = choice.record, choice.memory.peak_bytes
            memory = "-" if peak is None else f"{'' if choice.memory.measured else '~'}{mebibytes(peak)} MiB"
            name = time = against = "-"
            if best:
                name, time = best.implementation, milliseconds(best.time_ms or 0.0)
                against = f"x{best.ratio:.3f}" if best.ratio is not None else "-"
            sure = Text(sentence(choice), STYLES[choice.confidence])
            table.add_row(str(choice.case[-1]), Text(name, "bold"), time, against, memory, sure)
        yield table
        excluded = [(reason, name) for choice in group for name, reason in choice.excluded.items()]
        yield from (Text(line, "dim") for line in by_reason("not considered", excluded))
    yield Text(
        "peak: of a training step, above inputs and weights; ~: by arithmetic. From "
        + ", ".join(f"{run.name} ({run.records[0].device})" for run in runs if run.records),
        "dim",
    )
    for name, usage in {one.record.implementation: one.usage for one in choices if one.record}.items():
        yield Text.assemble((f"\n{name}: ", "bold"), usage or "not built in; use it as its registration builds it")


COLUMNS = (
    "shape", "scope", "mode", "dtype", "tokens", "implementation", "time_ms", "ratio", "baseline", "confidence", "ties",
    "runner_up", "runner_up_low", "runner_up_high", "unsure", "peak_bytes", "peak_is_measured", "usage", "excluded",
)  # fmt: skip


def rows(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """One flat row per case, for a program."""
    found = []
    for choice in choices:
        shape, _, _, scope, mode, dtype, tokens = choice.case
        values = (
            shape, scope, mode, dtype, tokens,
            *(getattr(choice.record, name, None) for name in ("implementation", "time_ms", "ratio", "baseline")),
            choice.confidence, choice.ties, choice.runner_up,
            *(getattr(choice.margin, name, None) for name in ("low", "high")),
            choice.unsure, choice.memory.peak_bytes, choice.memory.measured, choice.usage, choice.excluded,
        )  # fmt: skip
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found
