"""The checks of the contract, in order, and what answers them in a contender's process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swiglu_bench.cases.cases import Dtype, Precision, Scope
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.results import GlobalState
from swiglu_bench.machine import machine
from swiglu_bench.measure.clock import DeviceLost, answers
from swiglu_bench.rows.record import Record, row_of
from swiglu_bench.tasks.contract import differentiation, inputs, surroundings
from swiglu_bench.tasks.contract.subject import CheckOutcome, Subject, not_run, unsupported
from swiglu_bench.worker.policy import Settings
from swiglu_bench.worker.worker import MOST_REASON, CheckReport


@dataclass(frozen=True)
class Check:
    """A question and how it is asked."""

    name: str
    ask: Callable[[Subject], CheckOutcome]
    scopes: tuple[Scope, ...] = tuple(Scope)
    """Where it is asked."""
    needs_backward: bool = False
    """Whether it is about the backward, which an implementation may not have."""

    @property
    def about(self) -> str:
        """One sentence on what is asked."""
        return (self.ask.__doc__ or "").splitlines()[0]


CHECKS = (
    Check("float32", inputs.float32),
    Check("float16", inputs.float16),
    Check("bfloat16", inputs.bfloat16),
    Check("odd sizes", inputs.odd_sizes),
    Check("0 tokens", inputs.no_tokens),
    Check("1 token", inputs.one_token),
    Check("idle experts", inputs.idle_experts, (Scope.EXPERTS,)),
    Check("crowded expert", inputs.crowded_expert, (Scope.EXPERTS,)),
    Check("every expert", inputs.every_expert, (Scope.EXPERTS,)),
    Check("non-contiguous", inputs.non_contiguous),
    Check("outliers", inputs.outliers),
    Check("zeros", inputs.zeros),
    Check("NaN and Inf", inputs.nan_and_inf),
    Check("very large", inputs.very_large),
    Check("bias", inputs.bias),
    Check("clamp", inputs.clamp),
    Check("packed weights", inputs.packed),
    Check("model use", differentiation.model_use, needs_backward=True),
    Check("mutated inputs", differentiation.mutated_inputs),
    Check("saved tensors", differentiation.saved_tensors, needs_backward=True),
    Check("determinism", differentiation.determinism),
    Check("second backward", differentiation.second_backward, needs_backward=True),
    Check("double backward", differentiation.double_backward, needs_backward=True),
    Check("checkpointing", differentiation.checkpointing, needs_backward=True),
    Check("autocast", surroundings.autocast),
    Check("compile fullgraph", surroundings.compile_fullgraph),
    Check("opcheck", surroundings.opcheck),
    Check("CUDA graph", surroundings.cuda_graph),
    Check("> 2^31 elements", surroundings.beyond_int32),
)


class AuditBench:
    """Answers in a contender's process, one check at a time."""

    def __init__(self, settings: Settings, implementation: Implementation, state: GlobalState | None = None) -> None:
        """`state` is for another bench."""
        del state
        self._device, self._implementation = settings.device, implementation

    def audit(self, scope: Scope, dtype: Dtype | None, name: str) -> CheckReport:
        """How a check ends; raises DeviceLost where it broke the device."""
        (check,) = checks_of(scope, [name])
        subject = Subject(self._implementation, scope, self._device, dtype or _default(self._device))
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


def cell(
    implementation: Implementation,
    scope: Scope,
    check: str,
    outcome: CheckOutcome,
    device: torch.device,
    dtype: Dtype | None,
) -> Record:
    """How a check ended, as a line of the matrix."""
    return row_of(
        "audit", {}, implementation=implementation.name, scope=scope.value, check=check, verdict=outcome.verdict,
        reason=outcome.reason, dtype=(dtype or _default(device)).value, device=device.type,
    )  # fmt: skip


def _default(device: torch.device) -> Dtype:
    return Dtype.BFLOAT16 if device.type == "cuda" else Dtype.FLOAT32


def _ask(check: Check, subject: Subject) -> CheckOutcome:
    if check.needs_backward and not subject.implementation.gradients(subject.scope):
        return unsupported("it has no backward")
    torch.compiler.reset()  # a function compiled for one check too many is refused
    try:
        return check.ask(subject)
    except torch.OutOfMemoryError as error:
        return not_run(f"the device ran out of memory: {one_line(error)}")
    except Exception as error:  # an implementation may raise anything; that is how most of them refuse
        return unsupported(f"raises {one_line(error)}")
