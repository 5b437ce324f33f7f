"""The command line: all commands, and how it ends. Each command is in a file of its own or of its kind.

Nothing heavy is imported at the top of these files, so that `--help` and shell completion are instant.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cli import measure
from swiglu_bench.cli.beyond import tp, train
from swiglu_bench.cli.check import audit, inspect, selftest
from swiglu_bench.cli.ends import end
from swiglu_bench.cli.finished import compare, history, publish, show
from swiglu_bench.cli.listing import list_
from swiglu_bench.cli.machine import ceilings, doctor, noise
from swiglu_bench.cli.options import Command, command_of, folding
from swiglu_bench.cli.report import recommend, report
from swiglu_bench.cli.tune import tune
from swiglu_bench.options import AuditOptions
from swiglu_bench.rows.csv_table import CutShort
from swiglu_bench.version import __version__

app = typer.Typer(
    help="Benchmark and validate implementations of SwiGLU, silu(x Wg) * (x Wu).",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LOG = "SWIGLU_BENCH_LOG"
"""The variable that names the level of what is logged on stderr; `debug`: how long each phase of a case takes."""
SWEEPS = measure.commands()
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
        app.command(_name, rich_help_panel=_panel, cls=Command, help="\n\n".join(_paragraphs))(folding(_command))

_show_warning = warnings.showwarning


def _tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Python's warnings as they are, and the suite's own as all else that it says."""
    if issubclass(category, CutShort):
        typer.echo(f"Warning: {message}", err=True)
    else:
        _show_warning(message, category, *where, **more)


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
