"""The command line, run in this process as a user would run it."""

import contextlib
import functools
import io
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from quiet import quiet_machine

from swiglu_bench.cli import app


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one sentence that bad input gets."""
        assert (self.code, self.out) == (2, ""), self.out + self.err
        assert re.fullmatch(r"Error: [^\n]+[.?]\n", self.err), self.err
        return self.err.removeprefix("Error: ").rstrip("\n")


def swiglu_bench(*arguments: str | Path, width: int = 100) -> Ran:
    """What `swiglu-bench ARGUMENTS` does; an exception that the command line does not catch comes through."""
    out, err, ended = io.StringIO(), io.StringIO(), None
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", ["swiglu-bench", *map(str, arguments)])
        patch.setattr(app, "app", parser())
        for name, value in {"COLUMNS": str(width), "NO_COLOR": "1"}.items():
            patch.setenv(name, value)
        patch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))  # commands change it
        stack.enter_context(quiet_machine())
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        ended = stack.enter_context(pytest.raises(SystemExit))
        app.main()
    ran = Ran(int(ended.value.code or 0), out.getvalue(), err.getvalue())
    assert "Traceback" not in ran.out + ran.err
    assert (ran.code == 2) == ("Error: " in [line[:7] for line in ran.err.splitlines()]), (arguments, ran.err)
    return ran


@functools.cache
def parser() -> Any:
    """Typer makes it anew at every call, which takes 0.1 s."""
    return typer.main.get_command(app.app)
