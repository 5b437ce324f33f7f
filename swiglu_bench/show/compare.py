"""Row by row, the quotient of two runs with an interval, what it amounts to, and what else differs between the runs.

Two runs are two processes at two moments: there are no common rounds, so nothing of them can be paired. What can be is,
in each run by itself, the rounds of a contender and of the baseline. So the figure compared is by default the median
ratio to the baseline: what the machine did between the runs (another clock, a warmer card) hits both and cancels. It
cannot be that where the runs have different baselines, and for the baseline itself; these are compared by time.

The interval of the quotient B/A is made of the ends of two 97.5% intervals, one per run, and reaches at least as far
as the A/A pairs of both runs do. A change is believed only if all of that lies on one side of 1.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.measure.statistics import Interval, median_interval, quotient
from swiglu_bench.rows.figures import mebibytes, milliseconds, together
from swiglu_bench.rows.finished_run import CASE, FinishedRun, case_label, case_of, kept_ratio, latest, table_label
from swiglu_bench.rows.record import COLUMNS as ROW
from swiglu_bench.rows.record import FAILED, FIGURES, Record, Status, grouped, unique
from swiglu_bench.show.table import STYLES, Grid, dim

EACH = 0.975
"""Confidence of each run's interval, for 95% of their quotient's."""
FEWEST_ROUNDS = 7
"""Of fewer samples not even the smallest and the largest enclose the median with that confidence."""
MUCH_DRIFT = 0.05
"""From here on the two runs saw the machine in clearly different states."""


class ChangeKind(StrEnum):
    """How a row changed."""

    FASTER = "faster"
    SLOWER = "slower"
    TIE = "tie"
    """Equal to within what is tolerated, and surely so."""
    UNCLEAR = "unclear"
    LESS = "less"
    MORE = "more"
    BROKEN = "broken"
    """It was ok and is not any more."""
    MENDED = "mended"
    DRIFT = "drift"
    """The baseline's time, which depends on the machine as much as on the code, and is not judged."""


class Effect(StrEnum):
    """Whether a row speaks against accepting the change."""

    FINE = "fine"
    REGRESSION = "regression"
    UNKNOWN = "cannot tell"


COMPARED_BYTES = ("saved_bytes", "peak_bytes")


@dataclass(frozen=True)
class Change:
    """One implementation at one case in both runs."""

    case: tuple[Any, ...]
    implementation: str
    figure: str
    """What `before` and `after` are: `ratio`, `time_ms`, one of COMPARED_BYTES, `error_ratio`, or `status`."""
    before: float | None = None
    after: float | None = None
    quotient: Interval | None = None
    """B/A; below 1 is faster, or less."""
    verdict: ChangeKind = ChangeKind.TIE
    outcome: Effect = Effect.FINE
    remark: str = ""

    def row(self) -> dict[str, Any]:
        """The change as one flat row for a program."""
        ends = {f"quotient{end}": getattr(self.quotient, of, None)
                for end, of in (("", "median"), ("_low", "low"), ("_high", "high"))}  # fmt: skip
        return {
            **dict(zip(CASE, self.case, strict=True)), "implementation": self.implementation, "figure": self.figure,
            "before": self.before, "after": self.after, **ends, "verdict": self.verdict.value,
            "outcome": self.outcome.value, "remark": self.remark,
        }  # fmt: skip


COLUMNS = tuple(Change(CASE, "", "").row())


@dataclass(frozen=True)
class Comparison:
    """All rows that both runs have, and what a reader has to know before believing them."""

    by: str
    """ratio, time, memory or status."""
    tolerance: float
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]

    @property
    def outcome(self) -> Effect:
        """The worst of all rows: a regression is worse than not knowing."""
        found = {change.outcome for change in self.changes}
        return next((bad for bad in (Effect.REGRESSION, Effect.UNKNOWN) if bad in found), Effect.FINE)


Rows = Mapping[tuple[Any, str], Record]
"""By case and implementation."""


