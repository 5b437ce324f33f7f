"""Runs cut into sections: rows that may stand in one chart, because machine, run, scope, mode and dtype are the same.

Memory is measured by a run of its own; it joins the times of a step by machine and case, and nothing else is joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from swiglu_bench.report.frames import groups, unique
from swiglu_bench.report.load import CASE, ReportedRun

Kind = Literal["time", "memory", "verify"]
MEMORY = ["saved_bytes", "peak_bytes", "workspace_bytes"]
WORK = {"glu": "x to silu(x Wg) * (x Wu)", "activation": "gate, up to silu(gate) * up", "mlp": "x to out, all of it"}


@dataclass(frozen=True)
class Section:
    """Rows of one run that are about the same work on the same machine, whatever the shape and token count."""

    kind: Kind
    run: ReportedRun
    device: str
    scope: str
    mode: str
    dtype: str
    """Of `verify`, which is about errors alone: all of them, comma-separated."""
    rows: pd.DataFrame
    memory_from: str = ""
    """The run whose memory figures stand in the rows, where it is another one."""

    @property
    def title(self) -> str:
        """What the section is about, without the machine."""
        head = {"time": self.mode, "memory": "memory", "verify": "verification"}[self.kind]
        return f"{head} of {self.scope}, {self.dtype}"

    @property
    def ok(self) -> pd.DataFrame:
        """The rows whose figures count."""
        return self.rows[self.rows["status"] == "ok"]

    @property
    def shapes(self) -> list[str]:
        """In the order of the run."""
        return unique(self.rows["shape"])

    @property
    def baseline(self) -> str:
        """What ratios are to; empty where no row has one."""
        named = self.rows.loc[self.rows["baseline"] != "", "baseline"]
        return str(named.iloc[0]) if len(named) else ""


def sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """All sections of these runs: times first, then memory, then verification."""
    found = [one for run in runs for one in _of_run(run)]
    memories = [one for one in found if one.kind == "memory"]
    found = [_with_memory(one, memories) for one in found]
    order = ["time", "memory", "verify"]
    return sorted(found, key=lambda one: order.index(one.kind))


def _of_run(run: ReportedRun) -> Iterator[Section]:
    checked: dict[tuple[str, str, str], list[pd.DataFrame]] = {}
    for (device, scope, mode, dtype), rows in groups(run.records, "device", "scope", "mode", "dtype"):
        kind = _kind(rows)
        if kind == "verify":
            checked.setdefault((device, scope, mode), []).append(rows)
        else:
            yield Section(kind, run, device, scope, mode, dtype, rows.reset_index(drop=True))
    for (device, scope, mode), parts in checked.items():
        together = pd.concat(parts, ignore_index=True)
        yield Section("verify", run, device, scope, mode, ", ".join(unique(together["dtype"])), together)


def _kind(rows: pd.DataFrame) -> Kind:
    """What was measured or, where every row failed, what the command was to measure."""
    if rows["time_ms"].notna().any():
        return "time"
    if rows["peak_bytes"].notna().any():
        return "memory"
    said = re.match(r"(?:\S*swiglu-bench )?(memory|verify)\b", str(rows["command"].iloc[0]))
    if said:
        return "memory" if said[1] == "memory" else "verify"
    return "verify" if (rows["status"] == "ok").any() else "time"


def _with_memory(section: Section, memories: Sequence[Section]) -> Section:
    """The section with the memory of the same cases on the same machine, from the last run that has it."""
    if section.kind != "time" or section.mode != "step" or section.rows["peak_bytes"].notna().any():
        return section
    for other in reversed(memories):
        if (other.device, other.scope, other.dtype) != (section.device, section.scope, section.dtype):
            continue
        rows = section.rows.drop(columns=MEMORY).merge(other.ok[[*CASE, *MEMORY]], on=CASE, how="left")
        if rows["peak_bytes"].notna().any():
            found = section.kind, section.run, section.device, section.scope, section.mode, section.dtype
            return Section(*found, rows, memory_from=other.run.name)
    return section
