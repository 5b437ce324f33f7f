"""Ratios formed anew to another contender of the same rounds."""

from dataclasses import replace

import pytest
from specimens import a_record

from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.rebase import rebased
from swiglu_bench.spec.errors import BadInput


def row(name: str, times: list[float], **changes: object):
    pair = {"aa_ratio": 1.0, "aa_low": 0.995, "aa_high": 1.005}  # every row of a case has that of its rounds
    return replace(a_record(implementation=name, **pair, **changes), samples_ms=tuple(times))


ROUNDS = range(30)
EAGER = row("eager", [2.0 + 0.1 * (i % 3) for i in ROUNDS], verdict="")
FAST = row("fast", [1.0 + 0.05 * (i % 3) for i in ROUNDS], verdict="faster")
SAME = row("same", [1.002 * (1.0 + 0.05 * (i % 3)) for i in ROUNDS], verdict="faster")
FROZEN = row("frozen", [0.5] * 30, gradients="x", mode="step")


def test_ratios_are_those_of_the_rounds() -> None:
    found = {one.implementation: one for one in rebased(FinishedRun([EAGER, FAST, SAME], {}), "fast").records}
    assert {one.baseline for one in found.values()} == {"fast"}
    assert found["eager"].ratio == pytest.approx(2.0)
    assert (found["eager"].ratio_low, found["eager"].ratio_high, found["eager"].verdict) == (
        pytest.approx(2.0), pytest.approx(2.0), "slower",
    )  # fmt: skip
    assert (found["same"].ratio, found["same"].verdict) == (pytest.approx(1.002), "tie")  # within the A/A pair's reach
    assert (found["fast"].ratio, found["fast"].verdict) == (1.0, "")


def test_one_that_does_less_has_no_ratio() -> None:
    baseline = replace(FAST, mode="step")
    for one in rebased(FinishedRun([baseline, FROZEN], {}), "fast").records[1:]:
        assert (one.ratio, one.verdict, one.comparable) == (None, "", False)


def test_a_case_without_the_baseline_has_no_ratios() -> None:
    alone = replace(EAGER, tokens=9)
    *_, last = rebased(FinishedRun([EAGER, FAST, alone], {}), "fast").records
    assert (last.ratio, last.baseline) == (None, "fast")


def test_a_name_without_rounds_is_refused() -> None:
    with pytest.raises(BadInput, match="--baseline: no row of this run has rounds of 'fats'; did you mean fast"):
        rebased(FinishedRun([EAGER, FAST], {}), "fats")


def test_rows_of_two_gpus_make_no_ratio() -> None:
    one, other = replace(EAGER, gpu_uuid="GPU-0"), replace(FAST, gpu_uuid="GPU-1")
    last, _ = rebased(FinishedRun([one, other], {}), "fast").records
    assert (last.ratio, last.verdict) == (None, "")
