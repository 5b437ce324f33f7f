"""Where a court's processes are started: on one device, or on several GPUs of this host.

`worker/ray_cluster.py` has the places of a Ray cluster. To the loop all of them are alike.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import locks, machine, sources
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.system import gpu_indices
from swiglu_bench.rows.record import Record
from swiglu_bench.worker.child import DoesNotEnd, Stopped
from swiglu_bench.worker.court import CaseTask, Court
from swiglu_bench.worker.policy import Settings
from swiglu_bench.worker.workbench import Workbench


@dataclass(frozen=True)
class Work:
    """What every place of a run is told before its first case."""

    task: CaseTask
    implementations: Sequence[Implementation]
    settings: Settings
    timeout_s: float
    """The limit for one answer of an implementation: to import, build, compile and check it, or for one timed call."""
    logs: Path
    """A folder for what implementations print."""
    wait: bool = True
    """Whether to wait for a GPU that another command uses."""
    bench: type = Workbench
    """The class that answers in a contender's process."""

    def among(self, only: Collection[str]) -> list[Implementation]:
        """All implementations, or `only` these, the last first: for a case that is tried again, in another order."""
        if not only:
            return list(self.implementations)
        return [known for known in reversed(self.implementations) if known.name in only]


@dataclass(frozen=True)
class CaseRows:
    """Rows of the case that a place is working on."""

    place: int
    records: list[Record]
    last: bool = True
    """Whether the case is finished."""


@dataclass(frozen=True)
class Lost:
    """A place is gone, and the case that it was working on with it."""

    place: int
    reason: str
    """Part of a sentence."""


class Places(ABC):
    """Places that may come and go, each with a court that works on one case at a time."""

    device: torch.device
    """The device as each place sees its own."""
    in_order = False
    """Whether cases are worked on in their order, and each row is there as soon as it is known."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.places = {place.number: place for place in places}
        """The places that can work now, by their numbers."""
        self.doing: dict[int, tuple[str, float]] = {}
        """What a place is doing and which share of its case is done, as far as that is known."""
        self._held = contextlib.ExitStack()

    @property
    def joining(self) -> bool:
        """Whether more places may come."""
        return False

    @abstractmethod
    def assemble(self) -> Machine:
        """Find the places; the machine that stands for all of them. Raises BadInput where that fails."""

    @abstractmethod
    def start(self, work: Work, changed: Callable[[], object]) -> None:
        """Hold every GPU and make its processes ready; `changed` may be called when `doing` has changed.

        Raises BadInput for a GPU in use, unless it is to wait.
        """

    @abstractmethod
    def begin(self, place: int, case: Any, only: Sequence[str] = ()) -> None:
        """Give an idle place a case, which it tries again where it has `only` the implementations of some names."""

    @abstractmethod
    def wait(self, timeout_s: float) -> Iterable[CaseRows | Lost]:
        """What has happened; returns at once when something has."""

    @abstractmethod
    def close(self) -> None:
        """End all that runs, and release the GPUs; harmless twice. Raises DoesNotEnd where a process outlives that."""


class OneDevice(Places):
    """One court, which this thread waits for."""

    in_order = True

    def __init__(self, device: torch.device, say: Callable[[str], object], in_process: bool = False) -> None:
        """`say` hears for whom this one waits; with `in_process` there are no child processes, for debugging."""
        super().__init__()
        self.device, self._say, self._in_process = device, say, in_process
        self._court: Court | None = None
        self._case: Any = None
        self._only: Sequence[str] = ()
        self._running: Iterator[CaseRows] = iter(())

    def assemble(self) -> Machine:
        """As Places has it."""
        self.places = {0: Place(0, machine.describe(self.device))}
        return self.places[0].machine

    def start(self, work: Work, changed: Callable[[], object]) -> None:
        """As Places has it."""
        self._held.enter_context(locks.device(self.device, work.settings.command, work.wait, self._say))
        self._work = work
        this = self.places[0].machine if self.places else self.assemble()
        self._court = Court(
            work.settings, this, work.timeout_s, work.logs, bench=work.bench, in_process=self._in_process
        )

        def tell(doing: str, share: float) -> None:
            self.doing[0] = (doing, share)
            changed()

        self._court.tell = tell

    def begin(self, place: int, case: Any, only: Sequence[str] = ()) -> None:
        """As Places has it."""
        self._case, self._only = case, only
        self.doing.clear()

    def wait(self, timeout_s: float) -> Iterator[CaseRows]:
        """The rows of the case, each as soon as it is known."""
        self._running = self._rows()
        return self._running

    def _rows(self) -> Iterator[CaseRows]:
        assert self._court
        work = self._work
        with contextlib.closing(self._court.run(work.task, self._case, work.among(self._only))) as records:
            for record in records:
                yield CaseRows(0, [record], last=False)
        yield CaseRows(0, [])

    def close(self) -> None:
        """As Places has it."""
        court, self._court = self._court, None
        try:
            getattr(self._running, "close", lambda: None)()
        finally:
            if court:
                court.end()
            self._held.close()


class SeveralGpus(Places):
    """A court for each of several GPUs of this host: a thread waits for its processes, which see that GPU only."""

    def __init__(self, places: Sequence[Place], say: Callable[[str], object]) -> None:
        """`say` hears for whom this one waits."""
        super().__init__(places)
        self.device = torch.device(places[0].machine.device_type, *([0] if places[0].machine.gpu_uuid else []))
        self._say = say
        self._jobs: dict[int, queue.SimpleQueue[Any]] = {}
        self._events: queue.SimpleQueue[CaseRows | Lost | BaseException] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._unending: DoesNotEnd | None = None

    def assemble(self) -> Machine:
        """The first place's machine; the others are alike."""
        return next(iter(self.places.values())).machine

    def start(self, work: Work, changed: Callable[[], object]) -> None:
        """As Places has it. GPUs are held in the order of their names, so that two sweeps never wait for each other."""
        for place in sorted(self.places.values(), key=lambda place: place.seat):
            if place.machine.gpu_uuid:
                lock = locks.gpu(place.machine.gpu_uuid, work.settings.command, work.wait, self._say)
                self._held.enter_context(lock)
        for place in self.places.values():
            folder = work.logs / re.sub(r"[^A-Za-z0-9]+", "-", f"{place.name} {place.number}").strip("-").lower()
            folder.mkdir(parents=True, exist_ok=True)
            court = Court(
                work.settings, place.machine, work.timeout_s, folder,
                environment=place.environment, stop=self._stop.is_set, bench=work.bench,
            )  # fmt: skip
            self._jobs[place.number] = queue.SimpleQueue()
            run = partial(self._work, place.number, court, work)
            self._threads.append(threading.Thread(target=run, daemon=True, name=place.name))
        for thread in self._threads:
            thread.start()

    def begin(self, place: int, case: Any, only: Sequence[str] = ()) -> None:
        """As Places has it."""
        self.doing[place] = ("preparing", 0.0)
        self._jobs[place].put((case, only))

    def wait(self, timeout_s: float) -> list[CaseRows | Lost]:
        """As Places has it; raises what a thread ended with, where that is the suite's own fault."""
        found: list[CaseRows | Lost] = []
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=timeout_s)
            while True:
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, Lost):
                    self.places = {number: place for number, place in self.places.items() if number != event.place}
                found.append(event)
                event = self._events.get_nowait()
        return found

    def close(self) -> None:
        """As Places has it."""
        self._stop.set()
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._held.close()
        unending, self._unending = self._unending, None
        if unending:
            raise unending

    def _work(self, number: int, court: Court, work: Work) -> None:

        def tell(doing: str, share: float) -> None:  # a note to look at, not a message: it comes at every round
            self.doing[number] = (doing, share)

        court.tell = tell
        try:
            while (job := self._jobs[number].get()) is not None:
                case, only = job
                self._events.put(CaseRows(number, list(court.run(work.task, case, work.among(only)))))
        except Stopped:
            pass
        except DoesNotEnd as error:
            self._events.put(Lost(number, str(error).rstrip(".")))
        except BaseException as error:  # seen by whoever waits, not by this thread alone
            self._events.put(error)
        try:
            court.end()
        except DoesNotEnd as error:
            self._unending = error


