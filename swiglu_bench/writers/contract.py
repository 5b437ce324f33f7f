"""The contract matrix on a terminal, and its cells in audit.csv."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows.audit_cell import CELL_COLUMNS, Cell, CellStatus
from swiglu_bench.rows.csv_table import Table as File

AUDIT = "audit.csv"
SYMBOLS = {
    CellStatus.PASS: ("✓", "green"),
    CellStatus.FAIL: ("✗", "bold red"),
    CellStatus.UNSUPPORTED: ("–", "yellow"),
    CellStatus.NOT_RUN: ("·", "dim"),
}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ContractFile:
    """Appends each cell to audit.csv, one line per implementation, scope and check, on the disk when it returns."""

    def __init__(self, folder: Path) -> None:
        self._file = File(folder / AUDIT, CELL_COLUMNS)

    def write(self, cell: Cell) -> None:
        """Append a cell; raises OSError where the disk does not take it."""
        self._file.append([dataclasses.astuple(cell)])


def contract_tables(cells: Sequence[Cell], about: Mapping[str, str]) -> Iterator[RenderableType]:
    """A matrix per scope, what its columns mean, and every reason; `about` says what each check asks."""
    checks = list(dict.fromkeys(cell.check for cell in cells))
    for scope in dict.fromkeys(cell.scope for cell in cells):
        table = Table(box=None, padding=(0, 1, 0, 0), title=scope, title_justify="left")
        table.add_column("", no_wrap=True)
        for letter, _ in zip(LETTERS, checks, strict=False):
            table.add_column(letter, no_wrap=True)
        rows: dict[str, dict[str, Cell]] = {}
        for cell in cells:
            if cell.scope == scope:
                rows.setdefault(cell.implementation, {})[cell.check] = cell
        for name, found in rows.items():
            table.add_row(Text(name, "bold"), *(_symbol(found.get(check)) for check in checks))
        yield table
    names = CellStatus.PASS, CellStatus.FAIL, CellStatus.UNSUPPORTED, CellStatus.NOT_RUN
    yield Text.assemble(*((f"{SYMBOLS[one][0]} {one}   ", SYMBOLS[one][1]) for one in names))
    yield Group(
        *(
            Text(f"{letter} {check}: {about.get(check, '')}", style="dim")
            for letter, check in zip(LETTERS, checks, strict=False)
        )
    )
    yield from _reasons(cells)


def _symbol(cell: Cell | None) -> Text:
    return Text(*SYMBOLS[cell.verdict]) if cell else Text("")


def _reasons(cells: Sequence[Cell]) -> Iterator[RenderableType]:
    """Every reason once, with all that have it: failures first, and one line for those that could not run at all."""
    whole = Counter((cell.implementation, cell.verdict, cell.reason) for cell in cells)
    count = Counter(cell.implementation for cell in cells)
    merged: dict[tuple[CellStatus, str, str], dict[str, dict[str, None]]] = {}
    for cell in cells:
        if cell.reason:
            always = whole[cell.implementation, cell.verdict, cell.reason] == count[cell.implementation] > 1
            named = merged.setdefault((cell.verdict, "every check" if always else cell.check, cell.reason), {})
            named.setdefault(cell.implementation, {})[cell.scope] = None
    for verdict in (CellStatus.FAIL, CellStatus.UNSUPPORTED, CellStatus.NOT_RUN, CellStatus.PASS):
        for (one, check, reason), named in merged.items():
            if one is verdict:
                who = "; ".join(f"{name} ({', '.join(scopes)})" for name, scopes in named.items())
                symbol, style = SYMBOLS[verdict]
                yield Text.assemble((f"{symbol} {check}", style), f": {reason} ", (f"[{who}]", "dim"))
