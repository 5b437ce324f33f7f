"""The reverse of the zoo: real implementations at random cases, where every failure is a false alarm or a bug."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from swiglu_bench.audit.inputs import clear_limit
from swiglu_bench.audit.matrix import unavailable
from swiglu_bench.check.admission import admit
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.judge import Judge, make_judge
from swiglu_bench.spec.cases import PLAIN, VARIANTS, Case, Dtype, Extras, Mode, Scope, Shape
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.spec.problem import Problem

LARGEST = {"cpu": (200, 300, 130), "cuda": (2048, 4096, 2048)}
"""Hidden, intermediate and tokens that are drawn at most."""


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
    scope = source.choice(list(Scope))
    shape = Shape(f"{hidden}x{intermediate}", hidden, intermediate, "drawn", (tokens,))
    case = Case(shape, tokens, source.choice(list(Dtype)), scope, source.choice(list(Mode)), source.randrange(2**31))
    kind = source.choice(("plain", "plain", "bias", "limit", "packed"))
    if scope is Scope.ACTIVATION and kind != "limit":
        kind = "plain"
    extras = {"bias": Extras(bias=True), "limit": Extras(limit=1.0), "packed": Extras(packed=True)}.get(kind, PLAIN)
    return case, extras


def run_alarms(
    implementations: Sequence[Implementation], device: torch.device, seed: int, count: int, tell: Callable[[str], None]
) -> Iterator[Trialled]:
    """Every available implementation at `count` random cases that it can be asked for."""
    source = random.Random(seed)
    for number in range(count):
        case, extras = draw_case(source, device.type)
        tell(f"case {number + 1} of {count}: {case.label}")
        problem, extras = _problem(case, device, extras)
        judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
        wanted = {name for name in ("bias", "limit", "packed") if getattr(extras, name) not in (False, None)}
        for implementation in implementations:
            if implementation.refuses(case) or not wanted <= implementation.offers:
                continue
            if unavailable(implementation, device):
                continue
            yield Trialled(implementation.name, case, extras, _alarm(implementation, problem, judges))
        torch.compiler.reset()


def _problem(case: Case, device: torch.device, extras: Extras) -> tuple[Problem, Extras]:
    """The problem, with a limit that is near no value: at the bound the gradient jumps, and rounding decides."""
    plain = make_problem(case, device)
    if extras.limit is not None:
        limit = clear_limit(plain)
        extras = Extras(limit=limit) if limit is not None else PLAIN
    return make_problem(case, device, extras, plain.unannounced), extras


def _alarm(implementation: Implementation, problem: Problem, judges: Sequence[Judge]) -> str:
    try:
        checks = admit(implementation, problem, judges, thorough=True).checks
    except Exception as error:
        return f"raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "; ".join(f"{check.tensor}: {check.reason}" for check in checks if not check.ok)
