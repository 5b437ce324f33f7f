"""One round: every contender in its process, all on the same new inputs, and a judge that looks at every result.

The parent draws the seed of a round when it begins and keeps every sample as it comes. After it, the judge holds
all results against eager's on the same inputs; some rounds, drawn by lot, and the last one it judges in full, by fp64.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from swiglu_bench.cases.cases import Mode
from swiglu_bench.check.inputs import Draw, new_draw, new_seed
from swiglu_bench.measure import rounds
from swiglu_bench.measure.clock import Sample
from swiglu_bench.worker.admission import results_of
from swiglu_bench.worker.places import Contender, Court
from swiglu_bench.worker.reports import SampleReport

FULL_SHARE = 0.02
"""Of the rounds that are judged in full, besides the last."""


class WrongResult(RuntimeError):
    """A result of the timed loop is wrong; the message says how."""


class RoundJudge:
    """Draws each round's inputs and has its results judged."""

    def __init__(self, place: Court, names: Callable[[str], Sequence[str]], full_share: float = FULL_SHARE) -> None:
        """`names` says which results a contender has to hand over."""
        self.place, self._names, self._full_share = place, names, full_share
        self._draws: dict[int, Draw] = {}
        self._delivered: dict[Draw, dict[str, SampleReport]] = {}
        self._lot = random.SystemRandom()
        self.last: dict[str, tuple[Draw, SampleReport]] = {}

    def draw(self, number: int, name: str) -> Draw:
        """The inputs of a contender's turn: those of its round, or new ones where it has had these."""
        draw = self._draws.get(number)
        if draw is None:
            self._draws = {number: new_draw()}
            draw = self._draws[number]
        return new_draw() if name in self._delivered.get(draw, {}) else draw

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
            found = self.place.judge.compare(draw, sound) if sound else {}
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
            failed = [one for one in self.place.judge.judge(name, draw, results, "{}", False) if not one.ok]
            if failed:
                wrong[name] = WrongResult("; ".join(f"{one.tensor}: {one.reason}" for one in failed))
        return wrong


def contender_of(
    contender: Contender, judge: RoundJudge, method: str = "sample", led: Mode | None = None, latency: bool = False
) -> rounds.TimedCall:
    """A contender's turns as the rounds take them: by a method of its Workbench, given a draw and a lead.

    `led` is the case's mode, where samples have a turn of their own as `led_sample` takes it.
    """

    def take(number: int, lead_us: float) -> Sample:
        draw = judge.draw(number, contender.name)
        if led:
            sample, report = led_sample(judge.place, contender, led, draw, lead_us, latency)
        else:
            report = contender.ask(SampleReport, method, draw, lead_us)
            sample = report.sample()
        judge.take(contender.name, draw, report)
        return sample

    return rounds.TimedCall(contender.name, take)


def led_sample(
    place: Court, contender: Contender, mode: Mode, draw: Draw, lead_us: float, latency: bool = False
) -> tuple[Sample, SampleReport]:
    """One sample whose inputs are told when all that comes before it is done, and its turn by this process's clock.

    Of a backward, the activations are told before, and the upstream gradient when the forward has returned.
    """
    contender.tell("lead_in", Draw(draw.seed if mode is Mode.BACKWARD else new_seed()))
    began = time.perf_counter()
    report = contender.ask(SampleReport, "sample", draw, lead_us, latency, True)
    held_us = lead_us if place.settings.device.type == "cuda" else 0.0
    turn_ms = (time.perf_counter() - began) * 1e3 - held_us / 1e3
    return dataclasses.replace(report.sample(), turn_ms=turn_ms), report
