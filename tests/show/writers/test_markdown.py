from pathlib import Path

import pytest
from places import ROOT
from reported import write
from specimens import a_bare_record, a_split_row, a_summary

from swiglu_bench.rows.record import LAYOUTS, Status
from swiglu_bench.show.writers.csv_file import Table
from swiglu_bench.show.writers.markdown import figure_table, fill

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
    document.write_text(fill(document), encoding="utf-8")
    text = fill(document)
    assert text == document.read_text(encoding="utf-8")
    before, start, *content, end, after = text.splitlines()
    assert (before, start, end, after) == ("before", f"<!-- {block} -->", "<!-- end -->", "after")
    return content


def test_a_table_of_times(tmp_path: Path) -> None:
    write(tmp_path, *ROWS)
    head = ["| tokens | 1 |", "| --- | ---: |"]
    mine = "| `b` | **1.000 ms (0.500 ± 0.010)** |"
    assert filled(tmp_path, "table: records.csv") == [
        *head, "| `a` | 2.000 ms (baseline) |", mine, "| `frozen` | 0.100 ms (dX only) |",
    ]  # fmt: skip
    assert filled(tmp_path, "table: records.csv a b scope=glu") == [*head, "| `a` | 2.000 ms (baseline) |", mine]


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
        with pytest.raises(ValueError, match=f"{words.split()[0]}: these rows have no such figure"):
            filled(tmp_path, f"table: records.csv {words}")
    with pytest.raises(ValueError, match="Several rows for one cell"):
        figure_table(ROWS * 2, "time_ms")


def test_shapes_across(tmp_path: Path) -> None:
    at = {"shape": "wide@zipf", "tokens": 1, "baseline": "a"}
    others = [
        a_bare_record(implementation="a", time_ms=3.0, ratio=1.0, ratio_low=1.0, ratio_high=1.0, **at),
        a_bare_record(implementation="c", time_ms=1.5, ratio=0.5, ratio_low=0.49, ratio_high=0.51, **at),
    ]
    write(tmp_path, *ROWS[:2], *others)
    assert filled(tmp_path, "table: records.csv across=shape") == [
        f"| shape | `{ROWS[0].shape}` | `wide@zipf` |", "| --- | ---: | ---: |",
        "| `a` | 2.000 ms (baseline) | 3.000 ms (baseline) |", "| `b` | **1.000 ms (0.500 ± 0.010)** |  |",
        "| `c` |  | **1.500 ms (0.500 ± 0.010)** |",
    ]  # fmt: skip
    assert filled(tmp_path, "table: records.csv a figure=time_ms across=shape")[2:] == ["| `a` | 2 | 3 |"]
    with pytest.raises(ValueError, match=r"or give across=shape"):
        filled(tmp_path, "table: records.csv a tokens=1")


def test_a_table_of_a_training(tmp_path: Path) -> None:
    def row(name: str, **columns: object) -> list[object]:
        return list(a_summary(name, step_ms=2.0, **columns).row().values())

    ratio = {"ratio": 0.95, "ratio_low": 0.94, "ratio_high": 0.96}
    rows = [
        row("eager", saved_bytes=3 << 29),
        row("mine", curve="same", saved_bytes=1 << 30, **ratio),
        row("frozen", trains="inputs", curve="differs", saved_bytes=1 << 20, **ratio),
    ]
    Table(tmp_path / "summary.csv", LAYOUTS["training"].columns()).append(rows)
    assert filled(tmp_path, "training: summary.csv") == [
        "| | curve | step | ÷ eager's | kept |",
        "| --- | --- | ---: | ---: | ---: |",
        "| `eager` | baseline | 2.0 ms | baseline | 1.5 GiB |",
        "| `mine` | same | 2.0 ms | 0.950 ± 0.010 | 1.0 GiB |",
        "| `frozen` | differs (frozen) | 2.0 ms | 0.950 ± 0.010 | 1.0 MiB |",
    ]


def test_a_table_of_ranks(tmp_path: Path) -> None:
    def row(count: int, mode: str, name: str, time_ms: float | None, **figures: object) -> list[object]:
        bus = {"bus_ceiling_gbps": 300.0, "verdict": "baseline" if name == "eager" else "faster"}
        one = a_split_row(name, mode=mode, ranks=count, time_ms=time_ms, **bus | figures)
        return list(one.row().values())

    rows = [
        row(1, "step", "eager", 8.0, efficiency=1.0),
        row(2, "step", "eager", 5.0, efficiency=0.8, comm_ms=0.25, bus_gbps=120.4),
        row(2, "step", "mine", 4.5, ratio=0.9, ratio_low=0.88, ratio_high=0.92, efficiency=0.75),
        row(2, "step", "broken", None),
        row(4, "step", "eager", 3.0, efficiency=0.667, comm_ms=0.5, bus_gbps=200.0),
        row(2, "forward", "eager", 2.0, efficiency=0.8, comm_ms=0.1, bus_gbps=120.0),
    ]
    Table(tmp_path / "tp.csv", LAYOUTS["tp"].columns()).append(rows)
    assert filled(tmp_path, "ranks: tp.csv mode=step sequence_parallel=True") == [
        "| tokens | GPUs | communication alone | bus, of its ceiling | `eager` | `mine` |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1,024 | 2 | 0.250 ms | 120 of 300 GB/s | 5 ms (baseline), 80% | 4.5 ms (0.900 ± 0.020), 75% |",
        "| 1,024 | 4 | 0.500 ms | 200 of 300 GB/s | 3 ms (baseline), 67% |  |",
    ]
    with pytest.raises(ValueError, match="Several rows for one cell"):
        filled(tmp_path, "ranks: tp.csv")


@pytest.mark.skipif(not (ROOT / "results").exists(), reason="not in a checkout")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_documents_say_what_their_csv_says(document: Path) -> None:
    assert fill(document) == document.read_text(encoding="utf-8")
