"""A sweep from its cases to its exit status: rows from the runner, at once to the screen, the files and W&B."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from swiglu_bench.machine import locks
from swiglu_bench.machine.machine import Machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.processes import parent
from swiglu_bench.processes.child import DoesNotEnd
from swiglu_bench.processes.pool import team
from swiglu_bench.processes.pool.team import Team
from swiglu_bench.rows.csv_table import typed
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.session import session
from swiglu_bench.session.settings import Progress, Settings, Task
from swiglu_bench.spec.cases import Case
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.sweep.output import Output, logs, opened
from swiglu_bench.sweep.resume import Fingerprints, Remaining
from swiglu_bench.writers import Writer
from swiglu_bench.writers.console import ConsoleWriter, Tables
from swiglu_bench.writers.tables import memory_tables, verify_detail_tables, verify_tables
from swiglu_bench.writers.time_tables import time_tables

INTERRUPTED = 130


@dataclass(frozen=True)
class Process:
    """Where implementations run."""

    timeout_s: float | None = None
    """Of one implementation at one case, each in a child process; None: in this process, and without an end."""
    wait: bool = True
    """For a GPU on which another sweep runs; else that is an error."""
    team: Team | None = None
    """The places that share the cases; None: one device."""


IN_THIS_PROCESS = Process()


def sweep(
    command: str,
    cases: Sequence[Case],
    chosen: Sequence[Implementation],
    settings: Settings,
    this: Machine,
    output: Output,
    console: Console,
    process: Process = IN_THIS_PROCESS,
    also: Sequence[Writer] = (),
) -> int:
    """Run all cases; 0 when every row is ok or skipped, 1 with an incorrect one or an error, 130 when interrupted.

    Rows that could not be kept make it 1 as well. Writers in `also` get every row, those kept by `resume` first.
    """

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def warn(text: str) -> None:
        say(f"Warning: {text}", style="yellow")

    fingerprints = Fingerprints(chosen, settings, this)
    interrupted = failed = False
    with opened(command, settings, this, output, warn) as into, ExitStack() as stack:
        plan = Remaining(
            cases, fingerprints, settings.command, into.files.rows() if into.files and output.resume else []
        )
        if len(plan.todo) < len(cases):
            done = len(cases) - len(plan.todo)
            say(f"{done} of {len(cases)} cases are finished in {into.folder} and are kept.")
        for writer in also:
            for row in plan.kept:
                writer.write(typed(Record, row))
        in_detail = settings.detail and settings.task is Task.VERIFY
        in_any_order = process.team is not None
        shown = ConsoleWriter(console, _tables(settings), len(plan.todo), in_detail, output.quiet, in_any_order)

        def listen(progress: Progress) -> None:
            case = progress.case
            doing = f"{case.shape.name}, {case.tokens} tokens, {progress.doing}"
            number = f"case {progress.case_number + 1}/{progress.case_count}"
            shown.advance(progress.case_number + progress.fraction, f"{number}: {doing}")

        def run() -> Generator[Record]:
            if process.timeout_s is None:
                yield from session.run(plan.todo, chosen, settings, this, listen)
                return
            with logs(into.folder, wanted=lambda: any(row.status is Status.ERROR for row in shown.records)) as place:
                if process.team:
                    process.team.start(chosen, settings, place, settings.command, process.wait)
                    with contextlib.closing(process.team):
                        yield from team.run(process.team, plan.todo, chosen, settings, shown.advance, warn)
                    return
                yield from parent.run(
                    plan.todo, chosen, settings, this, listen, timeout_s=process.timeout_s, logs=place
                )

        try:
            if plan.todo and not process.team:  # which holds each of its GPUs by itself
                stack.enter_context(locks.device(settings.device, settings.command, process.wait, say))
            with shown, contextlib.closing(run()) as rows:
                for record in rows:
                    plan.stamp(record)
                    outdated = plan.replaced_by(record)
                    if into.files and outdated:
                        into.files.drop(outdated)
                    for writer in (*into.writers, shown, *also):  # what is shown is kept
                        writer.write(record)
        except KeyboardInterrupt:
            interrupted = True
        except DeviceLost as error:
            failed = True
            warn(f"The GPU is lost to this process ({error}), and the sweep with it; without --in-process it goes on.")
        except DoesNotEnd as error:
            failed = True
            warn(f"{error} The sweep ends here.")
        except team.NoPlace as error:
            failed = True
            warn(f"{error} The same command with --out and --resume runs them.")
        shown.close()
    for place in filter(None, (tell() for tell in into.places)):
        say(place)
    if interrupted:
        say(f"Interrupted: {len(shown.records)} rows were kept.", style="yellow")
        return INTERRUPTED
    failed |= into.files is not None and into.files.lost
    statuses = {row["status"] for row in plan.kept} | {record.status for record in shown.records}
    return int(failed or bool(statuses & {Status.INCORRECT, Status.ERROR}))


def _tables(settings: Settings) -> Tables:
    """What a command ends with."""
    match settings.task:
        case Task.MEMORY:
            return memory_tables
        case Task.VERIFY:
            return verify_detail_tables if settings.detail else verify_tables
        case _:
            return partial(time_tables, detail=settings.detail)
