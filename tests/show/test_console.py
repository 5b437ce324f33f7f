"""What a person sees while a command runs."""

import io
import re
from collections.abc import Iterator, Sequence

import pytest
from rich.console import Console, RenderableType
from rich.text import Text
from specimens import a_record, without_time

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show import Writer
from swiglu_bench.show.console import ConsoleWriter
from swiglu_bench.show.tables import time_tables


def a_console(terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=terminal, width=width, color_system=None), output


ROWS = [
    a_record(implementation="eager", ratio=1.0),
    a_record(),
    without_time(Status.INCORRECT, "output: [bold]wrong[/bold].", implementation="wrong"),
    without_time(Status.SKIPPED, "It needs about 900.0 GiB and the device has 3.0 GiB free.", implementation="big"),
]
CASE = "small glu forward float32"


def play(terminal: bool, width: int = 100, rows: Sequence[Record] = ROWS, quiet: bool = False) -> str:
    console, output = a_console(terminal, width)
    writer = ConsoleWriter(console, time_tables, case_count=2, quiet=quiet)
    taker: Writer = writer
    with writer:
        for position, row in enumerate(rows):
            writer.advance(position / len(rows), f"checking {row.implementation}")
            taker.write(row)
            assert quiet or terminal or row.status is Status.SKIPPED or row.implementation in output.getvalue()
    taker.close()
    assert writer.records == list(rows)
    return output.getvalue()


def test_without_a_terminal_rows_are_plain_lines() -> None:
    text = play(terminal=False, width=60)
    assert text.splitlines() == [
        f"{CASE} tokens=7 eager: ok, 500 us, baseline, 2 TFLOP/s, 50.0% of limit",
        f"{CASE} tokens=7 mine: ok, 500 us, x0.800 ± 0.010, 2 TFLOP/s, 50.0% of limit",
        f"{CASE} tokens=7 wrong: incorrect: output: [bold]wrong[/bold].",
        f"{CASE} tokens=7 skipped: big: It needs about 900.0 GiB and the device has 3.0 GiB free.",
    ]
    assert play(terminal=False, rows=[]) == ""


def test_skips_are_a_line_for_each_reason_and_said_once() -> None:
    """A sweep of fifteen token counts need not say fifteen times that there is no GPU."""
    skips = [("a", "No GPU.", 1), ("b", "No mlp.", 1), ("c", "No GPU.", 1), ("a", "No GPU.", 2), ("a", "Large.", 4)]
    rows = [without_time(Status.SKIPPED, reason, implementation=name, tokens=n) for name, reason, n in skips]
    rows += [without_time(Status.ERROR, "broken", tokens=tokens) for tokens in (1, 2)]
    assert [line.removeprefix(f"{CASE} tokens=") for line in play(False, rows=rows).splitlines()] == [
        "1 skipped: a, c: No GPU.", "1 skipped: b: No mlp.", "4 skipped: a: Large.",
        "1 mine: error: broken", "2 mine: error: broken",
    ]  # fmt: skip


@pytest.mark.parametrize(("terminal", "quiet"), [(True, True), (False, True), (False, False)])
def test_failures_and_what_spoils_figures_end_the_lines_of_a_quiet_run_too(terminal: bool, quiet: bool) -> None:
    *others, first, second = play(terminal, rows=[*ROWS, a_record(stopped_by="budget")], quiet=quiet).splitlines()
    assert len(others) == (0 if quiet else 4)
    assert not quiet or first == f"{CASE} tokens=7 wrong: incorrect: output: [bold]wrong[/bold]."
    assert "budget was spent" in second


@pytest.mark.parametrize(("in_any_order", "tables"), [(False, ["a", "b", "a"]), (True, ["a", "b"])])
def test_rows_in_any_order_make_one_table_for_each_shape(in_any_order: bool, tables: list[str]) -> None:
    def spy(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
        yield Text(f"table of {records[0].shape} in {width}")

    console, output = a_console(terminal=True, width=77)
    writer = ConsoleWriter(console, spy, 3, in_any_order=in_any_order)
    for number, shape in enumerate("aba"):
        writer.write(a_record(shape=shape, tokens=number))
    writer.close()
    assert re.findall(r"table of (\w) in 77", output.getvalue()) == tables
