from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from reported import COMMITTED, EVIL, IN_A_CHECKOUT, awkward, timed, write
from specimens import a_record

from swiglu_bench.charts.style import PALETTE, Style, slots
from swiglu_bench.report import charts, memory_charts
from swiglu_bench.report.load import load
from swiglu_bench.report.page import Drawn, colours, draw, styles
from swiglu_bench.report.points import NoChart
from swiglu_bench.report.sections import sections


def answers(*paths: Path) -> dict[str, Drawn]:
    """The questions of the first section of these runs."""
    runs = [load(path) for path in paths]
    found = sections(runs)
    return {drawn.name: drawn for drawn in draw(found[0], styles(found, colours(runs))[0])}


def values(spec: Any) -> Iterator[dict[str, Any]]:
    """All data of a chart."""
    for rows in spec["datasets"].values():
        yield from rows


def test_every_question_is_answered_or_says_why_not(tmp_path: Path) -> None:
    found = answers(awkward(tmp_path / "run"))
    assert list(found) == ["speed-up", "fastest", "time", "limit", "memory-and-time", "error"]
    assert found.pop("memory-and-time").reason.startswith("Memory is measured for whole steps")
    for drawn in found.values():
        assert drawn.charts
        for _, chart in drawn.charts:
            spec = chart.to_dict()
            assert spec["title"]["text"].endswith("?")
            assert any(row.get("implementation") for row in values(spec)) or drawn.name == "fastest"


def test_an_implementation_has_one_colour_in_all_charts(tmp_path: Path) -> None:
    colours: dict[str, set[str]] = {}
    for drawn in answers(awkward(tmp_path / "run")).values():
        for _, chart in drawn.charts:
            for row in values(chart.to_dict()):
                if "implementation" in row:
                    colours.setdefault(row["implementation"], set()).add(row["colour"])
    assert {len(found) for found in colours.values()} == {1}
    assert len(set.union(*colours.values())) == len(colours)


def test_speed_ups_and_their_intervals(tmp_path: Path) -> None:
    ((_, chart), _) = answers(awkward(tmp_path / "run"))["speed-up"].charts
    spec = chart.to_dict()
    (point,) = [row for row in values(spec) if row.get("implementation") == EVIL and row.get("tokens") == 1]
    assert (point["value"], point["low"], point["high"]) == (1.25, 1.24224, 1.25786)
    assert not [row for row in values(spec) if row.get("implementation") in ("eager", "frozen")]
    axis = spec["layer"][1]["encoding"]["x"]
    assert (axis["scale"]["type"], axis["scale"]["base"], axis["axis"]["values"]) == ("log", 2, [1, 1024])


def test_a_tie_counts_as_a_tie(tmp_path: Path) -> None:
    cells = list(values(answers(awkward(tmp_path / "run"))["fastest"].charts[0][1].to_dict()))
    by_tokens = {cell["tokens"]: cell for cell in cells if cell["shape"] == "small"}
    assert by_tokens["1"]["name"] == EVIL
    assert by_tokens["1"]["colour"] in PALETTE
    assert set(by_tokens["1k"]["name"].split(" = ")) == {EVIL, "level"}
    assert by_tokens["1k"]["colour"] not in PALETTE
    assert by_tokens["1k"]["amount"] == "tie, 1.25× eager"


def test_one_token_count_is_a_row_for_each_implementation(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [timed("eager", 1, 1.0), timed("a", 1, 0.5), timed("b", 1, 1.5)])
    spec = answers(folder)["speed-up"].charts[0][1].to_dict()
    assert spec["usermeta"]["rows"] == ["a", "b"]


def test_without_limits_or_baseline_the_charts_are_left_out_with_the_reason(tmp_path: Path) -> None:
    bare = {"limit_ms": None, "limit_pct": None, "baseline": "", "ratio": None, "ratio_low": None, "ratio_high": None}
    found = answers(write(tmp_path / "run", [a_record(**bare), a_record(**bare, tokens=9)]))
    assert "No limit was measured" in found["limit"].reason
    assert "no baseline was timed" in found["speed-up"].reason
    assert "no winner can be named" in found["fastest"].reason
    assert found["time"].charts


def steps(folder: Path) -> list[Path]:
    """A step run and a memory run of the same cases."""
    names = {"eager": (1.0, 100), "small": (1.2, 50), "fast": (0.5, 200), "worse": (1.3, 300)}
    times = [timed(name, 1024, ratio, mode="step") for name, (ratio, _) in names.items()]
    bare = {"time_ms": None, "baseline": "", "ratio": None, "ratio_low": None, "ratio_high": None}
    sizes = [
        a_record(implementation=name, tokens=1024, mode="step", peak_bytes=mib << 20, saved_bytes=mib << 19, **bare)
        for name, (_, mib) in names.items()
    ]
    return [write(folder / "step", times), write(folder / "memory", sizes)]


def test_memory_joins_the_times_of_the_same_cases(tmp_path: Path) -> None:
    time_run, memory_run = steps(tmp_path)
    assert "swiglu-bench memory does" in answers(time_run)["memory-and-time"].reason
    spec = answers(memory_run, time_run)["memory-and-time"].charts[0][1].to_dict()
    front = [row for row in values(spec) if set(row) == {"mib", "value"}]
    assert front == [{"mib": 50.0, "value": 1.2}, {"mib": 100.0, "value": 1.0}, {"mib": 200.0, "value": 0.5}]
    assert [section.memory_from for section in sections([load(time_run), load(memory_run)])] == ["memory", ""]


def test_memory_of_another_machine_joins_nothing(tmp_path: Path) -> None:
    time_run, _ = steps(tmp_path)
    other = write(tmp_path / "other", [a_record(device="Another GPU", time_ms=None, mode="step", peak_bytes=1 << 20)])
    assert answers(time_run, other)["memory-and-time"].reason


def test_memory_by_itself(tmp_path: Path) -> None:
    _, memory_run = steps(tmp_path)
    bars = [row for row in values(answers(memory_run)["memory"].charts[0][1].to_dict()) if "peak" in row]
    assert (bars[0]["implementation"], bars[0]["peak"], bars[0]["saved"]) == ("small", 50.0, 25.0)


def test_a_chart_of_nothing_is_refused(tmp_path: Path) -> None:
    rows = load(write(tmp_path / "run", [a_record(error=None, time_ms=None)])).records
    style = Style(slots(["mine"], []))
    for chart in (
        charts.time,
        charts.error,
        charts.limit,
        charts.crossover,
        memory_charts.memory,
        memory_charts.pareto,
    ):
        with pytest.raises(NoChart):
            chart(rows, style)


@IN_A_CHECKOUT
@pytest.mark.parametrize("name", ["forward", "backward", "step-mlp", "activation", "memory", "verify"])
def test_the_committed_runs_have_charts(name: str) -> None:
    for drawn in answers(COMMITTED / name).values():
        assert drawn.charts or drawn.reason
        for _, chart in drawn.charts:
            assert chart.to_dict()["title"]["subtitle"][0]


def test_errors_of_several_dtypes_stand_in_charts_of_their_own(tmp_path: Path) -> None:
    rows = [a_record(time_ms=None, dtype=dtype, command="swiglu-bench verify") for dtype in ("float32", "float16")]
    assert [text for text, _ in answers(write(tmp_path / "run", rows))["error"].charts] == ["float32", "float16"]
