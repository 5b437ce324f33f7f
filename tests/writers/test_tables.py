import re

import pytest
from rendered import WIDTHS, assert_every_mark_has_its_reason, assert_fits, shown, unwrapped
from specimens import a_check, a_record, without_time

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.writers import tables
from swiglu_bench.writers.tables import Notes, mebibytes, memory_tables, verify_detail_tables, verify_tables

# Figures


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0.000"), (1024, "0.001"), (2**20, "1.0"), (3 * 2**19, "1.5"), (10**10, "9536.7")],
)
def test_bytes(value: int | None, text: str) -> None:
    assert mebibytes(value) == text


def test_notes_number_reasons_once() -> None:
    notes = Notes()
    assert [notes.mark(reason) for reason in ("a", "b", "a")] == ["[1]", "[2]", "[1]"]
    assert [line.plain for line in notes.lines()] == ["[1] a", "[2] b"]


def test_no_rows_no_tables() -> None:
    for table in (memory_tables, verify_tables):
        assert list(table([], 100)) == []


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
