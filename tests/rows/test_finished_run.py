import dataclasses
import json
from pathlib import Path

import pandas.testing
import pytest
from places import ROOT
from specimens import a_record

from swiglu_bench.rows.finished_run import find_runs, latest, load_run
from swiglu_bench.rows.record import GpuState, Record, Status, TensorCheck
from swiglu_bench.rows.run_folder import read_records, write_run_file
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.writers.csv_file import CsvFile

RESULTS = ROOT / "results" / "nvidia-h200"
COMMITTED = sorted(RESULTS.rglob("records.csv"))
STATES = (GpuState(1980.0, 120.5, 40.0, ""), GpuState(None, 99.0, None, "power-brake"))
CHECK = TensorCheck(
    "output", False, float("nan"), 1e-3, 2e-3, 0.5, 0.25, 0.75, "too far off", "finite", 1e-4, 0.1, (3, 4)
)
ROWS = [
    a_record(
        implementation="eager", command="swiglu-bench forward", samples_ms=(1.0, 1.5), twin_ms=(1.25, 1.0),
        states=STATES, tensor_checks=(CHECK,),
    ),
    a_record(
        command="swiglu-bench forward", status=Status.ERROR, reason="It broke.", time_ms=None, error_ratio=float("nan")
    ),
]  # fmt: skip


def keep(folder: Path, rows: list[Record]) -> Path:
    folder.mkdir(exist_ok=True)
    files = CsvFile(folder)
    for row in rows:
        files.write(row)
    files.close()
    write_run_file(folder, {"command": "swiglu-bench forward", "run_id": "r1", "machine": {"device": "cpu"}})
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    run = load_run(keep(tmp_path / "run", ROWS))
    assert repr(run.records) == repr(ROWS)  # NaN is not equal to itself
    assert run.records[0].samples_ms == (1.0, 1.5)
    assert run.records[0].twin_ms == (1.25, 1.0)
    assert run.records[0].states == STATES
    assert repr(run.records[0].tensor_checks) == repr((CHECK,))
    assert run.command == "forward"
    assert run.about["machine"] == {"device": "cpu"}
    assert load_run(tmp_path / "run" / "records.csv").place == tmp_path / "run"


def test_the_frame_is_that_of_the_file(tmp_path: Path) -> None:
    folder = keep(tmp_path / "run", ROWS)
    pandas.testing.assert_frame_equal(load_run(folder).frame, read_records(folder))


@pytest.mark.parametrize("file", COMMITTED, ids=[str(file.parent.relative_to(RESULTS)) for file in COMMITTED])
def test_the_committed_runs_can_be_read(file: Path) -> None:
    run = load_run(file.parent)
    assert len(run.records) == len(read_records(file))
    timed = [record for record in run.records if record.time_ms is not None]
    assert all(len(record.samples_ms) == record.rounds for record in timed)
    assert run.about["run_id"]


def test_the_committed_runs_are_found() -> None:
    assert COMMITTED
    assert list(find_runs(RESULTS)) == COMMITTED


def test_what_is_not_a_run_is_told_in_a_sentence(tmp_path: Path) -> None:
    empty, audit, broken = tmp_path / "empty", tmp_path / "audit", keep(tmp_path / "broken", ROWS)
    for folder in (empty, audit):
        folder.mkdir()
    (audit / "audit.csv").touch()
    (broken / "run.json").write_text("[]")
    for path, complaint in (
        (tmp_path / "none", "does not exist; give the folder of a run"),
        (empty, "has no records.csv; give the folder of a run"),
        (audit, "is an audit and has no records.csv"),
        (tmp_path, f"such as {broken}"),
        (broken, "run.json holds no object"),
        (broken / "run.json", "is not a records.csv that this version can read"),
    ):
        with pytest.raises(BadInput, match=complaint):
            load_run(path)


def test_broken_samples_are_told(tmp_path: Path) -> None:
    folder = keep(tmp_path / "run", ROWS)
    (folder / "samples.csv").write_text("round,time_ms\n0,1.0\n")
    with pytest.raises(BadInput, match=r"samples.csv cannot be read: it has no column 'run_id'"):
        load_run(folder)


def test_rows_are_chosen_by_column(tmp_path: Path) -> None:
    run = load_run(keep(tmp_path / "run", ROWS))
    assert [r.implementation for r in run.only(implementation=["ea*"], tokens=["7"]).records] == ["eager"]
    assert run.only(implementation=[]).records == run.records
    with pytest.raises(BadInput, match="has no implementation 'eagr'; did you mean eager"):
        run.only(implementation=["eagr"])


def test_the_last_row_of_a_case_counts() -> None:
    first, other = a_record(run_id="1", seed=0), a_record(run_id="1", tokens=8)
    second = dataclasses.replace(first, run_id="2", seed=1)
    assert latest([first, other, second]) == [second, other]


def test_the_metadata_may_be_missing(tmp_path: Path) -> None:
    folder = keep(tmp_path / "run", ROWS)
    assert json.loads((folder / "run.json").read_text())
    (folder / "run.json").unlink()
    assert load_run(folder).about == {}
