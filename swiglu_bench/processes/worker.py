"""What runs in a child process: it does one job after the other, each with code of implementations that may kill it.

The parent's side of the pipe is `child.py`. Jobs come in as the classes below; answers go back as pairs of a kind and a
value: any number of `answer` and `tell`, then `done`, or `refused` for bad input, or `lost` for a broken device.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from swiglu_bench.audit import matrix
from swiglu_bench.implementations import CATALOGUE
from swiglu_bench.machine.machine import Machine
from swiglu_bench.measure.clock import DeviceLost, answers
from swiglu_bench.processes import forkserver
from swiglu_bench.rows.audit_cell import Cell
from swiglu_bench.session import session
from swiglu_bench.session.settings import Settings
from swiglu_bench.spec import registry
from swiglu_bench.spec.cases import Case, Dtype, Scope
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.spec.implementation import Implementation

NOBODY = -1
"""In the mark: no implementation's code runs."""


@dataclass(frozen=True)
class Load:
    """Answer with what the implementation at an address declares."""

    address: str


@dataclass(frozen=True)
class Begin:
    """From now on work for this run, and make the device's context; no answer."""

    settings: Settings
    machine: Machine


@dataclass(frozen=True)
class Import:
    """Import what these implementations, given without their code, need; no answer.

    What fails here fails again where they are built, and is told there.
    """

    implementations: Sequence[Implementation]


@dataclass(frozen=True)
class Afford:
    """Answer with why the case is too large for the device or the budget, or None."""

    case: Case
    contenders: int


@dataclass(frozen=True)
class RunCase:
    """Answer with the row of each of these implementations, given without their code."""

    case: Case
    implementations: Sequence[Implementation]


@dataclass(frozen=True)
class Audit:
    """Answer with the cell of each of these checks of the contract, for an implementation given without its code."""

    implementation: Implementation
    scope: Scope
    device: torch.device
    dtype: Dtype | None
    checks: tuple[str, ...]


Job = Load | Begin | Import | Afford | RunCase | Audit


@dataclass(frozen=True)
class Setting:
    """What a child takes over from its parent."""

    log: Path
    environment: dict[str, str]
    threads: int

    @classmethod
    def of_this_process(cls, log: Path, environment: Mapping[str, str]) -> Setting:
        """What holds here, but for variables that are other ones there, and a file for all that the child prints."""
        return cls(log, {**forkserver.environment(), **environment}, torch.get_num_threads())


def serve(pipe: Connection, mark: MutableSequence[int], setting: Setting) -> None:
    """Do jobs until the pipe closes."""
    settle(setting)
    bench = _Bench(pipe, mark)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            for answer in bench.do(job):
                pipe.send(("answer", answer))
            pipe.send(("done", None))
        except BadInput as error:
            pipe.send(("refused", str(error)))
        except RuntimeError as error:
            if not bench.lost(error):
                raise
            logging.exception("The device is lost.")
            pipe.send(("lost", str(error)))
            return


class _Bench:
    """What a child keeps from job to job: the session, and the implementations that it has loaded."""

    def __init__(self, pipe: Connection, mark: MutableSequence[int]) -> None:
        self._pipe = pipe
        self._mark = mark
        self._names: list[str] = []
        self._loaded: dict[str, Implementation] = {one.name: one for one in CATALOGUE}
        self._session: session.Session | None = None

    def lost(self, error: RuntimeError) -> bool:
        """Whether an error means that a contender broke the device, wherever it was noticed."""
        return isinstance(error, DeviceLost) or (self._session is not None and not answers(self._session.clock))

    def do(self, job: Job) -> Iterator[Any]:
        match job:
            case Load(address):
                self._note(0)
                yield registry.load(address).declared()
                self._note(NOBODY)
                return
            case Begin(settings, this):
                self._session = session.Session(settings, this, self._mark_name)
                torch.zeros((), device=settings.device)
                return
            case Import(declared):
                self._import(declared)
                return
            case Audit():
                yield from self._audit(job)
                return
        assert self._session is not None
        match job:
            case Afford(case, contenders):
                yield self._session.unaffordable(case, contenders)
            case RunCase(case, declared):
                self._names = [one.name for one in declared]
                yield from self._session.run_case(case, [self._load(one) for one in declared], self._tell)

    def _audit(self, job: Audit) -> Iterator[Cell]:
        """One check a turn; raises DeviceLost after the cell of one that broke the device."""
        name = job.implementation.name
        self._names = [name]

        def turn(doing: str) -> None:
            self._tell(doing, 0.0)
            self._mark_name(name)

        for cell in matrix.audit(
            [self._load(job.implementation)], [job.scope], job.device, job.dtype, job.checks, turn
        ):
            self._mark_name("")
            yield cell
            if not matrix.answers(job.device):
                raise DeviceLost(cell.reason)

    def _import(self, declared: Sequence[Implementation]) -> None:
        self._names = [one.name for one in declared]
        for one in declared:
            self._mark_name(one.name)
            for module in one.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
            self._mark_name("")

    def _load(self, declared: Implementation) -> Implementation:
        if declared.name not in self._loaded:
            self._mark_name(declared.name)
            self._loaded[declared.name] = registry.load(declared.address)
            self._mark_name("")
        return self._loaded[declared.name]

    def _tell(self, doing: str, fraction: float) -> None:
        self._pipe.send(("tell", (doing, fraction)))

    def _mark_name(self, name: str) -> None:
        self._note(self._names.index(name) if name else NOBODY)

    def _note(self, number: int) -> None:
        """Shared memory, not the pipe: the parent must not wake up at every sample that is timed."""
        self._mark[0] = number
        self._mark[1] += 1


def settle(setting: Setting) -> None:
    """Take over the parent's settings, print into the log, and end when the parent does."""
    if hasattr(os, "setsid"):
        os.setsid()  # the terminal's Ctrl-C is the parent's to handle; and what a child starts can be ended with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = os.open(setting.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, descriptor)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(all_threads=False)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("swiglu_bench").setLevel(logging.INFO)
    os.environ.clear()
    os.environ.update(setting.environment)
    torch.set_num_threads(setting.threads)
    gc.freeze()  # all that was imported: a collection between cases then takes no time


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
