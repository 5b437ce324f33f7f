"""The rounds as a judge sees them: turns on new inputs, results judged after each, and what spoils others' times.

Every contender has a turn in each round, all on the same new inputs, whose seed the parent draws when the round begins.
The judge holds all results against eager's on the same inputs; some rounds, drawn by lot, and the last one it judges in
full, by fp64.

A turn begins when a contender is told the inputs, or in a backward the upstream gradient, and ends when its results lie
in the letterbox, where nobody changes them any more. Beside the call there are inputs to draw and results to copy,
which take as long in each process of the baseline. What takes longer in a contender's turns is work that its samples
leave out: done when inputs are laid out or results are read, in a pause, or by a clock of its own.

A process that stands still cannot use a CPU, but what it has queued on a GPU goes on, and slows whoever comes next: the
baseline's time alone, beside the others, and without one of them shows that.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from swiglu_bench.cases.cases import Mode
from swiglu_bench.check.inputs import Draw, new_draw, new_seed
from swiglu_bench.measure import rounds
from swiglu_bench.measure.clock import CudaClock, Sample
from swiglu_bench.measure.rounds import Rounds
from swiglu_bench.measure.statistics import percentile
from swiglu_bench.worker.admission import results_of
from swiglu_bench.worker.chains import LEAST_SHARE, SHARE, Unsettled, WrongResult, WrongTime, allowed_ms
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Judging
from swiglu_bench.worker.worker import SampleReport

FULL_SHARE = 0.02
"""Of the rounds that are judged in full, besides the last."""
UNSEEN_MS = {"cuda": 0.2, "cpu": 0.05}
"""What a turn may take longer than one of the baseline, beside that share of a call."""
LEAST_MS = {"cuda": 0.1, "cpu": 0.03}
"""What it may always take: the rest is as for chains."""
LOOKS, BEYOND = 2, 0.5
"""Further sets of as many rounds, where turns of a contender take longer: one that finds nothing acquits it. A fault is
what all of them show by more than twice the difference between the baseline's own processes; and, for samples of other
rounds than the turns, by so large a share of them."""
MOST, SLOW = 60, 90
"""Percentiles: what is true of most samples, and turns that another program's time slice interrupts. On a shared GPU,
longer turns are interrupted more often, even fast ones: a fault there exceeds what SLOW turns of the baseline add."""
WARMUPS, SAMPLES = 3, 11
"""Of the baseline alone."""
SLOWER = 1.15
FEWEST_TURNS = 6
"""After a contender, below which nothing is concluded."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turn:
    """One sample of the rounds, and whose turn it came after."""

    name: str
    after: str
    ms: float


class RoundJudge:
    """Draws each round's inputs and has its results judged."""

    def __init__(self, court: Judging, names: Callable[[str], Sequence[str]], full_share: float = FULL_SHARE) -> None:
        """`names` says which results a contender has to hand over."""
        self.court, self._names, self._full_share = court, names, full_share
        self._draws: dict[int, Draw] = {}
        self._delivered: dict[Draw, dict[str, SampleReport]] = {}
        self._lot = random.SystemRandom()
        self.last: dict[str, tuple[Draw, SampleReport]] = {}
        self.turns: list[Turn] = []
        """Every sample that is kept, in the order in which they were taken."""

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
                if faults := {n: fault for n, fault in results_of(report, self._names(name)).items() if fault}:
                    wrong[name] = WrongResult("; ".join(f"{n}: {fault.reason}" for n, fault in faults.items()))
            sound = {name: list(self._names(name)) for name in reports if name not in wrong}
            found = self.court.judge.compare(draw, sound) if sound else {}
            wrong |= {name: WrongResult(reason) for name, reason in found.items()}
            if self._lot.random() < self._full_share:
                wrong |= self._in_full(draw, {name: reports[name] for name in sound if name not in wrong})
        self._delivered.clear()
        return wrong

    def judge_last(self) -> dict[str, Exception]:
        """The last result of each contender against fp64."""
        wrong: dict[str, Exception] = {}
        for draw in {draw for draw, _ in self.last.values()}:
            mine = {name: report for name, (whose, report) in self.last.items() if whose == draw}
            wrong |= self._in_full(draw, mine)
        return wrong

    def _in_full(self, draw: Draw, reports: dict[str, SampleReport]) -> dict[str, Exception]:
        wrong: dict[str, Exception] = {}
        for name, report in reports.items():
            results = results_of(report, self._names(name))
            if failed := [check for check in self.court.judge.judge(name, draw, results, "{}", False) if not check.ok]:
                wrong[name] = WrongResult("; ".join(f"{check.tensor}: {check.reason}" for check in failed))
        return wrong


