"""How the real program ends, whatever is on its way."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timed

FULL = Path("/dev/full")
RUN = Path(__file__).parents[2] / "results" / "nvidia-h200" / "memory-mlp"
CASE = ("--shapes", "24x40", "--tokens", "3", "--dtype", "fp32", "--device", "cpu", "--in-process", "--impl", "eager")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="a system without /dev/full")


def start(*arguments: object, **how: object) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **how.pop("env", {})}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, "text": True, "errors": "replace",
           **how}  # fmt: skip
    return subprocess.Popen([sys.executable, "-m", "swiglu_bench", *map(str, arguments)], **how)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in (out or "") + err
    return process.returncode, out, err


@needs_full
def test_a_sweep_goes_on_and_keeps_its_rows(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        code, _, err = ended(start("verify", *CASE, "--scope", "glu", "--out", tmp_path / "out", stdout=full))
    assert code == 1
    assert "stdout" in err
    rows = list(csv.DictReader((tmp_path / "out" / "records.csv").open()))
    assert [row["implementation"] for row in rows] == ["eager"]


def test_who_reads_a_part_is_told_nothing() -> None:
    process = start("show", RUN)
    assert process.stdout
    process.stdout.close()
    process.stdout = None
    assert ended(process)[::2] == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a signal elsewhere, too, but is not sent like this")
def test_ctrl_c_in_an_import_that_loses_it(tmp_path: Path) -> None:
    """As torch's import of numpy does."""
    raised = "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    (tmp_path / "loses.py").write_text(raised, encoding="utf-8")
    code = "from swiglu_bench.cli.ends import end\nend(lambda: bool(__import__('loses')) * 0)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a signal elsewhere, too, but is not sent like this")
@pytest.mark.parametrize("command", ["forward", "train"])
@pytest.mark.parametrize("after_s", [2.0])
def test_ctrl_c_while_a_command_starts(command: str, after_s: float, tmp_path: Path) -> None:
    process = start(command, "--device", "cpu", "--no-csv", start_new_session=True, cwd=tmp_path)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of its processes
    assert ended(process)[0] in {130, -signal.SIGINT}  # the second, 130 in a shell, before our own code is reached
