"""From a dataclass of options to a command that Typer understands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from swiglu_bench.sweep.options import parameters


def command_of(options: type, call: Callable[..., None], help: str | None = None) -> Callable[..., None]:
    """A command with an option for each field of `options`, and for each parameter of `call` after the first.

    `call` gets the filled-in dataclass first and the others by name. `help` is its docstring unless given.
    """
    _, *own = inspect.signature(call, eval_str=True).parameters.values()
    further = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

    def command(**values: Any) -> None:
        others = {parameter.name: values.pop(parameter.name) for parameter in further}
        call(options(**values), **others)

    signature = inspect.Signature(parameters(options, for_typer=True) + further)
    setattr(command, "__signature__", signature)  # noqa: B010 -- mypy knows no such attribute
    command.__doc__ = help or call.__doc__
    return command
