"""The contract matrix on a terminal."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.text import Text

from swiglu_bench.rows.record import AuditVerdict, Record, grouped, unique
from swiglu_bench.show.writers.tables import new_table

SYMBOLS: dict[str, tuple[str, str]] = {
    AuditVerdict.PASS: ("✓", "green"),
    AuditVerdict.FAIL: ("✗", "bold red"),
    AuditVerdict.UNSUPPORTED: ("–", "yellow"),
    AuditVerdict.NOT_RUN: ("·", "dim"),
}


def contract_tables(cells: Sequence[Record], about: Mapping[str, str]) -> Iterator[RenderableType]:
    """A matrix per scope, what its columns mean, and every reason; `about` says what each check asks."""
    letters = dict(zip(unique(cell.check for cell in cells), string.ascii_letters, strict=False))
    for scope, own in grouped(cells, attrgetter("scope")).items():
        table = new_table(["", *letters.values()], scope, text={"", *letters.values()}, box=None, padding=(0, 1, 0, 0))
        for name, row in grouped(own, attrgetter("implementation")).items():
            found = {cell.check: Text(*SYMBOLS[cell.verdict]) for cell in row}
            table.add_row(Text(name, "bold"), *(found.get(check, "") for check in letters))
        yield table
    yield Text.assemble(*((f"{symbol} {verdict}   ", style) for verdict, (symbol, style) in SYMBOLS.items()))
    yield Group(*(Text(f"{letter} {check}: {about.get(check, '')}", "dim") for check, letter in letters.items()))
    yield from _reasons(cells)


def _reasons(cells: Sequence[Record]) -> Iterator[RenderableType]:
    """Every reason once, with all that have it: failures first, and one line for those that could not run at all."""
    whole = Counter((cell.implementation, cell.verdict, cell.reason) for cell in cells)
    count = Counter(cell.implementation for cell in cells)

    def what(cell: Record) -> tuple[str, str, str]:
        always = whole[cell.implementation, cell.verdict, cell.reason] == count[cell.implementation] > 1
        return cell.verdict, "every check" if always else cell.check, cell.reason

    order: tuple[str, ...] = (AuditVerdict.FAIL, AuditVerdict.UNSUPPORTED, AuditVerdict.NOT_RUN, AuditVerdict.PASS)
    found = grouped((cell for cell in cells if cell.reason), what)
    for (verdict, check, reason), same in sorted(found.items(), key=lambda one: order.index(one[0][0])):
        names = grouped(same, attrgetter("implementation"))
        who = "; ".join(f"{name} ({', '.join(unique(cell.scope for cell in own))})" for name, own in names.items())
        symbol, style = SYMBOLS[verdict]
        yield Text.assemble((f"{symbol} {check}", style), f": {reason} ", (f"[{who}]", "dim"))
