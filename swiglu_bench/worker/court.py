"""The court of a device: the judge and one contender for each implementation, each in a process of its own.

A contender is imported, built, compiled, checked and timed in its own process; the others stand still meanwhile. A
crash, a hang or a broken GPU ends one process and costs one row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.system import CpuUse, Gpu, idle_share
from swiglu_bench.rows.record import Record, TensorCheck
from swiglu_bench.worker import environments, worker
from swiglu_bench.worker.child import CannotGoOn, Child, Contender, ContenderFailed, Died, InProcess
from swiglu_bench.worker.judge_bench import JudgeBench
from swiglu_bench.worker.policy import Settings, Tell
from swiglu_bench.worker.workbench import Workbench, forget_compiled
from swiglu_bench.worker.worker import Malformed

T = TypeVar("T")
IDLE_S, SETTLE_S, LOOK_S, LOOKS = 0.1, 1.0, 0.5, 3
QUIET = 0.05
"""Share of a CPU below which a process counts as idle without a second look."""
JUDGE_LIMIT_S = 86_400.0
"""The suite's own work has no limit of its own."""


class JudgeLost(CannotGoOn):
    """The judge's process cannot answer; the case is lost, and the next case starts a new one. One phrase."""


class Judging(Protocol):
    """Where results are judged: a court, or the ranks of a group."""

    settings: Settings

    @property
    def judge(self) -> JudgeBench:
        """The judge, or a proxy that calls its methods in its process."""
        ...


@dataclass
class CourtMemory:
    """What a court keeps from case to case."""

    used: dict[tuple[str, ...], tuple[TensorCheck, ...]] = field(default_factory=dict)
    """Verdicts on how a model uses an implementation."""
    rehearsed: set[tuple[object, ...]] = field(default_factory=set)
    """Implementations with the shape, scope, mode and dtype for which they were compiled beforehand."""
    rests: set[str] = field(default_factory=set)
    """Contenders whose processes were seen to be idle."""
    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    measured_again: set[str] = field(default_factory=set)
    """Data types whose ceilings this run's own products have contradicted."""
    gpu: Gpu | None = None
    gpu_note: str | None = None


class _JudgeProxy:
    """A JudgeBench in another process; one that fails is ended, for it may hold most of the device's memory."""

    def __init__(self, child: Child, turn: threading.Lock) -> None:
        self._child, self._turn = child, turn  # which the thread holds that asks

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            try:
                with self._turn:
                    return self._child.ask(JUDGE_LIMIT_S, name, *arguments)
            except (Died, ContenderFailed, Malformed) as error:
                self._child.end()
                raise JudgeLost(str(error)) from error

        return ask


