"""What a measuring command does, for the command line and for Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swiglu_bench.options import SweepOptions
from swiglu_bench.request import requested
from swiglu_bench.rows import run_folder
from swiglu_bench.worker import forkserver

if TYPE_CHECKING:
    from rich.console import Console

    from swiglu_bench.rows.finished_run import FinishedRun
    from swiglu_bench.worker.court import CaseTask
    from swiglu_bench.worker.policy import Settings


def task_of(settings: Settings) -> CaseTask:
    """The task that settings ask for."""
    from swiglu_bench.tasks.time import time
    from swiglu_bench.tasks.untimed import memory, sanitize, verify
    from swiglu_bench.worker.policy import Task

    if settings.sanitizer:
        return sanitize
    return {Task.TIME: time, Task.MEMORY: memory, Task.VERIFY: verify}[settings.task]


def perform(command: str, options: SweepOptions, console: Console, line: str) -> tuple[int, FinishedRun]:
    """Do what the command `line` asks for: its exit status and its rows. Raises BadInput before any work starts."""

    def checked() -> None:
        run_folder.check_out(options.out, options.resume, options.force)
        if not options.in_process and command != "verify":  # which may yet need Triton's interpreter
            forkserver.start()  # the imports of child processes begin while this process imports its own

    with requested(command, options, console, line, checked) as request:
        if not options.in_process:
            forkserver.start()
        from swiglu_bench.loop import sweep
        from swiglu_bench.output import about, folder_of
        from swiglu_bench.rows.finished_run import Collected, FinishedRun
        from swiglu_bench.worker.policy import check_sweep

        this, rows = request.places.assemble(), Collected()
        own = options.shapes is None and options.tokens is None  # sizes of the command's own, which are never refused
        if request.settings.device.type == "cpu" and request.places.in_order and not own:
            check_sweep(request.settings, request.cases, request.implementations, this, options.budget)
        status = sweep(request, task_of(request.settings), this, console, also=[rows])
        folder = folder_of(command, options, this, request.settings.run_id)
        if options.save_baseline is not None and folder:
            keep_baseline(options.save_baseline, command, folder, status, console)
        return status, FinishedRun(rows.records, about(request, this), folder)


def keep_baseline(name: str, command: str, folder: Path, status: int, console: Console) -> None:
    """Save a run that ended well as a baseline, and say where, or why not."""
    if status:
        said = f"Warning: the baseline {name} is not saved, because the command exits with {status}."
    else:
        try:
            said = f"Baseline {name}: {run_folder.save_baseline(name, command, folder)}"
        except OSError as error:
            said = f"Warning: the baseline {name} is not saved: {error.strerror}."
    console.print(said, markup=False, highlight=False, soft_wrap=True)