def compare(before: FinishedRun, after: FinishedRun, tolerance: float, by: str = "auto") -> Comparison:
    """Compare two runs by `ratio`, `time` or what suits them (`auto`); `tolerance` is 0.02 for a regression of 2%.

    Raises BadInput where they measured different things: other scopes or modes, times and memory, no case in common.
    """
    runs = (before, after)
    kind = _kind(before, after)
    mine, theirs = ({(case_of(row), row.implementation): row for row in latest(run.records)} for run in runs)
    common = [key for key in theirs if key in mine]
    if not common:
        both = f"{before.name} and {after.name}"
        raise BadInput(f"{both} have no case and implementation in common; compare two that do.")
    baselines = [{row.baseline for row in run.records if row.baseline} for run in runs]
    if by == "ratio" and baselines[0] != baselines[1]:
        names = " and ".join(", ".join(sorted(names)) or "none" for names in baselines)
        raise BadInput(f"--by ratio: the runs have different baselines ({names}); compare them by time.")
    if kind == "time":
        same = baselines[0] == baselines[1] and len(baselines[0]) == 1
        kind = by if by != "auto" else "ratio" if same else "time"
    changes = tuple(change for key in common for change in _changes(key, mine, theirs, kind, tolerance))
    drift = [change.quotient.median for change in changes if change.verdict is ChangeKind.DRIFT and change.quotient]
    return Comparison(kind, tolerance, changes, (*circumstances(before, after, kind, drift), *_unmatched(mine, theirs)))


def _kind(before: FinishedRun, after: FinishedRun) -> str:
    """What the runs have measured; raises BadInput where it is not the same."""
    for column in ("scope", "mode"):
        old, new = (sorted({str(getattr(row, column)) for row in run.records}) for run in (before, after))
        if old != new:
            mine, theirs = (", ".join(names) or "nothing" for names in (old, new))
            both = f"{mine} ({before.name}) and {theirs} ({after.name})"
            raise BadInput(f"The runs have different {column}s: {both}; choose what both have with --{column}.")
    old_kind, kind = (
        "time" if any(row.time_ms is not None for row in run.records)
        else "memory" if any(row.peak_bytes is not None for row in run.records)
        else "status"
        for run in (before, after)
    )  # fmt: skip
    if old_kind != kind:
        raise BadInput(f"{before.name} has {old_kind}, {after.name} has {kind}; compare two runs of the same command.")
    return kind


def _changes(key: tuple[Any, str], mine: Rows, theirs: Rows, kind: str, tolerance: float) -> Iterator[Change]:
    old, new, change = mine[key], theirs[key], partial(Change, *key)
    if old.status is not Status.OK:
        if new.status is Status.OK:
            yield change("status", verdict=ChangeKind.MENDED, remark=f"was {old.status}: {old.reason}")
    elif new.status is not Status.OK:
        broken = new.status in FAILED and new.status is not Status.UNSETTLED
        verdict = ChangeKind.BROKEN if broken else ChangeKind.UNCLEAR
        outcome = Effect.REGRESSION if broken else Effect.UNKNOWN
        yield change("status", verdict=verdict, outcome=outcome, remark=f"{new.status}: {new.reason}")
    elif kind == "memory":
        for figure in COMPARED_BYTES:  # counted, not sampled: what differs differs
            before, after = getattr(old, figure), getattr(new, figure)
            if before is not None and after is not None:
                times = after / before if before else float("inf") if after else 1.0
                verdict = ChangeKind.TIE if before == after else ChangeKind.LESS if after < before else ChangeKind.MORE
                outcome = Effect.REGRESSION if times > 1 + tolerance else Effect.FINE
                yield change(figure, before, after, Interval(times, times, times), verdict, outcome)
    elif kind == "status":
        yield change("error_ratio", old.error_ratio, new.error_ratio)
    elif old.time_ms is not None and new.time_ms is not None:
        bases = mine.get((key[0], old.baseline)), theirs.get((key[0], new.baseline))
        yield _of_time(old, new, *bases, kind, tolerance)


