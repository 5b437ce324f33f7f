"""Every command and every block of Python that a document shows, run on this machine in a form that is cheap.

Shell blocks are given to bash with nothing on its PATH and `swiglu-bench` as a function that notes its arguments, so
that quotes, variables, loops and comments are the shell's business. `WAYS` says which commands are run, and how; the
others are parsed.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from command_line import swiglu_bench as command_line
from places import ROOT

import swiglu_bench
from swiglu_bench.cli import app
from swiglu_kernels import reference

pytestmark = pytest.mark.timed

DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.exists()  # an sdist has some of them
]
A_RUN = "results/nvidia-h200/backward"
A_PRECISE_RUN = "results/nvidia-h200/forward-narrow"  # `fused*` compared with itself is a tie within 2%
STANDS_FOR = {"RUN": A_RUN, "before.run": A_PRECISE_RUN, "after.run": A_PRECISE_RUN, "eager,mine": "eager,fused"}
"""What documents call the reader's own runs, and a row of such a run."""
# Not 3 tokens: what a forward written out loses more than eager on so few elements is chance.
SMALL = ("--shapes", "24x40", "--tokens", "32", "--device", "cpu", "--in-process")
DRY = ("--dry-run", "--device", "cpu")
WAYS: tuple[tuple[str, tuple[str, ...] | None], ...] = (
    *((f"{command} --with", None) for command in ("forward", "step", "verify")),  # fetches packages
    *((f"{command} --python", None) for command in ("forward", "step")),  # an environment of the reader's
    ("forward mine.py:mine compile", DRY),  # which takes long to compile
    ("forward mine.py:mine", (*SMALL, "--budget", "0.1", "--no-energy")),
    ("forward --layers", None),  # CUDA graphs
    ("forward --gpus", None),  # several GPUs
    ("forward --ray", None),  # a cluster
    ("step --ray", None),
    *((command, DRY) for command in ("forward", "backward", "step", "memory", "verify")),
    ("compare main", None),  # baselines of the reader's
    ("compare base", None),
    ("show parquet", None),  # needs pyarrow
    *((command, ()) for command in ("show", "compare", "history", "list", "recommend --run")),
)
"""What is added to documented arguments before they are run; None: they are parsed only. The first line whose words are
all in the command counts, and the last of an option."""
RECORD = """
exec 3>&1
swiglu-bench() { printf '%s\\0' "$@" >&3; printf '\\n' >&3; }
command_not_found_handle() { :; }
"""


def blocks(document: Path, language: str) -> list[tuple[int, str]]:
    """The blocks in a language, with the number of the line on which each begins."""
    text = document.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start()) + 2, match[1]) for match in found]


def shell_commands(block: str) -> list[list[str]]:
    """The arguments of each `swiglu-bench` that a shell block runs."""
    bash = shutil.which("bash")
    assert bash, "bash reads the shell blocks of the documents"
    environment = {"PATH": "/nowhere", "GITHUB_STEP_SUMMARY": os.devnull}
    done = subprocess.run(
        [bash, "--noprofile", "--norc", "-c", RECORD + block], env=environment, capture_output=True, text=True,
        cwd="/",  # where nothing matches the wildcards that belong to swiglu-bench
    )  # fmt: skip
    assert not re.search("syntax error|unexpected EOF", done.stderr), done.stderr
    return [line.removesuffix("\0").split("\0") for line in done.stdout.splitlines()]


@functools.cache
def documented() -> dict[tuple[str, ...], str]:
    """The arguments of every documented command, and a place where it stands."""
    return {
        tuple(arguments): f"{document.name}:{line}: {shlex.join(arguments)}"
        for document in DOCUMENTS
        for line, block in [*blocks(document, "sh"), *workflow_steps(document)]
        for arguments in shell_commands(block)
    }


def workflow_steps(document: Path) -> list[tuple[int, str]]:
    """The commands of the workflows that a document shows."""
    return [
        (line, step["run"])
        for line, block in blocks(document, "yaml")
        for job in yaml.safe_load(block).get("jobs", {}).values()
        for step in job["steps"]
        if "run" in step
    ]


