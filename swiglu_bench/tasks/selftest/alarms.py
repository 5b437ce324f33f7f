"""Right implementations at random cases: every failure there is a false alarm, or a bug of the implementation."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swiglu_bench.cases.cases import (
    FOR_EXPERTS,
    PLAIN,
    Case,
    Dtype,
    Experts,
    Extras,
    Mode,
    Precision,
    RoutingKind,
    Scope,
    Shape,
)
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import Implementation, Step, implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine.machine import Machine, describe
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Status, TensorCheck
from swiglu_bench.tasks.contract.inputs import GPT_OSS_ALPHA, clear_limit
from swiglu_bench.tasks.contract.matrix import cannot_run
from swiglu_bench.tasks.contract.subject import inputs_of
from swiglu_bench.tasks.time import time
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.ahead import first_candidates
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.policy import Settings, Task

LARGEST = {"cpu": (200, 300, 130), "cuda": (2048, 4096, 2048)}
"""Hidden, intermediate and tokens that are drawn at most."""
LARGE = {"cpu": Shape("large", 256, 512, "sizes of the self-test", (256,)),
         "cuda": Shape("large", 4096, 8192, "sizes of the self-test", (4096,))}  # fmt: skip
"""Where a call takes long beside all that a turn of it needs otherwise."""
MULTIPLES, MULTIPLES_IN_FP8 = (1, 1, 16, 128), (1, 16, 16, 128)
"""What hidden and intermediate sizes are drawn as multiples of: some rows take no others, most of all in fp8."""
QUANTISED = 0.3
"""The share of the cases that have products in fp8, of those that have products."""
MOST_EXPERTS = 12
OF_GPT_OSS = 0.3
"""Of mixtures, the share whose shape has gpt-oss's biases and gates, in every scenario and in what is timed."""
TIMED = 10
"""Of so many cases, one is timed as well, each contender in its process, and before them two large ones."""
TIMED_TOGETHER = 4
"""Contenders, drawn, of those that a timed case has beside its baseline."""
RULE = Rule(warmup_rounds=2, min_rounds=10, max_rounds=12, min_s=0.0, budget_s=60.0)
TIMEOUT_S = 300.0
SLOW_TIMES = 4


@implementation(
    "slow",
    scopes=Scope,
    description=f"eager, whose forward runs {SLOW_TIMES} times in each call",
    offers=("bias", "limit"),
)
def slow(problem: Problem) -> Step:
    """A correct implementation that looks like a cheat: its turns take much longer than eager's."""
    step = pytorch.eager.build(problem)

    def forward(*given: Tensor) -> Tensor:
        for _ in range(SLOW_TIMES - 1):
            step.forward(*given)
        return step.forward(*given)

    return dataclasses.replace(step, forward=forward)


@dataclass(frozen=True)
class Trial:
    """One implementation at one random case."""

    implementation: str
    case: Case
    extras: Extras
    alarm: str
    """Why it failed; empty where it passed, as it must."""


