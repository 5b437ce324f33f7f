"""The samples of rows: a line per round, or per step of a training, in the file beside the rows."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows import csv_table
from swiglu_bench.rows.figures import Figure
from swiglu_bench.rows.record import LAYOUTS, GpuState, Record

STATE = ("sm_mhz", "power_w", "temperature_c", "throttle")
"""Of the GPU after the round."""
PARTS = ("compute_ms", "comm_ms", "single_ms")
OF_STEPS = ("loss", "learning_rate", "step_ms")
OF_ROUNDS = {"run": ("time_ms", "twin_ms", *STATE), "tp": ("time_ms", "twin_ms", *PARTS), "seeds": OF_STEPS}
"""What is known of each round or step, by kind of row."""
COLUMNS = {
    kind: (*LAYOUTS[kind].key, "step" if kind == "seeds" else "round", *names) for kind, names in OF_ROUNDS.items()
}
FIGURES = {
    "round": Figure("number of the round, from 0; samples of two implementations in the same round form one ratio"),
    "twin_ms": Figure("on the baseline's rows: the sample of the first additional baseline process (A/A)", "ms"),
    "step": Figure("number of the step, from 0"),
    "loss": Figure("mean over the batch", "nats", "lower"),
    "learning_rate": Figure("learning rate of this step"),
    "step_ms": Figure(
        "wall-clock time until the loss is known, including compilation in the first step; contenders "
        "ran one after another, so these times cannot be compared",
        "ms",
    ),
}
"""What rows do not have."""
Round = dict[str, Any]
Line = TypeVar("Line")
Key = tuple[str, ...]


def lines(record: Record) -> Iterator[list[Any]]:
    """The lines of a row."""
    known: dict[str, Sequence[Any]] = {"time_ms": record.samples_ms, "twin_ms": record.twin_ms, **record.series}
    known |= {name: [getattr(state, name) for state in record.states] for name in STATE}
    key = attrgetter(*LAYOUTS[record.kind].key)(record)
    rounds = itertools.zip_longest(*(known.get(name, ()) for name in OF_ROUNDS[record.kind]))
    for number, values in enumerate(rounds):
        yield [*key, number, *values]


def parsed(kind: str, line: Mapping[str, str]) -> Round:
    """What a line says of its round or step; raises ValueError or KeyError for one that is none.

    Old files of samples lack columns; those of `tp` and `train` always had all.
    """
    always = OF_ROUNDS[kind][:1] if kind == "run" else OF_ROUNDS[kind]
    cells = {name: line[name] if name in always else line.get(name) for name in OF_ROUNDS[kind]}
    first = OF_ROUNDS[kind][0]
    numbers: Round = {name: float(cell) if cell else None for name, cell in cells.items() if name != "throttle"}
    return {"throttle": cells.get("throttle"), **numbers, first: float(line[first])}


def enter(record: Record, rounds: Sequence[Round]) -> None:
    """Give a row that was read its samples."""

    def known(name: str) -> tuple[float, ...]:
        return tuple(value for each in rounds if (value := each.get(name)) is not None)

    record.samples_ms, record.twin_ms = known("time_ms"), known("twin_ms")
    record.series = {name: values for name in (*PARTS, *OF_STEPS) if (values := known(name))}
    states = [GpuState(*map(each.get, STATE)) for each in rounds]
    record.states = tuple(state for state in states if state.sm_mhz is not None or state.power_w is not None)


def attach(records: Sequence[Record], folder: Path) -> None:
    """Give rows that were read their samples, from the file beside theirs. Raises BadInput for one that is broken."""
    kind = records[0].kind
    layout = LAYOUTS[kind]
    rounds = beside(folder / layout.samples, partial(parsed, kind), layout.key)
    for record in records:
        enter(record, rounds.get(key_of(record), ()))


def key_of(record: Record) -> Key:
    """What names the row in the files beside its own."""
    return tuple(csv_table.cell(getattr(record, name)) for name in LAYOUTS[record.kind].key)


def beside(file: Path, made: Callable[[dict[str, str]], Line], key: Sequence[str]) -> dict[Key, list[Line]]:
    """The lines of another file of the run by the record that they belong to, in the file's order."""
    found: dict[Key, list[Line]] = {}
    try:
        for row in csv_table.texts(file):
            found.setdefault(tuple(row[column] for column in key), []).append(made(row))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        reason = f"it has no column {error}" if isinstance(error, KeyError) else str(error)
        raise BadInput(f"{file} cannot be read: {reason}; fix or delete it.") from None
    return found
