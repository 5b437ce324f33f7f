"""The fastest tile of a kernel on this GPU: candidates compiled, checked against the shipped one, timed beside it.

Two rounds of timing: a short one of all candidates, and a long one of the fastest few with the shipped choice and its
twin. Only the second decides, since its samples had no part in picking the finalists; a choice wins only if it is
faster by more than the twin's noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.errors import one_line
from swiglu_bench.measure.clock import Clock, DeviceLost, answers
from swiglu_bench.measure.rounds import Rounds, Rule, on_clock, run_rounds
from swiglu_bench.measure.statistics import Interval, Verdict, percentile, verdict
from swiglu_kernels.standalone.workloads import Runnable, Workload, workload
from swiglu_kernels.tiles.candidates import MOST, Choice, Problem, candidates

FINALISTS = 3
SCREEN = Rule(warmup_rounds=1, min_rounds=5, max_rounds=30, min_s=0.0, precision=0.01)
"""The rule of the first round of timing, with the budget of the second."""
SHIPPED, TWIN = "shipped", "shipped, again"


class CannotTune(RuntimeError):
    """The shipped choice itself does not run, or its tensors do not fit; the message says why."""


@dataclass(frozen=True)
class Found:
    """The result of tuning one kernel for one problem."""

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
    rejected: dict[Choice, str]
    """Candidates that did not run or were wrong, and why."""

    @property
    def verdict(self) -> Verdict:
        """Whether the best is faster than the shipped choice."""
        return verdict(self.ratio, self.noise)

    @property
    def winner(self) -> Choice:
        """The choice to use: the shipped one, unless another is faster."""
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
    tell("running the shipped choice")
    try:
        work = workload(kernel, problem, device, seed)
        launches: dict[Choice, Runnable] = {shipped: work.describe(shipped)}
        expected = _outputs(work, launches[shipped], clock)
    except (RuntimeError, ValueError) as error:
        raise CannotTune(one_line(error)) from error
    if not all(bool(torch.isfinite(one).all()) for one in expected):
        raise CannotTune(f"the shipped choice, {shipped}, leaves elements unwritten or not finite")

    rejected: dict[Choice, str] = {}
    for number, choice in enumerate(others):
        tell(f"compiling and checking {number + 1} of {len(others)}: {choice}")
        try:
            launch = work.describe(choice)
            reason = difference(_outputs(work, launch, clock), expected)
        except Exception as error:  # the compiler or the driver may raise anything; it costs the candidate only
            if not answers(device):
                raise DeviceLost(f"{kernel} with {choice}: {error}") from error
            reason = one_line(error)
        if reason:
            rejected[choice] = reason
        else:
            launches[choice] = launch
    if len(launches) == 1:
        raise CannotTune(f"none of {len(others)} candidates is correct; the first: {next(iter(rejected.values()))}")

    race = _Race(work, device, expected, clock, seed)
    tell(f"timing {len(launches)}")
    first = race.run(launches, replace(SCREEN, budget_s=rule.budget_s))
    finalists = _ranked(first, [choice for choice in launches if choice != shipped], rejected)[:FINALISTS]
    tell("timing the fastest")
    final = race.run({choice: launches[choice] for choice in (shipped, *finalists)}, rule)
    placed, twin = _ranked(final, finalists, rejected), final.ratio(TWIN, SHIPPED)
    if not placed or twin is None:
        raise CannotTune(f"no candidate could be timed; the last: {list(rejected.values())[-1:]}")
    best = placed[0]
    ratio = final.ratio(str(best), SHIPPED)
    assert ratio is not None, "it was placed"
    shipped_ms, best_ms = (percentile(final.timings[name].ms, 50) for name in (SHIPPED, str(best)))
    return Found(shipped, best, shipped_ms, best_ms, ratio, twin.noise, len(others) + 1, rejected)


@dataclass(frozen=True)
class _Race:
    """Launches of one workload timed in interleaved rounds; the results of the last round are checked again."""

    work: Workload
    device: torch.device
    expected: list[Tensor]
    clock: Clock
    seed: int

    def run(self, launches: dict[Choice, Runnable], rule: Rule) -> Rounds:
        """The first of the launches is the baseline and runs under two names."""
        shipped, *others = launches.items()
        named = [(SHIPPED, shipped[1]), (TWIN, shipped[1]), *((str(choice), launch) for choice, launch in others)]
        return run_rounds(
            [on_clock(name, self.clock, partial(lambda run, number: run, launch.run)) for name, launch in named],
            rule,
            baseline=SHIPPED,
            seed=self.seed,
            before_inspection=lambda number: _poison(self.work),
            inspect=self._inspect,
            device_works=partial(answers, self.device),
        )

    def _inspect(self, name: str, number: int, result: Any) -> None:
        del number, result
        self.clock.synchronize()
        reason = difference(list(self.work.outputs), self.expected)
        if reason:
            raise ArithmeticError(f"{name}, when it was timed: {reason}")


def _ranked(rounds: Rounds, choices: Iterable[Choice], rejected: dict[Choice, str]) -> list[Choice]:
    """The choices by their ratio to the shipped one; those that failed are rejected."""
    ratios: dict[Choice, float] = {}
    for choice in choices:
        ratio = rounds.ratio(str(choice), SHIPPED)
        if ratio is None:
            rejected[choice] = str(rounds.timings[str(choice)].failure)
        else:
            ratios[choice] = ratio.median
    return sorted(ratios, key=ratios.__getitem__)


def _poison(work: Workload) -> None:
    for one in work.outputs:
        one.fill_(float("nan"))


def _outputs(work: Workload, launch: Runnable, clock: Clock) -> list[Tensor]:
    """What a launch writes over NaN."""
    _poison(work)
    launch.run()
    clock.synchronize()
    return [one.clone() for one in work.outputs]


def difference(found: list[Tensor], expected: list[Tensor]) -> str:
    """How results differ by more than another order of an fp32 sum may change; "" where they do not.

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
