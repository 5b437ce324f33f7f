"""`swiglu-bench tune`: the fastest tile of each kernel on this GPU, found and kept in the file of tuned choices.

Candidates are compiled, checked against the shipped one and timed beside it, in two rounds: a short one of all
candidates, and a long one of the fastest few with the shipped choice and its twin. Only the second decides, since its
samples had no part in picking the finalists; a choice wins only if it is faster by more than the twin's noise.
"""

import contextlib
import fnmatch
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from swiglu_bench.cases.cases import Dtype, Shape
from swiglu_bench.cases.errors import BadInput, matching, one_line
from swiglu_bench.machine.machine import now
from swiglu_bench.measure.clock import Clock, DeviceLost, answers
from swiglu_bench.measure.rounds import Rounds, Rule, on_clock, run_rounds
from swiglu_bench.measure.statistics import Interval, Verdict, percentile, verdict
from swiglu_kernels.runtime.backend import multiprocessors
from swiglu_kernels.standalone.workloads import Runnable, Workload, workload
from swiglu_kernels.tiles import tuning
from swiglu_kernels.tiles.candidates import KERNELS, MOST, TUNED_DTYPES, Choice, TileProblem, candidates
from swiglu_kernels.tiles.tuning import TunedEntry, TunedMachine

FINALISTS = 3
SCREEN = Rule(warmup_rounds=1, min_rounds=5, max_rounds=30, min_s=0.0, precision=0.01)
"""The rule of the first round of timing, with the budget of the second."""
SHIPPED, TWIN = "shipped", "shipped, again"
MULTIPLE = 16
"""Sizes are multiples of this: then the kernels access memory 16 bytes at a time (`launch.vectorises`)."""


class CannotTune(RuntimeError):
    """The shipped choice itself does not run, or its tensors do not fit; the message says why."""


@dataclass(frozen=True)
class TunedTile:
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


@dataclass
class Job:
    """One kernel for one problem, and the result: what was found, or why nothing was."""

    kernel: str
    shape: str
    problem: TileProblem
    found: TunedTile | str = ""
    kept: bool = False
    """Whether the file has what was found."""

    @property
    def dtype(self) -> str:
        """Name of the dtype, as in the file."""
        return str(self.problem.dtype).removeprefix("torch.")

    def row(self) -> dict[str, Any]:
        """What was found, as data."""
        problem, found = self.problem, self.found
        row = {
            "kernel": self.kernel, "shape": self.shape, "dtype": self.dtype, "tokens": problem.tokens,
            "hidden": problem.hidden, "intermediate": problem.intermediate,
        }  # fmt: skip
        if isinstance(found, str):
            return row | {"verdict": "error", "reason": found}
        return row | {
            "verdict": found.verdict, "shipped": str(found.shipped), "best": str(found.best),
            "winner": str(found.winner), "shipped_ms": found.shipped_ms, "best_ms": found.best_ms,
            "ratio": found.ratio.median, "ratio_low": found.ratio.low, "ratio_high": found.ratio.high,
            "tried": found.tried, "rejected": {str(choice): reason for choice, reason in found.rejected.items()},
        }  # fmt: skip


