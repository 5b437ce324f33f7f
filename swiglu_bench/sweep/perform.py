"""What a measuring command does, for the command line and for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiglu_bench.sweep.options import SweepOptions
from swiglu_bench.sweep.request import requested

if TYPE_CHECKING:
    from rich.console import Console

    from swiglu_bench.rows.finished_run import FinishedRun


def perform(command: str, options: SweepOptions, console: Console, line: str) -> tuple[int, FinishedRun]:
    """Do what the command `line` asks for: its exit status and its rows. Raises BadInput before any work starts."""
    if not options.in_process and command != "verify":  # which may yet need Triton's interpreter
        start_forkserver()
    with requested(command, options, console, line) as request:
        if not options.in_process:
            start_forkserver()
        from swiglu_bench.machine.machine import describe
        from swiglu_bench.rows.finished_run import Collected, FinishedRun
        from swiglu_bench.sweep.output import about, folder_of
        from swiglu_bench.sweep.sweep import sweep

        this, rows = request.team.assemble() if request.team else describe(request.settings.device), Collected()
        status = sweep(request, this, console, also=[rows])
        folder = folder_of(command, options, this, request.settings.run_id)
        return status, FinishedRun(rows.records, about(request, this), folder)


def start_forkserver() -> None:
    """Let the imports of child processes begin while this process imports its own."""
    from swiglu_bench.processes import forkserver

    forkserver.start()
