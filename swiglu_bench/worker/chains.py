"""Calls in a row, timed by the parent: a check of samples that a contender's code cannot influence.

A contender takes its samples in its own process, where its code can change them. It cannot stop the parent's clock:
work that its calls leave out of their samples, or defer (to a thread, to another stream, until a result is read), has
to be done before the chain ends, because each call's inputs depend on all results of the one before (`check/chain.py`).
The first inputs depend on a key that it is told when the clock runs.

Nothing that is subtracted is the contender's own figure: what a question takes is the baseline's, and what laying out
inputs and adding up results takes is the judge's. Of backwards, all forwards are made before the clock runs. On a GPU,
short calls are replayed as a CUDA graph, if they can be recorded, so that the host's time does not count.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.check.inputs import Draw, new_draw, new_seed
from swiglu_bench.measure.resources import UNJOINED
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Judging
from swiglu_bench.worker.worker import MOST_CALLS, ChainReport

CHAIN_MS = {"cuda": 50.0, "cpu": 15.0}
"""Of a chain; on a CPU that others use, a long one is interrupted, which a sample seldom is."""
FEWEST_CALLS = 4
WAITING_BYTES = {"cuda": 2**30, "cpu": 2**26}
"""What forwards may hold that wait for the backwards of a chain, by arithmetic; on a CPU, what a cache holds."""
ALIKE = 8.0
"""Contenders share chains of the same number of calls if none takes this many times as long as another. A slow
contender needs few calls, and a chain of so few calls of a fast one is too short for the parent's clock."""
TRIES = 15
FAILURES = 5
"""By how many more attempts a contender has to fail than pass; to be acquitted it has to pass more than fail."""
BUSY, BEYOND_DOUBT = 1.5, 2.0
"""BUSY: an attempt does not count if the baseline's chain takes so many times more or less than its samples say.
BEYOND_DOUBT: what still counts against a contender on a machine that was busy in some attempt, or if its calls take the
host longer than the GPU, since the host's time varies more. Without a baseline, which shows how busy the machine is,
nothing is proven."""
SHARE = 0.15
UNSEEN_MS = {"cuda": 0.005, "cpu": 0.05}
"""What a call may take beyond its samples at most, in addition to SHARE of them. Where the host takes longer than the
GPU, the share is of all that the host does in the loop, up to BEYOND_DOUBT: laying out a mixture's inputs may take the
host twice as long as the call."""
RECORDED_MS = 1.0
"""On a GPU, shorter calls are recorded: with what comes between them, they take the host longer than the GPU."""
FEWEST_ALIKE = 8
"""Chains of the baseline's processes from which it is known how far they are apart."""
TIMES_APART = 3.0
"""What it may take is what the baseline's own processes differ by in this case, so many times, within these bounds."""
LEAST_SHARE, LEAST_MS = 0.05, {"cuda": 0.001, "cpu": 0.02}
"""What it may always take: processes of the baseline are alike in more than their times."""
log = logging.getLogger(__name__)


class WrongResult(RuntimeError):
    """A result of the timed loop is wrong; the message says how."""


class WrongTime(RuntimeError):
    """The parent's clock does not agree with a contender's samples; the message says how."""


class Unsettled(RuntimeError):
    """It does not agree with the baseline's either: the machine is too busy for the check to be decided."""


def allowed_ms(most_ms: float, least_ms: float, apart_ms: float) -> float:
    """What may stay unexplained: what the baseline's own processes differ by, some times, within bounds."""
    return min(most_ms, max(least_ms, TIMES_APART * apart_ms))


