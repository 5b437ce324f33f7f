"""Timed rows as tables and as lines, and what is said of figures that are spoiled."""

import re
from typing import Any

import pytest
from rendered import WIDTHS, assert_every_mark_has_its_reason, assert_fits, shown, unwrapped
from specimens import a_record, without_time

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.tables import cautions, time_line, time_tables

PAIR = {"aa_ratio": 1.0002, "aa_low": 0.9991, "aa_high": 1.0013, "regime": "steady"}


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (a_record(), "mine: ok, 500 us, x0.800 ± 0.010, 2 TFLOP/s, 50.0% of limit"),
        (a_record(verdict="faster"), "mine: ok, 500 us, x0.800 ± 0.010 faster, 2 TFLOP/s, 50.0% of limit"),
        (
            a_record(implementation="eager", **PAIR),
            "eager: ok, 500 us, baseline, A/A 1.0002 [0.9991, 1.0013], 2 TFLOP/s, 50.0% of limit",
        ),
        (a_record(comparable=False), "mine: ok, 500 us, fewer gradients, 2 TFLOP/s, 50.0% of limit"),
        (a_record(baseline="", ratio=None), "mine: ok, 500 us, no baseline, 2 TFLOP/s, 50.0% of limit"),
        (without_time(Status.SKIPPED, "It has no backward."), "mine: skipped: It has no backward."),
        (
            without_time(Status.OK, "", saved_bytes=2**20, peak_bytes=2**22, workspace_bytes=0),
            "mine: ok, saved 1.0 MiB, peak 4.0 MiB, workspace 0.000 MiB",
        ),
        (
            without_time(Status.OK, "", error=1.5e-3, eager_error=2.5e-3),
            "mine: ok, worst error 1.50e-03 (eager 2.50e-03)",
        ),
    ],
)
def test_a_row_as_a_line(record: Record, text: str) -> None:
    assert time_line(record) == f"small glu forward float32 tokens=7 {text}"


def a_sweep() -> list[Record]:
    """Two shapes, four token counts, and every way in which a row can end."""
    records = []
    for shape in ("small", "large"):
        for tokens in (1, 128, 4096, 16384):
            same = {"shape": shape, "tokens": tokens}
            records += [
                a_record(implementation="eager", ratio=1.0, time_ms=0.6, **same),
                a_record(implementation="mine", **same),
                a_record(implementation="frozen", time_ms=0.1, comparable=False, ratio=None, **same),
                without_time(Status.SKIPPED, "Triton kernels need a GPU.", implementation="liger", **same),
                without_time(Status.SKIPPED, "Triton kernels need a GPU.", implementation="unsloth", **same),
            ]
            end = without_time(Status.INCORRECT, f"output: relative error {tokens}.", implementation="wrong", **same)
            records.append(end if tokens > 1 else a_record(implementation="wrong", **same))
            reason = "ValueError: [red]x[/red] [/nonsense] shape [3, 4]"  # rich reads it as markup unless told not to
            records.append(without_time(Status.ERROR, reason, implementation="fused-dw-triton-preact", **same))
            end = without_time(Status.SKIPPED, f"It needs about {tokens} GiB.", implementation="big", **same)
            records.append(end if tokens > 128 else a_record(implementation="big", **same))
    return records


@WIDTHS
def test_a_table_per_shape_with_every_mark_explained_under_it(width: int) -> None:
    found = [shown(iter([one]), width) for one in time_tables(a_sweep(), width)]
    assert len(found) == 2
    for text, shape in zip(found, ("small", "large"), strict=True):
        assert text.startswith(f"{shape}  (hidden 24, intermediate 40)")
        reasons = [f"output: relative error {tokens}." for tokens in (128, 4096, 16384)]
        reasons += [f"It needs about {tokens} GiB." for tokens in (4096, 16384)]
        assert_every_mark_has_its_reason(text, [*reasons, "ValueError: [red]x[/red] [/nonsense] shape [3, 4]"])
        assert_fits(text, width)
        for number in (1, 128, 4096, 16384):
            assert re.search(rf"^ tokens.*\b{number}\b", text, flags=re.MULTILINE)
        assert unwrapped(text).count("skipped: liger, unsloth: Triton kernels need a GPU.") == 1
        assert text.count("liger") == 1


