"""Records as tables for a terminal: one per shape, with every mark explained under it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows.record import Record, Status, TensorCheck

STYLES = {Status.OK: "green", Status.SKIPPED: "dim", Status.INCORRECT: "bold red", Status.ERROR: "bold red"}
NAME_WIDTH = 26
VERDICT_WIDTH = 12
FIGURE_WIDTH = 11
BESIDE_WIDTH = 110
"""From this width on, `memory` shows predictions in columns of their own."""
VERIFY_FIGURES = ("error", "ratio", "eager's", "allowed", "max error", "max allowed")
"""Columns of `verify`, what matters most first."""


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


def mebibytes(value: int | None) -> str:
    """Bytes as MiB; a dash for None."""
    if value is None:
        return "-"
    mib = value / 2**20
    return f"{mib:.3f}" if mib < 1 else f"{mib:.1f}"


def size(size_bytes: float) -> str:
    """Bytes as GiB, or below one as MiB, with the unit."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def by(records: Iterable[Record], *fields: str) -> Iterator[list[Record]]:
    """Records that agree in these fields, together; groups in the order in which they first appear."""

    def key(record: Record) -> tuple[object, ...]:
        return tuple(getattr(record, field) for field in fields)

    ordered = {key(record): index for index, record in reversed(list(enumerate(records)))}
    for _, group in groupby(sorted(records, key=lambda record: ordered[key(record)]), key=key):
        yield list(group)


def several_gpus(seats: Iterable[tuple[str, int | None, str]]) -> str | None:
    """What a reader has to know of rows by their (host, gpu_index, gpu_uuid), where they are from several GPUs."""
    known = {uuid: f"{host} {uuid if index is None else index}" for host, index, uuid in seats if uuid}
    if len(known) < 2:
        return None
    names = sorted(known.values())
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"The cases ran on {len(known)} GPUs ({shown}): a ratio is of one of them, "
        "times at two token counts may be of two."
    )


def title(record: Record, *extra: str) -> Text:
    """The head of a table: what its records have in common."""
    sizes = f"hidden {record.hidden}, intermediate {record.intermediate}"
    what = [record.scope, record.mode, record.dtype, *extra]
    return Text.assemble((record.shape, "bold"), f"  ({sizes})  ", " ".join(what))


def absent(records: list[Record]) -> tuple[list[Record], list[Text]]:
    """Rows worth a place in the table, and a line for each implementation skipped everywhere for one reason."""
    lines, kept = [], []
    for group in by(records, "implementation"):
        reasons = {record.reason for record in group}
        if all(record.status is Status.SKIPPED for record in group) and len(reasons) == 1:
            lines.append((reasons.pop(), group[0].implementation))
        else:
            kept += group
    merged: dict[str, list[str]] = {}
    for reason, name in lines:
        merged.setdefault(reason, []).append(name)
    return kept, [Text(f"skipped: {', '.join(names)}: {reason}", style="dim") for reason, names in merged.items()]


