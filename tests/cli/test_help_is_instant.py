"""Help, shell completion and typos answer at once: no command line imports the heavy packages to print text."""

import json
import os
import subprocess
import sys

import pytest
from command_line import parser

from swiglu_bench.cli.app import PANELS

HEAVY = {"altair", "torch", "triton", "liger_kernel", "pandas", "scipy", "wandb"}
COMPLETIONS = {"swiglu-bench forward --shapes smo": "smoke", "swiglu-bench audit --impl eager-": "eager-packed"}

RUN_ALL = (
    f"HEAVY = {HEAVY}"
    + """
import contextlib, io, json, os, sys
from swiglu_bench.cli.app import main

texts, heavy = {}, {}
for line in sys.argv[1:]:
    words = line.split()
    os.environ.pop("_SWIGLU_BENCH_COMPLETE", None)
    if line.endswith(("smo", "eager-")):
        os.environ |= {"_SWIGLU_BENCH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "3"}
    sys.argv = words
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
        with contextlib.suppress(SystemExit):
            main()
    texts[line] = text.getvalue()
    heavy |= {name: line for name in HEAVY if name in sys.modules and name not in heavy}
import swiglu_bench.contenders
heavy |= {name: "contenders" for name in HEAVY if name in sys.modules and name not in heavy}
print(json.dumps({"texts": texts, "heavy": heavy}))
"""
)
SAID = {
    "--shapes": "there is no shape or sweep 'typo'", "--impl": "no implementation is called 'typo'",
    "--skip-impl": "no implementation is called 'typo'", "--baseline": "no implementation is called 'typo'",
    "--device": "'typo' is not a device", "--tokens": "'typo' is not a token count", "--model": "no model 'typo'",
    "--gpus": "'typo' is not a number of GPUs",
} | dict.fromkeys(
    ("--dtype", "--scope", "--precision", "--routing", "--l2", "--regime", "--sanitize", "--modes", "--mode", "--task",
     "--sequence-parallel", "--format"), "'typo' is not one of",
)  # fmt: skip
"""What is said of a value that an option does not know."""


def typos() -> dict[str, str]:
    """A line for each option of each command that has names as values, and what it says."""
    found = {}
    for name, command in parser().commands.items():
        for option in {part for param in command.params for part in param.opts} & {*SAID}:
            flag = (name, option) in (("list", "--shapes"), ("list", "--shape"))
            if name not in ("show", "compare", "report") and not flag and (option != "--gpus" or name == "tp"):
                found[f"swiglu-bench {name} {'results ' * (name in RUNS)}{option} typo"] = SAID[option]
    return found


RUNS = ("history", "publish")
"""Commands that are given one."""
TYPOS = typos()
LISTS = {"swiglu-bench list --device cpu": "eager", "swiglu-bench list --shape llama7b --device cpu": "4096",
         "swiglu-bench list --detail --device cpu egaer": "did you mean eager?",
         "swiglu-bench list --shapes lama7b": "did you mean llama7b?"}  # fmt: skip
LINES = [
    *TYPOS,
    *LISTS,
    "swiglu-bench --help",
    "swiglu-bench --version",
    "swiglu-bench forward --help-all",
    *COMPLETIONS,
]
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
    assert told["heavy"] == {}


def test_typos_are_told_and_lists_are_made(told: dict[str, dict[str, str]]) -> None:
    assert len(TYPOS) > 50
    for line, text in (TYPOS | LISTS).items():
        assert text in " ".join(told["texts"][line].split()), line


def test_every_command_has_help(told: dict[str, dict[str, str]]) -> None:
    for line, text in told["texts"].items():
        if line.endswith("--help"):
            assert f"Usage: {line.removesuffix(' --help')} [" in text
            assert line.split()[1] in told["texts"]["swiglu-bench --help"]
    assert told["texts"]["swiglu-bench --version"].startswith("swiglu-bench ")


def test_completion_offers_names(told: dict[str, dict[str, str]]) -> None:
    for line, name in COMPLETIONS.items():
        assert name in told["texts"][line].split()
