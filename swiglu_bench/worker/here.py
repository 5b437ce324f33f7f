"""A place in this process: the judge and every contender beside each other, for debugging. A crash or hang ends it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine.machine import Machine
from swiglu_bench.rows.record import Record
from swiglu_bench.worker.case import Kept, run_case
from swiglu_bench.worker.judge_bench import JudgeBench
from swiglu_bench.worker.places import Contender, name_of
from swiglu_bench.worker.reports import Report
from swiglu_bench.worker.settings import Listener, Settings, teller
from swiglu_bench.worker.workbench import Workbench, forget_compiled

R = TypeVar("R", bound=Report)
T = TypeVar("T")


def run(
    cases: Sequence[Case], implementations: Sequence[Implementation], settings: Settings, this_machine: Machine,
    listen: Listener = lambda progress: None,
) -> Iterator[Record]:  # fmt: skip
    """Work through the cases in this process and yield every row as soon as it is known."""
    here = Here(settings, this_machine)
    for number, case in enumerate(cases):
        tell = teller(listen, number, cases)
        tell("preparing", 0.0)
        yield from run_case(here, case, implementations, tell, here.kept)
        here.tidy()


class LocalContender:
    """A Workbench in this process."""

    def __init__(self, name: str, implementation: Implementation, settings: Settings) -> None:
        self.name, self.implementation, self.ended = name, implementation, False
        self._bench = Workbench(settings, implementation)

    def ask(self, kind: type[R], method: str, *arguments: Any) -> R:
        """As Contender has it, but what the contender raises comes as it is."""
        answer: R = getattr(self._bench, method)(*arguments)
        return answer

    def tell(self, method: str, *arguments: Any) -> str:
        """The same."""
        return getattr(self._bench, method)(*arguments) or ""

    def end(self) -> None:
        """Let go of the case."""
        self._bench.forget()
        self.ended = True


class Here:
    """This process as a place."""

    def __init__(self, settings: Settings, this_machine: Machine) -> None:
        self.settings, self.machine, self.kept = settings, this_machine, Kept()
        self.judge = JudgeBench(settings, this_machine)
        self._contenders: dict[str, LocalContender] = {}

    def contender(self, implementation: Implementation, alias: str = "") -> Contender:
        """As Place has it."""
        name = name_of(implementation, alias)
        found = self._contenders.get(name)
        if found is None or found.ended:
            found = self._contenders[name] = LocalContender(name, implementation, self.settings)
        return found

    def start(self, implementations: Sequence[tuple[Implementation, str]], case: Case) -> None:
        """Nothing has to be started."""

    def settle(self) -> None:
        """Nothing was."""

    def side_by_side(self, work: Sequence[Callable[[], T]], at_once: int) -> Iterator[T]:
        """One after the other."""
        return (call() for call in work)

    def aside(
        self, implementations: Sequence[Implementation], at_once: int, work: Callable[[Contender], object]
    ) -> None:
        """There are no processes beside this one."""

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Nothing runs by itself."""
        return contextlib.nullcontext()

    def idle_share(self, contender: Contender) -> float:
        """Not known of one process."""
        return 0.0

    def log_of(self, contender: Contender) -> str:
        """What is printed is on the screen."""
        return ""

    def burners(self) -> dict[str, float]:
        """Not known of one process."""
        return {}

    def tidy(self) -> None:
        """Give memory and compiled graphs of the last case back."""
        for contender in self._contenders.values():
            contender.end()
        forget_compiled()
        gc.collect()
        if self.settings.device.type == "cuda":
            torch.cuda.empty_cache()
