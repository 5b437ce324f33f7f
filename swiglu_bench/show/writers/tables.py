"""Tables for a terminal: how all of them look, and those of memory and of verdicts, with every mark explained."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows.figures import mebibytes
from swiglu_bench.rows.record import Record, Status, TensorCheck, grouped, unique

TABLE = ("shape", "scope", "mode", "dtype")
"""Rows that agree in this stand in one table of times."""
STYLES = {Status.OK: "green", Status.SKIPPED: "dim", Status.INCORRECT: "bold red", Status.ERROR: "bold red",
          Status.UNSETTLED: "bold yellow"}  # fmt: skip
NAME_WIDTH = 26
VERDICT_WIDTH = 12
FIGURE_WIDTH = 11
BESIDE_WIDTH = 110
"""From this width on, `memory` shows predictions in columns of their own."""
VERIFY_FIGURES = ("error", "ratio", "eager's", "allowed", "max error", "max allowed")
"""Columns of `verify`, what matters most first."""


def new_table(
    columns: Iterable[str], title: str = "", text: Container[str] = (), wrap: Container[str] = (), **look: Any
) -> Table:
    """A table in the suite's look: columns of figures to the right, those named in `text` to the left.

    Columns named in `wrap` may take several lines where the terminal is narrow; all others keep their width.
    """
    look = {"box": box.SIMPLE_HEAD, "pad_edge": False, "title_justify": "left", "title_style": "bold", **look}
    table = Table(title=title or None, **look)
    for name in columns:
        table.add_column(
            name,
            justify="left" if name in text else "right",
            no_wrap=name not in wrap,
            overflow="fold" if name in wrap else "ellipsis",
        )
    return table


Columns = Mapping[str, str | Callable[[Record], Any]]
"""What stands under each head: a figure, shown as it is declared, or what is made of the row."""


def cells_of(row: Record, columns: Columns) -> list[Any]:
    """A row in the order of the columns."""
    return [row.shown(of) if isinstance(of, str) else of(row) for of in columns.values()]


def ratio_text(row: Record) -> str:
    """Its ratio with half of the interval; empty for the baseline and where there is none."""
    return "" if row.ratio is None or row.verdict == "baseline" else f"{row.ratio:.3f} ± {row.half_width:.3f}"


class Notes:
    """Numbers the reasons of a table; the same reason has the same number."""

    def __init__(self) -> None:
        self._reasons: dict[str, int] = {}

    def mark(self, reason: str) -> str:
        """The number of a reason, in brackets."""
        return f"[{self._reasons.setdefault(reason, len(self._reasons) + 1)}]"

    def lines(self) -> list[Text]:
        """One line per reason, in order."""
        return [Text(f"[{number}] {reason}", style="dim") for reason, number in self._reasons.items()]


def by_reason(what: str, reasons: Iterable[tuple[str, str]]) -> list[str]:
    """(reason, name) pairs as one line per reason: 'what: a, b: the reason'."""
    found = grouped(reasons, lambda pair: pair[0])
    return [f"{what}: {', '.join(unique(name for _, name in pairs))}: {reason}" for reason, pairs in found.items()]


def nothing_done(asked: Sequence[Record], done: str) -> str:
    """Why none of the rows that were asked for is ok, in one sentence; empty where one is, or there are none."""
    if not asked or any(row.status is Status.OK for row in asked):
        return ""
    why = ((f"{row.status}: {row.reason}", row.implementation) for row in asked)
    first, *others = by_reason(f"Nothing that was requested was {done}", why)
    return f"{first}{' The other reasons are in the rows.' * bool(others)}"


def by(records: Iterable[Record], *fields: str) -> list[list[Record]]:
    """Records that agree in these fields, together; groups in the order in which they first appear."""
    return list(grouped(records, attrgetter(*fields)).values())


Body = Callable[[list[Record], Notes], Iterable[RenderableType]]


def blocks(
    records: Iterable[Record], fields: Sequence[str], what: Callable[[list[Record]], str], body: Body
) -> Iterator[RenderableType]:
    """For each group of rows that agree in `fields`: `what` they are, what `body` shows of them, and every reason.

    Implementations that were skipped everywhere for one reason are a line under the tables and not part of them.
    """
    for group in by(records, *fields):
        kept: list[Record] = []
        skipped: list[tuple[str, str]] = []
        for own in by(group, "implementation"):
            reasons = {record.reason for record in own}
            if all(record.status is Status.SKIPPED for record in own) and len(reasons) == 1:
                skipped.append((reasons.pop(), own[0].implementation))
            else:
                kept += own
        first, notes = group[0], Notes()
        sizes = f"  ({first.sizes})  "
        head = Text.assemble((first.shape, "bold"), sizes, f"{first.scope} {first.mode} {first.dtype} {what(group)}")
        head.rstrip()
        shown = [*(body(kept, notes) if kept else ()), *_losses(kept)]
        lines = [Text(line, "dim") for line in by_reason("skipped", skipped)]
        yield Group(head, *shown, *notes.lines(), *lines, Text(""))


def _losses(records: list[Record]) -> Iterator[Text]:
    """What quantising cost each implementation, at the token count where that is most."""
    found = []
    for own in by((record for record in records if record.loss is not None), "implementation"):
        worst = max(own, key=lambda record: record.loss or 0.0)
        found.append(f"{worst.implementation} {worst.loss:.2e} (eager {worst.eager_loss:.2e})")
    if found:
        yield Text(f"loss, the relative error from the fp64 result of unquantised operands: {', '.join(found)}", "dim")


def memory_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope and dtype: measured bytes, and what arithmetic predicts beside or, if narrow, below."""
    beside = width >= BESIDE_WIDTH
    names = ("saved", "peak", "workspace")

    def body(kept: list[Record], notes: Notes) -> Iterator[RenderableType]:
        columns = [column for name in names for column in ((name, "predicted") if beside else (name,))]
        name = {"implementation"}
        table = new_table(["tokens", *name, *columns], text=name, wrap=name)
        for same_tokens in by(sorted(kept, key=lambda record: record.tokens), "tokens"):
            for record in same_tokens:
                head = (str(record.tokens) if record is same_tokens[0] else "", record.implementation)
                if record.status is not Status.OK:
                    table.add_row(*head, Text(f"{record.status} {notes.mark(record.reason)}", STYLES[record.status]))
                    continue
                pairs = [
                    (mebibytes(getattr(record, f"{name}_bytes")), mebibytes(getattr(record, f"predicted_{name}_bytes")))
                    for name in names
                ]
                if beside:
                    table.add_row(*head, *(cell for one, other in pairs for cell in (one, Text(other, "dim"))))
                else:
                    table.add_row(*head, *(Text.assemble(one, (f"\n{other}", "dim")) for one, other in pairs))
            table.add_section()
        yield table
        yield Text(
            "MiB. saved: held between forward and backward beyond inputs, weights and output; peak: highest above "
            "inputs and weights, output and gradients included; workspace: kept between calls"
            + ("." if beside else "; below each, the arithmetic prediction."),
            style="dim",
        )

    return blocks(records, ("shape", "scope", "dtype"), lambda group: "memory", body)