def _of_time(a: Record, b: Record, base_a: Record | None, base_b: Record | None, by: str, tolerance: float) -> Change:
    is_baseline = b.implementation == b.baseline
    figure, old, new = "time_ms", _time(a), _time(b)
    floor, remark = _floor(a, b)
    if by == "ratio" and not is_baseline:
        ratio_a, ratio_b = kept_ratio(a, base_a, EACH), kept_ratio(b, base_b, EACH)
        if ratio_a and ratio_b:
            figure, old, new = "ratio", ratio_a, ratio_b
        else:
            remark = "by time: it has no ratio to the baseline in both runs"
    if by == "time" and not is_baseline and base_a and base_b and base_a.time_ms and base_b.time_ms:
        drift = base_b.time_ms / base_a.time_ms
        floor = max(floor, drift - 1, 1 / drift - 1)
        remark = f"{b.baseline} itself changed x{drift:.3f}"
    found = quotient(new, old)
    low, high = found.median / (1 + floor), found.median * (1 + floor)
    found = Interval(found.median, min(found.low, low), max(found.high, high))
    verdict, outcome = judge(found, tolerance)
    few, untold = min(a.rounds or 0, b.rounds or 0), ""
    if few < FEWEST_ROUNDS:
        untold = f"{few} rounds are too few for an interval"
    if figure == "time_ms" and any(row.time_p10_ms is None for row in (a, b)):
        untold = "its samples were not kept, so their spread is not known"
    if untold:
        verdict, outcome, remark = ChangeKind.UNCLEAR, Effect.UNKNOWN, untold
    if by == "ratio" and is_baseline:
        verdict, outcome = ChangeKind.DRIFT, Effect.FINE
    return Change(case_of(b), b.implementation, figure, old.median, new.median, found, verdict, outcome, remark)


def _time(record: Record) -> Interval:
    """The median time; without samples, from the 10th to the 90th percentile, which is far wider than need be."""
    if record.samples_ms:
        return median_interval(record.samples_ms, EACH)
    assert record.time_ms is not None
    return Interval(record.time_ms, record.time_p10_ms or record.time_ms, record.time_p90_ms or record.time_ms)


def _floor(a: Record, b: Record) -> tuple[float, str]:
    """How far from 1 the noise of both runs may bring a quotient, by their A/A pairs; and which of them is missing."""
    known = [record.noise for record in (a, b) if record.noise is not None]
    if not known:
        return 0.0, "no A/A pair"
    mine, theirs = (known * 2)[:2]  # the noise of a run without a pair is taken for the other's
    return (1 + mine) * (1 + theirs) - 1, "" if len(known) == 2 else "one run has no A/A pair"


def judge(found: Interval, tolerance: float) -> tuple[ChangeKind, Effect]:
    """A quotient's verdict, and whether it is a regression beyond `tolerance`."""
    limit = 1 + tolerance
    outcome = Effect.FINE if found.high <= limit else Effect.REGRESSION if found.low > limit else Effect.UNKNOWN
    if found.excludes(1.0):
        return (ChangeKind.FASTER if found.median < 1 else ChangeKind.SLOWER), outcome
    return (ChangeKind.TIE if found.high <= limit and found.low >= 1 / limit else ChangeKind.UNCLEAR), outcome


def _unmatched(mine: Rows, theirs: Rows) -> Iterator[str]:
    for which, rows, others in (("first", mine, theirs), ("second", theirs, mine)):
        alone = [row for key, row in rows.items() if key not in others and row.status is not Status.SKIPPED]
        if alone:
            names = ", ".join(unique(row.implementation for row in alone))
            yield f"Only the {which} run has {len(alone)} rows, such as {case_label(case_of(alone[0]))}, of {names}."


DIFFERENCES = {
    "Other machines": {
        "device": "device", "driver": "driver", "power_limit_w": "power limit", "cpu": "CPU", "sm_count": "SM count",
    },
    "Other versions": {
        "torch": "PyTorch", "triton": "Triton", "cuda": "CUDA", "liger_kernel": "liger-kernel", "python": "Python",
    },
    "Other code of the suite": {"version": "swiglu-bench"},
    "Other methods": {
        "l2": "L2", "regime": "regime", "layers": "layers in a graph", "schema": "schema of the files",
        "baseline": "baseline",
        **{name: name for name in ("min_rounds", "max_rounds", "warmup_rounds", "min_s", "precision")},
    },
}  # fmt: skip
"""What two runs should have in common: by column or field of run.json, and how a sentence calls it."""