def memory_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope and dtype: measured bytes, and what arithmetic predicts beside or, if narrow, below."""
    beside = width >= BESIDE_WIDTH
    for group in by(records, "shape", "scope", "dtype"):
        kept, lines = absent(group)
        notes = Notes()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("implementation", overflow="fold")
        for header in ("saved", "peak", "workspace"):
            table.add_column(header, justify="right", no_wrap=True)
            if beside:
                table.add_column("predicted", justify="right", no_wrap=True, style="dim")
        for same_tokens in by(sorted(kept, key=lambda record: record.tokens), "tokens"):
            for index, record in enumerate(same_tokens):
                head = (str(record.tokens) if index == 0 else "", record.implementation)
                if record.status is not Status.OK:
                    table.add_row(*head, Text(f"{record.status} {notes.mark(record.reason)}", STYLES[record.status]))
                    continue
                pairs = (
                    (record.saved_bytes, record.predicted_saved_bytes),
                    (record.peak_bytes, record.predicted_peak_bytes),
                    (record.workspace_bytes, record.predicted_workspace_bytes),
                )
                if beside:
                    table.add_row(*head, *(mebibytes(value) for pair in pairs for value in pair))
                else:
                    table.add_row(*head, *(Text.assemble(mebibytes(m), (f"\n{mebibytes(p)}", "dim")) for m, p in pairs))
            table.add_section()
        legend = Text(
            "MiB. saved: held between forward and backward beyond inputs, weights and output; peak: highest above "
            "inputs and weights, output and gradients included; workspace: kept between calls"
            + ("." if beside else "; below each, what arithmetic predicts."),
            style="dim",
        )
        parts = [title(group[0], "memory"), table, legend] if kept else [title(group[0], "memory")]
        yield Group(*parts, *notes.lines(), *lines, Text(""))


def verify_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope and dtype: error from fp64, eager's error, their ratio and the verdict per tensor.

    Where the width does not suffice for all figures, those that matter least are left out, and the legend says so.
    """
    figures = max(1, min(len(VERIFY_FIGURES), (width - NAME_WIDTH - VERDICT_WIDTH) // FIGURE_WIDTH))
    for group in by(records, "shape", "scope", "dtype"):
        kept, lines = absent(group)
        notes = Notes()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("implementation, tensor", no_wrap=True)
        for header in VERIFY_FIGURES[:figures]:
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for same in by(kept, "implementation"):
            _verify_rows(table, same, notes, figures)
            table.add_section()
        text = "error: ||value - fp64 truth|| / ||truth||; ratio: to eager's; the worst over token counts is shown."
        if figures < len(VERIFY_FIGURES):
            text += f" Not shown in {width} columns: {', '.join(VERIFY_FIGURES[figures:])}."
        else:
            text += " max error: the largest element's, over the truth's rms."
        tokens = ", ".join(str(count) for count in sorted({record.tokens for record in group}))
        head = title(group[0], f"verify, {tokens} tokens")
        parts: list[RenderableType] = [head, table, Text(text, style="dim")] if kept else [head]
        if any(record.interpreted for record in kept):
            names = ", ".join(dict.fromkeys(record.implementation for record in kept if record.interpreted))
            lines.append(Text(f"run by Triton's interpreter on the CPU: {names}", style="dim"))
        yield Group(*parts, *notes.lines(), *lines, Text(""))


def _verify_rows(table: Table, records: list[Record], notes: Notes, figures: int) -> None:
    """The worst check per tensor over the token counts of one implementation."""
    table.add_row(Text(records[0].implementation, "bold"))
    for record in records:
        if record.status in {Status.SKIPPED, Status.ERROR}:
            text = f"{record.status} {notes.mark(f'{record.tokens} tokens: {record.reason}')}"
            table.add_row(*[""] * (1 + figures), Text(text, STYLES[record.status]))
    checks: dict[str, list[tuple[float, int, TensorCheck]]] = {}
    for record in records:
        for check in record.tensor_checks:
            checks.setdefault(check.tensor, []).append((math.inf if not check.ok else check.used, record.tokens, check))
    for tensor, found in checks.items():
        _, tokens, check = max(found, key=lambda entry: entry[0])
        verdict = Text("pass", "green")
        if not check.ok:
            verdict = Text(f"FAIL {notes.mark(f'{tokens} tokens, {tensor}: {check.reason}')}", "bold red")
        table.add_row(f"  {tensor}", *_check_figures(check)[:figures], verdict)


def _check_figures(check: TensorCheck) -> list[str]:
    """In the order of VERIFY_FIGURES."""
    relative = "-"
    if check.eager_error:
        times = check.error / check.eager_error
        relative = f"{times:.2f}" if times < 100 else f"{times:.2g}"
    return [
        f"{check.error:.2e}", relative, f"{check.eager_error:.2e}", f"{check.allowed:.2e}",
        f"{check.max_error:.2e}", f"{check.max_allowed:.2e}",
    ]  # fmt: skip


def verify_detail_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope, dtype and token count: how the errors of each tensor's elements are distributed."""
    del width
    for group in by(records, "shape", "scope", "dtype", "tokens"):
        kept, lines = absent(group)
        notes = Notes()
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for header in ("error", "median", "99.9%", "max", "allowed", "worst at", "verdict"):
            table.add_column(header, justify="left" if header == "verdict" else "right", no_wrap=True)
        for record in kept:
            status = "" if record.tensor_checks else f"{record.status} {notes.mark(record.reason)}"
            table.add_row(Text(record.implementation, "bold"), *[""] * 6, Text(status, STYLES[record.status]))
            for check in record.tensor_checks:
                verdict = Text("pass", "green") if check.ok else Text(f"FAIL {notes.mark(check.reason)}", "bold red")
                spread = (check.median_error, check.p999_error, check.max_error, check.max_allowed)
                figures = ["-" if value is None else _short(value) for value in spread]
                place = ",".join(map(str, check.worst_index)) or "-"
                table.add_row(f"  {check.tensor}", _short(check.error), *figures, place, verdict)
        legend = Text(
            "error: ||value - fp64 truth|| / ||truth||. The others are of single elements, over the truth's rms: their "
            "median, the value that 99.9% of them do not exceed, the largest, what is allowed for it, and where it is.",
            style="dim",
        )
        parts: list[RenderableType] = [title(group[0], f"verify, {group[0].tokens} tokens")]
        if kept:
            parts += [table, legend]
        yield Group(*parts, *notes.lines(), *lines, Text(""))


def _short(value: float) -> str:
    """Two figures in six places: 3.6e-3."""
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
