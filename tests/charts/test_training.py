from pathlib import Path
from typing import Any

import pytest

from swiglu_bench.charts import export, training
from swiglu_bench.rows.training import PERMUTED

LOSSES = {
    "eager": {0: [3.0, 2.0, 1.0], 1: [3.2, 2.2, 1.2]},
    PERMUTED: {0: [3.0, 2.0, 1.1], 1: [3.2, 2.2, 1.2]},
    "fused": {0: [3.0, 2.5, float("nan")]},
}


def curves(losses: training.Losses, frozen: list[str]) -> dict[str, Any]:
    from swiglu_bench.charts.style import Style, slots

    names = list(losses)
    return training.curves(losses, names, "digits", Style(slots(names, ["eager", "fused"])), frozen).to_dict()


def test_curves_are_means_and_differences_are_by_seed() -> None:
    pytest.importorskip("altair", reason="the extra `report` is not installed")
    drawn = curves(LOSSES, [])
    above, below = drawn["vconcat"]
    seeds, means = (layer["data"]["values"] for layer in above["layer"])
    assert [one["value"] for one in means if one["implementation"] == "eager"] == pytest.approx([3.1, 2.1, 1.1])
    assert len(means) == 8, "what is no number is left out"
    assert {one["seed"] for one in seeds} == {0, 1}
    values = {(one["implementation"], one["step"]): one["value"] for one in below["data"]["values"]}
    assert values[PERMUTED, 2] == pytest.approx(0.05)
    assert values["fused", 1] == pytest.approx(0.5)
    assert not any(name == "eager" for name, _ in values)


def test_what_is_frozen_does_not_squeeze_the_differences_of_the_others() -> None:
    pytest.importorskip("altair", reason="the extra `report` is not installed")
    drawn = curves(LOSSES, ["fused"])
    above, below = drawn["vconcat"]
    named = [{one["implementation"] for one in part["data"]["values"]} for part in (above["layer"][1], below)]
    assert named == [{"eager", PERMUTED, "fused"}, {PERMUTED}]
    assert "without fused" in drawn["title"]["subtitle"][0]


def test_long_curves_are_thinned() -> None:
    pytest.importorskip("altair", reason="the extra `report` is not installed")
    drawn = curves({"eager": {0: [1.0] * 5000}}, [])
    assert len(drawn["vconcat"][0]["layer"][1]["data"]["values"]) <= 2 * training.POINTS


def test_files_or_why_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vl_convert", reason="the extra `report` is not installed")
    assert "nothing was trained" in training.draw(tmp_path, {"eager": {}}, "t", [], [])
    assert training.draw(tmp_path, LOSSES, "t", ["eager"], []) == f"Curves: {tmp_path / 'curves.png'}"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curves.svg").read_bytes().startswith(b"<svg")
    assert "cannot be written" in training.draw(tmp_path / "none", LOSSES, "t", ["eager"], [])
    monkeypatch.setattr(export, "NEEDS", ("altair", "no_such_module"))
    assert "no_such_module missing; pip install" in training.draw(tmp_path, LOSSES, "t", ["eager"], [])