def verify_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope and dtype: error from fp64, eager's error, their ratio and the verdict per tensor.

    Where the width does not suffice for all figures, those that matter least are left out, and the legend says so.
    """
    count = max(1, min(len(VERIFY_FIGURES), (width - NAME_WIDTH - VERDICT_WIDTH) // FIGURE_WIDTH))
    legend = "error: ||value - fp64 truth|| / ||truth||; ratio: error / eager's; the worst over token counts is shown."
    if count < len(VERIFY_FIGURES):
        legend += f" Not shown in {width} columns: {', '.join(VERIFY_FIGURES[count:])}."
    else:
        legend += " max error: the largest element's, over the truth's rms."

    def body(kept: list[Record], notes: Notes) -> Iterator[RenderableType]:
        name = "implementation, tensor"
        table = new_table((name, *VERIFY_FIGURES[:count], "verdict"), text={name, "verdict"})
        for same in by(kept, "implementation"):
            _verify_rows(table, same, notes, count)
            table.add_section()
        yield table
        yield Text(legend, style="dim")
        interpreted = unique(record.implementation for record in kept if record.interpreted)
        if interpreted:
            yield Text(f"run by Triton's interpreter on the CPU: {', '.join(interpreted)}", style="dim")

    def what(group: list[Record]) -> str:
        return f"verify, {', '.join(map(str, sorted({record.tokens for record in group})))} tokens"

    return blocks(records, ("shape", "scope", "dtype"), what, body)


def _verify_rows(table: Table, records: list[Record], notes: Notes, figures: int) -> None:
    """The worst check per tensor over the token counts of one implementation."""
    table.add_row(Text(records[0].implementation, "bold"))
    for record in records:
        if record.status in {Status.SKIPPED, Status.ERROR, Status.UNSETTLED}:
            text = f"{record.status} {notes.mark(f'{record.tokens} tokens: {record.reason}')}"
            table.add_row(*[""] * (1 + figures), Text(text, STYLES[record.status]))
    checks = [(record.tokens, check) for record in records for check in record.tensor_checks]
    for tensor, found in grouped(checks, lambda pair: pair[1].tensor).items():
        tokens, check = max(found, key=lambda pair: pair[1].used if pair[1].ok else math.inf)
        verdict = _verdict(check, notes, f"{tokens} tokens, {tensor}: ")
        table.add_row(f"  {tensor}", *_check_figures(check)[:figures], verdict)


def _verdict(check: TensorCheck, notes: Notes, where: str = "") -> Text:
    return Text("pass", "green") if check.ok else Text(f"FAIL {notes.mark(where + check.reason)}", "bold red")


def _check_figures(check: TensorCheck) -> list[str]:
    """In the order of VERIFY_FIGURES; dashes for a check that compares no values."""
    if not check.allowed:
        return ["-"] * len(VERIFY_FIGURES)
    relative = "-"
    if check.eager_error:
        times = check.error / check.eager_error
        relative = f"{times:.2f}" if times < 100 else f"{times:.2g}"
    others = (check.eager_error, check.allowed, check.max_error, check.max_allowed)
    return [f"{check.error:.2e}", relative, *(f"{value:.2e}" for value in others)]


def verify_detail_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope, dtype and token count: how the errors of each tensor's elements are distributed."""
    del width

    def body(kept: list[Record], notes: Notes) -> Iterator[RenderableType]:
        columns = ("", "error", "median", "99.9%", "max", "allowed", "worst at", "verdict")
        table = new_table(columns, text={"", "verdict"}, box=None, padding=(0, 1, 0, 0))
        for record in kept:
            status = "" if record.tensor_checks else f"{record.status} {notes.mark(record.reason)}"
            table.add_row(Text(record.implementation, "bold"), *[""] * 6, Text(status, STYLES[record.status]))
            for check in record.tensor_checks:
                figures = (check.error, check.median_error, check.p999_error, check.max_error, check.max_allowed)
                place = ",".join(map(str, check.worst_index)) or "-"
                table.add_row(f"  {check.tensor}", *map(_short, figures), place, _verdict(check, notes))
        yield table
        yield Text(
            "error: ||value - fp64 truth|| / ||truth||. The other figures are errors of single elements, over the "
            "truth's rms: the median, the 99.9th percentile, the largest, its limit, and its index.",
            style="dim",
        )

    return blocks(
        records, ("shape", "scope", "dtype", "tokens"), lambda group: f"verify, {group[0].tokens} tokens", body
    )


def _short(value: float | None) -> str:
    """Two figures in six places: 3.6e-3; a dash for None."""
    return "-" if value is None else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