def test_the_fastest_of_those_that_do_the_same_work_is_marked() -> None:
    records = [record for record in a_sweep() if record.shape == "small" and record.tokens == 128]
    text = shown(time_tables(records, 100), 100)
    (starred,) = [line for line in text.splitlines() if re.search(r"us \*", line)]
    assert starred.split()[0] == "mine"
    assert "'fewer gradients' rows do less work (frozen weights) and are not ranked." in unwrapped(text)
    assert "us *" not in shown(time_tables([a_record()], 100), 100), "one row alone is not the fastest"


@WIDTHS
def test_verdicts_and_the_a_a_pair_are_in_the_table(width: int) -> None:
    records = [
        a_record(implementation=name, verdict=verdict, tokens=tokens, **PAIR)
        for tokens in (1, 8192)
        for name, verdict in (("eager", ""), ("mine", "faster"), ("liger", "slower"), ("compile", "tie"))
    ]
    text = shown(time_tables(records, width), width)
    assert_fits(text, width)
    for verdict in ("faster", "slower", "tie"):
        assert len(re.findall(rf"us (?:\* )?{verdict}\b", text)) == 2
    assert len(re.findall(r"1\.0002", text)) == len(re.findall(r"\[0\.9991, 1\.0013\]", text)) == 2


@WIDTHS
def test_what_a_caller_feels_is_shown_for_few_tokens_or_when_asked(width: int) -> None:
    felt = {"host_us": 163.2, "latency_us": 180.25, "graph_us": 161.5, "uj_per_token": 12345.0, **PAIR}
    reason = "It cannot be recorded: x"
    records = [a_record(tokens=tokens, **felt) for tokens in (2, 128, 256)]
    records += [a_record(tokens=257, **felt | {"latency_us": 91.0})]
    records += [a_record(tokens=1, implementation="liger", **felt | {"graph_us": None, "graph_reason": reason})]
    few, all_of_them = (shown(time_tables(records, width, detail), width) for detail in (False, True))
    for text in (few, all_of_them):
        assert_fits(text, width)
        assert text.count("163.2 / 180.2 / 161.5") == 3
        assert "163.2 / 180.2 / -" in text
        assert "12.3 mJ a token" in text
        assert f"no graph time: liger: {reason}" in unwrapped(text)
    assert "91 /" not in few
    assert "163.2 / 91 / 161.5" in all_of_them


CALM = {"stopped_by": "precision", "throttle": "", "other_processes": 0, "gpu_note": ""}


def said(*rows: Record) -> list[str]:
    return [text for text, _ in cautions(rows)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stopped_by": "budget"}, ["budget", "7 tokens"]),
        ({"throttle": "software-power-cap", "throttled_share": 0.83}, ["software-power-cap", "83%", "7 tokens"]),
        ({"other_processes": 2}, ["process", "7 tokens"]),
        ({"gpu_note": "NVML does not answer: Driver Not Loaded."}, ["NVML does not answer: Driver Not Loaded."]),
        ({"remarks": "Not checked by the wall clock."}, ["mine", "7 tokens", "Not checked by the wall clock."]),
    ],
)
def test_what_spoils_the_figures_is_said_once_and_where(changes: dict[str, Any], words: list[str]) -> None:
    spoilt = a_record(**CALM | changes)
    (sentence,) = said(a_record(**CALM, tokens=1024), spoilt, spoilt)
    assert all(word in sentence for word in words)
    assert said(a_record(**CALM)) == []


def test_where_cases_of_several_gpus_ran_is_said() -> None:
    rows = [a_record(tokens=index + 1, host="h", gpu_index=index, gpu_uuid=f"GPU-{index}") for index in range(10)]
    assert said(*rows)[0].startswith("The cases ran on 10 GPUs (h 0, h 1, h 2, h 3, h 4, h 5, h 6, h 7 and 2 more): ")
    assert said(rows[0], rows[0]) == []
