"""Continuing a sweep that ended early: which cases are finished, by the content of everything that made their rows.

A case is finished when every chosen implementation has its row, all of one run and each with the fingerprint it would
get now. Ratios are within a run, so a case is run again as a whole or not at all.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import sources
from swiglu_bench.machine.machine import Machine
from swiglu_bench.rows.csv_table import cell
from swiglu_bench.rows.finished_run import verb
from swiglu_bench.rows.record import Record
from swiglu_bench.version import __version__
from swiglu_bench.worker.settings import Settings

CASE = ("shape", "hidden", "intermediate", "experts", "top_k", "tokens", "dtype", "scope", "mode", "seed")
"""The columns that say which case a row is of."""

IRRELEVANT = {"command", "run_id", "detail", "folder"}
"""The settings that do not change a figure."""

CaseKey = tuple[str, ...]


def key_of_case(case: Case) -> CaseKey:
    """The case as its rows name it."""
    shape, experts = case.shape, case.shape.experts
    mixture = (experts.count, experts.top_k) if experts else (None, None)
    sizes = (case.name, shape.hidden, shape.intermediate, *mixture)
    values = (*sizes, case.tokens, case.dtype, case.scope, case.mode, case.seed)
    return tuple(map(cell, values))


def key_of_row(row: Record | Mapping[str, str]) -> CaseKey:
    """The case that a row is of."""
    return tuple(cell(row.get(name) if isinstance(row, Mapping) else getattr(row, name)) for name in CASE)


class Fingerprints:
    """Hashes of what made each row: sources, versions, machine, settings and the case."""

    def __init__(self, implementations: Sequence[Implementation], settings: Settings, this: Machine) -> None:
        self._common = {
            "sources": sources.code(),
            "version": __version__,
            "tuned tiles": this.tuned_tiles,
            "machine": {name: getattr(this, name) for name in sources.MACHINE},
            "settings": {name: value for name, value in dataclasses.asdict(settings).items() if name not in IRRELEVANT},
        }
        self.names = [known.name for known in implementations]
        self._own = {
            known.name: {
                "name": known.name,
                "source": sources.of_file(Path(known.file)) if known.file else "",
                "versions": _versions(known),
            }
            for known in implementations
        }

    def of(self, case: CaseKey, implementation: str) -> str:
        """16 hexadecimal digits for the row of an implementation at a case."""
        made_of = {**self._common, "implementation": self._own[implementation], "case": case}
        return hashlib.sha256(json.dumps(made_of, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Remaining:
    """Which cases a sweep still has to run, given the rows that earlier sweeps left in its folder."""

    def __init__(
        self, cases: Sequence[Case], fingerprints: Fingerprints, command: str, rows: Iterable[Mapping[str, str]] = ()
    ) -> None:
        self._fingerprints = fingerprints
        self._verb = verb(command)
        self._earlier: dict[CaseKey, dict[str, Mapping[str, str]]] = {}
        for row in rows:
            if verb(row["command"]) == self._verb:
                self._earlier.setdefault(key_of_row(row), {})[row["implementation"]] = row
        keys = [(case, key_of_case(case)) for case in cases]
        finished = {key for _, key in keys if self._finished(key)}
        self.todo = [case for case, key in keys if key not in finished]
        self.kept = [row for _, key in keys if key in finished for row in self._kept(key)]
        """The rows of finished cases."""

    def _kept(self, case: CaseKey) -> list[Mapping[str, str]]:
        """The rows that the chosen implementations have; an empty one where there is none."""
        return [self._earlier.get(case, {}).get(cell(name), {}) for name in self._fingerprints.names]

    def _finished(self, case: CaseKey) -> bool:
        rows = self._kept(case)
        wanted = [self._fingerprints.of(case, name) for name in self._fingerprints.names]
        return [row.get("fingerprint") for row in rows] == wanted and len({row["run_id"] for row in rows}) == 1

    def stamp(self, record: Record) -> None:
        """Enter the fingerprint of a record."""
        record.fingerprint = self._fingerprints.of(key_of_row(record), record.implementation)

    def replaced_by(self, record: Record) -> Callable[[Mapping[str, str]], bool] | None:
        """Which rows of the folder the record's case replaces; None where there are none, or they were named before."""
        case = key_of_row(record)
        if not self._earlier.pop(case, None):
            return None
        names = {cell(name) for name in self._fingerprints.names}
        return lambda row: (
            key_of_row(row) == case and row["implementation"] in names and verb(row["command"]) == self._verb
        )


def _versions(implementation: Implementation) -> dict[str, str]:
    """Versions of the packages that an implementation needs and comes from."""
    modules = {name.partition(".")[0] for name in (implementation.package, implementation.source)}
    names = {name for module in modules for name in _distributions().get(module, [])}
    return {name: importlib.metadata.version(name) for name in names}


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Which distributions a module belongs to: the search through all that are installed takes half a second."""
    return importlib.metadata.packages_distributions()
