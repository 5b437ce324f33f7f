"""Which tile of a kernel is fastest here: candidates compiled, checked against the shipped one, and timed beside it.

Two rounds of timing: a short one of all candidates, and a long one of the fastest few with the shipped choice and its
twin. A choice wins by the second alone, whose samples had no part in picking it, and only if it is faster by more than
the twin's noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.measure.clock import Clock, DeviceLost, answers
from swiglu_bench.measure.rounds import Contender, Rounds, Rule, run_rounds
from swiglu_bench.measure.statistics import Interval, Verdict, percentile, verdict
from swiglu_kernels.launches.launch import Launch
from swiglu_kernels.standalone.workloads import Workload, workload
from swiglu_kernels.tiles.candidates import MOST, Choice, Problem, candidates

FINALISTS = 3
SCREEN = Rule(warmup_rounds=1, min_rounds=5, max_rounds=30, min_s=0.0, precision=0.01)
"""Of the first round of timing, with the budget of the second."""
SHIPPED, TWIN = "shipped", "shipped, again"


class CannotTune(RuntimeError):
    """The shipped choice itself does not run, or its tensors do not fit; the message says why."""


@dataclass(frozen=True)
class Found:
    """What tuning one kernel for one problem came to."""

    kernel: str
    problem: Problem
    shipped: Choice
    best: Choice
    """The fastest of the others."""
    shipped_ms: float
    best_ms: float
    ratio: Interval
    """best / shipped"""
    noise: float
    """How far from 1 the interval of the shipped choice to itself reaches."""
    tried: int
    rejected: dict[Choice, str] = field(default_factory=dict)
    """Candidates that did not run or were wrong, and why."""

    @property
    def verdict(self) -> Verdict:
        """Of the best to the shipped one."""
        return verdict(self.ratio, self.noise)

    @property
    def winner(self) -> Choice:
        """What to run: the shipped choice, unless another is faster."""
        return self.best if self.verdict is Verdict.FASTER else self.shipped


def tune(
    kernel: str,
    problem: Problem,
    device: torch.device,
    clock: Clock,
    rule: Rule,
    most: int = MOST,
    seed: int = 0,
    tell: Callable[[str], None] = lambda doing: None,
) -> Found:
    """Tune one kernel of `swiglu_kernels.tiles.candidates.KERNELS`.

    Raises CannotTune, and DeviceLost where a candidate breaks the device.
    """
    shipped, *others = candidates(kernel, problem, most)
    tell("running what is shipped")
    try:
        work = workload(kernel, problem, device, seed)
        launches = {shipped: work.describe(shipped)}
        expected = _outputs(work, launches[shipped], clock)
    except (RuntimeError, ValueError) as error:
        raise CannotTune(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    if not all(bool(torch.isfinite(one).all()) for one in expected):
        raise CannotTune(f"what is shipped, {shipped}, leaves elements unwritten or not finite")

    rejected: dict[Choice, str] = {}
    for number, choice in enumerate(others):
        tell(f"compiling and checking {number + 1} of {len(others)}: {choice}")
        try:
            launch = work.describe(choice)
            reason = difference(_outputs(work, launch, clock), expected)
        except Exception as error:  # the compiler or the driver may raise anything; it costs the candidate only
            if not answers(clock):
                raise DeviceLost(f"{kernel} with {choice}: {error}") from error
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if reason:
            rejected[choice] = reason
        else:
            launches[choice] = launch
    if len(launches) == 1:
        raise CannotTune(f"none of {len(others)} candidates is right; the first: {next(iter(rejected.values()))}")

    tell(f"timing {len(launches)}")
    race = _Race(work, expected, clock, seed)
    first = race.run(launches, replace(SCREEN, budget_s=rule.budget_s))
    tell("timing the fastest")
    ranked = [choice for choice in _ranked(first, launches, rejected) if choice != shipped]
    final = race.run({shipped: launches[shipped]} | {one: launches[one] for one in ranked[:FINALISTS]}, rule)
    placed = _ranked(final, ranked[:FINALISTS], rejected)
    twin = final.ratio(TWIN, SHIPPED)
    if not placed or twin is None:
        raise CannotTune(f"no candidate could be timed; the last: {list(rejected.values())[-1:]}")
    best = placed[0]
    ratio = final.ratio(str(best), SHIPPED)
    assert ratio is not None, "it was placed"
    shipped_ms, best_ms = (percentile(final.timings[name].ms, 50) for name in (SHIPPED, str(best)))
    tried = len(others) + 1
    return Found(kernel, problem, shipped, best, shipped_ms, best_ms, ratio, twin.noise, tried, rejected)


class _Race:
    """Launches of one workload timed in interleaved rounds; what the last round wrote is checked again."""

    def __init__(self, work: Workload, expected: list[Tensor], clock: Clock, seed: int) -> None:
        self._work = work
        self._expected = expected
        self._clock = clock
        self._seed = seed

    def run(self, launches: dict[Choice, Launch], rule: Rule) -> Rounds:
        """The first of the launches is the baseline and runs under two names."""
        shipped, *others = launches.items()
        named = [(SHIPPED, shipped[1]), (TWIN, shipped[1]), *((str(choice), launch) for choice, launch in others)]
        return run_rounds(
            [Contender(name, partial(_prepare, launch)) for name, launch in named],
            self._clock,
            rule,
            baseline=SHIPPED,
            seed=self._seed,
            before_inspection=lambda number: _poison(self._work),
            inspect=self._inspect,
        )

    def _inspect(self, name: str, number: int, result: Any) -> None:
        del number, result
        self._clock.synchronize()
        reason = difference(list(self._work.outputs), self._expected)
        if reason:
            raise ArithmeticError(f"{name}, when it was timed: {reason}")


def _ranked(rounds: Rounds, choices: Iterable[Choice], rejected: dict[Choice, str]) -> list[Choice]:
    """The choices by their ratio to the shipped one; those that failed are rejected."""
    ratios = {}
    for choice in choices:
        if str(choice) not in rounds.timings:  # the shipped one, under its other name
            continue
        ratio = rounds.ratio(str(choice), SHIPPED)
        if ratio is None:
            rejected[choice] = str(rounds.timings[str(choice)].failure)
        else:
            ratios[choice] = ratio.median
    return sorted(ratios, key=lambda choice: ratios[choice])


def _prepare(launch: Launch, number: int) -> Callable[[], None]:
    del number
    return launch.run


def _poison(work: Workload) -> None:
    for one in work.outputs:
        one.fill_(float("nan"))


def _outputs(work: Workload, launch: Launch, clock: Clock) -> list[Tensor]:
    """What a launch writes over NaN."""
    _poison(work)
    launch.run()
    clock.synchronize()
    return [one.clone() for one in work.outputs]


def difference(found: list[Tensor], expected: list[Tensor]) -> str:
    """Say how results differ by more than another order of an fp32 sum may change; "" where they do not.

    That is one rounding more or less of each element (twice the dtype's epsilon), and an eighth of one of a typical
    element where terms cancel.
    """
    for mine, theirs in zip(found, expected, strict=True):
        value, right = mine.float(), theirs.float()
        epsilon = torch.finfo(theirs.dtype).eps
        allowed = 2 * epsilon * right.abs() + epsilon / 8 * right.square().mean().sqrt()
        wrong = ~((value - right).abs() <= allowed)  # NaN is wrong
        count = int(wrong.sum())
        if count:
            at = tuple(int(index) for index in wrong.nonzero()[0])
            return f"{count} of {wrong.numel()} elements differ, first {at}: {value[at]:.5g} for {right[at]:.5g}"
    return ""
