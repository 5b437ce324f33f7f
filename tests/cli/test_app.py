import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from places import SUPPORT
from specimens import a_record, result_or_complaint

from swiglu_bench.cli import app
from swiglu_bench.implementations import CATALOGUE
from swiglu_bench.machine import machine
from swiglu_bench.measure import ceilings
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import Record
from swiglu_bench.session import session
from swiglu_bench.spec.cases import Scope
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.spec.shapes import config_names
from swiglu_bench.sweep import request

SMALL = ("--shapes", "24x40", "--tokens", "3,7", "--device", "cpu")
FILES = {"records.csv", "samples.csv", "checks.csv", "run.json"}
QUICK = (*SMALL, "--budget", "0.3", "--impl", "eager,eager-packed")


@dataclasses.dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one sentence that a bad input gets."""
        assert self.code == 2, self.out + self.err
        assert self.out == ""
        assert re.fullmatch(r"Error: [^\n]+[.?]\n", self.err), self.err
        return self.err.removeprefix("Error: ").rstrip("\n")


Cli = Callable[..., Ran]


@pytest.fixture
def swiglu_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """The command, run in this process and in an empty folder, without what takes long and says nothing here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(ceilings.PRODUCT_SIDE, "cpu", 64)
    monkeypatch.setattr(session, "_tidy", lambda device: None)

    def command(*arguments: str | Path) -> Ran:
        if arguments and arguments[0] in {"forward", "backward", "step", "memory", "verify"}:
            arguments = (arguments[0], "--in-process", *arguments[1:])  # children: test_isolation.py
        monkeypatch.setattr(sys, "argv", ["swiglu-bench", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app.main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return Ran(int(ended.value.code or 0), printed.out, printed.err)

    return command


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input must be found before any work starts."""
    monkeypatch.setattr(session, "run", lambda *_: pytest.fail("the work has started"))


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    """Implementations in a user's own file."""
    return Path(shutil.copy(SUPPORT / "user_implementations.py", tmp_path / "mine.py"))


def records(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run_folder.read_records(folder).to_dict("records")
    return rows


# Bad input


@pytest.mark.parametrize("command", ["forward", "backward", "step", "memory", "verify"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "lama7b"], "--shapes: there is no shape or sweep 'lama7b'; did you mean llama7b"),
        (["--shapes", ""], "--shapes: there is no shape or sweep ''; known: "),
        (["--shapes", "0x5"], "--shapes: '0x5' has a size outside 1 to 2^24"),
        (["--shapes", "-4x5"], "--shapes: '-4x5' has a size outside 1 to 2^24"),
        (["--shapes", "gone.yaml"], "--shapes: there is no file 'gone.yaml'"),
        (["--tokens", "0"], "--tokens: '0' is not a token count"),
        (["--tokens", "-8"], "--tokens: '-8' is not a token count"),
        (["--tokens", "8,many"], "--tokens: 'many' is not a token count"),
        (["--tokens", ""], "--tokens: '' is not a token count"),
        (["--dtype", "fp8"], "--dtype: 'fp8' is not one of bf16, fp16, fp32"),
        (["--scope", "gul"], "--scope: 'gul' is not one of activation, glu, mlp; did you mean glu?"),
        (["--scope", ""], "--scope: '' is not one of activation, glu, mlp"),
        (["--impl", "eagr"], "--impl: no implementation is called 'eagr'; did you mean eager"),
        (["--impl", "x*"], "--impl: no implementation is called 'x*'; known: eager, "),
        (["--impl", "gone.py:mine"], "--impl gone.py:mine: there is no file 'gone.py'"),
        (["--skip-impl", "ligr"], "--skip-impl: no implementation is called 'ligr'; did you mean liger?"),
        (["--skip-impl", "*"], "--skip-impl left no implementation to run"),
        (["--device", "gpu"], "--device: 'gpu' is not a device"),
        (["--no-csv", "--out", "x"], "--out was given together with --no-csv"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("nothing_runs")
def test_bad_input_is_one_sentence(swiglu_bench: Cli, command: str, arguments: list[str], words: str) -> None:
    assert swiglu_bench(command, *arguments).complaint.startswith(words)


@pytest.mark.parametrize("command", ["forward", "backward", "step"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "eagr"], "--baseline: no implementation is called 'eagr'; did you mean eager"),
        (["--l2", "warm"], "--l2: 'warm' is not one of cold, hot"),
        (["--l2", "warm", "--dry-run"], "--l2: 'warm' is not one of cold, hot"),
    ],
)
@pytest.mark.usefixtures("nothing_runs")
def test_bad_input_about_timing(swiglu_bench: Cli, command: str, arguments: list[str], words: str) -> None:
    assert swiglu_bench(command, *arguments).complaint.startswith(words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["forward", "--budget", "0"], "--budget"),
        (["forward", "--budget", "-3"], "--budget"),
        (["forward", "--budget", "soon"], "--budget"),
        (["step", "--seed", "-1"], "--seed"),
        (["step", "--seed", str(2**63)], "--seed"),
        (["step", "--budget", "nan"], "--budget"),
        (["step", "--timeout", "0"], "--timeout"),
        (["forward", "--shape", "smoke"], "--shapes"),
        (["verify", "--implementation", "eager"], "No such option"),
        (["forward", "smoke"], "unexpected extra argument"),
        (["foward"], "forward"),
        (["forward", "--tokens"], "requires an argument"),
    ],
)
@pytest.mark.usefixtures("nothing_runs")
def test_what_the_parser_refuses_exits_2_too(swiglu_bench: Cli, arguments: list[str], words: str) -> None:
    ran = swiglu_bench(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert words in " ".join(ran.err.split())


@pytest.mark.parametrize(
    ("text", "line"), [("hidden: 8\nintermediate: -2\nsource: s\n", 2), ("hidden: [8\n", 2), ("a: 1\na: 2\n", 2)]
)
@pytest.mark.usefixtures("nothing_runs")
def test_a_wrong_file_is_named_with_its_line(swiglu_bench: Cli, tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert swiglu_bench("forward", "--shapes", "mine.yaml").complaint.startswith(f"mine.yaml:{line}: ")


@pytest.mark.parametrize("command", ["forward", "verify", "list"])
@pytest.mark.usefixtures("nothing_runs")
def test_cuda_where_there_is_none(swiglu_bench: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = "--device: cuda was asked for, but this machine has no usable CUDA GPU; give cpu."
    assert swiglu_bench(command, "--device", "cuda").complaint == words


@pytest.mark.parametrize("command", ["forward", "memory", "verify"])
@pytest.mark.usefixtures("nothing_runs")
def test_a_folder_that_cannot_be_written_is_found_before_the_work(
    swiglu_bench: Cli, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    for out in (tmp_path / "file", tmp_path / "file" / "folder"):
        assert str(out) in swiglu_bench(command, *SMALL, "--out", out).complaint
    assert (tmp_path / "file").read_text(encoding="utf-8") == "in the way"


@pytest.mark.usefixtures("nothing_runs")
def test_a_default_folder_that_cannot_be_made(swiglu_bench: Cli, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("in the way", encoding="utf-8")
    assert "results" in swiglu_bench("forward", *SMALL).complaint


@pytest.mark.usefixtures("nothing_runs")
def test_a_broken_package_with_an_entry_point_is_named(swiglu_bench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata as metadata

    entry = metadata.EntryPoint("theirs", "surely_not_installed:theirs", "swiglu_bench.implementations")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    assert "theirs = surely_not_installed:theirs failed to import" in swiglu_bench("forward").complaint


def test_more_memory_than_there_is_is_skipped_and_the_sweep_goes_on(swiglu_bench: Cli, tmp_path: Path) -> None:
    shapes = ("--shapes", "1048576x1048576,24x40", "--tokens", "3", "--device", "cpu")
    ran = swiglu_bench("forward", *shapes, "--budget", "0.3", "--impl", "eager", "--out", tmp_path / "run")
    assert (ran.code, ran.err) == (0, "")
    huge, small = records(tmp_path / "run")
    assert (huge["shape"], huge["status"]) == ("1048576x1048576", "skipped")
    assert re.search(r"needs about \d{5,}\.\d GiB and the device has \d+\.\d GiB free", huge["reason"])
    assert (small["shape"], small["status"]) == ("24x40", "ok")
    assert huge["reason"] in ran.out


# The commands, end to end


@pytest.mark.parametrize("command", ["forward", "backward", "step"])
def test_a_timing_run_leaves_its_files(swiglu_bench: Cli, tmp_path: Path, command: str) -> None:
    ran = swiglu_bench(command, *QUICK, "--scope", "glu,mlp", "--out", tmp_path / "run")
    assert (ran.code, ran.err) == (0, "")
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES

    rows = records(tmp_path / "run")
    keys = [(row["scope"], row["tokens"], row["implementation"]) for row in rows]
    assert keys == [
        (scope, tokens, name) for scope in ("glu", "mlp") for tokens in (3, 7) for name in ("eager", "eager-packed")
    ]
    for row in rows:
        assert (row["mode"], row["status"], row["dtype"], row["baseline"]) == (command, "ok", "float32", "eager")
        assert row["time_ms"] > 0
        assert row["ratio"] > 0
        line = f"24x40 {row['scope']} {command} float32 tokens={row['tokens']} {row['implementation']}: ok, "
        assert line in ran.out
    samples = (tmp_path / "run" / "samples.csv").read_text(encoding="utf-8").splitlines()
    assert len(samples) == 1 + sum(row["rounds"] for row in rows)
    assert ran.out.rstrip().endswith(f"Rows, samples and machine: {tmp_path / 'run'}")


def test_run_json_says_what_was_run_and_where(swiglu_bench: Cli, tmp_path: Path) -> None:
    arguments = ["forward", *QUICK, "--tokens", "3", "--out", str(tmp_path / "my run")]
    assert swiglu_bench(*arguments).code == 0
    about = json.loads((tmp_path / "my run" / "run.json").read_text(encoding="utf-8"))
    assert about["command"].startswith("swiglu-bench forward --in-process --shapes 24x40 ")
    assert about["command"].endswith(f"--out '{tmp_path / 'my run'}'")
    assert about["machine"]["device_type"] == "cpu"
    (row, _) = records(tmp_path / "my run")
    assert (row["run_id"], row["command"]) == (about["run_id"], about["command"])


def test_the_default_folder(swiglu_bench: Cli, tmp_path: Path) -> None:
    assert swiglu_bench("forward", *QUICK).code == 0
    (file,) = (tmp_path / "results").rglob("records.csv")
    assert re.fullmatch(
        r"results/cpu/\d{4}-\d\d-\d\d/\d{6}-forward/records\.csv", file.relative_to(tmp_path).as_posix()
    )


def test_without_csv_nothing_is_written(swiglu_bench: Cli, tmp_path: Path) -> None:
    ran = swiglu_bench("forward", *QUICK, "--no-csv")
    assert ran.code == 0
    assert list(tmp_path.iterdir()) == []
    assert "Rows, samples" not in ran.out


def test_a_second_run_into_the_same_folder_adds_rows(swiglu_bench: Cli, tmp_path: Path) -> None:
    for expected in (4, 8):
        assert swiglu_bench("forward", *QUICK, "--out", tmp_path / "run").code == 0
        assert len(records(tmp_path / "run")) == expected


def test_memory(swiglu_bench: Cli, tmp_path: Path) -> None:
    ran = swiglu_bench("memory", *SMALL, "--impl", "eager,eager-packed", "--out", tmp_path / "run")
    assert (ran.code, ran.err) == (0, "")
    rows = records(tmp_path / "run")
    assert len(rows) == 4
    for row in rows:
        assert row["saved_bytes"] == row["predicted_saved_bytes"] > 0
        assert row["peak_bytes"] == row["predicted_peak_bytes"] > row["saved_bytes"]
        assert row["time_ms"] != row["time_ms"], "memory is not timed"
    assert "MiB, workspace 0.000 MiB" in ran.out


def test_verify_on_a_cpu_checks_every_kernel_through_the_interpreter(swiglu_bench: Cli, tmp_path: Path) -> None:
    from swiglu_kernels import backend_for

    if backend_for(torch.device("cpu")) != "interpreter":
        pytest.skip("Triton's interpreter is not in use: there is a GPU, or no Triton")
    arguments = ("--shapes", "24x40", "--tokens", "5", "--device", "cpu", "--skip-impl", "compile*")
    ran = swiglu_bench("verify", *arguments, "--out", tmp_path / "run")
    assert (ran.code, ran.err) == (0, "")
    rows = records(tmp_path / "run")
    assert {row["dtype"] for row in rows} == {"float32", "float16", "bfloat16"}
    kernels = [one for one in CATALOGUE if one.backend == "triton" and one.interpretable == "yes" and not one.gpus]
    assert kernels
    for one in kernels:
        for scope in one.scopes:
            ran_here = [row for row in rows if (row["implementation"], row["scope"]) == (one.name, scope)]
            assert len(ran_here) == 3
            for row in ran_here:
                assert (row["status"], row["interpreted"]) == ("ok", True)
                names = [part.split("=")[0] for part in row["errors"].split()]
                assert names == ["output_(inference)", "output", *one.gradients(scope)]
    liger = [row for row in rows if row["implementation"] == "liger"]
    assert all(row["status"] == "skipped" and "interpreter" in row["reason"] for row in liger)


def test_on_a_cpu_forward_skips_the_kernels_with_the_reason(swiglu_bench: Cli, tmp_path: Path) -> None:
    ran = swiglu_bench("forward", *SMALL, "--budget", "0.3", "--skip-impl", "compile*", "--out", tmp_path / "run")
    assert ran.code == 0
    for row in records(tmp_path / "run"):
        if row["implementation"] in ("quack", "flash-swiglu-mlp"):
            assert row["status"] == "skipped"
        elif row["implementation"].startswith(("fused", "unsloth", "liger", "silu-mul")):
            assert row["status"] == "skipped"
            assert ("no glu scope" if row["implementation"].startswith("fused-mlp") else "Triton") in row["reason"]
        else:
            assert row["status"] == "ok"


# Whose implementation


def test_a_user_s_implementation_needs_no_other_edit(swiglu_bench: Cli, user_file: Path, tmp_path: Path) -> None:
    for command in ("forward", "step", "memory", "verify"):
        out = tmp_path / command
        budget = ["--budget", "0.3"] if command in {"forward", "step"} else []
        impl = ("--impl", f"{user_file}:mine")
        assert swiglu_bench(command, *SMALL, *budget, *impl, "--scope", "glu", "--out", out).code == 0
        mine = [row for row in records(out) if row["implementation"] == "mine"]
        assert {row["status"] for row in mine} == {"ok"}


def test_the_baseline_is_measured_along(swiglu_bench: Cli, tmp_path: Path) -> None:
    arguments = (*SMALL, "--budget", "0.3", "--impl", "eager-packed")
    for baseline, names in (("eager", ["eager", "eager-packed"]), ("eager-packed", ["eager-packed"])):
        out = tmp_path / baseline
        assert swiglu_bench("forward", *arguments, "--tokens", "3", "--baseline", baseline, "--out", out).code == 0
        assert [(row["implementation"], row["baseline"]) for row in records(out)] == [
            (name, baseline) for name in names
        ]


@pytest.mark.parametrize("skipped", ["eager", "eage?"])
def test_a_baseline_that_is_skipped_stays_away(
    swiglu_bench: Cli, user_file: Path, tmp_path: Path, skipped: str
) -> None:
    arguments = (*SMALL, "--tokens", "3", "--budget", "0.3", "--impl", f"eager-packed,{user_file}:mine")
    assert swiglu_bench("forward", *arguments, "--skip-impl", skipped, "--out", tmp_path / "run").code == 0
    assert [row["implementation"] for row in records(tmp_path / "run")] == ["eager-packed", "mine"]


def test_a_user_s_implementation_may_be_the_baseline(swiglu_bench: Cli, user_file: Path, tmp_path: Path) -> None:
    arguments = (*SMALL, "--tokens", "3", "--budget", "0.3", "--impl", f"eager,{user_file}:mine")
    assert swiglu_bench("forward", *arguments, "--baseline", "mine", "--out", tmp_path / "run").code == 0
    assert {row["baseline"] for row in records(tmp_path / "run")} == {"mine"}


@pytest.mark.parametrize(
    ("command", "name", "status"),
    [
        ("forward", "swapped", "incorrect"),
        ("forward", "stale", "incorrect"),
        ("forward", "fragile", "error"),
        ("backward", "forgetful", "incorrect"),
        ("memory", "unbuilt", "error"),
        ("verify", "swapped", "incorrect"),
        ("verify", "forgetful", "incorrect"),
        ("verify", "unbuilt", "error"),
    ],
)
def test_a_failure_exits_1_and_the_others_are_measured(
    swiglu_bench: Cli, user_file: Path, tmp_path: Path, command: str, name: str, status: str
) -> None:
    budget = ["--budget", "0.3"] if command in {"forward", "backward"} else []
    arguments = (*SMALL, *budget, "--tokens", "3", "--dtype", "fp32", "--scope", "glu")
    ran = swiglu_bench(command, *arguments, "--impl", f"{user_file}:{name},eager", "--out", tmp_path / "run")
    assert ran.code == 1
    found = {row["implementation"]: row for row in records(tmp_path / "run")}
    assert {key: row["status"] for key, row in found.items()} == {"eager": "ok", name: status}
    assert found[name]["reason"]
    assert found[name]["time_ms"] != found[name]["time_ms"], "no correctness, no number"
    assert f"{name}: {status}: " in ran.out


def test_what_is_skipped_is_no_failure(swiglu_bench: Cli, user_file: Path) -> None:
    assert swiglu_bench("verify", *SMALL, "--impl", f"{user_file}:foreign", "--no-csv").code == 0


# Looking before running


@pytest.mark.usefixtures("nothing_runs")
def test_a_dry_run_prints_the_cases_and_writes_nothing(swiglu_bench: Cli, tmp_path: Path) -> None:
    ran = swiglu_bench("step", *SMALL, "--scope", "glu,mlp", "--dtype", "fp32,bf16", "--impl", "eager*", "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert len(re.findall(r"^ *24x40 .* MiB", ran.out, flags=re.MULTILINE)) == 8
    assert "8 cases x 2 implementations: eager, eager-packed" in ran.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_runs")
def test_defaults_on_a_cpu(swiglu_bench: Cli) -> None:
    forward = swiglu_bench("forward", "--device", "cpu", "--dry-run", "--detail").out
    assert re.search(r"smoke +glu +forward +float32 +512", forward)
    assert "llama7b" not in forward
    verify = swiglu_bench("verify", "--device", "cpu", "--dry-run").out
    for words in ("smoke", "odd", "activation", "glu", "mlp", "float32", "float16", "bfloat16"):
        assert words in verify


@pytest.mark.usefixtures("nothing_runs")
def test_nothing_is_run_twice(swiglu_bench: Cli) -> None:
    arguments = ("--shapes", "24x40,24x40", "--tokens", "3,3", "--dtype", "fp32,float", "--scope", "glu,glu")
    assert "1 cases x" in swiglu_bench("forward", *arguments, "--device", "cpu", "--dry-run").out


def test_list(swiglu_bench: Cli) -> None:
    ran = swiglu_bench("list", "--device", "cpu")
    assert (ran.code, ran.err) == (0, "")
    for one in CATALOGUE:
        assert one.name in ran.out
    for name in config_names():
        assert name in ran.out
    assert "Machine" in ran.out
    assert torch.__version__ in ran.out
    assert "Triton kernels need a GPU" in ran.out


# W&B


def test_weights_and_biases_get_every_row(swiglu_bench: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class FakeRun:
        made: list["FakeRun"] = []  # noqa: RUF012 -- filled by one test
        url_or_path = "https://wandb.example/run"

        def __init__(self, **options: Any) -> None:
            self.options, self.rows, self.closed = options, [], 0
            FakeRun.made.append(self)

        def write(self, record: Record) -> None:
            self.rows.append(record)

        def close(self) -> None:
            self.closed += 1

    name = "swiglu_bench.writers.wandb_run"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(WandbRun=FakeRun))
    ran = swiglu_bench("forward", *QUICK, "--log-wandb", "--wandb-project", "mine", "--out", tmp_path / "run")
    (run,) = FakeRun.made
    assert ran.code == 0
    assert (run.options["project"], run.options["folder"]) == ("mine", tmp_path / "run")
    assert run.options["tags"] == ["forward", "cpu"]
    assert run.options["config"]["machine"]["device_type"] == "cpu"
    assert (len(run.rows), run.closed) == (4, 1)
    assert "W&B: https://wandb.example/run" in ran.out


# Ctrl-C


def interrupted_after(count: int) -> Callable[..., Iterator[Record]]:
    def run(*_: object) -> Iterator[Record]:
        for tokens in range(count):
            yield a_record(tokens=tokens + 1, implementation="eager")
        raise KeyboardInterrupt

    return run


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_interruption_keeps_the_rows_and_exits_130(
    swiglu_bench: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int
) -> None:
    monkeypatch.setattr(session, "run", interrupted_after(count))
    ran = swiglu_bench("forward", *QUICK, "--out", tmp_path / "run")
    assert (ran.code, ran.err) == (130, "")
    assert f"Interrupted: {count} rows were kept." in ran.out
    assert len(records(tmp_path / "run")) == count


def test_an_interruption_before_the_work_exits_130(swiglu_bench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "find_device", interrupt)
    assert swiglu_bench("forward", *QUICK).code == 130


SLOW = """
import os
import time
import torch
from swiglu_bench import Step, implementation


@implementation("slow", scopes=["glu"], description="hangs at the second case")
def slow(problem):
    if problem.case.tokens == 2 and not os.path.exists("go"):
        print("hanging", flush=True)
        time.sleep(120)
    return Step(lambda x: torch.nn.functional.silu(x @ problem.weights["w_gate"].T) * (x @ problem.weights["w_up"].T))
"""


def start_slow_sweep(folder: Path) -> "subprocess.Popen[str]":
    """A real sweep, in a process of its own, at the point where its second case hangs."""
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    program = start(folder)
    log = folder / "run" / "logs" / "slow.log"
    while not (log.exists() and "hanging" in log.read_text(encoding="utf-8")):
        assert program.poll() is None, f"it ended too early: {program.communicate()}"
        time.sleep(0.05)
    return program


def start(folder: Path, *more: str) -> "subprocess.Popen[str]":
    arguments = ["forward", "--shapes", "24x40", "--tokens", "1,2,3", "--device", "cpu", "--budget", "0.3"]
    arguments += ["--impl", "slow.py:slow", "--out", "run", *more]
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    return subprocess.Popen(
        [sys.executable, "-m", "swiglu_bench.cli.app", *arguments],
        cwd=folder, env=os.environ | {"COLUMNS": "100", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def writers_of(file: Path) -> list[str]:
    """Processes that print into a file."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/2") == str(file):
                found.append(pid)
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are looked up in /proc")
def test_a_kill_loses_the_running_case_only_and_resume_makes_it_good(tmp_path: Path) -> None:
    program, log = start_slow_sweep(tmp_path), tmp_path / "run" / "logs" / "slow.log"
    try:
        assert writers_of(log)
        program.kill()  # no process can do anything about it
        program.communicate(timeout=60)
        first = records(tmp_path / "run")
        assert [(row["implementation"], row["tokens"]) for row in first] == [("eager", 1), ("slow", 1)]
        for _ in range(100):
            if not writers_of(log):
                break
            time.sleep(0.1)
        assert not writers_of(log), "children end with their parent"
    finally:
        program.kill()
    (tmp_path / "go").touch()
    again = start(tmp_path, "--resume")
    printed, errors = again.communicate(timeout=120)
    assert (again.returncode, errors) == (0, "")
    assert "1 of 3 cases are finished in run and are kept." in printed
    assert "tokens=1 " not in printed
    rows = records(tmp_path / "run")
    expected = [(name, tokens) for tokens in (1, 2, 3) for name in ("eager", "slow")]
    assert [(row["implementation"], row["tokens"]) for row in rows] == expected
    assert {row["run_id"] for row in rows[:2]} == {first[0]["run_id"]}
    assert rows[:2] == first or str(rows[:2]) == str(first), "what was finished is as it was"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*FILES, "logs"}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_ctrl_c_in_the_middle_of_a_sweep(tmp_path: Path) -> None:
    program = start_slow_sweep(tmp_path)
    try:
        program.send_signal(signal.SIGINT)
        printed, errors = program.communicate(timeout=60)
    finally:
        program.kill()
    assert (program.returncode, errors) == (130, "")
    assert "tokens=1 slow: ok" in printed
    assert "Interrupted: 2 rows were kept." in printed
    rows = records(tmp_path / "run")
    assert [(row["implementation"], row["tokens"], row["status"]) for row in rows] == [
        ("eager", 1, "ok"),
        ("slow", 1, "ok"),
    ]


# Any text


@given(st.one_of(st.text(), st.lists(st.sampled_from(["glu", "mlp", "activation", " glu", "x"])).map(",".join)))
def test_any_text_is_scopes_or_bad_input(text: str) -> None:
    scopes = result_or_complaint(lambda: request.scopes_of(text))
    if isinstance(scopes, BadInput):
        assert str(scopes).startswith("--scope: ")
    else:
        assert scopes
        assert set(scopes) <= set(Scope)


@given(st.text(), st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_a_choice_is_known_or_bad_input(value: str, known: list[str]) -> None:
    choice = result_or_complaint(lambda: request.choice("--l2", value, known))
    if isinstance(choice, BadInput):
        assert value not in known
        assert str(choice).startswith("--l2: ")
    else:
        assert choice == value
        assert value in known


names = st.sampled_from([one.name for one in CATALOGUE])
patterns = st.one_of(st.text(), names, st.sampled_from(["*", "eager*", "[a-", "[!x]*", "?", "a.py:b", ".py:", ","]))


@given(st.lists(patterns, max_size=3), st.lists(patterns, max_size=3), st.one_of(st.none(), names, st.text(max_size=8)))
def test_any_text_is_implementations_or_bad_input(wanted: list[str], unwanted: list[str], baseline: str | None) -> None:
    options = {"impl": wanted, "skip_impl": unwanted, "baseline": baseline, "in_process": True}
    chosen = result_or_complaint(lambda: request.implementations_of(options))
    if isinstance(chosen, BadInput):
        assert str(chosen).endswith((".", "?"))
    else:
        assert chosen
        assert len({one.name for one in chosen}) == len(chosen)


def test_an_audit_leaves_its_cells_and_says_what_it_counted(swiglu_bench: Cli, tmp_path: Path) -> None:
    ran = swiglu_bench("audit", "--impl", "eager", "--scope", "activation", "--out", tmp_path / "audit")
    assert (ran.code, ran.err) == (0, "")
    assert {path.name for path in (tmp_path / "audit").iterdir()} == {"audit.csv", "run.json"}
    assert " pass, 0 fail, " in ran.out
    assert ran.out.rstrip().endswith(f"Cells and machine: {tmp_path / 'audit'}")


def test_a_self_test_counts_its_cases(swiglu_bench: Cli) -> None:
    ran = swiglu_bench("selftest", "--no-zoo", "--false-alarms", "2", "--impl", "eager")
    assert (ran.code, ran.err) == (0, "")
    assert "0 false alarms in " in ran.out
    assert "at 2 random cases (seed 0)" in ran.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memory", "--detail"], "--detail shows the errors of tensors, which memory does not; give it to verify."),
        (["audit", "--dtype", "bf16,fp16"], "--dtype: audit takes one"),
        (["audit", "--out", "x", "--no-csv"], "--out was given together with --no-csv"),
        (["audit", "--scope", "glo"], "did you mean glu"),
        (["selftest", "--impl", "nobody"], "no implementation is called 'nobody'"),
    ],
)
def test_what_an_audit_or_self_test_cannot_do_is_one_sentence(
    swiglu_bench: Cli, arguments: list[str], words: str
) -> None:
    ran = swiglu_bench(*arguments)
    assert ran.code == 2
    assert words in ran.err
