"""The checks of the contract: those of `inputs.py`; of calls: the backward, run twice, differentiated, recomputed or
repeated, and what a call does to its inputs; and of what an implementation is put into: torch.compile, the dispatcher,
autocast, CUDA graphs, huge tensors. `AuditBench` answers all of them in a contender's process.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from swiglu_bench.cases.cases import ACTIVATIONS, Case, Dtype, Experts, Mode, Precision, Scope
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, leaf, new_seed, torch_dtype
from swiglu_bench.check.judge import REFERENCE, in_fp64
from swiglu_bench.check.results import GlobalState, fingerprint
from swiglu_bench.check.tolerance import arithmetic_of, check, tensor_error
from swiglu_bench.machine import machine
from swiglu_bench.measure.clock import DeviceLost, answers
from swiglu_bench.tasks.contract import inputs
from swiglu_bench.tasks.contract.inputs import (
    DRAW,
    PASSED,
    Check,
    CheckOutcome,
    Checks,
    Inputs,
    Subject,
    failed,
    inputs_of,
    judge_on,
    not_run,
    unsupported,
    verdict,
)
from swiglu_bench.worker.policy import Settings
from swiglu_bench.worker.worker import MOST_REASON, CallReport, CheckReport

REPEATS = 5
BUILT_IN = {"aten", "prim", "prims", "inductor", "profiler", "c10d", "_c10d_functional"}
LARGE_HIDDEN, LARGE_INTERMEDIATE = 64, 8192
LARGE_TOKENS = 2**31 // LARGE_INTERMEDIATE + 101
LARGE_EXPERTS = Experts(4, 2)
LARGE_TENSORS = 14
"""Of [tokens, intermediate], that the huge case may hold at a time."""
FAR_TOKENS, FAR_HIDDEN, FAR_INTERMEDIATE = 5, 4096, 2048
FAR_EXPERTS = Experts(2**31 // (FAR_HIDDEN * FAR_INTERMEDIATE) + 8, 4)
FAR_COPIES = 9
"""Of [experts, intermediate, hidden], that the check of far experts may hold at a time."""
NEIGHBOURS = 4
_CHECKS = Checks()


@_CHECKS.add("model use")
def _model_use(subject: Subject) -> CheckOutcome:
    """Calls that share a graph, gradients that add up, weights that change, a second layer, batches, frozen weights."""
    admitting, contender = subject.admitting()
    return verdict(admitting.use(contender))


@_CHECKS.add("mutated inputs")
def _mutated_inputs(subject: Subject) -> CheckOutcome:
    """Which of its inputs, weights and the upstream gradient are other than before."""
    built = subject.built(subject.problem())
    desk = built.desk

    def marks() -> dict[str, Tensor]:
        found = {("the upstream gradient" if n == "upstream" else n): fingerprint(v) for n, v in desk.given.items()}
        return found | {name: fingerprint(value) for name, value in built.parameters.items()}

    desk.activations(DRAW)
    desk.upstream(DRAW)
    before = marks()
    for run, after in ((built.infer, "inference"), (built.train, "its backward")):
        run(DRAW)
        changed = {name for name, mark in marks().items() if not torch.equal(mark, before[name])}
        text = f"{after} overwrites {', '.join(sorted(changed))}"
        if changed and run == built.train and changed <= subject.implementation.overwrites:
            return unsupported(f"{text}, as it declares")
        if changed:
            return failed(text)
    return PASSED


@_CHECKS.add("saved tensors", needs_backward=True)
def _saved_tensors(subject: Subject) -> CheckOutcome:
    """What a hook on saved tensors keeps is left as it was by the backward."""
    held: list[tuple[Tensor, Tensor]] = []

    def keep(saved: Tensor) -> Tensor:
        held.append((saved, saved.detach().clone()))
        return saved

    built = subject.built(subject.problem())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        built.train(DRAW)
    overwritten = [now for now, was in held if not torch.equal(fingerprint(now.detach()), fingerprint(was))]
    changed = sorted({tuple(tensor.shape) for tensor in overwritten})
    if not changed:
        return PASSED
    text = f"the backward overwrites saved tensors of {', '.join(map(str, changed))} that somebody holds"
    return unsupported(f"{text}, as it declares") if subject.implementation.overwrites else failed(text)


@_CHECKS.add("determinism")
def _determinism(subject: Subject) -> CheckOutcome:
    """Five runs, bit for bit."""
    built = subject.built(subject.problem())
    draw = Draw(new_seed())
    first: dict[str, Tensor] = {}
    for number in range(REPEATS):
        for name, value in built.train(draw).items():
            if value is None:
                return failed(f"{name}: no gradient came back")
            mark = fingerprint(value)
            if not torch.equal(first.setdefault(name, mark), mark):
                return failed(f"{name} of run {number + 1} of {REPEATS} differs from that of run 1")
    return PASSED


@_CHECKS.add("second backward", needs_backward=True)
def _second_backward(subject: Subject) -> CheckOutcome:
    """A second backward through a retained graph: the same again, an error, or in silence something else."""
    problem = subject.problem()
    built = subject.built(problem)
    built.train(DRAW)  # what the first backward alone cannot do is no matter of the second
    try:
        produced = built.run_on(*inputs_of(problem, DRAW), twice=True)
    except Exception as error:
        return unsupported(f"the second backward raises {one_line(error)}")
    outcome = judge_on(problem, inputs_of(problem, DRAW), produced)
    return outcome if outcome is PASSED else failed(f"the second backward silently differs: {outcome.reason}")


@_CHECKS.add("double backward", needs_backward=True)
def _double_backward(subject: Subject) -> CheckOutcome:
    """The gradient of the gradient of the first activation, against fp64."""
    problem = subject.problem()
    inputs, dtype = inputs_of(problem, DRAW), torch_dtype(problem.case)
    direction = inputs_of(problem, Draw(DRAW.seed + 10)).activations[0]
    eager = _differentiated_twice(Built(REFERENCE, problem).forward, inputs, direction, dtype)
    truth = _differentiated_twice(REFERENCE.build(in_fp64(problem)).forward, inputs, direction, torch.float64)
    try:
        mine = _differentiated_twice(subject.built(problem).forward, inputs, direction, dtype)
    except RuntimeError as error:
        return unsupported(one_line(error))
    if mine is None or eager is None or truth is None:
        return failed("the gradient is silently cut off from the graph: create_graph=True has no effect")
    arithmetic = arithmetic_of(problem.case, dtype, 4)
    name = f"second derivative by {ACTIVATIONS[subject.scope][0]}"
    return verdict([check(name, mine, truth, tensor_error(eager, truth), arithmetic)])


def _differentiated_twice(
    forward: Callable[..., Tensor], given: Inputs, direction: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """None where the first derivative is cut off from the graph."""
    values = [value.to(dtype) if value.is_floating_point() else value for value in given.activations]
    leaves = [leaf(value.clone()) for value in values]
    output = forward(*leaves)
    (gradient,) = torch.autograd.grad(output, leaves[0], given.upstream.to(dtype), create_graph=True)
    return torch.autograd.grad(gradient, leaves[0], direction.to(dtype))[0] if gradient.requires_grad else None


@_CHECKS.add("checkpointing", needs_backward=True)
def _checkpointing(subject: Subject) -> CheckOutcome:
    """Under torch.utils.checkpoint, which runs the forward again in the backward."""
    return subject.wrapped(lambda forward: partial(checkpoint, forward, use_reentrant=False)).values()


@_CHECKS.add("autocast")
def _autocast(subject: Subject) -> CheckOutcome:
    """fp32 tensors under bf16 autocast: dtypes as eager has them there, errors within eager's budget there."""
    problem = subject.problem(subject.case(dtype=Dtype.FLOAT32))
    around: Any = torch.autocast(subject.device.type, torch.bfloat16)
    eager = dataclasses.replace(subject, implementation=REFERENCE).wrapped(around).built(problem).train(DRAW)
    produced = subject.wrapped(around).built(problem).train(DRAW)
    return judge_on(problem, inputs_of(problem, DRAW), produced, eager)


