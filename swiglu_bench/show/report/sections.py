"""Runs cut into sections: rows of one kind of work, because device, scope, mode and dtype are the same.

What is ranked are rows of one case of one run. Memory is measured by a run of its own; it joins the times of a step by
device and case, and nothing else is joined.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Self

from swiglu_bench.rows.figures import together
from swiglu_bench.rows.finished_run import case_of
from swiglu_bench.rows.record import Record, Status, grouped, unique
from swiglu_bench.show.report.load import ReportedRun

Kind = Literal["time", "memory", "verify"]
KINDS: tuple[Kind, ...] = ("time", "memory", "verify")
MEMORY = ("saved_bytes", "peak_bytes", "workspace_bytes")
WORK = {"glu": "x to silu(x Wg) * (x Wu)", "activation": "gate, up to silu(gate) * up", "mlp": "x to out, all of it",
        "experts": "x and its routing to out: sort, products, gate and weighted sum"}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """Rows about the same work on the same kind of device, whatever the shape and token count."""

    kind: Kind
    runs: Sequence[ReportedRun]
    device: str
    scope: str
    mode: str
    rows: Sequence[Record]
    memory_from: Sequence[str] = ()
    """The runs whose memory figures stand in the rows, where they are others."""

    @property
    def dtype(self) -> str:
        """Of `verify`, which is about errors alone: all of them, comma-separated."""
        return ", ".join(unique(row.dtype for row in self.rows))

    @property
    def routing(self) -> str:
        """How tokens were sent to experts; empty for a dense block."""
        return self.rows[0].routing

    @property
    def names(self) -> str:
        """The runs that the rows are from."""
        return together([run.name for run in self.runs])

    @property
    def title(self) -> str:
        """What the section is about, without the machine."""
        head = {"time": self.mode, "memory": "memory", "verify": "verification"}[self.kind]
        return ", ".join(
            filter(None, (f"{head} of {self.scope}", self.dtype, self.routing and f"{self.routing} routing"))
        )

    @property
    def ok(self) -> list[Record]:
        """The rows whose figures count."""
        return [row for row in self.rows if row.status is Status.OK]

    @property
    def timed(self) -> list[Record]:
        """The rows whose times count."""
        return [row for row in self.ok if row.time_ms is not None]

    @property
    def baseline(self) -> str:
        """What ratios are relative to; empty where no row has one."""
        return next((row.baseline for row in self.rows if row.baseline), "")

    def of(self, run: ReportedRun) -> list[Record]:
        """The rows of one of the runs."""
        cases = {case_of(row) for row in run.records}
        return [row for row in self.rows if case_of(row) in cases]

    def joined(self, other: Self) -> Self:
        """With the rows of another one."""
        memory_from = unique([*self.memory_from, *other.memory_from])
        runs, rows = [*self.runs, *other.runs], [*self.rows, *other.rows]
        return dataclasses.replace(self, runs=runs, rows=rows, memory_from=memory_from)


def sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """All sections of each of these runs: times first, then memory, then verification."""
    found = [one for run in runs for one in _of_run(run)]
    memories = [one for one in found if one.kind == "memory"]
    return sorted((_with_memory(one, memories) for one in found), key=lambda one: KINDS.index(one.kind))


def by_work(found: Sequence[Section]) -> list[Section]:
    """The sections with those of the same kind of work as one, those with the most rows first of each kind.

    Sections that measured the same case stay apart.
    """
    works: list[Section] = []
    for one in found:
        mine = {case_of(row) for row in one.rows}
        for number, other in enumerate(works):
            if _alike(one, other) and mine.isdisjoint(map(case_of, other.rows)):
                works[number] = other.joined(one)
                break
        else:
            works.append(one)
    return sorted(works, key=lambda one: (KINDS.index(one.kind), -len(one.rows)))


def _alike(one: Section, other: Section) -> bool:
    same = ("kind", "device", "scope", "mode", "routing", "baseline", *(("dtype",) if one.kind != "verify" else ()))
    return all(getattr(one, name) == getattr(other, name) for name in same)


def _of_run(run: ReportedRun) -> Iterator[Section]:
    checked: dict[tuple[str, ...], list[Record]] = {}
    key = attrgetter("device", "scope", "mode", "routing", "dtype")
    for (device, scope, mode, routing, _), rows in grouped(run.records, key).items():
        kind = _kind(rows)
        if kind == "verify":
            checked.setdefault((device, scope, mode, routing), []).extend(rows)
        else:
            yield Section(kind, [run], device, scope, mode, rows)
    for (device, scope, mode, _), rows in checked.items():
        yield Section("verify", [run], device, scope, mode, rows)


def _kind(rows: Sequence[Record]) -> Kind:
    """What was measured or, where every row failed, what the command was to measure."""
    if any(row.time_ms is not None for row in rows):
        return "time"
    if any(row.peak_bytes is not None for row in rows):
        return "memory"
    said = re.match(r"(?:\S*swiglu-bench )?(memory|verify)\b", rows[0].command)
    if said:
        return "memory" if said[1] == "memory" else "verify"
    return "verify" if any(row.status is Status.OK for row in rows) else "time"


def _with_memory(section: Section, memories: Sequence[Section]) -> Section:
    """The section with the memory of the same cases on the same machine, from the last run that has it."""
    if section.kind != "time" or section.mode != "step" or any(row.peak_bytes is not None for row in section.rows):
        return section
    for other in reversed(memories):
        if other.device != section.device:
            continue
        sizes = {_work(row): {name: getattr(row, name) for name in MEMORY} for row in other.ok}
        if any(sizes.get(_work(row), {}).get("peak_bytes") is not None for row in section.rows):
            rows = [dataclasses.replace(row, **sizes.get(_work(row), {})) for row in section.rows]
            return dataclasses.replace(section, rows=rows, memory_from=[other.names])
    return section


def _work(row: Record) -> tuple[object, ...]:
    return *case_of(row), row.implementation
