import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import ROOT
from rendered import shown, unwrapped
from specimens import a_record

from swiglu_bench.finished import comparison_tables
from swiglu_bench.finished.change import ChangeKind, Outcome
from swiglu_bench.finished.comparison import Comparison, compare, judge, reaching
from swiglu_bench.measure.statistics import Interval, median_interval, quotient, verdict
from swiglu_bench.rows.finished_run import FinishedRun, load_run
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.spec.errors import BadInput

FORWARD = ROOT / "results/nvidia-h200/2026-11-21/forward"
ABOUT = {
    "machine": {"device": "NVIDIA H200", "torch": "2.11", "power_limit_w": 700.0},
    "settings": {"precision": 0.005},
}


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
    shared = {
        "baseline": "eager", "rounds": rounds, "aa_ratio": pair.median, "aa_low": pair.low, "aa_high": pair.high,
        **changes,
    }  # fmt: skip
    rows = [
        a_record(implementation="eager", samples_ms=tuple(eager), time_ms=float(np.median(eager)), **shared),
        a_record(
            implementation="mine", samples_ms=tuple(mine), time_ms=float(np.median(mine)), ratio=against.median,
            ratio_low=against.low, ratio_high=against.high, **shared,
        ),
    ]  # fmt: skip
    return FinishedRun(rows, about, Path("run"))


def mine(found: Comparison) -> Any:
    (change,) = (change for change in found.changes if change.implementation == "mine")
    return change


def test_a_slower_machine_is_no_regression() -> None:
    found = compare(a_run(), a_run(drift=1.3, seed=1), 0.02)
    assert (found.by, mine(found).verdict, found.outcome) == ("ratio", ChangeKind.TIE, Outcome.FINE)
    (drift,) = (change for change in found.changes if change.implementation == "eager")
    assert drift.verdict is ChangeKind.DRIFT
    assert drift.quotient.median == pytest.approx(1.3, rel=0.02)
    assert "another state" in " ".join(found.warnings)


def test_by_time_a_slower_machine_is_unclear_and_never_hidden() -> None:
    found = compare(a_run(), a_run(drift=1.3, seed=1), 0.02, by="time")
    assert mine(found).outcome is Outcome.UNKNOWN
    assert mine(found).quotient.median == pytest.approx(1.3, rel=0.02)
    assert "eager itself changed x1.299" in mine(found).remark


@pytest.mark.parametrize(
    ("ratio", "expected", "outcome"),
    [
        (0.88, ChangeKind.SLOWER, Outcome.REGRESSION),
        (0.72, ChangeKind.FASTER, Outcome.FINE),
        (0.8, ChangeKind.TIE, Outcome.FINE),
        (0.816, ChangeKind.SLOWER, Outcome.UNKNOWN),
    ],
)
def test_what_changed_is_seen(ratio: float, expected: ChangeKind, outcome: Outcome) -> None:
    found = compare(a_run(spread=0.004, rounds=200), a_run(ratio, spread=0.004, rounds=200, seed=1), 0.02)
    assert (mine(found).verdict, found.outcome) == (expected, outcome)


def test_noise_is_unclear() -> None:
    found = compare(a_run(spread=0.2), a_run(spread=0.2, seed=1), 0.02)
    assert (mine(found).verdict, found.outcome) == (ChangeKind.UNCLEAR, Outcome.UNKNOWN)


def test_equal_runs_get_a_verdict_hardly_ever() -> None:
    """Without the floor of the A/A pairs, too: the interval alone has its 95%."""
    wrong = sum(
        mine(compare(a_run(seed=seed, aa_ratio=None), a_run(seed=1000 + seed, aa_ratio=None), 0.02)).quotient.excludes(
            1
        )
        for seed in range(200)
    )
    assert wrong <= 200 * 0.05


def test_the_quotient_s_interval_is_made_of_the_worst_ends() -> None:
    found = quotient(Interval(1.0, 0.9, 1.2), Interval(2.0, 1.8, 2.5))
    assert (found.median, found.low, found.high) == (0.5, 0.9 / 2.5, 1.2 / 1.8)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.975])
def test_more_confidence_is_a_wider_interval(confidence: float) -> None:
    random = np.random.default_rng(0)
    values = random.exponential(size=(2000, 25))
    held = np.mean([not median_interval(row, confidence).excludes(math.log(2)) for row in values])
    assert held >= confidence - 0.01


def test_the_interval_reaches_as_far_as_the_noise() -> None:
    found = reaching(Interval(1.0, 0.999, 1.03), 0.01)
    assert (found.low, found.high) == (pytest.approx(1 / 1.01), 1.03)


@pytest.mark.parametrize(
    ("low", "high", "verdict", "outcome"),
    [
        (0.97, 0.99, "faster", "fine"),
        (0.97, 1.03, "unclear", "cannot tell"),
        (0.99, 1.01, "tie", "fine"),
        (0.97, 1.01, "unclear", "fine"),
        (1.01, 1.015, "slower", "fine"),
        (1.01, 1.03, "slower", "cannot tell"),
        (1.03, 1.05, "slower", "regression"),
    ],
)
def test_verdicts(low: float, high: float, verdict: str, outcome: str) -> None:
    assert judge(Interval((low + high) / 2, low, high), 0.02) == (verdict, outcome)


def test_without_samples_the_rows_intervals_serve() -> None:
    bare = a_run(ratio=0.9, seed=1)
    without = FinishedRun([dataclasses.replace(r, samples_ms=()) for r in bare.records], ABOUT, bare.place)
    found = compare(a_run(), without, 0.02)
    assert mine(found).verdict is ChangeKind.SLOWER
    assert "The second run has rows without samples" in " ".join(found.warnings)


