"""A comparison as tables for a terminal, as Markdown for a pull request, and as rows for a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.rows.figures import mebibytes, milliseconds
from swiglu_bench.rows.finished_run import table_label
from swiglu_bench.rows.record import FIGURES, grouped
from swiglu_bench.show.finished.comparison import Change, ChangeKind, Comparison, Outcome
from swiglu_bench.show.writers.markdown import table as markdown_table
from swiglu_bench.show.writers.tables import new_table

STYLES = {
    ChangeKind.FASTER: "green", ChangeKind.SLOWER: "red", ChangeKind.TIE: "dim", ChangeKind.UNCLEAR: "yellow",
    ChangeKind.LESS: "green", ChangeKind.MORE: "red", ChangeKind.BROKEN: "bold red",
    ChangeKind.MENDED: "green", ChangeKind.DRIFT: "dim",
    Outcome.FINE: "green", Outcome.REGRESSION: "bold red", Outcome.UNKNOWN: "yellow",
}  # fmt: skip
HEADS = ("tokens", "implementation", "before", "after", "change", "interval", "verdict")
TEXT = {"implementation", "verdict"}
CASE = ("shape", "hidden", "intermediate", "scope", "mode", "dtype", "tokens")
COLUMNS = (
    *CASE, "implementation", "figure", "before", "after", "quotient", "quotient_low", "quotient_high", "verdict",
    "outcome", "remark",
)  # fmt: skip
RATIO = (
    "before, after: median ratio to the baseline in the same rounds of one run, so that the machine's drift from run "
    "to run cancels; change: after / before; the baseline's own row is its time, and not judged. "
)
TIME = "before, after: median time; change: after / before. The interval is extended by the baseline's own change. "
INTERVAL = (
    "Two runs have no rounds in common: the interval is made of the ends of two 97.5% intervals, one per run, holds "
    "the quotient with at least 95%, and reaches as far as the A/A pairs of both runs. Differences between processes "
    "that the code does not cause (memory layout, autotuning) are in the quotient and not in the interval."
)
METHODS = {
    "ratio": RATIO + INTERVAL,
    "time": TIME + INTERVAL,
    "memory": "MiB, counted and not sampled: every difference is real.",
    "status": "Rows that are ok in both runs are counted and not listed; nothing was timed.",
}


def tables(found: Comparison) -> Iterator[RenderableType]:
    """One table per shape, scope, mode and dtype, how to read them, and what stands against believing them."""
    for head, changes in _groups(found):
        table = new_table(HEADS, head, text=TEXT, wrap={"implementation"})
        for change in changes:
            *cells, verdict = _cells(change)
            table.add_row(*map(Text, cells), Text(verdict, STYLES[change.verdict]))
        yield table
    yield Text(method(found), "dim")
    for line in remarks(found):
        yield Text(line, "dim")
    for warning in found.warnings:
        yield Text(f"Warning: {warning}", "yellow")
    yield Text(conclusion(found), STYLES[found.outcome])


def markdown(found: Comparison) -> str:
    """The same for a comment on a pull request."""
    parts = [f"### swiglu-bench: {conclusion(found)}"]
    parts += ["\n".join(f"> **Warning:** {warning}" for warning in found.warnings)]
    for head, changes in _groups(found):
        rows = []
        for change in changes:
            tokens, name, *cells, verdict = _cells(change)
            strong = f"**{verdict}**" if change.outcome is not Outcome.FINE else verdict
            rows.append([tokens, f"`{name}`", *cells, strong])
        parts += [f"**{head}**", markdown_table(HEADS, rows, text=TEXT)]
    parts += ["\n".join(remarks(found)), f"<sub>{method(found)}</sub>"]
    return "\n\n".join(filter(None, parts))


def rows(found: Comparison) -> list[dict[str, Any]]:
    """One flat row per change, for a program."""
    lines = []
    for change in found.changes:
        quotient = tuple(getattr(change.quotient, name, None) for name in ("median", "low", "high"))
        verdicts = change.verdict.value, change.outcome.value, change.remark
        values = (*change.case, change.implementation, change.figure, change.before, change.after, *quotient, *verdicts)
        lines.append(dict(zip(COLUMNS, values, strict=True)))
    return lines


def conclusion(found: Comparison) -> str:
    """One line: how many rows are what, and what that means for the change."""
    counts = Counter(change.verdict for change in found.changes)
    spread = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ChangeKind if counts[verdict])
    bad = sum(change.outcome is found.outcome for change in found.changes)
    beyond = f"{found.tolerance:.2%}" if found.tolerance else "0"
    ends = {
        Outcome.REGRESSION: f"{bad} regressed by more than {beyond} or broke.",
        Outcome.UNKNOWN: f"no regression is proven, and of {bad} rows none beyond {beyond} can be ruled out.",
        Outcome.FINE: f"no row is worse by more than {beyond}.",
    }
    return f"{spread}: {ends[found.outcome]}" if spread else "Nothing to compare was ok in either run."


def method(found: Comparison) -> str:
    """What the figures are and how sure."""
    text = METHODS[found.by]
    if found.by in {"ratio", "time"}:
        text += f" tie: within {found.tolerance:.2%} for sure; unclear: the interval contains 1 and reaches further."
    return text


def remarks(found: Comparison) -> Iterator[str]:
    """What is to be said of single rows, the same thing once."""
    for remark, changes in grouped(found.changes, lambda change: change.remark).items():
        where = [f"{change.implementation} at {change.case[-1]}" for change in changes]
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        if remark:
            yield f"{', '.join(where[:3])}{more}: {remark}"


def _groups(found: Comparison) -> Iterator[tuple[str, list[Change]]]:
    shown = (change for change in found.changes if change.figure != "error_ratio")
    for case, changes in grouped(shown, lambda change: change.case[:-1]).items():
        yield table_label(case), sorted(changes, key=lambda change: change.case[-1])


def _cells(change: Change) -> list[str]:
    """In the order of HEADS."""
    unit = FIGURES[change.figure].unit
    name = change.implementation + (f", {change.figure.removesuffix('_bytes')}" if unit == "B" else "")
    figures = [_figure(unit, value) for value in (change.before, change.after)]
    times, interval = "", ""
    if change.quotient:
        times = f"x{change.quotient.median:.3f}"
        if change.quotient.low != change.quotient.high:
            interval = f"{change.quotient.low:.3f}-{change.quotient.high:.3f}"
    verdict = change.verdict + (" !" if change.outcome is Outcome.REGRESSION else "")
    return [str(change.case[-1]), name, *figures, times, interval, verdict]


def _figure(unit: str, value: float | None) -> str:
    if value is None:
        return ""
    return {"ms": milliseconds, "B": mebibytes}.get(unit, "x{:.3f}".format)(value)
