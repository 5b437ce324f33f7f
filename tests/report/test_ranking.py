from pathlib import Path

import pandas as pd
from reported import timed, unranked, write
from specimens import a_record

from swiglu_bench.report.load import load
from swiglu_bench.report.ranking import alike, places
from swiglu_bench.rows.record import Record


def rows(tmp_path: Path, *records: Record) -> pd.DataFrame:
    return load(write(tmp_path / "run", list(records))).records


def test_the_fastest_and_the_next(tmp_path: Path) -> None:
    (place,) = places(rows(tmp_path, timed("eager", 1, 1.0), timed("a", 1, 0.5), timed("b", 1, 0.8)))
    assert (place.best, place.ties, place.runner_up) == ("a", (), "b")
    assert (round(place.speedup, 3), round(place.lead, 3)) == (2.0, 0.375)
    assert place.low < place.speedup < place.high


def test_overlapping_intervals_tie(tmp_path: Path) -> None:
    (place,) = places(rows(tmp_path, timed("eager", 1, 1.0), timed("a", 1, 0.8), timed("b", 1, 0.809)))
    assert (place.best, place.ties, place.runner_up) == ("a", ("b",), "eager")


def test_what_is_no_further_apart_than_the_noise_ties(tmp_path: Path) -> None:
    fine = {"half": 0.0001}
    records = [timed("eager", 1, 1.0), timed("a", 1, 0.8, **fine), timed("b", 1, 0.801, **fine)]
    (place,) = places(rows(tmp_path, *records))
    assert place.ties == ("b",)  # 0.125% apart, where the A/A pair reaches 0.2%
    for record in records:
        record.aa_low = record.aa_high = None
    (place,) = places(rows(tmp_path / "older", *records))
    assert place.ties == ()


def test_the_baseline_ties_by_the_verdict_of_the_row(tmp_path: Path) -> None:
    """The interval excludes 1, but the pair's reaches further."""
    near = timed("a", 1, 0.997, 0.001, verdict="tie")
    (place,) = places(rows(tmp_path, timed("eager", 1, 1.0), near))
    assert (place.best, place.ties) == ("a", ("eager",))


def test_who_does_less_or_has_no_ratio_is_not_ranked(tmp_path: Path) -> None:
    (place,) = places(rows(tmp_path, timed("eager", 1, 1.0), timed("a", 1, 0.5), unranked("f", 1)))
    assert (place.best, place.ties, place.runner_up) == ("a", (), "eager")
    assert places(rows(tmp_path / "alone", a_record(baseline="", ratio=None, ratio_low=None, ratio_high=None))) == []


def crowd(**changes: object) -> list[Record]:
    names = ["eager", "first", "same", "differs", *"abcdef"]
    records = []
    for index, name in enumerate(names):
        for tokens in (1, 2):
            ratio = {"first": 0.8, "same": 0.801, "differs": 0.8 if tokens == 1 else 0.7}.get(name, 1 + index / 10)
            records.append(timed(name, tokens, 1.0 if name == "eager" else ratio, **changes.get(name, {})))  # type: ignore[arg-type]
    return records


def test_in_a_crowd_those_that_tie_everywhere_stand_for_each_other(tmp_path: Path) -> None:
    assert alike(rows(tmp_path, *crowd())) == {"first": ["same"]}
    less_memory = {"first": {"peak_bytes": 1000}, "same": {"peak_bytes": 900}}
    assert alike(rows(tmp_path / "memory", *crowd(**less_memory))) == {}


def test_without_a_crowd_everybody_is_drawn(tmp_path: Path) -> None:
    assert alike(rows(tmp_path, *[record for record in crowd() if record.implementation not in "abcdef"])) == {}
