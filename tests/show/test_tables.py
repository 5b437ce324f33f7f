"""The tables of each command, a row as a line, and what is said of figures that are spoiled."""

import re
from typing import Any

import pytest
from rendered import WIDTHS, assert_every_mark_has_its_reason, assert_fits, shown, unwrapped
from specimens import a_cell, a_check, a_record, without_time

from swiglu_bench.rows.record import AuditVerdict, Record, Status
from swiglu_bench.show.table import nothing_done
from swiglu_bench.show.tables import cautions, contract_tables, memory_tables, time_line, time_tables, verify_tables

PAIR = {"aa_ratio": 1.0002, "aa_low": 0.9991, "aa_high": 1.0013, "regime": "steady"}


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (a_record(verdict="faster"), "ok, 500 us, x0.800 ± 0.010 faster, 2 TFLOP/s, 50.0% of limit"),
        (a_record(baseline="mine", **PAIR), "ok, 500 us, baseline, A/A 1.0002 [0.9991, 1.0013], 2 TFLOP/s, 50.0%"),
        (a_record(comparable=False), "ok, 500 us, fewer gradients, 2 TFLOP/s, 50.0% of limit"),
        (a_record(baseline="", ratio=None), "ok, 500 us, no baseline, 2 TFLOP/s, 50.0% of limit"),
        (without_time(Status.SKIPPED, "It has no backward."), "skipped: It has no backward."),
        (without_time(Status.OK, "", error=1.5e-3, eager_error=2.5e-3), "ok, worst error 1.50e-03 (eager 2.50e-03)"),
    ],
)
def test_a_row_as_a_line(record: Record, text: str) -> None:
    assert time_line(record).startswith(f"small glu forward float32 tokens=7 mine: {text}")


def a_sweep() -> list[Record]:
    """Two shapes, four token counts, and every way in which a row can end."""
    records = []
    for shape in ("small", "large"):
        for tokens in (1, 128, 4096, 16384):
            same = {"shape": shape, "tokens": tokens}
            records += [
                a_record(implementation="eager", ratio=1.0, time_ms=0.6, **same, **PAIR),
                a_record(verdict="faster", **same),
                a_record(implementation="frozen", time_ms=0.1, comparable=False, ratio=None, **same),
                without_time(Status.SKIPPED, "Triton kernels need a GPU.", implementation="liger", **same),
                without_time(Status.SKIPPED, "Triton kernels need a GPU.", implementation="unsloth", **same),
            ]
            end = without_time(Status.INCORRECT, f"output: relative error {tokens}.", implementation="wrong", **same)
            records.append(end if tokens > 1 else a_record(implementation="wrong", **same))
            reason = "ValueError: [red]x[/red] [/nonsense] shape [3, 4]"  # rich reads it as markup unless told not to
            records.append(without_time(Status.ERROR, reason, implementation="fused-dw-triton-preact", **same))
            end = without_time(Status.SKIPPED, f"It needs about {tokens} GiB.", implementation="big", **same)
            records.append(end if tokens > 128 else a_record(implementation="big", **same))
    return records


@WIDTHS
def test_a_table_per_shape_with_every_mark_explained_under_it(width: int) -> None:
    found = [shown(iter([one]), width) for one in time_tables(a_sweep(), width)]
    for text, shape in zip(found, ("small", "large"), strict=True):
        assert text.startswith(f"{shape}  (hidden 24, intermediate 40)")
        reasons = [f"output: relative error {tokens}." for tokens in (128, 4096, 16384)]
        reasons += [f"It needs about {tokens} GiB." for tokens in (4096, 16384)]
        assert_every_mark_has_its_reason(text, [*reasons, "ValueError: [red]x[/red] [/nonsense] shape [3, 4]"])
        assert_fits(text, width)
        assert unwrapped(text).count("skipped: liger, unsloth: Triton kernels need a GPU.") == 1
        assert len(re.findall(r"us (?:\* )?faster\b", text)) == len(re.findall(r"\[0\.9991, 1\.0013\]", text)) == 4