def circumstances(before: FinishedRun, after: FinishedRun, by: str, drift: Sequence[float]) -> Iterator[str]:
    """A sentence for each kind of thing that differs, worst first; `drift` is how the baseline's own times changed."""
    runs = (before, after)
    old, new = (
        {**run.about.get("settings", {}), **_of_rows(run.records), **run.about.get("machine", {})} for run in runs
    )
    for label, names in DIFFERENCES.items():
        known = [name for name in names if old.get(name) and new.get(name)]
        found = [f"{names[n]} {old[n]} and {new[n]}" for n in known if str(old[n]) != str(new[n])]
        if found and by != "status":
            yield f"{label}: {'; '.join(found)}."
    by_name = [grouped((row for row in run.records if row.code), lambda row: row.implementation) for run in runs]
    codes = [{name: {row.code for row in rows} for name, rows in each.items()} for each in by_name]
    changed = [name for name in codes[0].keys() & codes[1].keys() if codes[0][name] != codes[1][name]]
    with_packages = [{row.implementation: row.packages for row in run.records} for run in runs]
    for name in sorted(with_packages[0].keys() & with_packages[1].keys()):
        if with_packages[0][name] != with_packages[1][name]:
            old_ones, new_ones = (each[name] or "this environment's packages" for each in with_packages)
            yield f"{name} ran with {old_ones} before, and with {new_ones} after."
    if changed:
        yield f"Other code of implementations: files that {together(sorted(changed))} had loaded were changed."
    if by in {"ratio", "time"}:
        earlier, later = ({case_of(row): row.gpu_uuid for row in run.records if row.gpu_uuid} for run in runs)
        moved = sum(earlier[case] != later[case] for case in earlier.keys() & later.keys())
        if moved:
            what = f"{moved} {'cases were' if moved > 1 else 'case was'} on another GPU in the second run"
            differences = "differences between two cards of a model affect quotients of times"
            yield f"{what}: {differences}, and cancel in quotients of ratios."
    most = max(drift, key=lambda value: abs(value - 1), default=1.0)
    if by == "ratio" and abs(most - 1) > MUCH_DRIFT:
        cause = "the machine was in another state, or the baseline is different"
        effect = "If a contender depends on the clock less or more than the baseline does, its ratio changed, too"
        yield f"The baseline's own time changed by up to x{most:.3f}: {cause}. {effect}."
    if by == "ratio" and drift and any(old.get(name, "") != new.get(name, "") for name in ("torch", "cuda")):
        yield f"The second run has another build of {old['baseline']}, the baseline: that affects all other ratios."
    if by == "time":
        yield "By time: changes of the machine between the runs are in these quotients and not in their intervals."
    for which, run in zip(("first", "second"), runs, strict=True):
        if any(record.other_processes for record in run.records):
            yield f"Another process used the GPU during the {which} run."
        if by in {"ratio", "time"} and any(row.time_ms is not None and not row.samples_ms for row in run.records):
            yield f"The {which} run has rows without samples; their intervals come from the rows alone."


def _of_rows(records: Sequence[Record]) -> dict[str, Any]:
    """What the rows of a run say of each column: its value, or all of them."""
    timed = [record for record in records if record.time_ms is not None] or records
    names = [name for columns in DIFFERENCES.values() for name in columns if name in ROW]
    found = {name: sorted({str(getattr(record, name)) for record in timed} - {""}) for name in names}
    return {name: ", ".join(values) for name, values in found.items() if values}


HEADS = ("tokens", "implementation", "before", "after", "change", "interval", "verdict")
INTERVAL = (
    "Two runs have no rounds in common, so the interval combines two 97.5% intervals, one per run: it contains the "
    "quotient with at least 95% probability, and is extended as far as the A/A pairs of both runs reach. It does not "
    "cover differences between processes that the code does not cause (memory layout, autotuning). "
    "tie: the interval contains 1 and stays within {tolerance:.2%}; unclear: it contains 1 and reaches further."
)
METHODS = {
    "ratio": "before, after: median ratio to the baseline in the same rounds of one run, so that the machine's drift "
    "from run to run cancels; change: after / before. The baseline's own row has its time and is not judged. "
    + INTERVAL,
    "time": "before, after: median time; change: after / before. The interval is extended by the baseline's own "
    "change. " + INTERVAL,
    "memory": "MiB, counted and not sampled: every difference is real.",
    "status": "Rows that are ok in both runs are counted and not listed; nothing was timed.",
}
"""What the compared figures are and how their intervals are made."""


