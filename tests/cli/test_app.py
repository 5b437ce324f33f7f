import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import swiglu_bench

from swiglu_bench import loop
from swiglu_bench.machine import machine
from swiglu_bench.rows import run_folder

pytestmark = pytest.mark.timed

QUICK = ("--shapes", "24x40", "--tokens", "3,7", "--device", "cpu", "--budget", "0.1", "--impl", "eager",
         "--in-process")  # fmt: skip


@pytest.fixture
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input must be found before any work starts."""
    monkeypatch.setattr(loop, "rows", lambda *_: pytest.fail("the work has started"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("forward --shapes lama7b", "--shapes: there is no shape or sweep 'lama7b'; did you mean llama7b"),
        ("verify --shapes mine.yaml", "mine.yaml:2: "),
        ("verify --tokens 8,many", "--tokens: 'many' is not a token count"),
        ("forward --dtype fp8", "--dtype: 'fp8' is not one of bf16, fp16, fp32"),
        ("memory --impl eagr", "--impl: no implementation is called 'eagr'; did you mean eager"),
        ("backward --skip-impl ligr", "--skip-impl: no implementation is called 'ligr'; did you mean liger"),
        ("step --skip-impl *", "--skip-impl left no implementation to run"),
        ("memory --device gpu", "--device: 'gpu' is not a device"),
        ("verify --no-csv --out x", "--out was given together with --no-csv"),
        ("forward --baseline eagr", "--baseline: no implementation is called 'eagr'; did you mean eager"),
        ("backward --l2 warm", "--l2: 'warm' is not one of cold, hot"),
        ("forward --format parquet", "--format: 'parquet' is not one of table, json, jsonl, csv"),
        ("forward --out file", "--out: file is a file; give a folder."),
        ("verify", "--out: results/cpu/"),
        ("forward --resume", "--resume needs a folder that has rows; give it as --out FOLDER."),
        ("audit --out audited --impl eager", "--out: audited has the cells of an earlier audit"),
        ("forward --wandb-project mine", "--wandb-project was given without --log-wandb"),
        ("memory --detail", "--detail shows the errors of tensors, which memory does not check; give it to verify."),
        ("list --device cuda", "--device: cuda was asked for, but this machine has no usable CUDA GPU; give cpu."),
        ("verify --gpus 0", "--gpus: this machine has no usable CUDA GPU; leave it out."),
        ("verify --gpus all --ray auto", "--gpus and --ray were given together; give one of them."),
        ("verify --ray auto --in-process", "--ray needs child processes; leave --in-process out."),
        ("verify --ray auto --dry-run", "--dry-run looks at this host only, and --ray at others; leave one of them"),
        ("audit --dtype bf16,fp16", "--dtype: audit takes one"),
        ("selftest --no-zoo --false-alarms 0", "--no-zoo and --false-alarms 0 leave nothing"),
        ("inspect --shapes random:0", "--shapes: 'random:0' does not say how many layers to draw"),
        ("inspect --target hopper", "--target: 'hopper' is not a list of compute capabilities; give sm_80, sm_90"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("_nothing_runs")
def test_bad_input_is_one_sentence(monkeypatch: pytest.MonkeyPatch, line: str, words: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("swiglu_bench.worker.forkserver.start", lambda *_: None)
    Path("mine.yaml").write_text("hidden: 8\nintermediate: -2\nsource: s\n", encoding="utf-8")
    Path("audited").mkdir()
    Path("audited/audit.csv").write_text("a\n1\n", encoding="utf-8")
    for path in ("file", "results"):
        Path(path).write_text("in the way", encoding="utf-8")
    assert swiglu_bench(*line.split(" ")).complaint.startswith(words)
    assert Path("file").read_text(encoding="utf-8") == "in the way"


@pytest.mark.usefixtures("_nothing_runs")
def test_what_the_parser_refuses_exits_2_too() -> None:
    for line, words in (("forward --budget 0", "--budget"), ("forward --shaps smoke", "--shapes")):
        ran = swiglu_bench(*line.split())
        assert (ran.code, ran.out) == (2, "")
        assert words in " ".join(ran.err.split())


def test_an_interruption_before_the_work_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "find_device", interrupt)
    assert swiglu_bench("forward", *QUICK).code == 130


SLOW = """
import os
import time
import torch
from swiglu_bench import Step, implementation


@implementation("slow", scopes=["glu"], description="hangs at the case that HANG names")
def slow(problem):
    if str(problem.case.tokens) == os.environ["HANG"]:  # not in a file beside this one, which would count as its code
        print("hanging", flush=True)
        time.sleep(120)
    return Step(lambda x: torch.nn.functional.silu(x @ problem.weights["w_gate"].T) * (x @ problem.weights["w_up"].T))
"""
LOG = Path("run/logs/slow.log")


def slow_sweep(hang: int, *more: str) -> "subprocess.Popen[str]":
    """A real sweep over 1, 2 and 3 tokens, in a process of its own, at the point where it hangs."""
    LOG.unlink(missing_ok=True)
    arguments = ["memory", "--shapes", "24x40", "--tokens", "1,2,3", "--device", "cpu", "--out", "run",
                 "--impl", "eager,slow.py:slow", *more]  # fmt: skip
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    program = subprocess.Popen(
        [sys.executable, "-m", "swiglu_bench", *arguments],
        env=os.environ | {"COLUMNS": "100", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HANG": str(hang)},
        text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_for(lambda: LOG.exists() and "hanging" in LOG.read_text(encoding="utf-8"), program)
    return program


def wait_for(done: Callable[[], bool], program: "subprocess.Popen[str] | None" = None) -> None:
    end = time.monotonic() + 120
    while not done():
        assert time.monotonic() < end
        assert program is None or program.poll() is None, f"it ended too early: {program.communicate()}"
        time.sleep(0.02)


def programs_that_print_into(file: Path) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/2") == str(file.resolve()):
                found.append(pid)
    return found


def finished() -> list[tuple[str, int, str]]:
    rows = run_folder.frame_of(run_folder.read_rows(Path("run")))
    return list(zip(rows["implementation"], rows["tokens"], rows["run_id"], strict=True))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are looked up in /proc")
def test_a_killed_sweep_loses_the_running_case_only_and_one_that_resumes_it_can_be_interrupted() -> None:
    Path("slow.py").write_text(SLOW, encoding="utf-8")
    program = slow_sweep(hang=2)
    try:
        assert programs_that_print_into(LOG)
        program.kill()  # which no process can do anything about
        program.communicate(timeout=60)
        first = finished()
        assert [row[:2] for row in first] == [("eager", 1), ("slow", 1), ("eager", 2)]
        wait_for(lambda: not programs_that_print_into(LOG))  # children end with their parent
        program = slow_sweep(3, "--resume")
        program.send_signal(signal.SIGINT)
        printed, errors = program.communicate(timeout=60)
    finally:
        program.kill()
    assert (program.returncode, errors) == (130, "")
    assert "1 of 3 cases are finished in run and are kept." in printed
    assert "tokens=2 slow: ok" in printed
    assert "tokens=1 " not in printed
    assert "Interrupted: 3 rows were kept." in printed
    rows = finished()
    assert rows[:2] == first[:2]
    assert [row[:2] for row in rows[2:]] == [("eager", 2), ("slow", 2), ("eager", 3)]
    assert {row[2] for row in rows[2:]}.isdisjoint({first[0][2]}), "a case is run again as a whole"
    assert {path.name for path in Path("run").iterdir()} == {
        "records.csv", "samples.csv", "checks.csv", "run.json", "logs",
    }  # fmt: skip