def is_about(words: str, arguments: tuple[str, ...]) -> bool:
    command, *others = words.split()
    return command == arguments[0] and all(word in " ".join(arguments[1:]) for word in others)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the reader's own implementation and the committed results, which commands may add to."""
    monkeypatch.chdir(tmp_path)
    if not (ROOT / A_RUN).exists():
        pytest.skip("the committed results are not here")
    shutil.copytree(ROOT / "results/nvidia-h200", tmp_path / "results/nvidia-h200", copy_function=os.symlink)
    config = tmp_path / "my-model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"hidden_size": 24, "intermediate_size": 40, "hidden_act": "silu"}), encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(config))
    (tmp_path / "seen.csv").write_text("tokens,weight\n3,2\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text(own_implementations()[0], encoding="utf-8")
    return tmp_path


def own_implementations() -> list[str]:
    """The files `mine.py` that documents show; those that need the reader's package come last."""
    shown = [text for document in DOCUMENTS for _, text in blocks(document, "python") if text.startswith("# mine.py")]
    return sorted(shown, key=lambda text: "my_package" in text)


@pytest.mark.parametrize("arguments", [pytest.param(one, id=place) for one, place in documented().items()])
@pytest.mark.usefixtures("reader")
def test_a_documented_command(arguments: tuple[str, ...]) -> None:
    arguments = tuple(STANDS_FOR.get(argument, argument) for argument in arguments)
    more = next((more for words, more in WAYS if is_about(words, arguments)), None)
    if more is None:
        group = typer.main.get_command(app.app)
        with group.make_context("swiglu-bench", list(arguments), resilient_parsing=False) as context:
            name, command, rest = group.resolve_command(context, list(arguments))  # type: ignore[attr-defined]
            command.make_context(name, rest, parent=context)
        return
    ran = command_line(*arguments, *more)
    assert ran.code == 0, ran.err + ran.out
    assert ran.out


def test_the_documents_show_commands_of_every_way() -> None:
    assert not [words for words, _ in WAYS if not any(is_about(words, arguments) for arguments in documented())]


def python_blocks() -> list[Any]:
    return [
        pytest.param(text, id=f"{document.name}:{line}")
        for document in DOCUMENTS
        for line, text in blocks(document, "python")
        if not text.startswith("# mine.py")
    ]


def small(real: Callable[..., Any], command: str, **options: Any) -> Any:
    """`swiglu_bench.run` at a size for a CPU; its rows stand for none of an H200, so a committed run is returned."""
    del options["shapes"], options["tokens"], options["impl"]
    real(command, shapes="24x40", tokens=[3], impl=["eager", "eager-packed"], device="cpu", budget=0.1, energy=False,
         in_process=True, progress=False, **options)  # fmt: skip
    return swiglu_bench.load("results/nvidia-h200/forward")


@pytest.mark.parametrize("text", python_blocks())
@pytest.mark.usefixtures("reader", "_quiet_machine")
def test_a_documented_block_of_python(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu_bench, "run", functools.partial(small, swiglu_bench.run))
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))  # a group of one, for blocks about several GPUs
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    sizes = {"x": (3, 24), "w_gate": (40, 24), "w_up": (40, 24), "w_down": (24, 40)}
    model = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=2))
    names = {"model": model, **{name: torch.randn(size) for name, size in sizes.items()}}
    try:
        exec(compile(text, "document", "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("text", own_implementations())
def test_a_documented_implementation(text: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (reader / "mine.py").write_text(text, encoding="utf-8")
    package = type(sys)("my_package")
    package.my_swiglu = reference.swiglu_glu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_package", package)
    ran = command_line("verify", "--impl", "mine.py:mine", "--scope", "glu", *SMALL, "--format", "json")
    assert [row["reason"] for row in json.loads(ran.out)["rows"] if row["status"] != "ok"] == []
