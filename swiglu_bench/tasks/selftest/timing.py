"""Implementations whose work is done where nobody times it, or whose clock is not the suite's."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases.cases import Mode
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Desk, Draw
from swiglu_bench.measure import clock as clocks
from swiglu_bench.tasks.selftest.specimen import (
    changed_gradients,
    gate_gradients,
    glu,
    right_at_first,
    right_backward,
    right_forward,
    specimen,
)
from swiglu_bench.worker.reports import SampleReport
from swiglu_bench.worker.workbench import Workbench

SPEEDUP = 10


def _filled_later(answer: Tensor, after_s: float = 0.05) -> Tensor:
    """Zeros, over which a thread copies the answer."""
    out = torch.zeros_like(answer)
    threading.Timer(after_s, out.copy_, [answer]).start()
    return out


class _Lazy(Tensor):
    """Memory, and a function that fills it when anybody looks."""

    compute: Any

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        del types

        def plain(value: Any) -> Any:
            if not isinstance(value, _Lazy):
                return value
            return value.compute()

        given = [plain(value) for value in arguments]
        return function(*given, **{name: plain(value) for name, value in (keywords or {}).items()})


@specimen("lazy", "a tensor that is computed when it is looked at", "plain tensor", mode=Mode.FORWARD)
def lazy(problem: Problem) -> Step:
    """The call returns at once; the work is done where nobody times it."""
    w_gate, w_up = problem.weights.values()

    def forward(x: Tensor) -> Tensor:
        value = x.new_empty(x.shape[0], w_gate.shape[0]).as_subclass(_Lazy)
        value.compute = lambda: right_forward(x, w_gate, w_up)
        return value

    return Step(forward)


@specimen("background-thread", "a thread fills the output after the call has returned",
          ("complete on return", "relative error"), mode=Mode.FORWARD)  # fmt: skip
def background_thread(problem: Problem) -> Step:
    """A call that costs nothing."""
    return glu(problem, lambda *given: _filled_later(right_forward(*given), 0.02))


@specimen("patched-perf-counter", "makes Python's clock run slowly", "own clock")
def patched_perf_counter(problem: Problem) -> Step:
    """Ten times faster."""
    real = time.perf_counter
    time.perf_counter = lambda: real() / 10
    return glu(problem)


@specimen("patched-norm", "makes every error zero", "own clock")
def patched_norm(problem: Problem) -> Step:
    """The judge's own tools."""
    real = Tensor.norm
    Tensor.norm = lambda self, *given, **named: real(self, *given, **named) * 0 + 1  # type: ignore[method-assign]
    return glu(problem, lambda x, w_gate, w_up: right_forward(x, w_up, w_gate))


@specimen("lazy-gradient", "weight gradients that are computed when they are looked at",
          ("plain tensor", "relative error", "finite"))  # fmt: skip
