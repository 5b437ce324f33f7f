"""What a run is told before its first case; who takes part, and what fits into memory, budget and time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import WEIGHTS, Case, Dtype, Mode, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import machine
from swiglu_bench.measure.clock import make_clock
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Record
from swiglu_bench.worker.environments import packages_of

if TYPE_CHECKING:
    from swiglu_bench.machine.ceilings_cache import Ceilings

CONTEXT_BYTES = {"cuda": 2**29, "cpu": 2**28}
"""Of the device's memory that a process takes before it does anything."""
SPARE = 1.1
REASONABLE_S = 1800.0
"""Also the default of --budget where nothing is timed."""
CALLS, CALLS_OF_USE = 4, {Mode.FORWARD: 11, Mode.BACKWARD: 24, Mode.STEP: 24}
"""How often a checked implementation is called at full size, with its backward, and how often more by the scenarios of
a model's use, by the case's mode; all other calls are of few tokens."""
JUDGED_S = 1e-7
"""Of an element of a result, each time that it is judged: measured with 44 million gradients in fp32 on two busy cores
of a Xeon."""
JUDGEMENTS, JUDGEMENTS_BESIDE = 4, 8
"""Where a case is timed: of each contender's results, and of the baseline's other processes and the truth together."""
SLOWEST_FLOPS_PER_S = 1e10
"""What any CPU does: less work than that needs no measurement."""
INTERPRETED = (64, 256, 256)
"""Tokens, hidden and intermediate of the call by which the interpreter's rate is measured; a second or two."""

Tell = Callable[[str, float], object]
"""Hears what is being done, and which share of the case is done."""


class Task(StrEnum):
    """What a run wants of each contender."""

    TIME = "time"
    MEMORY = "memory"
    VERIFY = "verify"


@dataclass(frozen=True)
class Settings:
    """How a run goes about its cases."""

    task: Task
    device: torch.device
    command: str
    run_id: str
    baseline: str | None = None
    """The implementation that ratios are relative to, or "" for no ratios; None: as `baseline_of` says."""
    rule: Rule = field(default_factory=Rule)
    cold_l2: bool = True
    hot_beside: bool = False
    """Time calls with a hot L2 as well, after the rounds."""
    layers: int = 1
    """The number of layers that a CUDA graph goes through."""
    new_tokens: int = 0
    """After the rounds, call each contender with so many further token counts."""
    energy: bool = True
    """On a GPU, measure joules per call."""
    detail: bool = False
    """Show more: of times, what is measured beside the rounds at every token count, not only at few; of tensors, how
    the errors of their elements are distributed."""
    interpreter: bool = False
    trace: bool = False
    """After the rounds, write a trace of each contender's calls below `folder`."""
    ncu: bool = False
    """After the rounds, read hardware counters of one call of each contender by Nsight Compute."""
    folder: Path | None = None
    """Where the run's files go."""
    sanitizer: str = ""
    """The tool of compute-sanitizer under which `verify` calls each implementation once, in place of its checks."""

    def baseline_of(self, case: Case) -> str:
        """The implementation that ratios at a case are relative to; eager's loop over experts takes far longer."""
        if self.baseline is not None:
            return self.baseline
        return "grouped" if case.scope is Scope.EXPERTS else "eager"


def blank(settings: Settings, this: machine.Machine, case: Case, implementation: Implementation) -> Record:
    """The row of one implementation at one case before anything has run."""
    shape, experts = case.shape, case.shape.experts
    of_machine = ("host", "gpu_index", "gpu_uuid", "device", "driver", "cuda", "torch", "triton", "version")
    packages = packages_of(implementation)
    versions = {name: getattr(this, name) for name in of_machine}
    versions |= {name: version for name, version in packages.items() if name in versions}
    record = Record(
        run_id=settings.run_id, command=settings.command, shape=case.name, hidden=shape.hidden,
        intermediate=shape.intermediate, tokens=case.tokens, dtype=case.dtype.value, scope=case.scope.value,
        mode=case.mode.value, accumulate=case.accumulate if case.accumulate > 1 else None, seed=case.seed,
        experts=experts.count if experts else None,
        top_k=experts.top_k if experts else None, routing=experts.routing.value if experts else "",
        implementation=implementation.name, weight_layout=implementation.weight_layout,
        gradients=" ".join(implementation.gradients(case.scope)), precision=implementation.precision_of(case).value,
        weights_quantised=implementation.weights_quantised(case), timestamp=machine.now(),
        interpreted=settings.interpreter and implementation.backend == "triton",
        packages=" ".join(f"{name}=={version}" for name, version in packages.items()), **versions,
    )  # fmt: skip
    if packages:
        record.remark(f"It runs with {', '.join(f'{name} {version}' for name, version in packages.items())}.")
    return record


def inapplicable(settings: Settings, this: machine.Machine, case: Case, implementation: Implementation) -> str | None:
    """Why the implementation does not take part in the case, or None."""
    if refusal := implementation.refuses(case):
        return refusal
    if settings.task is Task.TIME and case.mode is not Mode.FORWARD and implementation.trains == "nothing":
        return "It has no backward."
    return implementation.unavailable(settings.device.type, settings.interpreter, this.compute_capability)


def compiles(settings: Settings, implementation: Implementation) -> bool:
    """Whether the implementation compiles kernels when it is called."""
    return implementation.backend == "inductor" or (implementation.backend != "torch" and not settings.interpreter)


