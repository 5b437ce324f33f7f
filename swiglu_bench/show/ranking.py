"""Who is fastest, who ties with whom, what a workload takes in total, and what to use.

A row may be ranked if it is ok, has a time, and yields all gradients that the baseline yields. By their rows, two
implementations tie at a case where the 95% intervals of their ratios overlap, or the ratios are no further apart than
the A/A pair's interval reaches; against the baseline the row's own verdict counts. `recommend` has the rounds too, and
judges each row against the best as a sweep judges a contender: by the interval of their ratio and by the A/A pair.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.measure.statistics import CONFIDENCE, Interval, Verdict, verdict
from swiglu_bench.rows.figures import as_csv, mebibytes, milliseconds, write_whole
from swiglu_bench.rows.finished_run import FinishedRun, case_of, kept_ratio, latest, ratio
from swiglu_bench.rows.record import LAYOUTS, Record, Status, grouped
from swiglu_bench.rows.run_folder import TOTALS
from swiglu_bench.show.table import STYLES, TABLE, Cell, Grid, by_reason, dim


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


def with_intervals(rows: Iterable[Record]) -> list[Record]:
    """The rows that can be ranked and have an interval, the best first."""
    return [row for row in ranked(rows) if row.interval]


@dataclass(frozen=True)
class Winner:
    """Who is first at one case."""

    shape: str
    tokens: int
    baseline: str
    first: tuple[str, ...]
    """The best, and the others that tie with it; the baseline may be one."""
    ratio: tuple[float, float, float]
    """The best's to the baseline: the median over rounds, and the ends of its 95% interval."""
    slowest: float
    """The highest ratio to the baseline of those that tie; the best's where none does."""
    runner_up: str
    """The fastest that does not tie; empty where there is none."""
    longer: float
    """How much more time the runner-up takes than the best, as a share of the best's; 0 where there is none."""

    @property
    def speedups(self) -> tuple[float, float]:
        """The baseline's time / that of the slowest that ties, and / the best's."""
        return 1 / self.slowest, 1 / self.ratio[0]


def places(rows: Iterable[Record]) -> Iterator[Winner]:
    """Who is first at every case, in the order of shapes and token counts; none where no baseline was timed."""
    for case in map(with_intervals, grouped(rows, attrgetter("shape", "tokens")).values()):
        if len(case) < 2 or not (ratio := case[0].interval):
            continue
        best, *others = case
        noise = next((row.noise for row in case if row.noise is not None), 0.0)
        first = [best, *(row for row in others if _tie(best, row, noise))]
        names = tuple(row.implementation for row in first)
        rest = next((row for row in others if row.implementation not in names), None)
        longer = (rest.ratio or 0.0) / ratio[0] - 1 if rest else 0.0
        slowest = max(row.ratio or 0.0 for row in first)
        next_one = rest.implementation if rest else ""
        yield Winner(best.shape, best.tokens, best.baseline, names, ratio, slowest, next_one, longer)


def _tie(mine: Record, other: Record, noise: float) -> bool:
    """Whether two cannot be told apart; `noise` is how far the case's A/A pair reaches from 1."""
    assert mine.interval
    assert other.interval
    for row, against in ((mine, other), (other, mine)):
        if against.implementation == row.baseline:  # an older version wrote no verdict
            _, low, high = row.interval or (1.0, 1.0, 1.0)
            return row.verdict == "tie" if row.verdict else low <= 1 <= high
    overlap = mine.interval[1] <= other.interval[2] and other.interval[1] <= mine.interval[2]
    return overlap or abs(mine.interval[0] / other.interval[0] - 1) <= noise


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
    for same in grouped(rows, attrgetter(*TABLE)).values():
        named = grouped(same, attrgetter("implementation")).items()
        by_name = {name: {row.tokens: row for row in own} for name, own in named}
        for own in by_name.values():
            baseline = next((row.baseline for row in own.values() if row.baseline), "")
            found.append(_total(own, by_name.get(baseline, {}), baseline, workload))
    return found


