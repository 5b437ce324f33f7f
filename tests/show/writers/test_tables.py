import re

import pytest
from rendered import WIDTHS, assert_every_mark_has_its_reason, assert_fits, shown, unwrapped
from specimens import a_check, a_record, without_time

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.writers import tables
from swiglu_bench.show.writers.tables import memory_tables, verify_detail_tables, verify_tables


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
        assert re.search(r"eager +3\.0 +2\.0 +12,345\.0 +12,344\.0 +0\.500 +0\.000", text)
        assert re.search(r"mine +5\.0 +- +0\.000 +- +- +-", text)
    else:
        assert re.search(r"eager +3\.0 +12,345\.0 +0\.500 *\n +2\.0 +12,344\.0 +0\.000", text)
        assert re.search(r"mine +5\.0 +0\.000 +- *\n +- +- +-", text)
        assert "below each, the arithmetic prediction" in unwrapped(text)
    assert text.index(" bad ") < text.index(" eager "), "few tokens come first"


def some_verdicts() -> list[Record]:
    good = [a_check(tensor=name) for name in ("output (inference)", "output", "x")]
    bad = [*good[:2], a_check(tensor="x", ok=False, error=0.5, reason="relative error 5.00e-01 exceeds 2.00e-07")]
    triton = {"implementation": "fused-dw-triton-preact", "interpreted": True}
    return [
        without_time(Status.OK, "", implementation="eager", tokens=1, tensor_checks=tuple(good)),
        without_time(Status.OK, "", implementation="eager", tokens=33, tensor_checks=tuple(good)),
        without_time(Status.OK, "", tokens=1, tensor_checks=tuple(good), **triton),
        without_time(Status.OK, "", implementation="wrong", tokens=1, tensor_checks=tuple(good)),
        without_time(Status.INCORRECT, "x: wrong.", implementation="wrong", tokens=33, tensor_checks=tuple(bad)),
        without_time(Status.ERROR, "RuntimeError: [3] broken", implementation="broken", tokens=33),
        without_time(Status.SKIPPED, "Triton kernels need a GPU.", implementation="liger", tokens=33),
    ]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
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
    missing = unwrapped(text).partition(f"Not shown in {width} columns: ")[2].partition(".")[0]
    assert bool(missing) == (width < 120)
    header = unwrapped(text).partition("implementation, tensor ")[2].partition(" verdict")[0]
    assert header.split()[:2] == ["error", "ratio"]
    assert set(tables.VERIFY_FIGURES) == {name for name in tables.VERIFY_FIGURES if name in f"{header} {missing}"}


@pytest.mark.parametrize(
    ("check", "figures"),
    [
        (
            {"error": 1e-3, "eager_error": 2e-3, "allowed": 3e-3, "max_error": 4e-2, "max_allowed": 5e-2},
            r"1\.00e-03 +0\.50 +2\.00e-03 +3\.00e-03 +4\.00e-02 +5\.00e-02 +pass",
        ),
        ({"eager_error": 0.0}, r"1\.00e-07 +- +0\.00e\+00"),
        ({"ok": False, "reason": "r", "error": 0.5, "eager_error": 1e-7}, r"5\.00e-01 +5e\+06 +1\.00e-07 .* FAIL"),
    ],
)
def test_a_verdict_shows_the_worst_error_and_what_it_is_judged_by(check: dict[str, float], figures: str) -> None:
    small = without_time(Status.OK, "", tokens=1, tensor_checks=(a_check(error=1e-9),))
    worst = without_time(Status.OK, "", tokens=33, tensor_checks=(a_check(**check),))
    text = shown(verify_tables([small, worst, small], 200), 200)
    assert re.search(rf" mine *\n +output +{figures}", text)
    assert "1.00e-09" not in text


def test_the_detail_of_each_tensor_and_where_its_worst_element_is() -> None:
    infinite = {"ok": False, "reason": "NaN or Inf in 1 of 9 elements", "check": "finite", "max_error": float("inf")}
    checks = (a_check(median_error=3.6e-8, p999_error=2e-7, worst_index=(7, 274)), a_check(tensor="w_gate", **infinite))
    rows = [
        a_record(command="verify", tensor_checks=checks),
        without_time(Status.ERROR, "it broke", implementation="bad"),
    ]
    text = shown(verify_detail_tables(rows, 80), 80)
    assert_fits(text, 80)
    assert "1.0e-7 3.6e-8 2.0e-7 1.0e-6 4.0e-6 7,274 pass" in unwrapped(text)
    assert "FAIL" in text
    assert_every_mark_has_its_reason(text, ["NaN or Inf in 1 of 9 elements", "it broke"])
