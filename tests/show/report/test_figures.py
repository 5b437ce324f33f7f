"""Blocks of documents that are filled from runs."""

from pathlib import Path

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from reported import ROOT, timed, trained, write
from specimens import a_split_row

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.record import LAYOUTS
from swiglu_bench.show.report.figures import fill, pairs
from swiglu_bench.show.writers.csv_file import Table

EAGER, A, B = timed("eager", 1, 1.0), timed("a", 1, 0.5), timed("b", 1, 0.4)


def filled(folder: Path, *blocks: str) -> tuple[str, list[str]]:
    """A document with these blocks, filled twice, and its pictures."""
    document = folder / "page.md"
    parts = (f"<!-- {block} -->\nold\n<!-- end -->\n" for block in blocks)
    document.write_text(f"before\n{''.join(parts)}<!-- table: x -->\nkept\n<!-- end -->\n", encoding="utf-8")
    text, pictures = fill(document)
    document.write_text(text, encoding="utf-8")
    assert fill(document)[0] == text
    assert text.startswith("before\n<!-- ")
    assert text.endswith("<!-- end -->\n<!-- table: x -->\nkept\n<!-- end -->\n")
    return text, sorted(path.relative_to(folder).as_posix() for path in pictures)


def test_a_figure_and_a_sentence_of_a_run(tmp_path: Path) -> None:
    write(tmp_path / "run", EAGER, A, B)
    text, pictures = filled(tmp_path, "figure: run speed-up eager a", "sentence: run eager a")
    assert 'alt="a is the fastest at 1 token: 2.00 times the speed of eager' in text
    assert "\na is the fastest at 1 token: 2.00 times the speed of eager" in text
    assert pictures == [f"docs/figures/run-glu-forward-float32-speed-up{end}.svg" for end in ("-dark", "")]
    assert all(f'"{name}"' in text for name in pictures)
    with pytest.raises(BadInput, match="has 0 charts 'spead'; a figure is one"):
        filled(tmp_path, "figure: run spead")
    with pytest.raises(BadInput, match="has no chart 'memory-and-time': Memory is measured"):
        filled(tmp_path, "figure: run memory-and-time")


def test_a_figure_and_a_sentence_of_a_training(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    text, pictures = filled(tmp_path, "figure: run curves", "sentence: run")
    assert pictures == ["docs/figures/run-curves-dark.svg", "docs/figures/run-curves.svg"]
    assert text.count("that train every weight learn as eager does") == 2


def test_a_figure_of_several_gpus(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"settings": {"implementations": ["eager", "mine"]}}')
    rows = [
        a_split_row("mine", tokens=64, mode=mode, ranks=ranks, time_ms=2.0, single_ms=3.0, efficiency=0.8)
        for mode in ("step", "forward")
        for ranks in (2, 4)
    ]
    Table(tmp_path / "tp.csv", LAYOUTS["tp"].columns()).append([row.row().values() for row in rows])
    text, pictures = filled(tmp_path, "figure: tp.csv scaling mode=step mine")
    assert 'alt="Time and efficiency of mine at s, on 1, 2, 4 GPUs."' in text
    assert pictures == ["docs/figures/scaling-s-dark.svg", "docs/figures/scaling-s.svg"]
    chart, _ = fill(tmp_path / "page.md")[1][tmp_path / pictures[0]]
    assert "step s, 64 tokens" in str(chart.to_dict())
    assert "forward" not in str(chart.to_dict())
    with pytest.raises(BadInput, match="no row is of mode=step eager"):
        filled(tmp_path, "figure: tp.csv scaling mode=step eager")


def test_pairs_that_got_a_verdict_are_counted_in_their_figure(tmp_path: Path) -> None:
    head = "pair,time_ms,ratio,ratio_low,ratio_high,noise,verdict\n"
    (tmp_path / "noise.csv").write_text(f"{head}0,2,1,0.99,1.01,0.01,tie\n1,2,1.1,1.09,1.11,0.01,slower\n")
    chart, said = pairs(tmp_path / "noise.csv")
    assert said.startswith("2 pairs of the same call")
    assert said.endswith("1 of the 95% intervals exclude no difference, and 1 pairs get a verdict.")
    assert "1 verdicts" in str(chart.to_dict()["title"])
    (tmp_path / "noise.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="expected a CSV that `swiglu-bench noise` wrote"):
        pairs(tmp_path / "noise.csv")


@pytest.mark.skipif(not (ROOT / "results").exists(), reason="not in a checkout")
@pytest.mark.parametrize("document", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_the_documents_show_what_their_runs_say(document: Path) -> None:
    text, pictures = fill(document)
    assert text == document.read_text(encoding="utf-8")
    assert all(path.exists() for path in pictures)
