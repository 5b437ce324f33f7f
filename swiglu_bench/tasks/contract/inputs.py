"""One implementation at one scope under audit, how checks ask and judge it, and the checks of what goes in: dtypes,
sizes, strides, values, biases, bounds and packed weights.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from swiglu_bench.cases import cases
from swiglu_bench.cases.implementation import Implementation, Offer, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import Desk, Draw, Values, every_other_column, make_problem
from swiglu_bench.check.judge import REFERENCE, compute_truth
from swiglu_bench.check.results import form_fault
from swiglu_bench.machine import machine
from swiglu_bench.rows.record import AuditVerdict, TensorCheck
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.policy import Settings, Task

TOKENS, HIDDEN, INTERMEDIATE = 19, 48, 80
EXPERTS = cases.Experts(6, 3)
DRAW = Draw(1)
EVERYWHERE = tuple(cases.Scope)
_describe = functools.cache(machine.describe)
VERY_LARGE = {torch.float16: 1e4, torch.bfloat16: 1e20, torch.float32: 1e20}
"""A size at which gate and up still fit the dtype and their product does not."""
GPT_OSS_ALPHA = 1.702
OVERFLOW_MARGIN = 2.0
"""What a sum that nearly overflows may be off by, in either direction."""


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
    scope: cases.Scope
    device: torch.device
    dtype: cases.Dtype

    def case(
        self, tokens: int = TOKENS, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE,
        dtype: cases.Dtype | None = None, experts: cases.Experts = EXPERTS,
    ) -> cases.Case:  # fmt: skip
        """A small case of its scope."""
        mixture = experts if self.scope is cases.Scope.EXPERTS else None
        shape = cases.Shape("audit", hidden, intermediate, "sizes of the audit", (tokens,), mixture)
        return cases.Case(shape, tokens, dtype or self.dtype, self.scope, cases.Mode.STEP)

    def problem(self, case: cases.Case | None = None, extras: cases.Extras = cases.PLAIN) -> Problem:
        """The weights of a small case."""
        return make_problem(case or self.case(), self.device, extras, seed=0)

    def built(self, problem: Problem) -> Built:
        """The implementation built for a problem."""
        return Built(self.implementation, problem)

    def wrapped(self, around: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Self:
        """This implementation with `around` applied to its forward."""
        build = self.implementation.build

        def build_wrapped(problem: Problem) -> Step:
            step = build(problem)
            return replace(step, forward=around(step.forward))

        return replace(self, implementation=replace(self.implementation, build=build_wrapped))

    def admitting(
        self, case: cases.Case | None = None, *, extras: cases.Extras = cases.PLAIN, values: Values = Values.NORMAL,
        drawn: Drawn | None = None,
    ) -> tuple[Admitting, Contender]:  # fmt: skip
        """What a sweep asks of a contender before it gets a time, in this process; but for a model's use."""
        case = case or self.case()
        court = Court(Settings(Task.VERIFY, self.device, "audit", ""), _describe(self.device), in_process=True)
        drawn = drawn or Drawn.new(values)
        court.judge.begin_case(case, drawn.weights, extras)
        return Admitting(court, case, drawn, extras=extras), court.contender(self.implementation)

    def values(self, case: cases.Case | None = None, **asked: Any) -> CheckOutcome:
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
    scopes: Sequence[cases.Scope] = EVERYWHERE
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
    backward = produced.keys() != {"output"}
    truth, checks = compute_truth(problem, inputs.activations, inputs.upstream if backward else None), []
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


# What goes in

CHECKS = Checks()


def _passes(
    name: str, about: str, values: Values = Values.NORMAL, scopes: Sequence[cases.Scope] = EVERYWHERE, **case: Any
) -> None:
    """Add the check that a case which differs in `case` from the usual one passes what a sweep asks before timing."""
    CHECKS.append(Check(name, about, lambda subject: subject.values(subject.case(**case), values=values), scopes))


_of_experts = partial(_passes, scopes=(cases.Scope.EXPERTS,))
_passes("float32", "Output and gradients in fp32.", dtype=cases.Dtype.FLOAT32)
_passes("float16", "Output and gradients in fp16.", dtype=cases.Dtype.FLOAT16)
_passes("bfloat16", "Output and gradients in bf16.", dtype=cases.Dtype.BFLOAT16)
_passes("odd sizes", "Sizes that no tile divides.", tokens=37, hidden=51, intermediate=83)
_passes("0 tokens", "An empty batch: an empty output, weight gradients of zeros.", tokens=0)
_passes("1 token", "As in decoding.", tokens=1)
_of_experts("idle experts", "Fewer tokens than experts: those without a token have weight gradients of zeros.",
            tokens=2, experts=cases.Experts(16, 2))  # fmt: skip
_of_experts(
    "crowded expert", "One expert has all tokens.", tokens=300, experts=cases.Experts(4, 1, cases.RoutingKind.SINGLE)
)
_of_experts("every expert", "Each token has every expert.", experts=cases.Experts(4, 4))


@CHECKS.add("non-contiguous")
def _non_contiguous(subject: Subject) -> CheckOutcome:
    """Activations and upstream gradients with gaps, transposed, and one value expanded."""
    problem = subject.problem()
    built, inputs = subject.built(problem), inputs_of(problem, DRAW)
    ones = inputs.upstream.new_ones(()).expand_as(inputs.upstream)
    layouts: tuple[tuple[str, Callable[[Tensor], Tensor], Tensor], ...] = (
        ("an expanded upstream gradient", torch.clone, ones),
        ("every other column", every_other_column, every_other_column(inputs.upstream)),
        ("transposed", _transposed, _transposed(inputs.upstream)),
    )
    for name, lay, upstream in layouts:
        produced = built.run_on([lay(value) for value in inputs.activations], upstream)
        outcome = judge_on(problem, Inputs(inputs.activations, upstream), produced)
        if outcome is not PASSED:
            return failed(f"with {name}: {outcome.reason}")
    return PASSED


