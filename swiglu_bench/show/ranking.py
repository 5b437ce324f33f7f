"""Who is fastest, who ties with whom, what a workload takes in total, and what to use.

A row may be ranked if it is ok, has a time, and yields all gradients that the baseline yields. By their rows, two
implementations tie at a case where the 95% intervals of their ratios overlap, or the ratios are no further apart than
the A/A pair's interval reaches; against the baseline the row's own verdict counts. `recommend` has the rounds too, and
judges each row against the best as a sweep judges a contender: by the interval of their ratio and by the A/A pair.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.measure.statistics import CONFIDENCE, Interval, Verdict, verdict
from swiglu_bench.rows.figures import as_csv, mebibytes, milliseconds, together, write_whole
from swiglu_bench.rows.finished_run import FinishedRun, case_of, kept_ratio, latest, ratio, table_label
from swiglu_bench.rows.record import LAYOUTS, Record, Status, grouped, unique
from swiglu_bench.rows.run_folder import TOTALS
from swiglu_bench.show.table import Cell, Grid, by_reason, dim

CROWD = 8
"""More lines than these hide each other; from here on those that tie everywhere are drawn as one."""
NAMED = 3
"""More winners than these are not named in one sentence about many cases."""
WORK = ("shape", "scope", "mode", "dtype")
Ratio = tuple[float, float, float]
"""The median over rounds, and the ends of its 95% interval."""
ByTokens = Mapping[int, Record]


def ranked(rows: Iterable[Record]) -> list[Record]:
    """The rows of a case that may be ranked, the lowest ratio to the baseline first; where there is none, by time."""
    able = (row for row in rows if row.status is Status.OK and row.time_ms is not None and row.comparable)
    return sorted(able, key=lambda row: row.ratio if row.ratio is not None else row.time_ms or 0.0)


def quickest(rows: Iterable[Record]) -> Record | None:
    """The row of a case that ranks first, which a table of times marks; None where there is no other."""
    able = ranked(rows)
    return able[0] if len(able) > 1 else None


def median_ratios(rows: Iterable[Record]) -> dict[str, float]:
    """Of each implementation with a ratio, the median over its cases."""
    compared = (row for row in rows if row.status is Status.OK and row.comparable and row.ratio is not None)
    by_name = grouped(compared, attrgetter("implementation"))
    return {name: statistics.median(row.ratio or 0.0 for row in own) for name, own in by_name.items()}


@dataclass(frozen=True)
class Winner:
    """Who is first at one case."""

    shape: str
    tokens: int
    baseline: str
    first: tuple[str, ...]
    """The best, and the others that tie with it; the baseline may be one."""
    ratio: Ratio
    """The best's to the baseline."""
    runner_up: str = ""
    """The fastest that does not tie; empty where there is none."""
    longer: float = 0.0
    """How much more time the runner-up takes than the best, as a share of the best's; 0 where there is none."""

    @property
    def speedup(self) -> float:
        """The baseline's time / the best's."""
        return 1 / self.ratio[0]


def with_intervals(rows: Iterable[Record]) -> list[Record]:
    """The rows that can be ranked and have an interval, the best first."""
    return [row for row in ranked(rows) if row.interval]


def by_case(rows: Iterable[Record]) -> list[list[Record]]:
    """The rows that can be ranked, those of each case together, in the order of shapes and token counts."""
    cases = grouped(rows, attrgetter("shape", "tokens")).values()
    return [able for case in cases if (able := with_intervals(case))]


def places(rows: Iterable[Record]) -> list[Winner]:
    """Who is first at every case; none where no baseline was timed."""
    return [_place(case) for case in by_case(rows) if len(case) > 1]


def _place(case: Sequence[Record]) -> Winner:
    best, *others = case
    ties = [row.implementation for row in others if _ties(best, row, _noise(case))]
    rest = [row for row in others if row.implementation not in ties]
    assert best.interval
    found = Winner(best.shape, best.tokens, best.baseline, (best.implementation, *ties), best.interval)
    if not rest or not rest[0].interval:
        return found
    longer = rest[0].interval[0] / best.interval[0] - 1
    return dataclasses.replace(found, runner_up=rest[0].implementation, longer=longer)


