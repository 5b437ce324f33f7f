import contextlib
import dataclasses
import io
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from specimens import a_record, small_case, without_time

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.machine import locks, machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.csv_table import CutShort
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.sweep.options import TimingOptions
from swiglu_bench.sweep.request import INTERRUPTED, Request
from swiglu_bench.sweep.sweep import sweep
from swiglu_bench.worker import crew, here, policy
from swiglu_bench.worker.child import DoesNotEnd
from swiglu_bench.worker.pool.team import NoPlace
from swiglu_bench.worker.settings import Progress, Settings, Task

pytestmark = pytest.mark.usefixtures("_quiet_machine")
CPU = torch.device("cpu")
THIS = machine.describe(CPU)
SETTINGS = Settings(Task.TIME, CPU, "swiglu-bench forward", "20250102T030405Z-77")
MINE, OTHER = (
    implementation(name, scopes=["glu"], description="d")(lambda problem: Step(lambda x: x))
    for name in ("mine", "other")
)
CASES = [small_case(tokens=tokens) for tokens in (1, 2, 3)]
OK, SKIPPED = a_record(), without_time(Status.SKIPPED, "It has no backward.")
INCORRECT, ERROR = without_time(Status.INCORRECT, "output: wrong."), without_time(Status.ERROR, "broken")


class FakeWandb:
    """Stands in for W&B: takes rows and remembers how it was opened and closed."""

    opened: list["FakeWandb"]
    url_or_path = place = "https://wandb.example/run"

    def __init__(self, **options: Any) -> None:
        self.options, self.rows, self.closed = options, list[Record](), 0
        FakeWandb.opened.append(self)

    def write(self, record: Record) -> None:
        self.rows.append(record)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    FakeWandb.opened = []
    module = types.SimpleNamespace(WandbRun=FakeWandb)
    monkeypatch.setitem(sys.modules, "swiglu_bench.show.wandb_run", module)


def run_sweep(
    how: Settings = SETTINGS, cases: Any = CASES[:1], chosen: Any = (MINE,), screen: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[int, str]:  # fmt: skip
    """The exit status and the text of a sweep; it writes files only with `out`."""
    wanted = TimingOptions(**{"in_process": True, "csv": "out" in options} | options)
    text = io.StringIO()
    console = Console(file=text, **{"width": 100, "color_system": None} | (screen or {}))
    return sweep(Request("forward", wanted, how, cases, chosen), THIS, console), text.getvalue()


def play(monkeypatch: pytest.MonkeyPatch, *events: Record | BaseException, **options: Any) -> tuple[int, str]:
    """A sweep whose session yields these rows or raises."""

    def run(*_: object) -> Iterator[Record]:
        for event in events:
            if isinstance(event, BaseException):
                raise event
            yield event

    monkeypatch.setattr(here, "run", run)
    return run_sweep(**options)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], 1),
        ([OK, SKIPPED], 0),
        ([SKIPPED, SKIPPED], 1),
        ([OK, INCORRECT, OK], 1),
        ([ERROR, OK], 1),
        ([INCORRECT, KeyboardInterrupt()], INTERRUPTED),
    ],
)
def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, events: list[Any], status: int) -> None:
    assert play(monkeypatch, *events)[0] == status


def test_a_row_is_on_the_disk_before_the_next_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def run(*_: object) -> Iterator[Record]:
        for tokens in (1, 2, 3):
            yield a_record(tokens=tokens)
            seen.append(len(run_folder.read_records(Path("run"))))

    monkeypatch.setattr(here, "run", run)
    run_sweep(out=Path("run"))
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("end", [None, KeyboardInterrupt(), RuntimeError("a bug")])
def test_every_writer_gets_every_row_and_is_closed(monkeypatch: pytest.MonkeyPatch, end: BaseException | None) -> None:
    wanted = {"out": Path("run"), "log_wandb": True, "wandb_project": "mine", "wandb_tags": ["a, b", "cpu"]}
    with pytest.raises(RuntimeError, match="a bug") if isinstance(end, RuntimeError) else contextlib.nullcontext():
        _, text = play(monkeypatch, OK, INCORRECT, *([end] if end else []), **wanted)
        lines = text.splitlines()
        assert lines[2:4] == ["Rows, samples and machine: run", "W&B: https://wandb.example/run"]
        assert lines[4:] == (["Interrupted: 2 rows were kept."] if end else [])
    (run,) = FakeWandb.opened
    assert (run.rows, run.closed) == ([OK, INCORRECT], 1)
    assert list(run_folder.read_records(Path("run"))["status"]) == ["ok", "incorrect"]
    about = json.loads(Path("run/run.json").read_text(encoding="utf-8"))
    assert (about["command"], about["run_id"]) == (SETTINGS.command, SETTINGS.run_id)
    assert about["machine"] == THIS.as_dict()
    assert about["options"]["out"] == "run"
    assert run.options["config"] == about
    assert (run.options["project"], run.options["folder"], run.options["group"]) == ("mine", Path("run"), "forward")
    assert (run.options["name"], run.options["tags"]) == ("forward cpu", ["forward", "cpu", "a", "b"])