def _total(
    own: Mapping[int, Record], base: Mapping[int, Record], baseline: str, workload: Mapping[int, float]
) -> Record:
    first = next(iter(own.values()))
    work = {name: getattr(first, name) for name in (*TABLE, "implementation")}
    total = Record(**work, baseline=baseline, kind="workload")
    times = {tokens: row.time_ms for tokens, row in own.items() if row.time_ms is not None}
    base_times = {tokens: row.time_ms for tokens, row in base.items() if row.time_ms is not None}
    missing = [str(tokens) for tokens in workload if tokens not in times]
    if missing:
        return dataclasses.replace(total, reason=f"no time at {', '.join(missing)} tokens")
    mean_ms = sum(weight * times[tokens] for tokens, weight in workload.items()) / sum(workload.values())
    total = dataclasses.replace(total, time_ms=mean_ms)
    confidence = 1 - (1 - CONFIDENCE) / len(workload)
    compared = {tokens: row for tokens, row in own.items() if tokens in base_times and row.comparable}
    found = {tokens: kept_ratio(row, base[tokens], confidence) for tokens, row in compared.items()}
    ratios = {tokens: between for tokens, between in found.items() if between}
    if len(ratios) < len(workload):
        return dataclasses.replace(total, reason="no ratio at every token count")
    shares = {tokens: weight * base_times[tokens] for tokens, weight in workload.items()}

    def weighted(values: Mapping[int, float]) -> float:
        return sum(share * values[tokens] for tokens, share in shares.items()) / sum(shares.values())

    between = Interval(*(
        weighted({tokens: getattr(ratio, end) for tokens, ratio in ratios.items()}) for end in ("median", "low", "high")
    ))  # fmt: skip
    noises = {tokens: noise for tokens, row in own.items() if (noise := row.noise) is not None}
    judged = first.implementation != baseline and len(noises) == len(own)
    return dataclasses.replace(
        total, ratio=between.median, ratio_low=between.low, ratio_high=between.high,
        verdict=verdict(between, weighted(noises)).value if judged else "",
    )  # fmt: skip


Peaks = Mapping[tuple[Any, ...], int]
"""Measured peaks of a training step, by case without its mode, and implementation."""
Catalogue = Mapping[str, Implementation]
Choice = dict[str, Any]
"""What to use at one case, as a flat row for a program; `implementation` is None where nothing qualifies."""


def recommend(runs: Sequence[FinishedRun], catalogue: Catalogue, max_memory_bytes: int | None = None) -> list[Choice]:
    """A choice for each case that the runs have timed; raises BadInput where they have timed nothing.

    Memory is taken from those of the runs that measured it, else from what the implementation declares.
    """
    runs_with_times = [run for run in runs if any(row.time_ms is not None for row in run.records)]
    timed = latest(row for run in runs_with_times for row in run.records if row.peak_bytes is None)
    if not timed:
        raise BadInput("No row has a time; give a run of forward, backward or step, or leave --run out to measure now.")
    records = (record for run in runs for record in run.records)
    peaks = {_step_of(record): record.peak_bytes for record in records if record.peak_bytes is not None}
    return [_choose(rows, peaks, catalogue, max_memory_bytes) for rows in grouped(timed, case_of).values()]


def _choose(rows: Sequence[Record], peaks: Peaks, catalogue: Catalogue, most: int | None) -> Choice:
    memory = {row.implementation: _memory(row, peaks, catalogue) for row in rows}
    reasons = {row.implementation: _unfit(row, *memory[row.implementation], most) for row in rows}
    able: list[Record | None] = [*ranked(row for row in rows if not reasons[row.implementation])]
    best, *others = able or [None]
    ties, unsure, slower = [], [], []
    for other in filter(None, others):
        against = ratio(other, best) if best else None
        if against is None:
            unsure.append(other.implementation)
        elif best and verdict(against, best.noise or 0.0) is Verdict.SLOWER:
            slower.append((against, other.implementation))
        else:
            ties.append(other.implementation)
    margin, runner_up = min(slower, key=lambda pair: pair[0].median, default=(None, None))
    peak_bytes, measured = memory[best.implementation] if best else (None, False)
    known = catalogue.get(best.implementation) if best else None
    return {
        **{name: getattr(rows[0], name) for name in (*TABLE, "tokens")},
        **{name: getattr(best, name, None) for name in ("implementation", "precision", "time_ms", "ratio", "baseline")},
        "confidence": "unsure" if unsure else "tie" if ties else "clear" if best else "none", "ties": ties,
        "runner_up": runner_up, "runner_up_low": getattr(margin, "low", None),
        "runner_up_high": getattr(margin, "high", None), "unsure": unsure, "peak_bytes": peak_bytes,
        "peak_is_measured": measured, "usage": known.usage if known else "",
        "excluded": {name: reason for name, reason in reasons.items() if reason},
    }  # fmt: skip