@dataclass(frozen=True)
class Tuner:
    """Where and how kernels are tuned: the same for all jobs of a command."""

    device: torch.device
    clock: Clock
    rule: Rule
    """Of the final; the first round of timing has its budget."""
    most: int = MOST
    """Candidates for each kernel and problem."""
    seed: int = 0

    def tune(self, kernel: str, problem: TileProblem, tell: Callable[[str], object] = lambda doing: None) -> TunedTile:
        """Tune one kernel of `swiglu_kernels.tiles.candidates.KERNELS`.

        Raises CannotTune, and DeviceLost where a candidate breaks the device.
        """
        shipped, *others = candidates(kernel, problem, self.most)
        tell("running the shipped choice")
        try:
            work = workload(kernel, problem, self.device, self.seed)
            launches: dict[Choice, Runnable] = {shipped: work.describe(shipped)}
            expected = _outputs(work, launches[shipped], self.clock)
        except (RuntimeError, ValueError) as error:
            raise CannotTune(one_line(error)) from error
        if not all(bool(torch.isfinite(output).all()) for output in expected):
            raise CannotTune(f"the shipped choice, {shipped}, leaves elements unwritten or not finite")

        rejected: dict[Choice, str] = {}
        for number, choice in enumerate(others):
            tell(f"compiling and checking {number + 1} of {len(others)}: {choice}")
            try:
                launch = work.describe(choice)
                reason = difference(_outputs(work, launch, self.clock), expected)
            except Exception as error:  # the compiler or the driver may raise anything; it costs the candidate only
                if not answers(self.device):
                    raise DeviceLost(f"{kernel} with {choice}: {error}") from error
                reason = one_line(error)
            if reason:
                rejected[choice] = reason
            else:
                launches[choice] = launch
        if len(launches) == 1:
            raise CannotTune(f"none of {len(others)} candidates is correct; the first: {next(iter(rejected.values()))}")

        tell(f"timing {len(launches)}")
        first = self._race(work, expected, launches, replace(SCREEN, budget_s=self.rule.budget_s))
        finalists = _ranked(first, [choice for choice in launches if choice != shipped], rejected)[:FINALISTS]
        tell("timing the fastest")
        final = self._race(work, expected, {choice: launches[choice] for choice in (shipped, *finalists)}, self.rule)
        placed, twin = _ranked(final, finalists, rejected), final.ratio(TWIN, SHIPPED)
        if not placed or twin is None:
            raise CannotTune(f"no candidate could be timed; the last: {list(rejected.values())[-1:]}")
        best = placed[0]
        ratio = final.ratio(str(best), SHIPPED)
        assert ratio is not None, "it was placed"
        shipped_ms, best_ms = (percentile(final.timings[name].ms, 50) for name in (SHIPPED, str(best)))
        return TunedTile(shipped, best, shipped_ms, best_ms, ratio, twin.noise, len(others) + 1, rejected)

    def _race(self, work: Workload, expected: list[Tensor], launches: Mapping[Choice, Runnable], rule: Rule) -> Rounds:
        """Time launches in interleaved rounds, the first, which is the baseline, under two names.

        The results of the last round are checked again.
        """

        def inspect(name: str, number: int, result: Any) -> None:
            self.clock.synchronize()
            reason = difference(list(work.outputs), expected)
            if reason:
                raise ArithmeticError(f"{name}, when it was timed: {reason}")

        shipped, *others = launches.items()
        named = [(SHIPPED, shipped[1]), (TWIN, shipped[1]), *((str(choice), launch) for choice, launch in others)]
        return run_rounds(
            [on_clock(name, self.clock, partial(lambda run, number: run, launch.run)) for name, launch in named],
            rule, baseline=SHIPPED, seed=self.seed, before_inspection=lambda number: _poison(work), inspect=inspect,
            device_works=partial(answers, self.device),
        )  # fmt: skip


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
    for output in work.outputs:
        output.fill_(float("nan"))


def _outputs(work: Workload, launch: Runnable, clock: Clock) -> list[Tensor]:
    _poison(work)
    launch.run()
    clock.synchronize()
    return [output.clone() for output in work.outputs]


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


def jobs_of(
    kernels: str, shapes: Sequence[Shape], dtypes: Sequence[Dtype], tokens: Sequence[int] | None,
    device: torch.device, here: TunedMachine,
) -> list[Job]:  # fmt: skip
    """Everything to tune, checked before any work; `kernels` are names or globs. Raises BadInput."""
    patterns = [part.strip() for part in kernels.split(",")]
    matching(list(KERNELS), patterns, "--kernel: there is no kernel {!r}")
    names = list(dict.fromkeys(name for pattern in patterns for name in fnmatch.filter(KERNELS, pattern)))
    wanted = [getattr(torch, dtype.value) for dtype in dict.fromkeys(dtypes)]
    if not set(wanted) <= set(TUNED_DTYPES):
        raise BadInput("--dtype: float32 keeps its shipped tiles; give bf16 or fp16.")
    gpu, jobs = (here.major_minor, multiprocessors(device)), []
    for shape in shapes:
        if shape.hidden % MULTIPLE or shape.intermediate % MULTIPLE:
            needed = f"give sizes that are multiples of {MULTIPLE}"
            raise BadInput(f"--shapes: {shape.name} keeps its shipped tiles; {needed}.")
        experts = (shape.experts.count, shape.experts.top_k) if shape.experts else (0, 1)
        mine = [name for name in names if name.startswith("experts-") == bool(shape.experts)]
        if not mine:
            kind = "a mixture of experts" if shape.experts else "a dense block"
            raise BadInput(f"--kernel: none of {kernels} is of {shape.name}, {kind}; experts-* are those of experts.")
        for dtype in wanted:
            problems = [
                TileProblem(count, shape.hidden, shape.intermediate, dtype, *gpu, *experts, here.gpu)
                for count in sorted(set(shape.tokens if tokens is None else tokens))
            ]
            if tokens is not None:
                _check_shared(problems)
            served = {problem.kept_for: problem for problem in problems}  # of the most tokens that share a choice
            jobs += [Job(name, shape.name, problem) for problem in served.values() for name in mine]
    return jobs


