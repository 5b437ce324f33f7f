from pathlib import Path

from reported import COMMITTED, EVIL, IN_A_CHECKOUT, awkward, timed, write
from specimens import a_record, without_time

from swiglu_bench.report.load import load
from swiglu_bench.report.page import colours, styles
from swiglu_bench.report.sections import sections
from swiglu_bench.report.sentences import headline, sentences
from swiglu_bench.rows.record import Record, Status


def said(folder: Path) -> str:
    runs = [load(folder)]
    (section, *_) = found = sections(runs)
    return "\n".join(sentences(section, styles(found, colours(runs))[0]))


def test_winners_ties_and_losers_are_named(tmp_path: Path) -> None:
    text = said(awkward(tmp_path / "run"))
    assert f"{EVIL} is the fastest at small (1 token) and " in text
    assert "1.25 times the speed of eager" in text
    assert f"level and {EVIL} tie for the first place" in text or f"{EVIL} and level tie for the first place" in text
    assert "Slower than eager: slow (every case: 1.40 to 1.50 times the time)." in text
    assert "Not to be told from eager: level (" in text
    assert "Not ranked (*), because they do less than the baseline (fewer gradients): frozen." in text
    assert "within 0.20% of 1" in text
    assert "The budget was spent before every ratio was known to within 0.5%: 1k tokens." in text
    assert "Without figures: 2 incorrect, 2 failed and 2 skipped, of 24 rows" in text


def one_case(tmp_path: Path, *records: Record) -> str:
    return said(write(tmp_path / "run", list(records)))


def test_where_nothing_beats_the_baseline(tmp_path: Path) -> None:
    text = one_case(tmp_path, timed("eager", 1, 1.0), timed("a", 1, 1.2))
    assert "Nothing is faster than eager, the baseline, at 1 token." in text


def test_a_tie_with_the_baseline_is_no_win(tmp_path: Path) -> None:
    text = one_case(tmp_path, timed("eager", 1, 1.0), timed("a", 1, 0.999))
    assert "tie for the first place at 1 token." in text
    assert "times the speed" not in text


def test_what_spoils_the_figures_is_said(tmp_path: Path) -> None:
    spoilt = timed(
        "a", 1, 0.5, throttle="software-power-cap", throttled_share=0.25, other_processes=2, gpu_note="No NVML here.",
        queue_filled=0.5,
    )  # fmt: skip
    text = one_case(tmp_path, timed("eager", 1, 1.0), spoilt)
    assert "Clocks were held down by software-power-cap, in up to 25% of the rounds: 1 token." in text
    assert "Another process used the GPU: 1 token." in text
    assert "No NVML here." in text
    assert "Waiting for the host may be in the times of a" in text


def test_rows_of_several_gpus_are_said_to_be(tmp_path: Path) -> None:
    one, other = (
        [a_record(implementation=name, tokens=index + 1, host="h", gpu_index=index, gpu_uuid=f"GPU-{index}")
         for name in ("eager", "mine")]
        for index in (0, 1)
    )  # fmt: skip
    assert "The cases ran on 2 GPUs (h 0, h 1): a ratio is of one of them" in one_case(tmp_path / "both", *one, *other)
    assert "The cases ran on" not in one_case(tmp_path / "one", *one)


def test_a_run_in_which_everything_failed(tmp_path: Path) -> None:
    text = one_case(tmp_path, without_time(Status.ERROR, "no"))
    assert "no winner can be named" in text
    assert "Without figures: 1 failed, of 1 rows" in text


@IN_A_CHECKOUT
def test_the_committed_runs() -> None:
    runs = [load(COMMITTED / name) for name in ("forward", "memory", "verify")]
    found = sections(runs)
    texts = [headline(section, style) for section, style in zip(found, styles(found, colours(runs)), strict=True)]
    assert " times the speed of eager" in texts[0]
    assert any("MiB" in text for text in texts[1:])
    assert any("checked rows are right" in text for text in texts[1:])


def test_who_needs_less_for_doing_less_is_not_the_smallest(tmp_path: Path) -> None:
    bare = {"time_ms": None, "baseline": "", "ratio": None, "ratio_low": None, "ratio_high": None, "mode": "step"}
    sizes = {"small": (50, "x w"), "large": (300, "x w"), "frozen": (10, "x")}
    rows = [
        a_record(implementation=name, tokens=1024, peak_bytes=mib << 20, gradients=gradients, **bare)
        for name, (mib, gradients) in sizes.items()
    ]
    text = one_case(tmp_path, *rows)
    assert "small at 1k tokens: small has the lowest peak, 50 MiB; large the highest, 300 MiB." in text
    assert "fewer gradients and need less for it: frozen." in text


def test_winners_that_change_from_case_to_case_are_counted(tmp_path: Path) -> None:
    names = "abcdefgh"
    rows = [timed("eager", tokens, 1.0) for tokens in range(1, 9)]
    rows += [timed(name, index + 1, 0.5) for index, name in enumerate(names)]
    text = one_case(tmp_path, *rows, timed("a", 2, 0.501))
    assert text.startswith(
        "The winner changes from case to case; of 8, first are a in 2 (alone in 1), b in 1 (alone in 0)"
    )
