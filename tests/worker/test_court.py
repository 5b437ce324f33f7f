"""Real child processes on a CPU: what a contender does to its own process costs its own row and nobody else's."""

import dataclasses
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bad_implementations as bad
import pytest
import torch
import user_implementations as mine
from courts import run_here
from from_files import from_file
from specimens import small_case

from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check import usage
from swiglu_bench.contenders import peers, pytorch
from swiglu_bench.machine import ceilings_cache, machine, sources
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.tasks.sweep import task_of
from swiglu_bench.worker import chains, child, court, policy
from swiglu_bench.worker.chains import Chains
from swiglu_bench.worker.court import Court, declare, log_name
from swiglu_bench.worker.policy import Settings, Task

pytestmark = pytest.mark.timed

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
RULE = Rule(warmup_rounds=1, min_rounds=4, max_rounds=4, min_s=0.0, budget_s=60.0)
FORWARD = small_case(mode=Mode.FORWARD)
EAGER, PACKED = pytorch.eager, pytorch.eager_packed


def settings(task: Task = Task.TIME) -> Settings:
    return Settings(task, CPU, "c", "r", rule=RULE)


def a_court(logs: Path, timeout_s: float = 60.0, task: Task = Task.TIME) -> Court:
    logs.mkdir(exist_ok=True)
    return Court(settings(task), THIS, timeout_s, logs)


def run_case(these: Court, implementations: Sequence[Implementation], case: Case = FORWARD) -> dict[str, Record]:
    found = list(these.run(task_of(these.settings), case, implementations))
    assert len(found) == len(implementations)
    return {record.implementation: record for record in found}


def run(logs: Path, implementations: Sequence[Implementation], **options: Any) -> dict[str, Record]:
    found = a_court(logs, **options)
    try:
        return run_case(found, implementations)
    finally:
        found.end()


def others_are_ok(found: dict[str, Record]) -> None:
    for name in ("eager", "eager-packed"):
        assert (found[name].status, found[name].baseline, found[name].rounds) == (Status.OK, "eager", 4), found[name]


WALL_CLOCK = Chains.disagreements


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the wall clock confirms nobody's samples."""
    monkeypatch.setattr(Chains, "disagreements", lambda *_: {})


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("court") / "logs"


@pytest.fixture(scope="module")
def shared(logs: Path) -> Iterator[Court]:
    """Processes that go from test to test, as they go from case to case."""
    found = a_court(logs)
    yield found
    found.end()


def test_the_same_rows_as_in_one_process(shared: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_cache, "ceilings", lambda *_: ceilings_cache.Ceilings(10.0, 0.1))
    everyone = [EAGER, PACKED, from_file(mine.swapped), from_file(mine.frozen), peers.liger]
    case = small_case()
    apart = run_case(shared, everyone, case)
    together = run_here([case], [EAGER, PACKED, mine.swapped, mine.frozen, peers.liger], settings(), THIS)
    for record in together:
        other = apart[record.implementation]
        assert (other.status, other.baseline) == (record.status, record.baseline), other.reason
        assert [check.tensor for check in other.tensor_checks] == [check.tensor for check in record.tensor_checks]
        for name in ("time_ms", "ratio", "first_call_ms", "aa_ratio", "error"):
            assert (getattr(other, name) is None) == (getattr(record, name) is None), name
        assert len(other.samples_ms) == len(record.samples_ms)


COMPILED = """
import os
import torch
from swiglu_bench import Step, implementation

def rows(problem, weights):
    def forward(x):
        with open({log!r}, "a") as file:
            print(os.getpid(), len(x), file=file)
        return torch.nn.functional.silu(x @ weights["w_gate"].T) * (x @ weights["w_up"].T)
    return Step(forward)

@implementation("sound-{run}", scopes=("glu",), description="compiles", backend="inductor")
def sound(problem):
    return rows(problem, problem.parameters)

@implementation("copying-{run}", scopes=("glu",), description="has copies of the weights", backend="inductor")
def copying(problem):
    own = {{name: value.detach().clone().requires_grad_() for name, value in problem.parameters.items()}}
    return rows(problem, own)
"""


