from pathlib import Path

import pytest
from reported import COMMITTED, IN_A_CHECKOUT, audited, awkward, timed, trained, write

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.show.report.load import folders, load, only


def test_a_folder_and_its_csv_are_the_same_rows_and_the_last_of_a_case_on_each_machine_counts(tmp_path: Path) -> None:
    folder = awkward(tmp_path / "run")
    run = load(folder)
    assert (run.name, len(run.records), len(run.audit)) == ("run", 24, 0)
    assert run.about["machine"]["device"] == "A GPU & more"
    assert repr(load(folder / "records.csv").records) == repr(run.records)
    assert len(run.commands) == 2  # the rows' own, and run.json's
    rows = (timed("a", 1, 0.9), timed("a", 1, 0.7), timed("a", 1, 0.8, device="Another GPU"))
    assert [row.ratio for row in load(write(tmp_path / "again", *rows)).records] == [0.7, 0.8]


def test_an_audit_by_its_folder_or_file(tmp_path: Path) -> None:
    folder = audited(tmp_path / "audit")
    for path in (folder, folder / "audit.csv"):
        run = load(path)
        assert (len(run.records), [cell.verdict for cell in run.audit]) == (
            0, ["pass", "fail", "unsupported", "not run"],
        )  # fmt: skip


@IN_A_CHECKOUT
def test_a_folder_of_runs() -> None:
    runs = {file.parent for one in ("records", "train", "tp") for file in COMMITTED.glob(f"**/{one}.csv")}
    assert folders(COMMITTED) == sorted(runs)
    assert folders(COMMITTED / "forward") == [COMMITTED / "forward"]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere does not exist; give a run's folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"holds none of records.csv, audit.csv, train.csv, tp.csv"):
        load(tmp_path)
    (tmp_path / "audit.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"is not an? audit.csv"):
        load(tmp_path)
    (tmp_path / "audit.csv").unlink()
    (write(tmp_path, timed("a", 1, 0.9)) / "run.json").write_text("[", encoding="utf-8")
    with pytest.raises(BadInput, match=r"run.json cannot be read"):
        load(tmp_path)


def test_a_training_by_its_folder_or_file_and_below_a_folder(tmp_path: Path) -> None:
    folder = trained(tmp_path / "gpu" / "train")
    assert folders(tmp_path) == folders(folder) == [folder]
    for path in (folder, folder / "summary.csv"):
        run = load(path)
        assert run.training
        assert (run.name, len(run.records), len(run.audit)) == ("train", 0, 0)
        assert run.commands == ["swiglu-bench train"]


def test_only_some_implementations(tmp_path: Path) -> None:
    runs = [load(trained(tmp_path / "train")), load(awkward(tmp_path / "run")), load(audited(tmp_path / "audit"))]
    (kept,) = only(runs, ["ea*", "slow"])[1:]
    assert {row.implementation for row in kept.records} == {"eager", "slow"}
    training = only(runs, ["lev*", "frozen"])[0].training
    assert training
    assert training.names == ["level", "frozen"]
    assert [run.name for run in only(runs, ["slow"])] == ["run"]
    with pytest.raises(BadInput, match=r"--impl: no row of these runs is of 'eagr'; did you mean eager"):
        only(runs, ["eagr"])