@dataclass(frozen=True)
class Place:
    """A device that only one case at a time has for itself."""

    number: int
    """Unique in the run; that of a lost place is not used again."""
    machine: Machine
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that differ in its processes from this one's: which GPU they see."""

    @property
    def name(self) -> str:
        """The place's name in messages."""
        this = self.machine
        if this.device_type == "cpu":
            return f"{this.host} CPU"
        return f"{this.host} GPU {this.gpu_index if this.gpu_index is not None else this.gpu_uuid}"

    @property
    def seat(self) -> str:
        """What stays the same when another process takes over the device."""
        return self.machine.gpu_uuid or f"{self.machine.host} {self.number}"


def check_alike(first: Place, other: Place) -> None:
    """Raise BadInput where rows of the two could not stand in one run: a fingerprint speaks for one kind of machine."""
    for name in (*sources.MACHINE, "tuned_tiles"):
        mine, theirs = getattr(first.machine, name), getattr(other.machine, name)
        if mine != theirs:
            what = f"{name} is {mine or 'unknown'} and {theirs or 'unknown'}"
            advice = "sweep over one kind of machine at a time"
            raise BadInput(f"{first.name} and {other.name} are not alike: {what}; {advice}.")


def gpus(text: str) -> list[Place]:
    """The places that `--gpus` names by index, or `all`; raises BadInput where they are not there or not alike."""
    found = []
    for index in gpu_indices(text, torch.cuda.device_count()):
        this = machine.describe(torch.device("cuda", index))
        found.append(Place(index, this, {"CUDA_VISIBLE_DEVICES": visible(index, this.gpu_uuid, os.environ)}))
        check_alike(found[0], found[-1])
    return found


def visible(index: int, uuid: str, environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES for a process that is to see just what CUDA calls `index` in this environment.

    A list that is already there says it in its own words (an index, a UUID, an instance of a partitioned GPU). Else it
    is the UUID: CUDA may count in another order than the driver.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES", "")
    return listed.split(",")[index].strip() if listed.strip() else uuid


def names(places: Sequence[Place]) -> str:
    """All of them in a few words: `4 GPUs`, or `8 GPUs of 2 hosts`."""
    hosts = len({place.machine.host for place in places})
    kind = "CPU process" if places and places[0].machine.device_type == "cpu" else "GPU"
    plural = "" if len(places) == 1 else "es" if kind.endswith("s") else "s"
    return f"{len(places)} {kind}{plural}" + (f" of {hosts} hosts" if hosts > 1 else "")
