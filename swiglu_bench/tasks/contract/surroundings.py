"""Checks of what an implementation is put into: torch.compile, the dispatcher, autocast, CUDA graphs, huge tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swiglu_bench.cases.cases import ACTIVATIONS, Case, Dtype, Experts, Mode
from swiglu_bench.check.inputs import leaf
from swiglu_bench.check.judge import REFERENCE
from swiglu_bench.machine.machine import free_memory_bytes
from swiglu_bench.tasks.contract.subject import (
    DRAW,
    PASSED,
    CheckOutcome,
    Subject,
    failed,
    inputs_of,
    judge_beside,
    judge_on,
    not_run,
    unsupported,
    verdict,
)  # fmt: skip
from swiglu_bench.worker.worker import CallReport

BUILT_IN = {"aten", "prim", "prims", "inductor", "profiler", "c10d", "_c10d_functional"}
LARGE_HIDDEN, LARGE_INTERMEDIATE = 64, 8192
LARGE_TOKENS = 2**31 // LARGE_INTERMEDIATE + 101
LARGE_EXPERTS = Experts(4, 2)
LARGE_TENSORS = 14
"""Of [tokens, intermediate], that the huge case may hold at a time."""
NEIGHBOURS = 4


def compile_fullgraph(subject: Subject) -> CheckOutcome:
    """Inside torch.compile(fullgraph=True): by Inductor on a GPU, on a CPU by AOTAutograd's eager backend."""
    backend = "inductor" if subject.device.type == "cuda" else "aot_eager"

    def around(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled: Callable[..., Tensor] = torch.compile(forward, fullgraph=True, dynamic=False, backend=backend)
        return compiled

    try:
        return subject.wrapped(around).values()
    finally:
        torch.compiler.reset()


class _Calls(TorchDispatchMode):
    """Records which custom operators a block calls, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if function.namespace not in BUILT_IN:
            self.found.setdefault(function, (args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def opcheck(subject: Subject) -> CheckOutcome:
    """torch.library.opcheck on every custom operator that its forward calls, with the arguments of that call."""
    built = subject.built(subject.problem())
    activations = built.desk.activations(DRAW)
    calls = _Calls()
    try:
        with calls:
            built.forward(*(leaf(value, bool(built.gradients)) for value in activations))
    except RuntimeError as error:
        if "dispatch mode" not in str(error):
            raise
        return unsupported("torch.compile does not let its operators be watched")
    if not calls.found:
        return unsupported("it calls no custom operator")
    for operator, (given, named) in calls.found.items():
        arguments = tuple(_as_leaf(value, bool(built.gradients)) for value in given)
        results = torch.library.opcheck(operator, arguments, named, raise_exception=False)
        wrong = [f"{test}: {result}" for test, result in results.items() if result != "SUCCESS"]
        if wrong:
            return failed(f"{operator}: {' '.join('; '.join(wrong).split())[:400]}")
    return PASSED


def _as_leaf(value: Any, requires_grad: bool) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_(requires_grad)


def autocast(subject: Subject) -> CheckOutcome:
    """fp32 tensors under bf16 autocast: dtypes as eager has them there, errors within eager's budget there."""
    problem = subject.problem(subject.case(dtype=Dtype.FLOAT32))

    def around(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def under_autocast(*activations: Tensor) -> Tensor:
            with torch.autocast(subject.device.type, torch.bfloat16):
                return forward(*activations)

        return under_autocast

    eager = dataclasses.replace(subject, implementation=REFERENCE).wrapped(around).built(problem).train(DRAW)
    produced = subject.wrapped(around).built(problem).train(DRAW)
    return judge_beside(problem, inputs_of(problem, DRAW), produced, eager)


def cuda_graph(subject: Subject) -> CheckOutcome:
    """Inference recorded as a CUDA graph, replayed on inputs that were changed in place."""
    if subject.device.type != "cuda":
        return not_run("CUDA graphs exist on a GPU only")
    admitting, contender = subject.admitting()
    admitting.build(contender)
    contender.ask(CallReport, "check", DRAW, False)
    reason = contender.tell("record", Mode.FORWARD)
    if reason:
        torch.cuda.synchronize(subject.device)
        return unsupported(reason)
    return verdict(admitting.replayed(contender))


def beyond_int32(subject: Subject) -> CheckOutcome:
    """Tensors of more than 2^31 elements, judged in the rows at both ends and around the 2^31st element.

    The upstream gradient is zero in all other rows, so that weight gradients are sums over the judged ones.
    """
    element = Dtype.BFLOAT16.bytes
    needed = LARGE_TENSORS * LARGE_TOKENS * LARGE_INTERMEDIATE * element
    if subject.device.type != "cuda":
        return not_run(f"it needs a GPU with {needed / 2**30:.0f} GiB free")
    torch.cuda.empty_cache()
    free = free_memory_bytes(subject.device)
    if free < needed:
        return not_run(f"it needs {needed / 2**30:.0f} GiB of memory and {free / 2**30:.0f} GiB are free")
    case = subject.case(LARGE_TOKENS, LARGE_HIDDEN, LARGE_INTERMEDIATE, Dtype.BFLOAT16, LARGE_EXPERTS)
    rows = rows_to_judge(LARGE_TOKENS, LARGE_INTERMEDIATE)
    if case.shape.experts:  # as many rows as tokens elsewhere
        case = dataclasses.replace(case, tokens=LARGE_TOKENS // LARGE_EXPERTS.top_k)
        rows = rows_to_judge(case.tokens, LARGE_EXPERTS.top_k * LARGE_INTERMEDIATE)
    try:
        return _judge_rows(subject, case, rows)
    finally:
        torch.cuda.empty_cache()


def rows_to_judge(tokens: int, width: int) -> list[int]:
    """Rows at both ends and around every multiple of 2^31 elements."""
    edges = [0, *(edge // width for edge in range(2**31, tokens * width, 2**31)), tokens - 1]
    near = {row for edge in edges for row in range(edge - NEIGHBOURS, edge + NEIGHBOURS + 1)}
    return sorted(row for row in near if 0 <= row < tokens)


def _judge_rows(subject: Subject, case: Case, rows: list[int]) -> CheckOutcome:
    """Run a case as a whole and judge some of its rows, against the problem that consists of those rows alone."""
    part = subject.problem(dataclasses.replace(case, tokens=len(rows)))
    inputs = inputs_of(part, DRAW)
    index = torch.tensor(rows, device=subject.device)
    generator = torch.Generator(device=subject.device).manual_seed(case.seed)

    def whole(rows_there: Tensor, fill: bool) -> Tensor:
        value = (
            rows_there[:1].repeat(case.tokens, 1) if fill else rows_there.new_zeros(case.tokens, rows_there.shape[1])
        )
        if fill and value.is_floating_point():
            value.normal_(generator=generator)
        return value.index_copy_(0, index, rows_there)

    names = ACTIVATIONS[case.scope]
    activations = [whole(there, True) for there in inputs.activations]
    upstream = whole(inputs.upstream, False)
    produced = subject.built(dataclasses.replace(part, case=case)).run_on(activations, upstream)
    per_row = {"output", *names}
    judged = {
        name: value[index] if name in per_row and value is not None and len(value) == case.tokens else value
        for name, value in produced.items()
    }
    outcome = judge_on(part, inputs, judged)
    if outcome is not PASSED:
        return outcome
    for name in names:
        gradient, there = produced.get(name), judged.get(name)
        if gradient is not None and there is not None and gradient.count_nonzero() != there.count_nonzero():
            return failed(f"{name}: a gradient that is not zero in rows whose upstream gradient is")
    return PASSED
