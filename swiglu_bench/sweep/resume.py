"""Going on with a sweep that ended early: which cases are finished, by the content of everything that made their rows.

A case is finished when every chosen implementation has its row, all of one run and each with the fingerprint it would
get now. Ratios are within a run, so a case is done again as a whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from swiglu_bench.machine import sources
from swiglu_bench.machine.machine import Machine
from swiglu_bench.rows.record import Record
from swiglu_bench.session.settings import Settings
from swiglu_bench.spec.cases import Case
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.version import __version__

CASE = ("shape", "hidden", "intermediate", "tokens", "dtype", "scope", "mode", "seed")
"""The columns that say which case a row is of."""

CaseKey = tuple[str, ...]


def key_of_case(case: Case) -> CaseKey:
    """The case as its rows name it."""
    shape = case.shape
    values = (shape.name, shape.hidden, shape.intermediate, case.tokens, case.dtype, case.scope, case.mode, case.seed)
    return tuple(_as_cell(value) for value in values)


def key_of_row(row: Record | Mapping[str, str]) -> CaseKey:
    """The case that a row is of."""
    return tuple(_as_cell(row[name] if isinstance(row, Mapping) else getattr(row, name)) for name in CASE)


class Fingerprints:
    """A hash per row of what made it: sources, versions, machine, settings and the case."""

    def __init__(self, implementations: Sequence[Implementation], settings: Settings, this: Machine) -> None:
        self._common = {
            "sources": sources.code(),
            "version": __version__,
            "tuned tiles": this.tuned_tiles,
            "machine": {name: getattr(this, name) for name in sources.MACHINE},
            "settings": {
                "task": settings.task,
                "device": str(settings.device),
                "baseline": settings.baseline,
                "rule": dataclasses.asdict(settings.rule),
                "cold_l2": settings.cold_l2,
                "energy": settings.energy,
                "interpreter": settings.interpreter,
            },
        }
        owners = importlib.metadata.packages_distributions()
        self.names = [one.name for one in implementations]
        self._own = {
            one.name: {
                "name": one.name,
                "source": sources.digest([Path(one.file)]) if one.file else "",
                "versions": _versions(owners, one),
            }
            for one in implementations
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
        self._verb = _verb(command)
        self._earlier: dict[CaseKey, dict[str, Mapping[str, str]]] = {}
        for row in rows:
            if _verb(row["command"]) == self._verb:
                self._earlier.setdefault(key_of_row(row), {})[row["implementation"]] = row
        keys = [(case, key_of_case(case)) for case in cases]
        finished = {key for _, key in keys if self._finished(key)}
        self.todo = [case for case, key in keys if key not in finished]
        self.kept = [row for _, key in keys if key in finished for row in self._kept(key)]
        """The rows of finished cases."""

    def _kept(self, case: CaseKey) -> list[Mapping[str, str]]:
        """The rows that the chosen implementations have; an empty one where there is none."""
        return [self._earlier.get(case, {}).get(_as_cell(name), {}) for name in self._fingerprints.names]

    def _finished(self, case: CaseKey) -> bool:
        rows = self._kept(case)
        wanted = [self._fingerprints.of(case, name) for name in self._fingerprints.names]
        return [row.get("fingerprint") for row in rows] == wanted and len({row["run_id"] for row in rows}) == 1

    def stamp(self, record: Record) -> None:
        """Enter the record's fingerprint."""
        record.fingerprint = self._fingerprints.of(key_of_row(record), record.implementation)

    def replaced_by(self, record: Record) -> Callable[[Mapping[str, str]], bool] | None:
        """Which rows of the folder give way to the case that the record is of; None where none do, or already did."""
        case = key_of_row(record)
        if not self._earlier.pop(case, None):
            return None
        names = {_as_cell(name) for name in self._fingerprints.names}
        return lambda row: (
            key_of_row(row) == case and row["implementation"] in names and _verb(row["command"]) == self._verb
        )


def _verb(command: str) -> str:
    """`forward` of `swiglu-bench forward --shapes smoke`."""
    return next(iter(command.split()[1:]), "")


def _as_cell(value: object) -> str:
    """As records.csv has it, where every row is one line."""
    return " ".join(str(value).split())


def _versions(owners: Mapping[str, list[str]], implementation: Implementation) -> dict[str, str]:
    """Versions of the packages that an implementation needs and comes from."""
    modules = {name.partition(".")[0] for name in (implementation.package, implementation.source)}
    names = {name for module in modules for name in owners.get(module, [])}
    return {name: importlib.metadata.version(name) for name in names}
