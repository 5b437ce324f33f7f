import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console, RenderableType

from specimens import a_check, a_record, without_time
from swiglu_bench.record import Record, Status
from swiglu_bench.writers import tables
from swiglu_bench.writers.tables import (
    Notes,
    mebibytes,
    memory_tables,
    milliseconds,
    rate,
    ratio,
    time_line,
    time_tables,
    verify_detail_tables,
    verify_tables,
)

WIDTHS = pytest.mark.parametrize("width", [60, 100, 200])
MARK = re.compile(r"(skipped|incorrect|error|FAIL) \[(\d+)\]")


def shown(renderables: Iterator[RenderableType], width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    for renderable in renderables:
        console.print(renderable)
    return console.export_text()


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def assert_every_mark_has_its_reason(text: str, reasons: Sequence[str]) -> None:
    """Under its table each mark's number stands at the start of a line, with the reason."""
    used = {number for _, number in MARK.findall(text)}
    explained = dict(re.findall(r"^\[(\d+)\] (.*)$", text, flags=re.MULTILINE))
    assert used == set(explained)
    assert used
    for reason in reasons:
        assert reason in unwrapped(text), reason


def assert_fits(text: str, width: int) -> None:
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text


# Figures


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123456, "12.35 us"), (0.9994, "999.4 us"), (1.0, "1 ms"), (12.3456, "12.35 ms"), (9999.0, "9999 ms"),
        (12345.6, "12.35 s"),
    ],
)  # fmt: skip
def test_times(value: float, text: str) -> None:
    assert milliseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0.000"), (1024, "0.001"), (2**20, "1.0"), (3 * 2**19, "1.5"), (10**10, "9536.7")],
)
def test_bytes(value: int | None, text: str) -> None:
    assert mebibytes(value) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"limit_kind": "matmul", "tflops": 712.4}, "712 TFLOP/s"),
        ({"limit_kind": "matmul", "tflops": 7.124}, "7.12 TFLOP/s"),
        ({"limit_kind": "matmul", "tflops": 0.0712}, "71.2 GFLOP/s"),
        ({"limit_kind": "bandwidth", "gbps": 3951.7}, "3952 GB/s"),
        ({"limit_kind": "bandwidth", "gbps": 0.5}, "0.5 GB/s"),
    ],
)
def test_rates(fields: dict[str, Any], text: str) -> None:
    assert rate(a_record(**fields)) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "x0.800 ±0.010"),
        ({"implementation": "eager"}, "baseline"),
        ({"comparable": False, "ratio": None}, "fewer gradients"),
        ({"ratio": None}, "no baseline"),
        ({"baseline": "", "ratio": None}, "no baseline"),
    ],
)
def test_ratios(fields: dict[str, Any], text: str) -> None:
    assert ratio(a_record(**fields)) == text


def test_notes_number_reasons_once() -> None:
    notes = Notes()
    assert [notes.mark(reason) for reason in ("a", "b", "a")] == ["[1]", "[2]", "[1]"]
    assert [line.plain for line in notes.lines()] == ["[1] a", "[2] b"]


# Lines


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (a_record(), "small glu forward float32 tokens=7 mine: ok, 500 us, x0.800 ±0.010, 2 TFLOP/s, 50.0% of limit"),
        (
            without_time(Status.SKIPPED, "It has no backward."),
            "small glu forward float32 tokens=7 mine: skipped: It has no backward.",
        ),
        (
            without_time(Status.OK, "", saved_bytes=2**20, peak_bytes=2**22, workspace_bytes=0),
            "small glu forward float32 tokens=7 mine: ok, saved 1.0 MiB, peak 4.0 MiB, workspace 0.000 MiB",
        ),
        (
            without_time(Status.OK, "", error=1.5e-3, eager_error=2.5e-3),
            "small glu forward float32 tokens=7 mine: ok, worst error 1.50e-03 (eager 2.50e-03)",
        ),
    ],
)
def test_a_row_as_a_line(record: Record, text: str) -> None:
    assert time_line(record) == text


