"""Help, shell completion and typos answer at once: no command line imports the heavy packages to print text."""

import json
import os
import re
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
import typer
from swiglu_bench.cli import app

app.app = typer.main.get_command(app.app)  # which takes 0.1 s
texts, heavy = {}, {}
for line in sys.argv[1:]:
    words = line.split()
    os.environ.pop("_SWIGLU_BENCH_COMPLETE", None)
    if line.endswith(("smo", "eager-")):
        os.environ |= {"_SWIGLU_BENCH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "3"}
    sys.argv = words
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
        with contextlib.suppress(SystemExit):
            app.main()
    texts[line] = text.getvalue()
    heavy |= {name: line for name in HEAVY if name in sys.modules and name not in heavy}
import swiglu_bench.contenders
heavy |= {name: "contenders" for name in HEAVY if name in sys.modules and name not in heavy}
print(json.dumps({"texts": texts, "heavy": heavy}))
"""
)
RUNS = {
    "compare": "results results",
    "show": "results",
    "history": "results",
    "publish": "results",
    "report": "results",
}
"""Commands that are given runs."""
ANY_TEXT = {"--out", "--output", "--png", "--svg", "--find-links", "--save-baseline", "--run", "--workload", "--pivot"}
"""Options that take any text, or the name of a file or of a figure of a run."""
OF_ROWS = ("show", "compare", "report")
"""Commands whose other options choose rows of a run."""
WRONG = {
    "--shapes": ("4x0", "smoke,typo", "typo.yaml", "random:0"), "--tokens": ("1,x", "0"), "--device": ("cuda:99",),
    "--gpus": ("0,x", "-1"), "--model": ("typo.yaml",), "--ray": ("typo:x",), "--target": ("sm_9999",),
    "--impl": ("eager,typo", "typo.py:mine"), "--kernel": ("forward,typo",), "--tp": ("7",), "--sanitize": ("",),
    "--dtype": ("bf16,typo",), "--scope": ("glu,typo",), "--out": (__file__,), "--layers": ("3 --device cpu",),
    "--python": ("eager=typo",), "--with": ("liger@a",), "--max-memory": ("1typo",),
}  # fmt: skip
"""Values besides `typo` that are refused: of names that do not exist, lists, sizes, and what this machine lacks."""


def typos() -> list[str]:
    """A line for each option of each command that takes a value, and more for those that take names, sizes or lists."""
    lines = []
    for name, command in parser().commands.items():
        for param in command.params:
            option = param.opts[0]
            if param.param_type_name != "option" or param.is_flag or option.startswith("--wandb"):
                continue
            given = () if option in ANY_TEXT or (name in OF_ROWS and option != "--format") else ("typo",)
            given += WRONG.get(option, ()) if name not in (*OF_ROWS, *WITHOUT.get(option, ())) else ()
            lines += [f"swiglu-bench {name} {RUNS.get(name, '')} {option}={value}" for value in given]
    return lines


WITHOUT = {"--out": ("train", "tp", "audit", "noise", "recommend")}
"""Commands in which a value of WRONG is found out later, or is right."""
TYPOS = typos()
LISTS = {"swiglu-bench list --device cpu": "eager", "swiglu-bench list --shape llama7b --device cpu": "4096",
         "swiglu-bench list --detail --device cpu egaer": "did you mean eager?",
         "swiglu-bench list --machine --device cpu": "python", "swiglu-bench list --format json": "gpu_uuid",
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
    assert len(TYPOS) > 200
    for line in TYPOS:
        found = " ".join(told["texts"][line].split())
        option = line[line.index(" --") + 1 : line.index("=")]
        assert re.match(rf"Error: .*({option}|{option.removesuffix('s')})\b", found), (line, found)
    for line, text in LISTS.items():
        assert text in " ".join(told["texts"][line].split()), line


def test_names_that_are_listed_twice() -> None:
    """What is known without torch is what the kernels say."""
    from swiglu_bench.cli.check import KERNELS
    from swiglu_bench.tasks import tune

    assert set(KERNELS) == set(tune.KERNELS)


def test_every_command_has_help(told: dict[str, dict[str, str]]) -> None:
    for line, text in told["texts"].items():
        if line.endswith("--help"):
            assert f"Usage: {line.removesuffix(' --help')} [" in text
            assert line.split()[1] in told["texts"]["swiglu-bench --help"]
    assert told["texts"]["swiglu-bench --version"].startswith("swiglu-bench ")


def test_completion_offers_names(told: dict[str, dict[str, str]]) -> None:
    for line, name in COMPLETIONS.items():
        assert name in told["texts"][line].split()
