"""The loop: cases are given to places, each place's court does the task, and each row goes at once to every writer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import WEIGHTS, Case
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.system import look
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.output import Fingerprints, Opened, Remaining, logs, opened
from swiglu_bench.request import INTERRUPTED, Request, Say
from swiglu_bench.rows.figures import reason, typed
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show import Writer
from swiglu_bench.show.console import ConsoleWriter, Screen, Tables
from swiglu_bench.show.ranking import totals, write_totals
from swiglu_bench.show.table import nothing_done
from swiglu_bench.show.tables import memory_tables, time_tables, verify_tables, workload_tables
from swiglu_bench.worker import places as where
from swiglu_bench.worker import policy
from swiglu_bench.worker.child import DoesNotEnd
from swiglu_bench.worker.court import CaseTask
from swiglu_bench.worker.places import CaseRows, Place, Places, Work
from swiglu_bench.worker.policy import Task

POLL_S = 0.2
OPERATIONS_PER_BYTE = 200
"""From here on a case is bound by products: 989 TFLOP/s over 4800 GB/s of an H200. Only the order depends on it."""
ATTEMPTS = 2


class NoPlace(RuntimeError):
    """Cases are left and no place that could run them."""


EARLY_ENDS: dict[type[BaseException], str] = {
    DeviceLost: "The GPU is lost to this process ({}), which ends the sweep; without --in-process it would continue.",
    DoesNotEnd: "{} The sweep ends here.",
    NoPlace: "{} The same command with --out and --resume runs them.",
}
"""What ends a sweep before its last case, and what the user is told then."""

DONE = {Task.TIME: "timed", Task.MEMORY: "measured", Task.VERIFY: "checked"}


@dataclass(frozen=True)
class Progress:
    """Where a run is."""

    done: float
    """Cases, fractions included."""
    finished: int
    count: int
    case: Any
    """One that is being worked on; None between two."""
    doing: str
    where: str
    """The places, in a few words."""
    in_order: bool

    def __str__(self) -> str:
        at = f"{self.finished}/{self.count} on {self.where}"
        if self.in_order:
            at = f"case {self.finished + 1}/{self.count}"
        doing = f", {self.doing}" if self.doing else ""
        return at if self.case is None else f"{at}: {self.case.name}, {self.case.how_many}{doing}"


class Schedule:
    """The cases that wait, by their number; `in_order`, or the longest first."""

    def __init__(self, cases: Sequence[Any], in_order: bool) -> None:
        # Started last, a long case would keep one place busy while all others are done.
        cost = (lambda number: 0) if in_order else (lambda number: -expected_cost(cases[number]))
        self._waiting = sorted(range(len(cases)), key=cost)
        self._lost: dict[int, list[tuple[Place, str]]] = {}

    def take(self, place: Place, others: Collection[Place]) -> int | None:
        """The case that an idle place is to run, or None; one whose place was lost goes to the `others` if possible."""
        for number in self._waiting:
            died_at = {lost.seat for lost, _ in self._lost.get(number, [])}
            if place.seat not in died_at or not any(other.seat not in died_at for other in others):
                self._waiting.remove(number)
                return number
        return None

    def give_back(self, number: int, place: Place, reason: str) -> str | None:
        """Note that a place was lost over a case; why it is not tried again, or None where it is."""
        losses = self._lost.setdefault(number, [])
        losses.append((place, reason))
        if len(losses) < ATTEMPTS:
            self._waiting.insert(0, number)
            return None
        told = "; then ".join(f"{lost.name} was lost: {why}" for lost, why in losses)
        return f"Its process ended {len(losses)} times: {told}."


def expected_cost(case: Case) -> int:
    """A figure that grows with the time a case takes: its operations, or the bytes it moves in the time of as many."""
    names = (*WEIGHTS[case.scope], "x")
    return max(costs.flops(case, names), costs.min_bytes(case, names) * OPERATIONS_PER_BYTE)


def rows(
    places: Places, cases: Sequence[Any], work: Work, show: Callable[[Progress], object], warn: Say
) -> Generator[Record]:
    """All rows of all cases; on several places, each case's when it is finished. Raises NoPlace when none is left."""
    schedule, running, finished = Schedule(cases, places.in_order), dict[int, int](), 0
    known: dict[int, Place] = {}
    last = "no place has joined"

    def tell() -> None:
        place, number = next(iter(running.items()), (-1, -1))
        shares = [places.doing.get(number, ("", 0.0))[1] for number in running]
        doing, case = places.doing.get(place, ("", 0.0))[0], cases[number] if running else None
        names = where.names(list(places.places.values()))
        show(Progress(finished + sum(shares), finished, len(cases), case, doing, names, places.in_order))

    with contextlib.closing(places):
        places.start(work, tell)
        while finished < len(cases):
            known |= places.places
            for number, place in list(places.places.items()):
                others = [other for other in places.places.values() if other is not place]
                chosen = None if number in running else schedule.take(place, others)
                if chosen is not None:
                    running[number] = chosen
                    places.begin(number, cases[chosen])
            if not running and not places.joining and not places.places:
                raise NoPlace(f"{len(cases) - finished} cases are left and no place to run them: {last}.")
            tell()
            for event in places.wait(POLL_S):
                if isinstance(event, CaseRows):
                    yield from event.records
                    if event.last:
                        del running[event.place]
                        finished += 1
                    continue
                place, case = known[event.place], running.pop(event.place, None)
                last = f"{place.name} was lost: {event.reason}"
                if case is None:
                    warn(f"{last}.")
                    continue
                given_up = schedule.give_back(case, place, event.reason)
                if given_up is None:
                    warn(f"{last}; {cases[case].label} is run once more.")
                    continue
                finished += 1
                for each in work.implementations:
                    row = policy.blank(work.settings, place.machine, cases[case], each)
                    yield row.end(Status.ERROR, given_up)