# Tables of times


def a_sweep() -> list[Record]:
    """Two shapes, four token counts, and every way in which a row can end."""
    records = []
    for shape in ("small", "large"):
        for tokens in (1, 128, 4096, 16384):
            same = {"shape": shape, "tokens": tokens}
            records += [
                a_record(implementation="eager", ratio=1.0, time_ms=0.6, **same),
                a_record(implementation="mine", **same),
                a_record(implementation="frozen", time_ms=0.1, comparable=False, ratio=None, **same),
                without_time(Status.SKIPPED, "Triton kernels need a GPU.", implementation="liger", **same),
                without_time(Status.SKIPPED, "Triton kernels need a GPU.", implementation="unsloth", **same),
            ]
            end = without_time(Status.INCORRECT, f"output: relative error {tokens}.", implementation="wrong", **same)
            records.append(end if tokens > 1 else a_record(implementation="wrong", **same))
            end = without_time(Status.ERROR, "RuntimeError: broken", implementation="fused-dw-triton-preact", **same)
            records.append(end)
            end = without_time(Status.SKIPPED, f"It needs about {tokens} GiB.", implementation="big", **same)
            records.append(end if tokens > 128 else a_record(implementation="big", **same))
    return records


@WIDTHS
def test_a_table_per_shape_with_every_mark_explained_under_it(width: int) -> None:
    found = [shown(iter([one]), width) for one in time_tables(a_sweep(), width)]
    assert len(found) == 2
    for text, shape in zip(found, ("small", "large"), strict=True):
        assert text.startswith(f"{shape}  (hidden 24, intermediate 40)")
        reasons = [f"output: relative error {tokens}." for tokens in (128, 4096, 16384)]
        reasons += [f"It needs about {tokens} GiB." for tokens in (4096, 16384)]
        assert_every_mark_has_its_reason(text, [*reasons, "RuntimeError: broken"])
        assert_fits(text, width)
        for number in (1, 128, 4096, 16384):
            assert re.search(rf"^ tokens.*\b{number}\b", text, flags=re.MULTILINE)


@WIDTHS
def test_what_is_skipped_everywhere_for_one_reason_is_one_line(width: int) -> None:
    text = unwrapped(shown(time_tables(a_sweep(), width), width))
    assert text.count("skipped: liger, unsloth: Triton kernels need a GPU.") == 2
    assert text.count("liger") == 2


def test_the_fastest_of_those_that_do_the_same_work_is_marked() -> None:
    records = [record for record in a_sweep() if record.shape == "small" and record.tokens == 128]
    text = shown(time_tables(records, 100), 100)
    (starred,) = [line for line in text.splitlines() if re.search(r"us \*", line)]
    assert starred.split()[0] == "mine"
    assert "fewer gradients" in text
    assert "'fewer gradients' rows do less work (frozen weights) and are not ranked." in unwrapped(text)


def test_one_row_alone_is_not_the_fastest() -> None:
    assert "us *" not in shown(time_tables([a_record()], 100), 100)


def test_the_legend_says_what_the_figures_are() -> None:
    text = unwrapped(shown(time_tables([a_record(rounds=12), a_record(tokens=9, rounds=40)], 100), 100))
    assert "median time of 12 to 40 interleaved rounds" in text
    assert "x: time / eager's time in the same round, ± half its 95% interval" in text
    assert "copy 4000 GB/s, float32 product 700 TFLOP/s" in text
    assert "L2 cold." in text


def test_nothing_is_said_of_what_is_not_there() -> None:
    text = unwrapped(shown(time_tables([a_record(baseline="", ratio=None, l2="cpu")], 100), 100))
    assert "no baseline" in text
    assert "in the same round" not in text
    assert "L2" not in text


