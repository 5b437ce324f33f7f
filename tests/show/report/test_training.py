import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from reported import COMMITTED, EVIL, IN_A_CHECKOUT, REASON, trained
from specimens import a_summary

from swiglu_bench.rows.record import Status
from swiglu_bench.rows.training import PERMUTED, FinishedTraining, load_training
from swiglu_bench.show.charts.style import Style, slots
from swiglu_bench.show.report import training as told


@pytest.fixture
def run(tmp_path: Path) -> FinishedTraining:
    return load_training(trained(tmp_path / "run"))


def changed(run: FinishedTraining, **of: dict[str, object]) -> list[str]:
    """What is said where rows are other than they are."""
    rows = [dataclasses.replace(one, **of.get(one.implementation, {})) for one in run.summaries]  # type: ignore[arg-type]
    return told.sentences(dataclasses.replace(run, summaries=rows))


def test_who_learns_the_same_and_who_is_the_fastest_of_those(run: FinishedTraining) -> None:
    headline, *others = told.sentences(run)
    assert headline == (
        f"All 2 that train every weight learn as eager does, to within rounding. {EVIL} is the fastest: it takes 10.0% "
        "off a whole step (0.900 ± 0.002 of eager's time)."
    )
    text = "\n".join(others)
    for words in ("within 0.20% of 1", "frozen yields no weight gradients", REASON):
        assert words in text, words


def test_ties_and_what_is_not_faster(run: FinishedTraining) -> None:
    near = {"ratio": 0.902, "ratio_low": 0.9, "ratio_high": 0.904}
    assert f"{EVIL} and level tie for the fastest step: {EVIL}, with the lowest" in changed(run, level=near)[0]
    slower = {"verdict": "tie"}
    assert f"Nothing is faster than eager: {EVIL}, the next" in changed(run, **{EVIL: slower})[0]
    assert "0.990 ± 0.002" in changed(run, **{EVIL: {"curve": "differs"}})[0], "who learns otherwise is not ranked"


def test_curves_that_are_not_alike(run: FinishedTraining) -> None:
    text = changed(run, level={"curve": "differs"}, **{EVIL: {"curve": "within seeds"}})[0]
    said = f"{EVIL} learns as eager does, within the spread of its seeds. level learns differently from eager"
    assert text.startswith(said)
    assert "one seed cannot judge" in changed(run, level={"curve": "unknown"})[0]


def test_where_there_is_nothing_to_compare(run: FinishedTraining) -> None:
    assert "no curves are compared" in told.sentences(run.keep(["eager", "frozen"]))[0]
    broken = a_summary("eager", status=Status.ERROR, reason="It broke.")
    nothing = FinishedTraining(run.path, [broken], {}, {})
    assert told.sentences(nothing) == ["Nothing was trained to the end.", "error: eager: It broke."]
    assert [chart for _, _, chart in told.charts(nothing, Style({}))] == [
        "Nothing was trained to the end, so there is no curve.",
        "Nothing was trained beside eager, so there is no difference to draw.",
    ]
    assert told.picture(nothing, Style({})) == "Nothing was trained to the end, so there is no curve."
    assert told.context(nothing)["title"] == "training of small"


def test_what_is_frozen_starts_hidden_and_every_curve_can_be_chosen(run: FinishedTraining) -> None:
    style = Style(slots(run.names, []))
    above, below = (chart.to_dict() for _, _, chart in told.charts(run, style))
    for spec in (above, below):
        (shown,) = [one["value"] for one in spec["params"] if one["name"] == "shown"]
        assert shown == ["eager", PERMUTED, "level", EVIL]
        assert all("shown" in layer["transform"][0]["filter"] for layer in spec["layer"])
        assert all(layer["encoding"]["color"]["legend"] is None for layer in spec["layer"])
    assert {one["implementation"] for one in below["data"]["values"]} == {PERMUTED, "level", EVIL, "frozen"}
    only = told.charts(run.keep(["level"]), style)
    assert [
        sorted(name for name in chart.to_dict()["layer"][0]["encoding"]["color"]["scale"]["domain"])
        for _, _, chart in only
    ] == [["level"]] * 2


@IN_A_CHECKOUT
def test_the_committed_run() -> None:
    training = load_training(COMMITTED / "train-llama")
    headline = told.sentences(training)[0]
    assert "off a whole step" in headline or "Nothing is faster" in headline
