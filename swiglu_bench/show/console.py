"""What a person sees: a table that fills in while it runs; plain lines where there is no terminal."""

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event, Thread
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import SegmentLines
from rich.table import Column

from swiglu_bench.rows.finished_run import case_label, case_of
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.table import TABLE, by_reason
from swiglu_bench.show.tables import caution_lines, time_line, tp_line, tp_tables
from swiglu_bench.show.wandb_run import WandbRun

Tables = Callable[[Sequence[Record], int], Iterator[RenderableType]]
EVERY_S = 60.0
"""Seconds between the lines that say where a command is, without a terminal."""
NARROW = 70
"""Below this width the progress line has no times in it, so that what is being done can be read."""


class Screen:
    """Lines of text between the tables and bars of a command."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str, style: str = "") -> None:
        """A line for people."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that needs attention."""
        self.say(f"Warning: {text}", style="yellow")


class ConsoleWriter(Screen):
    """Collects rows and shows them; `tables` says which tables a command shows.

    On a terminal the table in progress stands under the bar and grows with each row; once a row of another table comes,
    it is printed for good; with `in_any_order` rows of all tables may come at any time, and all are printed at the end.
    `quiet` shows failures and what spoils figures, and neither bar nor tables.
    """

    def __init__(
        self,
        console: Console,
        tables: Tables,
        case_count: int,
        tables_anyway: bool = False,
        quiet: bool = False,
        in_any_order: bool = False,
    ) -> None:
        super().__init__(console)
        self.records: list[Record] = []
        self._tables, self._quiet, self._in_any_order = tables, quiet, in_any_order
        self._open: dict[tuple[object, ...], list[Record]] = {}
        """Rows of the tables that are not printed yet."""
        self._skipped: list[Record] = []
        self._shows_tables = (console.is_terminal or tables_anyway) and not quiet
        self._skips_told: set[tuple[str, str]] = set()
        self._progress = Bar(console, case_count, quiet=quiet)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, completed: float, doing: str) -> None:
        """Move the bar: cases done so far, fractions of one included, and what is happening."""
        self._progress.tell(doing, completed)

    def write(self, record: Record) -> None:
        """Take a row: into the table, or without a terminal at once as a line, skips together after their case."""
        self.records.append(record)
        table = tuple(getattr(record, name) for name in TABLE)
        if table not in self._open and not self._in_any_order:
            self._print_tables()
        current = self._open.setdefault(table, [])
        current.append(record)
        if self._quiet:
            if record.failed:
                self.say(time_line(record))
        elif self.console.is_terminal:
            self._progress.show(self._tables(current, self.console.width))
        elif record.status is Status.SKIPPED:
            if self._skipped and case_of(self._skipped[0]) != case_of(record):
                self._tell_skips()
            self._skipped.append(record)
        else:
            self._tell_skips()
            self.say(time_line(record))

    def close(self) -> None:
        """Print the tables that are left; without a terminal the lines are out, but for last skips and the captions.

        With `tables_anyway` there are tables without a terminal, too.
        """
        self._tell_skips()
        self._print_tables()
        if not self._shows_tables:
            for line in caution_lines(self.records):
                self.say(line)

    def _print_tables(self) -> None:
        self._progress.show(())
        for rows in self._open.values():
            if self._shows_tables:
                for table in self._tables(rows, self.console.width):
                    self.console.print(table)
        self._open.clear()

    def _tell_skips(self) -> None:
        """One line for each reason with all that it holds for; what was said of the same before is not said again."""
        skips = [(record.reason, record.implementation) for record in self._skipped]
        for line in by_reason("skipped", (skip for skip in skips if skip not in self._skips_told)):
            self.say(f"{case_label(case_of(self._skipped[0]))} {line}")
        self._skips_told.update(skips)
        self._skipped.clear()


