import contextlib
import dataclasses
import io
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from specimens import a_record, small_case, without_time

from swiglu_bench.machine import locks, machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.processes import parent
from swiglu_bench.processes.child import DoesNotEnd
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.session import session as runner
from swiglu_bench.session.settings import Progress, Settings, Task
from swiglu_bench.spec.cases import Mode
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.spec.implementation import Step, implementation
from swiglu_bench.sweep.output import Output, Wandb, default_folder
from swiglu_bench.sweep.sweep import INTERRUPTED, Process, sweep

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
SETTINGS = Settings(Task.TIME, CPU, "swiglu-bench forward", "20250102T030405Z-77")

SCREEN_ONLY = Output(csv=False, folder=None, wandb=None)
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
    monkeypatch: pytest.MonkeyPatch, *events: Record | BaseException, output: Output = SCREEN_ONLY
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


def into(folder: Path, wandb: Wandb | None = None) -> Output:
    return Output(csv=True, folder=folder, wandb=wandb)


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
            seen.append(len(run_folder.read_records(tmp_path / "run")))

    monkeypatch.setattr(runner, "run", run)
    console = Console(file=io.StringIO(), color_system=None)
    sweep("forward", [small_case()], [MINE], SETTINGS, THIS, into(tmp_path / "run"), console)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("end", [None, KeyboardInterrupt()])
def test_every_writer_gets_every_row_and_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: BaseException | None
) -> None:
    events = [OK, INCORRECT, *([end] if end else [])]
    _, text = play(monkeypatch, *events, output=into(tmp_path / "run", Wandb("mine")))
    (run,) = FakeWandb.opened
    assert run.rows == [OK, INCORRECT]
    assert run.closed == 1
    assert list(run_folder.read_records(tmp_path / "run")["status"]) == ["ok", "incorrect"]
    lines = text.splitlines()
    assert lines[2:4] == [f"Rows, samples and machine: {tmp_path / 'run'}", "W&B: https://wandb.example/run"]
    assert lines[4:] == (["Interrupted: 2 rows were kept."] if end else [])


def test_a_crash_of_the_suite_itself_is_seen_and_keeps_the_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        play(monkeypatch, OK, RuntimeError("a bug"), output=into(tmp_path / "run", Wandb("mine")))
    assert len(run_folder.read_records(tmp_path / "run")) == 1
    assert FakeWandb.opened[0].closed == 1


def test_what_is_opened_is_told_about_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, OK, output=into(tmp_path / "run", Wandb("mine")))
    about = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert (about["command"], about["run_id"]) == (SETTINGS.command, SETTINGS.run_id)
    assert about["machine"] == THIS.as_dict()
    options = FakeWandb.opened[0].options
    assert options["config"] == about
    assert (options["project"], options["folder"]) == ("mine", tmp_path / "run")
    assert (options["name"], options["tags"]) == ("forward cpu", ["forward", "cpu"])


def test_w_and_b_without_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, OK, output=Output(csv=False, folder=None, wandb=Wandb("mine")))
    assert FakeWandb.opened[0].options["folder"] is None
    assert list(tmp_path.iterdir()) == []


def test_w_and_b_that_went_nowhere_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWandb, "url_or_path", "")
    _, text = play(monkeypatch, OK, output=Output(csv=False, folder=None, wandb=Wandb("mine")))
    assert "W&B" not in text


def test_a_warning_of_a_writer_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: FakeWandb, record: Record) -> None:
        self.options["warn"]("the network [is] gone")

    monkeypatch.setattr(FakeWandb, "write", write)
    _, text = play(monkeypatch, OK, output=Output(csv=False, folder=None, wandb=Wandb("mine")))
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
        play(monkeypatch, OK, output=Output(csv=False, folder=tmp_path / "run", wandb=None))


def test_thedefault_folder_is_by_machine_date_and_time() -> None:
    assert default_folder(THIS, "step", SETTINGS.run_id) == Path("results/cpu/2025-01-02/030405-step")


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


# Going on with a sweep, and whom it must not meet


class Killed(BaseException):
    """Stands for a process that ends between two rows."""


OTHER = implementation("other", scopes=["glu"], description="d")(MINE.build)
CASES = [small_case(tokens=tokens) for tokens in (1, 2, 3)]


def resume(
    monkeypatch: pytest.MonkeyPatch, folder: Path, how: Settings, kill_at: int | None = None
) -> tuple[list[int], str]:
    """Run what is left of CASES; the token counts that were run."""
    ran: list[int] = []

    def run(cases: Any, chosen: Any, settings: Settings, this: Any, listen: Any) -> Iterator[Record]:
        for case in cases:
            if case.tokens == kill_at:
                raise Killed
            ran.append(case.tokens)
            session = runner.Session(settings, this)
            for one in chosen:
                yield session.blank(case, one).end(Status.SKIPPED, "It is only pretended.")

    monkeypatch.setattr(runner, "run", run)
    text = io.StringIO()
    console = Console(file=text, width=100, color_system=None)
    output = Output(csv=True, folder=folder, wandb=None, resume=True)
    with contextlib.suppress(Killed):
        assert sweep("forward", CASES, [MINE, OTHER], how, THIS, output, console) == 0
    return ran, text.getvalue()