def contender_of(
    contender: Contender, judge: RoundJudge, method: str = "sample", led: Mode | None = None, timed_by: str = ""
) -> rounds.TimedCall:
    """A contender's turns in rounds, by a method of its Workbench, or with `led`, the case's mode, by `led_sample`."""

    def take(number: int, lead_us: float) -> Sample:
        draw = judge.draw(number, contender.name)
        if led:
            sample, report = led_sample(judge.court, contender, led, draw, lead_us, timed_by)
        else:
            report = contender.ask(SampleReport, method, draw, lead_us)
            sample = report.sample()
        judge.take(contender.name, draw, report)
        if number >= 0:
            judge.turns.append(Turn(contender.name, judge.turns[-1].name if judge.turns else "", sample.ms))
        return sample

    return rounds.TimedCall(contender.name, take)


def led_sample(
    court: Judging, contender: Contender, mode: Mode, draw: Draw, lead_us: float, timed_by: str = ""
) -> tuple[Sample, SampleReport]:
    """One sample whose inputs are told when all that comes before it is done, and its turn by this process's clock.

    Of a backward, the activations are told before, and the upstream gradient when the forward has returned.
    """
    contender.tell("lead_in", Draw(draw.seed if mode is Mode.BACKWARD else new_seed()))
    began = time.perf_counter()
    report = contender.ask(SampleReport, "sample", draw, lead_us, timed_by, True)
    held_us = min(lead_us, CudaClock.SPIN_LIMIT_US) if court.settings.device.type == "cuda" else 0.0
    turn_ms = (contender.answered - began) * 1e3 - held_us / 1e3
    return dataclasses.replace(report.sample(), turn_ms=turn_ms), report


