import pytest
from reported import COMMITTED, EVIL, IN_A_CHECKOUT, a_memory, a_run, awkward_rows, timed
from specimens import a_record, without_time

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.report.load import load
from swiglu_bench.show.report.questions import colours, style_of
from swiglu_bench.show.report.sections import sections
from swiglu_bench.show.report.sentences import headline, sentences


def said(*rows: Record) -> str:
    runs = [a_run(*rows)]
    (section, *_) = sections(runs)
    return "\n".join(sentences(section, style_of(section, colours(runs))))


def test_winners_ties_and_losers_are_named() -> None:
    text = said(*awkward_rows())
    assert f"{EVIL} is the fastest at small (1 token) and " in text
    assert "1.25 times the speed of eager" in text
    assert f"level and {EVIL} tie for the first place" in text or f"{EVIL} and level tie for the first place" in text
    for sentence in (
        "Slower than eager: slow (every case: 1.40 to 1.50 times the time).",
        "Not distinguishable from eager: level (",
        "Not ranked (*), because they do less than the baseline (fewer gradients): frozen.",
        "within 0.20% of 1",
        "The budget was spent before every ratio was known to within 0.5%: 1k tokens.",
        "Without figures: 2 incorrect, 2 failed and 2 skipped, of 24 rows",
    ):
        assert sentence in text, sentence


def test_where_nothing_beats_the_baseline() -> None:
    assert "Nothing is faster than eager, the baseline, at 1 token." in said(timed("eager", 1, 1.0), timed("a", 1, 1.2))
    text = said(timed("eager", 1, 1.0), timed("a", 1, 0.999))
    assert "tie for the first place at 1 token." in text
    assert "times the speed" not in text


def test_waiting_for_the_host_and_other_cautions_are_said() -> None:
    text = said(timed("eager", 1, 1.0), timed("a", 1, 0.5, queue_filled=0.5, other_processes=2))
    assert "Waiting for the host may be in the times of a at 1 token (queue_filled)." in text
    assert "Another process used the GPU: 1 token." in text
    assert "Not checked by" in said(timed("eager", 1, 1.0), timed("a", 1, 0.5, remarks="Not checked by the clock."))
    text = said(without_time(Status.ERROR, "no"))
    assert "no winner can be named" in text
    assert "Without figures: 1 failed, of 1 rows" in text


@IN_A_CHECKOUT
@pytest.mark.parametrize(
    ("name", "part"),
    [("forward", " times the speed of eager"), ("memory-mlp", "MiB"), ("verify", "checked rows are right")],
)
def test_the_committed_runs(name: str, part: str) -> None:
    runs = [load(COMMITTED / name)]
    assert part in headline(sections(runs)[0], style_of(sections(runs)[0], colours(runs)))


def test_who_needs_less_memory_for_doing_less_is_not_the_smallest() -> None:
    rows = [a_memory("low", 50), a_memory("high", 300), a_memory("frozen", 10, gradients="x")]
    text = said(*rows)
    assert "small at 1k tokens: low has the lowest peak, 50.0 MiB; high the highest, 300.0 MiB." in text
    assert "compute fewer gradients and therefore need less: frozen." in text


def test_wrong_rows_are_named() -> None:
    rows = [a_record(time_ms=None, command="verify"), without_time(Status.INCORRECT, "off", command="verify")]
    assert "1 of 2 checked rows are right; the nearest to the limit is mine" in said(*rows)
    assert "Incorrect: mine." in said(*rows)


def test_winners_that_change_from_case_to_case_are_counted() -> None:
    rows = [timed("eager", tokens, 1.0) for tokens in range(1, 9)]
    rows += [timed(name, index + 1, 0.5) for index, name in enumerate("abcdefgh")]
    assert said(*rows, timed("a", 2, 0.501)).startswith(
        "The winner changes from case to case; of 8, first are a in 2 (alone in 1), b in 1 (alone in 0)"
    )