@_CHECKS.add("compile fullgraph")
def _compile_fullgraph(subject: Subject) -> CheckOutcome:
    """Inside torch.compile(fullgraph=True): by Inductor on a GPU, on a CPU by AOTAutograd's eager backend."""
    backend = "inductor" if subject.device.type == "cuda" else "aot_eager"
    try:
        return subject.wrapped(partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)).values()
    finally:
        torch.compiler.reset()


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if function.namespace not in BUILT_IN:
            self.found.setdefault(function, (args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@_CHECKS.add("opcheck")
def _opcheck(subject: Subject) -> CheckOutcome:
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
        own = (value.detach().clone() if isinstance(value, Tensor) else value for value in given)
        arguments = tuple(leaf(value, bool(built.gradients)) if isinstance(value, Tensor) else value for value in own)
        results = torch.library.opcheck(operator, arguments, named, raise_exception=False)
        wrong = [f"{test}: {result}" for test, result in results.items() if result != "SUCCESS"]
        if wrong:
            return failed(f"{operator}: {' '.join('; '.join(wrong).split())[:400]}")
    return PASSED


@_CHECKS.add("CUDA graph")
def _cuda_graph(subject: Subject) -> CheckOutcome:
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


@_CHECKS.add("> 2^31 elements")
def _beyond_int32(subject: Subject) -> CheckOutcome:
    """Tensors of more than 2^31 elements, judged in the rows at both ends and around the 2^31st element.

    The upstream gradient is zero in all other rows, so that weight gradients are sums over the judged ones.
    """
    element = Dtype.BFLOAT16.bytes
    needed = LARGE_TENSORS * LARGE_TOKENS * LARGE_INTERMEDIATE * element
    if reason := _no_room(subject.device, needed):
        return not_run(reason)
    case = subject.case(LARGE_TOKENS, LARGE_HIDDEN, LARGE_INTERMEDIATE, Dtype.BFLOAT16, LARGE_EXPERTS)
    rows = rows_to_judge(LARGE_TOKENS, LARGE_INTERMEDIATE)
    if case.shape.experts:  # as many rows as tokens elsewhere
        case = dataclasses.replace(case, tokens=LARGE_TOKENS // LARGE_EXPERTS.top_k)
        rows = rows_to_judge(case.tokens, LARGE_EXPERTS.top_k * LARGE_INTERMEDIATE)
    try:
        return _judge_rows(subject, case, rows)
    finally:
        torch.cuda.empty_cache()


@_CHECKS.add("far experts", scopes=(Scope.EXPERTS,))
def _far_experts(subject: Subject) -> CheckOutcome:
    """Inference of a few tokens of experts whose weights lie beyond 2^31 elements."""
    case = subject.case(FAR_TOKENS, FAR_HIDDEN, FAR_INTERMEDIATE, Dtype.BFLOAT16, FAR_EXPERTS)
    needed = FAR_COPIES * FAR_EXPERTS.count * FAR_HIDDEN * FAR_INTERMEDIATE * Dtype.BFLOAT16.bytes
    if reason := _no_room(subject.device, needed):
        return not_run(reason)
    try:
        problem = subject.problem(case)
        inputs = inputs_of(problem, DRAW)
        x, index, weights = inputs.activations
        slots, tokens = (torch.arange(size, device=index.device) for size in index.shape[::-1])
        index.copy_(FAR_EXPERTS.count - 1 - (slots + tokens[:, None]) % (2 * FAR_EXPERTS.top_k))
        index[0] = slots
        with torch.no_grad():
            both = (Built(entry, problem) for entry in (REFERENCE, subject.implementation))
            eager, found = (built.forward(x.clone(), index.clone(), weights.clone()) for built in both)
        return judge_on(problem, inputs, {"output": found}, {"output": eager})
    finally:
        torch.cuda.empty_cache()


@_CHECKS.add("second GPU")
def _second_gpu(subject: Subject) -> CheckOutcome:
    """Tensors of a GPU that is not the current one."""
    if subject.device.type != "cuda" or torch.cuda.device_count() < 2:
        return not_run("it needs two GPUs")
    elsewhere = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
    problem = dataclasses.replace(subject, device=elsewhere).problem()
    inputs = inputs_of(problem, DRAW)
    produced = subject.built(problem).run_on([value.clone() for value in inputs.activations], inputs.upstream)
    return judge_on(problem, inputs, produced)


def _no_room(device: torch.device, needed: int) -> str:
    """Why a check that needs so many bytes cannot run on a device, or ""."""
    if device.type != "cuda":
        return f"it needs a GPU with {needed / 2**30:.0f} GiB free"
    torch.cuda.empty_cache()
    free = machine.free_memory_bytes(device)
    if free < needed:
        return f"it needs {needed / 2**30:.0f} GiB of memory and {free / 2**30:.0f} GiB are free"
    return ""


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

    def whole(there: Tensor, fill: bool) -> Tensor:
        value = there[:1].repeat(case.tokens, 1) if fill else there.new_zeros(case.tokens, there.shape[1])
        if fill and value.is_floating_point():
            value.normal_(generator=generator)
        return value.index_copy_(0, index, there)

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


# All checks, in order

CHECKS = (*inputs.CHECKS, *_CHECKS)


class AuditBench:
    """Answers in a contender's process, one check at a time."""

    def __init__(self, settings: Settings, implementation: Implementation, state: GlobalState | None = None) -> None:
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
    if Precision.UNQUANTISED in implementation.precisions:
        return cannot_run(implementation, device)
    return "It quantises to fp8 only, and the checks of the contract ask for products in the dtype of their operands."


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
