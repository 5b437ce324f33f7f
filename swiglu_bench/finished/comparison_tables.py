"""A comparison as tables for a terminal, as Markdown for a pull request, and as rows for a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.finished.change import Change, ChangeKind, Outcome
from swiglu_bench.finished.comparison import Comparison

STYLES = {
    ChangeKind.FASTER: "green", ChangeKind.SLOWER: "red", ChangeKind.TIE: "dim", ChangeKind.UNCLEAR: "yellow",
    ChangeKind.LESS: "green", ChangeKind.MORE: "red", ChangeKind.BROKEN: "bold red",
    ChangeKind.MENDED: "green", ChangeKind.DRIFT: "dim",
}  # fmt: skip
HEADS = ("tokens", "implementation", "before", "after", "change", "interval", "verdict")
COLUMNS = (
    "shape", "hidden", "intermediate", "scope", "mode", "dtype", "tokens", "implementation", "figure", "before",
    "after", "quotient", "quotient_low", "quotient_high", "verdict", "outcome", "remark",
)  # fmt: skip


def tables(found: Comparison) -> Iterator[RenderableType]:
    """One table per shape, scope, mode and dtype, how to read them, and what stands against believing them."""
    for head, changes in _groups(found):
        table = Table(title=head, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in HEADS:
            text = name in {"implementation", "verdict"}
            table.add_column(
                name, justify="left" if text else "right", no_wrap=name != "implementation", overflow="fold"
            )
        for change in changes:
            *cells, verdict = _cells(change)
            table.add_row(*map(Text, cells), Text(verdict, STYLES[change.verdict]))
        yield table
    yield Text(method(found), "dim")
    for line in remarks(found):
        yield Text(line, "dim")
    for warning in found.warnings:
        yield Text(f"Warning: {warning}", "yellow")
    style = {Outcome.FINE: "green", Outcome.REGRESSION: "bold red", Outcome.UNKNOWN: "yellow"}[found.outcome]
    yield Text(conclusion(found), style)


def markdown(found: Comparison) -> str:
    """The same for a comment on a pull request."""
    lines = [f"### swiglu-bench: {conclusion(found)}", ""]
    lines += [f"> **Warning:** {warning}" for warning in found.warnings] + [""] * bool(found.warnings)
    for head, changes in _groups(found):
        lines += [f"**{head}**", "", f"| {' | '.join(HEADS)} |", "| ---: | --- | ---: | ---: | ---: | ---: | --- |"]
        for change in changes:
            tokens, name, *cells, verdict = _cells(change)
            strong = f"**{verdict}**" if change.outcome is not Outcome.FINE else verdict
            lines.append(f"| {tokens} | `{name}` | {' | '.join(cells)} | {strong} |".replace("|  |", "| |"))
        lines.append("")
    lines += [*remarks(found), ""] if list(remarks(found)) else []
    lines.append(f"<sub>{method(found)}</sub>")
    return "\n".join(lines)


def rows(found: Comparison) -> list[dict[str, Any]]:
    """One flat row per change, for a program."""
    return [
        {
            **dict(zip(COLUMNS, change.case, strict=False)),
            "implementation": change.implementation,
            "figure": change.figure,
            "before": change.before,
            "after": change.after,
            "quotient": change.quotient.median if change.quotient else None,
            "quotient_low": change.quotient.low if change.quotient else None,
            "quotient_high": change.quotient.high if change.quotient else None,
            "verdict": change.verdict.value,
            "outcome": change.outcome.value,
            "remark": change.remark,
        }
        for change in found.changes
    ]


def conclusion(found: Comparison) -> str:
    """One line: how many rows are what, and what that means for the change."""
    counts = Counter(change.verdict for change in found.changes)
    spread = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ChangeKind if counts[verdict])
    bad = sum(change.outcome is found.outcome for change in found.changes)
    beyond = f"{found.tolerance:.3g}".rstrip("0").rstrip(".") if found.tolerance == 0 else f"{found.tolerance:.2%}"
    match found.outcome:
        case Outcome.REGRESSION:
            end = f"{bad} regressed by more than {beyond} or broke."
        case Outcome.UNKNOWN:
            end = f"no regression is proven, and of {bad} rows none beyond {beyond} can be ruled out."
        case _:
            end = f"no row is worse by more than {beyond}."
    return f"{spread}: {end}" if spread else "Nothing to compare was ok in either run."


def method(found: Comparison) -> str:
    """What the figures are and how sure."""
    ratio = (
        "before, after: median ratio to the baseline in the same rounds of one run, so that the machine's drift from "
        "run to run cancels; change: after / before; the baseline's own row is its time, and not judged. "
    )
    time = (
        "before, after: median time; change: after / before. The interval reaches as far as the baseline moved, too. "
    )
    interval = (
        "Two runs have no rounds in common: the interval is made of the ends of two 97.5% intervals, one per run, "
        "holds the quotient with at least 95%, and reaches as far as the A/A pairs of both runs. What differs from "
        "process to process without being the code's doing (memory layout, autotuning) is in the quotient and not "
        "in the interval."
    )
    words = f" tie: within {found.tolerance:.2%} for sure; unclear: the interval holds 1 and more than that."
    match found.by:
        case "ratio":
            return ratio + interval + words
        case "time":
            return time + interval + words
        case "memory":
            return "MiB, counted and not sampled: what differs differs."
        case _:
            return "Rows that are ok in both runs are counted and not listed; nothing was timed."


def remarks(found: Comparison) -> Iterator[str]:
    """What is to be said of single rows, the same thing once."""
    said: dict[str, list[str]] = {}
    for change in found.changes:
        if change.remark:
            said.setdefault(change.remark, []).append(f"{change.implementation} at {change.case[-1]}")
    for remark, where in said.items():
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        yield f"{', '.join(where[:3])}{more}: {remark}"


def _groups(found: Comparison) -> Iterator[tuple[str, list[Change]]]:
    groups: dict[tuple[Any, ...], list[Change]] = {}
    for change in (one for one in found.changes if one.figure != "error_ratio"):
        groups.setdefault(change.case[:-1], []).append(change)
    for (shape, _, _, scope, mode, dtype), changes in groups.items():
        yield f"{shape} {scope} {mode} {dtype}", sorted(changes, key=lambda change: change.case[-1])


def _cells(change: Change) -> list[str]:
    """In the order of HEADS."""
    name = change.implementation + {"saved_bytes": ", saved", "peak_bytes": ", peak"}.get(change.figure, "")
    figures = [_figure(change.figure, value) for value in (change.before, change.after)]
    times, interval = "", ""
    if change.quotient:
        times, interval = f"x{change.quotient.median:.3f}", f"{change.quotient.low:.3f}-{change.quotient.high:.3f}"
        interval = "" if change.quotient.low == change.quotient.high else interval
    verdict = change.verdict + (" !" if change.outcome is Outcome.REGRESSION else "")
    return [str(change.case[-1]), name, *figures, times, interval, verdict]


def _figure(figure: str, value: float | None) -> str:
    if value is None:
        return ""
    match figure:
        case "ratio":
            return f"x{value:.3f}"
        case "time_ms":
            return f"{value * 1e3:.4g} us" if value < 1 else f"{value:.4g} ms"
        case _:
            return f"{value / 2**20:.1f}"
