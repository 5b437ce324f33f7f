import sys
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

from reported import ROOT, audited, awkward, timed, trained, write

from swiglu_bench.cli import app
from swiglu_bench.cli import report as command
from swiglu_bench.report import figures, noise_chart
from swiglu_bench.rows.csv_table import Table
from swiglu_bench.rows.ranks import COLUMNS
from swiglu_bench.spec.errors import BadInput


def report(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["swiglu-bench", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        app.main()
    return int(exited.value.code or 0)


def test_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    awkward(tmp_path / "runs" / "run")
    audited(tmp_path / "runs" / "audit")
    monkeypatch.chdir(tmp_path)
    assert report(monkeypatch, "runs") == 0
    assert "Report: report.html" in capsys.readouterr().out
    text = Path("report.html").read_text(encoding="utf-8")
    assert "Contract matrix" in text
    assert "swiglu-bench report runs" in text
    assert report(monkeypatch, "runs", "--impl", "eager,slow") == 0  # over the page that was there
    text = Path("report.html").read_text(encoding="utf-8")
    assert "Contract matrix" not in text
    assert 'value="level"' not in text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", [timed("eager", 1, 1.0), timed("a", 1, 0.5)])
    assert report(monkeypatch, folder, "--svg", tmp_path / "svg", "--png", tmp_path / "png", "--dark") == 0
    said = capsys.readouterr().out
    assert "no run-glu-forward-float32-memory-and-time: Memory is measured" in said
    svg, png = ({path.stem for path in (tmp_path / form).iterdir()} for form in ("svg", "png"))
    assert (
        svg == png == {f"run-glu-forward-float32-{name}" for name in ("speed-up", "fastest", "time", "limit", "error")}
    )
    assert (tmp_path / "png" / "run-glu-forward-float32-time.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "svg" / "run-glu-forward-float32-speed-up.svg").read_text(encoding="utf-8")
    assert "How much faster than eager?" in picture
    assert "#0d1117" in picture
    assert not Path("report.html").exists()


def test_the_curves_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "train")
    assert report(monkeypatch, folder, "--svg", tmp_path / "svg", "--dark", "--impl", "eager,level,frozen") == 0
    assert [path.name for path in (tmp_path / "svg").iterdir()] == ["train-curves.svg"]
    picture = (tmp_path / "svg" / "train-curves.svg").read_text(encoding="utf-8")
    assert "below: without frozen" in picture
    assert "level" in picture
    assert report(monkeypatch, folder, "--svg", tmp_path / "none", "--impl", "absent") == 0
    assert "no train-curves: Nothing was trained to the end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist; give a run's folder"),
        (["run", "-o", "run/records.csv"], "is there and is no HTML page; give another name"),
        (["run", "-o", "run"], "--output: run is a folder; give a file"),
        (["run", "--svg", "run/records.csv"], "--svg: run/records.csv cannot be written"),
        (["run", "--dark"], "--dark is for pictures"),
        (["run", "--impl", "nobody"], "no row of these runs is of 'nobody'"),
    ],
)
def test_bad_input_is_one_sentence_and_loses_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    records = write(Path("run"), [timed("a", 1, 0.5)]) / "records.csv"
    before = records.read_bytes()
    assert report(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
    assert records.read_bytes() == before


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(command.NEEDS, "no_such_module", "no-such-package")
    assert report(monkeypatch, "run") == 2
    assert (
        "report needs no-such-package; install them with: pip install 'swiglu-bench[report]'" in capsys.readouterr().err
    )


def test_a_figure_and_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "run", [timed("eager", 1, 1.0), timed("a", 1, 0.5), timed("b", 1, 0.6)])
    document = tmp_path / "page.md"
    after = "<!-- table: x -->\nkept\n<!-- end -->\n"
    document.write_text(f"before\n<!-- figure: run speed-up eager a -->\nold\n<!-- end -->\n{after}", encoding="utf-8")
    text, pictures = figures.fill(document)
    assert text.startswith("before\n<!-- figure: run speed-up eager a -->\n<picture>\n")
    assert text.endswith(f"</picture>\n<!-- end -->\n{after}")
    assert 'alt="a is the fastest at 1 token: 2.00 times the speed of eager' in text
    names = [path.relative_to(tmp_path).as_posix() for path in pictures]
    assert names == [f"docs/figures/run-glu-forward-float32-speed-up{end}.svg" for end in ("", "-dark")]
    assert all(f'"{name}"' in text for name in names)
    document.write_text(text, encoding="utf-8")
    assert figures.fill(document)[0] == text


