import dataclasses

import pytest
from rich.table import Table
from rich.text import Text
from specimens import a_split_row

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds, Timing
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.rows.samples import PARTS
from swiglu_bench.show import tables
from swiglu_bench.tasks.tp.figures import COLLECTIVES, TWIN, fill, key
from swiglu_bench.tasks.tp.plan import LOCAL, SINGLE

CASE = Case(Shape("made-up", 1024, 4096, "for tests", ()), 2048, Dtype.BFLOAT16, Scope.MLP, Mode.FORWARD)


def row(name: str, **more: object) -> Record:
    return a_split_row(name, shape="made-up", tokens=2048, device="A GPU", **more)


def rounds(**ms: float) -> Rounds:
    """Twenty rounds in which each takes the same time but for drift that hits all alike."""
    drift = [1 + 0.01 * (number % 5) for number in range(20)]
    timings = {name: Timing([Sample(value * one, 1.0, 1.0, True, None) for one in drift]) for name, value in ms.items()}
    return Rounds(timings, "budget")


def measured(**more: float) -> Rounds:
    keys = {key("eager", True): 4.0, key(TWIN, True): 4.0, key("mine", True): 3.0, key("mine", LOCAL): 2.5,
            key("mine", SINGLE): 9.6, key("eager", LOCAL): 2.5, key("eager", SINGLE): 10.0,
            key(COLLECTIVES, True): 1.0}  # fmt: skip
    return rounds(**(keys | more))


def test_times_ratios_and_parts_are_of_the_same_rounds():
    mine = row("mine")
    fill(mine, measured(), CASE, "mine", True, 400.0)
    assert mine.ratio == pytest.approx(0.75)
    assert mine.verdict == "faster"
    assert mine.hidden_share == pytest.approx(0.5)  # of 1 ms half is seen behind 2.5 ms
    assert mine.efficiency == pytest.approx(9.6 / 4 / 3)
    assert mine.comm_bytes == 2 * 2048 * 1024 * 2
    assert mine.bus_gbps == pytest.approx(2 * 3 / 4 * 2048 * 1024 * 2 / (1.02e-3 * 1e9))
    assert mine.bus_ceiling_gbps == 400.0
    assert (len(mine.samples_ms), mine.twin_ms) == (20, ())
    assert {name: len(times) for name, times in mine.series.items()} == dict.fromkeys(PARTS, 20)


def test_hidden_is_not_cut_off_where_the_whole_takes_longer_than_its_parts():
    mine = row("mine")
    fill(mine, measured(**{key("mine", True): 4.5}), CASE, "mine", True, None)
    assert mine.hidden_share == pytest.approx(-1.0)


def test_asynchronous_compile_is_compared_with_compile_without_collectives():
    mine = row("compile-async-tp")
    keys = {key("compile-async-tp", True): 2.8, key("compile", LOCAL): 2.4, key("compile", SINGLE): 9.0}
    fill(mine, measured(**keys), CASE, "compile-async-tp", True, None)
    assert mine.compute_ms == pytest.approx(2.4 * 1.02)
    assert mine.single_ms == pytest.approx(9.0 * 1.02)


def test_tables_say_every_reason_once():
    found = [row("eager"), row("mine"), row("gone", status=Status.SKIPPED, reason="It is not here.")]
    for one in found[:2]:
        fill(one, measured(), CASE, one.implementation, True, 400.0)
    found.append(dataclasses.replace(found[-1], tokens=4096))
    found[1].single_reason = "out of memory"
    shown = list(tables.tp_tables(found))
    speed, parts = (part for part in shown if isinstance(part, Table))
    assert speed.title == "forward, mlp made-up (1024 x 4096), bfloat16, 4 x A GPU, sequence parallel"
    assert [list(column.cells)[1] for column in speed.columns][1:3] == ["mine", "3.06"]
    assert "50%" in [list(column.cells)[1] for column in parts.columns]
    lines = [part.plain for part in shown if isinstance(part, Text)]
    assert "skipped: gone: It is not here." in lines
    assert any("mine" in line and "out of memory" in line for line in lines)
    assert "4 ranks" in tables.tp_line(found[1])
    assert "0.750 of eager, faster" in tables.tp_line(found[1])
