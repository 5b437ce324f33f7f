"""Totals of a workload from rows whose times are known."""

import json
from dataclasses import replace

import numpy as np
import pytest
from specimens import a_record

from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.workload import as_text, totals, workload_of

WORKLOAD = {1: 300.0, 8: 100.0}
PAIR = {"aa_ratio": 1.0, "aa_low": 0.99, "aa_high": 1.01}


def row(name: str, tokens: int, time_ms: float, spread: float = 0.0, seed: int = 0) -> Record:
    """30 rounds around a time; every contender's are independent."""
    times = time_ms * (1 + spread * np.random.default_rng([seed, tokens, len(name)]).standard_normal(30))
    return a_record(
        implementation=name, tokens=tokens, time_ms=float(np.median(times)), samples_ms=tuple(times), **PAIR
    )


def total(name: str, *rows: Record) -> Record:
    (found,) = (one for one in totals(rows, WORKLOAD) if one.implementation == name)
    return found


EAGER = (row("eager", 1, 2.0), row("eager", 8, 10.0))


def test_times_are_weighted_and_ratios_are_those_of_the_sums() -> None:
    found = total("mine", *EAGER, row("mine", 1, 1.0), row("mine", 8, 20.0), row("mine", 3, 99.0))
    assert found.time_ms == pytest.approx((300 * 1 + 100 * 20) / 400)
    assert found.ratio == pytest.approx((300 * 1 + 100 * 20) / (300 * 2 + 100 * 10))
    assert (found.verdict, found.baseline, found.reason) == ("slower", "eager", "")
    base = total("eager", *EAGER)
    assert (base.time_ms, base.ratio, base.verdict) == (pytest.approx(4.0), 1.0, "")


def test_the_interval_holds_the_truth() -> None:
    """The true ratio is 0.9; with 95% confidence at most a few of a hundred intervals miss it."""
    missed = 0
    for seed in range(100):
        rows = [row(name, tokens, factor * tokens, 0.02, seed)
                for name, factor in (("eager", 1.0), ("mine", 0.9)) for tokens in WORKLOAD]  # fmt: skip
        _, low, high = total("mine", *rows).interval or (0, 0, 0)
        missed += not low <= 0.9 <= high
        assert 0 < high - low < 0.1
    assert missed <= 8


def test_what_is_within_the_noise_is_a_tie() -> None:
    assert total("mine", *EAGER, row("mine", 1, 2.0), row("mine", 8, 10.05)).verdict == "tie"


def test_what_is_missing_is_said_and_gives_no_figure() -> None:
    broken = replace(row("mine", 8, 1.0), status=Status.INCORRECT, time_ms=None, samples_ms=())
    found = total("mine", *EAGER, row("mine", 1, 1.0), broken)
    assert (found.time_ms, found.ratio, "8 tokens" in found.reason) == (None, None, True)
    found = total("mine", EAGER[0], row("mine", 1, 1.0), row("mine", 8, 1.0))
    assert found.time_ms is not None
    assert (found.ratio, bool(found.reason)) == (None, True)
    assert totals([replace(one, status=Status.SKIPPED, time_ms=None) for one in EAGER], WORKLOAD) == []


def test_without_samples_the_rows_intervals_are_used() -> None:
    bare = [replace(one, samples_ms=()) for one in (*EAGER, row("mine", 1, 1.0), row("mine", 8, 1.0))]
    assert total("mine", *bare).interval == pytest.approx((0.8, 0.79, 0.81))


def test_json_has_the_totals() -> None:
    run = FinishedRun(EAGER, {"workload": {"1": 300.0, "8": 100.0}})
    told = json.loads(as_text(run, "json"))
    assert told["workload_totals"][0]["time_ms"] == pytest.approx(4.0)
    assert workload_of(told) == WORKLOAD
    assert "workload_totals" not in json.loads(as_text(FinishedRun(EAGER, {}), "json"))
