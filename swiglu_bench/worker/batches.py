"""Calls back to back, timed by the parent: a check of samples that a contender's code cannot influence.

A contender takes its samples in its own process, where its code can change them. It cannot stop the parent's clock:
work that its calls leave out of their samples, or defer (to a thread, to another stream, until a result is read), has
to be done before the batch ends, because the sums of all results are compared with eager's. The judge measures what
laying out inputs and adding up results takes; batches without the backward measure the untimed forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.check.inputs import Draw, new_seed
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Judging

BATCH_MS = 100.0
FEWEST_CALLS, MOST_CALLS = 4, 64
ALIKE = 8.0
"""Contenders share batches of the same number of calls if none takes this many times as long as another. A slow
contender needs few calls, and a batch of so few calls of a fast one is too short for the parent's clock."""
TRIES = 15
FAILURES = 5
"""By how many more attempts a contender has to fail than pass."""
BUSY, BEYOND_DOUBT = 1.5, 2.0
"""BUSY: an attempt does not count if the baseline's batch takes so many times more or less than its samples say.
BEYOND_DOUBT: what still counts against a contender on a machine that was busy in some attempt, or if its calls take the
host longer than the GPU, since the host's time varies more. Other programs only add to the wall clock, so one attempt
that agrees acquits; without a baseline, which shows how busy the machine is, nothing is proven."""
SHARE = 0.15
UNSEEN_MS = {"cuda": 0.005, "cpu": 0.05}
"""What a call may take beyond its samples, in addition to SHARE of them. Where the host takes longer than the GPU, the
share is of all that the host does in the loop, up to BEYOND_DOUBT: laying out a mixture's inputs may take the host
twice as long as the call."""


class WrongResult(RuntimeError):
    """A result of the timed loop is wrong; the message says how."""


class WrongTime(RuntimeError):
    """The parent's clock does not agree with a contender's samples; the message says how."""


class Unsettled(RuntimeError):
    """It does not agree with the baseline's either: the machine is too busy for the check to be decided."""


