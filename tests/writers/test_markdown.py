from pathlib import Path

import pandas as pd
import pytest
from places import ROOT

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.rows.run_folder import read_records
from swiglu_bench.writers import markdown
from swiglu_bench.writers.csv_file import CsvFile


def row(implementation: str, tokens: int, **figures: object) -> Record:
    record = Record(
        run_id="r", command="c", shape="s", hidden=2, intermediate=3, tokens=tokens, dtype="float32", scope="glu",
        mode="step", seed=0, implementation=implementation, weight_layout="separate", gradients="x", status=Status.OK,
    )  # fmt: skip
    for name, value in figures.items():
        setattr(record, name, value)
    return record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = CsvFile(tmp_path)
    timed = {"baseline": "a", "ratio_low": 0.49, "ratio_high": 0.51}
    rows.write(row("a", 1, time_ms=2.0, baseline="a", ratio=1.0, ratio_low=1.0, ratio_high=1.0))
    rows.write(row("b", 1, time_ms=1.0, ratio=0.5, **timed))
    rows.write(row("frozen", 1, time_ms=0.1, comparable=False))
    rows.write(row("b", 1024, status=Status.ERROR, reason="broke"))
    rows.close()
    return tmp_path


def test_a_table(folder: Path) -> None:
    assert markdown.time_table(read_records(folder)).splitlines() == [
        "| tokens | 1 |",
        "| --- | ---: |",
        "| `a` | 2.000 ms (baseline) |",
        "| `b` | **1.000 ms (0.500 ± 0.010)** |",
        "| `frozen` | 0.100 ms (dX only) |",
    ]


def test_a_document_is_filled_and_filled_again(folder: Path) -> None:
    document = folder / "page.md"
    document.write_text("before\n<!-- table: records.csv b -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    text = markdown.fill(document)
    assert "| `b` |" in text
    assert "old" not in text
    assert "| `a` |" not in text
    assert (text.startswith("before\n<!-- table"), text.endswith("<!-- end -->\nafter\n")) == (True, True)
    document.write_text(text, encoding="utf-8")
    assert markdown.fill(document) == text


def test_a_table_of_one_figure(folder: Path) -> None:
    frame = read_records(folder)
    assert markdown.figure_table(frame, "time_ms").splitlines()[2:] == [
        "| `a` | 2 |",
        "| `b` | 1 |",
        "| `frozen` | 0.1 |",
    ]
    frame["peak_bytes"] = [1.5 * 2**30, 2**20, float("nan"), 2**20]
    assert markdown.figure_table(frame, "peak_bytes").splitlines() == [
        "| tokens | 1 | 1,024 |",
        "| --- | ---: | ---: |",
        "| `a` | 1,536 MiB |  |",
        "| `b` | 1 MiB | 1 MiB |",
    ]


def test_a_block_chooses_figure_and_rows(folder: Path) -> None:
    document = folder / "page.md"
    document.write_text("<!-- table: records.csv figure=ratio scope=glu b -->\n<!-- end -->\n", encoding="utf-8")
    assert "| `b` | 0.5 |" in markdown.fill(document)


@pytest.mark.parametrize("words", ["figure=speed", "figure=energy_j", "figure=time_ms scope=mlp"])
def test_a_block_without_figures(folder: Path, words: str) -> None:
    document = folder / "page.md"
    document.write_text(f"<!-- table: records.csv {words} -->\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{words.split()[0]}: these rows have no such figure"):
        markdown.fill(document)


def test_a_cell_with_two_rows(folder: Path) -> None:
    frame = read_records(folder)
    with pytest.raises(ValueError, match="several rows for one cell"):
        markdown.figure_table(pd.concat([frame, frame]), "time_ms")


def test_a_table_of_ranks(tmp_path: Path) -> None:
    columns = ["tokens", "ranks", "mode", "implementation", "time_ms", "ratio", "ratio_low", "ratio_high", "verdict",
               "efficiency", "comm_ms", "bus_gbps", "bus_ceiling_gbps"]  # fmt: skip
    rows = [
        [1024, 1, "step", "eager", 8.0, 1, 1, 1, "baseline", 1.0, None, None, None],
        [1024, 2, "step", "eager", 5.0, 1, 1, 1, "baseline", 0.8, 0.25, 120.4, 300],
        [1024, 2, "step", "mine", 4.5, 0.9, 0.89, 0.93, "faster", 0.75, 0.25, 120.4, 300],
        [1024, 2, "step", "broken", None, None, None, None, "", None, None, None, None],
        [1024, 4, "step", "eager", 3.0, 1, 1, 1, "baseline", 0.667, 0.5, 200, 300],
        [1024, 2, "forward", "eager", 2.0, 1, 1, 1, "baseline", 0.8, 0.1, 120, 300],
    ]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "tp.csv", index=False)
    document = tmp_path / "page.md"
    document.write_text("<!-- ranks: tp.csv mode=step -->\n<!-- end -->\n", encoding="utf-8")
    assert markdown.fill(document).splitlines()[1:-1] == [
        "| tokens | GPUs | communication alone | bus, of its ceiling | `eager` | `mine` |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1,024 | 2 | 0.250 ms | 120 of 300 GB/s | 5 ms (baseline), 80% | 4.5 ms (0.900 ± 0.020), 75% |",
        "| 1,024 | 4 | 0.500 ms | 200 of 300 GB/s | 3 ms (baseline), 67% |  |",
    ]
    document.write_text("<!-- ranks: tp.csv -->\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(ValueError, match="Several rows for one cell"):
        markdown.fill(document)


@pytest.mark.skipif(not (ROOT / "results").exists(), reason="not in a checkout")
@pytest.mark.parametrize("document", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_the_documents_say_what_their_csv_says(document: Path) -> None:
    assert markdown.fill(document) == document.read_text(encoding="utf-8")