def test_the_fastest_of_those_that_do_the_same_work_is_marked() -> None:
    records = [record for record in a_sweep() if record.shape == "small" and record.tokens == 128]
    text = shown(time_tables(records, 100), 100)
    (starred,) = [line for line in text.splitlines() if re.search(r"us \*", line)]
    assert starred.split()[0] == "mine"
    assert "'fewer gradients' rows do less work (frozen weights) and are not ranked." in unwrapped(text)
    assert "us *" not in shown(time_tables([a_record()], 100), 100), "one row alone is not the fastest"


def test_what_a_caller_feels_is_shown_for_few_tokens_or_when_asked() -> None:
    felt = {"host_us": 163.2, "latency_us": 180.25, "graph_us": 161.5, "uj_per_token": 12345.0, **PAIR}
    records = [a_record(tokens=256, **felt), a_record(tokens=257, **felt | {"latency_us": 91.0})]
    records += [a_record(tokens=1, implementation="liger", **felt | {"graph_us": None, "graph_reason": "It cannot."})]
    few, all_of_them = (shown(time_tables(records, 100, detail), 100) for detail in (False, True))
    for text in (few, all_of_them):
        for part in (
            "163.2 / 180.2 / 161.5",
            "163.2 / 180.2 / -",
            "12.3 mJ a token",
            "no graph time: liger: It cannot.",
        ):
            assert part in unwrapped(text)
        assert ("163.2 / 91 / 161.5" in text) == (text is all_of_them)


def test_a_graph_whose_verdict_is_another_and_what_was_asked_for_are_shown_for_many_tokens() -> None:
    row = {"tokens": 4096, "latency_us": 90.0, "verdict": "faster", "graph_ratio": 1.02}
    assert "in a graph" not in shown(time_tables([a_record(**row, graph_verdict="faster")], 100), 100)
    text = shown(time_tables([a_record(**row, graph_verdict="slower", hot_us=88.5, worst_new_ms=3.25)], 100), 100)
    for part in ("in a graph 1.020x slower", "hot 88.5", "worst new token count 3.25 ms"):
        assert part in unwrapped(text)


CALM = {"stopped_by": "precision", "throttle": "", "other_processes": 0, "gpu_note": ""}


def said(*rows: Record) -> list[str]:
    return [text for text, _ in cautions(rows)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stopped_by": "budget"}, ["budget", "7 tokens"]),
        ({"throttle": "software-power-cap", "throttled_share": 0.83}, ["software-power-cap", "83%", "7 tokens"]),
        ({"other_processes": 2}, ["process", "7 tokens"]),
        ({"gpu_note": "NVML does not answer: Driver Not Loaded."}, ["NVML does not answer: Driver Not Loaded."]),
        ({"remarks": "Not checked by the wall clock."}, ["mine", "7 tokens", "Not checked by the wall clock."]),
    ],
)
def test_what_spoils_the_figures_is_said_once_and_where(changes: dict[str, Any], words: list[str]) -> None:
    spoilt = a_record(**CALM | changes)
    (sentence,) = said(a_record(**CALM, tokens=1024), spoilt, spoilt)
    assert all(word in sentence for word in words)
    assert said(a_record(**CALM)) == []


@pytest.mark.parametrize(
    ("status", "said"), [(Status.INCORRECT, ""), (Status.UNSETTLED, ""), (Status.OK, ""),
                         (Status.SKIPPED, "Nothing that was requested was checked: mine: skipped: why")],
)  # fmt: skip
def test_what_was_judged_is_not_said_to_be_unchecked(status: Status, said: str) -> None:
    assert nothing_done([a_record(implementation="mine", status=status, reason="why")], "checked") == said


