"""Each kind of death, by real child processes on a CPU."""

import dataclasses
import multiprocessing
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deadly_implementations as deadly
import pytest
import torch
import user_implementations as mine
from from_files import from_file
from specimens import small_case

from swiglu_bench.check.inputs import make_problem
from swiglu_bench.implementations import liger, pytorch
from swiglu_bench.machine import machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.processes import parent
from swiglu_bench.processes.parent import declare, log_name
from swiglu_bench.processes.worker import RunCase
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.session import session
from swiglu_bench.session.settings import Progress, Settings, Task
from swiglu_bench.spec import registry
from swiglu_bench.spec.cases import Case, Mode
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.spec.implementation import Implementation

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
RULE = Rule(warmup_rounds=2, min_rounds=4, max_rounds=4, budget_s=60.0)


def run(
    logs: Path, implementations: list[Implementation], cases: list[Case] | None = None, timeout_s: float = 60.0,
    task: Task = Task.TIME, told: list[Progress] | None = None,
) -> Iterator[Record]:  # fmt: skip
    how = Settings(task, CPU, "c", "r", rule=RULE)
    listen = (lambda progress: None) if told is None else told.append
    cases = cases or [small_case(mode=Mode.FORWARD)]
    logs.mkdir(exist_ok=True)
    return parent.run(cases, implementations, how, THIS, listen, timeout_s=timeout_s, logs=logs)


def rows(*arguments: Any, **options: Any) -> dict[str, Record]:
    return {record.implementation: record for record in run(*arguments, **options)}


def tensors(record: Record) -> list[str]:
    """Their errors are on unannounced inputs, and so never the same twice."""
    return re.findall(r"(\w+)=", record.errors)


def test_the_same_rows_as_in_one_process(tmp_path: Path) -> None:
    everyone = [pytorch.eager, pytorch.eager_packed, from_file(mine.swapped), from_file(mine.stale), liger.liger]
    case = small_case()
    apart = {record.implementation: record for record in run(tmp_path, everyone, [case])}
    how = Settings(Task.TIME, CPU, "c", "r", rule=RULE)
    same = [pytorch.eager, pytorch.eager_packed, mine.swapped, mine.stale, liger.liger]
    together = session.run([case], same, how, THIS)
    for record in together:
        other = apart[record.implementation]
        assert (other.status, other.baseline) == (record.status, record.baseline)
        assert other.reason.split(" (")[0] == record.reason.split(" (")[0]
        assert tensors(other) == tensors(record) or record.status is not Status.OK
        assert (other.time_ms is None) == (record.time_ms is None)
        assert (other.ratio is None) == (record.ratio is None)
        assert (other.first_call_ms is None) == (record.first_call_ms is None)
        assert len(other.samples_ms) == len(record.samples_ms)
    assert len(apart) == 5


DEATHS = {
    "exits": "its process ended with exit status 3; it printed nothing.",
    "leaves": "its process ended with exit status 4; it printed nothing.",
    "aborts": "its process was killed by SIGABRT; its log {log} says: Fatal Python error: Aborted",
    "faults": "its process was killed by SIGSEGV; its log {log} says: Fatal Python error: Segmentation fault",
    "killed": "its process was killed by SIGKILL, as a system does when its memory runs out; it printed nothing.",
    "dies-when-built": "its process ended with exit status 7; its log {log} ends: building.",
    "../../escapes": "its process ended with exit status 6; it printed nothing.",
}


def test_a_death_while_checked_costs_one_row_and_names_its_reason(tmp_path: Path) -> None:
    culprits = [one for one in vars(deadly).values() if isinstance(one, Implementation) and one.name in DEATHS]
    assert len(culprits) == len(DEATHS)
    cases = [small_case(mode=Mode.FORWARD, tokens=tokens) for tokens in (3, 7)]
    found = list(run(tmp_path / "logs", [*map(from_file, culprits), pytorch.eager, from_file(deadly.full)], cases))
    for case in cases:
        of_case = {record.implementation: record for record in found if record.tokens == case.tokens}
        assert len(of_case) == len(DEATHS) + 2
        for name, reason in DEATHS.items():
            expected = "While it was checked, " + reason.format(log=tmp_path / "logs" / log_name(name))
            assert of_case[name].status is Status.ERROR
            assert of_case[name].reason.startswith(expected)
        log = tmp_path / "logs" / "full.log"
        assert of_case["full"].reason == f"MemoryError: no room at all (log: {log})"
        assert "in out_of_memory" in log.read_text(encoding="utf-8")
        assert (of_case["eager"].status, of_case["eager"].ratio) == (Status.OK, 1.0)
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}, "a name with ../ stays inside"
    assert {path.name for path in (tmp_path / "logs").iterdir()} >= {"full.log", log_name("../../escapes")}


