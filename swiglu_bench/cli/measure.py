"""The commands that measure and check every implementation at every case: forward, backward, step, memory, verify."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from swiglu_bench import request
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.options import COMMANDS, HOW, Form, SweepOptions, command_of, option
from swiglu_bench.show import text
from swiglu_bench.tasks.sweep import perform

if TYPE_CHECKING:
    from rich.console import Console

HELP = {
    "forward": """Time the forward pass (inference: nothing is kept for backward).

    Example: swiglu-bench forward --shapes llama7b --tokens 1,128,8k""",
    "backward": """Time the backward pass, each sample after a fresh forward pass that is not timed.

    Example: swiglu-bench backward --shapes llama3-8b --scope mlp""",
    "step": """Time forward and backward together, as in a training step.

    Example: swiglu-bench step --shapes llama7b --baseline compile""",
    "memory": """Measure what is saved for backward, the peak and the workspace, next to arithmetic predictions.

    Example: swiglu-bench memory --shapes llama7b --log-wandb""",
    "verify": """Check the output and every gradient against fp64, relative to eager's error. Exits 1 on any failure.
    On a CPU the Triton kernels run through Triton's interpreter, on small shapes.

    Example: swiglu-bench verify --impl 'fused*'""",
}


def commands() -> dict[str, Callable[..., None]]:
    """All five, by name."""
    return {name: command_of(COMMANDS[name], partial(measure, name), help) for name, help in HELP.items()}


def measure(
    command: str,
    options: SweepOptions,
    dry_run: Annotated[bool, option(HOW, "Print the cases and the memory they need, and stop.", "--dry-run")] = False,
    form: Form = "table",
) -> None:
    """Run one of the five."""
    text.check("--format", form, text.TABLE, *text.ROWS)
    console = text.screen(form)
    if dry_run:
        _dry_run(command, options, console, form)
    elif form == text.TABLE:
        raise typer.Exit(perform(command, options, console, request.command_line())[0])
    else:
        from swiglu_bench.show.history import as_text

        with contextlib.redirect_stdout(sys.stderr):  # what an implementation prints with --in-process
            status, run = perform(command, options, console, request.command_line())
        text.put(as_text(run, form))
        raise typer.Exit(status)


def _dry_run(command: str, options: SweepOptions, console: Console, form: str) -> None:
    if options.ray is not None:
        raise BadInput("--dry-run looks at this host only, and --ray at others; leave one of them out.")
    from swiglu_bench.cli import listing
    from swiglu_bench.machine.machine import free_memory_bytes

    with request.requested(command, options, console, request.command_line()) as asked:
        free_bytes = free_memory_bytes(asked.settings.device)
        cases = listing.planned(asked.settings, asked.cases, free_bytes)
        names = [known.name for known in asked.implementations]
    listing.put_plan(form, command, cases, names, free_bytes)