def test_a_document_says_in_short_what_its_run_says(tmp_path: Path) -> None:
    write(tmp_path / "run", [timed("eager", 1, 1.0), timed("a", 1, 0.5), timed("b", 1, 0.4)])
    document = tmp_path / "page.md"
    document.write_text("<!-- sentence: run eager a -->\nold\n<!-- end -->\n", encoding="utf-8")
    text, pictures = figures.fill(document)
    assert not pictures
    assert text.splitlines()[1].startswith("a is the fastest at 1 token: 2.00 times the speed of eager")
    document.write_text(text, encoding="utf-8")
    assert figures.fill(document)[0] == text


@pytest.mark.skipif(not (ROOT / "results").exists(), reason="not in a checkout")
@pytest.mark.parametrize("document", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_the_documents_show_what_their_runs_say(document: Path) -> None:
    text, pictures = figures.fill(document)
    assert text == document.read_text(encoding="utf-8")
    assert all(path.exists() for path in pictures)


def test_a_figure_and_a_sentence_of_a_training(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    document = tmp_path / "page.md"
    document.write_text(
        "<!-- figure: run curves -->\n<!-- end -->\n<!-- sentence: run -->\n<!-- end -->\n", encoding="utf-8"
    )
    text, pictures = figures.fill(document)
    assert sorted(path.name for path in pictures) == ["run-curves-dark.svg", "run-curves.svg"]
    assert text.count("that train every weight learn as eager does") == 2


def test_a_figure_of_several_gpus(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"settings": {"implementations": ["eager", "mine"]}}')
    row = {
        "shape": "s", "tokens": "64", "dtype": "bfloat16", "sequence_parallel": "true", "implementation": "mine",
        "time_ms": "2", "single_ms": "3", "efficiency": "0.8",
    }  # fmt: skip
    named = [
        dict.fromkeys(COLUMNS, "") | row | {"mode": mode, "ranks": str(ranks)}
        for mode in ("step", "forward")
        for ranks in (2, 4)
    ]
    Table(tmp_path / "tp.csv", COLUMNS).append([row.values() for row in named])
    document = tmp_path / "page.md"
    document.write_text("<!-- figure: tp.csv scaling mode=step mine -->\n<!-- end -->\n", encoding="utf-8")
    text, pictures = figures.fill(document)
    assert 'alt="Time and efficiency of mine at s, on 1, 2, 4 GPUs."' in text
    assert sorted(path.name for path in pictures) == ["scaling-s-dark.svg", "scaling-s.svg"]
    assert all(b"step s, 64 tokens" in one and b"forward" not in one for one in pictures.values())
    document.write_text("<!-- figure: tp.csv scaling mode=step -->\n<!-- end -->\n", encoding="utf-8")
    assert figures.fill(document)[1] == pictures, "without names all are drawn"
    document.write_text("<!-- figure: tp.csv scaling mode=step eager -->\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(BadInput, match="no row is of mode=step eager"):
        figures.fill(document)


def test_pairs_that_got_a_verdict_are_counted_in_their_figure(tmp_path: Path) -> None:
    head = "pair,time_ms,ratio,ratio_low,ratio_high,noise,verdict\n"
    (tmp_path / "noise.csv").write_text(f"{head}0,2,1,0.99,1.01,0.01,tie\n1,2,1.1,1.09,1.11,0.01,slower\n")
    chart, said = noise_chart.pairs(tmp_path / "noise.csv")
    assert "2 pairs of the same call" in said
    assert said.endswith("1 of the 95% intervals exclude no difference, and 1 pairs get a verdict.")
    assert "1 verdicts" in str(chart.to_dict()["title"])


def test_a_csv_that_noise_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "noise.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="expected a CSV that `swiglu-bench noise` wrote"):
        noise_chart.pairs(tmp_path / "noise.csv")
