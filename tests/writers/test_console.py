import io
import re
from collections.abc import Iterator, Sequence

import pytest
from rich.console import Console, RenderableType
from rich.text import Text
from specimens import a_record, without_time

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.writers import Writer
from swiglu_bench.writers.console import ConsoleWriter
from swiglu_bench.writers.time_tables import time_tables


def a_console(terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=terminal, width=width, color_system=None), output


ROWS = [
    a_record(implementation="eager", ratio=1.0),
    a_record(),
    without_time(Status.INCORRECT, "output: [bold]wrong[/bold].", implementation="wrong"),
    without_time(Status.SKIPPED, "It needs about 900.0 GiB and the device has 3.0 GiB free.", implementation="big"),
]


def play(terminal: bool, width: int = 100, rows: Sequence[Record] = ROWS) -> str:
    console, output = a_console(terminal, width)
    writer = ConsoleWriter(console, time_tables, case_count=2)
    with writer:
        for position, row in enumerate(rows):
            writer.advance(position / len(rows), f"checking {row.implementation}")
            writer.write(row)
    writer.close()
    return output.getvalue()


def test_it_is_a_writer() -> None:
    writer: Writer = ConsoleWriter(a_console(True)[0], time_tables, 1)
    assert hasattr(writer, "write")


def test_without_a_terminal_rows_are_plain_lines() -> None:
    lines = play(terminal=False, width=60).splitlines()
    assert lines == [
        "small glu forward float32 tokens=7 eager: ok, 500 us, baseline, 2 TFLOP/s, 50.0% of limit",
        "small glu forward float32 tokens=7 mine: ok, 500 us, x0.800 ±0.010, 2 TFLOP/s, 50.0% of limit",
        "small glu forward float32 tokens=7 wrong: incorrect: output: [bold]wrong[/bold].",
        "small glu forward float32 tokens=7 skipped: big: It needs about 900.0 GiB and the device has 3.0 GiB free.",
    ]


def test_plain_means_no_control_characters() -> None:
    assert all(character.isprintable() or character == "\n" for character in play(terminal=False))


def test_a_line_is_out_as_soon_as_its_row_is_there() -> None:
    console, output = a_console(terminal=False)
    writer = ConsoleWriter(console, time_tables, 1)
    with writer:
        writer.write(ROWS[0])
        assert output.getvalue().endswith("of limit\n")


def test_the_same_skip_is_told_once() -> None:
    """A sweep of fifteen token counts need not say fifteen times that there is no GPU."""
    skips = [without_time(Status.SKIPPED, "Triton kernels need a GPU.", tokens=n) for n in (1, 2, 3)]
    other = [
        without_time(Status.SKIPPED, "Too large.", tokens=n, implementation=name)
        for n, name in ((4, "mine"), (4, "big"))
    ]
    failures = [without_time(Status.ERROR, "broken", tokens=n) for n in (1, 2)]
    lines = play(False, rows=[*skips, *other, *failures]).splitlines()
    assert [line.split("tokens=")[1] for line in lines] == [
        "1 skipped: mine: Triton kernels need a GPU.", "4 skipped: mine, big: Too large.",
        "1 mine: error: broken", "2 mine: error: broken",
    ]  # fmt: skip


def test_skips_of_a_case_are_one_line_for_each_reason() -> None:
    skips = [
        without_time(Status.SKIPPED, reason, implementation=name)
        for name, reason in (("a", "No GPU."), ("b", "No mlp scope."), ("c", "No GPU."))
    ]
    assert play(False, rows=[*skips, ROWS[0]]).splitlines()[:2] == [
        "small glu forward float32 tokens=7 skipped: a, c: No GPU.",
        "small glu forward float32 tokens=7 skipped: b: No mlp scope.",
    ]


def test_a_verdict_and_the_noise_stand_in_the_lines() -> None:
    rows = [
        a_record(implementation="eager", ratio=1.0, aa_ratio=1.0002, aa_low=0.9991, aa_high=1.0013),
        a_record(verdict="faster"),
    ]
    base, mine = play(False, rows=rows).splitlines()
    assert "baseline, A/A 1.0002 [0.9991, 1.0013], " in base
    assert "x0.800 ±0.010 faster, " in mine


def test_what_spoils_the_figures_ends_the_lines() -> None:
    rows = [
        a_record(implementation="eager", stopped_by="budget"),
        a_record(throttle="power-brake", throttled_share=1.0),
    ]
    assert play(False, rows=rows).splitlines()[2:] == [
        "small glu forward float32: The budget was spent before every ratio was known to within 0.5%: 7 tokens.",
        "small glu forward float32: Clocks were held down by power-brake, in up to 100% of the rounds: 7 tokens.",
    ]


@pytest.mark.parametrize("no_color", [True, False])
def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    for table in time_tables([a_record(implementation="eager"), a_record(verdict="faster")], 100):
        console.print(table)
    assert "faster" in output.getvalue()
    assert ("\x1b[32m" in output.getvalue()) is not no_color


