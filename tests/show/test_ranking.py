"""Who is first, who ties, totals of a workload, and what is recommended."""

from dataclasses import replace

import numpy as np
import pytest
from rendered import shown, unwrapped
from reported import timed, unranked
from specimens import a_record, without_time

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.ranking import Choice, Winner, how_sure, places, recommend, recommendation_tables, totals

EAGER = timed("eager", 1, 1.0)


def place(*rows: Record) -> Winner:
    (found,) = places([EAGER, *rows])
    return found


def test_the_fastest_and_the_next() -> None:
    found = place(timed("a", 1, 0.5), timed("b", 1, 0.8))
    assert (found.first, found.runner_up, found.speedups) == (("a",), "b", (2.0, 2.0))
    assert found.longer == pytest.approx(0.6)


@pytest.mark.parametrize(("ratios", "said"), [
    ((1.1, 0.9, 0.8), "fp8-rowwise is the fastest from 1024 tokens on; measured at 128, 1024, 8192 tokens"),
    ((0.9, 1.1, 0.8), "fp8-rowwise is the fastest from 8192 tokens on"),
    ((0.9, 0.9, 1.1), "fp8-rowwise is slower than what quantises nothing; measured at"),
])  # fmt: skip
def test_from_which_tokens_on_fp8_is_recommended(ratios: tuple[float, ...], said: str) -> None:
    rows = []
    for tokens, ratio in zip((128, 1024, 8192), ratios, strict=True):
        rows += [timed("eager", tokens, 1.0), timed("fused-fp8", tokens, ratio, precision="fp8-rowwise")]
    run = FinishedRun([replace(row, shape="small@fp8-rowwise") for row in rows], {})
    assert said in unwrapped(shown(recommendation_tables(recommend([run], {}), [run]), 100))


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
    assert place(*rows).first == ("a", *ties)


WORKLOAD = {1: 300.0, 8: 100.0}
PAIR = {"aa_ratio": 1.0, "aa_low": 0.99, "aa_high": 1.01}


def row(name: str, tokens: int, time_ms: float, spread: float = 0.0, seed: int = 0) -> Record:
    """30 rounds around a time; every contender's are independent."""
    times = time_ms * (1 + spread * np.random.default_rng([seed, tokens, len(name)]).standard_normal(30))
    return a_record(
        implementation=name, tokens=tokens, time_ms=float(np.median(times)), samples_ms=tuple(times), **PAIR
    )


def total(name: str, *rows: Record) -> Record:
    (found,) = (one for one in totals(rows, WORKLOAD) if one.implementation == name)
    return found


EAGERS = (row("eager", 1, 2.0), row("eager", 8, 10.0))


def test_times_are_weighted_and_ratios_are_those_of_the_sums() -> None:
    found = total("mine", *EAGERS, row("mine", 1, 1.0), row("mine", 8, 20.0), row("mine", 3, 99.0))
    assert found.time_ms == pytest.approx((300 * 1 + 100 * 20) / 400)
    assert found.ratio == pytest.approx((300 * 1 + 100 * 20) / (300 * 2 + 100 * 10))
    assert (found.verdict, found.baseline, found.reason) == ("slower", "eager", "")
    base = total("eager", *EAGERS)
    assert (base.time_ms, base.ratio, base.verdict) == (pytest.approx(4.0), 1.0, "")


def test_the_interval_holds_the_truth() -> None:
    """The true ratio is 0.9; with 95% confidence at most a few of a hundred intervals miss it."""
    missed = 0
    for seed in range(100):
        rows = [row(name, tokens, factor * tokens, 0.02, seed)
                for name, factor in (("eager", 1.0), ("mine", 0.9)) for tokens in WORKLOAD]  # fmt: skip
        _, low, high = total("mine", *rows).interval or (0, 0, 0)
        missed += not low <= 0.9 <= high
        assert 0 < high - low < 0.1
    assert missed <= 8


def test_what_is_missing_is_said_and_gives_no_figure() -> None:
    broken = replace(row("mine", 8, 1.0), status=Status.INCORRECT, time_ms=None, samples_ms=())
    found = total("mine", *EAGERS, row("mine", 1, 1.0), broken)
    assert (found.time_ms, found.ratio, "8 tokens" in found.reason) == (None, None, True)
    found = total("mine", EAGERS[0], row("mine", 1, 1.0), row("mine", 8, 1.0))
    assert found.time_ms is not None
    assert (found.ratio, bool(found.reason)) == (None, True)
    assert totals([replace(one, status=Status.SKIPPED, time_ms=None) for one in EAGERS], WORKLOAD) == []


