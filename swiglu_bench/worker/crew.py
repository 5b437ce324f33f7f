"""The processes of a run on one device: the judge's, and one for each contender.

A contender is imported, built, compiled, checked and timed in its own process; the others stand still meanwhile. A
crash, a hang or a broken GPU ends one process and costs one row.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.system import CpuUse, idle_share
from swiglu_bench.rows.record import Record
from swiglu_bench.worker import worker
from swiglu_bench.worker.case import Kept, run_case
from swiglu_bench.worker.child import Child, Died
from swiglu_bench.worker.judge_bench import JudgeBench
from swiglu_bench.worker.places import Contender, ContenderFailed, JudgeLost, name_of
from swiglu_bench.worker.reports import Malformed, Report
from swiglu_bench.worker.settings import Listener, Settings, Tell, teller

R = TypeVar("R", bound=Report)
T = TypeVar("T")
IDLE_S, SETTLE_S, LOOK_S, LOOKS = 0.1, 1.0, 0.5, 3
QUIET = 0.05
"""Of a CPU: less is nothing to look at again."""
JUDGE_LIMIT_S = 86_400.0
"""What the suite itself does has no limit of its own."""


def run(
    cases: Sequence[Case], implementations: Sequence[Implementation], settings: Settings, this_machine: Machine,
    listen: Listener, *, timeout_s: float, logs: Path,
) -> Iterator[Record]:  # fmt: skip
    """All rows of all cases, in child processes whose output goes to files in `logs`.

    `timeout_s` is for one answer of an implementation: to import, build, compile and check it, or for one timed call.
    """
    crew = Crew(settings, this_machine, timeout_s, logs)
    try:
        for number, case in enumerate(cases):
            tell = teller(listen, number, cases)
            tell("preparing", 0.0)
            yield from crew.run_case(case, implementations, tell)
    finally:
        crew.end()


def declare(address: str, timeout_s: float) -> Implementation:
    """What the implementation at an address declares, its code loaded in a child; raises BadInput where that fails."""
    folder = Path(tempfile.mkdtemp(prefix="swiglu-bench-"))
    try:
        child = Child(worker.CONTENDER, folder / "import.log")
        try:
            declared = Implementation.from_data(child.ask(timeout_s, "declare", address))
        finally:
            child.end()
    except (Died, Malformed) as death:  # the log stays: the message names it
        raise BadInput(f"--impl: {address} cannot be imported: {death}.") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return declared


class ProcessContender:
    """A contender in a process of its own."""

    def __init__(self, name: str, implementation: Implementation, child: Child, timeout_s: float) -> None:
        self.name, self.implementation, self.child = name, implementation, child
        self._timeout_s = timeout_s

    def ask(self, kind: type[R], method: str, *arguments: Any) -> R:
        """As Contender has it; a process whose report is malformed is ended."""
        try:
            return kind.checked(self._ask(method, *arguments))
        except Malformed:
            self.end()
            raise

    def tell(self, method: str, *arguments: Any) -> str:
        """As Contender has it."""
        answer = self._ask(method, *arguments)
        if answer is not None and not isinstance(answer, str):
            raise Malformed("its process sent a malformed answer")
        return answer or ""

    def end(self) -> None:
        """Kill the process."""
        self.child.end()

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self.child.ask(self._timeout_s, method, *arguments)
        finally:
            self.child.suspend()


class _JudgeProxy:
    """A JudgeBench in another process; one that fails is ended, for it may hold most of the device's memory."""

    def __init__(self, child: Child, turn: threading.Lock) -> None:
        """`turn` is held by the thread that asks."""
        self._child, self._turn = child, turn

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            try:
                with self._turn:
                    return self._child.ask(JUDGE_LIMIT_S, name, *arguments)
            except (Died, ContenderFailed, Malformed) as error:
                self._child.end()
                raise JudgeLost(str(error)) from error

        return ask


