from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from swiglu_bench.rows.training import PERMUTED, Losses
from swiglu_bench.show.charts import training
from swiglu_bench.show.charts.style import Style, slots

LOSSES: Losses = {
    "eager": {0: [3.0, 2.0, 1.0], 1: [3.2, 2.2, 1.2]},
    PERMUTED: {0: [3.0, 2.0, 1.1], 1: [3.2, 2.2, 1.2]},
    "fused": {0: [3.0, 2.5, float("nan")]},
}


def curves(losses: Losses, frozen: Sequence[str]) -> dict[str, Any]:
    names = list(losses)
    return training.curves(losses, names, "digits", Style(slots(names, ["eager", "fused"])), frozen).to_dict()


def test_curves_are_means_and_differences_are_by_seed() -> None:
    above, below = curves(LOSSES, [])["vconcat"]
    seeds, means = (layer["data"]["values"] for layer in above["layer"])
    assert [one["value"] for one in means if one["implementation"] == "eager"] == pytest.approx([3.1, 2.1, 1.1])
    assert len(means) == 8, "what is not finite is left out"
    assert {one["seed"] for one in seeds} == {0, 1}
    values = {(one["implementation"], one["step"]): one["value"] for one in below["data"]["values"]}
    assert values[PERMUTED, 2] == pytest.approx(0.05)
    assert values["fused", 1] == pytest.approx(0.5)
    assert not any(name == "eager" for name, _ in values)


def test_what_is_frozen_does_not_flatten_differences_and_long_curves_are_thinned() -> None:
    drawn = curves(LOSSES, ["fused"])
    above, below = drawn["vconcat"]
    named = [{one["implementation"] for one in part["data"]["values"]} for part in (above["layer"][1], below)]
    assert named == [{"eager", PERMUTED, "fused"}, {PERMUTED}]
    assert "without fused" in drawn["title"]["subtitle"][0]
    long = curves({"eager": {0: [1.0] * 5000}}, [])
    assert len(long["vconcat"][0]["layer"][1]["data"]["values"]) <= 2 * training.POINTS