def draw_case(source: random.Random, device_type: str) -> tuple[Case, Extras]:
    """Draw sizes evenly over orders of magnitude, and everything else at random."""
    hidden, intermediate, tokens = (round(most ** source.random()) for most in LARGEST[device_type])
    scope, dtype, precision = source.choice(list(Scope)), source.choice(list(Dtype)), Precision.UNQUANTISED
    if scope is not Scope.ACTIVATION and source.random() < QUANTISED:
        kinds = FOR_EXPERTS if scope is Scope.EXPERTS else Precision
        dtype, precision = Dtype.BFLOAT16, source.choice([kind for kind in kinds if kind])
    multiple = source.choice(MULTIPLES_IN_FP8 if precision else MULTIPLES)
    hidden, intermediate = (-(-size // multiple) * multiple for size in (hidden, intermediate))
    experts = None
    if scope is Scope.EXPERTS:
        count = source.randint(1, MOST_EXPERTS)
        experts = Experts(count, source.randint(1, count), source.choice(list(RoutingKind)))
    shape = Shape(f"{hidden}x{intermediate}", hidden, intermediate, "drawn", (tokens,), experts)
    case = Case(shape, tokens, dtype, scope, source.choice(list(Mode)), source.randrange(2**31), precision)
    kind = "plain" if precision else source.choice(("plain", "plain", "bias", "limit", "packed"))
    if scope is Scope.ACTIVATION and kind != "limit":
        kind = "plain"
    if scope is Scope.EXPERTS and kind == "packed":
        kind = "plain"
    if scope is Scope.EXPERTS and not case.precision and source.random() < OF_GPT_OSS:
        gates = Extras(bias=True, limit=7.0, alpha=GPT_OSS_ALPHA, interleaved=source.random() < 0.5)
        return dataclasses.replace(case, shape=dataclasses.replace(shape, extras=gates)), PLAIN
    limit = Extras(limit=1.0, alpha=GPT_OSS_ALPHA if scope is Scope.EXPERTS else 1.0)
    extras = {"bias": Extras(bias=True), "limit": limit, "packed": Extras(packed=True)}.get(kind, PLAIN)
    return case, extras


def takes(implementation: Implementation, case: Case, extras: Extras) -> bool:
    """Whether an implementation can be asked for a case with these extras."""
    return not implementation.refuses(case) and set(extras.offers) <= implementation.offers


def run_alarms(
    implementations: Sequence[Implementation],
    device: torch.device,
    seed: int,
    count: int,
    tell: Callable[[str, float], None],
) -> Iterator[Trial]:
    """Verify every available implementation at `count` random cases; a few of these are timed as well."""
    source, this = random.Random(seed), describe(device)
    here = [entry for entry in implementations if not cannot_run(entry, device)]
    used: dict[tuple[str, ...], tuple[TensorCheck, ...]] = {}
    timing = Settings(Task.TIME, device, "selftest", "selftest", rule=RULE, energy=False)
    with court_of(timing, this, TIMEOUT_S) as court:
        for mode in (Mode.FORWARD, Mode.STEP) if count else ():
            shape = LARGE[device.type]
            tell(f"a large {mode}", 0)
            yield from timed_trials(
                court, Case(shape, shape.tokens[0], Dtype.BFLOAT16, Scope.GLU, mode), [pytorch.eager]
            )
        for number in range(count):
            case, extras = draw_case(source, device.type)
            tell(f"case {number + 1} of {count}: {case.label}", number)
            drawn = Drawn.new()
            extras = _with_clear_limit(case, device, extras, drawn)
            asked = [entry for entry in here if takes(entry, case, extras)]
            place = Court(Settings(Task.VERIFY, device, "selftest", "selftest"), this, in_process=True)
            place.judge.begin_case(case, drawn.weights, extras)
            admitting = Admitting(place, case, drawn, thorough=True, extras=extras, used=used)
            with first_candidates():
                for entry in asked:
                    yield Trial(entry.name, case, extras, _alarm(admitting, place, entry))
            place.forget()
            if number % TIMED == 0 and extras == PLAIN:
                yield from timed_trials(court, case, _few(asked, place.settings.baseline_of(case), source))


@contextlib.contextmanager
def court_of(settings: Settings, this: Machine, timeout_s: float) -> Iterator[Court]:
    """Processes for cases that are timed, which end with the context."""
    with tempfile.TemporaryDirectory(prefix="swiglu-bench-") as folder:
        court = Court(settings, this, timeout_s, Path(folder))
        try:
            yield court
        finally:
            court.end()


def timed_trials(court: Court, case: Case, implementations: Sequence[Implementation]) -> Iterator[Trial]:
    """Each implementation that has a time, or should have one, and one that is right and slow.

    They are timed in earnest, for a false alarm of the checks that are made only then.
    """
    contenders = [*implementations, *([] if slow.refuses(case) else [slow])]
    for record in court.run(time, case, contenders):
        if record.status is not Status.SKIPPED:
            alarm = "" if record.status in {Status.OK, Status.UNSETTLED} else f"timed: {record.reason}"
            yield Trial(record.implementation, case, PLAIN, alarm)


def _few(asked: Sequence[Implementation], baseline: str, source: random.Random) -> list[Implementation]:
    others = [entry for entry in asked if entry.name != baseline]
    drawn = source.sample(others, min(TIMED_TOGETHER, len(others)))
    return [entry for entry in asked if entry.name == baseline or entry in drawn]


def _with_clear_limit(case: Case, device: torch.device, extras: Extras, drawn: Drawn) -> Extras:
    """Choose a limit that is near no value: at the bound the gradient jumps, and rounding decides."""
    if extras.limit is None:
        return extras
    plain = make_problem(case, device, seed=drawn.weights)
    limit = clear_limit(plain, [inputs_of(plain, draw) for draw in drawn.draws])
    return dataclasses.replace(extras, limit=limit) if limit is not None else PLAIN


def _alarm(admitting: Admitting, place: Court, implementation: Implementation) -> str:
    try:
        checks = admitting.admit(place.contender(implementation)).checks
    except Exception as error:
        return f"raises {one_line(error)}"
    return "; ".join(f"{check.tensor}: {check.reason}" for check in checks if not check.ok)