class Crew:
    """The processes of a run on one device; a Place of `session`."""

    def __init__(
        self, settings: Settings, this_machine: Machine, timeout_s: float, logs: Path,
        environment: Mapping[str, str] | None = None, stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """`environment` and `stop` are those of `child.Child`."""
        self.settings, self.machine = settings, this_machine
        self._timeout_s, self._logs = timeout_s, logs
        self._halt = threading.Event()
        self._child = partial(Child, environment=environment, stop=lambda: self._halt.is_set() or stop())
        self._judge: Child | None = None
        self._judges_turn = threading.Lock()
        self._contenders: dict[str, ProcessContender] = {}
        self._kept = Kept()
        self._cpu_use: CpuUse | None = None

    @property
    def judge(self) -> JudgeBench:
        """The judge's process; a new one where it has ended."""
        if self._judge is None or self._judge.ended:
            try:
                self._judge = self._child(worker.JUDGE, self._logs / "judge.log")
            except Died as error:
                raise JudgeLost(str(error)) from error
            self._judge.post("begin", self.settings, self.machine)
        return cast(JudgeBench, _JudgeProxy(self._judge, self._judges_turn))

    def contender(self, implementation: Implementation, alias: str = "") -> Contender:
        """An implementation's process; a new one where it has ended."""
        name = name_of(implementation, alias)
        found = self._contenders.get(name)
        if found is None or found.child.ended:
            found = self._contenders[name] = self._new(name, implementation)
        return found

    def _new(self, name: str, implementation: Implementation) -> ProcessContender:
        child = self._child(worker.CONTENDER, self._logs / log_name(name))
        child.post("begin", self.settings, implementation.declared())
        return ProcessContender(name, implementation, child, self._timeout_s)

    def start(self, implementations: Sequence[tuple[Implementation, str]], case: Case) -> None:
        """Let the processes of these start and load side by side; how one fails is told when it is asked."""
        before = set(self._contenders.values())
        for implementation, alias in implementations:
            with contextlib.suppress(Died):
                found = cast(ProcessContender, self.contender(implementation, alias))
                if found not in before:
                    found.child.post("warm_up", case)

    def settle(self) -> None:
        """Wait until all that were started have loaded."""
        for found in self._contenders.values():
            with contextlib.suppress(Exception):
                found.child.settle(self._timeout_s)
            found.child.suspend()

    def side_by_side(self, work: Sequence[Callable[[], T]], at_once: int) -> Iterator[T]:
        """As Place has it; where one raises, or the caller stops, no contender outlives it."""
        with ThreadPoolExecutor(at_once) as threads:
            waiting = [threads.submit(one) for one in work]
            try:
                for done in waiting:
                    yield done.result()
            except BaseException:  # such as Ctrl-C, which only this thread gets
                self._halt.set()
                threads.shutdown(cancel_futures=True)
                self._let_go()
                raise
            finally:
                self._halt.clear()

    def aside(
        self, implementations: Sequence[Implementation], at_once: int, work: Callable[[Contender], object]
    ) -> None:
        """As Place has it; what a process says that fails is in its log."""

        def one(implementation: Implementation) -> None:
            with contextlib.suppress(Exception):
                contender = self._new(name_of(implementation, "aside"), implementation)
                try:
                    work(contender)
                finally:
                    contender.end()

        for _ in self.side_by_side([partial(one, implementation) for implementation in implementations], at_once):
            pass

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While this is entered, every contender but the one that is asked stands still."""
        for found in self._contenders.values():
            found.child.suspend()
        self._cpu_use = CpuUse(
            {name: found.child.pid for name, found in self._contenders.items() if not found.child.ended}
        )
        yield

    def burners(self) -> dict[str, float]:
        """Contenders whose processes used the CPU while they had to stand still, and the share of the time."""
        return self._cpu_use.while_suspended() if self._cpu_use else {}

    def idle_share(self, contender: Contender) -> float:
        """The share of a CPU that a contender's process uses while it has nothing to do, as threads that spin do."""
        child = cast(ProcessContender, contender).child
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
        """Where a contender's process has printed something."""
        child = cast(ProcessContender, contender).child
        return f" (log: {child.log})" if child.printed else ""

    def run_case(self, case: Case, implementations: Sequence[Implementation], tell: Tell) -> Iterator[Record]:
        """All rows of one case; processes of implementations that it does not name end, and others forget the last.

        Raises child.Stopped where `stop` says so, and child.DoesNotEnd where a process outlives its kill.
        """
        wanted = {one.name for one in implementations}
        for name in [name for name, one in self._contenders.items() if one.implementation.name not in wanted]:
            self._contenders.pop(name).end()
        for one in self._contenders.values():
            with contextlib.suppress(Exception):
                one.tell("forget")
        return run_case(self, case, implementations, tell, self._kept)

    def end(self) -> None:
        """Kill all processes."""
        self._let_go()
        if self._judge:
            self._judge.end()

    def _let_go(self) -> None:
        while self._contenders:
            self._contenders.popitem()[1].end()


def log_name(name: str) -> str:
    """The file for what a child prints: the implementation's name where that is plain, else a plain name of its own."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60] or "unnamed"
    if plain == name and name != "judge":
        return f"{plain}.log"
    return f"{plain}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}.log"
