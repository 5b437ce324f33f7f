"""One table for every command: what stands in it, and how it looks on a terminal, in Markdown and on a page."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table as TerminalTable
from rich.text import Text

from swiglu_bench.rows.record import FIGURES, Record, Status, grouped, unique

TABLE = ("shape", "scope", "mode", "dtype")
"""Rows that agree in this stand in one table of times."""
STYLES = {
    "ok": "green", "skipped": "dim", "incorrect": "bold red", "error": "bold red", "unsettled": "bold yellow",
    "faster": "green", "slower": "red", "tie": "dim", "baseline": "dim",
    "same": "green", "within seeds": "green", "differs": "bold red",
    "unclear": "yellow", "less": "green", "more": "red", "broken": "bold red", "mended": "green", "drift": "dim",
    "fine": "green", "regression": "bold red", "cannot tell": "yellow",
    "clear": "green", "unsure": "yellow", "none": "bold red",
}  # fmt: skip
MEANINGS = {"green": "good", "red": "bad", "yellow": "middle", "dim": "faint"}
"""What a style, bold or not, says on a page, as a class of its style sheet."""

Cell = str | Text
Column = str | tuple[str, Callable[[Record], Cell]]
"""A figure, with the head and the form that are declared of it, or a head and what is made of a row."""


@dataclass(frozen=True)
class Grid:
    """The content of a table, independent of where it is shown."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """A row without cells is a line between those above and those below."""
    title: str = ""
    note: str = ""
    text: Collection[str] = ()
    wrap: Collection[str] = ()
    least: int = 0
    """How wide the columns of `wrap` are at least."""
    look: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the suite's look, as rich calls it."""

    def terminal(self) -> TerminalTable:
        """The table for a terminal: figures to the right, texts to the left, and only columns of `wrap` narrower."""
        look: dict[str, Any] = {
            "box": box.SIMPLE_HEAD, "pad_edge": False, "title_justify": "left", "title_style": "bold", **self.look,
        }  # fmt: skip
        table = TerminalTable(title=self.title or None, **look)
        for name in self.heads:
            wraps = name in self.wrap
            table.add_column(
                name, justify="left" if name in self.text else "right", no_wrap=not wraps,
                overflow="fold" if wraps else "ellipsis", min_width=self.least or None if wraps else None,
            )  # fmt: skip
        for row in self.rows:
            if row:
                table.add_row(*row)
            else:
                table.add_section()
        return table

    def parts(self) -> Iterator[RenderableType]:
        """The table for a terminal and its note."""
        yield self.terminal()
        if self.note:
            yield Text(self.note, "dim")

    def markdown(self) -> str:
        """The table in Markdown, without its title; what is bold on a terminal is code."""
        rule = ["---" if name in self.text else "---:" for name in self.heads]
        rows = ([f"`{cell}`" if getattr(cell, "style", "") == "bold" else str(cell) for cell in row]
                for row in self.rows if row)  # fmt: skip
        first, *others = (f"| {' | '.join(line)} |" for line in (self.heads, rule, *rows))
        return "\n".join([first.replace("|  |", "| |"), *others])


def meaning(cell: Cell) -> str:
    """What a cell says: `good`, `bad`, `middle`, or nothing."""
    return MEANINGS.get(str(cell.style).removeprefix("bold "), "") if isinstance(cell, Text) else ""


def figure_grid(rows: Sequence[Record], columns: Sequence[Column], lead: Sequence[Column] = (), **about: Any) -> Grid:
    """A line for each row: columns of text in `lead`, then figures."""
    every = (*lead, *columns)
    heads = [FIGURES[column].heading if isinstance(column, str) else column[0] for column in every]
    cells = [[row.shown(column) if isinstance(column, str) else column[1](row) for column in every] for row in rows]
    return Grid(heads, cells, **about)


def across(
    head: str, rows: Iterable[Record], values: Sequence[Any], cell: Callable[[Record], Cell], of: str = "tokens"
) -> Grid:
    """Implementations down, a column for each of these values of a column: token counts, or shapes."""
    lines: list[list[Cell]] = []
    for name, own in grouped(rows, attrgetter("implementation")).items():
        cells = {getattr(row, of): cell(row) for row in own}
        lines.append([Text(name, "bold"), *(cells.get(value, "") for value in values)])
    return Grid([head, *map(str, values)], lines, text={head})


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


def dim(lines: Iterable[str]) -> Iterator[Text]:
    """Lines of text in a dim style."""
    return (Text(line, "dim") for line in lines)


def nothing_done(asked: Sequence[Record], done: str) -> str:
    """Why none of the rows that were asked for has a result, in one sentence; empty where one has, or there are none.

    `incorrect` and `unsettled` are results, which their rows have explained.
    """
    if not asked or any(row.status in {Status.OK, Status.INCORRECT, Status.UNSETTLED} for row in asked):
        return ""
    why = ((f"{row.status}: {row.reason}", row.implementation) for row in asked)
    first, *others = by_reason(f"Nothing that was requested was {done}", why)
    return f"{first}{' The other reasons are in the rows.' * bool(others)}"


def by(records: Iterable[Record], *fields: str) -> list[list[Record]]:
    """Records that agree in these fields, together; groups in the order in which they first appear."""
    return list(grouped(records, attrgetter(*fields)).values())
