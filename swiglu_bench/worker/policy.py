"""Which implementations take part in a case, which cases are affordable, and the rows before anything has run."""

from __future__ import annotations

import math

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import WEIGHTS, Case, Mode
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import machine
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.worker.settings import Settings, Task

CONTEXT_BYTES = {"cuda": 2**29, "cpu": 2**28}
"""Of the device's memory that a process takes before it does anything."""
SPARE = 1.1


def blank(settings: Settings, this: machine.Machine, case: Case, implementation: Implementation) -> Record:
    """The row of one implementation at one case before anything has run."""
    experts = case.shape.experts
    return Record(
        run_id=settings.run_id,
        command=settings.command,
        shape=case.name,
        hidden=case.shape.hidden,
        intermediate=case.shape.intermediate,
        tokens=case.tokens,
        dtype=case.dtype.value,
        scope=case.scope.value,
        mode=case.mode.value,
        seed=case.seed,
        experts=experts.count if experts else None,
        top_k=experts.top_k if experts else None,
        routing=experts.routing.value if experts else "",
        implementation=implementation.name,
        weight_layout=implementation.weight_layout,
        gradients=" ".join(implementation.gradients(case.scope)),
        precision=implementation.precision_of(case).value,
        weights_quantised=implementation.weights_quantised(case),
        status=Status.OK,
        interpreted=settings.interpreter and implementation.backend == "triton",
        host=this.host,
        gpu_index=this.gpu_index,
        gpu_uuid=this.gpu_uuid,
        device=this.device,
        driver=this.driver,
        cuda=this.cuda,
        torch=this.torch,
        triton=this.triton,
        version=this.version,
        timestamp=machine.now(),
    )


def inapplicable(settings: Settings, this: machine.Machine, case: Case, implementation: Implementation) -> str | None:
    """Why the implementation does not take part in the case, or None."""
    refusal = implementation.refuses(case)
    if refusal:
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
    each = SPARE * bytes_used + CONTEXT_BYTES[settings.device.type]
    return processes * each


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
    once = max(
        costs.flops(case, names) / ceilings.matmul_tflops / 1e12,
        costs.min_bytes(case, names) / ceilings.copy_gbps / 1e9,
    )
    seconds = once * (contenders + 2) * (rule.min_rounds + rule.warmup_rounds)
    if seconds > rule.budget_s:
        return (
            f"Its fewest rounds would take about {seconds:.0f} s, more than the budget of {rule.budget_s:g} s; "
            f"--budget {math.ceil(seconds)} would time it."
        )
    return None