def tie(mine: Ratio, other: Ratio, noise: float) -> bool:
    """Whether two ratios to one baseline cannot be told apart; `noise` is how far the case's A/A pair reaches."""
    overlap = mine[1] <= other[2] and other[1] <= mine[2]
    return overlap or abs(mine[0] / other[0] - 1) <= noise


def verdict_of(row: Record) -> str:
    """The row's verdict against the baseline or, where an older version wrote none, what its interval says."""
    if row.verdict or not row.interval:
        return row.verdict
    _, low, high = row.interval
    return "faster" if high < 1 else "slower" if low > 1 else "tie"


def _ties(mine: Record, other: Record, noise: float) -> bool:
    for row, against in ((mine, other), (other, mine)):
        if against.implementation == row.baseline:
            return verdict_of(row) == "tie"
    return bool(mine.interval and other.interval and tie(mine.interval, other.interval, noise))


def _noise(case: Sequence[Record]) -> float:
    """How far the case's A/A pair reaches from 1; 0 where there was no pair."""
    return next((row.noise for row in case if row.noise is not None), 0.0)


def alike(rows: Sequence[Record]) -> dict[str, list[str]]:
    """Who stands for whom where there is a crowd: implementations that tie at every case, and in peak memory to 1%.

    The baseline stands for itself alone. Without a crowd, nobody stands for anybody.
    """
    if len({row.implementation for row in rows if row.time_ms is not None}) <= CROWD:
        return {}
    cases = [({row.implementation: row for row in case}, _noise(case)) for case in by_case(rows)]
    able = {name for case, _ in cases for name in case}
    baselines = {row.baseline for case, _ in cases for row in case.values()}
    standing: dict[str, list[str]] = {}
    for name in unique(row.implementation for row in rows if row.implementation in able - baselines):
        first = next((other for other in standing if all(_alike(other, name, *case) for case in cases)), None)
        standing.setdefault(first or name, []).extend([name] if first else [])
    return {name: others for name, others in standing.items() if others}


def _alike(name: str, other: str, rows: dict[str, Record], noise: float) -> bool:
    if name not in rows or other not in rows:
        return (name in rows) == (other in rows)
    peaks = [rows[of].peak_bytes or 0 for of in (name, other)]
    return abs(peaks[0] - peaks[1]) <= 0.01 * max(peaks) and _ties(rows[name], rows[other], noise)


def overall(found: Sequence[Winner]) -> str:
    """In how many cases the baseline is beaten, by how much, and by whom most often."""
    ahead = [place for place in found if place.baseline not in place.first]
    baselines = together(unique(place.baseline for place in found), "or")
    cases = f"{len(found)} cases" if len(found) > 1 else "one case"
    if not ahead:
        return f"Nothing is faster than {baselines}, the baseline, in {cases}."
    counts = Counter(name for place in ahead for name in place.first).most_common(NAMED)
    most = together([f"{name} ({count})" for name, count in counts])
    where = f"{len(ahead)} of {cases}" if len(ahead) < len(found) else f"all {cases}" if len(found) > 1 else cases
    ends = [f"{end(place.speedup for place in ahead):.2f}" for end in (min, max)]
    gains = " to ".join(dict.fromkeys(ends))
    ahead_of = f"In {where} an implementation is faster than {baselines}, {gains} times as fast"
    return f"{ahead_of}; first most often, ties included: {most}."


def workload_of(about: Mapping[str, Any]) -> dict[int, float]:
    """The workload that run.json names; empty where it names none."""
    found = about.get("workload")
    return {int(tokens): float(weight) for tokens, weight in found.items()} if isinstance(found, dict) else {}


def write_totals(folder: Path, found: Iterable[Record]) -> None:
    """Write workload.csv, whole or not at all."""
    lines = [LAYOUTS["workload"].columns(), *(total.row().values() for total in found)]
    write_whole(folder / TOTALS, as_csv(lines).encode())