def test_scopes_modes_and_dtypes_have_tables_of_their_own() -> None:
    records = [
        a_record(scope=scope, mode=mode, dtype=dtype)
        for scope in ("glu", "mlp")
        for mode in ("forward", "step")
        for dtype in ("float32", "bfloat16")
    ]
    assert len(list(time_tables(records, 100))) == 8


def test_a_sweep_in_which_nothing_ran_still_says_why() -> None:
    text = shown(time_tables([without_time(Status.SKIPPED, "It needs about 900.0 GiB.")], 60), 60)
    assert "skipped: mine: It needs about 900.0 GiB." in text
    assert "median" not in text


def test_no_rows_no_tables() -> None:
    for table in (time_tables, memory_tables, verify_tables):
        assert list(table([], 100)) == []


@WIDTHS
def test_text_in_brackets_is_text(width: int) -> None:
    """Rich reads [red] as a colour unless told otherwise; an error message may hold anything."""
    record = without_time(Status.ERROR, "ValueError: [red]x[/red] [/nonsense] shape [3, 4]", tokens=1)
    text = unwrapped(shown(time_tables([record, a_record()], width), width))
    assert "ValueError: [red]x[/red] [/nonsense] shape [3, 4]" in text


# Tables of memory


@WIDTHS
def test_memory_beside_its_prediction(width: int) -> None:
    figures = {
        "saved_bytes": 3 * 2**20, "predicted_saved_bytes": 2 * 2**20, "peak_bytes": 12345 * 2**20,
        "predicted_peak_bytes": 12344 * 2**20, "workspace_bytes": 2**19, "predicted_workspace_bytes": 0,
    }  # fmt: skip
    records = [
        without_time(Status.OK, "", implementation="eager", tokens=8192, **figures),
        without_time(Status.OK, "", implementation="mine", tokens=8192, saved_bytes=5 * 2**20, peak_bytes=0),
        without_time(Status.INCORRECT, "output: wrong.", implementation="bad", tokens=8192),
        without_time(Status.OK, "", implementation="bad", tokens=2, **figures),
        without_time(Status.SKIPPED, "Triton kernels need a GPU.", implementation="liger", tokens=8192),
    ]
    text = shown(memory_tables(records, width), width)
    assert_every_mark_has_its_reason(text, ["output: wrong."])
    assert_fits(text, width)
    assert "skipped: liger: Triton kernels need a GPU." in text
    if width >= 110:
        assert re.search(r"eager +3\.0 +2\.0 +12345\.0 +12344\.0 +0\.500 +0\.000", text)
        assert re.search(r"mine +5\.0 +- +0\.000 +- +- +-", text)
    else:
        assert re.search(r"eager +3\.0 +12345\.0 +0\.500 *\n +2\.0 +12344\.0 +0\.000", text)
        assert re.search(r"mine +5\.0 +0\.000 +- *\n +- +- +-", text)
        assert "below each, what arithmetic predicts" in unwrapped(text)
    assert text.index(" bad ") < text.index(" eager "), "few tokens come first"


# Tables of verdicts


def some_verdicts() -> list[Record]:
    good = [a_check(tensor=name) for name in ("output (inference)", "output", "x")]
    bad = [*good[:2], a_check(tensor="x", ok=False, error=0.5, reason="relative error 5.00e-01 exceeds 2.00e-07")]
    return [
        without_time(Status.OK, "", implementation="eager", tokens=1, tensor_checks=tuple(good)),
        without_time(Status.OK, "", implementation="eager", tokens=33, tensor_checks=tuple(good)),
        without_time(
            Status.OK,
            "",
            implementation="fused-dw-triton-preact",
            tokens=1,
            tensor_checks=tuple(good),
            interpreted=True,
        ),
        without_time(Status.OK, "", implementation="wrong", tokens=1, tensor_checks=tuple(good)),
        without_time(Status.INCORRECT, "x: wrong.", implementation="wrong", tokens=33, tensor_checks=tuple(bad)),
        without_time(Status.ERROR, "RuntimeError: [3] broken", implementation="broken", tokens=33),
        without_time(Status.SKIPPED, "Triton kernels need a GPU.", implementation="liger", tokens=33),
    ]