def _transposed(value: Tensor) -> Tensor:
    return value.t().contiguous().t()


_passes(
    "outliers", "Tokens and a few channels far larger than the others, as in trained models; within the same error "
    "budget.", Values.WIDE,
)  # fmt: skip
_passes("zeros", "Activations of zeros: everything that depends on them is exactly zero.", Values.ZEROS)


def _spoilt(value: Tensor) -> Tensor:
    value[3, 5], value[7, 11], value[13, 2] = torch.nan, torch.inf, -torch.inf
    return value


def _enlarged(value: Tensor) -> Tensor:
    value[9] *= VERY_LARGE[value.dtype]  # of two, terms that overflow might cancel in a weight's gradient
    return value


def _propagates(subject: Subject, change: Callable[[Tensor], Tensor]) -> CheckOutcome:
    """Finite where eager and the truth both are, not finite where neither is; where they differ, either is right.

    Within a factor of OVERFLOW_MARGIN of the dtype's largest number, rounding decides, and either is right as well.
    """
    problem = subject.problem()
    drawn, upstream = inputs_of(problem, DRAW)
    names = cases.ACTIVATIONS[subject.scope]
    kept = {cases.INDEX, "top_k_weights"}
    activations = [value if name in kept else change(value) for name, value in zip(names, drawn, strict=True)]
    truth = compute_truth(problem, activations, upstream)
    both = (Built(implementation, problem) for implementation in (REFERENCE, subject.implementation))
    eager, produced = (built.run_on([value.clone() for value in activations], upstream) for built in both)
    for name, value in produced.items():
        expected = eager[name]
        if value is None or expected is None:
            return failed(f"{name}: no gradient came back")
        finite, got = torch.isfinite(expected), torch.isfinite(value)
        largest = torch.finfo(expected.dtype).max
        size = truth[name].abs()  # NaN neither fits nor exceeds
        fits, exceeds = size <= largest / OVERFLOW_MARGIN, ~(size <= largest * OVERFLOW_MARGIN)
        swallowed, spread = ~finite & exceeds & got, finite & fits & ~got
        for mask, what in ((swallowed, "is finite where eager is not"), (spread, "is not finite where eager is")):
            if mask.any():
                place = tuple(mask.nonzero()[0].tolist())
                return failed(f"{name} {what}: in {int(mask.sum())} of {value.numel()} elements, first at {place}")
    return PASSED


CHECKS += [
    Check("NaN and Inf", "A NaN, an Inf and a -Inf in three tokens: they reach what they reach in eager, and nothing "
          "else.", partial(_propagates, change=_spoilt)),
    Check("very large", "A token so large that the product of gate and up overflows: Inf where eager has it, and "
          "nowhere else.", partial(_propagates, change=_enlarged)),
    Check("bias", "A bias on each projection, with its gradient.",
          lambda subject: subject.values(extras=cases.Extras(bias=True)), offer="bias"),
]  # fmt: skip


@CHECKS.add("clamp", offer="limit")
def _clamp(subject: Subject) -> CheckOutcome:
    """gpt-oss's bound on gate and up, where no value is so near the bound that rounding decides on its gradient."""
    of_experts = subject.scope is cases.Scope.EXPERTS
    case = subject.case(tokens=6, experts=cases.Experts(4, 1)) if of_experts else subject.case()
    plain, draws = subject.problem(case), (DRAW, Draw(DRAW.seed + 10))
    limit = clear_limit(plain, [inputs_of(plain, draw) for draw in draws])
    alpha = GPT_OSS_ALPHA if of_experts else 1.0
    return subject.values(case, extras=cases.Extras(limit=limit, alpha=alpha), drawn=Drawn(0, draws))


def clear_limit(problem: Problem, inputs: Sequence[Inputs]) -> float | None:
    """The middle of the widest gap between the sizes of gate and up, among those that bound some and not most."""
    sizes: list[Tensor] = []
    for given, _ in inputs:
        pair = given if len(given) == 2 else [given[0] @ problem.weights[name].mT for name in ("w_gate", "w_up")]
        if problem.case.scope is cases.Scope.EXPERTS:  # of each token's own experts
            index = given[1]
            pair = [value[index, torch.arange(len(index), device=value.device)[:, None]] for value in pair]
        sizes += [value.double().abs().flatten() for value in pair]
    ordered = torch.cat(sizes).sort().values
    ordered = ordered[(ordered > 1.0) & (ordered < 2.8)]
    if ordered.numel() < 2:
        return None
    widest = int(ordered.diff().argmax())
    return float(ordered[widest] + ordered[widest + 1]) / 2


@CHECKS.add("packed weights", offer="packed")
def _packed(subject: Subject) -> CheckOutcome:
    """Gate and up weights in one matrix, which has one gradient."""
    problem = subject.problem(extras=cases.Extras(packed=True))
    shapes = {tuple(value.shape) for value in subject.built(problem).parameters.values()}
    hidden, intermediate = problem.case.shape.hidden, problem.case.shape.intermediate
    if (2 * intermediate, hidden) not in shapes:
        return failed(f"it keeps weights of {sorted(shapes)}, not one of {(2 * intermediate, hidden)}")
    return subject.values(extras=cases.Extras(packed=True))
