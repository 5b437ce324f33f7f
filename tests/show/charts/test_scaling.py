from pathlib import Path

import pytest

from swiglu_bench.rows.record import LAYOUTS
from swiglu_bench.show.charts import scaling


def rows(*counts: int, single: str = "8") -> list[dict[str, str]]:
    return [
        dict.fromkeys(LAYOUTS["tp"].columns(), "") | {
            "shape": "made-up", "dtype": "bfloat16", "mode": mode, "tokens": "1024", "ranks": str(count),
            "sequence_parallel": way, "implementation": name, "time_ms": str(9 / count), "single_ms": single,
            "efficiency": "0.9",
        }
        for count in counts for mode in ("forward", "step") for way in ("false", "true") for name in ("eager", "mine")
    ]  # fmt: skip


def test_a_figure_of_several_sizes_begins_at_one_gpu_and_the_last_row_of_a_case_counts(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    assert scaling.draw(tmp_path, rows(2, 4), ["eager"]).startswith("Scaling: ")
    assert (tmp_path / "scaling.svg").read_text().count("made-up, 1,024 tokens") >= 2
    points = scaling.points_of(rows(2, 4))
    assert {one["ranks"] for one in points} == {1, 2, 4}
    assert {one["efficiency"] for one in points if one["ranks"] == 1} == {1.0}
    later = [row | {"time_ms": "1"} for row in rows(2)]
    assert {one["ms"] for one in scaling.points_of(rows(2) + later) if one["ranks"] == 2} == {1.0}


def test_one_size_makes_no_figure(tmp_path: Path) -> None:
    assert "No scaling figure: it needs rows with several" in scaling.draw(tmp_path, rows(2, single=""), [])
    assert not list(tmp_path.iterdir())
