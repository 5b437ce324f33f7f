"""The ranks of a group as one place of the session: a question goes to all of them, and their answers are merged.

A time is that of the slowest rank, a verdict that of the worst.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import pydantic

from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.inputs import Draw
from swiglu_bench.check.results import Fault
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.tasks.tp.figures import key
from swiglu_bench.tasks.tp.plan import Kind
from swiglu_bench.tasks.tp.ranks import Ranks, ask
from swiglu_bench.worker.judge_bench import JudgeBench
from swiglu_bench.worker.reports import (
    CallReport,
    FaultReport,
    Malformed,
    MemoryReport,
    Report,
    SampleReport,
)  # fmt: skip
from swiglu_bench.worker.settings import Settings

R = TypeVar("R", bound=Report)
VERDICTS = pydantic.TypeAdapter(list[TensorCheck])


class RankPlace:
    """All ranks, and their judges: a Court of `session`."""

    def __init__(self, ranks: Ranks, settings: Settings) -> None:
        self.ranks, self.settings = ranks, settings
        self.machines: list[dict[str, Any]] = ask(ranks, "describe")
        """Of all ranks."""
        self.judge = cast(JudgeBench, RankJudges(self))
        self.whose = ""
        """The implementation whose code runs now, or ran last; "" for nobody's."""

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """All ranks' answers; raises ContenderFailed and ranks.GroupLost."""
        return ask(self.ranks, method, *arguments)

    def own(self, method: str, *arguments: Any) -> list[Any]:
        """The same for a question that no implementation's code runs for."""
        self.whose = ""
        return self.ask(method, *arguments)

    def seat(self, implementation: Implementation, kind: Kind, alias: str = "") -> RankContender:
        """An implementation run one way; it is called `alias` where it is one."""
        return RankContender(self, key(alias or implementation.name, kind), implementation, kind)


class RankContender:
    """One implementation on all ranks, run one way; a Contender of `session`."""

    def __init__(self, place: RankPlace, name: str, implementation: Implementation, kind: Kind) -> None:
        self.name, self.implementation, self.kind = name, implementation, kind
        self._place = place

    def ask(self, kind: type[R], method: str, *arguments: Any) -> R:
        """As Contender has it."""
        if method == "deliver_weights":  # each rank's judge has them
            return cast(R, CallReport(delivered=[], faults={}, conduct={}))
        self._place.whose = self.implementation.name
        if method == "build":  # the case has begun on all ranks
            answers = self._place.ask("build", self.name, self.implementation.name, self.kind)
        else:
            answers = self._place.ask("ask", self.name, method, *arguments)
        found: R = merged([kind.checked(answer) for answer in answers])
        return found

    def tell(self, method: str, *arguments: Any) -> str:
        """As Contender has it."""
        if method != "open_letterbox":  # each rank's judge has its own
            self._place.whose = self.implementation.name
            self._place.ask("ask", self.name, method, *arguments)
        return ""

    def end(self) -> None:
        """It ends with the case."""


class RankJudges:
    """All ranks' judges; what `session` asks of a JudgeBench."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place

    def letterbox(self, contender: str, kind: str, names: Sequence[str]) -> tuple[bytes, dict[str, tuple[int, ...]]]:
        """Each rank's process has one of its own."""
        return b"", {}

    def judge(
        self, contender: str, draw: Draw, results: Mapping[str, Fault | None], label: str, distribution: bool
    ) -> tuple[TensorCheck, ...]:
        """For each tensor the verdict of the rank that fails, or else of the one that is the nearest to failing."""
        answers = self._place.own("judge", contender, draw, dict(results), label, distribution)
        try:
            of_ranks = [VERDICTS.validate_python(answer) for answer in answers]
        except pydantic.ValidationError:
            raise Malformed("a rank sent malformed verdicts") from None
        faulty = [fault is not None for fault in results.values()]
        return tuple(_worst(checks, fault) for checks, fault in zip(zip(*of_ranks, strict=True), faulty, strict=True))

    def compare(self, draw: Draw, delivered: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """What is wrong on any rank, by contender."""
        answers = self._place.own("compare", draw, dict(delivered))
        return {name: _said(answers, name) for name in delivered if any(name in answer for answer in answers)}

    def changed_weights(self, contender: str = "") -> list[str]:
        """Names of the weights that are not what they were on some rank; they are then put back."""
        return sorted({str(name) for names in self._place.own("changed_weights") for name in names})


def merged(reports: Sequence[Any]) -> Any:
    """One report of all ranks', which are of one kind."""
    first = reports[0]
    if isinstance(first, MemoryReport):
        return max(reports, key=lambda one: one.peak_bytes)
    found: dict[str, Any] = {}
    if isinstance(first, CallReport | SampleReport):
        reasons = [{name: fault.reason for name, fault in one.faults.items()} for one in reports]
        faults = {name: fault.check for one in reports for name, fault in one.faults.items()}
        found["faults"] = {n: FaultReport(check=check, reason=_said(reasons, n)) for n, check in faults.items()}
        found["delivered"] = [name for name in first.delivered if all(name in one.delivered for one in reports)]
    if isinstance(first, SampleReport):
        found |= {name: max(getattr(one, name) for one in reports) for name in ("ms", "host_us", "queue_us")}
        found["queue_filled"] = all(one.queue_filled for one in reports)
    elif isinstance(first, CallReport):
        conducts = [one.conduct for one in reports]
        found["conduct"] = {name: _said(conducts, name) for one in conducts for name in one}
    return first.model_copy(update=found)


def _said(of_ranks: Sequence[Mapping[str, str]], name: str) -> str:
    """What the first rank says that says anything of it."""
    rank = next(number for number, one in enumerate(of_ranks) if name in one)
    return f"on rank {rank} {of_ranks[rank][name]}"


def _worst(checks: Sequence[TensorCheck], fault: bool) -> TensorCheck:
    rank = max(range(len(checks)), key=lambda one: (not checks[one].ok, checks[one].used))
    one = checks[rank]
    return one if one.ok or fault else dataclasses.replace(one, reason=f"on rank {rank} {one.reason}")
