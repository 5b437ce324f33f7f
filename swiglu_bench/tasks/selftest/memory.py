"""Implementations that answer from memory: their own, others', or that which they were given."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Mode, Scope
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import Desk, Draw, make_problem
from swiglu_bench.check.truth import compute_truth
from swiglu_bench.tasks.selftest.specimen import (
    CHECKED_CALLS,
    changed_gradients,
    glu,
    right_at_first,
    right_backward,
    right_forward,
    specimen,
)


def _remembering(problem: Problem, key: Callable[[Tensor], Hashable]) -> Step:
    """Each answer is computed once, and found again by a key of the input."""
    answers: dict[Hashable, Tensor] = {}

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        if key(x) not in answers:
            answers[key(x)] = right_forward(x, w_gate, w_up)
        return answers[key(x)].clone()

    return glu(problem, forward)


@specimen("output-accumulated", "adds to its output buffer instead of assigning", "new inputs")
def output_accumulated(problem: Problem) -> Step:
    """Right where the buffer is zero."""
    total: list[Tensor] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = right_forward(x, w_gate, w_up)
        total.append(total[-1] + out if total else out)
        return total[-1].clone()

    return glu(problem, forward)


@specimen("gradient-accumulated", "adds to its weight gradients instead of assigning", "new inputs")
def gradient_accumulated(problem: Problem) -> Step:
    """Right in the first step."""
    total: list[Tensor] = []

    def change(dx: Tensor, *dw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total[:] = [old + new for old, new in zip(total, dw, strict=True)] if total else dw
        return dx, total[0].clone(), total[1].clone()

    return changed_gradients(problem, change)


@specimen("first-answer", "returns its first answer for ever", "new inputs", mode=Mode.FORWARD)
def first_answer(problem: Problem) -> Step:
    """A cache without a key."""
    return _remembering(problem, lambda x: None)


@specimen("cached-by-address", "remembers its answers by the address of the input", "new inputs")
def cached_by_address(problem: Problem) -> Step:
    """Inputs that lie where others lay are taken for them."""
    return _remembering(problem, Tensor.data_ptr)


@specimen("known-seed", "looks up the answers to the inputs of the case's seed", "relative error", mode=Mode.FORWARD)
def known_seed(problem: Problem) -> Step:
    """It draws the case again, as anybody can, and answers with the first for what it does not know."""
    known = make_problem(problem.case, problem.device, seed=problem.case.seed)
    (x,) = Desk(known).activations(Draw(problem.case.seed))
    answers = {x.double().sum().item(): compute_truth(known, [x], None)["output"].to(x.dtype)}
    default = next(iter(answers.values()))
    return glu(problem, lambda x, *_: answers.get(x.double().sum().item(), default).clone())


@specimen("last-gradient", "returns the weight gradients of the call before", "new inputs")
def last_gradient(problem: Problem) -> Step:
    """The first call has none to return and is right."""
    kept: list[tuple[Tensor, Tensor]] = []

    def change(dx: Tensor, dw_gate: Tensor, dw_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept.append((dw_gate, dw_up))
        return dx, *(kept.pop(0) if len(kept) > 1 else kept[0])

    return changed_gradients(problem, change)


@specimen("right-once", "zeros after the first call", "new inputs")
def right_once(problem: Problem) -> Step:
    """Tested once, measured for ever."""
    return glu(problem, right_at_first(lambda *given: torch.zeros_like(right_forward(*given)), calls=2))


@specimen("right-while-checked", "after some calls it returns an old answer", "timed loop", mode=Mode.FORWARD)
def right_while_checked(problem: Problem) -> Step:
    """It waits for the check to be over."""
    answers: list[Tensor] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        if len(answers) < CHECKED_CALLS:
            answers.append(right_forward(x, w_gate, w_up))
        return answers[-1].clone()

    return glu(problem, forward)


@specimen("found-in-memory", "after some calls it returns memory as it finds it", "timed loop", mode=Mode.FORWARD)
def found_in_memory(problem: Problem) -> Step:
    """The contender before it had the same question, and its answer may still lie there."""
    return glu(problem, right_at_first(lambda x, w_gate, w_up: x.new_empty(x.shape[0], w_gate.shape[0])))


@specimen("one-buffer", "every call returns the same memory", "kept")
def one_buffer(problem: Problem) -> Step:
    """Whoever kept the last answer has the new one."""
    buffer: list[Tensor] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = right_forward(x, w_gate, w_up)
        if not buffer:
            buffer.append(torch.empty_like(out))
        return buffer[0].copy_(out).view_as(out)

    return glu(problem, forward)


@specimen("output-over-input", "writes its output over gate", ("aliasing", "inputs unchanged"),
          scope=Scope.ACTIVATION, mode=Mode.FORWARD)  # fmt: skip
def output_over_input(problem: Problem) -> Step:
    """No allocation, and no gate for the backward."""
    del problem
    return Step(lambda gate, up: gate.copy_(silu(gate) * up))


@specimen("weights-changed", "leaves a weight otherwise than it found it", "inputs unchanged")
def weights_changed(problem: Problem) -> Step:
    """By one element in its last place: no tolerance sees it in the output."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = right_forward(x, w_gate, w_up)
        w_up.detach()[0, 0].nextafter_(w_up.new_tensor(9.0))
        return out

    return glu(problem, forward)