def test_what_compiles_is_first_used_as_by_a_model_in_processes_for_nothing_else(shared: Court, tmp_path: Path) -> None:
    source, calls = tmp_path / "compiled.py", tmp_path / "calls"
    run = tmp_path.name  # a shared court keeps processes by their contenders' names, from one try to the next
    source.write_text(COMPILED.format(log=str(calls), run=run), encoding="utf-8")
    found = run_case(shared, [EAGER, *(declare(f"{source}:{name}", 60.0) for name in ("sound", "copying"))])
    sound, copying = found[f"sound-{run}"], found[f"copying-{run}"]
    assert (sound.status, copying.status) == (Status.OK, Status.INCORRECT), copying.reason
    assert {check.check for check in copying.tensor_checks if not check.ok} == {"use"}
    at = {tokens: {pid for pid, rows in map(str.split, calls.read_text().splitlines()) if rows == str(tokens)}
          for tokens in (FORWARD.tokens, usage.TOKENS)}  # fmt: skip
    assert len(at[usage.TOKENS]) == 2, "by one process of each"
    assert at[usage.TOKENS] < at[FORWARD.tokens], "which has compiled the case before"
    assert len(at[FORWARD.tokens]) == 4, "and another of each is timed"


# Deaths

DEATHS = {
    "exits": "exit status 3", "leaves": "exit status 4", "aborts": "SIGABRT", "faults": "SIGSEGV", "killed": "SIGKILL",
    "dies-when-built": "exit status 7",
}  # fmt: skip


def test_a_death_while_checked_costs_one_row_and_names_its_reason(shared: Court, logs: Path) -> None:
    culprits = [one for one in vars(bad).values() if isinstance(one, Implementation) and one.name in DEATHS]
    everyone = [*map(from_file, culprits), EAGER, PACKED, from_file(bad.full)]
    for tokens in (3, 7):
        found = run_case(shared, everyone, dataclasses.replace(FORWARD, tokens=tokens))
        others_are_ok(found)
        for name, reason in DEATHS.items():
            assert (found[name].status, reason in found[name].reason) == (Status.ERROR, True), found[name].reason
        assert "Fatal Python error" in found["faults"].reason
        assert "building" in found["dies-when-built"].reason
        assert "MemoryError: no room at all" in found["full"].reason
        for name in ("faults", "aborts", "dies-when-built", "full"):
            assert str(logs / log_name(name)) in found[name].reason
        assert "in out_of_memory" in (logs / "full.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "culprits",
    [
        {bad.exits_late: "exit status 5", bad.alarmed: "SIGALRM", bad.unspeakable: "Unspeakable"},
        dict.fromkeys((bad.no_json, bad.other_report, bad.babbles, bad.shouts), "malformed")
        | ({bad.forks: "another process answered"} if sys.platform == "linux" else {}),
    ],
    ids=["deaths", "lies"],
)
def test_a_death_while_timed_or_what_is_no_report_costs_one_row(
    shared: Court, culprits: dict[Implementation, str]
) -> None:
    """Also a death by a timer that nobody can tell when it rings, and an exception whose text cannot be had."""
    found = run_case(shared, [*map(from_file, culprits), EAGER, PACKED])
    others_are_ok(found)
    for culprit, reason in culprits.items():
        row = found[culprit.name]
        assert (row.status, reason in row.reason) == (Status.ERROR, True), row.reason
        assert (row.time_ms, row.samples_ms) == (None, ())
        assert "Traceback" not in row.reason
        assert "\n" not in row.reason


def test_a_hang_costs_one_row(tmp_path: Path) -> None:
    """When it is checked, when it is timed, and in the middle of what it says."""
    hangs = [bad.hangs, bad.hangs_late, bad.begins_a_sentence]
    found = run(tmp_path, [*map(from_file, hangs), EAGER, PACKED], timeout_s=3.0)
    others_are_ok(found)
    for one in hangs:
        assert (found[one.name].status, "--timeout" in found[one.name].reason) == (Status.ERROR, True)
    assert "turning and turning" in found["hangs"].reason


# Manners


