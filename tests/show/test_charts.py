"""The charts that answer a report's questions, as specifications."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from reported import EVIL, a_memory, a_run, awkward_rows, timed
from specimens import a_record

from swiglu_bench.rows.finished_run import PERMUTED, FinishedRun, Losses
from swiglu_bench.show import charts
from swiglu_bench.show.charts import NoChart, Style, answers, colours, slots, style_of
from swiglu_bench.show.sections import sections

Spec = dict[str, Any]


def answered(*runs: FinishedRun) -> dict[str, list[tuple[str, Spec]] | str]:
    """Of the first section of these runs: by question the charts, with what tells them apart, or why there are none."""
    section = sections(runs)[0]
    found = answers(section, style_of(section, colours(runs)))
    return {name: reason or [(text, chart.to_dict()) for text, chart in drawn] for name, drawn, reason in found}


def values(spec: Spec, whole: Spec | None = None) -> Iterator[dict[str, Any]]:
    """All data of a chart, or of a part of the `whole` one."""
    if "data" in spec:
        yield from (whole or spec)["datasets"][spec["data"]["name"]]
    for part in (*spec.get("layer", []), *spec.get("vconcat", [])):
        yield from values(part, whole or spec)


def only(found: list[tuple[str, Spec]] | str) -> Spec:
    assert not isinstance(found, str), found
    return found[0][1]


@pytest.fixture(scope="module")
def awkward() -> dict[str, list[tuple[str, Spec]] | str]:
    return answered(a_run(*awkward_rows()))


def test_every_question_is_answered_or_says_why_not(awkward: dict[str, Any]) -> None:
    assert list(awkward) == ["speed-up", "time", "limit", "memory-and-time", "error"]
    assert awkward["memory-and-time"].startswith("swiglu-bench memory measures whole steps")


def test_speed_ups_and_their_intervals(awkward: dict[str, Any]) -> None:
    spec = only(awkward["speed-up"])
    assert len(awkward["speed-up"]) == 2, "a chart for each shape"
    (point, *_) = [row for row in values(spec) if row.get("name") == EVIL and row.get("tokens") == 1]
    assert (point["value"], point["low"], point["high"]) == (1.25, 1.24224, 1.25786)
    assert not [row for row in values(spec) if row.get("name") in ("eager", "frozen *")]


def test_without_limits_or_baseline_the_charts_are_left_out_with_the_reason() -> None:
    bare = {"limit_ms": None, "limit_pct": None, "baseline": "", "ratio": None, "ratio_low": None, "ratio_high": None}
    found = answered(a_run(a_record(**bare), a_record(**bare, tokens=9)))
    assert "No limit was measured" in found["limit"]
    assert "no baseline was timed" in found["speed-up"]
    assert not isinstance(found["time"], str)


NAMES = {"eager": (1.0, 100), "small": (1.2, 50), "fast": (0.5, 200), "worse": (1.3, 300)}
STEP = a_run(*(timed(name, 1024, ratio, mode="step") for name, (ratio, _) in NAMES.items()), name="step")
MEMORY = a_run(*(a_memory(name, mib) for name, (_, mib) in NAMES.items()), name="memory")


def test_speed_is_set_against_memory() -> None:
    spec = only(answered(MEMORY, STEP)["memory-and-time"])
    front = [row for row in values(spec) if set(row) == {"mib", "value"}]
    assert front == [{"mib": 50.0, "value": 1.2}, {"mib": 100.0, "value": 1.0}, {"mib": 200.0, "value": 0.5}]


@pytest.mark.parametrize("chart", [charts.time, charts.error, charts.limit, charts.memory, charts.pareto])
def test_a_chart_of_nothing_is_refused(chart: Any) -> None:
    with pytest.raises(NoChart):
        chart([a_record(error=None, time_ms=None)], Style(slots(["mine"], [])))


LOSSES: Losses = {
    "eager": {0: [3.0, 2.0, 1.0], 1: [3.2, 2.2, 1.2]},
    PERMUTED: {0: [3.0, 2.0, 1.1], 1: [3.2, 2.2, 1.2]},
    "fused": {0: [3.0, 2.5, float("nan")]},
}


def curves(losses: Losses, frozen: list[str]) -> dict[str, Any]:
    names = list(losses)
    return charts.curves(losses, names, "digits", Style(slots(names, ["eager", "fused"])), frozen).to_dict()


def test_curves_are_means_and_differences_are_by_seed() -> None:
    drawn = curves(LOSSES, [])
    above, below = drawn["vconcat"]
    seeds, means = (list(values(layer, drawn)) for layer in above["layer"])
    assert [one["value"] for one in means if one["name"] == "eager"] == pytest.approx([3.1, 2.1, 1.1])
    assert len(means) == 8, "what is not finite is left out"
    assert {one["seed"] for one in seeds} == {0, 1}
    found = {(one["name"], one["step"]): one["value"] for one in values(below, drawn)}
    assert found[PERMUTED, 2] == pytest.approx(0.05)
    assert found["fused", 1] == pytest.approx(0.5)
    assert not any(name == "eager" for name, _ in found)


def test_what_is_frozen_does_not_flatten_differences_and_long_curves_are_thinned() -> None:
    drawn = curves(LOSSES, ["fused"])
    above, below = drawn["vconcat"]
    named = [{one["name"] for one in values(part, drawn)} for part in (above, below)]
    assert named == [{"eager", PERMUTED, "fused"}, {PERMUTED}]
    assert "without fused" in drawn["title"]["subtitle"][0]
    assert len(list(values(curves({"eager": {0: [1.0] * 5000}}, [])))) <= 4 * charts.POINTS
