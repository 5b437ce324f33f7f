"""Finished runs and trainings read back, and ratios of their rows."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pandas.testing
import pytest
from places import ROOT
from reported import EVIL, REASON, trained, write
from specimens import a_record, a_summary

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows import finished_run
from swiglu_bench.rows.finished_run import PERMUTED, FinishedRun, find_runs, latest, load_run, rebased, training_folder
from swiglu_bench.rows.record import GpuState, Record, Status, TensorCheck
from swiglu_bench.rows.run_folder import frame_of, read_rows

STATES = (GpuState(1980.0, 120.5, 40.0, ""), GpuState(None, 99.0, None, "power-brake"))
CHECK = TensorCheck(
    "output", False, float("nan"), 1e-3, 2e-3, 0.5, 0.25, 0.75, "too far off", "finite", 1e-4, 0.1, (3, 4)
)
ROWS = [
    a_record(
        implementation="eager", samples_ms=(1.0, 1.5), twin_ms=(1.25, 1.0), states=STATES, tensor_checks=(CHECK,)
    ),
    a_record(status=Status.ERROR, reason="It broke.", time_ms=None, error_ratio=float("nan")),
]  # fmt: skip
ABOUT = {"command": "swiglu-bench forward", "run_id": "r1", "machine": {"device": "cpu"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("run"), *ROWS, **ABOUT)


@pytest.fixture(scope="module")
def run(folder: Path) -> FinishedRun:
    return load_run(folder)


def test_what_was_written_is_read(folder: Path, run: FinishedRun) -> None:
    assert repr(run.records) == repr(ROWS)  # NaN is not equal to itself
    eager, _ = run.records
    assert (eager.samples_ms, eager.twin_ms, eager.states) == ((1.0, 1.5), (1.25, 1.0), STATES)
    assert repr(eager.tensor_checks) == repr((CHECK,))
    assert (run.command, run.about, run.place) == ("forward", ABOUT, folder)
    assert load_run(folder / "records.csv").place == folder
    assert load_run(folder, beside=False).records[0].samples_ms == ()
    pandas.testing.assert_frame_equal(run.frame, frame_of(read_rows(folder)))


def test_the_committed_runs_are_found_and_can_be_read() -> None:
    """Those of older schemas among them."""
    files = list(find_runs(ROOT / "results"))
    assert len(files) > 10
    for number, folder in enumerate(files):
        run = load_run(folder, beside=number % 4 == 0)
        assert run.records
        sampled = number % 4 == 0 and run.command != "train"
        timed = [record for record in run.records if sampled and record.time_ms is not None]
        assert all(len(record.samples_ms) == record.rounds for record in timed)
        assert run.about["run_id"]


def test_what_is_not_a_run_is_told_in_a_sentence(tmp_path: Path) -> None:
    empty, audit, broken = tmp_path / "empty", tmp_path / "audit", write(tmp_path / "broken", *ROWS)
    for folder in (empty, audit):
        folder.mkdir()
    (audit / "audit.csv").touch()
    (broken / "run.json").write_text("[]")
    for path, complaint in (
        (tmp_path / "none", "does not exist; give the folder of a run"),
        (empty, "has no records.csv; give the folder of a run"),
        (audit, "is an audit and has no records.csv"),
        (tmp_path, f"such as {broken}"),
        (broken, "run.json holds no JSON object"),
        (broken / "run.json", "is not a records.csv that this version can read"),
    ):
        with pytest.raises(BadInput, match=complaint):
            load_run(path)
    (broken / "run.json").unlink()
    assert load_run(broken).about == {}
    for name, text, complaint in (
        ("samples.csv", "round,time_ms\n0,1.0\n", "samples.csv cannot be read: it has no column 'run_id'"),
        ("checks.csv", (broken / "checks.csv").read_text().replace("0.001", "much"), "checks.csv cannot be .*'much'"),
    ):
        before = (broken / name).read_text()
        (broken / name).write_text(text)
        with pytest.raises(BadInput, match=complaint):
            load_run(broken)
        (broken / name).write_text(before)


def test_rows_are_chosen_by_column(run: FinishedRun) -> None:
    assert [r.implementation for r in run.only(implementation=["ea*"], tokens=["7"]).records] == ["eager"]
    assert run.only(implementation=[]).records == run.records
    with pytest.raises(BadInput, match="has no implementation 'eagr'; did you mean eager"):
        run.only(implementation=["eagr"])
    other = FinishedRun([*run.records, a_record(implementation="other", tokens=8)], {})
    with pytest.raises(BadInput, match="this run has no row that matches all filters"):
        other.only(implementation=["other"], tokens=["7"])


def test_the_last_row_of_a_case_counts() -> None:
    first, other = a_record(run_id="1", seed=0), a_record(run_id="1", tokens=8)
    second = dataclasses.replace(first, run_id="2", seed=1)
    assert latest([first, other, second]) == [second, other]


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
    assert {(each.aa_ratio, each.aa_low, each.aa_high) for each in found} == {(None, None, None)}, "those are eager's"
    assert ["noise (A/A) of eager" in each.remarks for each in found] == [True, False, True]
    (own,) = rebased(FinishedRun([EAGER], {}), "eager").records
    assert (own.aa_low, own.remarks) == (0.995, "")
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


NAMES = ("level", EVIL, "frozen")


@pytest.fixture
def trained_folder(tmp_path: Path) -> Path:
    return trained(tmp_path / "a" / "run")


def test_what_was_written_is_read_by_its_folder_or_any_of_its_files(trained_folder: Path, tmp_path: Path) -> None:
    files = [trained_folder / name for name in ("train.csv", "summary.csv")]
    paths = (trained_folder, *files, tmp_path, tmp_path / "none" / "train.csv")
    assert [training_folder(path) for path in paths] == [trained_folder] * 3 + [None] * 2
    training = load_run(trained_folder)
    assert [row.implementation for row in training.summaries] == ["eager", PERMUTED, "level", EVIL, "frozen", "absent"]
    level, absent = training.summaries[2], training.summaries[-1]
    assert (level.ratio, level.seeds, level.saved_bytes) == (0.99, 2, None)
    assert (absent.status, absent.reason, absent.final_loss) == (Status.SKIPPED, REASON, None)
    assert (training.losses or {})["level"][1] == pytest.approx([5.005, 4.005, 3.005, 2.005])
    assert training.about["machine"]["torch"] == "2"


def test_its_rows_are_like_those_of_other_runs(trained_folder: Path) -> None:
    run = load_run(trained_folder)
    level, evil, frozen = (next(row for row in run.records if row.implementation == name) for name in NAMES)
    assert (level.shape, level.scope, level.mode, level.hidden) == ("small", "model", "train", 8)
    assert (level.time_ms, level.ratio, level.baseline, level.own.curve) == (2.0, 0.99, "eager", "same")
    assert (level.comparable, frozen.comparable, frozen.status) == (True, False, Status.OK)
    assert run.frame["curve"][2] == "same"
    wrong = finished_run.as_of_all_runs(dataclasses.replace(evil.own, curve="differs"))
    assert (wrong.status, wrong.reason, wrong.time_ms) == ("incorrect", "Its loss curve differs from eager's.", None)


@pytest.mark.parametrize(("name", "column"), [("runs.csv", "steps"), ("summary.csv", "final_loss")])
def test_what_cannot_be_read_is_named(trained_folder: Path, name: str, column: str) -> None:
    (trained_folder / name).write_text((trained_folder / name).read_text().replace(f"{column},", "other,"))
    with pytest.raises(BadInput, match=f"{name} is not a {name}"):
        load_run(trained_folder)
    (trained_folder / "summary.csv").unlink()
    with pytest.raises(BadInput, match=r"is a training run that has not ended: it has no summary.csv"):
        load_run(trained_folder)


def test_one_that_learns_otherwise_fails_unless_it_is_frozen() -> None:
    row = a_summary("x", curve="differs")
    assert row.failed
    assert not dataclasses.replace(row, trains="inputs").failed
    assert not dataclasses.replace(row, curve="within seeds").failed
