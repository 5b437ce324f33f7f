import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

from reported import audited, timed, trained, write
from specimens import a_record

from swiglu_bench.cli import app


def report(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["swiglu-bench", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        app.main()
    return int(exited.value.code or 0)


def test_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path / "runs" / "run", a_record(command="verify", time_ms=None), a_record(time_ms=None, implementation="b")
    )
    audited(tmp_path / "runs" / "audit")
    monkeypatch.chdir(tmp_path)
    assert report(monkeypatch, "runs") == 0
    assert "Report: report.html" in capsys.readouterr().out
    text = Path("report.html").read_text(encoding="utf-8")
    assert "Contract matrix" in text
    assert "swiglu-bench report runs" in text
    assert report(monkeypatch, "runs", "--format", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["page"], len(told["runs"])) == ("report", "report.html", 2)
    assert report(monkeypatch, "runs", "--impl", "mine,none*") == 2
    assert report(monkeypatch, "runs", "--impl", "mine") == 0  # over the page that was there
    text = Path("report.html").read_text(encoding="utf-8")
    assert "Contract matrix" not in text
    assert 'value="b"' not in text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checked, without = a_record(command="verify", time_ms=None), a_record(command="verify", time_ms=None, error=None)
    runs = [write(tmp_path / "run", checked), write(tmp_path / "none", without), trained(tmp_path / "train")]
    folders = {form: tmp_path / form for form in ("svg", "png")}
    chosen = ("--impl", "mine,eager,level,frozen")
    assert report(monkeypatch, *runs, "--svg", folders["svg"], "--png", folders["png"], "--dark", *chosen) == 0
    said = capsys.readouterr().out
    assert "no none-glu-verify-float32-error: These rows carry no error that is a number" in said
    assert f"2 pictures: {folders['png']}" in said
    for form, folder in folders.items():
        names = [f"run-glu-verify-float32-error.{form}", f"train-curves.{form}"]
        assert sorted(path.name for path in folder.iterdir()) == names
    assert (folders["png"] / "train-curves.png").read_bytes().startswith(b"\x89PNG")
    errors, curves = (path.read_text(encoding="utf-8") for path in sorted(folders["svg"].iterdir()))
    assert "How precise, compared with eager?" in errors
    assert "#0d1117" in errors
    assert "below: without frozen" in curves
    assert not Path("report.html").exists()
    assert report(monkeypatch, runs[-1], "--svg", tmp_path / "none", "--impl", "absent") == 0
    assert "no train-curves: Nothing was trained to the end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist; give a run's folder"),
        (["run", "-o", "run/records.csv"], "exists and is not an HTML page; give another name"),
        (["run", "-o", "run"], "--output: run is a folder; give a file"),
        (["run", "--svg", "run/records.csv"], "--svg: run/records.csv cannot be written"),
        (["run", "--dark"], "--dark is for pictures"),
        (["run", "--impl", "nobody"], "no row of these runs is of 'nobody'"),
    ],
)
def test_bad_input_is_one_sentence_and_loses_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    records = write(Path("run"), timed("a", 1, 0.5)) / "records.csv"
    before = records.read_bytes()
    assert report(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
    assert records.read_bytes() == before