def test_memory_above_its_prediction() -> None:
    figures = {
        "saved_bytes": 3 * 2**20, "predicted_saved_bytes": 2 * 2**20, "peak_bytes": 12345 * 2**20,
        "predicted_peak_bytes": 12344 * 2**20, "workspace_bytes": 2**19, "predicted_workspace_bytes": 0,
    }  # fmt: skip
    records = [
        without_time(Status.OK, "", implementation="eager", **figures),
        without_time(Status.OK, "", saved_bytes=5 * 2**20, peak_bytes=0),
        without_time(Status.INCORRECT, "output: wrong.", implementation="bad"),
    ]
    text = shown(memory_tables(records, 100), 100)
    assert_every_mark_has_its_reason(text, ["output: wrong."])
    assert re.search(r"eager +3\.0 / 12,345\.0 / 0\.500 *\n +2\.0 / 12,344\.0 / 0\.000", text)
    assert re.search(r"mine +5\.0 / 0\.000 / - *\n +- / - / -", text)


@pytest.mark.parametrize("width", [60, 200])
def test_a_verdict_per_tensor_with_every_failure_explained(width: int) -> None:
    good = tuple(a_check(tensor=name) for name in ("output (inference)", "output", "x"))
    bad = (*good[:2], a_check(tensor="x", ok=False, error=0.5, reason="relative error 5.00e-01 exceeds 2.00e-07"))
    records = [
        without_time(Status.OK, "", implementation="eager", tokens=33, tensor_checks=good),
        without_time(Status.OK, "", tokens=1, tensor_checks=good, interpreted=True),
        without_time(Status.OK, "", implementation="wrong", tokens=1, tensor_checks=good),
        without_time(Status.INCORRECT, "x: wrong.", implementation="wrong", tokens=33, tensor_checks=bad),
        without_time(Status.ERROR, "RuntimeError: [3] broken", implementation="broken", tokens=33),
    ]
    text = shown(verify_tables(records, width), width)
    reasons = ["33 tokens, x: relative error 5.00e-01 exceeds 2.00e-07", "33 tokens: RuntimeError: [3] broken"]
    assert_every_mark_has_its_reason(text, reasons)
    assert_fits(text, width)
    assert len(re.findall(r"\bpass\b", text)) == 3 + 3 + 2
    assert "run by Triton's interpreter on the CPU: mine" in unwrapped(text)


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
    text = shown(verify_tables([a_record(command="verify", tensor_checks=checks)], 80, detail=True), 80)
    assert "1.0e-7 3.6e-8 2.0e-7 1.0e-6 4.0e-6 7,274 pass" in unwrapped(text)
    assert_every_mark_has_its_reason(text, ["NaN or Inf in 1 of 9 elements"])


def test_a_matrix_per_scope_a_legend_and_every_reason_once_failures_first() -> None:
    cells = [
        a_cell("eager", "glu", "zeros", AuditVerdict.PASS),
        a_cell("eager", "glu", "bias", AuditVerdict.PASS),
        a_cell("mine", "glu", "bias", AuditVerdict.UNSUPPORTED, "it does not offer this"),
        a_cell("mine", "glu", "zeros", AuditVerdict.FAIL, "output: off"),
        a_cell("mine", "mlp", "bias", AuditVerdict.UNSUPPORTED, "it does not offer this"),
        a_cell("idle", "glu", "zeros", AuditVerdict.NOT_RUN, "no GPU"),
        a_cell("idle", "glu", "bias", AuditVerdict.NOT_RUN, "no GPU"),
    ]
    text = shown(contract_tables(cells, {"zeros": "All zeros.", "bias": "A bias."}), 100)
    lines = [line.rstrip() for line in text.splitlines()]
    assert {"eager ✓ ✓", "mine  ✗ –", "idle  · ·"} <= set(lines)
    assert lines[-3:] == [
        "✗ zeros: output: off [mine (glu)]",
        "– bias: it does not offer this [mine (glu, mlp)]",
        "· every check: no GPU [idle (glu)]",
    ]