def test_every_row_is_kept_in_order_even_if_it_is_not_printed() -> None:
    console, _ = a_console(terminal=False)
    writer = ConsoleWriter(console, time_tables, 1)
    rows = [without_time(Status.SKIPPED, "Triton kernels need a GPU.", tokens=n) for n in (3, 1, 2)]
    for row in rows:
        writer.write(row)
    assert writer.records == rows


@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_terminal_gets_tables_at_the_end(width: int) -> None:
    text = play(terminal=True, width=width)
    tail = text[text.rindex("small  (hidden 24") :]
    assert "incorrect [1]" in tail
    assert "[1] output: [bold]wrong[/bold]." in tail
    assert "skipped: big: It needs about 900.0 GiB" in " ".join(tail.split())
    assert "tokens=7" not in text, "lines are for logs"


def test_a_terminal_gets_a_progress_bar_with_what_runs() -> None:
    console, output = a_console(terminal=True, width=160)
    writer = ConsoleWriter(console, time_tables, case_count=4)
    with writer:
        writer.advance(1.5, "case 2/4: smoke, 16 tokens, checking eager")
        writer._progress.refresh()
    (line,) = {part.strip() for part in output.getvalue().splitlines() if "checking eager" in part}
    assert "case 2/4: smoke, 16 tokens, checking eager" in line
    assert "elapsed, " in line
    assert " left" in line
    assert output.getvalue().rstrip().endswith("\x1b[2K"), "the bar makes room for the tables"


def test_tables_are_given_the_rows_and_the_width() -> None:
    given: list[tuple[int, int]] = []

    def spy(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
        given.append((len(records), width))
        yield Text("the table")

    console, output = a_console(True, 77)
    writer = ConsoleWriter(console, spy, 1)
    with writer:
        writer.write(ROWS[0])
    writer.close()
    assert set(given) == {(1, 77)}
    assert output.getvalue().rstrip().endswith("the table")


def test_the_table_fills_in_under_the_bar_while_it_runs() -> None:
    console, output = a_console(terminal=True, width=100)
    with ConsoleWriter(console, time_tables, case_count=1) as writer:
        for count, row in enumerate(ROWS[:2], start=1):
            writer.write(row)
            writer._progress.refresh()
            frame = output.getvalue().rpartition("starting")[2]
            assert [name in frame for name in ("eager", "mine")] == [True, count == 2]


def test_a_finished_table_is_printed_before_the_next_begins() -> None:
    console, output = a_console(terminal=True, width=100)
    writer = ConsoleWriter(console, time_tables, case_count=2)
    rows = [a_record(shape=shape, implementation=name) for shape in ("first", "second") for name in ("eager", "mine")]
    with writer:
        for row in rows[:3]:
            writer.write(row)
        assert output.getvalue().count("first  (hidden 24") == 1
        assert "second" not in output.getvalue()
        writer.write(rows[3])
    before = len(output.getvalue())
    writer.close()
    assert [output.getvalue()[before:].count(f"{name}  (hidden 24") for name in ("first", "second")] == [0, 1]


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_failures_and_what_spoils_figures(terminal: bool) -> None:
    console, output = a_console(terminal)
    writer = ConsoleWriter(console, time_tables, case_count=1, quiet=True)
    with writer:
        for row in (*ROWS, a_record(stopped_by="budget")):
            writer.write(row)
    writer.close()
    first, second = output.getvalue().splitlines()
    assert first == "small glu forward float32 tokens=7 wrong: incorrect: output: [bold]wrong[/bold]."
    assert "The budget was spent" in second


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_still_says_what_runs(width: int) -> None:
    console, output = a_console(terminal=True, width=width)
    with ConsoleWriter(console, time_tables, case_count=4) as writer:
        writer.advance(1.5, "case 2/4: smoke")
        writer._progress.refresh()
    assert "case" in output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_an_interruption_leaves_the_terminal_as_it_was(terminal: bool) -> None:
    console, output = a_console(terminal)
    writer = ConsoleWriter(console, time_tables, 1)
    writer.__enter__()
    writer.write(ROWS[0])
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    writer.close()
    assert output.getvalue().count("\x1b[?25h") == output.getvalue().count("\x1b[?25l"), "the cursor is shown again"
    assert "eager" in output.getvalue()


def test_no_rows_print_nothing() -> None:
    assert play(terminal=False, rows=[]) == ""


@pytest.mark.parametrize(("in_any_order", "tables"), [(False, ["a", "b", "a"]), (True, ["a", "b"])])
def test_rows_in_any_order_make_one_table_for_each_shape(in_any_order: bool, tables: list[str]) -> None:
    def spy(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
        yield Text(f"table of {records[0].shape}, {len(records)} rows")

    console, output = a_console(terminal=True)
    writer = ConsoleWriter(console, spy, 3, in_any_order=in_any_order)
    for number, shape in enumerate("aba"):
        writer.write(a_record(shape=shape, tokens=number))
    writer.close()
    assert re.findall(r"table of (\w)", output.getvalue()) == tables