def comparison_tables(found: Comparison) -> Iterator[RenderableType]:
    """One table per shape, scope, mode and dtype, how to read them, and what stands against believing them."""
    for grid in _grids(found, marked=False):
        yield grid.terminal()
    yield from dim((METHODS[found.by].format(tolerance=found.tolerance), *remarks(found)))
    for warning in found.warnings:
        yield Text(f"Warning: {warning}", "yellow")
    yield Text(conclusion(found), STYLES[found.outcome])


def comparison_markdown(found: Comparison) -> str:
    """The same for a comment on a pull request."""
    parts = [f"### swiglu-bench: {conclusion(found)}"]
    parts += ["\n".join(f"> **Warning:** {warning}" for warning in found.warnings)]
    for grid in _grids(found, marked=True):
        parts += [f"**{grid.title}**", grid.markdown()]
    parts += ["\n".join(remarks(found)), f"<sub>{METHODS[found.by].format(tolerance=found.tolerance)}</sub>"]
    return "\n\n".join(filter(None, parts))


def conclusion(found: Comparison) -> str:
    """One line: how many rows are what, and what that means for the change."""
    counts = Counter(change.verdict for change in found.changes)
    spread = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ChangeKind if counts[verdict])
    bad = sum(change.outcome is found.outcome for change in found.changes)
    beyond = f"{found.tolerance:.2%}" if found.tolerance else "0"
    ends = {
        Effect.REGRESSION: f"{bad} regressed by more than {beyond} or broke.",
        Effect.UNKNOWN: f"no regression is proven, but in {bad} of the rows one beyond {beyond} cannot be ruled out.",
        Effect.FINE: f"no row is worse by more than {beyond}.",
    }
    return f"{spread}: {ends[found.outcome]}" if spread else "Nothing to compare was ok in either run."


def remarks(found: Comparison) -> Iterator[str]:
    """Remarks on single rows; the same remark once, with all rows that it is about."""
    for remark, changes in grouped(found.changes, lambda change: change.remark).items():
        where = [f"{change.implementation} at {change.case[-1]}" for change in changes]
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        if remark:
            yield f"{', '.join(where[:3])}{more}: {remark}"


def _grids(found: Comparison, marked: bool) -> Iterator[Grid]:
    """The tables; `marked` as in Markdown, where names are code and what is not fine is bold."""
    shown = (change for change in found.changes if change.figure != "error_ratio")
    for case, changes in grouped(shown, lambda change: change.case[:-1]).items():
        rows = []
        for change in sorted(changes, key=lambda change: change.case[-1]):
            unit = FIGURES[change.figure].unit
            name = change.implementation + (f", {change.figure.removesuffix('_bytes')}" if unit == "B" else "")
            verdict = change.verdict + (" !" if change.outcome is Effect.REGRESSION else "")
            if marked:
                name, verdict = f"`{name}`", f"**{verdict}**" if change.outcome is not Effect.FINE else verdict
            form = {"ms": milliseconds, "B": mebibytes}.get(unit, "x{:.3f}".format)
            figures = ["" if value is None else form(value) for value in (change.before, change.after)]
            times, interval, ends = "", "", change.quotient
            if ends:
                times = f"x{ends.median:.3f}"
                interval = f"{ends.low:.3f}-{ends.high:.3f}" if ends.low != ends.high else ""
            cells = (str(change.case[-1]), name, *figures, times, interval)
            rows.append([*map(Text, cells), Text(verdict, STYLES[change.verdict])])
        yield Grid(HEADS, rows, table_label(case), text={"implementation", "verdict"}, wrap={"implementation"})
