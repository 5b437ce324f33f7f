"""The loop: cases are given to places, each place's court does the task, and each row goes at once to every writer."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import WEIGHTS, Case
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.system import look
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.output import Fingerprints, Opened, Remaining, logs, opened
from swiglu_bench.request import INTERRUPTED, Request, Say, asked
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
REPEATS = 0.5
REPEATED = "Its case was repeated at the end of the run: the machine had been too busy to settle all of its rows."
NOT_KNOWN = 3
"""The exit status where nothing is wrong, and something is not known."""


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
            at = f"case {min(self.finished + 1, self.count)}/{self.count}"
        doing = f", {self.doing}" if self.doing else ""
        return at if self.case is None else f"{at}: {self.case.name}, {self.case.how_many}{doing}"


class Schedule:
    """The cases that wait, by their number; `in_order`, or the longest first."""

    def __init__(self, cases: Sequence[Any], in_order: bool) -> None:
        # Started last, a long case would keep one place busy while all others are done.
        cost = (lambda number: 0) if in_order else (lambda number: -expected_cost(cases[number]))
        self._waiting = sorted(range(len(cases)), key=cost)
        self._lost: dict[int, list[tuple[Place, str]]] = {}

    @property
    def left(self) -> int:
        """How many cases wait."""
        return len(self._waiting)

    def again(self, number: int) -> None:
        """Let a case be tried again when all that wait now have begun."""
        self._waiting.append(number)

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


class SecondChance:
    """Rows that wait, should the machine have been too busy to settle all of their case, for a second attempt.

    It comes at the end of the run, in another order, for those whose results are right. Repetitions together may take
    REPEATS of what the run took before them; the first one always takes place.
    """

    def __init__(self) -> None:
        self._now: dict[int, list[Record]] = {}
        """By the number of a case that is being worked on."""
        self._first: dict[int, list[Record]] = {}
        """By the number of a case that is to be tried again."""
        self._began, self._until = time.monotonic(), math.inf

    def take(self, number: int, records: Iterable[Record]) -> Iterator[Record]:
        """Those rows that need not wait; from the first one that rests on time, a case's rows wait until its end."""
        for record in records:
            if number in self._first or number in self._now or _rests_on_time(record):
                self._now.setdefault(number, []).append(record)
            else:
                yield record

    def ended(self, number: int) -> Iterator[Record]:
        """The rows of a case that has ended; without those that rest on time where it is to be tried again."""
        rows, first = self._now.pop(number, []), self._first.pop(number, None)
        if first is None and _unsettled(rows):
            self._first[number] = [row for row in rows if _rests_on_time(row)]
            rows = [row for row in rows if not _rests_on_time(row)]
        elif first is not None:
            worse = _unsettled(rows) > _unsettled(first)
            accused = {row.implementation: row for row in rows if not _rests_on_time(row) or not worse}
            rows = [accused.get(row.implementation, row) for row in first]
            for row in rows:
                row.remark(REPEATED)
        yield from rows

    def names(self, number: int) -> list[str]:
        """Whom a case that waits is tried again with; nobody at its first attempt."""
        return [row.implementation for row in self._first.get(number, [])]

    def in_time(self) -> bool:
        """Whether a repetition may begin now."""
        now = time.monotonic()
        if self._until == math.inf:
            self._until = now + REPEATS * (now - self._began)
        return now <= self._until

    def give_up(self, number: int) -> Iterator[Record]:
        """The rows of a case's first attempt, for there will be no whole second one."""
        self._now.pop(number, None)
        yield from self._first.pop(number, [])

    def left(self) -> Iterator[Record]:
        """All rows that still wait, where a run ends early: of first attempts only."""
        for number in [*self._first, *self._now]:
            yield from self._first.pop(number, None) or self._now.pop(number, [])
            self._now.pop(number, None)


def _rests_on_time(row: Record) -> bool:
    """Whether a busy machine may have spoiled it: one that is only checked has no time, and is passed on at once."""
    return row.time_ms is not None or row.status is Status.UNSETTLED


def _unsettled(rows: Iterable[Record]) -> int:
    return sum(row.status is Status.UNSETTLED for row in rows)


def expected_cost(case: Case) -> int:
    """A figure that grows with the time a case takes: its operations, or the bytes it moves in the time of as many."""
    names = (*WEIGHTS[case.scope], "x")
    return max(costs.flops(case, names), costs.min_bytes(case, names) * OPERATIONS_PER_BYTE)


