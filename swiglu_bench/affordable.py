"""Whether a CPU can do in reasonable time what was asked for, told before anything starts. A GPU always can."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import WEIGHTS, Dtype, Mode
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine.ceilings_cache import Limits
from swiglu_bench.measure.clock import make_clock
from swiglu_bench.worker.settings import Task

if TYPE_CHECKING:
    from swiglu_bench.machine.machine import Machine
    from swiglu_bench.request import Request

REASONABLE_S = 1800.0
"""Also the default of --budget where nothing is timed."""
CALLS = 4
"""How often a checked implementation is called at full size, with its backward; all other calls are of few tokens."""
JUDGED_S = 1e-7
"""Of an element of a result, each time that it is judged: one run with 44 million gradients in fp32, on two cores of a
Xeon that others used as well; without them it takes less."""
JUDGEMENTS, JUDGEMENTS_BESIDE = 4, 8
"""Where a case is timed: of each contender's results, and of the baseline's other processes and the truth together."""
SLOWEST_FLOPS_PER_S = 1e10
"""What any CPU does: less work than that needs no measurement."""
INTERPRETED = (64, 256, 256)
"""Tokens, hidden and intermediate of the call by which the interpreter's rate is measured; a second or two."""


def check_work(this: Machine, device: torch.device, work: Mapping[Dtype, float], option: str, fewer: str) -> None:
    """Raise BadInput for `work`, in operations by dtype, that takes this CPU more than half an hour."""
    if device.type == "cpu" and (seconds := _seconds(this, device, work)) > REASONABLE_S:
        raise BadInput(
            f"{option}: this would take about {_told(seconds)} on this CPU; give a smaller one or fewer {fewer}, or "
            "--budget to run it anyway."
        )


def check_sweep(request: Request, this: Machine) -> None:
    """Raise BadInput for what takes this CPU longer than its --budget.

    Where cases are timed, for whose rounds the budget is, the checks alone may take half an hour, or the budgets of all
    cases. The sizes that commands choose themselves are never refused.
    """
    settings, options = request.settings, request.options
    timed, chosen = settings.task is Task.TIME, options.shapes is not None or options.tokens is not None
    if not chosen or not request.places.in_order or settings.device.type != "cpu":
        return
    work, interpreted, judged_s = dict.fromkeys(Dtype, 0.0), 0.0, 0.0
    for case in request.cases:
        here = [
            known
            for known in request.implementations
            if known.refuses(case) is None and known.unavailable("cpu", settings.interpreter) is None
        ]
        by_triton = sum(known.backend == "triton" for known in here)
        names = (*WEIGHTS[case.scope], "x")
        work[case.dtype] += (len(here) - by_triton + 1) * CALLS * costs.flops(case, names)  # 1: the reference
        interpreted += by_triton * CALLS * costs.flops(dataclasses.replace(case, mode=Mode.FORWARD), names)
        if timed:
            size = costs.tensor_elements(case)
            results = size["output"] + sum(size[name] for name in names if case.mode is not Mode.FORWARD)
            judged_s += JUDGED_S * results * (len(here) * JUDGEMENTS + JUDGEMENTS_BESIDE)
    share = len(request.cases) if timed else 1  # the budget is for each case
    allowed_s = max(REASONABLE_S, options.budget * share) if timed else options.budget
    if timed and judged_s + sum(work.values()) / SLOWEST_FLOPS_PER_S <= allowed_s:
        return
    seconds = judged_s + _seconds(this, settings.device, work)
    if interpreted and seconds <= allowed_s:
        seconds += interpreted / _interpreter_flops_per_s()
    if seconds > allowed_s:
        what = "to check the results" if timed else str(settings.task)
        raise BadInput(
            f"--shapes: {what} would take about {_told(seconds)} on this CPU; give smaller ones, fewer "
            f"--tokens or --impl, or --budget {math.ceil(seconds / share)} to run it anyway."
        )


def _seconds(this: Machine, device: torch.device, work: Mapping[Dtype, float]) -> float:
    limits = Limits(this, device, make_clock(device))
    return sum(
        flops / limits.product(getattr(torch, dtype.value)).value / 1e12 for dtype, flops in work.items() if flops
    )


def _interpreter_flops_per_s() -> float:
    """The rate at which Triton's interpreter, which the process has switched on, runs the portable forward."""
    from swiglu_kernels import swiglu_glu

    tokens, hidden, intermediate = INTERPRETED
    x, *weights = (torch.randn(rows, hidden) for rows in (tokens, intermediate, intermediate))
    started = time.perf_counter()
    swiglu_glu(x, *weights)
    return 4 * math.prod(INTERPRETED) / (time.perf_counter() - started)


def _told(seconds: float) -> str:
    return f"{seconds / 60:,.0f} minutes" if seconds < 2 * 3600 else f"{seconds / 3600:,.0f} hours"
