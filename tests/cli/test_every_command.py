"""The ways in which any command may be called wrongly: one sentence and exit status 2, never a traceback."""

import datetime
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from command_line import parser, swiglu_bench
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from reported import write
from specimens import a_record

from swiglu_bench import loop
from swiglu_bench.cases import registry
from swiglu_bench.cli import app, check
from swiglu_bench.cli.ends import INTERRUPTED
from swiglu_bench.machine import ceilings_cache, doctor, machine
from swiglu_bench.options import COMMANDS as SWEEPS
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show import charts, page
from swiglu_bench.tasks import noise
from swiglu_bench.tasks.selftest import run as selftest
from swiglu_bench.tasks.train import run as training
from swiglu_bench.tasks.untimed import Asked
from swiglu_bench.worker import policy

STATUSES = {0, 1, 2, 3, INTERRUPTED}
COMMANDS = list(parser().commands)
RUNS = {"compare": 2, "show": 1, "publish": 1, "report": 1}
"""How many runs a command is given."""
BAD = ("", "-1", "nan", "9" * 30, "no\0where", "\udc80")


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is accepted comes to an end at once. No disk is waited for, and no installed package read, 1,700 times."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(registry, "_published", dict)
    this = machine.describe(machine.find_device("cpu"))
    monkeypatch.setattr(machine, "describe", lambda device: this)

    def rows(places: Any, cases: Any, work: Any, *_: Any) -> Iterator[Record]:
        for contender in () if isinstance(cases[0], Asked) else work.implementations:
            yield policy.blank(work.settings, this, cases[0], contender).end(Status.SKIPPED, "only pretended")

    monkeypatch.setattr(loop, "rows", rows)
    for place, name in (
        (selftest, "run_specimens"), (selftest, "run_alarms"),
        (doctor, "examine"), (check, "_compiled"), (charts, "pictures"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, lambda *_, **__: iter(()))
    monkeypatch.setattr(training, "train", lambda *_: iter(()))
    monkeypatch.setattr(noise, "_built", MagicMock(side_effect=KeyboardInterrupt))
    quick = ceilings_cache.MeasuredRate(value=1e9, at=datetime.datetime.now(datetime.UTC))
    monkeypatch.setattr(ceilings_cache.Limits, "_figure", lambda *_: quick)
    monkeypatch.setattr(page, "page", lambda *_: "<!doctype html>")
    monkeypatch.setattr("swiglu_bench.show.wandb_run._start", MagicMock(side_effect=OSError("only pretended")))
    monkeypatch.setattr("swiglu_bench.worker.forkserver.start", lambda *_: None)


@pytest.fixture
def run(tmp_path: Path) -> str:
    row = a_record(time_ms=1.0, ratio=1.0, ratio_low=0.99, ratio_high=1.01, rounds=40)
    return str(write(tmp_path / "results/run", row, command="swiglu-bench forward"))


def options(command: str) -> Iterator[str]:
    """The options of a command that take a value."""
    for one in parser().commands[command].params:
        if one.param_type_name == "option" and not getattr(one, "is_flag", False):
            yield one.opts[0]


def usual(command: str, run: str) -> list[str]:
    """The least that a command is given here."""
    return [command, *[run] * RUNS.get(command, 0), *(["--device", "cpu"] if "--device" in options(command) else [])]


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_values_of_every_option(command: str, run: str) -> None:
    for option in options(command):
        for value in BAD:
            ran = swiglu_bench(*usual(command, run), f"{option}={value}")
            assert ran.code in STATUSES
            if option in ("--impl", "--shapes", "--tokens", "--format", "--device"):
                assert ran.complaint, (option, value)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_there_and_what_cannot_be_written(command: str, run: str) -> None:
    (Path(run) / "file").touch()
    if command in RUNS or command == "history":
        for path in ("nowhere", f"{run}/file/below", "/dev/null", "/proc/nowhere"):
            assert swiglu_bench(command, *[path] * RUNS.get(command, 1)).complaint
    for option in {"--out", "--output", "--png"} & set(options(command)):
        for path in ("/proc/nowhere/x", f"{run}/file/below"):
            more = ("--format", "csv") if command == "show" else ()
            code = swiglu_bench(*usual(command, run), option, path, *more).code
            assert code == 2, (option, path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("stdout", ["/dev/full", "ascii"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_and_a_poor_terminal(command: str, stdout: str, run: str, tmp_path: Path) -> None:
    if stdout == "/dev/full" and not Path(stdout).exists():
        pytest.skip("no /dev/full")
    child = os.fork()
    if not child:
        _be(usual(command, run), stdout, tmp_path / "err")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = (tmp_path / "err").read_text(errors="replace")
    assert code in STATUSES, told
    assert "Traceback" not in told
    assert ("stdout did not take all" in told) == (stdout == "/dev/full" and code != 2), told
    assert code or stdout != "/dev/full"


def _be(arguments: list[str], stdout: str, stderr: Path) -> None:
    """The command in a process of its own, which has the imports of this one."""
    signal.alarm(60)
    out = os.open(os.devnull if stdout == "ascii" else stdout, os.O_WRONLY)
    err = os.open(stderr, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(err, 2)
    coding = "ascii" if stdout == "ascii" else "utf-8"
    sys.stdout = sys.__stdout__ = open(1, "w", encoding=coding, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = ["swiglu-bench", *arguments]
    code: object = 99
    try:
        app.main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(int(code or 0))


@pytest.mark.parametrize("command", list(RUNS))
def test_a_run_of_which_no_row_is_whole(command: str, run: str) -> None:
    """Of a disk that was full at the first row: what is cut is told, and that nothing is left."""
    records = Path(run) / "records.csv"
    records.write_bytes(records.read_bytes()[:-20])
    ran = swiglu_bench(*usual(command, run))
    assert ran.code == 2, ran.err
    assert "ends in the middle of a row" in ran.err
    assert f"{run}: no rows; give a run that has some" in ran.err


@pytest.mark.parametrize("command", COMMANDS)
def test_files_that_are_not_what_was_asked_for(command: str, run: str, tmp_path: Path) -> None:
    for text in (b"", b"a: [", b"- 1", b"\0", b"\xff\xfe", b"x: *y", b"{}", b"shapes: 1", b"[{}]"):
        for ending in ("yaml", "json", "csv"):
            file = tmp_path / f"given.{ending}"
            file.write_bytes(text)
            for option in {"--shapes", "--workload"} & set(options(command)):
                ran = swiglu_bench(*usual(command, run), option, str(file))
                assert ran.complaint, (option, ending, text, ran.err)


WORDS = "- -- , 0 -1 1 1k 1e9 nan inf smoke 24x40 0x0 ../x a/b.yaml / x:y fp32 bf16 glu mlp,glu eager fuse* [ x.py:y"
OPTIONS = (
    "--shapes --tokens --dtype --scope --impl --skip-impl --seed --device --baseline --budget --l2 --out --timeout "
    "--wandb-project --what -h --help --resume --force --no-csv --csv --dry-run --in-process --no-wait --wait --version"
)
words = st.one_of(st.text(max_size=12), st.sampled_from([*WORDS.split(), "", "cuda:9", "cold", "\0", "\udc80", "é"]))
names = st.sampled_from(OPTIONS.split())
pieces = st.one_of(names, words, st.tuples(names, words).map("=".join))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*SWEEPS, "inspekt", ""]), st.lists(pieces, max_size=6))
@example("forward", ["--out", "x", "--resume"])
@example("forward", ["--out", "\0"])
@example("forward", ["--shapes", "\0.yaml"])
@example("forward", ["--impl", "\0.py:x"])
@example("verify", ["--out", ""])
@example("forward", ["--budget", "nan"])
@example("forward", ["--timeout", "nan"])
@example("forward", ["--seed", "9" * 30])
@example("forward", ["--impl", "eager", "--out", "x" * 300])
def test_any_command_line(command: str, arguments: list[str]) -> None:
    assert swiglu_bench(command, "--device", "cpu", *arguments).code in STATUSES