class Batches:
    """The batches of one case."""

    def __init__(
        self, court: Judging, case: Case, contenders: Mapping[str, Contender], names: Callable[[str], Sequence[str]]
    ) -> None:
        """`names` says which results a contender has to hand over."""
        self._court, self._case, self._contenders, self._names = court, case, contenders, names
        self._least: dict[str, float] = {}
        """What is subtracted from a batch, the least so far: other programs add to it, which would hide work."""

    def disagreements(
        self, claimed_ms: Mapping[str, float], baseline: str = "", host_bound: Collection[str] = (), apart: float = 1.0
    ) -> dict[str, Exception]:
        """The contenders whose calls take longer than `claimed_ms` says, and how that was found.

        Batches are relative to the baseline's in the same attempt, because other programs may use the machine. Longer
        work is interrupted more often, so the baseline repeats its batches for as long as the longest of the others.
        `host_bound`: contenders whose calls take the host longer than the GPU. `apart`: how many times as long as
        another a process of the baseline may take; what differs by less proves nothing.
        """
        if not self._contenders:
            return {}
        groups = self._groups(claimed_ms, baseline)
        found = [self._among(group, claimed_ms, baseline, host_bound, apart) for group in groups]
        failures = {name: failure for wrong in found for name, failure in wrong.items() if name != baseline}
        of_baseline = [wrong.get(baseline) for wrong in found]  # where it was settled once, it is
        wrong = [failure for failure in of_baseline if failure and not isinstance(failure, Unsettled)]
        failure = wrong[0] if wrong else None if None in of_baseline else of_baseline[0]
        return failures | ({baseline: failure} if failure else {})

    def _groups(self, claimed_ms: Mapping[str, float], baseline: str) -> list[list[str]]:
        groups: list[list[str]] = []
        others = [name for name in self._contenders if name != baseline]
        for name in sorted(others, key=lambda name: claimed_ms[name], reverse=True):
            slowest_ms = claimed_ms[groups[-1][0]] if groups else float("inf")
            if slowest_ms < ALIKE * claimed_ms[name] or _calls(slowest_ms) == MOST_CALLS:
                groups[-1].append(name)
            else:
                groups.append([name])
        return groups or [[]]

    def _among(
        self, names: Sequence[str], claimed_ms: Mapping[str, float], baseline: str, host_bound: Collection[str],
        apart: float,
    ) -> dict[str, Exception]:  # fmt: skip
        failures: dict[str, Exception] = {}
        contenders = [*names, *([baseline] if baseline in self._contenders else [])]
        score, least = dict.fromkeys(contenders, 0), dict.fromkeys(contenders, float("inf"))
        calls = _calls(max(claimed_ms[name] / (ALIKE if name == baseline and names else 1.0) for name in contenders))
        was_busy = False

        def times_claimed(name: str, batches: int = 1) -> float | None:
            try:
                return self._call_ms(name, draws, batches) / claimed_ms[name]
            except Exception as error:  # a contender may raise anything
                failures[name] = error
                return None

        for _ in range(TRIES):
            left = [name for name in score if name not in failures and -FAILURES < score[name] < 1]
            if not left:
                break
            draws = [Draw(new_seed()) for _ in range(calls)]
            with_backward_ms, forward_ms = self._court.judge.expect_batch(draws)
            self._note_least("with backward", with_backward_ms)
            self._note_least("forward", forward_ms)
            beside = baseline in score and baseline not in failures
            as_long = max(1, round(max(claimed_ms[name] for name in left) / claimed_ms[baseline])) if beside else 1
            slowed = 1.0
            if beside:
                found = times_claimed(baseline, as_long)
                if found is not None and not 1 / BUSY < found < BUSY:
                    was_busy = True
                    continue
                slowed = max(1.0, found or 1.0)
                score[baseline] = 1
            unseen = {name: UNSEEN_MS[self._device] / claimed_ms[name] for name in left}
            inputs = {name: self._inputs_ms / claimed_ms[name] if name in host_bound else 0.0 for name in left}
            most = {name: min(1 + SHARE * (1 + inputs[name]), BEYOND_DOUBT) for name in left}
            asked = {name: times_claimed(name) for name in left if name != baseline}
            took = {name: found - unseen[name] for name, found in asked.items() if found is not None}
            if beside and any(multiple / slowed > most[name] for name, multiple in took.items()):
                found = times_claimed(baseline, as_long)  # others may have begun meanwhile
                was_busy |= found is not None and found >= BUSY
                calm = (found or 1.0) < BUSY
                took = {name: multiple for name, multiple in took.items() if calm or multiple / slowed <= most[name]}
                slowed = max(slowed, found or 1.0)
            for name, multiple in took.items():
                least[name] = min(least[name], multiple / slowed)
                score[name] += 1 if multiple / slowed <= most[name] else -1
        for name in set(score) - set(failures):
            what = f"its samples say that a call takes {claimed_ms[name]:.3f} ms"
            proven = score.get(baseline) == 1 and score[name] == -FAILURES
            beyond = BEYOND_DOUBT if was_busy or name in host_bound else 1 + SHARE
            if proven and least[name] > max(beyond, apart):
                times = f"{least[name]:.2f} times that by the wall clock, for calls back to back"
                failures[name] = WrongTime(f"{what}, and at least {times}")
            elif score[name] <= 0:
                why = "while the machine is busy" if baseline in score else "without a baseline beside it"
                if proven and not was_busy and least[name] > apart:
                    why = "where the host takes longer than the GPU"
                failures[name] = Unsettled(f"{what}, which the wall clock cannot confirm {why}")
        return failures

    @property
    def _device(self) -> str:
        return self._court.settings.device.type

    @property
    def _inputs_ms(self) -> float:
        return self._least["forward" if self._case.mode is Mode.FORWARD else "with backward"]

    def _note_least(self, what: str, ms: float) -> float:
        self._least[what] = min(ms, self._least.get(what, ms))
        return self._least[what]

    def _call_ms(self, name: str, draws: Sequence[Draw], batches: int) -> float:
        """The time of one call of the case's mode by the wall clock, averaged over successive batches."""
        contender, forward_ms = self._contenders[name], self._least["forward"]
        asking_ms = min(self._asked_ms(contender, ()) for _ in range(3))
        before_ms = 0.0
        if self._case.mode is Mode.BACKWARD:
            took_ms = (self._asked_ms(contender, draws, True) - asking_ms) / len(draws)
            before_ms = self._note_least(f"forward of {name}", took_ms - forward_ms)
        took_ms = sum(self._asked_ms(contender, draws) - asking_ms for _ in range(batches))
        wrong = self._court.judge.compare_batch(name, self._names(name))
        if wrong:
            raise WrongResult(f"{wrong}, in the sum of {len(draws)} calls back to back")
        return took_ms / batches / len(draws) - self._inputs_ms - before_ms

    def _asked_ms(self, contender: Contender, draws: Sequence[Draw], forward_only: bool = False) -> float:
        began = time.perf_counter()
        contender.tell("batch", draws, forward_only)
        return (time.perf_counter() - began) * 1e3


def _calls(claimed_ms: float) -> int:
    return max(FEWEST_CALLS, min(MOST_CALLS, int(BATCH_MS / max(claimed_ms, 1e-3))))
