import io
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from specimens import a_record, small_case, without_time
from swiglu_bench import machine, runner
from swiglu_bench.cases import BadInput
from swiglu_bench.output import Output, _default_folder
from swiglu_bench.record import Record, Status
from swiglu_bench.registry import Step, implementation
from swiglu_bench.runner import Progress, Settings, Task
from swiglu_bench.sweep import INTERRUPTED, sweep
from swiglu_bench.writers import csv_file

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
SETTINGS = Settings(Task.TIME, CPU, "swiglu-bench forward", "20250102T030405Z-77")

SCREEN_ONLY = Output(csv=False, folder=None, wandb_project=None)
MINE = implementation("mine", scopes=["glu"], description="d")(lambda problem: Step(lambda x: x))
OK, SKIPPED = a_record(), without_time(Status.SKIPPED, "It has no backward.")
INCORRECT, ERROR = without_time(Status.INCORRECT, "output: wrong."), without_time(Status.ERROR, "broken")


class FakeWandb:
    """Stands in for W&B: takes rows and remembers how it was opened and closed."""

    opened: list["FakeWandb"]
    url_or_path = "https://wandb.example/run"

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.rows: list[Record] = []
        self.closed = 0
        FakeWandb.opened.append(self)

    def write(self, record: Record) -> None:
        self.rows.append(record)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    FakeWandb.opened = []
    module = types.SimpleNamespace(WandbRun=FakeWandb)
    monkeypatch.setitem(sys.modules, "swiglu_bench.writers.wandb_run", module)


def play(
    monkeypatch: pytest.MonkeyPatch,
    *events: Record | BaseException,
    output: Output = SCREEN_ONLY,
) -> tuple[int, str]:
    """The exit status and the text of a sweep whose runner yields these rows or raises."""

    def run(*_: object) -> Iterator[Record]:
        for event in events:
            if isinstance(event, BaseException):
                raise event
            yield event

    monkeypatch.setattr(runner, "run", run)
    text = io.StringIO()
    console = Console(file=text, width=100, color_system=None)
    return sweep("forward", [small_case()], [MINE], SETTINGS, THIS, output, console), text.getvalue()


def into(folder: Path, wandb_project: str | None = None) -> Output:
    return Output(csv=True, folder=folder, wandb_project=wandb_project)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], 0),
        ([OK, SKIPPED], 0),
        ([SKIPPED], 0),
        ([OK, INCORRECT, OK], 1),
        ([ERROR, OK], 1),
        ([OK, KeyboardInterrupt()], INTERRUPTED),
        ([INCORRECT, KeyboardInterrupt()], INTERRUPTED),
    ],
)
def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, events: list[Any], status: int) -> None:
    assert play(monkeypatch, *events)[0] == status


def test_a_row_is_on_the_disk_before_the_next_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[int] = []

    def run(*_: object) -> Iterator[Record]:
        for tokens in (1, 2, 3):
            yield a_record(tokens=tokens)
            seen.append(len(csv_file.read_records(tmp_path / "run")))

    monkeypatch.setattr(runner, "run", run)
    console = Console(file=io.StringIO(), color_system=None)
    sweep("forward", [small_case()], [MINE], SETTINGS, THIS, into(tmp_path / "run"), console)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("end", [None, KeyboardInterrupt()])
def test_every_writer_gets_every_row_and_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: BaseException | None
) -> None:
    events = [OK, INCORRECT, *([end] if end else [])]
    _, text = play(monkeypatch, *events, output=into(tmp_path / "run", "mine"))
    (run,) = FakeWandb.opened
    assert run.rows == [OK, INCORRECT]
    assert run.closed == 1
    assert list(csv_file.read_records(tmp_path / "run")["status"]) == ["ok", "incorrect"]
    lines = text.splitlines()
    assert lines[2:4] == [f"Rows, samples and machine: {tmp_path / 'run'}", "W&B: https://wandb.example/run"]
    assert lines[4:] == (["Interrupted: 2 rows were kept."] if end else [])


def test_a_crash_of_the_suite_itself_is_seen_and_keeps_the_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        play(monkeypatch, OK, RuntimeError("a bug"), output=into(tmp_path / "run", "mine"))
    assert len(csv_file.read_records(tmp_path / "run")) == 1
    assert FakeWandb.opened[0].closed == 1


def test_what_is_opened_is_told_about_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, OK, output=into(tmp_path / "run", "mine"))
    about = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert (about["command"], about["run_id"]) == (SETTINGS.command, SETTINGS.run_id)
    assert about["machine"] == THIS.as_dict()
    options = FakeWandb.opened[0].options
    assert options["config"] == about
    assert (options["project"], options["folder"]) == ("mine", tmp_path / "run")
    assert (options["name"], options["tags"]) == ("forward cpu", ["forward", "cpu"])


def test_w_and_b_without_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, OK, output=Output(csv=False, folder=None, wandb_project="mine"))
    assert FakeWandb.opened[0].options["folder"] is None
    assert list(tmp_path.iterdir()) == []


def test_w_and_b_that_went_nowhere_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWandb, "url_or_path", "")
    _, text = play(monkeypatch, OK, output=Output(csv=False, folder=None, wandb_project="mine"))
    assert "W&B" not in text


def test_a_warning_of_a_writer_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: FakeWandb, record: Record) -> None:
        self.options["warn"]("the network [is] gone")

    monkeypatch.setattr(FakeWandb, "write", write)
    _, text = play(monkeypatch, OK, output=Output(csv=False, folder=None, wandb_project="mine"))
    assert "Warning: the network [is] gone\n" in text


@pytest.mark.parametrize("folder_exists", [True, False])
def test_writers_are_open_before_the_work_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder_exists: bool
) -> None:
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("the work has started"))
    blocked = tmp_path / "file"
    blocked.touch()
    console = Console(file=io.StringIO())
    with pytest.raises(BadInput):
        sweep("forward", [], [], SETTINGS, THIS, into(blocked if folder_exists else blocked / "run"), console)


def test_a_folder_without_files_makes_no_sense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--out was given together with --no-csv"):
        play(monkeypatch, OK, output=Output(csv=False, folder=tmp_path / "run", wandb_project=None))


def test_the_default_folder_is_by_machine_date_and_time() -> None:
    assert _default_folder(THIS, "step", SETTINGS.run_id) == Path("results/cpu/2025-01-02/030405-step")


def test_progress_reaches_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    console = Console(file=text, width=160, force_terminal=True, color_system=None)

    def run(cases: Any, chosen: Any, settings: Any, this: Any, listen: Any) -> Iterator[Record]:
        listen(Progress(0, 1, small_case(), "timing, round 3", 0.7))
        yield OK

    monkeypatch.setattr(runner, "run", run)
    assert sweep("forward", [small_case()], [MINE], SETTINGS, THIS, SCREEN_ONLY, console) == 0
    assert "case 1/1: small, 7 tokens, timing, round 3" in text.getvalue()


@pytest.mark.parametrize(
    ("task", "words"), [(Task.TIME, "forward"), (Task.MEMORY, "memory"), (Task.VERIFY, "verify, 7")]
)
def test_each_task_has_its_tables(monkeypatch: pytest.MonkeyPatch, task: Task, words: str) -> None:
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=True, color_system=None)
    monkeypatch.setattr(runner, "run", lambda *_: (row for row in [SKIPPED]))
    how = Settings(task, CPU, "c", SETTINGS.run_id)
    sweep("c", [small_case()], [MINE], how, THIS, SCREEN_ONLY, console)
    assert words in text.getvalue()
