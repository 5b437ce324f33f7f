"""Help, shell completion and typos answer at once: no command line imports the heavy packages to print text."""

import json
import os
import subprocess
import sys

import pytest

from swiglu_bench.cli.app import PANELS

HEAVY = {"altair", "torch", "triton", "liger_kernel", "pandas", "scipy", "wandb"}
COMPLETIONS = {"swiglu-bench forward --shapes smo": "smoke", "swiglu-bench audit --impl eager-": "eager-packed"}

RUN_ALL = """
import contextlib, io, json, os, sys
from swiglu_bench.cli.app import main

texts = {}
for line in sys.argv[1:]:
    words = line.split()
    os.environ.pop("_SWIGLU_BENCH_COMPLETE", None)
    if not line.endswith(("--help", "--help-all", "--version", "typo")):
        os.environ |= {"_SWIGLU_BENCH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "3"}
    sys.argv = words
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
        with contextlib.suppress(SystemExit):
            main()
    texts[line] = text.getvalue()
import swiglu_bench.contenders
print(json.dumps({"texts": texts, "modules": list(sys.modules)}))
"""
TYPOS = {
    "swiglu-bench forward --shapes typo": "there is no shape or sweep 'typo'",
    "swiglu-bench verify --impl typo": "no implementation is called 'typo'",
    "swiglu-bench memory --tokens typo": "'typo'",
    "swiglu-bench step --dtype typo": "typo",
}
LINES = [*TYPOS, "swiglu-bench --help", "swiglu-bench --version", "swiglu-bench forward --help-all", *COMPLETIONS]
LINES += [f"swiglu-bench {name} --help" for commands in PANELS.values() for name in commands]


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, str]]:
    """What one fresh interpreter prints for all of these, and what it has imported by then."""
    env = os.environ | {"NO_COLOR": "1", "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-c", RUN_ALL, *LINES], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def test_nothing_heavy_is_imported(told: dict[str, dict[str, str]]) -> None:
    assert HEAVY.isdisjoint(told["modules"])


def test_typos_are_told(told: dict[str, dict[str, str]]) -> None:
    for line, complaint in TYPOS.items():
        assert complaint in told["texts"][line]


def test_every_command_has_help(told: dict[str, dict[str, str]]) -> None:
    for line, text in told["texts"].items():
        if line.endswith("--help"):
            assert f"Usage: {line.removesuffix(' --help')} [" in text
            assert line.split()[1] in told["texts"]["swiglu-bench --help"]
    assert told["texts"]["swiglu-bench --version"].startswith("swiglu-bench ")


def test_completion_offers_names(told: dict[str, dict[str, str]]) -> None:
    for line, name in COMPLETIONS.items():
        assert name in told["texts"][line].split()
