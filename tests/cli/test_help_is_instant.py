"""Help and shell completion answer before anyone notices: no command line imports the heavy packages to print text."""

import os
import subprocess
import sys

import pytest

HEAVY = ("altair", "torch", "triton", "liger_kernel", "pandas", "scipy", "wandb")

RUN_THE_CLI = f"""
import atexit, sys
atexit.register(lambda: print("\\nheavy:", *(name for name in {HEAVY} if name in sys.modules)))
sys.argv = ["swiglu-bench", *sys.argv[1:]]
from swiglu_bench.cli.app import main
sys.exit(main())
"""


def text_and_heavy_imports(code: str, *arguments: str, **variables: str) -> tuple[str, list[str]]:
    """What a fresh interpreter prints, and which heavy packages it had imported when it ended."""
    completed = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "120"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    text, _, heavy = completed.stdout.rpartition("\nheavy:")
    return text, heavy.split()


@pytest.mark.parametrize(
    "command",
    [
        "",
        "list",
        "forward",
        "backward",
        "step",
        "memory",
        "verify",
        "audit",
        "train",
        "selftest",
        "report",
        "ceilings",
        "noise",
        "doctor",
        "compare",
        "show",
        "history",
        "publish",
        "recommend",
    ],
)
def test_help_imports_nothing_heavy(command: str) -> None:
    text, heavy = text_and_heavy_imports(RUN_THE_CLI, *command.split(), "--help")
    assert "Usage: swiglu-bench" in text
    assert command in text
    assert not heavy


def test_version_imports_nothing_heavy() -> None:
    text, heavy = text_and_heavy_imports(RUN_THE_CLI, "--version")
    assert text.startswith("swiglu-bench ")
    assert not heavy


@pytest.mark.parametrize(
    ("option", "start", "whole"), [("--shapes", "smo", "smoke"), ("--impl", "eager-", "eager-packed")]
)
def test_completion_imports_nothing_heavy(option: str, start: str, whole: str) -> None:
    text, heavy = text_and_heavy_imports(
        RUN_THE_CLI,
        _SWIGLU_BENCH_COMPLETE="complete_bash",
        COMP_WORDS=f"swiglu-bench forward {option} {start}",
        COMP_CWORD="3",
    )
    assert whole in text.split()
    assert not heavy


def test_the_catalogue_imports_nothing_heavy() -> None:
    code = f"import sys, swiglu_bench.implementations; print('\\nheavy:', *(set({HEAVY}) & set(sys.modules)))"
    assert text_and_heavy_imports(code) == ("", [])
