import re
from typing import Any

import pytest
from rendered import WIDTHS, assert_every_mark_has_its_reason, assert_fits, shown, unwrapped
from specimens import a_record, without_time

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.writers.time_tables import milliseconds, rate, ratio, time_line, time_tables

# Figures


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123456, "12.35 us"), (0.9994, "999.4 us"), (1.0, "1 ms"), (12.3456, "12.35 ms"), (9999.0, "9999 ms"),
        (12345.6, "12.35 s"),
    ],
)  # fmt: skip
def test_times(value: float, text: str) -> None:
    assert milliseconds(value) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"limit_kind": "matmul", "tflops": 712.4}, "712 TFLOP/s"),
        ({"limit_kind": "matmul", "tflops": 7.124}, "7.12 TFLOP/s"),
        ({"limit_kind": "matmul", "tflops": 0.0712}, "71.2 GFLOP/s"),
        ({"limit_kind": "bandwidth", "gbps": 3951.7}, "3952 GB/s"),
        ({"limit_kind": "bandwidth", "gbps": 0.5}, "0.5 GB/s"),
    ],
)
def test_rates(fields: dict[str, Any], text: str) -> None:
    assert rate(a_record(**fields)) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "x0.800 ±0.010"),
        ({"implementation": "eager"}, "baseline"),
        ({"comparable": False, "ratio": None}, "fewer gradients"),
        ({"ratio": None}, "no baseline"),
        ({"baseline": "", "ratio": None}, "no baseline"),
    ],
)
def test_ratios(fields: dict[str, Any], text: str) -> None:
    assert ratio(a_record(**fields)) == text


# Lines


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (a_record(), "small glu forward float32 tokens=7 mine: ok, 500 us, x0.800 ±0.010, 2 TFLOP/s, 50.0% of limit"),
        (
            without_time(Status.SKIPPED, "It has no backward."),
            "small glu forward float32 tokens=7 mine: skipped: It has no backward.",
        ),
        (
            without_time(Status.OK, "", saved_bytes=2**20, peak_bytes=2**22, workspace_bytes=0),
            "small glu forward float32 tokens=7 mine: ok, saved 1.0 MiB, peak 4.0 MiB, workspace 0.000 MiB",
        ),
        (
            without_time(Status.OK, "", error=1.5e-3, eager_error=2.5e-3),
            "small glu forward float32 tokens=7 mine: ok, worst error 1.50e-03 (eager 2.50e-03)",
        ),
    ],
)
def test_a_row_as_a_line(record: Record, text: str) -> None:
    assert time_line(record) == text


# Tables of times


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
            end = without_time(Status.ERROR, "RuntimeError: broken", implementation="fused-dw-triton-preact", **same)
            records.append(end)
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
        assert_every_mark_has_its_reason(text, [*reasons, "RuntimeError: broken"])
        assert_fits(text, width)
        for number in (1, 128, 4096, 16384):
            assert re.search(rf"^ tokens.*\b{number}\b", text, flags=re.MULTILINE)


@WIDTHS
def test_what_is_skipped_everywhere_for_one_reason_is_one_line(width: int) -> None:
    text = unwrapped(shown(time_tables(a_sweep(), width), width))
    assert text.count("skipped: liger, unsloth: Triton kernels need a GPU.") == 2
    assert text.count("liger") == 2


def test_the_fastest_of_those_that_do_the_same_work_is_marked() -> None:
    records = [record for record in a_sweep() if record.shape == "small" and record.tokens == 128]
    text = shown(time_tables(records, 100), 100)
    (starred,) = [line for line in text.splitlines() if re.search(r"us \*", line)]
    assert starred.split()[0] == "mine"
    assert "fewer gradients" in text
    assert "'fewer gradients' rows do less work (frozen weights) and are not ranked." in unwrapped(text)


def test_one_row_alone_is_not_the_fastest() -> None:
    assert "us *" not in shown(time_tables([a_record()], 100), 100)


def test_the_legend_says_what_the_figures_are() -> None:
    text = unwrapped(shown(time_tables([a_record(rounds=12), a_record(tokens=9, rounds=40)], 100), 100))
    assert "median time of 12 to 40 interleaved rounds" in text
    assert "x: time / eager's time in the same round, ± half its 95% interval" in text
    assert "copy 4000 GB/s, float32 product 700 TFLOP/s" in text
    assert "L2 cold." in text


def noisy(**changes: Any) -> Record:
    return a_record(**{"aa_ratio": 1.0002, "aa_low": 0.9991, "aa_high": 1.0013, "regime": "steady"} | changes)


