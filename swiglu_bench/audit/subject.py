"""One implementation at one scope under audit, and the ways in which checks ask and judge it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.check.admission import admit
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.judge import make_judge
from swiglu_bench.rows.audit_cell import CellStatus
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.spec.cases import PLAIN, VARIANTS, Case, Dtype, Extras, Mode, Scope, Shape
from swiglu_bench.spec.implementation import Implementation, Step
from swiglu_bench.spec.problem import Problem

TOKENS, HIDDEN, INTERMEDIATE = 19, 48, 80


@dataclass(frozen=True)
class Outcome:
    """How a check ended, and why."""

    verdict: CellStatus
    reason: str = ""


PASSED = Outcome(CellStatus.PASS)


def failed(reason: str) -> Outcome:
    """It ran and did not do what was asked."""
    return Outcome(CellStatus.FAIL, reason)


def unsupported(reason: str) -> Outcome:
    """It does not offer this."""
    return Outcome(CellStatus.UNSUPPORTED, reason)


def not_run(reason: str) -> Outcome:
    """It cannot be asked here."""
    return Outcome(CellStatus.NOT_RUN, reason)


@dataclass(frozen=True)
class Subject:
    """Who is audited, where, and in which dtype unless a check has its own."""

    implementation: Implementation
    scope: Scope
    device: torch.device
    dtype: Dtype

    def problem(
        self,
        tokens: int = TOKENS,
        hidden: int = HIDDEN,
        intermediate: int = INTERMEDIATE,
        dtype: Dtype | None = None,
        extras: Extras = PLAIN,
        unannounced: int | None = None,
    ) -> Problem:
        """A small problem of its scope."""
        shape = Shape("audit", hidden, intermediate, "sizes of the audit", (tokens,))
        case = Case(shape, tokens, dtype or self.dtype, self.scope, Mode.STEP)
        return make_problem(case, self.device, extras, unannounced)

    def built(self, problem: Problem) -> Built:
        """The implementation built for a problem."""
        return Built(self.implementation, problem)

    def wrapped(self, around: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Subject:
        """The same implementation with something put around its forward."""
        build = self.implementation.build

        def build_wrapped(problem: Problem) -> Step:
            step = build(problem)
            return dataclasses.replace(step, forward=around(step.forward))

        return dataclasses.replace(self, implementation=dataclasses.replace(self.implementation, build=build_wrapped))

    def values(self, problem: Problem | None = None, **changes: Any) -> Outcome:
        """Whether it passes what a sweep asks before timing: on a problem, or on one that differs by `changes`."""
        problem = problem or self.problem(**changes)
        judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
        return verdict(admit(self.implementation, problem, judges).checks)


def verdict(checks: Iterable[TensorCheck]) -> Outcome:
    """Passed, or failed with every tensor's reason."""
    reasons = [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]
    return failed("; ".join(reasons)) if reasons else PASSED