class RanksWriter(ConsoleWriter):
    """Collects the rows of `tp`: without a terminal a line for each that was not skipped, all tables at the end."""

    def __init__(self, console: Console, case_count: int, quiet: bool) -> None:
        super().__init__(console, lambda rows, width: tp_tables(rows), case_count, quiet=quiet)

    def write(self, record: Record) -> None:
        """Take a row."""
        self.records.append(record)
        if record.failed if self._quiet else not self.console.is_terminal and record.status is not Status.SKIPPED:
            self.say(tp_line(record))

    def close(self) -> None:
        """Print all tables."""
        for table in () if self._quiet else self._tables(self.records, self.console.width):
            self.console.print(table, highlight=False)


class Bar(Progress):
    """A bar with something under it, which is rendered once and not at every move of the bar.

    Without a terminal a line a minute says where it is. `total` is what `completed` comes to; None: not known.
    """

    def __init__(self, console: Console, total: float | None = None, doing: str = "starting", quiet: bool = False):
        self._below: RenderableType | None = None
        self._in_lines = not (quiet or console.is_terminal)
        self._ended = Event()
        what = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        times = (
            TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("left "),
        ) if console.width >= NARROW else ()  # fmt: skip
        spinner = SpinnerColumn("line" if console.options.ascii_only else "dots")
        bar = (spinner, BarColumn(bar_width=20 if times else 8), TextColumn("{task.percentage:>3.0f}%"))
        super().__init__(*bar, *times, what, console=console, transient=True, expand=True,
                         disable=quiet or not console.is_terminal)  # fmt: skip
        self._task = self.add_task(doing, total=total)

    def tell(self, doing: str, completed: float | None = None) -> None:
        """What is happening, and how much of the total is done, fractions included."""
        self.update(self._task, description=doing, completed=completed)

    def start(self) -> None:
        """Show the bar."""
        super().start()
        if self._in_lines:
            Thread(target=self._tell_each_minute, daemon=True).start()

    def stop(self) -> None:
        """Remove the bar."""
        self._ended.set()
        super().stop()

    def _tell_each_minute(self) -> None:
        while not self._ended.wait(EVERY_S):
            Screen(self.console).say(self.position())

    def position(self) -> str:
        """Where it is, for how long it has run, and for how long it will at this rate."""
        task = self.tasks[0]
        spent_s, share = task.elapsed or 0.0, task.completed / task.total if task.total else 0.0
        left = f", about {_duration(spent_s / share - spent_s)} left" if 0 < share < 1 else ""
        return f"{_duration(spent_s)}{f', {share:.0%} done' if task.total else ''}{left}: {task.description}"

    def show(self, renderables: Iterable[RenderableType]) -> None:
        """Show these under the bar; an empty list removes what is there."""
        if self.disable:
            return
        parts = list(renderables)
        lines = self.console.render_lines(Group(*parts), pad=False)
        self._below = SegmentLines(lines, new_lines=True) if parts else None

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn, from top to bottom."""
        yield self.make_tasks_table(self.tasks)
        if self._below:
            yield self._below


class TrainingProgress(Bar):
    """A bar with the live loss, or without a terminal a line for each of `count` trainings; logs to W&B."""

    def __init__(self, console: Console, count: int, wandb: WandbRun | None = None) -> None:
        super().__init__(console, count)
        self._wandb = wandb
        self._done = 0

    def listen(self, event: Record | str) -> None:
        """The row of a seed after a step, or what else begins."""
        if isinstance(event, str):
            self.tell(event, self._done)
            return
        losses, steps = event.series["loss"], event.steps or 0
        where = f"{event.implementation}, seed {event.seed}: step {len(losses)}/{steps}"
        if self._wandb:
            self._wandb.step(event)
        self._done += len(losses) == steps
        text = f"{where}, loss {losses[-1]:.4f}"
        self.tell(text, self._done + len(losses) / steps * (len(losses) < steps))
        if len(losses) == steps and not self.console.is_terminal:
            Screen(self.console).say(text)


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
