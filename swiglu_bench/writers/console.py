"""What a person sees: a progress bar while it runs and tables at the end; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from swiglu_bench.record import Record, Status
from swiglu_bench.writers.time_tables import caption_lines, time_line

Tables = Callable[[Sequence[Record], int], Iterator[RenderableType]]


class ConsoleWriter:
    """Collects rows and shows them; `tables` says which tables a command ends with."""

    def __init__(self, console: Console, tables: Tables, case_count: int, tables_anyway: bool = False) -> None:
        self.console = console
        self.records: list[Record] = []
        self._tables = tables
        self._skipped: list[Record] = []
        self._shows_tables = console.is_terminal or tables_anyway
        self._skips_told: set[tuple[str, str]] = set()
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("left "),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=case_count)

    def __enter__(self) -> ConsoleWriter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, completed: float, doing: str) -> None:
        """Move the bar: cases done so far, fractions of one included, and what is happening."""
        self._progress.update(self._task, completed=completed, description=doing)

    def write(self, record: Record) -> None:
        """Take a row; without a terminal it is printed at once as one line, skipped rows together after their case."""
        self.records.append(record)
        if self.console.is_terminal:
            return
        if record.status is Status.SKIPPED:
            if self._skipped and _case(self._skipped[0]) != _case(record):
                self._tell_skips()
            self._skipped.append(record)
            return
        self._tell_skips()
        self._line(time_line(record))

    def close(self) -> None:
        """Print the tables; without a terminal the lines are out, but for skips that came last and the captions.

        With `tables_anyway` there are tables without a terminal, too.
        """
        self._tell_skips()
        if self._shows_tables:
            for table in self._tables(self.records, self.console.width):
                self.console.print(table)
            return
        for line in caption_lines(self.records):
            self._line(line)

    def _tell_skips(self) -> None:
        """One line for each reason with all that it holds for; what was said of the same before is not said again."""
        names: dict[str, list[str]] = {}
        for record in self._skipped:
            if (record.implementation, record.reason) not in self._skips_told:
                names.setdefault(record.reason, []).append(record.implementation)
            self._skips_told.add((record.implementation, record.reason))
        for reason, those in names.items():
            first = self._skipped[0]
            case = f"{first.shape} {first.scope} {first.mode} {first.dtype} tokens={first.tokens}"
            self._line(f"{case} skipped: {', '.join(those)}: {reason}")
        self._skipped.clear()

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _case(record: Record) -> tuple[object, ...]:
    return record.shape, record.scope, record.mode, record.dtype, record.tokens
