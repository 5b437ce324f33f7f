"""The loop of `runner.py` with every implementation's code in child processes: who does what, and what a death costs.

An implementation is imported, built, compiled and checked in a process of its own, on inputs drawn again from the seed.
Those that pass are timed together in one more process, interleaved. A crash, a hang or a broken GPU ends one process:
the row of the implementation that ran says so, and the others go on in a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from swiglu_bench.machine.machine import Machine
from swiglu_bench.processes.child import Child, Died
from swiglu_bench.processes.worker import Afford, Begin, Import, Load, RunCase
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.session import session
from swiglu_bench.session.settings import Listener, Settings, Task, Tell, teller
from swiglu_bench.spec.cases import Case
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.spec.implementation import Implementation

MEASURING = None
"""The name of the child that measures; every other has an implementation's."""
IDLE_BYTES = {"cuda": 2**29, "cpu": 2**27}
"""What an idle child holds of the device's memory: on a GPU its context."""
IDLE_SHARE = 0.1
"""Of the device's memory, for idle children; beyond it a child ends with its case instead of waiting for the next."""


def run(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    settings: Settings,
    this_machine: Machine,
    listen: Listener,
    *,
    timeout_s: float,
    logs: Path,
) -> Iterator[Record]:
    """As `runner.run`, in child processes whose output goes to files in `logs`.

    `timeout_s` is for one implementation at one case: to import, build, compile and check it, or for one timed call.
    """
    crew = Crew(settings, this_machine, timeout_s, logs)
    try:
        for number, case in enumerate(cases):
            tell = teller(listen, number, cases)
            tell("preparing", 0.0)
            yield from crew.run_case(case, implementations, tell)
    finally:
        crew.end()


def declare(address: str, timeout_s: float) -> Implementation:
    """What the implementation at an address declares, its code loaded in a child; raises BadInput where that fails."""
    folder = Path(tempfile.mkdtemp(prefix="swiglu-bench-"))
    try:
        child = Child(folder / "import.log")
        try:
            (declared,) = child.ask(Load(address), timeout_s)
        finally:
            child.end()
    except Died as death:  # the log stays: the message names it
        raise BadInput(f"--impl: {address} cannot be imported: {death}.") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    assert isinstance(declared, Implementation)
    return declared


