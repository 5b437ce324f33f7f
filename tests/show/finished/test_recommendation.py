import numpy as np
import pytest
from rendered import shown, unwrapped
from specimens import a_record, without_time

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.finished.recommendation import Choice, recommend, rows, sentence, tables

KNOWN = {one.name: one for one in CATALOGUE}


def timed(name: str, ratio: float, seed: int = 0, **changes: object) -> Record:
    random = np.random.default_rng(seed)
    samples = tuple(ratio * np.exp(random.normal(0, 0.005, 50)))
    more = {"aa_ratio": 1.0, "aa_low": 0.999, "aa_high": 1.001, "mode": "step", **changes}
    return a_record(implementation=name, ratio=ratio, time_ms=ratio, samples_ms=samples, **more)


def choose(*records: Record, most: int | None = None) -> Choice:
    (choice,) = recommend([FinishedRun(records, {})], KNOWN, most)
    return choice


def best(choice: Choice) -> str:
    assert choice.record
    return choice.record.implementation


def test_the_fastest_is_chosen_and_the_next_is_named() -> None:
    choice = choose(timed("eager", 1.0), timed("compile", 0.8, 1), timed("liger", 0.9, 2))
    assert (best(choice), choice.runner_up, choice.ties, choice.confidence) == ("compile", "liger", [], "clear")
    assert choice.margin
    assert choice.margin.low < 0.9 / 0.8 < choice.margin.high
    assert "liger takes " in sentence(choice)
    assert "torch.compile" in choice.usage


def test_what_is_as_fast_or_within_the_noise_ties() -> None:
    choice = choose(timed("eager", 1.0), timed("compile", 0.8, 1), timed("liger", 0.8001, 2))
    assert (choice.ties, choice.runner_up, choice.confidence) == (["liger"], "eager", "tie")
    assert sentence(choice).startswith("tie with liger; eager takes ")
    noisy = {"aa_low": 0.7, "aa_high": 1.3}
    assert choose(timed("compile", 0.8, 1, **noisy), timed("eager", 1.0, **noisy)).ties == ["eager"]


def test_other_rounds_are_no_comparison() -> None:
    choice = choose(timed("compile", 0.8), timed("eager", 1.0, run_id="other"))
    assert (choice.unsure, choice.confidence) == (["eager"], "unsure")
    assert sentence(choice) == "not compared in common rounds: eager"
    with pytest.raises(BadInput, match="No row has a time"):
        choose(a_record(time_ms=None, peak_bytes=1))


def test_what_is_wrong_or_does_less_is_left_out() -> None:
    wrong = without_time(Status.INCORRECT, "too far off", implementation="liger", mode="step")
    choice = choose(timed("eager", 1.0), timed("fused", 0.5, comparable=False), wrong)
    assert best(choice) == "eager"
    assert choice.excluded == {"fused": "fewer gradients than eager yields", "liger": "incorrect: too far off"}
    assert sentence(choice) == "nothing else qualifies"


def test_memory_is_measured_or_by_arithmetic_or_unknown() -> None:
    timed_run = FinishedRun([timed("eager", 1.0), timed("compile", 0.8), timed("mine", 0.7)], {}, None)
    memory = FinishedRun([a_record(implementation="compile", mode="step", time_ms=None, peak_bytes=100)], {})
    (choice,) = recommend([timed_run, memory], KNOWN, 10**9)
    assert (best(choice), choice.memory.peak_bytes, choice.memory.measured) == ("compile", 100, True)
    assert choice.excluded == {"mine": "its memory is neither measured nor declared"}
    (choice,) = choices = recommend([timed_run, memory], KNOWN, 99)
    assert choice.record is None
    assert choice.excluded["compile"] == "peak 0.000 MiB"
    assert choice.excluded["eager"].endswith("MiB by arithmetic")
    assert (sentence(choice), choice.confidence) == ("nothing qualifies", "none")
    text = unwrapped(shown(tables(choices, [timed_run, memory]), 100))
    for part in ("small glu step float32", "7 - - - - nothing qualifies", "not considered: compile: peak 0.000 MiB"):
        assert part in text


def test_each_case_has_its_own_row() -> None:
    records = [timed("eager", 1.0), timed("mine", 0.9), timed("eager", 0.9, tokens=8)]
    choices = recommend([FinishedRun(records, {})], KNOWN)
    assert [(row["tokens"], row["implementation"]) for row in rows(choices)] == [(7, "mine"), (8, "eager")]
    text = unwrapped(shown(tables(choices, [FinishedRun(records, {})]), 100))
    assert "7 mine 900 us x0.900 - eager takes " in text
    assert "mine: not built in; use it as its registration builds it" in text


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda one: one.name)
def test_what_an_implementation_says_of_its_use_is_python(one) -> None:
    compile(one.usage, one.name, "exec")
