import dataclasses
from pathlib import Path

import pytest
from reported import EVIL, REASON, trained
from specimens import a_summary

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.finished_run import load_run
from swiglu_bench.rows.record import Status
from swiglu_bench.rows.training import PERMUTED, as_of_all_runs, load_training, training_folder

NAMES = ("level", EVIL, "frozen")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return trained(tmp_path / "a" / "run")


def test_what_was_written_is_read_by_its_folder_or_any_of_its_files(folder: Path, tmp_path: Path) -> None:
    paths = (folder, folder / "train.csv", folder / "summary.csv", tmp_path, tmp_path / "none" / "train.csv")
    assert [training_folder(path) for path in paths] == [folder] * 3 + [None] * 2
    training = load_training(folder)
    assert training.names == ["eager", PERMUTED, "level", EVIL, "frozen", "absent"]
    level, absent = training.summaries[2], training.summaries[-1]
    assert (level.ratio, level.seeds, level.saved_bytes) == (0.99, 2, None)
    assert (absent.status, absent.reason, absent.final_loss) == (Status.SKIPPED, REASON, None)
    assert training.losses["level"][1] == pytest.approx([5.005, 4.005, 3.005, 2.005])
    assert training.about["machine"]["torch"] == "2"


def test_its_rows_are_like_those_of_other_runs(folder: Path) -> None:
    run = load_run(folder)
    level, evil, frozen = (next(row for row in run.records if row.implementation == name) for name in NAMES)
    assert (level.shape, level.scope, level.mode, level.hidden) == ("small", "model", "train", 8)
    assert (level.time_ms, level.ratio, level.baseline, level.own.curve) == (2.0, 0.99, "eager", "same")
    assert (level.comparable, frozen.comparable, frozen.status) == (True, False, Status.OK)
    assert run.frame["curve"][2] == "same"
    wrong = as_of_all_runs(dataclasses.replace(evil.own, curve="differs"))
    assert (wrong.status, wrong.reason, wrong.time_ms) == ("incorrect", "Its loss curve differs from eager's.", None)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("runs.csv", "steps", r"runs.csv is not a runs.csv"),
        ("summary.csv", "final_loss", r"summary.csv is not a summary.csv"),
    ],
)
def test_what_cannot_be_read_is_named(folder: Path, name: str, column: str, message: str) -> None:
    (folder / name).write_text((folder / name).read_text().replace(f"{column},", "other,"))
    with pytest.raises(BadInput, match=message):
        load_training(folder)
    (folder / "summary.csv").unlink()
    with pytest.raises(BadInput, match=r"is a training run that has not ended: it has no summary.csv"):
        load_training(folder)


def test_one_that_learns_otherwise_fails_unless_it_is_frozen() -> None:
    row = a_summary("x", curve="differs")
    assert row.failed
    assert not dataclasses.replace(row, trains="inputs").failed
    assert not dataclasses.replace(row, curve="within seeds").failed
