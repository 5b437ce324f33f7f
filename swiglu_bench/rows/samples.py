"""The samples of rows: a line per round, in the file beside the rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from swiglu_bench.rows.figures import Figure
from swiglu_bench.rows.record import LAYOUTS, GpuState, Record

STATE = ("sm_mhz", "power_w", "temperature_c", "throttle")
"""Of the GPU after the round."""
PARTS = ("compute_ms", "comm_ms", "single_ms")
OF_ROUNDS = {"run": ("time_ms", "twin_ms", *STATE), "tp": ("time_ms", "twin_ms", *PARTS)}
"""What is known of each round, by kind of row."""
COLUMNS = {kind: (*LAYOUTS[kind].key, "round", *names) for kind, names in OF_ROUNDS.items()}
FIGURES = {
    "round": Figure("number of the round, from 0; samples of two implementations in the same round form one ratio"),
    "twin_ms": Figure("on the baseline's rows: the sample of the first additional baseline process (A/A)", "ms"),
}
"""What rows do not have."""
Round = dict[str, Any]


def lines(record: Record) -> Iterator[list[Any]]:
    """The lines of a row."""
    known: dict[str, Sequence[Any]] = {"time_ms": record.samples_ms, "twin_ms": record.twin_ms, **record.parts_ms}
    known |= {name: [getattr(state, name) for state in record.states] for name in STATE}
    key = attrgetter(*LAYOUTS[record.kind].key)(record)
    rounds = itertools.zip_longest(*(known.get(name, ()) for name in OF_ROUNDS[record.kind]))
    for number, values in enumerate(rounds):
        yield [*key, number, *values]


def parsed(kind: str, line: Mapping[str, str]) -> Round:
    """What a line says of its round; raises ValueError or KeyError for one that is none.

    Old files of samples lack columns; those of `tp` always had all.
    """
    cells = {name: line[name] if kind == "tp" else line.get(name) for name in OF_ROUNDS[kind] if name != "time_ms"}
    numbers: Round = {name: float(cell) if cell else None for name, cell in cells.items() if name != "throttle"}
    return {"throttle": cells.get("throttle"), **numbers, "time_ms": float(line["time_ms"])}


def enter(record: Record, rounds: Sequence[Round]) -> None:
    """Give a row that was read its samples."""

    def known(name: str) -> tuple[float, ...]:
        return tuple(value for one in rounds if (value := one.get(name)) is not None)

    record.samples_ms, record.twin_ms = known("time_ms"), known("twin_ms")
    record.parts_ms = {name: values for name in PARTS if (values := known(name))}
    states = [GpuState(*map(one.get, STATE)) for one in rounds]
    record.states = tuple(one for one in states if one.sm_mhz is not None or one.power_w is not None)