def totals(records: Iterable[Record], workload: Mapping[int, float]) -> list[Record]:
    """One total per kind of work and implementation that was tried at any of the workload's token counts."""
    rows = [row for row in records if row.tokens in workload and row.status is not Status.SKIPPED]
    found = []
    for same in grouped(rows, attrgetter(*WORK)).values():
        by_name = {
            name: {row.tokens: row for row in own} for name, own in grouped(same, attrgetter("implementation")).items()
        }
        found += [_total(own, by_name, workload) for own in by_name.values()]
    return found


def _total(own: ByTokens, by_name: Mapping[str, ByTokens], workload: Mapping[int, float]) -> Record:
    first = next(iter(own.values()))
    baseline = next((row.baseline for row in own.values() if row.baseline), "")
    work = {name: getattr(first, name) for name in WORK}
    total = Record(**work, implementation=first.implementation, baseline=baseline, kind="workload")
    times = _times(own, workload)
    missing = [str(tokens) for tokens in workload if tokens not in times]
    if missing:
        return dataclasses.replace(total, reason=f"no time at {', '.join(missing)} tokens")
    mean_ms = sum(weight * times[tokens] for tokens, weight in workload.items()) / sum(workload.values())
    total = dataclasses.replace(total, time_ms=mean_ms)
    base = by_name.get(baseline, {})
    base_times = _times(base, workload)
    ratios = {
        tokens: kept_ratio(row, base[tokens], 1 - (1 - CONFIDENCE) / len(workload))
        for tokens, row in own.items()
        if tokens in base_times and row.comparable
    }
    known = {tokens: interval for tokens, interval in ratios.items() if interval}
    if len(known) < len(workload):
        return dataclasses.replace(total, reason="no ratio at every token count")
    shares = {tokens: weight * base_times[tokens] for tokens, weight in workload.items()}

    def weighted(value: Callable[[int], float]) -> float:
        return sum(share * value(tokens) for tokens, share in shares.items()) / sum(shares.values())

    median, low = weighted(lambda tokens: known[tokens].median), weighted(lambda tokens: known[tokens].low)
    between = Interval(median, low, weighted(lambda tokens: known[tokens].high))
    noises = {tokens: own[tokens].noise for tokens in workload}
    judged = first.implementation != baseline and None not in noises.values()
    return dataclasses.replace(
        total, ratio=between.median, ratio_low=between.low, ratio_high=between.high,
        verdict=verdict(between, weighted(lambda tokens: noises[tokens] or 0.0)).value if judged else "",
    )  # fmt: skip


def _times(own: ByTokens, workload: Mapping[int, float]) -> dict[int, float]:
    found = {tokens: own[tokens].time_ms for tokens in workload if tokens in own}
    return {tokens: time_ms for tokens, time_ms in found.items() if time_ms is not None}


Peaks = Mapping[tuple[Any, ...], int]
"""Measured peaks of a training step, by case without its mode, and implementation."""
Catalogue = Mapping[str, Implementation]
SURE_STYLES = {"clear": "green", "tie": "yellow", "unsure": "yellow", "none": "bold red"}


@dataclass(frozen=True)
class Memory:
    """The peak memory of a training step, above inputs and weights."""

    peak_bytes: int | None
    measured: bool
    """Else by arithmetic."""


@dataclass(frozen=True)
class Recommendation:
    """What to use at one case."""

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

    def row(self) -> dict[str, Any]:
        """The choice as one flat row for a program."""
        shape, _, _, scope, mode, dtype, tokens = self.case
        best = {name: getattr(self.record, name, None) for name in ("implementation", "time_ms", "ratio", "baseline")}
        return {
            "shape": shape, "scope": scope, "mode": mode, "dtype": dtype, "tokens": tokens, **best,
            "confidence": self.confidence, "ties": self.ties, "runner_up": self.runner_up,
            "runner_up_low": getattr(self.margin, "low", None), "runner_up_high": getattr(self.margin, "high", None),
            "unsure": self.unsure, "peak_bytes": self.memory.peak_bytes, "peak_is_measured": self.memory.measured,
            "usage": self.usage, "excluded": self.excluded,
        }  # fmt: skip


