"""One implementation at one scope under audit, and the ways in which checks ask and judge it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench.cases.cases import PLAIN, Case, Dtype, Experts, Extras, Mode, Scope, Shape
from swiglu_bench.cases.implementation import Implementation, Step
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
from swiglu_bench.worker.policy import Settings, Task

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


def failed(reason: str) -> CheckOutcome:
    """The implementation ran and did not do what was asked."""
    return CheckOutcome(AuditVerdict.FAIL, reason)


def unsupported(reason: str) -> CheckOutcome:
    """The implementation does not offer what was asked."""
    return CheckOutcome(AuditVerdict.UNSUPPORTED, reason)


def not_run(reason: str) -> CheckOutcome:
    """The check cannot be made here."""
    return CheckOutcome(AuditVerdict.NOT_RUN, reason)


@dataclass(frozen=True)
class Inputs:
    """Activations and an upstream gradient with other strides or values than those of a draw."""

    activations: Sequence[Tensor]
    upstream: Tensor

    def changed(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """These inputs with changed activations; of experts, with a changed x."""
        first, *rest = (value.clone() for value in self.activations)
        routing = [value for value in rest if not value.is_floating_point()]
        return Inputs([change(first), *(rest if routing else map(change, rest))], self.upstream)


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

    def values(
        self, case: Case | None = None, *, extras: Extras = PLAIN, values: Values = Values.NORMAL,
        drawn: Drawn | None = None,
    ) -> CheckOutcome:  # fmt: skip
        """Whether it passes what a sweep asks of one problem before timing."""
        admitting, contender = self.admitting(case, extras=extras, values=values, drawn=drawn)
        return verdict(admitting.admit(contender).checks)


def inputs_of(problem: Problem, draw: Draw) -> Inputs:
    """What a draw lays out, in new tensors."""
    desk = Desk(problem)
    return Inputs(desk.activations(draw), desk.upstream(draw))


def judge_on(problem: Problem, inputs: Inputs, produced: Produced) -> CheckOutcome:
    """The verdict on results for given inputs."""
    expected = Built(REFERENCE, problem).run_on([value.clone() for value in inputs.activations], inputs.upstream)
    return judge_beside(problem, inputs, produced, expected)


def judge_beside(problem: Problem, inputs: Inputs, produced: Produced, expected: Produced) -> CheckOutcome:
    """The verdict on results beside the results `expected` of eager, in its dtypes."""
    truth = compute_truth(problem, inputs.activations, inputs.upstream)

    def judge(name: str, value: Tensor | None) -> TensorCheck:
        eager = expected[name]
        fault = form_fault(value, truth[name].shape, eager.dtype, problem.device)
        arithmetic = tolerance.arithmetic_of(problem.case, eager.dtype)
        return tolerance.check(name, value, truth[name], tolerance.tensor_error(eager, truth[name]), arithmetic, fault)

    return verdict(judge(name, value) for name, value in produced.items())


def verdict(checks: Iterable[TensorCheck]) -> CheckOutcome:
    """Passed, or failed with every tensor's reason."""
    reasons = [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]
    return failed("; ".join(reasons)) if reasons else PASSED