class Court:
    """The judge and the contenders of a run on one device."""

    def __init__(
        self, settings: Settings, this_machine: Machine, timeout_s: float = 0.0, logs: Path = Path(), *,
        environment: Mapping[str, str] | None = None, stop: Callable[[], bool] = lambda: False,
        bench: type = Workbench, in_process: bool = False,
    ) -> None:  # fmt: skip
        """What contenders print goes to files in `logs`; `timeout_s` limits each of their answers.

        `environment` and `stop` are those of `child.Child`. `bench` is the class that answers in a contender's process.
        With `in_process` the judge and all contenders are in this process, for debugging: a crash or a hang ends it,
        and what a contender raises is not caught here.
        """
        self.settings, self.machine = settings, this_machine
        self.timeout_s, self.logs = timeout_s, logs
        self.tell: Tell = lambda doing, share: None
        """Hears what is being done and which share of the case is done."""
        self.kept = CourtMemory()
        self._halt = threading.Event()
        self._child = partial(Child, stop=lambda: self._halt.is_set() or stop())
        self._environment = dict(environment or {})
        self._bench, self._in_process = bench, in_process
        self._judge: Child | None = None
        self._own_judge: JudgeBench | None = None
        self._judges_turn = threading.Lock()
        self._contenders: dict[str, Contender] = {}
        self._cpu_use: CpuUse | None = None

    @property
    def judge(self) -> JudgeBench:
        """The judge's process; a new one where it has ended."""
        if self._in_process:
            self._own_judge = self._own_judge or JudgeBench(self.settings, self.machine)
            return self._own_judge
        if self._judge is None or self._judge.ended:
            try:
                self._judge = self._child(worker.JUDGE, self.logs / "judge.log", self._environment)
            except Died as error:
                raise JudgeLost(str(error)) from error
            self._judge.post("begin_judge", self.settings, self.machine)
        return cast(JudgeBench, _JudgeProxy(self._judge, self._judges_turn))

    def contender(self, implementation: Implementation, alias: str = "") -> Contender:
        """An implementation's process; a new one where it has ended."""
        name = name_of(implementation, alias)
        found = self._contenders.get(name)
        if found is None or found.child.ended:
            found = self._contenders[name] = self._new(name, implementation)
        return found

    def _new(self, name: str, implementation: Implementation) -> Contender:
        child: Child | InProcess
        if self._in_process:
            child = InProcess(self._bench(self.settings, implementation))
        else:
            environment = self._environment | environments.of(implementation)
            interpreter = environments.Interpreter.of(implementation.python) if implementation.python else None
            log = self.logs / log_name(name)
            child = self._child(worker.CONTENDER, log, environment, interpreter=interpreter)
            settings = dataclasses.replace(self.settings, folder=None)  # paths of another Python are other objects
            bench = f"{self._bench.__module__}:{self._bench.__qualname__}"
            child.post("begin", settings, implementation.declared(), bench)
        return Contender(name, implementation, child, self.timeout_s)

    def start(self, implementations: Sequence[tuple[Implementation, str]], case: Case) -> None:
        """Start and load the processes of these, with their aliases, side by side; how one fails is told when asked."""
        before = set(self._contenders.values())
        if self._judge and not before:  # it has nothing to do while the first of them load
            self._judge.post("warm_up", case)
        for implementation, alias in () if self._in_process else implementations:
            with contextlib.suppress(Died):
                found = self.contender(implementation, alias)
                if found not in before and isinstance(found.child, Child):
                    found.child.post("warm_up", case)

    def settle(self) -> None:
        """Wait until all that were started have loaded; from then on they stand still."""
        for found in self._contenders.values():
            if isinstance(found.child, Child):
                with contextlib.suppress(Exception):
                    found.child.settle(self.timeout_s)
                found.child.suspend()

    def side_by_side(self, work: Sequence[Callable[[], T]], at_once: int) -> Iterator[T]:
        """What each returns, in order, `at_once` at a time; all contenders end where one raises or the caller stops."""
        if self._in_process:
            yield from (call() for call in work)
            return
        with ThreadPoolExecutor(at_once) as threads:
            waiting = [threads.submit(call) for call in work]
            try:
                for done in waiting:
                    yield done.result()
            except BaseException:  # such as Ctrl-C, which only this thread gets
                self._halt.set()
                threads.shutdown(cancel_futures=True)
                self._end()
                raise
            finally:
                self._halt.clear()

    def aside(
        self, implementations: Sequence[Implementation], at_once: int, work: Callable[[Contender], object]
    ) -> None:
        """Do `work`, `at_once` at a time, in a process for nothing else; what fails there is in its log."""

        def work_on(implementation: Implementation) -> None:
            with contextlib.suppress(Exception):
                contender = self._new(name_of(implementation, "aside"), implementation)
                try:
                    work(contender)
                finally:
                    contender.end()

        if not self._in_process:
            list(self.side_by_side([partial(work_on, implementation) for implementation in implementations], at_once))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While this is entered, every contender but the one that is asked stands still."""
        if not self._in_process:
            for found in self._contenders.values():
                found.child.suspend()
            alive = {name: found.child.pid for name, found in self._contenders.items() if not found.child.ended}
            self._cpu_use = CpuUse(alive)
        yield

    def burners(self) -> dict[str, float]:
        """Contenders whose processes used the CPU while they had to stand still, and the share of the time."""
        return self._cpu_use.while_suspended() if self._cpu_use else {}

    def idle_share(self, contender: Contender) -> float:
        """The share of a CPU that a contender's process uses while it has nothing to do, as threads that spin do."""
        if self._in_process:
            return 0.0
        child = contender.child
        child.resume()
        try:
            share = idle_share(child.pid, IDLE_S)
            for _ in range(LOOKS):
                if share <= QUIET:
                    return 0.0
                time.sleep(SETTLE_S)  # a pool of threads spins for a moment before it sleeps
                share = idle_share(child.pid, LOOK_S)
            return share
        finally:
            child.suspend()

    def log_of(self, contender: Contender) -> str:
        """` (log: FILE)` where a contender's process has printed something, or ""."""
        return f" (log: {contender.child.log})" if contender.child.printed else ""

    def run(self, task: CaseTask, case: Any, implementations: Sequence[Implementation]) -> Generator[Record]:
        """The rows of a task at a case; processes of other implementations end, and these forget the last case.

        Raises child.Stopped where `stop` says so, and child.DoesNotEnd where a process outlives its kill.
        """
        self.forget({implementation.name for implementation in implementations})
        self.tell("preparing", 0.0)
        yield from task(self, case, implementations)

    def forget(self, wanted: Collection[str] = ()) -> None:
        """End the processes of all but the `wanted`, which forget the last case; in one process, forget everything."""
        if self._in_process and self._contenders:
            self._end()
            forget_compiled()
            gc.collect()
            torch.cuda.empty_cache()
        self._end(wanted)
        for found in self._contenders.values():
            with contextlib.suppress(Exception):
                found.tell("forget")

    def end_contender(self, implementation: Implementation) -> None:
        """Kill an implementation's process, where it has one."""
        if found := self._contenders.pop(implementation.name, None):
            found.end()

    def end(self) -> None:
        """Kill all processes."""
        self._end()
        if self._judge:
            self._judge.end()

    def _end(self, wanted: Collection[str] = ()) -> None:
        """End all but the wanted; all are killed before the first is waited for: a GPU takes a while to free each."""
        names = [name for name, found in self._contenders.items() if found.implementation.name not in wanted]
        ended = [self._contenders.pop(name) for name in names]
        for found in ended:
            if isinstance(found.child, Child) and not found.child.ended:
                found.child.kill()
        for found in ended:
            found.end()


