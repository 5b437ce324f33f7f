import pytest
from reported import timed, unranked
from specimens import a_record

from swiglu_bench.rows.record import Record
from swiglu_bench.show.report.ranking import Place, alike, places

EAGER = timed("eager", 1, 1.0)


def place(*rows: Record) -> Place:
    (found,) = places([EAGER, *rows])
    return found


def test_the_fastest_and_the_next() -> None:
    found = place(timed("a", 1, 0.5), timed("b", 1, 0.8))
    assert (found.best, found.ties, found.runner_up, found.speedup) == ("a", (), "b", 2.0)
    assert found.longer == pytest.approx(0.6)


FINE = {"half": 0.0001}


@pytest.mark.parametrize(
    ("rows", "ties"),
    [
        pytest.param([timed("a", 1, 0.8), timed("b", 1, 0.809)], ("b",), id="intervals overlap"),
        pytest.param([timed("a", 1, 0.8, **FINE), timed("b", 1, 0.801, **FINE)], ("b",), id="within the noise"),
        pytest.param([timed("a", 1, 0.8, **FINE), timed("b", 1, 0.803, **FINE)], (), id="beyond the noise"),
        pytest.param([timed("a", 1, 0.997, 0.001, verdict="tie")], ("eager",), id="by the row's verdict"),
        pytest.param([timed("a", 1, 0.997, 0.001, verdict="")], (), id="by the interval, of an older version"),
        pytest.param([timed("a", 1, 0.5), unranked("f", 1)], (), id="who does less is not ranked"),
    ],
)
def test_who_ties_with_the_best(rows: list[Record], ties: tuple[str, ...]) -> None:
    assert (place(*rows).best, place(*rows).ties) == ("a", ties)


def test_without_a_baseline_nobody_is_first() -> None:
    assert places([a_record(baseline="", ratio=None, ratio_low=None, ratio_high=None)]) == []


def crowd(**changes: dict[str, object]) -> list[Record]:
    records = []
    for index, name in enumerate(["eager", "first", "same", "differs", *"abcdef"]):
        for tokens in (1, 2):
            ratio = {"first": 0.8, "same": 0.801, "differs": 0.8 if tokens == 1 else 0.7}.get(name, 1 + index / 10)
            records.append(timed(name, tokens, 1.0 if name == "eager" else ratio, **changes.get(name, {})))  # type: ignore[arg-type]
    return records


def test_in_a_crowd_those_that_tie_everywhere_stand_for_each_other() -> None:
    assert alike(crowd()) == {"first": ["same"]}
    assert alike(crowd(first={"peak_bytes": 1000}, same={"peak_bytes": 900})) == {}, "one needs more memory"
    assert alike([record for record in crowd() if record.implementation not in "abcdef"]) == {}, "no crowd"
