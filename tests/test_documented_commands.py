"""Every command and every block of Python that a document shows, run on this machine in a form that is cheap.

Shell blocks are given to bash with nothing on its PATH and `swiglu-bench` as a function that notes its arguments, so
that quotes, variables, loops and comments are the shell's business. `CHEAP` chooses what is done with each command.
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
from places import ROOT
from torch import nn

import swiglu_bench
from swiglu_bench.cli import app
from swiglu_bench.measure import ceilings
from swiglu_bench.session import session
from swiglu_kernels import reference

DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.exists()  # an sdist has some of them
]
A_RUN = "results/nvidia-h200/2026-11-21/forward"
A_PRECISE_RUN = "results/nvidia-h200/2026-11-21/forward-others"  # compared with itself, a tie within 1% is certain
STANDS_FOR = {"RUN": A_RUN, "before.run": A_PRECISE_RUN, "after.run": A_PRECISE_RUN, "eager,mine": "eager,fused"}
"""What documents call the reader's own runs, and a row of such a run."""
# Not 3 tokens: what a forward written out loses more than eager on so few elements is chance.
SMALL = ("--shapes", "24x40", "--tokens", "32", "--device", "cpu", "--in-process")
DRY, SMALL_VERIFY, SMALL_TIME, AS_IT_IS, PARSED = "dry", "verify", "time", "as it is", "parsed"
EXTRA = {
    DRY: ("--dry-run", "--device", "cpu"),
    SMALL_VERIFY: SMALL,
    SMALL_TIME: (*SMALL, "--budget", "0.1", "--no-energy"),
    AS_IT_IS: (),
}
"""What is added to the documented arguments; the last of an option counts."""
CHEAP: tuple[tuple[str, str], ...] = (
    # The first line whose words are all in the command counts: what is special stands above what is general.
    ("verify mine.py:mine", SMALL_VERIFY),
    ("forward mine.py:mine compile", DRY),  # which takes long to compile
    ("forward mine.py:mine", SMALL_TIME),
    ("forward --gpus", PARSED),  # several GPUs
    ("forward --ray", PARSED),  # a cluster
    ("step --ray", PARSED),
    ("forward", DRY),
    ("backward", DRY),
    ("step", DRY),
    ("memory", DRY),
    ("verify", DRY),
    ("show parquet", PARSED),  # needs pyarrow
    ("show", AS_IT_IS),
    ("compare", AS_IT_IS),
    ("history", AS_IT_IS),
    ("list", AS_IT_IS),
    ("recommend --run", AS_IT_IS),
    ("recommend", PARSED),  # measures
    ("audit", PARSED),  # minutes
    ("selftest", PARSED),
    ("noise", PARSED),
    ("ceilings", PARSED),
    ("inspect", PARSED),  # compiles for GPUs
    ("tune", PARSED),  # a GPU
    ("doctor", PARSED),  # judges this machine
    ("report", PARSED),  # half a minute of charts: test_report_command.py
    ("publish", PARSED),  # an account
    ("tp", PARSED),  # processes: test_tp_command.py
    ("train", PARSED),  # a minute and more: test_train_command.py
)
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
    read = functools.partial(
        subprocess.run,
        env={"PATH": "/nowhere", "GITHUB_STEP_SUMMARY": os.devnull},
        cwd="/",  # where nothing matches the wildcards that belong to swiglu-bench
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    checked = read([bash, "-n", "-c", block])
    assert checked.returncode == 0, checked.stderr
    done = read([bash, "--noprofile", "--norc", "-c", RECORD + block])
    return [line.removesuffix("\0").split("\0") for line in done.stdout.splitlines()]


@functools.cache
def documented() -> list[Any]:
    return [
        pytest.param(arguments, id=f"{document.name}:{line}: {shlex.join(arguments)}")
        for document in DOCUMENTS
        for line, block in blocks(document, "sh")
        for arguments in shell_commands(block)
    ]


def is_about(words: str, arguments: list[str]) -> bool:
    command, *others = words.split()
    return command == arguments[0] and all(word in " ".join(arguments[1:]) for word in others)


def how(arguments: list[str]) -> str:
    for words, way in CHEAP:
        if is_about(words, arguments):
            return way
    return pytest.fail(f"CHEAP does not say how to try `swiglu-bench {shlex.join(arguments)}`; add a line for it.")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the committed results, which commands may add to."""
    folder = tmp_path_factory.mktemp("results")
    if (ROOT / A_RUN).exists():
        shutil.copytree(ROOT / "results" / "nvidia-h200", folder / "nvidia-h200")
    return folder


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: Path) -> Path:
    """An empty folder with the results, the reader's own implementation, and small ceilings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(ceilings.PRODUCT_SIDE, "cpu", 64)
    monkeypatch.setattr(session, "_tidy", lambda device: None)
    if not (ROOT / A_RUN).exists():
        pytest.skip("the committed results are not here")
    (tmp_path / "results").symlink_to(results)
    (tmp_path / "mine.py").write_text(own_implementations()[0], encoding="utf-8")
    return tmp_path


def own_implementations() -> list[str]:
    """The files `mine.py` that documents show; those that need the reader's package come last."""
    shown = [text for document in DOCUMENTS for _, text in blocks(document, "python") if text.startswith("# mine.py")]
    return sorted(shown, key=lambda text: "my_package" in text)


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["swiglu-bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("arguments", documented())
def test_a_documented_command(
    arguments: list[str], reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [STANDS_FOR.get(argument, argument) for argument in arguments]
    way = how(arguments)
    if way == PARSED:
        group = typer.main.get_command(app.app)
        with group.make_context("swiglu-bench", list(arguments), resilient_parsing=False) as context:
            name, command, rest = group.resolve_command(context, list(arguments))  # type: ignore[attr-defined]
            command.make_context(name, rest, parent=context)
        return
    status = run_here(monkeypatch, *arguments, *EXTRA[way])
    printed = capsys.readouterr()
    assert status == 0, printed.err + printed.out
    assert printed.out


def test_the_documents_show_commands() -> None:
    assert len(documented()) > 30


def test_a_command_that_nobody_listed_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="CHEAP does not say how to try `swiglu-bench invented --x`"):
        how(["invented", "--x"])


def test_every_line_of_the_table_is_about_a_documented_command() -> None:
    idle = [words for words, _ in CHEAP if not any(is_about(words, one.values[0]) for one in documented())]
    assert not idle


def test_shell_blocks_are_read_as_a_shell_reads_them() -> None:
    block = """for c in a b; do swiglu-bench $c --impl 'x*'; done  # no
        X=1 swiglu-bench d "e f" >> "$GITHUB_STEP_SUMMARY" """
    assert shell_commands(block) == [["a", "--impl", "x*"], ["b", "--impl", "x*"], ["d", "e f"]]
    with pytest.raises(AssertionError, match="matching"):
        shell_commands("swiglu-bench 'open")


# Python


class LlamaMLP(nn.Module):
    """What `patch_model` looks for, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(24, 40, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(40, 24, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


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
    return swiglu_bench.load(A_RUN)


@pytest.mark.parametrize("text", python_blocks())
@pytest.mark.usefixtures("reader")
def test_a_documented_block_of_python(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu_bench, "run", functools.partial(small, swiglu_bench.run))
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))  # a group of one, for blocks about several GPUs
    names = {
        "x": torch.randn(3, 24),
        "w_gate": torch.randn(40, 24),
        "w_up": torch.randn(40, 24),
        "w_down": torch.randn(24, 40),
        "model": LlamaMLP(),
    }
    try:
        exec(compile(text, "document", "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("text", own_implementations())
def test_a_documented_implementation(
    text: str, reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (reader / "mine.py").write_text(text, encoding="utf-8")
    package = type(sys)("my_package")
    package.my_swiglu = reference.swiglu_glu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_package", package)
    assert run_here(monkeypatch, "verify", "--impl", "mine.py:mine", *SMALL, "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["status"] for row in rows if row["scope"] == "glu"} == {"ok"}