@pytest.mark.parametrize(
    ("task", "words"), [(Task.TIME, "forward"), (Task.MEMORY, "memory"), (Task.VERIFY, "verify, 7")]
)
def test_progress_and_the_task_s_tables_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch, task: Task, words: str
) -> None:
    def run(cases: Any, chosen: Any, settings: Any, this: Any, listen: Any) -> Iterator[Record]:
        listen(Progress(0, 1, small_case(), "timing, round 3", 0.7))
        yield SKIPPED

    monkeypatch.setattr(here, "run", run)
    how = Settings(task, CPU, "c", SETTINGS.run_id)
    _, text = run_sweep(how, screen={"width": 160, "force_terminal": True})
    assert "case 1/1: small, 7 tokens, timing, round 3" in text
    assert words in text


@pytest.mark.parametrize("error", [DeviceLost("illegal access"), DoesNotEnd("Process 7 is there."), NoPlace("2 left.")])
def test_what_ends_a_sweep_early_is_told(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    status, text = play(monkeypatch, OK, error)
    assert status == 1
    (line,) = (line for line in text.splitlines() if line.startswith("Warning: "))
    assert str(error) in line


# Resuming, and what must not happen at the same time


class Killed(BaseException):
    """Stands for a process that ends between two rows."""


def resume(monkeypatch: pytest.MonkeyPatch, how: Settings, kill_at: int | None = None) -> tuple[list[int], str]:
    """Run what is left of CASES; the token counts that were run."""
    ran: list[int] = []

    def run(cases: Any, chosen: Any, settings: Settings, this: Any, listen: Any) -> Iterator[Record]:
        for case in cases:
            if case.tokens == kill_at:
                raise Killed
            ran.append(case.tokens)
            blank = partial(policy.blank, settings, this)
            yield from (blank(case, one).end(Status.SKIPPED, "It is only pretended.") for one in chosen)

    monkeypatch.setattr(here, "run", run)
    with contextlib.suppress(Killed):
        status, text = run_sweep(how, CASES, [MINE, OTHER], out=Path("run"), resume=True)
        assert status == 1, "all rows are skipped"
        return ran, text
    return ran, ""


def test_resume_continues_where_it_ended_and_a_kept_row_that_failed_fails_the_sweep_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = dataclasses.replace(SETTINGS, run_id="second")
    assert resume(monkeypatch, SETTINGS, kill_at=3)[0] == [1, 2]
    ran, text = resume(monkeypatch, again)
    assert ran == [3]
    assert "2 of 3 cases are finished in run and are kept." in text
    rows = run_folder.read_records(Path("run"))
    assert list(rows["tokens"]) == [1, 1, 2, 2, 3, 3]
    assert len(set(rows["fingerprint"])) == 6
    assert resume(monkeypatch, again)[0] == []
    monkeypatch.setattr(here, "run", lambda cases, *_: (INCORRECT for _ in cases))
    cases = [dataclasses.replace(CASES[0], tokens=INCORRECT.tokens, mode=INCORRECT.mode)]
    assert [run_sweep(cases=cases, out=Path("failed"), resume=True)[0] for _ in range(2)] == [1, 1]
    assert len(run_folder.read_records(Path("failed"))) == 1


def test_resume_replaces_a_case_that_is_cut_short_or_was_run_with_other_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resume(monkeypatch, SETTINGS)
    path = Path("run/records.csv")
    path.write_bytes(path.read_bytes()[:-30])  # a row cut short
    with pytest.warns(CutShort, match="run/records.csv"):
        assert len(run_folder.read_records(Path("run"))) == 5
    ran, text = resume(monkeypatch, dataclasses.replace(SETTINGS, run_id="second"))
    assert ran == [3]
    (told,) = (line for line in text.splitlines() if line.startswith("Warning: run/records.csv"))
    assert "--resume" in told
    otherwise = dataclasses.replace(SETTINGS, run_id="third", cold_l2=False)
    assert resume(monkeypatch, otherwise, kill_at=3)[0] == [1, 2]
    rows = run_folder.read_records(Path("run"))
    assert sorted(zip(rows["tokens"], rows["run_id"], strict=True)) == [
        (1, "third"), (1, "third"), (2, "third"), (2, "third"), (3, "second"), (3, "second"),
    ]  # fmt: skip


def test_a_folder_with_rows_needs_resume_or_force(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path("run")
    play(monkeypatch, OK, INCORRECT, out=run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(BadInput, match=r"run has rows .*--resume .*--force"):
        play(monkeypatch, OK, out=run)
    for options in ({"resume": True, "force": True, "out": run}, {"force": True}, {"resume": True}):
        with pytest.raises(BadInput, match=r"--resume|--force"):
            play(monkeypatch, OK, **options)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    play(monkeypatch, OK, out=run, force=True)
    assert list(run_folder.read_records(run)["status"]) == ["ok"]


def test_a_row_that_was_cut_in_the_middle_of_a_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, OK, OK, out=Path("run"))
    path = Path("run/records.csv")
    header, first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + first[:40] + b"\n" + second)
    with pytest.raises(BadInput, match=r"line 2 of run/records.csv"):
        play(monkeypatch, OK, out=Path("run"), resume=True)
    with pytest.raises(BadInput, match=r"run/records.csv .*line 2"):
        run_folder.read_records(Path("run"))


def test_it_is_told_when_nothing_that_was_asked_for_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (dataclasses.replace(OTHER, name="eager"), MINE)
    rows = (dataclasses.replace(OK, implementation="eager"), SKIPPED)
    status, text = play(monkeypatch, *rows, chosen=chosen, impl=["mine"])
    assert status == 1
    (told,) = (line for line in text.splitlines() if line.startswith("Warning: "))
    assert "mine" in told
    assert SKIPPED.reason in told
    assert play(monkeypatch, *rows, chosen=chosen, impl=["mine,eager"])[0] == 0
    assert play(monkeypatch, *rows, chosen=chosen)[0] == 0


def test_two_sweeps_into_one_folder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path("run")
    play(monkeypatch, OK, out=run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    refusal = pytest.raises(BadInput, match=r"--out: run is being written by process \d+: swiglu-bench step; wait")
    with locks.folder(run, "swiglu-bench step"), refusal:
        play(monkeypatch, OK, out=run)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_rows_that_a_full_disk_did_not_take_fail_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    records = Path("run/records.csv")

    def run(*_: object) -> Iterator[Record]:
        records.unlink()
        records.symlink_to("/dev/full")
        yield OK
        yield OK

    monkeypatch.setattr(here, "run", run)
    status, text = run_sweep(out=Path("run"))
    assert status == 1
    warnings = [line for line in text.splitlines() if line.startswith("Warning: ")]
    assert [str(records) in line and "No space left on device" in line for line in warnings] == [True, True]
    assert "its last 3 lines" in warnings[1]


def test_a_gpu_is_locked_and_a_cpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    @contextlib.contextmanager
    def gpu(*what: Any) -> Iterator[None]:
        held.append(what[:3])
        yield

    monkeypatch.setattr(locks, "gpu", gpu)
    play(monkeypatch, OK)
    assert held == []
    monkeypatch.setattr(locks, "gpu_uuid", lambda device: "GPU-1-2")
    how = dataclasses.replace(SETTINGS, device=torch.device("cuda", 0))
    play(monkeypatch, OK, how=how, wait=False)
    assert held == [("GPU-1-2", "swiglu-bench forward", False)]


@pytest.mark.parametrize("ends", [OK, ERROR])
def test_logs_stay_where_a_row_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: Record) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def run(*_: Any, logs: Path, timeout_s: float) -> Iterator[Record]:
        assert timeout_s == 7.0
        (logs / "mine.log").write_text("said", encoding="utf-8")
        (logs / "silent.log").touch()
        yield ends

    monkeypatch.setattr(crew, "run", run)
    for folder in ({"out": Path("run")}, {}):
        run_sweep(in_process=False, timeout=7.0, **folder)
    assert [path.name for path in Path("run/logs").iterdir()] == ["mine.log"]
    left = [path.name for path in Path("temporary").rglob("*.log")]
    assert left == (["mine.log"] if ends is ERROR else [])