@pytest.mark.parametrize(
    ("culprit", "check"),
    [
        (bad.burns_threads, "slows others"), (bad.burns_child, "slows others"), (bad.edits, "wall clock"),
        (mine.stale, "timed loop"),
    ],
    ids=lambda one: getattr(one, "name", one),
)  # fmt: skip
def test_what_harms_a_measurement_is_named_and_the_others_are_timed(
    shared: Court, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, culprit: Implementation, check: str
) -> None:
    if check == "wall clock":
        monkeypatch.setattr(Chains, "disagreements", WALL_CLOCK)
        monkeypatch.setitem(chains.UNSEEN_MS, "cpu", 1.0)  # its calls take 2 ms more than it says
    burns, everyone = check == "slows others", [from_file(culprit), EAGER, PACKED]
    found = run(tmp_path, everyone) if burns else run_case(shared, everyone)
    record = found[culprit.name]
    assert record.time_ms is None
    if check == "wall clock" and Status.UNSETTLED in {row.status for row in found.values()}:
        return  # as a busy machine leaves it
    assert (record.status, record.tensor_checks[-1].check) == (Status.INCORRECT, check), record.reason
    others_are_ok(found)
    assert not _processes_of(tmp_path)


# Whatever else can go wrong


def test_a_package_that_kills_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly_package.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    culprit = dataclasses.replace(from_file(bad.sound), package="deadly_package")
    found = run(tmp_path / "logs", [culprit, EAGER, PACKED], task=Task.VERIFY)
    assert found["eager"].status is found["eager-packed"].status is Status.OK
    assert "exit status 9" in found["sound"].reason


@pytest.mark.parametrize(("dies", "reason"), [(True, "SIGKILL"), (False, "no_such_question")])
def test_the_judge_s_death_or_failure_costs_one_case(
    shared: Court, monkeypatch: pytest.MonkeyPatch, dies: bool, reason: str
) -> None:
    run_case(shared, [EAGER, PACKED])
    real = court._JudgeProxy.__getattr__

    def break_off(self: Any, name: str) -> Any:
        if name == "compare" and dies:
            os.kill(self._child.pid, 9)
        return real(self, reason if name == "compare" and not dies else name)

    with monkeypatch.context() as patch:
        patch.setattr(court._JudgeProxy, "__getattr__", break_off)
        lost = run_case(shared, [EAGER, PACKED])
    assert [record.status for record in lost.values()] == [Status.ERROR, Status.ERROR]
    assert all("The judge's process failed" in row.reason and reason in row.reason for row in lost.values())
    assert shared._judge is not None
    assert shared._judge.ended, "it may hold most of the memory"
    others_are_ok(run_case(shared, [EAGER, PACKED]))


def test_a_process_that_cannot_be_had_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(target: Any, pipe: Any, role: str, *more: Any) -> Any:
        if role in wanting:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(target, pipe, role, *more)

    real, wanting = child.forkserver.fork, {child.worker.CONTENDER}
    with monkeypatch.context() as patch:
        patch.setattr(child.forkserver, "fork", fork)
        assert "Resource temporarily unavailable" in run(tmp_path, [EAGER])["eager"].reason
        wanting = {child.worker.JUDGE}
        assert "Resource temporarily unavailable" in run(tmp_path, [EAGER])["eager"].reason
    (tmp_path / "mine.log").mkdir()
    found = run(tmp_path, [from_file(mine.mine), EAGER, PACKED])
    assert (found["mine"].status, str(tmp_path / "mine.log") in found["mine"].reason) == (Status.ERROR, True)
    others_are_ok(found)


def test_a_process_whose_modules_are_not_the_parent_s_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = sources.origins() | {"swiglu_kernels": "/elsewhere/swiglu_kernels/__init__.py"}
    monkeypatch.setattr(sources, "origins", lambda: there)
    with pytest.raises(child.Died, match=r"swiglu_kernels would come from .* in the parent it comes from /elsewhere"):
        child.Child(child.worker.CONTENDER, tmp_path / "a.log").ask(60.0, "declare", "nothing")


