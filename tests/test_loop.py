import contextlib
import dataclasses
import io
import json
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from courts import one_device
from gpus import a_gpu
from rich.console import Console
from specimens import a_record, small_case, without_time

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.contenders import pytorch
from swiglu_bench.loop import NoPlace, Schedule, rows, sweep
from swiglu_bench.machine import locks, machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.options import TimingOptions
from swiglu_bench.request import INTERRUPTED, Request
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.figures import CutShort
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.worker import policy
from swiglu_bench.worker.child import DoesNotEnd
from swiglu_bench.worker.court import CaseTask, Court
from swiglu_bench.worker.places import CaseRows, Lost, Place, Work
from swiglu_bench.worker.policy import Settings, Task

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
NO_TIME = dataclasses.replace(without_time(Status.SKIPPED, "more than the budget"), stopped_by="budget")
BUSY = without_time(Status.UNSETTLED, "busy", implementation="mine")
INCORRECT, ERROR = without_time(Status.INCORRECT, "output: wrong."), without_time(Status.ERROR, "broken")


class FakeWandb:
    """Stands in for W&B: takes rows and remembers how it was opened and closed."""

    opened: list["FakeWandb"]
    url_or_path = place = "https://wandb.example/run"

    def __init__(self, **options: Any) -> None:
        self.options, self.rows, self.closed = options, list[Record](), list[int]()
        self.write, self.close = self.rows.append, lambda: self.closed.append(1)
        FakeWandb.opened.append(self)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    FakeWandb.opened = []
    module = types.SimpleNamespace(WandbRun=FakeWandb)
    monkeypatch.setitem(sys.modules, "swiglu_bench.show.wandb_run", module)


def run_sweep(
    task: CaseTask, how: Settings = SETTINGS, cases: Any = CASES[:1], chosen: Any = (MINE,),
    screen: dict[str, Any] | None = None, **options: Any,
) -> tuple[int, str]:  # fmt: skip
    """The exit status and the text of a sweep; it writes files only with `out`."""
    wanted = TimingOptions(**{"csv": "out" in options} | options)
    text = io.StringIO()
    console = Console(file=text, **{"width": 100, "color_system": None} | (screen or {}))
    request = Request("forward", wanted, how, cases, chosen, one_device(how, THIS))
    return sweep(request, task, THIS, console), text.getvalue()


def play(*events: Record | BaseException, **options: Any) -> tuple[int, str]:
    """A sweep whose task yields these rows or raises."""

    def task(*_: object) -> Iterator[Record]:
        for event in events:
            if isinstance(event, BaseException):
                raise event
            yield event

    return run_sweep(task, **options)


def test_the_exit_status() -> None:
    for *events, status in (
        (1,), (OK, SKIPPED, 0), (SKIPPED, SKIPPED, 3), (OK, INCORRECT, OK, 1), (ERROR, OK, 1),
        (INCORRECT, KeyboardInterrupt(), INTERRUPTED), (BUSY, 3), (OK, BUSY, 3), (BUSY, ERROR, 1),
        (OK, NO_TIME, 3), (OK, NO_TIME, INCORRECT, 1),
    ):  # fmt: skip
        assert play(*events)[0] == status, events


def attempts(*statuses: dict[str, Status], cases: Any = CASES[:2], **options: Any) -> tuple[list[str], int, str]:
    """What was run, as `tokens: names`, and the end; how MINE and OTHER end at the first case, attempt by attempt."""
    ran, left = list[str](), list(statuses)

    def task(court: Court, case: Any, chosen: Any) -> Iterator[Record]:
        ran.append(f"{case.tokens}: {' '.join(known.name for known in chosen)}")
        court.tell("timing", 0.5)
        ends = left.pop(0) if case.tokens == 1 else {}
        for known in chosen:
            row = policy.blank(court.settings, court.machine, case, known)
            status = ends.get(known.name, Status.OK)
            if status is Status.OK:
                row.time_ms = float(len(ran))
            yield row.end(status, "" if status is Status.OK else str(status))

    status, text = run_sweep(task, cases=cases, chosen=[MINE, OTHER], out=Path("run"), **options)
    return ran, status, text


def kept_rows() -> dict[tuple[int, str], tuple[str, float | None, bool]]:
    return {
        (row.tokens, row.implementation): (row.status, row.time_ms, "repeated" in row.remarks)
        for row in run_folder.read_rows(Path("run"))
    }