def test_without_samples_the_rows_intervals_are_used() -> None:
    bare = [replace(one, samples_ms=()) for one in (*EAGERS, row("mine", 1, 1.0), row("mine", 8, 1.0))]
    assert total("mine", *bare).interval == pytest.approx((0.8, 0.79, 0.81))


KNOWN = {one.name: one for one in CATALOGUE}


def sampled(name: str, ratio: float, seed: int = 0, **changes: object) -> Record:
    random = np.random.default_rng(seed)
    samples = tuple(ratio * np.exp(random.normal(0, 0.005, 50)))
    more = {"aa_ratio": 1.0, "aa_low": 0.999, "aa_high": 1.001, "mode": "step", **changes}
    return a_record(implementation=name, ratio=ratio, time_ms=ratio, samples_ms=samples, **more)


def choose(*records: Record, most: int | None = None) -> Choice:
    (choice,) = recommend([FinishedRun(records, {})], KNOWN, most)
    return choice


def test_the_fastest_is_chosen_and_the_next_is_named() -> None:
    choice = choose(sampled("eager", 1.0), sampled("compile", 0.8, 1), sampled("liger", 0.9, 2))
    found = [choice[name] for name in ("implementation", "runner_up", "ties", "confidence")]
    assert found == ["compile", "liger", [], "clear"]
    assert choice["runner_up_low"] < 0.9 / 0.8 < choice["runner_up_high"]
    assert "liger takes " in how_sure(choice)
    assert "torch.compile" in choice["usage"]


def test_what_is_as_fast_or_within_the_noise_ties() -> None:
    choice = choose(sampled("eager", 1.0), sampled("compile", 0.8, 1), sampled("liger", 0.8001, 2))
    assert (choice["ties"], choice["runner_up"], choice["confidence"]) == (["liger"], "eager", "tie")
    assert how_sure(choice).startswith("tie with liger; eager takes ")
    noisy = {"aa_low": 0.7, "aa_high": 1.3}
    assert choose(sampled("compile", 0.8, 1, **noisy), sampled("eager", 1.0, **noisy))["ties"] == ["eager"]


def test_other_rounds_are_no_comparison() -> None:
    choice = choose(sampled("compile", 0.8), sampled("eager", 1.0, run_id="other"))
    assert (choice["unsure"], choice["confidence"]) == (["eager"], "unsure")
    assert how_sure(choice) == "not compared in common rounds: eager"
    with pytest.raises(BadInput, match="No row has a time"):
        choose(a_record(time_ms=None, peak_bytes=1))


def test_what_is_wrong_or_does_less_is_left_out() -> None:
    wrong = without_time(Status.INCORRECT, "too far off", implementation="liger", mode="step")
    choice = choose(sampled("eager", 1.0), sampled("fused", 0.5, comparable=False), wrong)
    assert choice["implementation"] == "eager"
    assert choice["excluded"] == {"fused": "fewer gradients than eager yields", "liger": "incorrect: too far off"}
    assert how_sure(choice) == "nothing else qualifies"


def test_memory_is_measured_or_by_arithmetic_or_unknown() -> None:
    timed_run = FinishedRun([sampled("eager", 1.0), sampled("compile", 0.8), sampled("mine", 0.7)], {}, None)
    memory = FinishedRun([a_record(implementation="compile", mode="step", time_ms=None, peak_bytes=100)], {})
    (choice,) = recommend([timed_run, memory], KNOWN, 10**9)
    assert (choice["implementation"], choice["peak_bytes"], choice["peak_is_measured"]) == ("compile", 100, True)
    assert choice["excluded"] == {"mine": "its memory is neither measured nor declared"}
    (choice,) = choices = recommend([timed_run, memory], KNOWN, 99)
    assert choice["implementation"] is None
    assert choice["excluded"]["compile"] == "peak 0.000 MiB"
    assert choice["excluded"]["eager"].endswith("MiB by arithmetic")
    assert (how_sure(choice), choice["confidence"]) == ("nothing qualifies", "none")
    text = unwrapped(shown(recommendation_tables(choices, [timed_run, memory]), 100))
    for part in ("small glu step float32", "7 - - - - nothing qualifies", "not considered: compile: peak 0.000 MiB"):
        assert part in text


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda one: one.name)
def test_what_an_implementation_says_of_its_use_is_python(one) -> None:
    compile(one.usage, one.name, "exec")