def test_resume_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    again = dataclasses.replace(SETTINGS, run_id="second")
    assert resume(monkeypatch, tmp_path, SETTINGS, kill_at=3)[0] == [1, 2]
    ran, text = resume(monkeypatch, tmp_path, again)
    assert ran == [3]
    assert f"2 of 3 cases are finished in {tmp_path} and are kept." in text
    rows = run_folder.read_records(tmp_path)
    assert list(rows["tokens"]) == [1, 1, 2, 2, 3, 3]
    assert len(set(rows["fingerprint"])) == 6
    assert resume(monkeypatch, tmp_path, again)[0] == []


def test_resume_replaces_a_case_that_is_cut_short_or_made_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resume(monkeypatch, tmp_path, SETTINGS)
    path = tmp_path / "records.csv"
    path.write_bytes(path.read_bytes()[:-30])  # a row cut short
    assert resume(monkeypatch, tmp_path, dataclasses.replace(SETTINGS, run_id="second"))[0] == [3]
    otherwise = dataclasses.replace(SETTINGS, run_id="third", cold_l2=False)
    assert resume(monkeypatch, tmp_path, otherwise, kill_at=3)[0] == [1, 2]
    rows = run_folder.read_records(tmp_path)
    assert sorted(zip(rows["tokens"], rows["run_id"], strict=True)) == [
        (1, "third"), (1, "third"), (2, "third"), (2, "third"), (3, "second"), (3, "second"),
    ]  # fmt: skip


def test_a_kept_row_that_is_no_success_still_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = Output(csv=True, folder=tmp_path, wandb=None, resume=True)
    case = small_case(mode=Mode.FORWARD)
    for _ in range(2):
        monkeypatch.setattr(runner, "run", lambda cases, *_: (INCORRECT for _ in cases))
        console = Console(file=io.StringIO(), color_system=None)
        assert sweep("forward", [case], [MINE], SETTINGS, THIS, output, console) == 1
    assert len(run_folder.read_records(tmp_path)) == 1


@pytest.mark.parametrize("csv", [True, False])
def test_resume_needs_a_folder(monkeypatch: pytest.MonkeyPatch, csv: bool) -> None:
    with pytest.raises(
        BadInput, match=r"--resume needs the folder of the sweep to go on with; give it as --out FOLDER\."
    ):
        play(monkeypatch, OK, output=Output(csv=csv, folder=None, wandb=None, resume=True))


def test_two_sweeps_into_one_folder_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, OK, output=into(tmp_path / "run"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    refusal = pytest.raises(BadInput, match=r"--out: .*run is being written by process \d+: swiglu-bench step; wait")
    with locks.folder(tmp_path / "run", "swiglu-bench step"), refusal:
        play(monkeypatch, OK, output=into(tmp_path / "run"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_rows_that_a_full_disk_did_not_take_fail_the_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = tmp_path / "run" / "records.csv"

    def run(*_: object) -> Iterator[Record]:
        records.unlink()
        records.symlink_to("/dev/full")
        yield OK
        yield OK

    monkeypatch.setattr(runner, "run", run)
    text = io.StringIO()
    console = Console(file=text, width=100, color_system=None)
    assert sweep("forward", [small_case()], [MINE], SETTINGS, THIS, into(tmp_path / "run"), console) == 1
    assert [line for line in text.getvalue().splitlines() if line.startswith("Warning: ")] == [
        f"Warning: {records} cannot be written: No space left on device; the run goes on and tries again.",
        f"Warning: {records} lacks its last 3 lines: No space left on device.",
    ]


def test_a_gpu_lost_to_this_process_ends_the_sweep_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = play(monkeypatch, OK, DeviceLost("CUDA error: illegal memory access"))
    assert status == 1
    assert "Warning: The GPU is lost to this process (CUDA error: illegal memory access)" in text


def test_a_gpu_is_locked_and_a_cpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    @contextlib.contextmanager
    def gpu(*what: Any) -> Iterator[None]:
        held.append(what[:3])
        yield

    monkeypatch.setattr(locks, "gpu", gpu)
    play(monkeypatch, OK)
    assert held == []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))
    how = dataclasses.replace(SETTINGS, device=torch.device("cuda", 0))
    monkeypatch.setattr(runner, "run", lambda *_: (row for row in [OK]))
    sweep("c", [small_case()], [MINE], how, THIS, SCREEN_ONLY, Console(file=io.StringIO()), Process(wait=False))
    assert held == [("GPU-1-2", "swiglu-bench forward", False)]


def test_a_process_that_does_not_end_ends_the_sweep_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = play(monkeypatch, OK, DoesNotEnd("Process 7 was killed and does not end."))
    assert status == 1
    assert "Warning: Process 7 was killed and does not end. The sweep ends here." in text


@pytest.mark.parametrize("ends", [OK, ERROR])
def test_logs_stay_where_a_row_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: Record) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def run(*_: Any, logs: Path, timeout_s: float) -> Iterator[Record]:
        assert timeout_s == 7.0
        (logs / "mine.log").write_text("said", encoding="utf-8")
        (logs / "silent.log").touch()
        yield ends

    monkeypatch.setattr(parent, "run", run)
    for output in (into(tmp_path / "run"), SCREEN_ONLY):
        console = Console(file=io.StringIO(), color_system=None)
        sweep("c", [small_case()], [MINE], SETTINGS, THIS, output, console, Process(timeout_s=7.0))
    assert [path.name for path in (tmp_path / "run" / "logs").iterdir()] == ["mine.log"]
    left = [path.name for path in (tmp_path / "temporary").rglob("*.log")]
    assert left == (["mine.log"] if ends is ERROR else [])
