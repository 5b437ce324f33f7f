"""Runs read for a report, cut into sections, and what these say in short."""

import dataclasses
from pathlib import Path

import pytest
from reported import COMMITTED, EVIL, IN_A_CHECKOUT, a_run, audited, awkward, awkward_rows, timed, trained, write
from specimens import a_summary, without_time

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.finished_run import load_training
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.sections import Section, caption, folders, load, only, remarks, sections, training_caption


def test_a_folder_and_its_csv_are_the_same_rows_and_the_last_of_a_case_on_each_machine_counts(tmp_path: Path) -> None:
    folder = awkward(tmp_path / "run")
    run = load(folder)
    assert (run.label, len(run.records), len(run.audit)) == ("run", 24, 0)
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
        assert (run.label, len(run.records), len(run.audit)) == ("train", 6, 0)
        assert run.commands == ["swiglu-bench train"]


def test_only_some_implementations(tmp_path: Path) -> None:
    runs = [load(trained(tmp_path / "train")), load(awkward(tmp_path / "run")), load(audited(tmp_path / "audit"))]
    (kept,) = only(runs, ["ea*", "slow"])[1:]
    assert {row.implementation for row in kept.records} == {"eager", "slow"}
    training = only(runs, ["lev*", "frozen"])[0].training
    assert training
    assert training.names == ["level", "frozen"]
    assert [run.label for run in only(runs, ["slow"])] == ["run"]
    with pytest.raises(BadInput, match=r"--impl: no row of these runs is of 'eagr'; did you mean eager"):
        only(runs, ["eagr"])


def section_of(*rows: Record) -> Section:
    (section, *_) = sections([a_run(*rows)])
    return section


def test_what_spoils_the_figures_is_said() -> None:
    text = "\n".join(remarks(section_of(*awkward_rows())))
    for part in ("frozen", "within 0.20% of 1", "1k tokens.", "2 skipped, 2 incorrect and 2 failed, of 24 rows"):
        assert part in text, part
    busy = timed("a", 1, 0.5, queue_filled=0.5, other_processes=2, remarks="Not checked by the clock.")
    text = "\n".join(remarks(section_of(timed("eager", 1, 1.0), busy)))
    for part in ("a at 1 token (queue_filled)", "Another process used the GPU", "Not checked by the clock."):
        assert part in text, part


@IN_A_CHECKOUT
@pytest.mark.parametrize(
    ("name", "part"),
    [("forward", " times as fast; first most often"), ("memory-mlp", "MiB."), ("verify", "checked rows are right")],
)
def test_captions_of_the_committed_runs(name: str, part: str) -> None:
    assert part in caption(sections([load(COMMITTED / name)])[0])


def test_captions_of_what_has_no_figures() -> None:
    failed = [without_time(Status.ERROR, "no", command=f"swiglu-bench {name}") for name in ("verify", "memory", "step")]
    assert [caption(section_of(row)) for row in failed] == [
        "Nothing was checked.",
        "No memory could be measured.",
        "Nothing was timed beside a baseline in the same rounds.",
    ]


def test_a_training_says_who_learns_the_same_and_whose_step_is_the_shortest(tmp_path: Path) -> None:
    run = load_training(trained(tmp_path / "run"))
    assert training_caption(run) == (
        f"Loss curves: same as eager's: level and {EVIL}. Shortest step: {EVIL}, 0.900 ± 0.002 of eager's "
        "time (faster)."
    )
    rows = [dataclasses.replace(row, curve="differs" if row.implementation == EVIL else row.curve)
            for row in run.summaries]  # fmt: skip
    said = training_caption(dataclasses.replace(run, summaries=rows))
    assert f"differs: {EVIL}. Shortest step: level" in said, "who learns otherwise is not ranked"
    broken = dataclasses.replace(run, summaries=[a_summary("eager", status=Status.ERROR, reason="It broke.")])
    assert training_caption(broken) == "Nothing was trained to the end."