class Crew:
    """The child processes of a run on one device: one for each implementation, and one that measures."""

    def __init__(
        self,
        settings: Settings,
        this_machine: Machine,
        timeout_s: float,
        logs: Path,
        environment: Mapping[str, str] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`environment` and `stop` are those of `child.Child`."""
        self._timing = settings.task is Task.TIME
        self._settings = settings
        self._machine = this_machine
        self._timeout_s = timeout_s
        self._logs = logs
        self._environment = environment
        self._stop = stop
        self._session = session.Session(settings, this_machine)  # for rows and reasons; it never touches the device
        self._children: dict[str | None, Child] = {}
        self._most_idle = max(1, int(this_machine.memory_bytes * IDLE_SHARE) // IDLE_BYTES[settings.device.type])

    def end(self) -> None:
        """Kill them all."""
        while self._children:
            self._children.popitem()[1].end()

    def run_case(self, case: Case, implementations: Sequence[Implementation], tell: Tell) -> Iterator[Record]:
        """All rows of one case; which implementation ended how never keeps another from its row.

        Raises child.Stopped where `stop` says so, and child.DoesNotEnd where a process outlives its kill.
        """
        able = []
        for implementation in implementations:
            reason = self._session.inapplicable(case, implementation)
            if reason:
                yield self._row(case, implementation, Status.SKIPPED, reason)
            else:
                able.append(implementation)
        if not able:
            return
        ready, deaths = self._start(able)
        if self._timing:
            verdict = self._unaffordable(case, len(able))
            if verdict:
                yield from (self._row(case, implementation, *verdict) for implementation in able)
                return
            if ready:  # what they imported without harm is imported there while they are checked
                with contextlib.suppress(Died):
                    self._child(MEASURING).post(Import([implementation.declared() for implementation in ready]))
        passed: dict[str, Record] = {}
        for index, implementation in enumerate(able):
            tell(f"checking {implementation.name}", 0.5 * index / len(able))
            death = deaths.get(implementation.name)
            record = self._died(case, implementation, death) if death else self._check(case, implementation)
            if self._timing and record.status is Status.OK:
                passed[implementation.name] = record
            else:
                yield record
        if passed:
            contenders = [implementation for implementation in able if implementation.name in passed]
            for record in self._time(case, contenders, lambda doing, fraction: tell(doing, 0.5 + 0.5 * fraction)):
                # This process found what the other had compiled in a cache on the disk; the other's is the first call.
                record.first_call_ms = passed[record.implementation].first_call_ms
                yield record

    def _start(self, able: Sequence[Implementation]) -> tuple[list[Implementation], dict[str, Died]]:
        """Let all start side by side that have no process yet, as contexts and imports take seconds each.

        Returns those that now have one, and what the others died of. Nothing runs on the GPU before all are done.
        """
        if len(able) + self._timing > self._most_idle:
            return [], {}
        new = [implementation for implementation in able if implementation.name not in self._children]
        deaths: dict[str, Died] = {}
        for one in (*([MEASURING] if self._timing else []), *new):
            with contextlib.suppress(Died):  # told below, or when the measuring one is asked
                self._child(one)
        for implementation in new:
            try:
                self._child(implementation).settle(self._timeout_s)
            except Died as death:
                deaths[implementation.name] = death
        return [implementation for implementation in new if implementation.name not in deaths], deaths

    def _unaffordable(self, case: Case, contenders: int) -> tuple[Status, str] | None:
        try:
            (reason,) = self._child(MEASURING).ask(Afford(case, contenders), self._timeout_s)
        except Died as death:
            return Status.ERROR, f"While the suite prepared to measure, {death}."
        return (Status.SKIPPED, reason) if reason else None

    def _check(self, case: Case, implementation: Implementation) -> Record:
        """The row of one implementation that has run once in its own process, or what it died of."""
        try:
            child = self._child(implementation)
            (record,) = child.ask(RunCase(case, [implementation.declared()]), self._timeout_s)
        except Died as death:
            return self._died(case, implementation, death)
        except BadInput as error:  # its file is not what it was when the sweep began
            return self._row(case, implementation, Status.ERROR, str(error))
        if sum(not one.ended for one in self._children.values()) > self._most_idle:
            child.end()
        assert isinstance(record, Record)
        return self._with_log(record, child)

    def _time(self, case: Case, contenders: list[Implementation], tell: Tell) -> Iterator[Record]:
        """The rows of a measurement; who kills the measuring process takes no part in the next attempt.

        Where it dies before it measures, a new one does without what is done beforehand, and shows whose doing it is.
        """
        excused = False
        while contenders:
            job = RunCase(case, [implementation.declared() for implementation in contenders])
            left = {implementation.name: implementation for implementation in contenders}
            try:
                child = self._child(MEASURING)
                for record in child.ask(job, self._timeout_s, tell):
                    del left[record.implementation]
                    yield self._with_log(record, child)
                return
            except Died as death:
                if death.beforehand and not excused:
                    excused = True
                    continue
                blamed = [contenders[death.culprit]] if death.culprit >= 0 else list(left.values())
                for implementation in blamed:
                    reason = f"While it was measured beside the others, {death}."
                    yield self._row(case, implementation, Status.ERROR, reason)
                contenders = [implementation for implementation in left.values() if implementation not in blamed]
            except BadInput as error:
                for implementation in left.values():
                    yield self._row(case, implementation, Status.ERROR, str(error))
                return

    def _child(self, implementation: Implementation | None) -> Child:
        """The process of an implementation, or the measuring one; a new one where it has ended."""
        name = implementation.name if implementation else MEASURING
        child = self._children.get(name)
        if child is None or child.ended:
            child = self._children[name] = Child(self._logs / log_name(name), self._environment, self._stop)
            task = Task.CHECK if self._timing and implementation else self._settings.task
            child.post(Begin(dataclasses.replace(self._settings, task=task), self._machine))
            if implementation:
                child.post(Import([implementation.declared()]))
        return child

    def _died(self, case: Case, implementation: Implementation, death: Died) -> Record:
        return self._row(case, implementation, Status.ERROR, f"While it was checked, {death}.")

    def _row(self, case: Case, implementation: Implementation, status: Status, reason: str) -> Record:
        return self._session.blank(case, implementation).end(status, reason)

    def _with_log(self, record: Record, child: Child) -> Record:
        if record.status is Status.ERROR and child.printed:
            record.reason += f" (log: {child.log})"
        return record


def log_name(name: str | None) -> str:
    """The file for what a child prints: the implementation's name where that is plain, else a plain name of its own."""
    if name is MEASURING:
        return "measuring.log"
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60] or "unnamed"
    if plain == name and name != "measuring":
        return f"{plain}.log"
    return f"{plain}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}.log"
