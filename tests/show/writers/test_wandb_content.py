import math

from specimens import a_bare_record, a_record

from swiglu_bench.rows.record import Status
from swiglu_bench.show.writers.wandb_content import summarize


def test_summary() -> None:
    records = [
        a_record(implementation="eager", ratio=1.0, error_ratio=0.5),
        a_record(implementation="fused", ratio=0.8, error_ratio=0.25),
        a_record(implementation="fused", ratio=0.6, tokens=8192, error_ratio=None),
        a_bare_record(implementation="fused", tokens=1, status=Status.INCORRECT, error_ratio=9.0),
        a_bare_record(implementation="liger", status=Status.SKIPPED),
    ]
    assert summarize(records) == {
        "best_ratio/eager": 1.0, "median_ratio/eager": 1.0, "worst_error_ratio/eager": 0.5,
        "rows_ok/eager": 1, "rows_skipped/eager": 0, "rows_incorrect/eager": 0, "rows_error/eager": 0,
        "rows_unsettled/eager": 0,
        "best_ratio/fused": 0.6, "median_ratio/fused": 0.7, "worst_error_ratio/fused": 9.0,
        "rows_ok/fused": 2, "rows_skipped/fused": 0, "rows_incorrect/fused": 1, "rows_error/fused": 0,
        "rows_unsettled/fused": 0,
        "fastest_at/eager": 0, "fastest_at/fused": 2, "best_implementation": "fused", "best_median_ratio": 0.7,
        "failures": 1, "rows_ok/liger": 0, "rows_skipped/liger": 1, "rows_incorrect/liger": 0, "rows_error/liger": 0,
        "rows_unsettled/liger": 0,
    }  # fmt: skip


def test_an_error_that_is_no_number_is_the_worst() -> None:
    worst = summarize([a_record(error_ratio=math.nan, status=Status.INCORRECT), a_record(error_ratio=9.0)])
    assert math.isnan(float(worst["worst_error_ratio/mine"]))
