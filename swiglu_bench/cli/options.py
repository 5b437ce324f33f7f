"""From a dataclass of options to a command that Typer understands, whose --help leaves rare options to --help-all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from swiglu_bench.options import RARE, parameters


class Command(TyperCommand):
    """A command whose rare options are shown by --help-all only, if it has that."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        short = any(option.name == "help_all" for option in self.params) and not ctx.params.get("help_all")
        for option in self.params:
            setattr(option, "hidden", short and option.name in RARE)  # noqa: B010 -- mypy: only options have it
        super().format_help(ctx, formatter)


def _help_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.params["help_all"] = True
        typer.echo(context.get_help())
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[
        bool, typer.Option("--help-all", help="Show rare options, too.", callback=_help_all, is_eager=True)
    ],
)  # fmt: skip


def folding(command: Callable[..., None]) -> Callable[..., None]:
    """The command with --help-all, if it has rare options."""
    shown = list(inspect.signature(command, eval_str=True).parameters.values())
    if not any(parameter.name in RARE for parameter in shown):
        return command

    @functools.wraps(command)
    def folded(help_all: bool = False, **values: Any) -> None:
        command(**values)

    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]
    setattr(folded, "__signature__", inspect.Signature([*named, HELP_ALL]))  # noqa: B010 -- mypy knows no such attribute
    return folded


def command_of(options: type, call: Callable[..., None], help: str | None = None) -> Callable[..., None]:
    """A command with an option for each field of `options`, and for each parameter of `call` after the first.

    `call` gets the filled-in dataclass first and the others by name. `help` is its docstring unless given.
    """
    _, *own = inspect.signature(call, eval_str=True).parameters.values()
    further = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

    def command(**values: Any) -> None:
        others = {parameter.name: values.pop(parameter.name) for parameter in further}
        call(options(**values), **others)

    signature = inspect.Signature([*parameters(options, for_typer=True), *further])
    setattr(command, "__signature__", signature)  # noqa: B010 -- mypy knows no such attribute
    command.__doc__ = help or call.__doc__
    return command