def _check_shared(problems: Sequence[TileProblem]) -> None:
    """Raise BadInput for two token counts, in ascending order, that share a tuned choice."""
    for first, second in itertools.pairwise(problems):
        if first.kept_for == second.kept_for:
            what = "tiles of {} rows" if first.experts else "up to {} tokens"
            share = f"{first.tokens} and {second.tokens} tokens share one tuned tile"
            raise BadInput(f"--tokens: {share}, kept for {what.format(first.kept_for)}; leave one out.")


def tune_all(
    tuner: Tuner, jobs: Sequence[Job], path: Path, here: TunedMachine, tell: Callable[[int, str], object],
    warn: Callable[[str], object],
) -> Iterator[Job]:  # fmt: skip
    """Tune one after another and keep each winner at once; where the device is lost, the rest is not tuned.

    `tell` gets the number of jobs that are done, and what is happening.
    """
    for number, job in enumerate(jobs):
        problem = job.problem
        at = f"{number + 1} of {len(jobs)}: {job.kernel}, {job.shape}, {problem.tokens} tokens"
        told = partial(lambda at, done, doing: tell(done, f"{at}: {doing}"), at, number)
        try:
            job.found = found = tuner.tune(job.kernel, problem, told)
        except (CannotTune, DeviceLost) as error:
            job.found = str(error)
            yield job
            if isinstance(error, DeviceLost):
                return
            continue
        ratio = found.ratio
        entry = TunedEntry(
            machine=here, kernel=job.kernel, dtype=job.dtype, tokens=problem.kept_for, hidden=problem.hidden,
            intermediate=problem.intermediate, choice=found.winner, ratio=(ratio.median, ratio.low, ratio.high),
            at=now(),
        )  # fmt: skip
        job.kept = keep(path, entry, found.winner != found.shipped, warn)
        yield job


def keep(path: Path, entry: TunedEntry, wins: bool, tell: Callable[[str], object]) -> bool:
    """Enter a choice in place of an earlier one; where it does not win, only remove the earlier one; whether it worked.

    A file that is not sound is moved aside, since a user may need it, and `tell` is called with where to, or with why
    the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock(path)):
            try:
                others = [other for other in tuning.read(path) if other.place != entry.place]
            except ValueError as error:
                others, unsound = [], path.with_name(f"{path.name}.unsound")
                path.replace(unsound)
                tell(f"{path} is {error}; it was moved to {unsound}.")
            tuning.write([*others, entry] if wins else others)
    except OSError as error:
        tell(f"{path} cannot be written: {error.strerror}; name another in {tuning.VARIABLE}.")
        return False
    tuning.forget()
    return True


def clear(path: Path) -> str:
    """Remove the file and say so. Raises BadInput for one that a user named and that holds no tuned choices."""
    try:
        if not path.exists():
            return f"Nothing is kept in {path}."
        try:
            held = f" with tuned choices: {len(tuning.read(path))}"
        except ValueError as error:
            if os.environ.get(tuning.VARIABLE):
                raise BadInput(f"{tuning.VARIABLE} names {path}, which is {error}; remove it yourself.") from None
            held = ", which was not sound"
        path.unlink()
    except OSError as error:
        raise BadInput(f"{path} cannot be read or removed: {error.strerror}; remove it yourself.") from None
    with contextlib.suppress(OSError):
        _lock(path).unlink()
    tuning.forget()
    return f"Removed {path}{held}."


def _lock(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")