def test_few_rounds_say_nothing() -> None:
    found = compare(a_run(rounds=5), a_run(rounds=5), 0.02)
    assert mine(found).remark == "5 rounds are too few for an interval"
    assert found.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("status", "expected", "outcome"),
    [
        (Status.INCORRECT, ChangeKind.BROKEN, Outcome.REGRESSION),
        (Status.ERROR, ChangeKind.BROKEN, Outcome.REGRESSION),
        (Status.SKIPPED, ChangeKind.UNCLEAR, Outcome.UNKNOWN),
    ],
)
def test_what_is_not_ok_any_more(status: Status, expected: ChangeKind, outcome: Outcome) -> None:
    def lose(record: Record) -> Record:
        return dataclasses.replace(record, status=status, reason="No.", time_ms=None, samples_ms=())

    good = a_run()
    bad = FinishedRun([good.records[0], lose(good.records[1])], ABOUT, good.place)
    found = compare(good, bad, 0.02)
    assert (mine(found).verdict, mine(found).remark, found.outcome) == (expected, f"{status}: No.", outcome)
    assert mine(compare(bad, good, 0.02)).verdict is ChangeKind.MENDED


def test_memory_is_counted() -> None:
    def a_memory_run(peak: int) -> FinishedRun:
        return FinishedRun(
            [a_record(implementation="mine", time_ms=None, ratio=None, saved_bytes=0, peak_bytes=peak)], {}, None
        )

    found = compare(a_memory_run(100), a_memory_run(103), 0.02)
    assert [(c.figure, c.verdict) for c in found.changes] == [("saved_bytes", "tie"), ("peak_bytes", "more")]
    assert found.outcome is Outcome.REGRESSION
    assert compare(a_memory_run(100), a_memory_run(102), 0.02).outcome is Outcome.FINE


def test_what_else_differs_is_told() -> None:
    other = {
        "machine": {"device": "NVIDIA A100", "torch": "2.12", "power_limit_w": 400.0},
        "settings": {"precision": 0.01},
    }
    found = compare(a_run(), a_run(about=other, l2="hot"), 0.02)
    text = " ".join(found.warnings)
    assert "Other machines: device NVIDIA H200 and NVIDIA A100; power limit 700.0 and 400.0." in text
    assert "Other versions: PyTorch 2.11 and 2.12." in text
    assert "Other methods: L2 cold and hot." in text
    assert "Other methods: precision 0.005 and 0.01." in text
    assert "another build of eager" in text
    assert not compare(a_run(), a_run(seed=1), 0.02).warnings


def test_cases_that_moved_to_another_gpu_are_told() -> None:
    here, there = a_run(gpu_uuid="GPU-0"), a_run(gpu_uuid="GPU-1")
    assert any(text.startswith("1 case was on another GPU") for text in compare(here, there, 0.02).warnings)
    assert not compare(here, here, 0.02).warnings


def test_what_cannot_be_compared() -> None:
    timed = a_run()
    memory = FinishedRun([a_record(time_ms=None, peak_bytes=1)], {}, Path("memory"))
    for other, complaint in (
        (a_run(scope="mlp"), "The runs have other scopes: glu .* and mlp .*--scope"),
        (a_run(mode="step"), "The runs have other modes"),
        (a_run(tokens=9), "no case and implementation in common"),
        (memory, "run has time, memory has memory"),
    ):
        with pytest.raises(BadInput, match=complaint):
            compare(timed, other, 0.02)
    with pytest.raises(BadInput, match="other baselines"):
        compare(timed, a_run(baseline="mine"), 0.02, by="ratio")
    assert compare(timed, a_run(baseline="mine"), 0.02).by == "time"


def test_a_committed_run_made_slower(tmp_path: Path) -> None:
    before = load_run(FORWARD)
    shutil.copytree(FORWARD, tmp_path / "slow")
    after = load_run(tmp_path / "slow")
    for record in after.records:
        if record.implementation == "fused" and record.tokens == 4096:
            record.samples_ms = tuple(1.05 * ms for ms in record.samples_ms)
    found = compare(before, after, 0.02)
    worse = [change for change in found.changes if change.outcome is not Outcome.FINE]
    assert [(c.implementation, c.case[-1], c.verdict) for c in worse] == [("fused", 4096, "slower")]
    text = unwrapped(shown(comparison_tables.tables(found), 100))
    assert "1 regressed by more than 2.00% or broke." in text
    (fused,) = (one for one in before.records if one.implementation == "fused" and one.tokens == 4096)
    assert (
        f"| 4096 | `fused` | x{fused.ratio:.3f} | x{1.05 * fused.ratio:.3f} | x1.050 | "
        in comparison_tables.markdown(found)
    )
    assert "**slower !**" in comparison_tables.markdown(found)
    assert {tuple(row) for row in comparison_tables.rows(found)} == {comparison_tables.COLUMNS}
    assert json.dumps(comparison_tables.rows(found))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_tables_fit(width: int) -> None:
    text = shown(comparison_tables.tables(compare(load_run(FORWARD), load_run(FORWARD), 0.02)), width)
    assert all(len(line) <= width for line in text.splitlines())


def test_the_verdict_of_a_sweep_is_as_it_was() -> None:
    assert verdict(Interval(0.9, 0.89, 0.91), 0.01) == "faster"