@pytest.mark.parametrize(
    ("second", "exit_status", "mine", "other"),
    [
        ({}, 0, ("ok", 3.0, True), ("ok", 3.0, True)),
        ({"mine": Status.UNSETTLED}, 3, ("unsettled", None, True), ("ok", 3.0, True)),
        ({"mine": Status.UNSETTLED, "other": Status.UNSETTLED}, 3, ("unsettled", None, True), ("ok", 1.0, True)),
        ({"other": Status.INCORRECT}, 1, ("ok", 3.0, True), ("incorrect", None, True)),
    ],
)
def test_an_unsettled_case_is_tried_again_at_the_end_in_another_order(
    second: dict[str, Status], exit_status: int, mine: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[float]()
    monkeypatch.setattr("swiglu_bench.show.console.Bar.tell", lambda bar, doing, done: told.append(done))
    ran, status, _ = attempts({"mine": Status.UNSETTLED}, second)
    assert ran == ["1: mine other", "2: mine other", "1: other mine"]
    assert (status, max(told)) == (exit_status, 2.0), "a repeated case is no third"
    rows = {(1, "mine"): mine, (1, "other"): other, (2, "mine"): ("ok", 2.0, False), (2, "other"): ("ok", 2.0, False)}
    assert kept_rows() == rows


def test_who_needs_no_clock_is_not_tried_again_and_nobody_where_there_is_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran, _, _ = attempts({"mine": Status.UNSETTLED, "other": Status.INCORRECT}, {})
    assert ran == ["1: mine other", "2: mine other", "1: mine"]
    assert [status for status, *_ in kept_rows().values()].count("incorrect") == 1
    monkeypatch.setattr("swiglu_bench.loop.SecondChance.in_time", lambda chance: False)
    ran, status, _ = attempts({"mine": Status.UNSETTLED}, force=True)
    assert (len(ran), status) == (2, 3)
    assert kept_rows()[1, "mine"] == ("unsettled", None, False)


def test_what_waits_for_its_second_attempt_is_kept_when_the_run_is_interrupted() -> None:
    def task(court: Court, case: Any, chosen: Any) -> Iterator[Record]:
        if case.tokens == 2:
            raise KeyboardInterrupt
        for known in chosen:
            yield policy.blank(court.settings, court.machine, case, known).end(Status.UNSETTLED, "busy")

    status, _ = run_sweep(task, cases=CASES, chosen=[MINE, OTHER], out=Path("run"))
    assert status == INTERRUPTED
    assert len(kept_rows()) == 2


@pytest.mark.parametrize("end", [None, KeyboardInterrupt(), RuntimeError("a bug")])
def test_every_writer_gets_every_row_and_is_closed(end: BaseException | None) -> None:
    wanted = {"out": Path("run"), "log_wandb": True, "wandb_project": "mine", "wandb_tags": ["a, b", "cpu"]}
    with pytest.raises(RuntimeError, match="a bug") if isinstance(end, RuntimeError) else contextlib.nullcontext():
        _, text = play(OK, INCORRECT, *([end] if end else []), **wanted)
        lines = text.splitlines()
        assert lines[2:4] == ["Rows, samples and machine: run", "W&B: https://wandb.example/run"]
        assert lines[4:] == (["Interrupted: 2 rows were kept."] if end else [])
    (run,) = FakeWandb.opened
    assert (run.rows, run.closed) == ([OK, INCORRECT], [1])
    assert list(run_folder.frame_of(run_folder.read_rows(Path("run")))["status"]) == ["ok", "incorrect"]
    about = json.loads(Path("run/run.json").read_text(encoding="utf-8"))
    assert (about["command"], about["run_id"]) == (SETTINGS.command, SETTINGS.run_id)
    assert about["machine"] == THIS.as_dict()
    assert about["options"]["out"] == "run"
    assert run.options["config"] == about
    assert (run.options["project"], run.options["folder"], run.options["group"]) == ("mine", Path("run"), "forward")
    assert (run.options["name"], run.options["tags"]) == ("forward cpu", ["forward", "cpu", "a", "b"])


@pytest.mark.parametrize("error", [DeviceLost("illegal access"), DoesNotEnd("Process 7 is there."), NoPlace("2 left.")])
def test_what_ends_a_sweep_early_is_told(error: BaseException) -> None:
    status, text = play(OK, error)
    assert status == 1
    (line,) = (line for line in text.splitlines() if line.startswith("Warning: "))
    assert str(error) in line


# Resuming, and what must not happen at the same time


class Killed(BaseException):
    """Stands for a process that ends between two rows."""


def resume(how: Settings, kill_at: int | None = None) -> tuple[list[int], str]:
    """Run what is left of CASES; the token counts that were run."""
    ran: list[int] = []

    def task(court: Court, case: Any, chosen: Any) -> Iterator[Record]:
        if case.tokens == kill_at:
            raise Killed
        ran.append(case.tokens)
        blank = partial(policy.blank, court.settings, court.machine, case)
        yield from (blank(contender).end(Status.SKIPPED, "It is only pretended.") for contender in chosen)

    with contextlib.suppress(Killed):
        status, text = run_sweep(task, how, CASES, [MINE, OTHER], out=Path("run"), resume=True)
        assert status == 3, "all rows are skipped"
        return ran, text
    return ran, ""


def test_a_kept_row_that_failed_fails_the_sweep_again() -> None:
    cases = [dataclasses.replace(CASES[0], tokens=INCORRECT.tokens, mode=INCORRECT.mode)]
    failed = [play(INCORRECT, cases=cases, out=Path("failed"), resume=True)[0] for _ in range(2)]
    assert failed == [1, 1]
    assert len(run_folder.frame_of(run_folder.read_rows(Path("failed")))) == 1


def test_resume_replaces_a_case_that_is_cut_short_or_was_run_with_other_settings() -> None:
    resume(SETTINGS)
    path = Path("run/records.csv")
    path.write_bytes(path.read_bytes()[:-30])  # a row cut short
    with pytest.warns(CutShort, match="run/records.csv"):
        assert len(run_folder.frame_of(run_folder.read_rows(Path("run")))) == 5
    ran, text = resume(dataclasses.replace(SETTINGS, run_id="second"))
    assert ran == [3]
    (told,) = (line for line in text.splitlines() if line.startswith("Warning: run/records.csv"))
    assert "--resume" in told
    otherwise = dataclasses.replace(SETTINGS, run_id="third", cold_l2=False)
    assert resume(otherwise, kill_at=3)[0] == [1, 2]
    rows = run_folder.frame_of(run_folder.read_rows(Path("run")))
    assert sorted(zip(rows["tokens"], rows["run_id"], strict=True)) == [
        (1, "third"), (1, "third"), (2, "third"), (2, "third"), (3, "second"), (3, "second"),
    ]  # fmt: skip


def test_a_folder_with_rows_needs_resume_or_force() -> None:
    run = Path("run")
    play(OK, INCORRECT, out=run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(BadInput, match=r"run has rows .*--resume .*--force"):
        play(OK, out=run)
    for options in ({"resume": True, "force": True, "out": run}, {"force": True}, {"resume": True}):
        with pytest.raises(BadInput, match=r"--resume|--force"):
            play(OK, **options)
    refusal = pytest.raises(BadInput, match=r"--out: run is being written by process \d+: swiglu-bench step; wait")
    with locks.folder(run, "swiglu-bench step"), refusal:
        play(OK, out=run, resume=True)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    play(OK, out=run, force=True)
    assert list(run_folder.frame_of(run_folder.read_rows(run))["status"]) == ["ok"]


def test_it_is_told_when_nothing_that_was_asked_for_was_timed() -> None:
    chosen = (dataclasses.replace(OTHER, name="eager"), MINE)
    rows = (dataclasses.replace(OK, implementation="eager"), SKIPPED)
    status, text = play(*rows, chosen=chosen, impl=["mine"])
    assert status == 3
    (told,) = (line for line in text.splitlines() if line.startswith("Warning: "))
    assert "mine" in told
    assert SKIPPED.reason in told
    assert play(*rows, chosen=chosen, impl=["mine,eager"])[0] == 0
    assert play(*rows, chosen=chosen)[0] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_rows_that_a_full_disk_did_not_take_fail_the_sweep() -> None:
    records = Path("run/records.csv")

    def task(*_: object) -> Iterator[Record]:
        records.unlink()
        records.symlink_to("/dev/full")
        yield OK
        yield OK

    status, text = run_sweep(task, out=Path("run"))
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
    play(OK)
    assert held == []
    monkeypatch.setattr(locks, "gpu_uuid", lambda device: "GPU-1-2")
    how = dataclasses.replace(SETTINGS, device=torch.device("cuda", 0))
    play(OK, how=how, wait=False)
    assert held == [("GPU-1-2", "swiglu-bench forward", False)]


@pytest.mark.parametrize("ends", [OK, ERROR])
def test_logs_stay_where_a_row_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: Record) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def task(court: Court, *_: Any) -> Iterator[Record]:
        assert court.timeout_s == 7.0
        (court.logs / "mine.log").write_text("said", encoding="utf-8")
        (court.logs / "silent.log").touch()
        yield ends

    for folder in ({"out": Path("run")}, {}):
        run_sweep(task, timeout=7.0, **folder)
    assert [path.name for path in Path("run/logs").iterdir()] == ["mine.log"]
    left = [path.name for path in Path("temporary").rglob("*.log")]
    assert left == (["mine.log"] if ends is ERROR else [])


# Several places


FIRST_PLACE, OTHER_PLACE = Place(0, a_gpu(0)), Place(1, a_gpu(1))


def test_a_case_whose_place_was_lost_comes_again_elsewhere_unless_there_is_no_elsewhere() -> None:
    again = Place(2, a_gpu(0))  # another process on the same GPU
    for others, taken in (([OTHER_PLACE], None), ([], 0)):
        schedule = Schedule([small_case()], False)
        assert schedule.take(FIRST_PLACE, others) == 0
        assert schedule.give_back(0, FIRST_PLACE, "it was killed") is None
        assert schedule.take(again, others) == taken, "left to the other place, which is busy"


BOTH = [pytorch.eager, pytorch.eager_packed]
ON_GPUS = dataclasses.replace(SETTINGS, device=torch.device("cuda", 0))
FOUR = [small_case(tokens=tokens) for tokens in (1, 2, 3, 4)]


class FakePlaces:
    """Does every case at once, but for what `deaths` says: (place, tokens) that end the place."""

    in_order = False
    device = torch.device("cuda", 0)

    def __init__(self, deaths: Sequence[tuple[int, int]] = (), replaced: bool = False) -> None:
        self.places = {number: Place(number, a_gpu(number)) for number in (0, 1)}
        self.doing: dict[int, tuple[str, float]] = {}
        self.joining = False
        self._deaths = list(deaths)
        self._replaced = replaced
        self._events: list[CaseRows | Lost] = []
        self.began: list[tuple[int, int]] = []

    def start(self, work: Work, changed: Any) -> None: ...

    def close(self) -> None: ...

    def begin(self, place: int, case: Case, only: Sequence[str] = ()) -> None:
        self.began.append((place, case.tokens))
        this = self.places[place].machine
        if (place, case.tokens) in self._deaths:
            del self.places[place]
            if self._replaced:
                self.places[place + 10] = Place(place + 10, this)
            self._events.append(Lost(place, "it was killed"))
        else:
            self._events.append(CaseRows(place, [policy.blank(ON_GPUS, this, case, one) for one in BOTH]))

    def wait(self, timeout_s: float) -> list[CaseRows | Lost]:
        found, self._events = self._events, []
        return found


def played(team: FakePlaces) -> tuple[dict[int, set[Status]], list[str]]:
    """The statuses by tokens, and the warnings."""
    work, warned = Work(lambda *_: iter(()), BOTH, ON_GPUS, 1.0, Path()), list[str]()
    found = list(rows(team, FOUR, work, lambda progress: None, warned.append))  # type: ignore[arg-type]
    assert len({(row.tokens, row.implementation) for row in found}) == len(found) == 8, "each row once"
    assert {row.gpu_uuid for row in found if row.status is Status.OK} == {
        f"GPU-{number % 10}" for number in team.places
    }
    return {case.tokens: {row.status for row in found if row.tokens == case.tokens} for case in FOUR}, warned


@pytest.mark.parametrize(("deaths", "last"), [([(0, 4)], Status.OK), ([(0, 4), (1, 4)], Status.ERROR)])
def test_a_place_that_dies_costs_a_retry_elsewhere_and_what_kills_two_an_error(
    deaths: list[tuple[int, int]], last: Status
) -> None:
    assert played(FakePlaces())[1] == []
    team = FakePlaces(deaths, replaced=len(deaths) == 2)
    statuses, warned = played(team)
    assert statuses == {1: {Status.OK}, 2: {Status.OK}, 3: {Status.OK}, 4: {last}}
    assert (1, 4) in team.began
    assert warned[0] == f"a GPU 0 was lost: it was killed; {FOUR[3].label} is run once more."


def test_without_a_place_the_sweep_says_what_is_left() -> None:
    with pytest.raises(NoPlace, match=r"^4 cases are left and no place to run them: a GPU 1 was lost: it was killed"):
        played(FakePlaces([(0, 4), (1, 3)]))