class Turns:
    """The turns of a case's contenders."""

    def __init__(
        self, device: str, equals: Sequence[Contender], others: Sequence[Contender], again: Callable[[Rounds], Rounds],
        shared: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`equals` are processes of the baseline. `again` plays as many rounds once more, which look the same.

        shared: whether other programs may compute on the device.
        """
        self._device, self._others, self._again, self._shared = device, others, again, shared
        self._equals = [contender.name for contender in equals]

    def disagreements(self, rounds: Rounds) -> dict[str, BaseException]:
        """What is wrong, by contender, after further rounds; agreement is left out.

        One that tells the truth from some moment on is held to what it said before, by how much slower the baseline has
        become meanwhile; where that alone is too much, it is not settled.
        """
        samples = {name: timing.samples for name, timing in rounds.timings.items()}
        excess = {contender.name: self._excess(contender, samples, samples) for contender in self._others}
        suspects = {contender.name: contender for contender in self._others if excess[contender.name].ms > 0}
        proven = {name: excess[name].proven for name in suspects}
        failures: dict[str, BaseException] = {}
        for _ in range(LOOKS):
            if not suspects:
                break
            seen = self._again(rounds)
            later = {name: timing.samples for name, timing in seen.timings.items()}
            for name, contender in list(suspects.items()):
                if seen.timings[name].failure:
                    failures[name] = seen.timings[name].failure or RuntimeError()
                    del suspects[name]
                    continue
                own, before = self._excess(contender, later, later), self._excess(contender, later, samples)
                excess[name] = max(own, before, key=lambda found: found.ms)
                proven[name] &= own.proven or (before.proven and before.ms > BEYOND * before.claimed_ms)
                log.debug("%s: turns exceed what is allowed by %.3f ms", name, excess[name].ms)
                if excess[name].ms <= 0:
                    del suspects[name]
        for name in suspects:
            what = f"its turns take {excess[name].ms:.3f} ms longer than its samples and the baseline's turns explain"
            busy = Unsettled(f"{what}, but the machine is too busy to prove it")
            failures[name] = WrongTime(what) if proven[name] else busy
        return failures

    def _excess(
        self, contender: Contender, turns: Mapping[str, Sequence[Sample]], claims: Mapping[str, Sequence[Sample]]
    ) -> _Excess:
        """What turns take beyond what is allowed, by samples that may come from other rounds than the turns."""
        name = contender.name
        equals = [equal for equal in self._equals if turns[equal] and claims[equal]]
        if not equals or not turns[name] or not claims[name]:
            return _Excess(0.0, 0.0, 0.0)
        slowed = max(1.0, *(_usual_ms(turns[equal]) / _usual_ms(claims[equal]) for equal in equals))
        usual = [_beside_ms(turns[equal], _usual_ms(turns[equal])) for equal in equals]
        claimed_ms = _usual_ms(claims[name]) * (1.0 if turns is claims else slowed)
        most_ms = UNSEEN_MS[self._device] + SHARE * claimed_ms
        apart_ms = max(usual) - min(usual)
        least_ms = LEAST_MS[self._device] + LEAST_SHARE * claimed_ms
        spared_ms = allowed_ms(most_ms, least_ms, apart_ms) if len(equals) > 1 else most_ms
        more_ms = _beside_ms(turns[name], claimed_ms) - percentile(usual, 50)
        if turns is claims:
            each_ms = [_each_ms(turns[equal], MOST) for equal in equals]
            more_ms = min(more_ms, _each_ms(turns[name], MOST) - percentile(each_ms, 50))
        elif _usual_ms(turns[name]) <= slowed * percentile([sample.ms for sample in claims[name]], MOST):
            more_ms = 0.0
        sliced = equals if self._device == "cuda" and self._shared() else []
        slow_ms = [_each_ms(turns[equal], SLOW) - _each_ms(turns[equal], 25) for equal in sliced]
        return _Excess(more_ms - spared_ms, max([2 * apart_ms, *slow_ms]), claimed_ms)


@dataclass(frozen=True)
class _Excess:
    ms: float
    doubt_ms: float
    claimed_ms: float

    @property
    def proven(self) -> bool:
        """Whether it is more than the baseline's own processes are apart, or interruptions explain."""
        return self.ms > self.doubt_ms


def _usual_ms(samples: Sequence[Sample]) -> float:
    return percentile([sample.ms for sample in samples], 25)


def _beside_ms(samples: Sequence[Sample], claimed_ms: float) -> float:
    """What turns take beside their samples.

    Not sample by sample, or a contender that reports the truth at times would hide it; and of the faster ones, for
    other programs only add. A contender that makes half of its samples smaller shows in these, too.
    """
    return percentile([sample.turn_ms for sample in samples], 25) - claimed_ms


def _each_ms(samples: Sequence[Sample], share: float) -> float:
    """The same sample by sample: what is true of `share` percent of them.

    Where calls take either of two times, as products of some layouts do on a CPU, the quarters of turns and of samples
    may lie at different ones, and only this tells them from what is left out.
    """
    return percentile([sample.turn_ms - sample.ms for sample in samples], share)


def alone_ms(baseline: Contender) -> list[float]:
    """Times of the baseline while no other contender runs."""
    return list(islice(_times(baseline), WARMUPS, WARMUPS + SAMPLES))


def _times(contender: Contender) -> Iterator[float]:
    lead_us, least_us = 100.0, math.inf
    while True:
        report = contender.ask(SampleReport, "sample", Draw(new_seed()), lead_us)
        least_us = min(least_us, report.queue_us)  # a call that waits for the GPU takes each spin into its next one
        lead_us = 1.2 * least_us
        yield report.ms


def slower(times: Sequence[float], before: Sequence[float]) -> bool:
    """Whether most of some times are longer than most of others, by more than noise and clocks explain."""
    return percentile(times, 25) > SLOWER * percentile(before, 75)


def slow_the_next(turns: Sequence[Turn], equals: Collection[str]) -> list[str]:
    """Contenders after whose turns the next turn is slower than after others', the worst first.

    Only turns of `equals`, which are processes of the baseline, are looked at, each relative to its own median.
    """
    medians = {name: percentile([turn.ms for turn in turns if turn.name == name] or [1.0], 50) for name in equals}
    seen = [(turn.after, turn.ms / medians[turn.name]) for turn in turns if turn.name in medians]
    found = []
    for name in {after for after, _ in seen if after}:
        after, others = [[t for who, t in seen if (who == name) is mine] for mine in (True, False)]
        if min(len(after), len(others)) >= FEWEST_TURNS and slower(after, others):
            found.append((percentile(after, 50), name))
    return [name for _, name in sorted(found, reverse=True)]


def slows_the_next(baseline: Contender, other: Contender) -> bool:
    """Whether the baseline is slower right after a contender's turn than after one of its own."""
    after, again = [], []
    own, others = _times(baseline), _times(other)
    for _ in range(WARMUPS + SAMPLES):
        next(others)
        after.append(next(own))
        again.append(next(islice(own, WARMUPS, None)))
    return slower(after[WARMUPS:], again[WARMUPS:])


def find_culprit(
    baseline: Contender, others: Sequence[Contender], revive: Callable[[Contender], Contender | None],
    before: Sequence[float],
) -> Contender | None:  # fmt: skip
    """The contender whose process makes the baseline slower than `before`, or None.

    One after the other is ended; the baseline has to be faster without it, and slower again once it is back. `revive`
    starts and builds one again. All that were asked about have ended by then.
    """
    now = alone_ms(baseline)
    if not slower(now, before):
        return None
    for suspect in others:
        suspect.end()
        without = alone_ms(baseline)
        back = revive(suspect) if slower(now, without) else None
        if back:
            alone_ms(back)
            again = alone_ms(baseline)
            back.end()
            if slower(again, without):
                return suspect
        now = without
    return None
