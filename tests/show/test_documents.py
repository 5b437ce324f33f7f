"""Blocks of documents that are filled from runs, and pictures in folders."""

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from documents import TABLES, fill_blocks, fill_figures
from reported import ROOT, timed, trained, write
from specimens import a_bare_record, a_split_row

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.record import LAYOUTS, Record, Status
from swiglu_bench.show.charts import scaling_points
from swiglu_bench.show.pictures import save_scaling
from swiglu_bench.show.text import Table

DOCUMENTS = [ROOT / "README.md", ROOT / "results" / "README.md", *(ROOT / "docs").glob("*.md")]
TIMED = {"baseline": "a", "ratio_low": 0.49, "ratio_high": 0.51}
ROWS = [
    a_bare_record(implementation="a", tokens=1, time_ms=2.0, baseline="a", ratio=1.0, ratio_low=1.0, ratio_high=1.0),
    a_bare_record(implementation="b", tokens=1, time_ms=1.0, ratio=0.5, peak_bytes=3 << 29, **TIMED),
    a_bare_record(implementation="frozen", tokens=1, time_ms=0.1, comparable=False),
    a_bare_record(implementation="b", tokens=1024, status=Status.ERROR, reason="broke", peak_bytes=1 << 20),
]


def filled(folder: Path, block: str) -> list[str]:
    """What a block holds after it was filled twice."""
    document = folder / "page.md"
    document.write_text(f"before\n<!-- {block} -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    document.write_text(fill_blocks(document, TABLES), encoding="utf-8")
    text = fill_blocks(document, TABLES)
    assert text == document.read_text(encoding="utf-8")
    before, start, *content, end, after = text.splitlines()
    assert (before, start, end, after) == ("before", f"<!-- {block} -->", "<!-- end -->", "after")
    return content


def test_a_table_of_one_figure(tmp_path: Path) -> None:
    write(tmp_path, *ROWS)
    assert filled(tmp_path, "table: records.csv figure=time_ms")[2:] == [
        "| `a` | 2 |",
        "| `b` | 1 |",
        "| `frozen` | 0.1 |",
    ]
    assert filled(tmp_path, "table: records.csv b figure=peak_bytes") == [
        "| tokens | 1 | 1,024 |", "| --- | ---: | ---: |", "| `b` | 1,536 MiB | 1 MiB |",
    ]  # fmt: skip
    for words in ("figure=speed", "figure=energy_j", "figure=time_ms scope=mlp"):
        with pytest.raises(ValueError, match=f"{words.split()[0]}.*: these rows have no such figure"):
            filled(tmp_path, f"table: records.csv {words}")
    write(tmp_path / "twice", *ROWS, *ROWS)
    with pytest.raises(ValueError, match="Several rows for one cell"):
        filled(tmp_path, "table: twice/records.csv figure=time_ms")


@pytest.mark.skipif(not (ROOT / "results").exists(), reason="not in a checkout")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_documents_say_what_their_csv_says(document: Path) -> None:
    assert fill_blocks(document, TABLES) == document.read_text(encoding="utf-8")


EAGER, A, B = timed("eager", 1, 1.0), timed("a", 1, 0.5), timed("b", 1, 0.4)


def figured(folder: Path, *blocks: str) -> tuple[str, list[str]]:
    """A document with these blocks, filled twice, and its pictures."""
    document = folder / "page.md"
    parts = (f"<!-- {block} -->\nold\n<!-- end -->\n" for block in blocks)
    document.write_text(f"before\n{''.join(parts)}<!-- table: x -->\nkept\n<!-- end -->\n", encoding="utf-8")
    text, pictures = fill_figures(document)
    document.write_text(text, encoding="utf-8")
    assert fill_figures(document)[0] == text
    assert text.startswith("before\n<!-- ")
    assert text.endswith("<!-- end -->\n<!-- table: x -->\nkept\n<!-- end -->\n")
    return text, sorted(path.relative_to(folder).as_posix() for path in pictures)


def test_a_figure_of_a_run(tmp_path: Path) -> None:
    write(tmp_path / "run", EAGER, A, B)
    text, pictures = figured(tmp_path, "figure: run speed-up eager a")
    assert "How much faster than eager? forward, glu" in text
    assert pictures == [f"docs/figures/run-glu-forward-float32-speed-up{end}.svg" for end in ("-dark", "")]
    assert all(f'"{name}"' in text for name in pictures)
    with pytest.raises(BadInput, match="has 0 charts 'spead'; a figure is one"):
        figured(tmp_path, "figure: run spead")
    with pytest.raises(BadInput, match="has no chart 'memory-and-time': swiglu-bench memory measures"):
        figured(tmp_path, "figure: run memory-and-time")
    trained(tmp_path / "trained")
    _, pictures = figured(tmp_path, "figure: trained curves")
    assert pictures == ["docs/figures/trained-curves-dark.svg", "docs/figures/trained-curves.svg"]


def test_pairs_that_got_a_verdict_are_counted_in_their_figure(tmp_path: Path) -> None:
    head = "pair,time_ms,ratio,ratio_low,ratio_high,noise,verdict,detectable,rounds,stopped_by\n"
    lines = "0,2,1,0.99,1.01,0.01,tie,,,\n1,2,1.1,1.09,1.11,0.01,slower,,,\n"
    (tmp_path / "noise.csv").write_text(head + lines)
    said = "2 A/A pairs: 1 intervals that do not contain 0, 1 verdicts other than tie"
    assert said in figured(tmp_path, "figure: noise.csv pairs")[0]
    (tmp_path / "noise.csv").write_text(head + lines.replace("1,2,1.1", "1,2,nan"))
    with pytest.raises(BadInput, match="line 3: ratio is nan"):
        figured(tmp_path, "figure: noise.csv pairs")
    (tmp_path / "noise.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match=r"noise\.csv is not a noise\.csv that this version can read"):
        figured(tmp_path, "figure: noise.csv pairs")


@pytest.mark.skipif(not (ROOT / "results").exists(), reason="not in a checkout")
@pytest.mark.parametrize("document", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_the_documents_show_what_their_runs_say(document: Path) -> None:
    text, pictures = fill_figures(document)
    assert text == document.read_text(encoding="utf-8")
    assert all(path.exists() for path in pictures)


def rows(*counts: int) -> list[Record]:
    figures = {"shape": "made-up", "single_ms": 8.0, "efficiency": 0.9}
    return [
        a_split_row(name, mode=mode, ranks=count, sequence_parallel=way, time_ms=9 / count, **figures)
        for count in counts
        for mode in ("forward", "step")
        for way in (False, True)
        for name in ("eager", "mine")
    ]


def test_a_figure_of_several_sizes_begins_at_one_gpu_and_the_last_row_of_a_case_counts(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    Table(tmp_path / "tp.csv", LAYOUTS["tp"].columns()).append(row.row().values() for row in rows(2, 4))
    assert save_scaling(tmp_path, ["eager"]).startswith("Scaling: ")
    assert (tmp_path / "scaling.svg").read_text().count("made-up, 1,024 tokens") >= 2
    points = scaling_points(rows(2, 4))
    assert {point["ranks"] for point in points} == {1, 2, 4}
    assert {point["efficiency"] for point in points if point["ranks"] == 1} == {1.0}
    later = [dataclasses.replace(row, time_ms=1.0) for row in rows(2)]
    assert {point["ms"] for point in scaling_points(rows(2) + later) if point["ranks"] == 2} == {1.0}
