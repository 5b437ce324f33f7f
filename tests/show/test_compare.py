"""Two runs compared row by row."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rendered import shown, unwrapped
from specimens import a_record

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.measure.statistics import Interval, median_interval
from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.record import Status
from swiglu_bench.show import compare as comparing
from swiglu_bench.show.compare import Change, ChangeKind, Comparison, Effect, compare, conclusion, judge

MACHINE = {"device": "NVIDIA H200", "torch": "2.11", "power_limit_w": 700.0}
ABOUT = {"machine": MACHINE, "settings": {"precision": 0.005}}


def a_run(
    ratio: float = 0.8, drift: float = 1.0, spread: float = 0.01, seed: int = 0, rounds: int = 60, about: Any = ABOUT,
    **changes: Any,
) -> FinishedRun:  # fmt: skip
    """Eager and mine in common rounds: what drifts hits both."""
    random = np.random.default_rng(seed)

    def noise() -> np.ndarray:
        return np.exp(random.normal(0, spread, rounds))

    common = drift * noise()
    eager, twin, mine = common * noise(), common * noise(), ratio * common * noise()
    pair, against = median_interval(twin / eager), median_interval(mine / eager)
    pair_figures = {"aa_ratio": pair.median, "aa_low": pair.low, "aa_high": pair.high}
    shared = {"baseline": "eager", "rounds": rounds, **pair_figures, **changes}
    rows = [
        a_record(implementation="eager", samples_ms=tuple(eager), time_ms=float(np.median(eager)), **shared),
        a_record(
            implementation="mine", samples_ms=tuple(mine), time_ms=float(np.median(mine)), ratio=against.median,
            ratio_low=against.low, ratio_high=against.high, **shared,
        ),
    ]  # fmt: skip
    return FinishedRun(rows, about, Path("run"))


def changed(run: FinishedRun, **changes: Any) -> FinishedRun:
    """The run with other values in the row of mine."""
    eager, mine = run.records
    return dataclasses.replace(run, records=[eager, dataclasses.replace(mine, **changes)])


def mine(found: Comparison) -> Change:
    (change,) = (change for change in found.changes if change.implementation == "mine")
    return change


def test_a_slower_machine_is_no_regression() -> None:
    found = compare(a_run(), a_run(drift=1.3, seed=1), 0.02)
    assert (found.by, mine(found).verdict, found.outcome) == ("ratio", ChangeKind.TIE, Effect.FINE)
    (drift,) = (change for change in found.changes if change.implementation == "eager")
    assert drift.verdict is ChangeKind.DRIFT
    assert drift.quotient
    assert drift.quotient.median == pytest.approx(1.3, rel=0.02)
    assert "another state" in " ".join(found.warnings)


def test_by_time_a_slower_machine_is_unclear_and_never_hidden() -> None:
    found = compare(a_run(), a_run(drift=1.3, seed=1), 0.02, by="time")
    assert mine(found).outcome is Effect.UNKNOWN
    assert "eager itself changed x1.299" in mine(found).remark


@pytest.mark.parametrize(
    ("ratio", "expected", "outcome"),
    [
        (0.88, ChangeKind.SLOWER, Effect.REGRESSION), (0.72, ChangeKind.FASTER, Effect.FINE),
        (0.8, ChangeKind.TIE, Effect.FINE), (0.816, ChangeKind.SLOWER, Effect.UNKNOWN),
    ],
)  # fmt: skip
def test_what_changed_is_seen(ratio: float, expected: ChangeKind, outcome: Effect) -> None:
    found = compare(a_run(spread=0.004, rounds=200), a_run(ratio, spread=0.004, rounds=200, seed=1), 0.02)
    assert (mine(found).verdict, found.outcome) == (expected, outcome)


def test_noise_and_few_rounds_say_nothing() -> None:
    found = compare(a_run(spread=0.2), a_run(spread=0.2, seed=1), 0.02)
    assert (mine(found).verdict, found.outcome) == (ChangeKind.UNCLEAR, Effect.UNKNOWN)
    found = compare(a_run(rounds=5), a_run(rounds=5), 0.02)
    assert (mine(found).remark, found.outcome) == ("5 rounds are too few for an interval", Effect.UNKNOWN)


def test_equal_runs_get_a_verdict_hardly_ever() -> None:
    """Without the floor of the A/A pairs, too: the interval alone has its 95%."""
    runs = [a_run(seed=seed, aa_low=None) for seed in range(200)]
    pairs = (mine(compare(one, other, 0.02)).quotient for one, other in zip(runs[::2], runs[1::2], strict=True))
    assert sum(found is not None and found.excludes(1) for found in pairs) <= 100 * 0.05


@pytest.mark.parametrize(
    ("low", "high", "verdict", "outcome"),
    [
        (0.97, 0.99, "faster", "fine"), (0.97, 1.03, "unclear", "cannot tell"), (0.99, 1.01, "tie", "fine"),
        (0.97, 1.01, "unclear", "fine"), (1.01, 1.015, "slower", "fine"), (1.01, 1.03, "slower", "cannot tell"),
        (1.03, 1.05, "slower", "regression"),
    ],
)  # fmt: skip
def test_verdicts(low: float, high: float, verdict: str, outcome: str) -> None:
    assert judge(Interval((low + high) / 2, low, high), 0.02) == (verdict, outcome)


def test_without_samples_the_rows_intervals_serve_and_without_those_the_times() -> None:
    found = compare(a_run(), changed(a_run(ratio=0.9, seed=1), samples_ms=()), 0.02)
    assert mine(found).verdict is ChangeKind.SLOWER
    assert "The second run has rows without samples" in " ".join(found.warnings)
    found = compare(a_run(), changed(a_run(ratio=0.9), samples_ms=(), ratio_low=None), 0.02)
    assert (mine(found).figure, mine(found).remark) == (
        "time_ms", "by time: it has no ratio to the baseline in both runs",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "expected", "outcome"),
    [
        (Status.INCORRECT, ChangeKind.BROKEN, Effect.REGRESSION),
        (Status.ERROR, ChangeKind.BROKEN, Effect.REGRESSION),
        (Status.SKIPPED, ChangeKind.UNCLEAR, Effect.UNKNOWN),
    ],
)
def test_what_is_not_ok_any_more(status: Status, expected: ChangeKind, outcome: Effect) -> None:
    good = a_run()
    bad = changed(good, status=status, reason="No.", time_ms=None, samples_ms=())
    found = compare(good, bad, 0.02)
    assert (mine(found).verdict, mine(found).remark, found.outcome) == (expected, f"{status}: No.", outcome)
    assert mine(compare(bad, good, 0.02)).verdict is ChangeKind.MENDED


def a_memory_run(peak: int) -> FinishedRun:
    return FinishedRun([a_record(time_ms=None, ratio=None, saved_bytes=0, peak_bytes=peak)], {}, Path("memory"))


def test_memory_is_counted() -> None:
    found = compare(a_memory_run(100), a_memory_run(103), 0.02)
    assert [(c.figure, c.verdict) for c in found.changes] == [("saved_bytes", "tie"), ("peak_bytes", "more")]
    assert found.outcome is Effect.REGRESSION
    assert compare(a_memory_run(100), a_memory_run(102), 0.02).outcome is Effect.FINE


def test_what_else_differs_is_told() -> None:
    machine = {"device": "NVIDIA A100", "torch": "2.12", "power_limit_w": 400.0}
    found = compare(a_run(), a_run(about={"machine": machine, "settings": {"precision": 0.01}}, l2="hot"), 0.02)
    text = " ".join(found.warnings)
    for part in ("NVIDIA H200 and NVIDIA A100", "PyTorch 2.11 and 2.12.", "L2 cold and hot", "another build of eager"):
        assert part in text
    assert not compare(a_run(), a_run(seed=1), 0.02).warnings
    here, there = a_run(gpu_uuid="GPU-0"), a_run(gpu_uuid="GPU-1", other_processes=1)
    moved, crowded = compare(here, there, 0.02).warnings
    assert moved.startswith("1 case was on another GPU")
    assert crowded == "Another process used the GPU during the second run."
    assert not compare(here, here, 0.02).warnings
    (told,) = compare(changed(a_run(), packages="liger-kernel==0.7.0"), a_run(), 0.02).warnings
    assert told == "mine ran with liger-kernel==0.7.0 before, and with this environment's packages after."
    more = dataclasses.replace(a_run(), records=[*a_run().records, a_record(implementation="new")])
    *_, told = compare(a_run(), more, 0.02).warnings
    assert told == "Only the second run has 1 rows, such as small glu forward float32 tokens=7, of new."


def test_what_cannot_be_compared() -> None:
    for other, complaint in (
        (a_run(scope="mlp"), "The runs have different scopes: glu .* and mlp .*--scope"),
        (a_run(mode="step"), "The runs have different modes"),
        (a_run(tokens=9), "no case and implementation in common"),
        (a_memory_run(1), "run has time, memory has memory"),
    ):
        with pytest.raises(BadInput, match=complaint):
            compare(a_run(), other, 0.02)
    with pytest.raises(BadInput, match="different baselines"):
        compare(a_run(), a_run(baseline="mine"), 0.02, by="ratio")
    assert compare(a_run(), a_run(baseline="mine"), 0.02).by == "time"


def test_the_tables_the_markdown_and_the_rows() -> None:
    before, after = a_run(spread=0.002, rounds=300), a_run(ratio=0.88, spread=0.002, rounds=300)
    found = compare(before, after, 0.02)
    assert "1 regressed by more than 2.00% or broke." in unwrapped(shown(comparing.comparison_tables(found), 60))
    assert "**slower !**" in comparing.comparison_markdown(found)
    assert [tuple(change.row()) for change in found.changes] == [comparing.COLUMNS] * 2
    assert "in 1 of the rows one beyond 0 cannot be ruled out." in conclusion(compare(before, before, 0.0))
