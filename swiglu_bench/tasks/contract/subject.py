"""One implementation at one scope under audit, and the ways in which checks ask and judge it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swiglu_bench.cases.cases import PLAIN, Case, Dtype, Experts, Extras, Mode, Scope, Shape
from swiglu_bench.cases.implementation import Implementation, Offer, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import Desk, Draw, Values, make_problem
from swiglu_bench.check.judge import REFERENCE, compute_truth
from swiglu_bench.check.results import form_fault
from swiglu_bench.machine import machine
from swiglu_bench.rows.record import AuditVerdict, TensorCheck
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.settings import Settings, Task

TOKENS, HIDDEN, INTERMEDIATE = 19, 48, 80
EXPERTS = Experts(6, 3)
DRAW = Draw(1)
_describe = functools.cache(machine.describe)


@dataclass(frozen=True)
class CheckOutcome:
    """How a check ended, and why."""

    verdict: AuditVerdict
    reason: str = ""


PASSED = CheckOutcome(AuditVerdict.PASS)


failed = partial(CheckOutcome, AuditVerdict.FAIL)
"""The implementation ran and did not do what was asked."""
unsupported = partial(CheckOutcome, AuditVerdict.UNSUPPORTED)
"""The implementation does not offer what was asked."""
not_run = partial(CheckOutcome, AuditVerdict.NOT_RUN)
"""The check cannot be made here."""


class Inputs(NamedTuple):
    """Activations and an upstream gradient, which may have other strides or values than those of a draw."""

    activations: Sequence[Tensor]
    upstream: Tensor


@dataclass(frozen=True)
class Subject:
    """The implementation that is audited, its scope and device, and the dtype of checks that have none of their own."""

    implementation: Implementation
    scope: Scope
    device: torch.device
    dtype: Dtype

    def case(
        self, tokens: int = TOKENS, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, dtype: Dtype | None = None,
        experts: Experts = EXPERTS,
    ) -> Case:  # fmt: skip
        """A small case of its scope."""
        mixture = experts if self.scope is Scope.EXPERTS else None
        shape = Shape("audit", hidden, intermediate, "sizes of the audit", (tokens,), mixture)
        return Case(shape, tokens, dtype or self.dtype, self.scope, Mode.STEP)

    def problem(self, case: Case | None = None, extras: Extras = PLAIN) -> Problem:
        """The weights of a small case."""
        return make_problem(case or self.case(), self.device, extras, seed=0)

    def built(self, problem: Problem) -> Built:
        """The implementation built for a problem."""
        return Built(self.implementation, problem)

    def wrapped(self, around: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Subject:
        """This implementation with `around` applied to its forward."""
        build = self.implementation.build

        def build_wrapped(problem: Problem) -> Step:
            step = build(problem)
            return dataclasses.replace(step, forward=around(step.forward))

        return dataclasses.replace(self, implementation=dataclasses.replace(self.implementation, build=build_wrapped))

    def admitting(
        self, case: Case | None = None, *, extras: Extras = PLAIN, values: Values = Values.NORMAL,
        drawn: Drawn | None = None,
    ) -> tuple[Admitting, Contender]:  # fmt: skip
        """What a sweep asks of a contender before it gets a time, in this process; but for a model's use."""
        case = case or self.case()
        court = Court(Settings(Task.VERIFY, self.device, "audit", ""), _describe(self.device), in_process=True)
        drawn = drawn or Drawn.new(values)
        court.judge.begin_case(case, drawn.weights, extras)
        return Admitting(court, case, drawn, extras=extras), court.contender(self.implementation)

    def values(self, case: Case | None = None, **asked: Any) -> CheckOutcome:
        """Whether it passes what a sweep asks of one problem before timing; `asked` as `admitting` has it."""
        admitting, contender = self.admitting(case, **asked)
        return verdict(admitting.admit(contender).checks)


@dataclass(frozen=True)
class Check:
    """A question and how it is asked."""

    name: str
    about: str
    """One sentence on what is asked."""
    ask: Callable[[Subject], CheckOutcome]
    scopes: Sequence[Scope] = tuple(Scope)
    """Where it is asked."""
    needs_backward: bool = False
    """Whether it is about the backward, which an implementation may not have."""
    offer: Offer | None = None
    """What an implementation has to offer to be asked."""


class Checks(list[Check]):
    """The checks of one module, in order."""

    def add(self, name: str, **fields: Any) -> Callable[[Callable[[Subject], CheckOutcome]], None]:
        """Decorate the function that asks, whose docstring says what; `fields` are those of Check."""

        def note(ask: Callable[[Subject], CheckOutcome]) -> None:
            self.append(Check(name, (ask.__doc__ or "").splitlines()[0], ask, **fields))

        return note


def inputs_of(problem: Problem, draw: Draw) -> Inputs:
    """What a draw lays out, in new tensors."""
    desk = Desk(problem)
    return Inputs(desk.activations(draw), desk.upstream(draw))


def judge_on(problem: Problem, inputs: Inputs, produced: Produced, expected: Produced | None = None) -> CheckOutcome:
    """The verdict on results for given inputs; `expected`: what eager yields, whose dtypes they must have."""
    if expected is None:
        expected = Built(REFERENCE, problem).run_on([value.clone() for value in inputs.activations], inputs.upstream)
    truth, checks = compute_truth(problem, inputs.activations, inputs.upstream), []
    for name, value in produced.items():
        eager = expected[name]
        fault = form_fault(value, truth[name].shape, eager.dtype, problem.device)
        arithmetic = tolerance.arithmetic_of(problem.case, eager.dtype)
        error = tolerance.tensor_error(eager, truth[name])
        checks.append(tolerance.check(name, value, truth[name], error, arithmetic, fault))
    return verdict(checks)


def verdict(checks: Iterable[TensorCheck]) -> CheckOutcome:
    """Passed, or failed with every tensor's reason."""
    reasons = [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]
    return failed("; ".join(reasons)) if reasons else PASSED
