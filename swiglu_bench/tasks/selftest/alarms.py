"""The reverse of the zoo: real implementations at random cases, where every failure is a false alarm or a bug."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swiglu_bench.cases.cases import (
    FOR_EXPERTS,
    PLAIN,
    Case,
    Dtype,
    Experts,
    Extras,
    Mode,
    Precision,
    Routing,
    Scope,
    Shape,
)
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine.machine import Machine, describe
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Status, TensorCheck
from swiglu_bench.tasks.contract.inputs import GPT_OSS_ALPHA, clear_limit
from swiglu_bench.tasks.contract.matrix import cannot_run
from swiglu_bench.tasks.contract.subject import inputs_of
from swiglu_bench.tasks.selftest.right import slow
from swiglu_bench.tasks.time import time
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.ahead import first_candidates
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.settings import Settings, Task

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


@dataclass(frozen=True)
class Trialled:
    """One implementation at one random case."""

    implementation: str
    case: Case
    extras: Extras
    alarm: str
    """Why it failed; empty where it passed, as it must."""


def draw_case(source: random.Random, device_type: str) -> tuple[Case, Extras]:
    """Sizes evenly over orders of magnitude, everything else by lot."""
    hidden, intermediate, tokens = (round(most ** source.random()) for most in LARGEST[device_type])
    scope, dtype, precision = source.choice(list(Scope)), source.choice(list(Dtype)), Precision.UNQUANTISED
    if scope is not Scope.ACTIVATION and source.random() < QUANTISED:
        kinds = FOR_EXPERTS if scope is Scope.EXPERTS else Precision
        dtype, precision = Dtype.BFLOAT16, source.choice([one for one in kinds if one])
    multiple = source.choice(MULTIPLES_IN_FP8 if precision else MULTIPLES)
    hidden, intermediate = (-(-size // multiple) * multiple for size in (hidden, intermediate))
    experts = None
    if scope is Scope.EXPERTS:
        count = source.randint(1, MOST_EXPERTS)
        experts = Experts(count, source.randint(1, count), source.choice(list(Routing)))
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


def run_alarms(
    implementations: Sequence[Implementation],
    device: torch.device,
    seed: int,
    count: int,
    tell: Callable[[str, float], None],
) -> Iterator[Trialled]:
    """Every available implementation at `count` random cases that it can be asked for."""
    source, this = random.Random(seed), describe(device)
    here = [one for one in implementations if not cannot_run(one, device)]
    used: dict[tuple[str, ...], tuple[TensorCheck, ...]] = {}
    timing = _Timing(device, this)
    try:
        for mode in (Mode.FORWARD, Mode.STEP) if count else ():
            shape = LARGE[device.type]
            tell(f"a large {mode}", 0)
            yield from timing.trial(Case(shape, shape.tokens[0], Dtype.BFLOAT16, Scope.GLU, mode), [pytorch.eager])
        for number in range(count):
            case, extras = draw_case(source, device.type)
            tell(f"case {number + 1} of {count}: {case.label}", number)
            drawn = Drawn.new()
            extras = _with_clear_limit(case, device, extras, drawn)
            asked = [one for one in here if not one.refuses(case) and set(extras.offers) <= one.offers]
            place = Court(Settings(Task.VERIFY, device, "selftest", "selftest"), this, in_process=True)
            place.judge.begin_case(case, drawn.weights, extras)
            admitting = Admitting(place, case, drawn, thorough=True, extras=extras, used=used)
            with first_candidates():
                for one in asked:
                    yield Trialled(one.name, case, extras, _alarm(admitting, place, one))
            place.forget()
            if number % TIMED == 0 and extras == PLAIN:
                yield from timing.trial(case, _few(asked, place.settings.baseline_of(case), source))
    finally:
        timing.end()


class _Timing:
    """Cases that are timed in earnest, for a false alarm of what is only looked at then."""

    def __init__(self, device: torch.device, this: Machine) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="swiglu-bench-")
        settings = Settings(Task.TIME, device, "selftest", "selftest", rule=RULE, energy=False)
        self._court = Court(settings, this, TIMEOUT_S, Path(self._folder.name))

    def trial(self, case: Case, implementations: Sequence[Implementation]) -> Iterator[Trialled]:
        """Each implementation that has a time, or should have one, and one that is right and slow."""
        contenders = [*implementations, *([] if slow.refuses(case) else [slow])]
        for record in self._court.run(time, case, contenders):
            if record.status is not Status.SKIPPED:
                alarm = "" if record.status in {Status.OK, Status.UNSETTLED} else f"timed: {record.reason}"
                yield Trialled(record.implementation, case, PLAIN, alarm)

    def end(self) -> None:
        """End its processes."""
        self._court.end()
        self._folder.cleanup()


def _few(asked: Sequence[Implementation], baseline: str, source: random.Random) -> list[Implementation]:
    others = [one for one in asked if one.name != baseline]
    drawn = source.sample(others, min(TIMED_TOGETHER, len(others)))
    return [one for one in asked if one.name == baseline or one in drawn]


def _with_clear_limit(case: Case, device: torch.device, extras: Extras, drawn: Drawn) -> Extras:
    """A limit that is near no value: at the bound the gradient jumps, and rounding decides."""
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
