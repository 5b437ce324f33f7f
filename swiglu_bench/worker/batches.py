"""Calls back to back, timed from outside: what no process can do to its own samples.

A contender takes its samples in its own process, where its code may do to them what it likes. It cannot make the
parent's clock stop: whatever its calls leave out of their samples, or leave undone (to a thread, to another stream,
until somebody looks), has to be done before the batch is over, because the sums of all results are held against
eager's. What inputs and sums take is measured by the judge, an untimed forward by batches without the backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.check.inputs import Draw, new_seed
from swiglu_bench.worker.court import Contender, Judging

BATCH_MS = 100.0
FEWEST_CALLS, MOST_CALLS = 4, 64
ALIKE = 8.0
"""Contenders have batches together, with as many calls, where none takes this many times as long as another: a batch of
as few calls as a slow one needs is over before what the parent's questions take is small beside it."""
TRIES = 15
FAILURES = 5
"""Tries in which a contender has to fail more than in those in which it does not."""
BUSY, BEYOND_DOUBT = 1.5, 2.0
"""Where the baseline's batch takes so much more or less than its samples say, a try tells nothing, and what tells
anything on such a machine. Other programs only ever add to the wall clock: where one try agrees, nothing is proven, nor
where there is no baseline to tell how busy the machine is. The host's own time differs more from loop to loop than the
GPU's: of calls that take it longer, only what is beyond doubt is wrong."""
SHARE = 0.15
UNSEEN_MS = {"cuda": 0.005, "cpu": 0.05}
"""What a call may take more than its samples say, beside that share of them. Where the host takes longer than the GPU,
it is that share of all that the host does in the loop, short of what is beyond doubt: a mixture's inputs may take it
twice as long as the call."""


class WrongResult(RuntimeError):
    """A result of the timed loop is wrong; the message says how."""


class WrongTime(RuntimeError):
    """The parent's clock does not agree with a contender's samples; the message says how."""


class Unsettled(RuntimeError):
    """Nor does it for the baseline: the machine does not let the check be decided."""


class Batches:
    """The batches of one case."""

    def __init__(
        self, court: Judging, case: Case, contenders: Mapping[str, Contender], names: Callable[[str], Sequence[str]]
    ) -> None:
        """`names` says which results a contender has to hand over."""
        self._court, self._case, self._contenders, self._names = court, case, contenders, names
        self._least: dict[str, float] = {}
        """What is taken off a batch, the least so far: other programs only add to it, which would hide what is held."""

    def disagreements(
        self, claimed_ms: Mapping[str, float], baseline: str = "", host_bound: Collection[str] = ()
    ) -> dict[str, Exception]:
        """What is wrong, by contender, where calls should take as long as `claimed_ms` says; agreement is left out.

        What they may take is relative to the baseline's own in the same try, for others may use the machine: whoever
        works for longer is interrupted more often. So the baseline repeats its batches for as long as any other takes.
        `host_bound`: whose calls take the host longer than the GPU.
        """
        if not self._contenders:
            return {}
        found = [self._among(one, claimed_ms, baseline, host_bound) for one in self._groups(claimed_ms, baseline)]
        failures = {name: failure for one in found for name, failure in one.items() if name != baseline}
        of_baseline = [one.get(baseline) for one in found]  # where it was settled once, it is
        wrong = [failure for failure in of_baseline if failure and not isinstance(failure, Unsettled)]
        failure = wrong[0] if wrong else None if None in of_baseline else of_baseline[0]
        return failures | ({baseline: failure} if failure else {})

    def _groups(self, claimed_ms: Mapping[str, float], baseline: str) -> list[list[str]]:
        """All but the baseline, by what a call takes, the slowest first."""
        groups: list[list[str]] = []
        others = [name for name in self._contenders if name != baseline]
        for name in sorted(others, key=lambda one: claimed_ms[one], reverse=True):
            slowest_ms = claimed_ms[groups[-1][0]] if groups else float("inf")
            if slowest_ms < ALIKE * claimed_ms[name] or _calls(slowest_ms) == MOST_CALLS:
                groups[-1].append(name)
            else:
                groups.append([name])
        return groups or [[]]

    def _among(
        self, names: Sequence[str], claimed_ms: Mapping[str, float], baseline: str, host_bound: Collection[str]
    ) -> dict[str, Exception]:
        """What is wrong with these and the baseline, in batches of as many calls."""
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
            most = {name: self._most(claimed_ms[name], name in host_bound) for name in left}
            asked = {name: times_claimed(name) for name in left if name != baseline}
            took = {name: found - unseen[name] for name, found in asked.items() if found is not None}
            if beside and any(one / slowed > most[name] for name, one in took.items()):
                found = times_claimed(baseline, as_long)  # others may have begun meanwhile
                was_busy |= found is not None and found >= BUSY
                took = {name: one for name, one in took.items() if one / slowed <= most[name] or (found or 1.0) < BUSY}
                slowed = max(slowed, found or 1.0)
            for name, one in took.items():
                least[name] = min(least[name], one / slowed)
                score[name] += 1 if one / slowed <= most[name] else -1
        for name in set(score) - set(failures):
            what = f"its samples say that a call takes {claimed_ms[name]:.3f} ms"
            proven = score.get(baseline) == 1 and score[name] == -FAILURES
            if proven and least[name] > (BEYOND_DOUBT if was_busy or name in host_bound else 1 + SHARE):
                times = f"{least[name]:.2f} times that by the wall clock, for calls back to back"
                failures[name] = WrongTime(f"{what}, and at least {times}")
            elif score[name] <= 0:
                why = "while the machine is busy" if baseline in score else "without a baseline beside it"
                if proven and not was_busy:
                    why = "where the host takes longer than the GPU"
                failures[name] = Unsettled(f"{what}, which the wall clock cannot confirm {why}")
        return failures

    @property
    def _device(self) -> str:
        return self._court.settings.device.type

    def _most(self, claimed_ms: float, host_bound: bool) -> float:
        """How many times what its samples say a call may take, `UNSEEN_MS` left out."""
        inputs = self._inputs_ms / claimed_ms if host_bound else 0.0
        return min(1 + SHARE * (1 + inputs), BEYOND_DOUBT)

    @property
    def _inputs_ms(self) -> float:
        """Of laying out a call's inputs and adding up its results."""
        return self._least["forward" if self._case.mode is Mode.FORWARD else "with backward"]

    def _note_least(self, what: str, ms: float) -> float:
        self._least[what] = min(ms, self._least.get(what, ms))
        return self._least[what]

    def _call_ms(self, name: str, draws: Sequence[Draw], batches: int) -> float:
        """Of one call of the case's mode, by the wall clock, over so many batches one after the other."""
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
    """Of a batch whose calls take at most so long."""
    return max(FEWEST_CALLS, min(MOST_CALLS, int(BATCH_MS / max(claimed_ms, 1e-3))))