@WIDTHS
def test_a_verdict_per_tensor_with_every_failure_explained(width: int) -> None:
    text = shown(verify_tables(some_verdicts(), width), width)
    assert_every_mark_has_its_reason(
        text, ["33 tokens, x: relative error 5.00e-01 exceeds 2.00e-07", "33 tokens: RuntimeError: [3] broken"]
    )
    assert_fits(text, width)
    assert len(re.findall(r"\bpass\b", text)) == 3 + 3 + 2
    assert "verify, 1, 33 tokens" in text
    assert "skipped: liger: Triton kernels need a GPU." in text
    assert "run by Triton's interpreter on the CPU: fused-dw-triton-preact" in unwrapped(text)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_figures_that_do_not_fit_are_left_out_and_named(width: int) -> None:
    text = unwrapped(shown(verify_tables(some_verdicts(), width), width))
    missing = text.partition(f"Not shown in {width} columns: ")[2].partition(".")[0]
    assert bool(missing) == (width < 120)
    header = text.partition("implementation, tensor ")[2].partition(" verdict")[0]
    assert header.split()[:2] == ["error", "ratio"]
    assert set(tables.VERIFY_FIGURES) == {name for name in tables.VERIFY_FIGURES if name in f"{header} {missing}"}


def test_a_verdict_shows_the_error_and_what_it_is_judged_by() -> None:
    check = a_check(error=1e-3, eager_error=2e-3, allowed=3e-3, max_error=4e-2, max_allowed=5e-2)
    text = shown(verify_tables([without_time(Status.OK, "", tensor_checks=(check,))], 200), 200)
    assert re.search(r" mine *\n +output +1\.00e-03 +0\.50 +2\.00e-03 +3\.00e-03 +4\.00e-02 +5\.00e-02 +pass", text)


def test_the_worst_of_the_token_counts_is_shown() -> None:
    records = [
        without_time(Status.OK, "", tokens=tokens, tensor_checks=(a_check(error=error),))
        for tokens, error in ((1, 1e-8), (33, 1.9e-7), (127, 5e-8))
    ]
    text = shown(verify_tables(records, 200), 200)
    assert "1.90e-07" in text
    assert "1.00e-08" not in text


def test_an_eager_without_error_has_no_ratio_to_it() -> None:
    text = shown(verify_tables([without_time(Status.OK, "", tensor_checks=(a_check(eager_error=0.0),))], 200), 200)
    assert re.search(r"1\.00e-07 +- +0\.00e\+00", text)


def test_every_status_has_a_style() -> None:
    assert set(tables.STYLES) == set(Status)


def test_a_ratio_far_off_stays_short() -> None:
    check = a_check(ok=False, reason="r", error=0.5, eager_error=1e-7)
    text = shown(verify_tables([without_time(Status.INCORRECT, "r.", tensor_checks=(check,))], 60), 60)
    assert re.search(r"5\.00e-01 +5e\+06 +FAIL", text)


def test_the_detail_of_each_tensor_and_where_its_worst_element_is() -> None:
    checks = (
        a_check(median_error=3.6e-8, p999_error=2e-7, worst_index=(7, 274)),
        a_check(
            tensor="w_gate", ok=False, reason="NaN or Inf in 1 of 9 elements", check="finite", max_error=float("inf")
        ),
    )
    rows = [
        a_record(command="verify", tensor_checks=checks),
        without_time(Status.ERROR, "it broke", implementation="bad"),
    ]
    text = shown(verify_detail_tables(rows, 80), 80)
    assert_fits(text, 80)
    assert "1.0e-7 3.6e-8 2.0e-7 1.0e-6 4.0e-6 7,274 pass" in unwrapped(text)
    assert "FAIL" in text
    assert_every_mark_has_its_reason(text, ["NaN or Inf in 1 of 9 elements", "it broke"])
