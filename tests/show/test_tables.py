"""The tables of each command but those of times."""

import dataclasses
import re
from typing import Any

import pytest
from rendered import WIDTHS, assert_every_mark_has_its_reason, assert_fits, shown, unwrapped
from rich.table import Table
from rich.text import Text
from specimens import a_cell, a_check, a_record, a_split_row, a_summary, without_time

from swiglu_bench.rows.record import AuditVerdict, Record, Status
from swiglu_bench.show import tables
from swiglu_bench.show.tables import contract_tables, memory_tables, training_tables, verify_tables


@WIDTHS
def test_memory_above_its_prediction(width: int) -> None:
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
    assert re.search(r"eager .*3\.0 / 12,345\.0 / 0\.500 *\n +2\.0 / 12,344\.0 / 0\.000", text)
    assert re.search(r"mine .*5\.0 / 0\.000 / - *\n.* - / - / -", text)
    assert text.index(" 2 ") < text.index(" 8192 "), "few tokens come first"


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
    assert set(tables.VERIFY) == {name for name in tables.VERIFY if name in f"{header} {missing}"}


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
    text = shown(verify_tables(rows, 80, detail=True), 80)
    assert_fits(text, 80)
    assert "1.0e-7 3.6e-8 2.0e-7 1.0e-6 4.0e-6 7,274 pass" in unwrapped(text)
    assert "FAIL" in text
    assert_every_mark_has_its_reason(text, ["NaN or Inf in 1 of 9 elements", "it broke"])


def row(name: str, **fields: Any) -> Record:
    common = {"task": "llama", "model": "llama-1b", "seeds": 3, "steps": 50, "metric": "perplexity", "unit": "tokens"}
    return a_summary(name, **{**common, **fields})


LEARNT = {"final_loss": 2.5, "final_loss_spread": 0.02, "metric_mean": 12.0, "metric_spread": 0.5}
CURVE = {"difference": -0.001, "rounding": 0.0004, "eager_spread": 0.02, "curve": "within seeds"}
SPEED = {
    "step_ms": 200.0, "rate": 40960.0, "block_share": 0.5, "block_forward_ms": 30.0, "block_backward_ms": 70.0,
    "optimizer_ms": 9.0, "saved_bytes": 2**30, "peak_bytes": 2**31,
}  # fmt: skip
RATIO = {"ratio": 0.95, "ratio_low": 0.948, "ratio_high": 0.953, "verdict": "faster"}
ROWS = [
    row("eager", **LEARNT, **SPEED, verdict="baseline"),
    row("fused-mlp-auto", **LEARNT, **CURVE, **SPEED, **RATIO),
    row("fused", **LEARNT, **CURVE | {"curve": "differs"}, **SPEED, **RATIO, trains="inputs"),
    row("broken", status=Status.ERROR, reason="Seed 0: it broke."),
    row("liger", status=Status.SKIPPED, reason="The package liger_kernel is not installed."),
]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_tables_say_all_and_fit(width: int) -> None:
    text = shown(training_tables(ROWS), width)
    assert_fits(text, width)
    flat = unwrapped(text)
    for part in (
        "2.5000 ± 0.0200", "-0.001", "within seeds", "differs (frozen)", "0.950 ± 0.003 faster 40,960",
        "faster, less work", "30 70 9 50% 1,024.0 2,048.0", "over 3 seeds, ± their spread",
        "another summation order on eager (0.0004)", "spread of eager's seeds (0.02)",
        "fused yields no weight gradients", "error: broken: Seed 0: it broke.",
        "skipped: liger: The package liger_kernel is not installed.",
    ):  # fmt: skip
        assert part in flat, part


CELLS = [
    a_cell(*of)
    for of in (
        ("eager", "glu", "zeros", AuditVerdict.PASS, ""),
        ("eager", "glu", "bias", AuditVerdict.PASS, ""),
        ("mine", "glu", "bias", AuditVerdict.UNSUPPORTED, "it does not offer this"),
        ("mine", "glu", "zeros", AuditVerdict.FAIL, "output: off"),
        ("mine", "mlp", "bias", AuditVerdict.UNSUPPORTED, "it does not offer this"),
        ("idle", "glu", "zeros", AuditVerdict.NOT_RUN, "no GPU"),
        ("idle", "glu", "bias", AuditVerdict.NOT_RUN, "no GPU"),
    )
]


def test_a_matrix_per_scope_a_legend_and_every_reason_once_failures_first() -> None:
    text = shown(contract_tables(CELLS, {"zeros": "All zeros.", "bias": "A bias."}), 100)
    lines = [line.rstrip() for line in text.splitlines()]
    for line in ("eager ✓ ✓", "mine  ✗ –", "idle  · ·", "a zeros: All zeros.", "b bias: A bias."):
        assert line in lines
    assert lines[-3:] == [
        "✗ zeros: output: off [mine (glu)]",
        "– bias: it does not offer this [mine (glu, mlp)]",
        "· every check: no GPU [idle (glu)]",
    ]


SPLIT_FIGURES = {"time_ms": 3.06, "hidden_share": 0.5, "verdict": "baseline"}


def split_row(name: str, **more: object) -> Record:
    return a_split_row(name, shape="made-up", tokens=2048, device="A GPU", **more)


def test_tables_say_every_reason_once():
    found = [split_row("eager"), split_row("mine"), split_row("gone", status=Status.SKIPPED, reason="It is not here.")]
    for timed in found[:2]:
        for name, value in SPLIT_FIGURES.items():
            setattr(timed, name, value)
    found.append(dataclasses.replace(found[-1], tokens=4096))
    found[1].ratio, found[1].verdict = 0.75, "faster"
    found[1].single_reason = "out of memory"
    parts = list(tables.tp_tables(found))
    speed, where = (part for part in parts if isinstance(part, Table))
    assert speed.title == "forward, mlp made-up (1024 x 4096), bfloat16, 4 x A GPU, sequence parallel"
    assert [str(list(column.cells)[1]) for column in speed.columns][1:3] == ["mine", "3.06"]
    assert "50%" in [list(column.cells)[1] for column in where.columns]
    lines = [part.plain for part in parts if isinstance(part, Text)]
    assert "skipped: gone: It is not here." in lines
    assert any("mine" in line and "out of memory" in line for line in lines)
    assert "4 ranks" in tables.tp_line(found[1])
    assert "0.750 of eager, faster" in tables.tp_line(found[1])