def recommend(
    runs: Sequence[FinishedRun], catalogue: Catalogue, max_memory_bytes: int | None = None
) -> list[Recommendation]:
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


def _choose(rows: Sequence[Record], peaks: Peaks, catalogue: Catalogue, most: int | None) -> Recommendation:
    memories = {row.implementation: _memory(row, peaks, catalogue) for row in rows}
    reasons = {row.implementation: _unfit(row, memories[row.implementation], most) for row in rows}
    excluded = {name: reason for name, reason in reasons.items() if reason}
    able = ranked(row for row in rows if not reasons[row.implementation])
    if not able:
        return Recommendation(None, case_of(rows[0]), Memory(None, False), excluded=excluded)
    best, *others = able
    ties, unsure, slower = [], [], []
    for other in others:
        against = ratio(other, best)
        if against is None:
            unsure.append(other.implementation)
        elif verdict(against, best.noise or 0.0) is Verdict.SLOWER:
            slower.append((against, other.implementation))
        else:
            ties.append(other.implementation)
    margin, runner_up = min(slower, key=lambda pair: pair[0].median, default=(None, None))
    known, memory = catalogue.get(best.implementation), memories[best.implementation]
    usage = known.usage if known else ""
    return Recommendation(best, case_of(best), memory, ties, runner_up, margin, unsure, excluded, usage)


def _unfit(row: Record, memory: Memory, most: int | None) -> str:
    """Why a row does not qualify; empty where it does."""
    if row.status is not Status.OK:
        return f"{row.status}: {row.reason}"
    if not row.comparable:
        return f"fewer gradients than {row.baseline} yields"
    if row.time_ms is None:
        return "not timed"
    if most is not None and memory.peak_bytes is None:
        return "its memory is neither measured nor declared"
    if most is not None and (memory.peak_bytes or 0) > most:
        return f"peak {mebibytes(memory.peak_bytes)} MiB{'' if memory.measured else ' by arithmetic'}"
    return ""


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


def how_sure(choice: Recommendation) -> str:
    """Who ties with the choice, and how much longer the next takes."""
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


def recommendation_tables(choices: Sequence[Recommendation], runs: Sequence[FinishedRun]) -> Iterator[RenderableType]:
    """A table per shape, scope, mode and dtype, what does not qualify, and the line of Python for each choice."""
    heads = ("tokens", "use", "time", "ratio", "peak", "how sure")
    for case, group in grouped(choices, lambda choice: choice.case[:-1]).items():
        rows: list[list[Cell]] = []
        for choice in group:
            best, peak = choice.record, choice.memory.peak_bytes
            memory = "-" if peak is None else f"{'' if choice.memory.measured else '~'}{mebibytes(peak)} MiB"
            name = time = against = "-"
            if best:
                name, time = best.implementation, milliseconds(best.time_ms or 0.0)
                against = f"x{best.ratio:.3f}" if best.ratio is not None else "-"
            sure = Text(how_sure(choice), SURE_STYLES[choice.confidence])
            rows.append([str(choice.case[-1]), Text(name, "bold"), time, against, memory, sure])
        yield from Grid(heads, rows, table_label(case), text={"use", "how sure"}, wrap={"how sure"}).parts()
        yield from dim(
            by_reason("not considered", [(why, name) for choice in group for name, why in choice.excluded.items()])
        )
    sources = ", ".join(f"{run.name} ({run.records[0].device})" for run in runs if run.records)
    yield Text(f"peak: of a training step, above inputs and weights; ~: by arithmetic. From {sources}", "dim")
    for name, usage in {choice.record.implementation: choice.usage for choice in choices if choice.record}.items():
        yield Text.assemble((f"\n{name}: ", "bold"), usage or "not built in; use it as its registration builds it")
