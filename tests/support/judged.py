"""What the judge says of results of this process."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.built import Produced
from swiglu_bench.check.inputs import Draw
from swiglu_bench.check.judge import Judge
from swiglu_bench.check.results import form_fault
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.tasks.contract.inputs import Subject


def judge_here(judge: Judge, produced: Produced, draw: Draw, others: Iterable[Tensor] = ()) -> tuple[TensorCheck, ...]:
    """Verdicts on results, their form included; `others` are tensors whose memory none may share."""
    truth, others = judge.truth(draw, backward=produced.keys() != {"output"}), list(others)
    found = {
        name: form_fault(value, truth.values[name].shape, judge.dtype, judge.problem.device, others)
        for name, value in produced.items()
    }
    return judge.judge(produced, draw, faults={name: fault for name, fault in found.items() if fault})


def admitting(one: Implementation, case: Case, **options: Any) -> tuple[Any, Any]:
    """What admits an implementation to a case as in a sweep, in this process, and its contender."""
    return Subject(one, case.scope, torch.device("cpu"), case.dtype).admitting(case, **options)


def checks_of(one: Implementation, case: Case) -> tuple[TensorCheck, ...]:
    """All verdicts on its results."""
    admits, contender = admitting(one, case)
    checks: tuple[TensorCheck, ...] = admits.admit(contender).checks
    return checks
