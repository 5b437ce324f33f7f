"""One round: every contender in its process, all on the same new inputs, and a judge that looks at every result.

The parent draws the seed of a round when it begins and keeps every sample as it comes. After it, the judge holds
all results against eager's on the same inputs; some rounds, drawn by lot, and the last one it judges in full, by fp64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from swiglu_bench.check.inputs import Draw, new_seed
from swiglu_bench.measure import rounds
from swiglu_bench.measure.clock import Sample
from swiglu_bench.session.admission import results_of
from swiglu_bench.session.places import Contender, Court
from swiglu_bench.session.reports import SampleReport

FULL_SHARE = 0.02
"""Of the rounds that are judged in full, besides the last."""


class WrongResult(RuntimeError):
    """A result of the timed loop is wrong; the message says how."""


class RoundJudge:
    """Draws each round's inputs and has its results judged."""

    def __init__(self, place: Court, names: Callable[[str], Sequence[str]], full_share: float = FULL_SHARE) -> None:
        """`names` says which results a contender has to hand over."""
        self._place, self._names, self._full_share = place, names, full_share
        self._draws: dict[int, Draw] = {}
        self._delivered: dict[Draw, dict[str, SampleReport]] = {}
        self._lot = random.SystemRandom()
        self.last: dict[str, tuple[Draw, SampleReport]] = {}

    def draw(self, number: int, name: str) -> Draw:
        """The inputs of a contender's turn: those of its round, or new ones where it has had these."""
        draw = self._draws.get(number)
        if draw is None:
            self._draws = {number: Draw(new_seed())}
            draw = self._draws[number]
        return Draw(new_seed()) if name in self._delivered.get(draw, {}) else draw

    def take(self, name: str, draw: Draw, report: SampleReport) -> None:
        """A turn's results lie in the letterbox, until the contender's next turn."""
        for others in self._delivered.values():
            others.pop(name, None)
        self._delivered.setdefault(draw, {})[name] = report
        self.last[name] = draw, report

    def judge(self) -> dict[str, Exception]:
        """Hold the results of the round against eager's; the contenders that are wrong."""
        wrong: dict[str, Exception] = {}
        for draw, reports in self._delivered.items():
            for name, report in reports.items():
                faults = {n: fault for n, fault in results_of(report, self._names(name)).items() if fault}
                if faults:
                    wrong[name] = WrongResult("; ".join(f"{n}: {fault.reason}" for n, fault in faults.items()))
            sound = {name: list(self._names(name)) for name in reports if name not in wrong}
            found = self._place.judge.compare(draw, sound) if sound else {}
            wrong |= {name: WrongResult(reason) for name, reason in found.items()}
            if self._lot.random() < self._full_share:
                wrong |= self._in_full(draw, {name: reports[name] for name in sound if name not in wrong})
        self._delivered.clear()
        return wrong

    def judge_last(self) -> dict[str, Exception]:
        """The last result of each contender against fp64."""
        wrong: dict[str, Exception] = {}
        for draw in {draw for draw, _ in self.last.values()}:
            mine = {name: report for name, (one, report) in self.last.items() if one == draw}
            wrong |= self._in_full(draw, mine)
        return wrong

    def _in_full(self, draw: Draw, reports: dict[str, SampleReport]) -> dict[str, Exception]:
        wrong: dict[str, Exception] = {}
        for name, report in reports.items():
            results = results_of(report, self._names(name))
            failed = [one for one in self._place.judge.judge(name, draw, results, "{}", False) if not one.ok]
            if failed:
                wrong[name] = WrongResult("; ".join(f"{one.tensor}: {one.reason}" for one in failed))
        return wrong


def contender_of(contender: Contender, judge: RoundJudge, method: str = "sample", *more: object) -> rounds.Contender:
    """A contender's turns as the rounds take them: by a method of its Workbench, given a draw, a lead and `more`."""

    def take(number: int, lead_us: float) -> Sample:
        draw = judge.draw(number, contender.name)
        report = contender.ask(SampleReport, method, draw, lead_us, *more)
        judge.take(contender.name, draw, report)
        return report.sample()

    return rounds.Contender(contender.name, take)
