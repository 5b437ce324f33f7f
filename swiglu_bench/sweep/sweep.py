"""A sweep from its cases to its exit status: each row goes at once to the screen, the files and W&B."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from swiglu_bench.cases.cases import Case
from swiglu_bench.machine import locks
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.system import look
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.rows.csv_table import reason, typed
from swiglu_bench.rows.record import Record
from swiglu_bench.show.workload import totals, write_totals
from swiglu_bench.show.writers import Writer
from swiglu_bench.show.writers.console import ConsoleWriter, Tables
from swiglu_bench.show.writers.tables import memory_tables, nothing_done, verify_detail_tables, verify_tables
from swiglu_bench.show.writers.time_tables import time_tables
from swiglu_bench.show.writers.workload_tables import workload_tables
from swiglu_bench.sweep.output import logs, opened
from swiglu_bench.sweep.request import INTERRUPTED, Request, Say
from swiglu_bench.sweep.resume import Fingerprints, Remaining
from swiglu_bench.worker import crew, here, sanitizer
from swiglu_bench.worker.child import DoesNotEnd
from swiglu_bench.worker.pool import team
from swiglu_bench.worker.pool.team import NoPlace
from swiglu_bench.worker.settings import Progress, Settings, Task

EARLY_ENDS: dict[type[BaseException], str] = {
    DeviceLost: "The GPU is lost to this process ({}), which ends the sweep; without --in-process it would continue.",
    DoesNotEnd: "{} The sweep ends here.",
    NoPlace: "{} The same command with --out and --resume runs them.",
}
"""What ends a sweep before its last case, and what the user is told then."""

DONE = {Task.TIME: "timed", Task.MEMORY: "measured", Task.VERIFY: "checked"}


def sweep(request: Request, this: Machine, console: Console, also: Sequence[Writer] = ()) -> int:
    """Run all cases; 0 when every row is ok or skipped, 1 with an incorrect one or an error, 130 when interrupted.

    It is 1 as well where rows could not be kept, or where no row that was asked for is ok. Writers in `also` get every
    row, those kept by `resume` first.
    """

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def warn(text: str) -> None:
        say(f"Warning: {text}", style="yellow")

    options, settings, count = request.options, request.settings, len(request.cases)
    fingerprints = Fingerprints(request.implementations, settings, this)
    interrupted = failed = False
    with opened(request, this, warn) as into, ExitStack() as stack:
        request = dataclasses.replace(request, settings=dataclasses.replace(settings, folder=into.folder))
        earlier = into.files.rows() if into.files and options.resume else []
        remaining = Remaining(request.cases, fingerprints, settings.command, earlier)
        todo = remaining.todo
        if len(todo) < count:
            say(f"{count - len(todo)} of {count} cases are finished in {into.folder} and are kept.")
        for writer in also:
            for row in remaining.kept:
                writer.write(typed(Record, row))
        in_detail = settings.detail and settings.task is Task.VERIFY
        in_any_order = request.team is not None
        shown = ConsoleWriter(console, _tables(settings), len(todo), in_detail, options.quiet, in_any_order)
        try:
            if todo and not request.team:  # a team holds each of its GPUs itself
                stack.enter_context(locks.device(settings.device, settings.command, options.wait, say))
                _warn_of_load(settings.device.type, warn)
            rows = _rows(request, todo, this, into.folder, shown, warn)
            with shown, contextlib.closing(rows):
                for record in rows:
                    remaining.stamp(record)
                    outdated = remaining.replaced_by(record)
                    if into.files and outdated:
                        into.files.drop(outdated)
                    for writer in (*into.writers, shown, *also):  # a row is written before it is shown
                        writer.write(record)
        except KeyboardInterrupt:
            interrupted = True
        except tuple(EARLY_ENDS) as error:
            failed = True
            warn(EARLY_ENDS[type(error)].format(error))
        shown.close()
    found = [typed(Record, row) for row in remaining.kept] + shown.records
    if request.workload:
        if into.folder:
            try:
                write_totals(into.folder, totals(found, request.workload))
            except OSError as error:
                failed = True
                warn(f"The workload's totals cannot be written: {reason(error)}.")
        for part in () if options.quiet else workload_tables(found, request.workload):
            console.print(part)
    for place in into.places():
        say(place)
    if interrupted:
        say(f"Interrupted: {len(shown.records)} rows were kept.", style="yellow")
        return INTERRUPTED
    failed |= into.files is not None and into.files.lost
    found = [typed(Record, row) for row in remaining.kept] + shown.records
    nothing = nothing_done([row for row in found if row.implementation in request.asked], DONE[settings.task])
    if nothing:
        warn(nothing)
    return int(failed or bool(nothing) or not found or any(row.failed for row in found))


def _warn_of_load(device_type: str, warn: Say) -> None:
    """Before the first case: what it will share the CPUs with."""
    load = look()
    reason = load.reason(device_type) if load else ""
    if reason:
        warn(f"{reason} Times will vary, and there will be fewer verdicts.")


def _rows(
    request: Request, todo: Sequence[Case], this: Machine, folder: Path | None, shown: ConsoleWriter, warn: Say
) -> Generator[Record]:
    """The rows of cases, from this process, from child processes, or from those of a team."""

    def listen(progress: Progress) -> None:
        case = progress.case
        doing = f"{case.name}, {case.how_many}, {progress.doing}"
        number = f"case {progress.case_number + 1}/{progress.case_count}"
        shown.advance(progress.case_number + progress.fraction, f"{number}: {doing}")

    options, settings, chosen, places = request.options, request.settings, request.implementations, request.team
    if options.in_process:
        yield from here.run(todo, chosen, settings, this, listen)
        return
    with logs(folder, wanted=lambda: any(row.failed for row in shown.records)) as place:
        if places:
            places.start(chosen, settings, place, settings.command, options.wait)
            with contextlib.closing(places):
                yield from team.run(places, todo, chosen, settings, shown.advance, warn)
        else:
            run = sanitizer.run if settings.sanitizer else crew.run
            yield from run(todo, chosen, settings, this, listen, timeout_s=options.timeout, logs=place)


def _tables(settings: Settings) -> Tables:
    """The tables at the end of a command."""
    if settings.task is Task.VERIFY:
        return verify_detail_tables if settings.detail else verify_tables
    return memory_tables if settings.task is Task.MEMORY else partial(time_tables, detail=settings.detail)