@pytest.mark.parametrize("where", ["sound.log", "measuring.log"])
def test_a_package_that_kills_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Beforehand, and so outside of any check: in its own process it costs its row, in the other's nobody's."""
    package = tmp_path / "deadly_package.py"
    package.write_text(f"import os\nif os.readlink('/proc/self/fd/2').endswith({where!r}):\n    os._exit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    culprit = dataclasses.replace(from_file(deadly.sound), package="deadly_package")
    found = rows(tmp_path / "logs", [culprit, pytorch.eager])
    assert found["eager"].status is Status.OK, found["eager"].reason
    if where == "measuring.log":
        assert found["sound"].status is Status.OK, found["sound"].reason
    else:
        expected = "While it was checked, its process ended with exit status 9; it printed nothing."
        assert found["sound"].reason == expected


def test_a_hang_costs_one_row(tmp_path: Path) -> None:
    found = rows(tmp_path, [from_file(deadly.hangs), pytorch.eager], timeout_s=1.0)
    expected = f"it took longer than 1 s (--timeout); its log {tmp_path / 'hangs.log'} ends: turning and turning."
    assert found["hangs"].reason == f"While it was checked, {expected}"
    assert found["eager"].status is Status.OK


def test_a_death_while_measured_names_the_culprit_and_the_others_start_again(tmp_path: Path) -> None:
    everyone = [pytorch.eager, from_file(deadly.exits_late), from_file(deadly.hangs_late), pytorch.eager_packed]
    found = rows(tmp_path, everyone, timeout_s=1.0)
    late = "While it was measured beside the others, "
    assert found["exits-late"].reason == f"{late}its process ended with exit status 5; it printed nothing."
    assert found["hangs-late"].reason.startswith(f"{late}it took longer than 1 s (--timeout); its log ")
    for name in ("exits-late", "hangs-late"):
        assert (found[name].status, found[name].time_ms, found[name].samples_ms) == (Status.ERROR, None, ())
    for name in ("eager", "eager-packed"):
        assert (found[name].status, found[name].baseline, found[name].rounds) == (Status.OK, "eager", 4)


@pytest.mark.parametrize("task", [Task.VERIFY, Task.MEMORY])
def test_every_task_is_isolated(tmp_path: Path, task: Task) -> None:
    found = rows(tmp_path, [from_file(deadly.exits), pytorch.eager], [small_case()], task=task)
    assert found["exits"].status is Status.ERROR
    assert found["eager"].status is Status.OK
    assert (found["eager"].peak_bytes is None) == (task is not Task.MEMORY)


def test_the_suite_s_own_death_is_everyone_s_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(self: Any, job: Any, *arguments: Any) -> Any:
        if isinstance(job, RunCase) and len(job.implementations) > 1:
            os.kill(self._process.pid, 9)
        return ask(self, job, *arguments)

    ask = parent.Child.ask
    monkeypatch.setattr(parent.Child, "ask", break_off)
    found = rows(tmp_path, [pytorch.eager, pytorch.eager_packed])
    assert [record.status for record in found.values()] == [Status.ERROR, Status.ERROR]
    assert all("was killed by SIGKILL" in record.reason for record in found.values())


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "eager.log").mkdir()
    reason = rows(tmp_path, [pytorch.eager, pytorch.eager_packed])["eager"].reason
    assert reason == f"While it was checked, its log {tmp_path / 'eager.log'} cannot be written: Is a directory."


def test_a_process_that_cannot_be_started_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("swiglu_bench.processes.forkserver.fork", fork)
    reason = rows(tmp_path, [pytorch.eager], task=Task.VERIFY)["eager"].reason
    assert reason.startswith("While it was checked, its process could not be started (")
    assert "Resource temporarily unavailable" in reason


def test_a_file_that_changes_during_the_sweep_costs_its_own_row(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(mine.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    declared = declare(f"{file}:mine", 60.0)
    file.write_text("mine = 3", encoding="utf-8")
    found = rows(tmp_path / "logs", [pytorch.eager, declared], task=Task.VERIFY)
    assert "has no implementation 'mine'" in found["mine"].reason
    assert found["eager"].status is Status.OK


def test_what_cannot_run_here_needs_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "Child", lambda log: pytest.fail("a process was started"))
    assert rows(tmp_path, [liger.liger])["liger"].status is Status.SKIPPED


def test_a_process_lives_over_all_cases_unless_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Counted(parent.Child):
        def __init__(self, log: Path, *more: Any) -> None:
            started.append(log.stem)
            super().__init__(log, *more)

    monkeypatch.setattr(parent, "Child", Counted)
    cases = [small_case(mode=Mode.FORWARD, tokens=tokens) for tokens in (1, 2)]
    list(run(tmp_path, [pytorch.eager, pytorch.eager_packed], cases))
    assert started == ["measuring", "eager", "eager-packed"]
    started.clear()
    monkeypatch.setattr(parent, "IDLE_SHARE", 0.0)
    list(run(tmp_path, [pytorch.eager, pytorch.eager_packed], cases))
    assert started == ["measuring", "eager", "eager-packed", "eager", "eager-packed"]


def test_progress_goes_forward(tmp_path: Path) -> None:
    told: list[Progress] = []
    rows(tmp_path, [pytorch.eager, pytorch.eager_packed], told=told)
    assert [progress.doing for progress in told][:3] == ["preparing", "checking eager", "checking eager-packed"]
    assert told[-1].doing == "timing, round 4"
    fractions = [progress.fraction for progress in told]
    assert fractions == sorted(fractions)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are counted in /proc")
def test_nothing_is_left_when_the_caller_stops(tmp_path: Path) -> None:
    stream = run(tmp_path, [liger.liger, pytorch.eager, from_file(deadly.sound)], task=Task.VERIFY)
    assert [next(stream).implementation for _ in range(2)] == ["liger", "eager"]
    assert len(multiprocessing.active_children()) == 2, "both that can run here"
    stream.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _log_of(pid).startswith(str(tmp_path))]


def _log_of(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return ""


# On a GPU a broken context, too, dies with its process


@pytest.mark.gpu
@pytest.mark.parametrize("culprit", [deadly.asserts, deadly.asserts_late, deadly.busy], ids=lambda one: one.name)
def test_what_breaks_the_gpu_for_its_process_costs_one_row(tmp_path: Path, culprit: Implementation) -> None:
    device = torch.device("cuda", 0)
    how = Settings(Task.TIME, device, "c", "r", rule=RULE)
    cases = [small_case(mode=Mode.FORWARD, tokens=tokens) for tokens in (3, 7)]
    this, everyone = machine.describe(device), [from_file(culprit), pytorch.eager, pytorch.eager_packed]
    found = list(parent.run(cases, everyone, how, this, lambda told: None, timeout_s=30.0, logs=tmp_path))
    assert len(found) == 6
    for record in found:
        assert record.status is (Status.ERROR if record.implementation == culprit.name else Status.OK), record.reason
        if record.implementation == culprit.name:
            assert ("--timeout" if culprit is deadly.busy else "it broke the GPU for its process") in record.reason


# What other packages and files declare


def test_what_a_file_declares_comes_without_its_code() -> None:
    address = f"{mine.__file__}:frozen"
    declared = declare(address, 60.0)
    assert declared == dataclasses.replace(mine.frozen.declared(), source=declared.source)
    assert (declared.address, declared.file) == (address, mine.__file__)
    with pytest.raises(AssertionError, match="has declarations only"):
        declared.build(make_problem(small_case(), "cpu"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('not\\ntoday')", r"bad\.py failed to import: RuntimeError: not today\."),
        ("import os; print('bye', flush=True); os._exit(9)", r"exit status 9; its log .*import\.log ends: bye\."),
        ("import sys; sys.exit(2)", r"bad\.py failed to import: SystemExit: 2\."),
        ("while True: pass", r"bad\.py:mine cannot be imported: it took longer than 1 s \(--timeout\)"),
        ("mine = 3", r"bad\.py has no implementation 'mine'; it offers: none"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_before_the_work(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "bad.py").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        declare(f"{tmp_path / 'bad.py'}:mine", 1.0)
    assert re.search(reason, str(refused.value))
    assert "\n" not in str(refused.value)


def test_an_entry_point_is_loaded_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[swiglu_bench.implementations]\ntheirs = theirs_module:sound\nworse = theirs_worse:x\n", encoding="utf-8"
    )
    (tmp_path / "theirs_module.py").write_text(Path(deadly.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "theirs_worse.py").write_text("import os; os.abort()", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    good, worse = registry.entry_point_addresses()
    theirs = declare(good, 60.0)
    assert (theirs.name, theirs.source) == ("sound", "theirs_module")
    assert rows(tmp_path / "logs", [theirs], task=Task.VERIFY)["sound"].status is Status.OK
    with pytest.raises(BadInput, match=r"worse = theirs_worse:x cannot be imported: its process was killed by SIGABRT"):
        declare(worse, 60.0)


# Names of files


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a/b", "..", "", "measuring", "x" * 500, "a b", "é", "nul\0", "\udc80", "eager.log"]
)
def test_a_log_s_name_is_one_plain_name_of_its_own(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,70}\.log", log_name(name))
    assert log_name(name) not in {log_name(None), log_name("eager"), log_name("a-b")}


def test_a_plain_name_is_its_log_s_name() -> None:
    assert (log_name("eager-packed"), log_name(None)) == ("eager-packed.log", "measuring.log")