def lazy_gradient(problem: Problem) -> Step:
    """The backward returns at once."""

    def backward(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d_gate, d_up = gate_gradients(dz, x @ w_gate.T, x @ w_up.T)
        late = torch.empty_like(w_gate).as_subclass(_Lazy)
        late.compute = lambda: d_gate.T @ x
        return d_gate @ w_gate + d_up @ w_up, late, d_up.T @ x

    return glu(problem, backward=backward)


@specimen("late-thread", "after some calls, a thread fills the output after the call has returned", "timed loop",
          mode=Mode.FORWARD)  # fmt: skip
def late_thread(problem: Problem) -> Step:
    """It waits for the check to be over."""
    return glu(problem, right_at_first(lambda *given: _filled_later(right_forward(*given))))


@specimen("thread-gradient", "a thread fills a weight gradient after the backward has returned",
          ("complete on return", "relative error", "finite", "kept"))  # fmt: skip
def thread_gradient(problem: Problem) -> Step:
    """A backward that costs half."""
    return changed_gradients(problem, lambda dx, dw_gate, dw_up: (dx, dw_gate, _filled_later(dw_up)))


@specimen("works-in-to-canonical", "leaves the weight gradients to Step.to_canonical", "error")
def works_in_to_canonical(problem: Problem) -> Step:
    """It is called after the clock has stopped."""
    step = glu(problem)

    def to_canonical(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value * 1.0 for name, value in gradients.items()}

    return Step(step.forward, dict(problem.weights), to_canonical)


@specimen("samples-edited", "makes its samples smaller before they are sent", "wall clock", mode=Mode.FORWARD)
def samples_edited(problem: Problem) -> Step:
    """The process is its own."""
    real = Workbench.sample

    def sample(self: Workbench, *given: Any, **named: Any) -> SampleReport:
        report = real(self, *given, **named)
        fast = {"ms": report.ms / SPEEDUP, "host_us": report.host_us / SPEEDUP}
        return report.model_copy(update=fast)

    Workbench.sample = sample  # type: ignore[method-assign]
    return glu(problem)


@specimen("clock-replaced", "brings a clock of its own", "wall clock", mode=Mode.FORWARD)
def clock_replaced(problem: Problem) -> Step:
    """It stands still most of the time."""
    kind = clocks.CudaClock if problem.device.type == "cuda" else clocks.CpuClock
    real = kind.sample

    def sample(self: Any, *given: Any, **named: Any) -> clocks.Sample:
        taken = real(self, *given, **named)
        return clocks.Sample(taken.ms / SPEEDUP, taken.host_us / SPEEDUP, taken.queue_us, True, taken.result)

    kind.sample = sample  # type: ignore[method-assign]
    return glu(problem)


@specimen("messages-edited", "edits what its process sends", "wall clock", mode=Mode.FORWARD)
def messages_edited(problem: Problem) -> Step:
    """One function below the suite's own."""
    real = json.dumps

    def dumps(thing: Any, *given: Any, **named: Any) -> str:
        if isinstance(thing, tuple) and len(thing) == 2 and isinstance(thing[1], dict) and "ms" in thing[1]:
            fast = {name: thing[1][name] / SPEEDUP for name in ("ms", "host_us")}
            thing = (thing[0], thing[1] | fast)
        return real(thing, *given, **named)

    json.dumps = dumps  # type: ignore[assignment]
    return glu(problem)


@specimen("works-while-laid-out", "computes its answer when the suite lays out its inputs", "wall clock",
          mode=Mode.FORWARD)  # fmt: skip
def works_while_laid_out(problem: Problem) -> Step:
    """What comes before the clock is started costs nothing, except among calls back to back."""
    real, ready = Desk.activations, dict[int, Tensor]()

    def activations(self: Desk, draw: Draw) -> list[Tensor]:
        found = real(self, draw)
        ready.clear()
        with torch.no_grad():
            ready[found[0].data_ptr()] = right_forward(found[0], *self.problem.weights.values())
        return found

    Desk.activations = activations  # type: ignore[method-assign]

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        answer = ready.pop(x.data_ptr(), None)
        return right_forward(x, w_gate, w_up) if answer is None else answer

    return glu(problem, forward)


@specimen("slow-alone", "edits its samples, and is slow where its forward is timed by itself", "wall clock",
          mode=Mode.BACKWARD)  # fmt: skip
def slow_alone(problem: Problem) -> Step:
    """What is subtracted from a batch was measured in a batch."""
    samples_edited.implementation.build(problem)

    def forward(*given: Tensor) -> Tensor:
        if sys._getframe(3).f_code.co_name == Built.forward_to_train.__name__:
            time.sleep(0.02)
        return right_forward(*given)

    def backward(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for _ in range(20):
            found = right_backward(*given)
        return found

    return glu(problem, forward, backward)


@specimen("knows-upstream", "computes gradients in the forward, for the upstream gradient that its caller will draw",
          "timed loop", mode=Mode.BACKWARD)  # fmt: skip
def knows_upstream(problem: Problem) -> Step:
    """The forward of a backward's sample is not timed, and the seed stands in a frame."""
    own, ready = Desk(problem), list[tuple[Tensor, Tensor, Tensor]]()

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        frame = sys._getframe(1)
        while frame.f_back is not None and not isinstance(frame.f_locals.get("draw"), Draw):
            frame = frame.f_back
        draw = frame.f_locals.get("draw")
        ready[:] = [right_backward(own.upstream(draw), x, w_gate, w_up)] if isinstance(draw, Draw) else []
        return right_forward(x, w_gate, w_up)

    return glu(problem, forward, lambda *given: ready.pop() if ready else right_backward(*given))
