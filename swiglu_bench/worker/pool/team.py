"""A sweep over places, wherever they are: cases out, whole cases of rows in, and what the loss of a place costs.

Rows of a case are handed on when all of them are there, so a case that is run again leaves no row twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine.machine import Machine
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.worker import policy
from swiglu_bench.worker.pool import place as places
from swiglu_bench.worker.pool.place import Place
from swiglu_bench.worker.pool.schedule import Schedule
from swiglu_bench.worker.settings import Settings

POLL_S = 0.2


@dataclass(frozen=True)
class Done:
    """A place has run its case."""

    place: int
    records: list[Record]


@dataclass(frozen=True)
class Lost:
    """A place is gone, and the case that it ran with it."""

    place: int
    reason: str
    """A part of a sentence."""


class NoPlace(RuntimeError):
    """Cases are left and no place that could run them."""


class Team(Protocol):
    """Places that may come and go, each with processes that run a case at a time."""

    device: torch.device
    """As each place sees its own."""
    places: dict[int, Place]
    """Those that can work now."""
    doing: dict[int, tuple[str, float]]
    """What a place is at and which share of its case is done, as far as that is known."""

    @property
    def joining(self) -> bool:
        """Whether more places may come."""
        ...

    def assemble(self) -> Machine:
        """Find the places; the machine that stands for all of them. Raises BadInput where that fails."""
        ...

    def start(
        self, implementations: Sequence[Implementation], settings: Settings, logs: Path, command: str, wait: bool
    ) -> None:
        """Hold every GPU and make its processes ready. Raises BadInput for one in use, unless it is to `wait`."""
        ...

    def begin(self, place: int, case: Case) -> None:
        """Let a place that does nothing run a case."""
        ...

    def wait(self, timeout_s: float) -> Sequence[Done | Lost]:
        """What has happened; returns at once when something has."""
        ...

    def close(self) -> None:
        """End all that runs, and let go of the GPUs; harmless twice."""
        ...


def run(
    team: Team,
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    settings: Settings,
    listen: Callable[[float, str], object],
    warn: Callable[[str], object],
) -> Generator[Record]:
    """All rows of all cases, a case at a time in the order in which they end; the team has been started.

    `listen` hears how many cases are done and what is being done. Raises NoPlace when no place is left.
    """
    schedule, running, done = Schedule(cases), dict[int, int](), 0
    known: dict[int, Place] = {}
    last = "no place has joined"
    while done < len(cases):
        known |= team.places
        for number, place in list(team.places.items()):
            if number not in running:
                others = [other for other in team.places.values() if other is not place]
                chosen = schedule.take(place, others)
                if chosen is not None:
                    running[number] = chosen
                    team.begin(number, cases[chosen])
        if not running and not team.joining and not team.places:
            raise NoPlace(f"{len(cases) - done} cases are left and no place to run them: {last}.")
        listen(*_progress(team, cases, running, done))
        for event in team.wait(POLL_S):
            case = running.pop(event.place, None)
            if isinstance(event, Done):
                assert case is not None
                done += 1
                yield from event.records
                continue
            place = known[event.place]
            last = f"{place.name} was lost: {event.reason}"
            if case is None:
                warn(f"{last}.")
                continue
            given_up = schedule.give_back(case, place, event.reason)
            if given_up is None:
                warn(f"{last}; {cases[case].label} is run once more.")
                continue
            done += 1
            rows = (policy.blank(settings, place.machine, cases[case], one) for one in implementations)
            yield from (row.end(Status.ERROR, given_up) for row in rows)


def _progress(team: Team, cases: Sequence[Case], running: Mapping[int, int], done: int) -> tuple[float, str]:
    """Cases done so far, fractions included, and a line of text."""
    shares = [team.doing.get(number, ("", 0.0))[1] for number in running]
    text = f"{done}/{len(cases)} on {places.names(list(team.places.values()))}"
    if running:
        number, chosen = next(iter(running.items()))
        case, doing = cases[chosen], team.doing.get(number, ("", 0.0))[0]
        text += f": {case.name}, {case.how_many}{', ' if doing else ''}{doing}"
    return done + sum(shares), text
