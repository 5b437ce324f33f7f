"""Runs read for a report, and cut into sections."""

from pathlib import Path

import pytest
from reported import COMMITTED, IN_A_CHECKOUT, a_memory, a_run, awkward, awkward_rows, timed, write

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.record import Record
from swiglu_bench.show.sections import Section, by_work, load, remarks, sections


def test_a_folder_and_its_csv_are_the_same_rows_and_the_last_of_a_case_on_each_machine_counts(tmp_path: Path) -> None:
    folder = awkward(tmp_path / "run")
    run = load(folder)
    assert (run.label, len(run.records), len(run.audit)) == ("run", 24, 0)
    assert run.about["machine"]["device"] == "A GPU & more"
    assert repr(load(folder / "records.csv").records) == repr(run.records)
    assert len(run.commands) == 2  # the rows' own, and run.json's
    rows = (timed("a", 1, 0.9), timed("a", 1, 0.7), timed("a", 1, 0.8, device="Another GPU"))
    assert [row.ratio for row in load(write(tmp_path / "again", *rows)).records] == [0.7, 0.8]


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


def section_of(*rows: Record) -> Section:
    (section, *_) = sections([a_run(*rows)])
    return section


def test_what_spoils_the_figures_is_said() -> None:
    text = "\n".join(remarks(section_of(*awkward_rows())))
    for part in ("frozen at 1 token: fewer gradients", "within 0.20% of 1", "1k tokens."):
        assert part in text, part
    busy = timed("a", 1, 0.5, queue_filled=0.5, other_processes=2, remarks="Not checked by the clock.")
    text = "\n".join(remarks(section_of(timed("eager", 1, 1.0), busy)))
    for part in ("a at 1 token: queue_filled below 1", "Another process used the GPU", "Not checked by the clock."):
        assert part in text, part


@IN_A_CHECKOUT
def test_sections_are_never_mixed() -> None:
    runs = [load(COMMITTED / name) for name in ("forward", "memory-mlp", "step-others")]
    titles = ["forward of glu", "step of mlp", "step of glu", "memory of mlp"]
    assert [section.title for section in sections(runs)] == [f"{title}, bfloat16" for title in titles]


def test_runs_of_one_kind_of_work_are_one_section_unless_they_measured_the_same_case() -> None:
    one, other = (a_run(timed("eager", 1, 1.0), timed(name, 1, 0.5), name=name) for name in "ab")
    longer = a_run(timed("eager", 2, 1.0), timed("c", 2, 0.5), name="c")
    (work,) = by_work(sections([one, longer]))
    assert (work.names, len(work.rows), len(work.of(longer))) == ("a and c", 4, 2)
    assert [work.names for work in by_work(sections([one, other, longer]))] == ["a and c", "b"]


def test_memory_joins_the_times_of_the_same_cases_on_the_same_machine() -> None:
    step = a_run(timed("fast", 1024, 0.5, mode="step"), name="step")
    memory, other = (a_run(a_memory("fast", 1, **of), name="memory") for of in ({}, {"device": "Another GPU"}))
    assert [section.memory_from for section in sections([step, memory])] == [["memory"], ()]
    assert [section.memory_from for section in sections([step, other])] == [(), ()]
