"""Where a case is run: a judge and contenders, each an object here or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine.machine import Machine
from swiglu_bench.worker.judge_bench import JudgeBench
from swiglu_bench.worker.reports import Report
from swiglu_bench.worker.settings import Settings

R = TypeVar("R", bound=Report)
T = TypeVar("T")


def name_of(implementation: Implementation, alias: str) -> str:
    """What a contender is called."""
    return f"{implementation.name} ({alias})" if alias else implementation.name


class CannotGoOn(BaseException):
    """What ends more than one contender's row: no row's own failure, so that no handler of those takes it for one."""


class JudgeLost(CannotGoOn):
    """The judge's process cannot answer; the case is lost, and a new one begins with the next. One phrase."""


class ContenderFailed(RuntimeError):
    """What a contender's code raised, in one line."""


class Contender(Protocol):
    """One implementation, and the process in which it is built and called."""

    name: str
    """Unlike that of any other contender at this place; the baseline has aliases."""
    implementation: Implementation

    def ask(self, kind: type[R], method: str, *arguments: Any) -> R:
        """The report of a method of its Workbench.

        Raises ContenderFailed for what the contender's code raises, BadInput where its file is not what it was, Died
        where its process ends, and Malformed for a report that is none.
        """
        ...

    def tell(self, method: str, *arguments: Any) -> str:
        """The same for a method that returns a text."""
        ...

    def end(self) -> None:
        """End its process, where it has one."""
        ...


class Court(Protocol):
    """Where results are judged."""

    settings: Settings

    @property
    def judge(self) -> JudgeBench:
        """The judge, or what calls its methods in its process."""
        ...


class Place(Court, Protocol):
    """A device with a judge and contenders."""

    machine: Machine

    def contender(self, implementation: Implementation, alias: str = "") -> Contender:
        """An implementation's contender; a new one where its process has ended."""
        ...

    def start(self, implementations: Sequence[tuple[Implementation, str]], case: Case) -> None:
        """Let the processes of these, with their aliases, begin side by side and load what they need."""
        ...

    def settle(self) -> None:
        """Wait until all that were started have done so; from then on they stand still."""
        ...

    def side_by_side(self, work: Sequence[Callable[[], T]], at_once: int) -> Iterator[T]:
        """What each returns, in their order; each asks other contenders, and so many do so at the same time.

        A place without processes does one after the other.
        """
        ...

    def aside(
        self, implementations: Sequence[Implementation], at_once: int, work: Callable[[Contender], object]
    ) -> None:
        """Let `work` be done with each of these in a process that is for nothing else, so many at the same time.

        What it raises is not told. A place without processes does nothing.
        """
        ...

    def held(self) -> AbstractContextManager[object]:
        """While this is entered, every contender but the one that is asked stands still."""
        ...

    def idle_share(self, contender: Contender) -> float:
        """The share of a CPU that a contender's process uses while it has nothing to do."""
        ...

    def log_of(self, contender: Contender) -> str:
        """` (log: FILE)` where its process has printed anything, or ""."""
        ...

    def burners(self) -> dict[str, float]:
        """Names of contenders whose processes used the CPU while they had to stand still, and the share of the time."""
        ...
