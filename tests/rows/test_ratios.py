"""Ratios formed anew to another contender of the same rounds."""

from dataclasses import replace

import pytest
from specimens import a_record

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.finished_run import FinishedRun, rebased
from swiglu_bench.rows.record import Record

ROUNDS = range(30)


def row(name: str, times: list[float], **changes: object) -> Record:
    pair = {"aa_ratio": 1.0, "aa_low": 0.995, "aa_high": 1.005}  # every row of a case has that of its rounds
    return a_record(implementation=name, samples_ms=tuple(times), **pair, **changes)


EAGER = row("eager", [2.0 + 0.1 * (i % 3) for i in ROUNDS], verdict="")
FAST = row("fast", [1.0 + 0.05 * (i % 3) for i in ROUNDS], verdict="faster")
SAME = row("same", [1.002 * (1.0 + 0.05 * (i % 3)) for i in ROUNDS], verdict="faster")


def to_fast(*rows: Record) -> list[Record]:
    return list(rebased(FinishedRun(rows, {}), "fast").records)


def test_ratios_are_those_of_the_rounds() -> None:
    eager, fast, same = found = to_fast(EAGER, FAST, SAME)
    assert {one.baseline for one in found} == {"fast"}
    assert (eager.interval, eager.verdict) == (pytest.approx((2.0, 2.0, 2.0)), "slower")
    assert (same.ratio, same.verdict) == (pytest.approx(1.002), "tie"), "within the A/A pair's reach"
    assert (fast.ratio, fast.verdict) == (1.0, "")
    assert [one.baseline for one in (EAGER, FAST, SAME)] == ["eager"] * 3, "the rows themselves stay as they are"


def test_where_there_is_nothing_to_compare_with_there_is_no_ratio() -> None:
    frozen = row("frozen", [0.5] * 30, gradients="x", mode="step")
    *_, less = to_fast(replace(FAST, mode="step"), frozen)
    assert (less.ratio, less.verdict, less.comparable) == (None, "", False)
    *_, alone = to_fast(EAGER, FAST, replace(EAGER, tokens=9))
    assert (alone.ratio, alone.baseline) == (None, "fast")
    elsewhere, _ = to_fast(replace(EAGER, gpu_uuid="GPU-0"), replace(FAST, gpu_uuid="GPU-1"))
    assert (elsewhere.ratio, elsewhere.verdict) == (None, "")


def test_a_name_without_rounds_is_refused() -> None:
    with pytest.raises(BadInput, match="--baseline: no row of this run has rounds of 'fats'; did you mean fast"):
        rebased(FinishedRun([EAGER, FAST], {}), "fats")
