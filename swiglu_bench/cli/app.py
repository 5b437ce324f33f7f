"""The command line: all commands, and those that measure and check every implementation at every case.

Nothing heavy is imported at the top of these files, so that `--help` and shell completion are instant.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from swiglu_bench import options, request
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cli.beyond import tp, train
from swiglu_bench.cli.check import audit, inspect, selftest, tune
from swiglu_bench.cli.ends import end
from swiglu_bench.cli.finished import compare, history, publish, recommend, report, show
from swiglu_bench.cli.listing import list_, planned, put_plan
from swiglu_bench.cli.machine import ceilings, doctor, noise
from swiglu_bench.machine import machine
from swiglu_bench.options import HOW, STATUS, AuditOptions, command_of, folding, option
from swiglu_bench.rows.figures import CutShort
from swiglu_bench.show import text
from swiglu_bench.tasks.sweep import perform
from swiglu_bench.version import __version__

HELP = {
    "forward": """Time the forward pass (inference: nothing is kept for backward).

    Example: swiglu-bench forward --shapes llama7b --tokens 1,128,8k""",
    "backward": """Time the backward pass, each sample after a fresh forward pass that is not timed.

    Example: swiglu-bench backward --shapes llama3-8b --scope mlp""",
    "step": """Time forward and backward together, as in a training step.

    Example: swiglu-bench step --shapes llama7b --baseline compile""",
    "memory": """Measure what is saved for backward, the peak and the workspace, next to arithmetic predictions.

    Example: swiglu-bench memory --shapes llama7b --log-wandb""",
    "verify": """Check the output and every gradient against fp64, relative to eager's error.
    On a CPU the Triton kernels run through Triton's interpreter, on small shapes.

    Example: swiglu-bench verify --impl 'fused*'""",
}


def measure(
    command: str,
    options: options.SweepOptions,
    dry_run: Annotated[bool, option(HOW, "Print the cases and the memory they need, and stop.", "--dry-run")] = False,
    form: options.Form = "table",
) -> None:
    """Run one of the five."""
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


def _dry_run(command: str, options: options.SweepOptions, console: Console, form: str) -> None:
    if options.ray is not None:
        raise BadInput("--dry-run looks at this host only, and --ray at others; leave one of them out.")
    with request.requested(command, options, console, request.command_line()) as asked:
        free_bytes = machine.free_memory_bytes(asked.settings.device)
        cases = planned(asked.settings, asked.cases, free_bytes)
        names = [known.name for known in asked.implementations]
    put_plan(form, command, cases, names, free_bytes)


app = typer.Typer(
    help="Benchmark and validate implementations of SwiGLU, silu(x Wg) * (x Wu).",
    epilog=STATUS,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LOG = "SWIGLU_BENCH_LOG"
"""The variable that names the level of what is logged on stderr; `debug`: how long each phase of a case takes."""
SWEEPS = {name: command_of(options.COMMANDS[name], partial(measure, name), help) for name, help in HELP.items()}
PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Measure": {**{name: SWEEPS[name] for name in ("forward", "backward", "step", "memory")}, "train": train, "tp": tp},
    "Check": {
        "verify": SWEEPS["verify"], "audit": command_of(AuditOptions, audit), "selftest": selftest, "inspect": inspect,
    },
    "Look back": {
        "report": report, "compare": compare, "show": show, "history": history, "recommend": recommend,
        "publish": publish,
    },
    "This machine": {"list": list_, "doctor": doctor, "ceilings": ceilings, "noise": noise, "tune": tune},
}  # fmt: skip
"""Every command by its name, under the heads of `--help`."""

for _panel, _commands in PANELS.items():
    for _name, _command in _commands.items():
        # Typer keeps line ends
        _paragraphs = [" ".join(part.split()) for part in (_command.__doc__ or "").split("\n\n")]
        _own = _panel == "Look back" or _name in SWEEPS  # they check for themselves
        _checked = folding(_command) if _own else folding(_command, request.check_names)
        _epilog = STATUS if _name in (*SWEEPS, "train", "tp") else None
        _help = "\n\n".join(_paragraphs)
        app.command(_name, rich_help_panel=_panel, cls=options.Command, help=_help, epilog=_epilog)(_checked)

_show_warning = warnings.showwarning


def _tell(message: Warning | str, category: type[Warning], file: str, *where: Any, **more: Any) -> None:
    """Show a warning, one of the project's own without the line of code that it comes from."""
    is_own = not {"swiglu_bench", "swiglu_kernels"}.isdisjoint(Path(file).parts)
    if issubclass(category, CutShort) or (category is UserWarning and is_own):
        typer.echo(f"Warning: {message}", err=True)
    else:
        _show_warning(message, category, file, *where, **more)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swiglu-bench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    del version
    level = os.environ.get(LOG, "").upper()
    if level in logging.getLevelNamesMapping():
        logging.basicConfig(format="%(relativeCreated)8d ms  %(message)s")
        logging.getLogger("swiglu_bench").setLevel(level)
    setattr(warnings, "showwarning", _tell)  # noqa: B010 -- mypy wants the names of all its parameters


def run() -> int:
    """What the command line asks for; the exit status. Bad input becomes one sentence and exit status 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        return int(app(standalone_mode=False) or 0)
    except BadInput as error:
        message = str(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # errors of Typer's own parser have it
            raise
        message = error.format_message()
        message += "" if message.endswith((".", "?")) else "."
    typer.echo(f"Error: {message}", err=True)
    return 2


def main() -> None:
    """The `swiglu-bench` command."""
    end(run)
