import csv
import subprocess
import sys
from pathlib import Path

import pytest
from reported import COMMITTED, EVIL, IN_A_CHECKOUT, REASON, trained

from swiglu_bench.rows.record import Status
from swiglu_bench.rows.training import PERMUTED
from swiglu_bench.rows.training_run import find, folder_of, load
from swiglu_bench.spec.errors import BadInput


def test_what_was_written_is_read(tmp_path: Path) -> None:
    training = load(trained(tmp_path / "run"))
    assert training.names == ["eager", PERMUTED, "level", EVIL, "frozen", "absent"]
    level, absent = training.summaries[2], training.summaries[-1]
    assert (level.ratio, level.as_expected, level.seeds, level.saved_bytes) == (0.99, False, 2, None)
    assert (absent.status, absent.reason, absent.final_loss) == (Status.SKIPPED, REASON, None)
    assert training.losses["level"] == {
        0: pytest.approx([4.005, 3.005, 2.005, 1.005]),
        1: pytest.approx([5.005, 4.005, 3.005, 2.005]),
    }
    assert training.about["machine"]["torch"] == "2"


def test_a_run_by_its_folder_or_any_of_its_files(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a" / "run")
    assert [folder_of(path) for path in (folder, folder / "train.csv", folder / "summary.csv")] == [folder] * 3
    assert folder_of(tmp_path) is None
    assert folder_of(tmp_path / "none" / "train.csv") is None
    assert list(find(tmp_path)) == [folder]


def test_only_some(tmp_path: Path) -> None:
    training = load(trained(tmp_path / "run"))
    assert training.only(["fr*", "level"]).names == ["level", "frozen"]
    assert "eager" in training.only(["level"]).losses, "what differences are to"
    assert training.only([]) is training
    with pytest.raises(BadInput, match="has no implementation 'levl'; did you mean level"):
        training.only(["levl"])


def test_what_was_not_trained_to_the_end_has_no_losses(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    lines = (folder / "train.csv").read_text().splitlines(keepends=True)
    (folder / "train.csv").write_text("".join(lines[:-3]))
    assert list(load(folder).losses["frozen"]) == [0]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    runs, summary = (folder / "runs.csv").read_text(), (folder / "summary.csv").read_text()
    for name, text, words in (
        ("runs.csv", runs.replace("steps", "stepps"), r"runs.csv is not a runs.csv .*the column stepps is not known"),
        ("runs.csv", runs, r"summary.csv is not a summary.csv"),
    ):
        (folder / name).write_text(text)
        if text == runs:
            (folder / "summary.csv").write_text(summary.replace("final_loss,", "last_loss,"))
        with pytest.raises(BadInput, match=words):
            load(folder)
    (folder / "summary.csv").unlink()
    with pytest.raises(BadInput, match=r"is a training run that has not ended: it has no summary.csv"):
        load(folder)


@IN_A_CHECKOUT
def test_the_committed_run_and_without_torch() -> None:
    folder = COMMITTED / "train-llama"
    code = f"from pathlib import Path; from swiglu_bench.rows.training_run import load; load(Path({str(folder)!r}))"
    code += "; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with (folder / "summary.csv").open() as file:
        names = [row["implementation"] for row in csv.DictReader(file)]
    training = load(folder)
    assert training.names == names
    assert {len(one) for of in training.losses.values() for one in of.values()} == {training.summaries[0].steps}
