import dataclasses

from specimens import a_split_row

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show import tables

FIGURES = {"time_ms": 3.06, "hidden_share": 0.5, "verdict": "baseline"}


def row(name: str, **more: object) -> Record:
    return a_split_row(name, shape="made-up", tokens=2048, device="A GPU", **more)


def test_tables_say_every_reason_once():
    found = [row("eager"), row("mine"), row("gone", status=Status.SKIPPED, reason="It is not here.")]
    for timed in found[:2]:
        for name, value in FIGURES.items():
            setattr(timed, name, value)
    found.append(dataclasses.replace(found[-1], tokens=4096))
    found[1].ratio, found[1].verdict = 0.75, "faster"
    found[1].single_reason = "out of memory"
    speed, parts, *texts = tables.tp_tables(found)
    assert speed.title == "forward, mlp made-up (1024 x 4096), bfloat16, 4 x A GPU, sequence parallel"
    assert [list(column.cells)[1] for column in speed.columns][1:3] == ["mine", "3.06"]
    assert "50%" in [list(column.cells)[1] for column in parts.columns]
    lines = [text.plain for text in texts]
    assert "skipped: gone: It is not here." in lines
    assert any("mine" in line and "out of memory" in line for line in lines)
    assert "4 ranks" in tables.tp_line(found[1])
    assert "0.750 of eager, faster" in tables.tp_line(found[1])