CaseTask = Callable[[Court, Any, Sequence[Implementation]], Iterator[Record]]
"""A task: yields the rows of implementations at a case, and opens no process, folder or table."""


def declare(known: str | Implementation, timeout_s: float, python: str = "") -> Implementation:
    """What an implementation, by its address where it is not known, declares in a child process, under an interpreter.

    Raises BadInput where its code cannot be loaded.
    """
    address = known if isinstance(known, str) else known.address or known.source
    environment = environments.of_address("declared", address)
    interpreter = environments.Interpreter.of(python) if python else None
    folder = Path(tempfile.mkdtemp(prefix="swiglu-bench-"))
    keep = False
    try:
        child = Child(worker.CONTENDER, folder / "import.log", environment, interpreter=interpreter)
        try:
            given = known if isinstance(known, str) else known.declared()
            return _declared(child.ask(timeout_s, "declare", given))
        finally:
            child.end()
    except (Died, Malformed) as death:
        keep = True  # the message names the log
        raise BadInput(f"--impl: {address} cannot be imported: {death}.") from None
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _declared(answer: Any) -> Implementation:
    try:
        return Implementation.from_data(answer)
    except BadInput:
        raise
    except Exception:
        raise Malformed("its process sent a malformed declaration") from None


def name_of(implementation: Implementation, alias: str) -> str:
    """What a contender is called."""
    return f"{implementation.name} ({alias})" if alias else implementation.name


def log_name(name: str) -> str:
    """The file for what a child prints: the implementation's name where that is plain, else a plain name of its own."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60] or "unnamed"
    if plain == name and name != "judge":
        return f"{plain}.log"
    return f"{plain}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}.log"