def seats(settings: Settings, case: Case, free_bytes: int, idle: int = 0) -> int:
    """How many contenders' processes fit on the device beside the judge's, and `idle` ones that hold no case."""
    context = CONTEXT_BYTES[settings.device.type]
    each = SPARE * costs.contender_bytes(case, settings.layers) + context
    return max(0, int((free_bytes - SPARE * costs.judge_bytes(case) - idle * context) / each))


def needed_bytes(settings: Settings, case: Case, processes: int = 1) -> float:
    """The device's memory that the judge's process and one contender's take; `processes` do so at the same time."""
    bytes_used = costs.judge_bytes(case) + costs.contender_bytes(case, settings.layers)
    return processes * (SPARE * bytes_used + CONTEXT_BYTES[settings.device.type])


def use_bytes(settings: Settings, case: Case) -> float:
    """The device's memory that checking the use as a model uses a layer takes beside a case that is there already."""
    return SPARE * costs.use_bytes(case)


def too_large(settings: Settings, case: Case, free_bytes: int, processes: int = 1) -> str | None:
    """Why the case is too large for the device's memory, or None."""
    need = needed_bytes(settings, case, processes)
    if need <= free_bytes:
        return None
    together = f" for {processes} processes together" if processes > 1 else ""
    return f"It needs about {need / 2**30:.1f} GiB{together} and the device has {free_bytes / 2**30:.1f} GiB free."


def too_long(settings: Settings, case: Case, contenders: int, ceilings: Ceilings) -> str | None:
    """Why the case's rounds do not fit into the budget, or None."""
    names, rule = WEIGHTS[case.scope] + ("x",), settings.rule
    products_s = costs.flops(case, names) / ceilings.matmul_tflops / 1e12
    bytes_s = costs.min_bytes(case, names) / ceilings.copy_gbps / 1e9
    seconds = max(products_s, bytes_s) * (contenders + 2) * (rule.min_rounds + rule.warmup_rounds)
    if seconds <= rule.budget_s:
        return None
    much = f"about {seconds:.0f} s, more than the budget of {rule.budget_s:g} s"
    return f"Its minimum of rounds would take {much}; --budget {math.ceil(seconds)} would time it."


# Whether a CPU can do in reasonable time what was asked for, told before anything starts; a GPU always can


def check_work(this: machine.Machine, device: torch.device, work: Mapping[Dtype, float], option: str, few: str) -> None:
    """Raise BadInput for `work`, in operations by dtype, that takes this CPU more than half an hour."""
    if device.type == "cpu" and (seconds := _seconds(this, device, work)) > REASONABLE_S:
        advice = f"give a smaller one or fewer {few}, or --budget to run it anyway"
        raise BadInput(f"{option}: this would take about {_told(seconds)} on this CPU; {advice}.")


def check_sweep(
    settings: Settings, cases: Sequence[Case], implementations: Sequence[Implementation], this: machine.Machine,
    budget_s: float,
) -> None:  # fmt: skip
    """Raise BadInput for what takes this CPU longer than --budget, or if timed, half an hour and all cases' budgets."""
    timed, work, interpreted, judged_s = settings.task is Task.TIME, dict.fromkeys(Dtype, 0.0), 0.0, 0.0
    for case in cases:
        asked = [known for known in implementations if known.refuses(case) is None]
        here = [known for known in asked if known.unavailable("cpu", settings.interpreter) is None]
        by_triton = sum(known.backend == "triton" for known in here)
        names = (*WEIGHTS[case.scope], "x")
        each = (CALLS + CALLS_OF_USE[case.mode]) * costs.flops(case, names)
        work[case.dtype] += (len(here) - by_triton + 2) * each  # 2: the reference, and truth
        interpreted += by_triton * CALLS * costs.flops(dataclasses.replace(case, mode=Mode.FORWARD), names)
        if timed:
            size = costs.tensor_elements(case)
            results = size["output"] + sum(size[name] for name in names if case.mode is not Mode.FORWARD)
            judged_s += JUDGED_S * results * (len(here) * JUDGEMENTS + JUDGEMENTS_BESIDE)
    share = len(cases) if timed else 1  # the budget is for each case
    allowed_s = max(REASONABLE_S, budget_s * share) if timed else budget_s
    if timed and judged_s + sum(work.values()) / SLOWEST_FLOPS_PER_S <= allowed_s:
        return
    seconds = judged_s + _seconds(this, settings.device, work)
    if interpreted and seconds <= allowed_s:
        seconds += interpreted / _interpreter_flops_per_s()
    if seconds > allowed_s:
        what = "to check the results" if timed else str(settings.task)
        enough = f"--budget {math.ceil(seconds / share)}"
        advice = f"give smaller ones, fewer --tokens or --impl, or {enough} to run it anyway"
        raise BadInput(f"--shapes: {what} would take about {_told(seconds)} on this CPU; {advice}.")


def _seconds(this: machine.Machine, device: torch.device, work: Mapping[Dtype, float]) -> float:
    from swiglu_bench.machine.ceilings_cache import Limits

    limits = Limits(this, device, make_clock(device))
    asked = {getattr(torch, dtype.value): flops for dtype, flops in work.items() if flops}
    return sum(flops / limits.product(dtype).value / 1e12 for dtype, flops in asked.items())


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