def rows(
    places: Places, cases: Sequence[Any], work: Work, show: Callable[[Progress], object], warn: Say,
    second: SecondChance | None = None,
) -> Generator[Record]:  # fmt: skip
    """All rows of all cases; on several places, each case's when it is finished. Raises NoPlace when none is left.

    `second` has the rows that were not passed on, where the caller ends this early.
    """
    second = second or SecondChance()
    schedule, running, finished = Schedule(cases, places.in_order), dict[int, int](), 0
    known, last = dict[int, Place](), "no place has joined"

    def tell() -> None:
        place, number = next(iter(running.items()), (-1, -1))
        counted = (number for number, chosen in running.items() if not second.names(chosen))
        shares = [places.doing.get(number, ("", 0.0))[1] for number in counted]
        doing, case = places.doing.get(place, ("", 0.0))[0], cases[number] if running else None
        names = where.names(list(places.places.values()))
        show(Progress(finished + sum(shares), finished, len(cases), case, doing, names, places.in_order))

    with contextlib.closing(places):
        places.start(work, tell)
        while schedule.left or running:
            known |= places.places
            for number, place in list(places.places.items()):
                others = [other for other in places.places.values() if other is not place]
                chosen = None if number in running else schedule.take(place, others)
                if chosen is None:
                    continue
                if (names := second.names(chosen)) and not second.in_time():
                    yield from second.give_up(chosen)
                else:
                    running[number] = chosen
                    places.begin(number, cases[chosen], names)
            if not running and finished == len(cases) and not (schedule.left and places.places):
                break
            if not running and not places.joining and not places.places:
                raise NoPlace(f"{len(cases) - finished} cases are left and no place to run them: {last}.")
            tell()
            for event in places.wait(POLL_S):
                if isinstance(event, CaseRows):
                    chosen = running[event.place]
                    yield from second.take(chosen, event.records)
                    if event.last:
                        del running[event.place]
                        finished += not second.names(chosen)
                        yield from second.ended(chosen)
                        if second.names(chosen):
                            schedule.again(chosen)
                    continue
                place, case = known[event.place], running.pop(event.place, None)
                last = f"{place.name} was lost: {event.reason}"
                if case is None:
                    warn(f"{last}.")
                elif second.names(case):
                    warn(f"{last}; {cases[case].label} is not repeated.")
                    yield from second.give_up(case)
                elif (given_up := schedule.give_back(case, place, event.reason)) is None:
                    warn(f"{last}; {cases[case].label} is run once more.")
                else:
                    finished += 1
                    for each in work.implementations:
                        yield policy.blank(work.settings, place.machine, cases[case], each).end(Status.ERROR, given_up)
        yield from second.left()  # all places are gone


@dataclass
class Ending:
    """How a command's work ends; entered around it, it takes an interruption and what `ends` has for an end.

    What fails after Ctrl-C fails because of it, such as a call into C++ that turned it into an error of its own.
    """

    screen: Screen
    ends: Mapping[Any, str] = field(default_factory=lambda: EARLY_ENDS)
    failed: bool = False
    interrupted: bool = False

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        came = getattr(signal.getsignal(signal.SIGINT), "came", False)  # as `cli/ends.py` notes it
        self.interrupted = isinstance(error, KeyboardInterrupt) or (came and isinstance(error, Exception))
        if told := next((text for end, text in self.ends.items() if isinstance(error, end)), ""):
            self.failed = True
            self.screen.warn(told.format(error))
        return self.interrupted or bool(told)

    def status(
        self, into: Opened, rows: Sequence[Record], asked: Collection[str], done: str, earlier: int = 0,
        what: str = "Rows, samples and machine",
    ) -> int:  # fmt: skip
        """Say where the rows are, and why nothing that was `asked` for is `done`; the exit status.

        1: a row is incorrect, an error or lost, or the run ended early; 130: interrupted; NOT_KNOWN: nothing is wrong,
        but a row is `unknown`, or nothing that was asked for is ok; else 0. `earlier` rows are older than the command.
        """
        for place in into.places(what):
            self.screen.say(place)
        if self.interrupted:
            self.screen.say(f"Interrupted: {len(rows) - earlier} rows were kept.", style="yellow")
            return INTERRUPTED
        if nothing := nothing_done([row for row in rows if row.implementation in asked], done):
            self.screen.warn(nothing)
        lost = into.files is not None and into.files.lost
        if self.failed or lost or not rows or any(row.failed and not row.unknown for row in rows):
            return 1
        return NOT_KNOWN if nothing or any(row.unknown for row in rows) else 0


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
        of_task, count, in_any_order = tables[settings.task], len(remaining.todo), not request.places.in_order
        shown = ConsoleWriter(console, of_task, count, in_detail, options.quiet, in_any_order)

        def stamp(record: Record) -> None:
            remaining.stamp(record)
            if (outdated := remaining.replaced_by(record)) and into.files:
                into.files.drop(outdated)

        ending = Ending(screen)
        if remaining.todo:
            work = Work(task, request.implementations, settings, options.timeout, Path(), options.wait)
            run_cases(request.places, remaining.todo, work, into, shown, ending, stamp, also)
        shown.close()
    found = kept + shown.records
    if request.workload:
        for part in () if options.quiet else workload_tables(found, request.workload):
            console.print(part)
        try:
            if into.folder:
                write_totals(into.folder, totals(found, request.workload))
        except OSError as error:
            screen.warn(f"The workload's totals cannot be written: {reason(error)}.")
            ending.failed = True
    return ending.status(into, found, asked(options.impl, request.implementations), DONE[settings.task], len(kept))


def run_cases(
    places: Places, cases: Sequence[Any], work: Work, into: Opened, shown: ConsoleWriter, ending: Ending,
    stamp: Callable[[Record], object] = lambda record: None, also: Sequence[Writer] = (),
) -> None:  # fmt: skip
    """Run the cases, and end as `ending` says; each row is stamped, and goes to the files and W&B before the screen."""
    warn = ending.screen.warn
    with ending, logs(into.folder, wanted=lambda: any(row.failed for row in shown.records)) as folder:
        work = dataclasses.replace(work, logs=folder)
        second = SecondChance()
        found = rows(places, cases, work, lambda at: shown.advance(at.done, str(at)), warn, second)
        load = look() if places.in_order else None
        if load and (why := load.reason(work.settings.device.type)):  # what the first case will share the CPUs with
            warn(f"{why} Times will vary, and there will be fewer verdicts.")

        def take(record: Record) -> None:
            stamp(record)
            for writer in (*into.writers, shown, *also):
                writer.write(record)

        with shown, contextlib.closing(found):
            try:
                for record in found:
                    take(record)
            finally:
                for record in second.left():
                    take(record)
