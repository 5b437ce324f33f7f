"""Places of this host: a thread for each, which waits for the child processes that see its GPU only."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import locks
from swiglu_bench.machine.machine import Machine
from swiglu_bench.worker.child import DoesNotEnd, Stopped
from swiglu_bench.worker.crew import Crew
from swiglu_bench.worker.pool.place import Place
from swiglu_bench.worker.pool.team import Done, Lost
from swiglu_bench.worker.settings import Settings


class LocalTeam:
    """A crew of child processes for each of the places."""

    joining = False

    def __init__(self, places: Sequence[Place], timeout_s: float, tell: Callable[[str], object]) -> None:
        """`tell` hears for whom this one waits."""
        self.device = torch.device(places[0].machine.device_type, *([0] if places[0].machine.gpu_uuid else []))
        self.places = {place.number: place for place in places}
        self.doing: dict[int, tuple[str, float]] = {}
        self._timeout_s = timeout_s
        self._tell = tell
        self._jobs: dict[int, queue.SimpleQueue[Case | None]] = {}
        self._events: queue.SimpleQueue[Done | Lost | BaseException] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._held = contextlib.ExitStack()
        self._unending: DoesNotEnd | None = None

    def assemble(self) -> Machine:
        """The first place's machine; the others are alike."""
        return next(iter(self.places.values())).machine

    def start(
        self, implementations: Sequence[Implementation], settings: Settings, logs: Path, command: str, wait: bool
    ) -> None:
        """As Team has it. GPUs are held in the order of their names, so that two sweeps never wait for each other."""
        for place in sorted(self.places.values(), key=lambda one: one.seat):
            if place.machine.gpu_uuid:
                self._held.enter_context(locks.gpu(place.machine.gpu_uuid, command, wait, self._tell))
        for place in self.places.values():
            folder = logs / re.sub(r"[^A-Za-z0-9]+", "-", f"{place.name} {place.number}").strip("-").lower()
            folder.mkdir(parents=True, exist_ok=True)
            crew = Crew(settings, place.machine, self._timeout_s, folder, place.environment, self._stop.is_set)
            self._jobs[place.number] = queue.SimpleQueue()
            work = partial(self._work, place.number, crew, implementations)
            self._threads.append(threading.Thread(target=work, daemon=True, name=place.name))
        for thread in self._threads:
            thread.start()

    def begin(self, place: int, case: Case) -> None:
        """As Team has it."""
        self.doing[place] = ("preparing", 0.0)
        self._jobs[place].put(case)

    def wait(self, timeout_s: float) -> list[Done | Lost]:
        """As Team has it; raises what a thread ended with, where that is the suite's own doing."""
        found: list[Done | Lost] = []
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=timeout_s)
            while True:
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, Lost):
                    self.places = {number: one for number, one in self.places.items() if number != event.place}
                found.append(event)
                event = self._events.get_nowait()
        return found

    def close(self) -> None:
        """As Team has it; raises DoesNotEnd where a process outlives its kill."""
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

    def _work(self, number: int, crew: Crew, implementations: Sequence[Implementation]) -> None:
        """What the thread of a place does: one case after the other."""

        def tell(doing: str, fraction: float) -> None:  # a note to look at, not a message: it comes at every round
            self.doing[number] = (doing, fraction)

        try:
            while (case := self._jobs[number].get()) is not None:
                self._events.put(Done(number, list(crew.run_case(case, implementations, tell))))
        except Stopped:
            pass
        except DoesNotEnd as error:
            self._events.put(Lost(number, str(error).rstrip(".")))
        except BaseException as error:  # seen by whoever waits, not by this thread alone
            self._events.put(error)
        try:
            crew.end()
        except DoesNotEnd as error:
            self._unending = error