@WIDTHS
def test_verdicts_and_the_a_a_pair_are_in_the_table(width: int) -> None:
    records = [
        noisy(implementation=name, verdict=verdict, tokens=tokens)
        for tokens in (1, 8192)
        for name, verdict in (("eager", ""), ("mine", "faster"), ("liger", "slower"), ("compile", "tie"))
    ]
    text = shown(time_tables(records, width), width)
    assert_fits(text, width)
    for verdict in ("faster", "slower", "tie"):
        assert len(re.findall(rf"us (?:\* )?{verdict}\b", text)) == 2
    assert len(re.findall(r"1\.0002", text)) == len(re.findall(r"\[0\.9991, 1\.0013\]", text)) == 2
    assert "A/A: eager against itself in the same rounds: what is no further from 1 is a tie" in unwrapped(text)


def test_without_a_pair_there_is_no_a_a_row() -> None:
    assert "A/A" not in shown(time_tables([a_record()], 100), 100)


def test_the_datasheet_stands_beside_the_measured_limit() -> None:
    text = unwrapped(shown(time_tables([noisy(datasheet_gbps=4800.0, datasheet_tflops=989.0)], 100), 100))
    assert "copy 4000 GB/s (datasheet 4800), float32 product 700 TFLOP/s (datasheet 989)" in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stopped_by": "budget"}, "The budget was spent before every ratio was known to within 0.5%: 7 tokens."),
        (
            {"throttle": "software-power-cap", "throttled_share": 0.83},
            "Clocks were held down by software-power-cap, in up to 83% of the rounds: 7 tokens.",
        ),
        ({"other_processes": 2}, "Another process used the GPU: 7 tokens."),
        ({"gpu_note": "NVML does not answer: Driver Not Loaded."}, "NVML does not answer: Driver Not Loaded."),
    ],
)
def test_the_caption_says_what_spoils_the_figures(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in unwrapped(shown(time_tables([noisy(**changes)], 100), 100))
    calm = {"stopped_by": "precision", "throttle": "", "other_processes": 0, "gpu_note": ""}
    assert sentence not in unwrapped(shown(time_tables([noisy(**calm)], 100), 100))


def test_the_caption_says_where_cases_of_several_gpus_ran() -> None:
    rows = [noisy(tokens=index + 1, host="h", gpu_index=index, gpu_uuid=f"GPU-{index}") for index in range(10)]
    text = unwrapped(shown(time_tables(rows, 200), 200))
    assert "The cases ran on 10 GPUs (h 0, h 1, h 2, h 3, h 4, h 5, h 6, h 7 and 2 more): a ratio is of one" in text
    assert "The cases ran" not in unwrapped(shown(time_tables(rows[:1], 200), 200))


@WIDTHS
def test_what_a_caller_feels_is_shown_for_few_tokens_or_when_asked(width: int) -> None:
    felt = {"latency_us": 80.25, "graph_us": 61.5, "uj_per_token": 12345.0}
    records = [
        noisy(tokens=256, **felt),
        noisy(tokens=257, **felt | {"latency_us": 91.0}),
        noisy(
            tokens=1, implementation="liger", **felt | {"graph_us": None, "graph_reason": "It cannot be recorded: x"}
        ),
    ]
    few, all_of_them = (shown(time_tables(records, width, detail), width) for detail in (False, True))
    for text in (few, all_of_them):
        assert_fits(text, width)
        assert "3 / 80.25 / 61.5" in text
        assert "3 / 80.25 / -" in text
        assert "12.3 mJ a token" in text
        assert "no graph time: liger: It cannot be recorded: x" in unwrapped(text)
    assert "91 /" not in few
    assert "3 / 91 / 61.5" in all_of_them


def test_a_cpu_s_rows_have_no_second_table() -> None:
    assert "latency" not in shown(time_tables([noisy()], 100, True), 100)


def test_nothing_is_said_of_what_is_not_there() -> None:
    text = unwrapped(shown(time_tables([a_record(baseline="", ratio=None, l2="cpu")], 100), 100))
    assert "no baseline" in text
    assert "in the same round" not in text
    assert "L2" not in text


def test_scopes_modes_and_dtypes_have_tables_of_their_own() -> None:
    records = [
        a_record(scope=scope, mode=mode, dtype=dtype)
        for scope in ("glu", "mlp")
        for mode in ("forward", "step")
        for dtype in ("float32", "bfloat16")
    ]
    assert len(list(time_tables(records, 100))) == 8


def test_a_sweep_in_which_nothing_ran_still_says_why() -> None:
    text = shown(time_tables([without_time(Status.SKIPPED, "It needs about 900.0 GiB.")], 60), 60)
    assert "skipped: mine: It needs about 900.0 GiB." in text
    assert "median" not in text


def test_no_rows_no_tables() -> None:
    assert list(time_tables([], 100)) == []


@WIDTHS
def test_text_in_brackets_is_text(width: int) -> None:
    """Rich reads [red] as a colour unless told otherwise; an error message may hold anything."""
    record = without_time(Status.ERROR, "ValueError: [red]x[/red] [/nonsense] shape [3, 4]", tokens=1)
    text = unwrapped(shown(time_tables([record, a_record()], width), width))
    assert "ValueError: [red]x[/red] [/nonsense] shape [3, 4]" in text