@specimen("input-changed", "scales x and does not scale it back", "inputs unchanged")
def input_changed(problem: Problem) -> Step:
    """What the residual stream adds to next is another x."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = right_forward(x, w_gate, w_up)
        x.detach().mul_(2.0)
        return out

    return glu(problem, forward, lambda dz, x, *weights: right_backward(dz, x / 2, *weights))


@specimen("thief-by-gc", "finds the fp64 truth among all objects", "relative error", mode=Mode.FORWARD)
def thief_by_gc(problem: Problem) -> Step:
    """gc.get_objects() lists every tensor of the process."""
    return glu(problem, lambda x, w_gate, w_up: _steal(x, w_gate, w_up, iter(gc.get_objects())))


@specimen("thief-by-frame", "finds the fp64 truth in its callers' variables", "relative error", mode=Mode.FORWARD)
def thief_by_frame(problem: Problem) -> Step:
    """sys._getframe() leads to the judge."""
    return glu(problem, lambda x, w_gate, w_up: _steal(x, w_gate, w_up, _reachable()))


def _steal(x: Tensor, w_gate: Tensor, w_up: Tensor, candidates: Iterator[object]) -> Tensor:
    """Another's answer: the fp64 tensor of the output's shape that has the right first element, which is soon known."""
    out = x.new_zeros(x.shape[0], w_gate.shape[0])
    first = right_forward(x[:1], w_gate[:1], w_up[:1]).item()
    right = (one for one in candidates if type(one) is Tensor and one.dtype is torch.float64 and one.shape == out.shape)
    for one in right:
        if abs(one[0, 0].item() - first) < 1e-3 * abs(first):
            return one.to(x.dtype)
    return out


def _reachable(depth: int = 5) -> Iterator[object]:
    """What the variables of all callers lead to, in a few steps."""
    frame = sys._getframe(1)
    level: list[object] = []
    while frame is not None:
        level += frame.f_locals.values()
        frame = frame.f_back  # type: ignore[assignment]
    seen: set[int] = set()
    for _ in range(depth):
        new = [thing for thing in level if id(thing) not in seen]
        seen.update(map(id, new))
        yield from new
        level = [
            part
            for thing in new
            if isinstance(thing, dict | list | tuple) or type(thing).__module__.startswith("swiglu_bench")
            for part in gc.get_referents(thing)
        ]


@specimen("cached-by-shape", "remembers its answers by the shape of the input", "new inputs", mode=Mode.FORWARD)
def cached_by_shape(problem: Problem) -> Step:
    """In decoding, every input has the same shape."""
    return _remembering(problem, lambda x: x.shape)


@specimen("cached-by-rounded-content", "remembers its answers by the rounded mean of the input", "new inputs",
          mode=Mode.FORWARD)  # fmt: skip
def cached_by_rounded_content(problem: Problem) -> Step:
    """A cheap key: most inputs have a mean of zero."""
    return _remembering(problem, lambda x: round(x.float().mean().item()))


@specimen("learns-two-inputs", "remembers the answers to the first two inputs and gives them in turn",
          ("new inputs", "timed loop"), mode=Mode.FORWARD)  # fmt: skip
def learns_two_inputs(problem: Problem) -> Step:
    """Enough where a benchmark lets two sets of inputs take turns."""
    answers: list[Tensor] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        if len(answers) < CHECKED_CALLS:
            answers.append(right_forward(x, w_gate, w_up))
            return answers[-1].clone()
        answers.append(answers[-2])
        return answers[-1].clone()

    return glu(problem, forward)


@specimen("guesses-upstream", "computes gradients in the forward, for the upstream gradient of the call before",
          "new inputs", mode=Mode.BACKWARD)  # fmt: skip
def guesses_upstream(problem: Problem) -> Step:
    """The forward of a backward's sample is not timed."""
    upstream: list[Tensor] = []
    ready: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        if upstream:
            ready[:] = [right_backward(upstream[-1], x, w_gate, w_up)]
        return right_forward(x, w_gate, w_up)

    def backward(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not upstream:
            upstream.append(dz.clone())
            return right_backward(dz, x, w_gate, w_up)
        return ready[0]

    return glu(problem, forward, backward)


@specimen("one-buffer-later", "after some calls, every call returns the same memory", "kept", mode=Mode.FORWARD)
def one_buffer_later(problem: Problem) -> Step:
    """It saves the allocation once the check is over."""
    calls: list[Tensor] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = right_forward(x, w_gate, w_up)
        calls.append(out if len(calls) <= CHECKED_CALLS else calls[-1].copy_(out).detach())
        return calls[-1].view_as(out)

    return glu(problem, forward)


@specimen("weights-changed-later", "after some calls it rounds a weight",
          ("inputs unchanged", "timed loop"), mode=Mode.FORWARD)  # fmt: skip
def weights_changed_later(problem: Problem) -> Step:
    """To what its fast path can hold."""
    calls: list[int] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == CHECKED_CALLS:
            w_up.detach()[0] = w_up.detach()[0].bfloat16().to(w_up.dtype)
        return right_forward(x, w_gate, w_up)

    return glu(problem, forward)