@dataclass
class Ending:
    """How a command's work ends; entered around it, it takes an interruption and what EARLY_ENDS has for an end."""

    screen: Screen
    ends: Mapping[Any, str] = field(default_factory=lambda: EARLY_ENDS)
    failed: bool = False
    interrupted: bool = False

    def __enter__(self) -> Ending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.interrupted = isinstance(error, KeyboardInterrupt)
        told = next((text for end, text in self.ends.items() if isinstance(error, end)), "")
        if told:
            self.failed = True
            self.screen.warn(told.format(error))
        return self.interrupted or bool(told)

    def status(
        self, into: Opened, rows: Sequence[Record], asked: Collection[str], done: str, earlier: int = 0,
        what: str = "Rows, samples and machine",
    ) -> int:  # fmt: skip
        """Say where the rows are, and why nothing that was `asked` for is `done`; the exit status.

        It is 0 when every row is ok or skipped and kept, and one that was asked for is ok; 130 when interrupted, else
        1. `earlier` rows are older than this command.
        """
        for place in into.places(what):
            self.screen.say(place)
        if self.interrupted:
            self.screen.say(f"Interrupted: {len(rows) - earlier} rows were kept.", style="yellow")
            return INTERRUPTED
        nothing = nothing_done([row for row in rows if row.implementation in asked], done)
        if nothing:
            self.screen.warn(nothing)
        lost = into.files is not None and into.files.lost
        return int(self.failed or lost or bool(nothing) or not rows or any(row.failed for row in rows))


def sweep(request: Request, task: CaseTask, this: Machine, console: Console, also: Sequence[Writer] = ()) -> int:
    """Run all cases; the exit status of `Ending`. Writers in `also` get every row, those kept by `resume` first."""
    screen, options, settings, count = Screen(console), request.options, request.settings, len(request.cases)
    with opened(request, this, screen.warn) as into:
        settings = dataclasses.replace(settings, folder=into.folder)
        earlier = into.files.rows() if into.files and options.resume else []
        prints = Fingerprints(request.implementations, settings, this)
        remaining = Remaining(request.cases, prints, settings.command, earlier)
        kept = [typed(Record, row) for row in remaining.kept]
        if len(remaining.todo) < count:
            screen.say(f"{count - len(remaining.todo)} of {count} cases are finished in {into.folder} and are kept.")
        for writer in also:
            for record in kept:
                writer.write(record)
        tables: dict[Task, Tables] = {
            Task.TIME: partial(time_tables, detail=settings.detail), Task.MEMORY: memory_tables,
            Task.VERIFY: partial(verify_tables, detail=settings.detail),
        }  # fmt: skip
        in_detail = settings.detail and settings.task is Task.VERIFY
        in_any_order = not request.places.in_order
        shown = ConsoleWriter(
            console, tables[settings.task], len(remaining.todo), in_detail, options.quiet, in_any_order
        )

        def stamp(record: Record) -> None:
            remaining.stamp(record)
            outdated = remaining.replaced_by(record)
            if into.files and outdated:
                into.files.drop(outdated)

        ending = Ending(screen)
        if remaining.todo:
            work = Work(task, request.implementations, settings, options.timeout, Path(), options.wait)
            run_cases(request.places, remaining.todo, work, into, shown, ending, stamp, also)
        shown.close()
    found = kept + shown.records
    if request.workload:
        ending.failed |= not _show_workload(request, into, found, console, screen)
    return ending.status(into, found, request.asked, DONE[settings.task], len(kept))


def run_cases(
    places: Places, cases: Sequence[Any], work: Work, into: Opened, shown: ConsoleWriter, ending: Ending,
    stamp: Callable[[Record], object] = lambda record: None, also: Sequence[Writer] = (),
) -> None:  # fmt: skip
    """Run the cases, and end as `ending` says; each row is stamped, and goes to the files and W&B before the screen."""
    warn = ending.screen.warn
    with ending, logs(into.folder, wanted=lambda: any(row.failed for row in shown.records)) as folder:
        work = dataclasses.replace(work, logs=folder)
        found = rows(places, cases, work, lambda at: shown.advance(at.done, str(at)), warn)
        load = look() if places.in_order else None
        if load and (why := load.reason(work.settings.device.type)):  # what the first case will share the CPUs with
            warn(f"{why} Times will vary, and there will be fewer verdicts.")
        with shown, contextlib.closing(found):
            for record in found:
                stamp(record)
                for writer in (*into.writers, shown, *also):
                    writer.write(record)


def _show_workload(request: Request, into: Opened, found: Sequence[Record], console: Console, screen: Screen) -> bool:
    for part in () if request.options.quiet else workload_tables(found, request.workload):
        console.print(part)
    try:
        if into.folder:
            write_totals(into.folder, totals(found, request.workload))
    except OSError as error:
        screen.warn(f"The workload's totals cannot be written: {reason(error)}.")
        return False
    return True
