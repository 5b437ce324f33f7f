"""The charts that answer a report's questions, as specifications."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from reported import COMMITTED, EVIL, IN_A_CHECKOUT, a_memory, a_run, awkward_rows, timed, trained
from specimens import a_record, a_summary

from swiglu_bench.rows.finished_run import PERMUTED, FinishedRun, FinishedTraining, Losses, load_training
from swiglu_bench.rows.record import Status
from swiglu_bench.show import charts
from swiglu_bench.show.charts import answers, colours, style_of
from swiglu_bench.show.drawing import NoChart, Style, slots
from swiglu_bench.show.sections import by_work, load, sections

Spec = dict[str, Any]


def answered(*runs: FinishedRun) -> dict[str, list[tuple[str, Spec]] | str]:
    """Of the first section of these runs: by question the charts, with what tells them apart, or why there are none."""
    section = sections(runs)[0]
    found = answers(section, style_of(section, colours(runs)))
    return {one.name: one.reason or [(text, chart.to_dict()) for text, chart in one.charts] for one in found}


def values(spec: Spec) -> Iterator[dict[str, Any]]:
    """All data of a chart."""
    for rows in spec["datasets"].values():
        yield from rows


def only(found: list[tuple[str, Spec]] | str) -> Spec:
    assert not isinstance(found, str), found
    return found[0][1]


@pytest.fixture(scope="module")
def awkward() -> dict[str, list[tuple[str, Spec]] | str]:
    return answered(a_run(*awkward_rows()))


def test_every_question_is_answered_or_says_why_not(awkward: dict[str, Any]) -> None:
    assert list(awkward) == ["speed-up", "time", "limit", "memory-and-time", "error"]
    assert awkward["memory-and-time"].startswith("Memory is measured for whole steps")
    of_each: dict[str, set[str]] = {}
    for name, found in awkward.items():
        for _, spec in found if name != "memory-and-time" else []:
            assert spec["title"]["text"].endswith("?")
            drawn = [row for row in values(spec) if "implementation" in row]
            assert drawn
            for row in drawn:
                of_each.setdefault(row["implementation"], set()).add(row["colour"])
    assert {len(found) for found in of_each.values()} == {1}, "one colour in all charts"
    assert len(set.union(*of_each.values())) == len(of_each)


def test_speed_ups_and_their_intervals(awkward: dict[str, Any]) -> None:
    spec = only(awkward["speed-up"])
    assert len(awkward["speed-up"]) == 2, "a chart for each shape"
    (point,) = [row for row in values(spec) if row.get("implementation") == EVIL and row.get("tokens") == 1]
    assert (point["value"], point["low"], point["high"]) == (1.25, 1.24224, 1.25786)
    assert not [row for row in values(spec) if row.get("implementation") in ("eager", "frozen")]
    axis = spec["layer"][1]["encoding"]["x"]
    assert (axis["scale"]["type"], axis["scale"]["base"], axis["axis"]["values"]) == ("log", 2, [1, 1024])


def test_without_limits_or_baseline_the_charts_are_left_out_with_the_reason() -> None:
    bare = {"limit_ms": None, "limit_pct": None, "baseline": "", "ratio": None, "ratio_low": None, "ratio_high": None}
    found = answered(a_run(a_record(**bare), a_record(**bare, tokens=9)))
    assert "No limit was measured" in found["limit"]
    assert "no baseline was timed" in found["speed-up"]
    assert not isinstance(found["time"], str)


NAMES = {"eager": (1.0, 100), "small": (1.2, 50), "fast": (0.5, 200), "worse": (1.3, 300)}
STEP = a_run(*(timed(name, 1024, ratio, mode="step") for name, (ratio, _) in NAMES.items()), name="step")
MEMORY = a_run(*(a_memory(name, mib) for name, (_, mib) in NAMES.items()), name="memory")


def test_memory_joins_the_times_of_the_same_cases_on_the_same_machine() -> None:
    spec = only(answered(MEMORY, STEP)["memory-and-time"])
    front = [row for row in values(spec) if set(row) == {"mib", "value"}]
    assert front == [{"mib": 50.0, "value": 1.2}, {"mib": 100.0, "value": 1.0}, {"mib": 200.0, "value": 0.5}]
    assert [section.memory_from for section in sections([STEP, MEMORY])] == [["memory"], ()]
    other = a_run(a_memory("fast", 1, device="Another GPU"))
    assert [section.memory_from for section in sections([STEP, other])] == [(), ()]
    assert sections([STEP])[0].memory_from == ()


@pytest.mark.parametrize("chart", [charts.time, charts.error, charts.limit, charts.memory, charts.pareto])
def test_a_chart_of_nothing_is_refused(chart: Any) -> None:
    with pytest.raises(NoChart):
        chart([a_record(error=None, time_ms=None)], Style(slots(["mine"], [])))


@IN_A_CHECKOUT
def test_sections_are_never_mixed() -> None:
    runs = [load(COMMITTED / name) for name in ("forward", "memory-mlp", "step-others")]
    titles = ["forward of glu", "step of mlp", "step of glu", "memory of mlp"]
    assert [section.title for section in sections(runs)] == [f"{title}, bfloat16" for title in titles]


def test_runs_of_one_kind_of_work_are_one_section_unless_they_measured_the_same_case() -> None:
    one, other = (a_run(timed("eager", 1, 1.0), timed(name, 1, 0.5), name=name) for name in "ab")
    longer = a_run(timed("eager", 2, 1.0), timed("c", 2, 0.5), name="c")
    (work,) = by_work(sections([one, longer]))
    assert (work.names, len(work.rows), len(work.of(longer))) == ("a and c", 4, 2)
    assert [work.names for work in by_work(sections([one, other, longer]))] == ["a and c", "b"]


@IN_A_CHECKOUT
@pytest.mark.parametrize("name", ["forward", "memory-mlp", "verify"])
def test_the_committed_runs_have_charts(name: str) -> None:
    for found in answered(load(COMMITTED / name)).values():
        assert isinstance(found, str) or all(spec["title"]["subtitle"][0] for _, spec in found)


LOSSES: Losses = {
    "eager": {0: [3.0, 2.0, 1.0], 1: [3.2, 2.2, 1.2]},
    PERMUTED: {0: [3.0, 2.0, 1.1], 1: [3.2, 2.2, 1.2]},
    "fused": {0: [3.0, 2.5, float("nan")]},
}


def curves(losses: Losses, frozen: Sequence[str]) -> dict[str, Any]:
    names = list(losses)
    return charts.curves(losses, names, "digits", Style(slots(names, ["eager", "fused"])), frozen).to_dict()


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
    assert len(long["vconcat"][0]["layer"][1]["data"]["values"]) <= 2 * charts.POINTS


@pytest.fixture
def run(tmp_path: Path) -> FinishedTraining:
    return load_training(trained(tmp_path / "run"))


def test_where_there_is_nothing_to_compare(run: FinishedTraining) -> None:
    broken = a_summary("eager", status=Status.ERROR, reason="It broke.")
    nothing = FinishedTraining(run.path, [broken], {}, {})
    assert [chart for _, _, chart in charts.training_charts(nothing, Style({}))] == [
        "Nothing was trained to the end, so there is no curve.",
        "Nothing was trained beside eager, so there is no difference to draw.",
    ]
    assert charts.training_picture(nothing, Style({})) == "Nothing was trained to the end, so there is no curve."


def test_what_is_frozen_starts_hidden_and_every_curve_can_be_chosen(run: FinishedTraining) -> None:
    style = Style(slots(run.names, []))
    above, below = (chart.to_dict() for _, _, chart in charts.training_charts(run, style))
    for spec in (above, below):
        (shown,) = [one["value"] for one in spec["params"] if one["name"] == "shown"]
        assert shown == ["eager", PERMUTED, "level", EVIL]
        assert all("shown" in layer["transform"][0]["filter"] for layer in spec["layer"])
        assert all(layer["encoding"]["color"]["legend"] is None for layer in spec["layer"])
    assert {one["implementation"] for one in below["data"]["values"]} == {PERMUTED, "level", EVIL, "frozen"}
    only = charts.training_charts(run.keep(["level"]), style)
    assert [
        sorted(name for name in chart.to_dict()["layer"][0]["encoding"]["color"]["scale"]["domain"])
        for _, _, chart in only
    ] == [["level"]] * 2