class Chains:
    """The chains of one case."""

    def __init__(
        self, court: Judging, case: Case, contenders: Mapping[str, Contender], names: Callable[[str], Sequence[str]],
        equals: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`names` says which results a contender has to hand over; `equals` are further processes of the baseline."""
        self._court, self._case, self._contenders, self._names = court, case, contenders, names
        self._equals = [name for name in contenders if name in equals]
        self._recorded: set[str] = set()
        self._least: dict[tuple[object, ...], float] = {}
        """What is subtracted from a chain, the least so far: other programs add to it, which would hide work."""

    def disagreements(
        self, gpu_ms: Mapping[str, float], baseline: str = "", host_ms: Mapping[str, float] | None = None,
        apart: float = 1.0,
    ) -> dict[str, Exception]:  # fmt: skip
        """The contenders whose calls take longer than their samples say, `gpu_ms`, and how that was found.

        Chains are relative to the baseline's in the same attempt, because other programs may use the machine. Longer
        work is interrupted more often, so the baseline repeats its chains for as long as the longest of the others.
        `host_ms`: what calls take the host, on a GPU. `apart`: how many times as long as another a process of the
        baseline may take; what differs by less proves nothing.
        """
        if not self._contenders:
            return {}
        wrong: dict[str, Exception] = {}
        for name, ms in (host_ms or {}).items():
            if gpu_ms[name] < max(ms, RECORDED_MS):
                try:
                    self._record(name)
                except Exception as error:  # a contender may raise anything
                    wrong[name] = error
        slow_host = [name for name, ms in (host_ms or {}).items() if ms > gpu_ms[name]]
        host_bound = [name for name in slow_host if name not in self._recorded]
        claimed_ms = {name: max(ms, (host_ms or {})[name]) if name in host_bound else ms for name, ms in gpu_ms.items()}
        groups = self._groups(claimed_ms, baseline, wrong)
        found = [self._among(group, claimed_ms, baseline, host_bound, apart) for group in groups]
        failures = wrong | {n: failure for each in found for n, failure in each.items() if n != baseline}
        of_baseline = [each.get(baseline) for each in found]  # where it was settled once, it is
        faults = [failure for failure in of_baseline if failure and not isinstance(failure, Unsettled)]
        failure = faults[0] if faults else None if None in of_baseline else of_baseline[0]
        return failures | ({baseline: failure} if failure else {})

    def _record(self, name: str) -> None:
        unrecorded = self._case.mode is Mode.BACKWARD or self._case.accumulate > 1
        reason = unrecorded or self._contenders[name].tell("lay_chain", new_draw(), FEWEST_CALLS, True)
        if reason == UNJOINED:
            self._contenders[name].end()
            raise WrongResult(f"recorded as a CUDA graph, a stream that it forks has {UNJOINED}")
        if not reason:
            self._recorded.add(name)

    def _groups(self, claimed_ms: Mapping[str, float], baseline: str, without: Collection[str]) -> list[list[str]]:
        groups: list[list[str]] = []
        others = [name for name in self._contenders if name not in {baseline, *self._equals, *without}]
        for name in sorted(others, key=lambda name: claimed_ms[name], reverse=True):
            slowest_ms = claimed_ms[groups[-1][0]] if groups else float("inf")
            if slowest_ms < ALIKE * claimed_ms[name] or self._calls(slowest_ms) == MOST_CALLS:
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
        longest_ms = max(claimed_ms[name] / (ALIKE if name == baseline and names else 1.0) for name in contenders)
        calls = self._calls(longest_ms)
        was_busy, most, alike = False, dict[str, float](), list[float]()

        def times_claimed(name: str, chains: int = 1) -> float | None:
            try:
                return self._call_ms(name, draw, calls, chains, baseline) / claimed_ms[name]
            except Exception as error:  # a contender may raise anything
                failures[name] = error
                return None

        for _ in range(TRIES):
            left = [name for name in score if name not in failures and -FAILURES < score[name] < 1]
            if not left:
                break
            draw = new_draw()
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
                alike.append(found or 1.0)
                if len(alike) <= FEWEST_ALIKE:
                    alike += filter(None, map(times_claimed, self._equals))
            asked = {name: times_claimed(name) for name in left if name != baseline}
            took = {name: found for name, found in asked.items() if found is not None}
            most = {name: self._most(name, claimed_ms[name], calls, alike, name in host_bound) for name in took}
            if beside and any(multiple / slowed > most[name] for name, multiple in took.items()):
                found = times_claimed(baseline, as_long)  # others may have begun meanwhile
                was_busy |= found is not None and found >= BUSY
                calm = (found or 1.0) < BUSY
                took = {name: multiple for name, multiple in took.items() if calm or multiple / slowed <= most[name]}
                slowed = max(slowed, found or 1.0)
            for name, multiple in took.items():
                log.debug("%s: %.2f times its samples, %.2f may be, baseline %.2f", name, multiple, most[name], slowed)
                least[name] = min(least[name], multiple / slowed)
                score[name] += 1 if multiple / slowed <= most[name] else -1
        for name in set(score) - set(failures):
            what = f"its samples say that a call takes {claimed_ms[name]:.3f} ms"
            proven = score.get(baseline) == 1 and score[name] == -FAILURES
            beyond = BEYOND_DOUBT if was_busy or name in host_bound else most.get(name, 1.0)
            if proven and least[name] > max(beyond, apart):
                times = f"{least[name]:.2f} times as long by the wall clock, over calls in a row"
                failures[name] = WrongTime(f"{what}, but calls take at least {times}")
            elif score[name] <= 0:
                why = "while the machine is busy" if baseline in score else "without a baseline beside it"
                if proven and not was_busy and least[name] > apart:
                    why = "where the host takes longer than the GPU"
                failures[name] = Unsettled(f"{what}; the wall clock cannot confirm this {why}")
        return {name: failure for name, failure in failures.items() if name in score}

    @property
    def _device(self) -> str:
        return self._court.settings.device.type

    def _calls(self, claimed_ms: float) -> int:
        return max(FEWEST_CALLS, min(MOST_CALLS, int(CHAIN_MS[self._device] / max(claimed_ms, 1e-3))))

    def _most(self, name: str, claimed_ms: float, calls: int, alike: Sequence[float], host_bound: bool) -> float:
        """How many times what its samples say a call may take."""
        glue_ms, device = self._glue_ms(name, calls), self._device
        most_ms = SHARE * (claimed_ms + (glue_ms if host_bound else 0.0)) + UNSEEN_MS[device]
        least_ms = LEAST_SHARE * claimed_ms + LEAST_MS[device]
        apart_ms = (max(alike) / min(alike) - 1) * claimed_ms if len(alike) > 1 and self._equals else most_ms
        spared_ms = most_ms if host_bound else allowed_ms(most_ms, least_ms, apart_ms)
        return min(1 + spared_ms / claimed_ms, BEYOND_DOUBT)

    def _glue_ms(self, name: str, calls: int, draw: Draw | None = None) -> float:
        """What a chain takes for anything but calls; measured again with a draw."""
        key = tuple(self._names(name)), name in self._recorded
        if draw or key not in self._least:
            self._note_least(key, self._court.judge.glue_ms(draw or new_draw(), calls, *key))
        return self._least[key]

    def _note_least(self, what: tuple[object, ...], ms: float) -> float:
        self._least[what] = min(ms, self._least.get(what, ms))
        return self._least[what]

    def _call_ms(self, name: str, draw: Draw, calls: int, chains: int, baseline: str) -> float:
        """The time of one call of the case's mode by the wall clock, averaged over successive chains."""
        contender, names, asking_ms = self._contenders[name], self._names(name), 0.0
        if baseline in self._contenders:
            mine = min(self._asked_ms(self._contenders[baseline], None) for _ in range(3))
            asking_ms = self._note_least(("asking",), mine)
        glue_ms = self._glue_ms(name, calls, draw)
        each, took_ms, made = min(calls, self._waiting), 0.0, 0
        while made < calls * chains:
            if not made or self._case.mode is Mode.BACKWARD:
                contender.tell("lay_chain", draw, each, name in self._recorded)
            key = new_seed()
            marks: list[list[int]] = []
            took_ms += self._asked_ms(contender, key, marks) - asking_ms
            made += each
        if name in self._equals:
            return took_ms / made - glue_ms
        if len(marks) != each:
            raise WrongResult(f"it reports {len(marks)} calls instead of {each}")
        if wrong := self._court.judge.compare_chain(name, draw, key, marks, names):
            raise WrongResult(f"{wrong}, in the sum of {each} calls in a row")
        return took_ms / made - glue_ms

    @property
    def _waiting(self) -> int:
        """Calls whose forwards may wait for their backwards at a time."""
        if self._case.mode is not Mode.BACKWARD:
            return MOST_CALLS
        each = 6 * self._case.pairs * self._case.shape.intermediate * self._case.dtype.bytes
        return max(2, WAITING_BYTES[self._device] // max(1, each))

    def _asked_ms(self, contender: Contender, key: int | None, marks: list[list[int]] | None = None) -> float:
        """What a chain takes until its answer is here; without a key, a question that asks for nothing."""
        began = time.perf_counter()
        report = contender.ask(ChainReport, "chain", key)
        if marks is not None:
            marks += report.marks
        return (contender.answered - began) * 1e3