def _unfit(row: Record, peak_bytes: int | None, measured: bool, most: int | None) -> str:
    if row.status is not Status.OK:
        return f"{row.status}: {row.reason}"
    if not row.comparable:
        return f"fewer gradients than {row.baseline} yields"
    if row.time_ms is None:
        return "not timed"
    if most is not None and peak_bytes is None:
        return "its memory is neither measured nor declared"
    if most is not None and (peak_bytes or 0) > most:
        return f"peak {mebibytes(peak_bytes)} MiB{'' if measured else ' by arithmetic'}"
    return ""


def _step_of(row: Record) -> tuple[Any, ...]:
    """What memory is measured of: a case whatever its mode, and the implementation."""
    return *case_of(dataclasses.replace(row, mode="")), row.implementation


def _memory(row: Record, peaks: Peaks, catalogue: Catalogue) -> tuple[int | None, bool]:
    """The peak of a step, and whether it was measured."""
    peak = peaks.get(_step_of(row))
    if peak is not None:
        return peak, True
    known = catalogue.get(row.implementation)
    footprint = known.footprints.get(Scope(row.scope)) if known else None
    if footprint is None:
        return None, False
    shape = Shape(row.shape, row.hidden, row.intermediate, "", ())
    step = Case(shape, row.tokens, Dtype(row.dtype), Scope(row.scope), Mode.STEP)
    return costs.predicted_memory(step, footprint)[1], False


def how_sure(choice: Choice) -> str:
    """Who ties with the choice, and how much longer the next takes."""
    if choice["implementation"] is None:
        return "nothing qualifies"
    parts = []
    if choice["ties"]:
        parts.append(f"tie with {', '.join(choice['ties'])}")
    if choice["runner_up"]:
        low, high = (100 * (choice[f"runner_up_{end}"] - 1) for end in ("low", "high"))
        parts.append(f"{choice['runner_up']} takes {low:.1f} to {high:.1f}% longer")
    if choice["unsure"]:
        parts.append(f"not compared in common rounds: {', '.join(choice['unsure'])}")
    return "; ".join(parts) or "nothing else qualifies"


def _pays_from(group: Sequence[Choice]) -> Iterator[str]:
    """Of one work, from how many of the measured tokens on a row that quantises is the fastest."""
    *_, recipe = str(group[0]["shape"]).split("@")[:2]
    choices = sorted(group, key=itemgetter("tokens"), reverse=True)
    ahead = [choice["tokens"] for choice in itertools.takewhile(itemgetter("precision"), choices)]
    if recipe.startswith("fp8"):
        found = f"the fastest from {ahead[-1]} tokens on" if ahead else "slower than what quantises nothing"
        yield f"{recipe} is {found}; measured at {', '.join(str(c['tokens']) for c in reversed(choices))} tokens"


def recommendation_tables(choices: Sequence[Choice], runs: Sequence[FinishedRun]) -> Iterator[RenderableType]:
    """A table per shape, scope, mode and dtype, what does not qualify, and the line of Python for each choice."""
    heads = ("tokens", "use", "time", "ratio", "peak", "how sure")
    for work, group in grouped(choices, itemgetter(*TABLE)).items():
        rows: list[list[Cell]] = []
        for choice in group:
            peak, against = choice["peak_bytes"], choice["ratio"]
            memory = "-" if peak is None else f"{'' if choice['peak_is_measured'] else '~'}{mebibytes(peak)} MiB"
            time = "-" if choice["time_ms"] is None else milliseconds(choice["time_ms"])
            sure = Text(how_sure(choice), STYLES[choice["confidence"]])
            compared = "-" if against is None else f"x{against:.3f}"
            name = Text(choice["implementation"] or "-", "bold")
            rows.append([str(choice["tokens"]), name, time, compared, memory, sure])
        yield from Grid(heads, rows, " ".join(work), text={"use", "how sure"}, wrap={"how sure"}).parts()
        excluded = [(why, name) for choice in group for name, why in choice["excluded"].items()]
        yield from dim(by_reason("not considered", excluded))
        yield from dim(_pays_from(group))
    sources = ", ".join(f"{run.name} ({run.records[0].device})" for run in runs if run.records)
    yield Text(f"peak: of a training step, above inputs and weights; ~: by arithmetic. From {sources}", "dim")
    usages = {choice["implementation"]: choice["usage"] for choice in choices if choice["implementation"]}
    for name, usage in usages.items():
        yield Text.assemble((f"\n{name}: ", "bold"), usage or "not built in; use it as its registration builds it")
