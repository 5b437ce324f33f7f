from typing import Any

import pytest
from rendered import assert_fits, shown, unwrapped
from specimens import a_summary

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.writers.training_tables import tables


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
    text = shown(tables(ROWS), width)
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


def test_with_one_seed_without_times_and_with_nothing_trained() -> None:
    one = LEARNT | {"seeds": 1, "final_loss_spread": None, "metric_spread": None}
    rows = [row("eager", **one), row("compile", **one | CURVE | {"eager_spread": None, "curve": "unknown"})]
    text = unwrapped(shown(tables(rows), 120))
    assert "over one seed." in text
    assert "(not known, with one seed)" in text
    assert all(part not in text for part in ("Is it faster?", "±"))
    assert shown(tables(ROWS[3:]), 100).startswith("error: broken")
