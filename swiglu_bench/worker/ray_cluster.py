"""Places of a Ray cluster, from the driver's side: an actor with a GPU each, on as many hosts as the cluster has."""

import contextlib
import dataclasses
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import sources
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.system import check_address
from swiglu_bench.version import __version__
from swiglu_bench.worker.member import Member
from swiglu_bench.worker.places import CaseRows, Lost, Place, Places, Work, check_alike

CONNECT_S = 5.0
"""For the cluster's address to take a connection."""
ANSWER_S = 30.0
"""For what took the connection to answer as a cluster does."""
TRIAL = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='CRITICAL'); ray.shutdown()"
JOIN_S = 120.0
"""For the processes on free GPUs to start: most of it is importing torch, perhaps over a network."""
END_S = 10.0
"""For them to end by themselves."""
LOOK_S = 10.0
"""Between two looks for new hosts."""
LEAST_REPLACEMENTS = 4
MOST_CHARACTERS = 300
"""Of a reason."""


@dataclass
class _Actor:
    handle: Any
    question: str
    """hello, start, or run_case."""
    place: Place | None = None


class RayCluster(Places):
    """The actors of one run."""

    def __init__(
        self, address: str, device: str | None, say: Callable[[str], object],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Connect; `say` hears of rejected places. Raises BadInput where there is no cluster or no such device."""
        super().__init__()
        self.address, self._say, self._environment = address, say, dict(environment)
        if device not in (None, "cpu", "cuda"):
            raise BadInput(f"--device: with --ray {device!r} names nothing; give cpu or cuda.")
        self._ray = _connected(address)
        self._actors: dict[int, _Actor] = {}
        self._asked: dict[Any, int] = {}
        self._hired = self._replaced = 0
        self._first: Place | None = None
        self._run: tuple[Work, Mapping[str, bytes]] | None = None
        self._last_place_s = self._last_look_s = 0.0
        there = self._ray.cluster_resources()
        kind = "cpu" if device == "cpu" or not (device or there.get("GPU")) else "cuda"
        if kind == "cuda" and not there.get("GPU"):
            self.close()
            raise BadInput(f"--device: {device} was asked for, but the cluster has no GPU; give cpu.")
        self.device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
        self._resource = "GPU" if kind == "cuda" else "CPU"
        self._count = int(there.get(self._resource, 0))

    @property
    def joining(self) -> bool:
        """Whether an actor waits for its GPU's lock, or is on its way: that is believed for a while only."""
        questions = {actor.question for actor in self._actors.values()}
        return "start" in questions or ("hello" in questions and time.monotonic() < self._last_place_s + JOIN_S)

    def assemble(self) -> Machine:
        """Start an actor for every GPU and wait for those that are free now; others join as their GPUs come free."""
        free = int(self._ray.available_resources().get(self._resource, 0))
        for _ in range(self._count):
            self._hire()
        deadline = time.monotonic() + JOIN_S
        greeted: list[Place] = []
        while len(greeted) < max(1, min(free, self._count)) and time.monotonic() < deadline and self._asked:
            for number, answer in self._answers(deadline - time.monotonic()):
                greeted.append(self._greet(number, answer))
        if not greeted:
            self.close()
            none = f"none of the cluster's {self._count} {self._resource}s came free in {JOIN_S:.0f} s"
            raise BadInput(f"--ray: {none}; `ray status` says who has them.")
        assert self._first is not None
        return self._first.machine

    def start(self, work: Work, changed: Callable[[], object]) -> None:
        """As Places has it; logs stay on each host."""
        known = work.implementations
        files = {theirs.address: Path(theirs.file).read_bytes() for theirs in known if ".py:" in theirs.address}
        declared = [implementation.declared() for implementation in known]
        self._run = (dataclasses.replace(work, implementations=declared), files)
        self._last_place_s = self._last_look_s = time.monotonic()
        for number, actor in self._actors.items():
            if actor.place:
                self._ask(number, "start", *self._run)
        while not work.wait and any(actor.question == "start" for actor in self._actors.values()):
            for number, answer in self._answers(JOIN_S):
                self._let_in(number, answer)

    def begin(self, place: int, case: Any, only: Sequence[str] = ()) -> None:
        """As Places has it."""
        self._ask(place, "run_case", case, only)

    def wait(self, timeout_s: float) -> list[CaseRows | Lost]:
        """As Places has it. A lost actor is replaced, by one on the same GPU or another; new hosts get actors, too."""
        self._grow()
        found: list[CaseRows | Lost] = []
        for number, answer in self._answers(timeout_s):
            actor = self._actors[number]
            if isinstance(answer, Exception):
                if number in self.places:
                    found.append(Lost(number, reason_of(answer)))
                else:
                    self._say(f"A place could not join: {reason_of(answer)}.")
                self._dismiss(number)
                if self._replaced < max(LEAST_REPLACEMENTS, self._count):
                    self._replaced += 1
                    self._hire()
            elif actor.question == "run_case":
                actor.question = ""
                found.append(CaseRows(number, answer))
            else:
                try:
                    self._let_in(number, answer)
                except BadInput as error:
                    self._say(f"A place is left out. {error}")
                    self._dismiss(number)
        return found

    def close(self) -> None:
        """As Places has it."""
        if not self._ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # whoever does not answer any more is killed below
            ends = [actor.handle.close.remote() for number, actor in self._actors.items() if number in self.places]
            self._ray.wait(ends, num_returns=len(ends), timeout=END_S)
        for number in list(self._actors):
            self._dismiss(number)
        self._ray.shutdown()

    def _let_in(self, number: int, answer: Any) -> None:
        actor = self._actors[number]
        if actor.question != "start":
            self._greet(number, answer)
            assert self._run is not None
            self._ask(number, "start", *self._run)
            return
        if isinstance(answer, Exception):
            raise BadInput(f"--ray: a process of the cluster could not start: {reason_of(answer)}.")
        assert actor.place is not None
        if answer:
            raise BadInput(f"{actor.place.name}: {answer}")
        actor.question = ""
        self.places = {**self.places, number: actor.place}

    def _grow(self) -> None:
        """Now and then, an actor for each GPU that has come to the cluster."""
        now = time.monotonic()
        if self.places:
            self._last_place_s = now
        if now < self._last_look_s + LOOK_S:
            return
        self._last_look_s = now
        count = int(self._ray.cluster_resources().get(self._resource, 0))
        for _ in range(count - self._count):
            self._hire()
        self._count = max(count, self._count)

    def _hire(self) -> None:
        cpus = 1 if self._resource == "CPU" else 0
        make = self._ray.remote(num_cpus=cpus, num_gpus=1 - cpus, max_restarts=0, max_task_retries=0)(Member)
        number, self._hired = self._hired, self._hired + 1
        self._actors[number] = _Actor(make.remote(str(self.device), self._environment), "")
        self._ask(number, "hello")

    def _ask(self, number: int, question: str, *arguments: Any) -> None:
        actor = self._actors[number]
        actor.question = question
        self._asked[getattr(actor.handle, question).remote(*arguments)] = number

    def _answers(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Actors' numbers and answers; an exception where the actor has ended or its work failed."""
        if not self._asked:
            time.sleep(min(timeout_s, 0.2))
            return []
        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=max(0.0, timeout_s))
        if ready:
            ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        found = []
        for reference in ready:
            number = self._asked.pop(reference)
            try:
                found.append((number, self._ray.get(reference)))
            except Exception as error:
                found.append((number, error))
        return found

    def _greet(self, number: int, answer: Any) -> Place:
        """The place that an actor's first words describe; raises BadInput where it cannot take part."""
        if isinstance(answer, Exception):
            if "No module named 'swiglu_bench" in str(answer):
                missing = "swiglu-bench is not installed on a host of the cluster"
                raise BadInput(f"--ray: {missing}; install {__version__} on all.")
            raise BadInput(f"--ray: a process of the cluster could not start: {reason_of(answer)}.")
        place = Place(number, Machine(**answer["machine"]))
        if (answer["version"], answer["code"]) != (__version__, sources.code()):
            other = answer["version"] if answer["version"] != __version__ else f"other code of {__version__}"
            unlike = f"{place.machine.host} has {other} and this host {__version__}"
            raise BadInput(f"--ray: {unlike}; install the same everywhere.")
        self._first = self._first or place
        check_alike(self._first, place)
        self._actors[number].place = place
        self._actors[number].question = ""
        return place

    def _dismiss(self, number: int) -> None:
        actor = self._actors.pop(number)
        self._asked = {reference: whose for reference, whose in self._asked.items() if whose != number}
        self.places = {other: place for other, place in self.places.items() if other != number}
        self._ray.kill(actor.handle)


def _connected(address: str) -> Any:
    check_address(address)
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise BadInput(f"--ray: nobody answers at {address} ({error}); `ray status` says where it is.") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _try(address)
    import ray

    if ray.is_initialized():
        raise BadInput("--ray: this process is already connected to a cluster; call ray.shutdown() first.")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    return ray


def _try(address: str) -> None:
    """Raise BadInput where no cluster is to be had. Another process tries it: Ray itself may wait without an end."""
    told = "start one with `ray start`, and sweep on one of its hosts"
    try:
        command = [sys.executable, "-c", TRIAL, address]
        tried = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise BadInput(f"--ray: no cluster answers at {address} within {ANSWER_S:.0f} s; {told}.") from None
    if tried.returncode:
        reason = reason_of(RuntimeError(tried.stderr or f"exit status {tried.returncode}"))
        raise BadInput(f"--ray: no cluster can be reached at {address}: {reason}; {told}.")


def reason_of(error: Exception) -> str:
    """What Ray says of a failure, in a part of a sentence: of a dead process how it ended, else the last line."""
    text = str(error)
    for pattern in (r"Worker exit detail: (.+?)(?: Some common causes|$)", r"(The node .+)$"):
        if found := re.search(pattern, text, re.MULTILINE):
            return found[1][:MOST_CHARACTERS].rstrip(".")
    last = next((line for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)
    return " ".join(last.split())[:MOST_CHARACTERS].rstrip(".")
