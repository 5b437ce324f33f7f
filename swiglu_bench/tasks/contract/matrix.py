"""The checks of the contract, in order, and what answers them in a contender's process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch

from swiglu_bench.cases.cases import Dtype, Precision, Scope
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.conduct import GlobalState
from swiglu_bench.machine import machine
from swiglu_bench.measure.clock import DeviceLost, answers
from swiglu_bench.tasks.contract import inputs, surroundings
from swiglu_bench.tasks.contract.subject import Check, CheckOutcome, Subject, not_run, unsupported
from swiglu_bench.worker.reports import MOST_REASON, CheckReport
from swiglu_bench.worker.settings import Settings

CHECKS = (*inputs.CHECKS, *surroundings.CHECKS)


class AuditBench:
    """Answers in a contender's process, one check at a time."""

    def __init__(self, settings: Settings, implementation: Implementation, state: GlobalState | None = None) -> None:
        """`state` is for another bench."""
        del state
        self._device, self._implementation = settings.device, implementation

    def audit(self, scope: Scope, dtype: Dtype | None, name: str) -> CheckReport:
        """How a check ends; raises DeviceLost where it broke the device."""
        (check,) = checks_of(scope, [name])
        subject = Subject(self._implementation, scope, self._device, dtype or default_dtype(self._device))
        outcome = _ask(check, subject)
        if not answers(self._device):
            raise DeviceLost(f"it broke the device: {outcome.reason}")
        return CheckReport(verdict=outcome.verdict.value, reason=outcome.reason[:MOST_REASON])

    def forget(self) -> None:
        """Do nothing: no state is kept between checks."""


def checks_of(scope: Scope, only: Sequence[str] = ()) -> list[Check]:
    """What is asked at a scope, of the checks named in `only` unless that is empty."""
    return [check for check in CHECKS if scope in check.scopes and (not only or check.name in only)]


def unavailable(implementation: Implementation, device: torch.device) -> str | None:
    """Why an implementation cannot be audited here, or None."""
    if Precision.UNQUANTISED not in implementation.precisions:
        return (
            "It quantises to fp8 only, and the checks of the contract ask for products in the dtype of their operands."
        )
    return cannot_run(implementation, device)


def ignore_warnings_of_values() -> None:
    """Until filters are put back: Triton's interpreter computes by numpy, which warns of NaN and Inf that are tried."""
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter|numpy\.")


def cannot_run(implementation: Implementation, device: torch.device) -> str | None:
    """Why an implementation cannot be called here at all, or None."""
    interpreter = os.environ.get("TRITON_INTERPRET") == "1"
    return implementation.unavailable(device.type, interpreter, machine.capability(device))


def default_dtype(device: torch.device) -> Dtype:
    """The dtype of checks that have none of their own."""
    return Dtype.BFLOAT16 if device.type == "cuda" else Dtype.FLOAT32


def _ask(check: Check, subject: Subject) -> CheckOutcome:
    if check.needs_backward and not subject.implementation.gradients(subject.scope):
        return unsupported("it has no backward")
    if check.offer and subject.scope is Scope.ACTIVATION and check.offer != "limit":
        return unsupported("there are no projections at this scope")
    if check.offer == "packed" and subject.scope is Scope.EXPERTS:
        return unsupported("each row packs the weights of experts as models do")
    if check.offer and check.offer not in subject.implementation.offers:
        return unsupported("it does not offer this")
    torch.compiler.reset()  # a function compiled for one check too many is refused
    try:
        return check.ask(subject)
    except torch.OutOfMemoryError as error:
        return not_run(f"the device ran out of memory: {one_line(error)}")
    except Exception as error:  # an implementation may raise anything; that is how most of them refuse
        return unsupported(f"raises {one_line(error)}")
