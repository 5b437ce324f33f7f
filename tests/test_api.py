import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from quiet import quiet_machine

import swiglu_bench
from swiglu_bench.api import Results
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.figures import cell
from swiglu_bench.rows.record import COLUMNS
from swiglu_bench.rows.run_folder import frame_of, read_rows

FORWARD = ROOT / "results/nvidia-h200/forward-narrow"
TINY = {"shapes": "24x40", "tokens": [3, 7], "impl": ["eager", "eager-packed", "fused"], "device": "cpu"}


@pytest.fixture(scope="module")
def found() -> Results:
    with quiet_machine():
        return swiglu_bench.run("forward", **TINY, budget=0.1, in_process=True, progress=False)


def test_rows_come_as_a_frame(found) -> None:
    assert tuple(found.frame.columns) == COLUMNS
    assert len(found) == len(found.frame) == 6
    assert len(found.ok) == 4
    assert list(found["tokens"].unique()) == [3, 7]
    assert set(found.frame[found["status"] == "skipped"]["implementation"]) == {"fused"}
    assert not found.failed
    assert found.place is None
    assert list(found.best()["tokens"]) == [3, 7]
    assert set(found.best()["implementation"]) <= {"eager", "eager-packed"}


def test_the_command_line_that_does_the_same_is_kept(found) -> None:
    words = "--shapes 24x40 --tokens 3,7 --impl eager,eager-packed,fused --device cpu --budget 0.1"
    end = ["--in-process", "--quiet", "--no-csv"]
    assert shlex.split(found.about["command"]) == ["swiglu-bench", "forward", *words.split(), *end]
    assert found.about["options"]["tokens"] == "3,7"
    assert found.about["options"]["impl"] == TINY["impl"]


def test_files_are_written_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few: dict[str, Any] = {"shapes": "24x40", "tokens": 3, "impl": "eager", "device": "cpu", "in_process": True}
    told = swiglu_bench.run("memory", **few, out=str(tmp_path / "run"))
    assert told.place == tmp_path / "run"
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "saved" in printed.err
    again = swiglu_bench.load(tmp_path / "run")
    for one, other in zip(again.records, told.records, strict=True):
        assert list(map(cell, one.row().values())) == list(map(cell, other.row().values()))
    assert json.loads((tmp_path / "run/run.json").read_text())["run_id"] == again.about["run_id"]


def test_a_finished_run_is_loaded_and_compared() -> None:
    run = swiglu_bench.load(FORWARD)
    assert len(run.frame) == len(frame_of(read_rows(FORWARD)))
    against = run.compare(run)
    assert against.outcome == "fine"
    assert not against.warnings
    assert set(against.frame["verdict"]) == {"tie", "drift"}
    assert "no row is worse by more than 2.00%" in repr(against)
    assert "no row is worse" in against._repr_html_()


def test_bad_input_is_one_sentence() -> None:
    for arguments, words in (
        ({"command": "foward"}, "did you mean forward"),
        ({"command": "memory", "l2": "hot"}, "memory has no option 'l2'"),
        ({"token": 3}, "forward has no option 'token'; did you mean tokens"),
        ({"tokens": "x"}, "--tokens: 'x' is not a token count"),
    ):
        with pytest.raises(BadInput, match=words):
            swiglu_bench.run(**arguments)


def test_what_python_shows_of_it() -> None:
    assert dir(swiglu_bench) == ["Step", "__version__", "implementation", "load", "run"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        swiglu_bench.nothing  # noqa: B018