def test_a_file_that_changes_during_the_sweep_costs_its_own_row(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(mine.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    declared = declare(f"{file}:mine", 60.0)
    file.write_text("mine = 3", encoding="utf-8")
    found = run(tmp_path / "logs", [EAGER, declared], task=Task.VERIFY)
    assert "has no implementation 'mine'" in found["mine"].reason
    assert found["eager"].status is Status.OK


def test_a_process_lives_over_all_cases_unless_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Counted(child.Child):
        def __init__(self, role: str, log: Path, *more: Any, **options: Any) -> None:
            started.append(log.stem)
            super().__init__(role, log, *more, **options)

    monkeypatch.setattr(court, "Child", Counted)
    together = a_court(tmp_path)
    for tokens in (1, 2):
        run_case(together, [EAGER, PACKED, peers.liger], dataclasses.replace(FORWARD, tokens=tokens))
    together.end()
    assert len(started) == 6, "the judge, two contenders and three more processes of the baseline"
    assert "liger" not in started
    started.clear()
    monkeypatch.setattr(policy, "seats", lambda *_, **__: 5)  # the baseline, its three twins, and one more
    found = run(tmp_path, [EAGER, PACKED, from_file(mine.mine)])
    others_are_ok(found)
    assert found["mine"].status is Status.OK, found["mine"].reason
    assert (started.count("eager-packed"), started.count("mine")) == (2, 2), "for the check and for its group's rounds"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are counted in /proc")
@pytest.mark.parametrize("others", [[bad.burns_child, bad.sound], [bad.hangs, bad.burns_child]], ids=["", "checked"])
def test_nothing_is_left_when_the_caller_stops(tmp_path: Path, others: list[Implementation]) -> None:
    before = set(Path("/dev/shm").glob("swiglu-bench-*"))
    everyone = [peers.liger, EAGER, *map(from_file, others)]
    stream = run_here([FORWARD], everyone, settings(Task.VERIFY), THIS, logs=tmp_path, timeout_s=3600.0)
    assert [next(stream).implementation for _ in range(2)] == ["liger", "eager"]
    assert _processes_of(tmp_path)
    stream.close()  # type: ignore[attr-defined]
    assert not _processes_of(tmp_path)
    assert not set(Path("/dev/shm").glob("swiglu-bench-*")) - before


def test_what_is_not_timed_is_checked_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    everyone = [from_file(bad.hangs), EAGER, PACKED, from_file(bad.sound)]
    together, told = a_court(tmp_path, 6.0, Task.VERIFY), []
    together.tell = lambda *_: told.append(time.monotonic())
    found = list(together.run(task_of(together.settings), FORWARD, everyone))
    together.end()
    assert [record.implementation for record in found] == ["eager", "hangs", "eager-packed", "sound"]
    assert [record.status for record in found] == [Status.OK, Status.ERROR, Status.OK, Status.OK]
    assert told[-1] - told[-2] < 1.0, "what came after the one that hangs was done before its time was up"


def _processes_of(logs: Path) -> list[str]:
    """Those that print into a folder's logs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/2"):
        try:
            found += [entry.parts[2]] if os.readlink(entry).startswith(str(logs)) else []
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "judge", "x" * 500, "nul\0", "\udc80"])
def test_a_log_s_name_is_one_plain_name_of_its_own(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,70}\.log", log_name(name))
    assert log_name(name) not in {"judge.log", log_name("eager"), log_name("a-b")}
    assert log_name("eager-packed") == "eager-packed.log"


# On a GPU a broken context, too, dies with its process


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("culprit", [bad.asserts, bad.asserts_late, bad.busy], ids=lambda one: one.name)
def test_what_breaks_the_gpu_for_its_process_costs_one_row(tmp_path: Path, culprit: Implementation) -> None:
    device = torch.device("cuda", 0)
    how = Settings(Task.TIME, device, "c", "r", rule=RULE)
    cases = [dataclasses.replace(FORWARD, tokens=tokens) for tokens in (3, 7)]
    this, everyone = machine.describe(device), [from_file(culprit), EAGER, PACKED]
    found = list(run_here(cases, everyone, how, this, logs=tmp_path, timeout_s=30.0))
    assert len(found) == 6
    for record in found:
        assert record.status is (Status.ERROR if record.implementation == culprit.name else Status.OK), record.reason
        if record.implementation == culprit.name:
            assert ("--timeout" if culprit is bad.busy else "it broke the GPU for its process") in record.reason
    assert multiprocessing.active_children() == []


def test_what_was_asked_before_a_stop_answers_no_later_question() -> None:
    stops, (pipe, other), (sentinel, _alive) = [True, False, False], multiprocessing.Pipe(), multiprocessing.Pipe()
    asked = object.__new__(child.Child)
    asked.log, asked._owed, asked._suspended, asked._took, asked._trusted = Path("log"), 0, False, {}, True
    asked._pipe, asked._process = pipe, SimpleNamespace(sentinel=sentinel)  # type: ignore[assignment]
    asked._stop = lambda: stops.pop(0)
    with pytest.raises(child.Stopped):
        asked.ask(5.0, "first")
    for answer in ("of the first", "of the second"):
        other.send(("answer", answer))
    assert asked.ask(5.0, "second") == "of the second"
    assert [other.recv()[0] for _ in range(2)] == ["first", "second"]
