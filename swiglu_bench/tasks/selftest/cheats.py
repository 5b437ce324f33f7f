"""Implementations that cheat: work where nobody times it, a clock or judge of their own, stolen answers, and settings,
threads and streams that are not theirs.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Dtype, Mode, Scope
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Desk, Draw, make_problem
from swiglu_bench.check.judge import compute_truth
from swiglu_bench.measure import clock as clocks
from swiglu_bench.tasks.selftest.specimen import (
    CHECKED_CALLS,
    Build,
    Differentiable,
    Forward,
    Gradients,
    Specimen,
    gate_gradients,
    glu,
    right_at_first,
    right_backward,
    right_forward,
    table,
)
from swiglu_bench.worker.workbench import Workbench
from swiglu_bench.worker.worker import SampleReport

SPEEDUP = 10
BURN_S = 120.0
"""How long burners live at most."""
SLOW_CYCLES = 20_000_000
"""A spin of some 10 ms: work that has not ended when the current stream has."""
FIRST_OFFSET_BEYOND_INT32 = 2**31
STATE, CLOCK, WALL, TRUTH = ("global state",), ("own clock",), ("wall clock",), ("relative error",)


# Work after the call has returned


def _filled_later(answer: Tensor, after_s: float = 0.05) -> Tensor:
    out = torch.zeros_like(answer)
    threading.Timer(after_s, out.copy_, [answer]).start()
    return out


class _Lazy(Tensor):
    compute: Any

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        del types

        def plain(value: Any) -> Any:
            return value.compute() if isinstance(value, _Lazy) else value

        return function(*map(plain, arguments), **{name: plain(value) for name, value in (keywords or {}).items()})


def _lazy(problem: Problem) -> Step:
    w_gate, w_up = problem.weights.values()

    def forward(x: Tensor) -> Tensor:
        value = x.new_empty(x.shape[0], w_gate.shape[0]).as_subclass(_Lazy)
        value.compute = lambda: right_forward(x, w_gate, w_up)
        return value

    return Step(forward)


def _works_in_to_canonical(problem: Problem) -> Step:
    """`to_canonical` is called after the clock has stopped."""
    return Step(
        glu(problem).forward, dict(problem.weights),
        lambda gradients: {name: value * 1.0 for name, value in gradients.items()},
    )  # fmt: skip


# Clocks and samples


def _replace(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Callable[[], None]:
    """What puts `replacement(the real one)` in the place of `owner.name`."""
    return lambda: setattr(owner, name, replacement(getattr(owner, name)))


def _fast_reports(real: Any) -> Any:
    def sample(self: Workbench, *given: Any, **named: Any) -> SampleReport:
        report = real(self, *given, **named)
        fast = {"ms": report.ms / SPEEDUP, "host_us": report.host_us / SPEEDUP}
        return report.model_copy(update=fast)

    return sample


def _fast_messages(real: Any) -> Any:
    def dumps(thing: Any, *given: Any, **named: Any) -> str:
        if isinstance(thing, tuple) and len(thing) == 2 and isinstance(thing[1], dict) and "ms" in thing[1]:
            fast = {name: thing[1][name] / SPEEDUP for name in ("ms", "host_us")}
            thing = (thing[0], thing[1] | fast)
        return real(thing, *given, **named)

    return dumps


def _works_while_laid_out(problem: Problem) -> Step:
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


def _slow_alone(problem: Problem) -> Step:
    """The forward's time is subtracted from a batch of backwards, and is measured in a batch of its own."""
    _edit_samples()

    def forward(*given: Tensor) -> Tensor:
        if sys._getframe(3).f_code.co_name == Built.forward_to_train.__name__:
            time.sleep(0.02)
        return right_forward(*given)

    def backward(*given: Tensor) -> Gradients:
        for _ in range(20):
            found = right_backward(*given)
        return found

    return glu(problem, forward, backward)


def _knows_upstream(problem: Problem) -> Step:
    """The forward of a backward's sample is not timed, and the seed stands in a frame."""
    own, ready = Desk(problem), list[Gradients]()

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        frame = sys._getframe(1)
        while frame.f_back is not None and not isinstance(frame.f_locals.get("draw"), Draw):
            frame = frame.f_back
        draw = frame.f_locals.get("draw")
        ready[:] = [right_backward(own.upstream(draw), x, w_gate, w_up)] if isinstance(draw, Draw) else []
        return right_forward(x, w_gate, w_up)

    return glu(problem, forward, lambda *given: ready.pop() if ready else right_backward(*given))


_edit_samples = _replace(Workbench, "sample", _fast_reports)


# Answers of others


def _known_seed(problem: Problem) -> Step:
    known = make_problem(problem.case, problem.device, seed=problem.case.seed)
    (x,) = Desk(known).activations(Draw(problem.case.seed))
    answer = compute_truth(known, [x], None)["output"].to(x.dtype)
    return glu(problem, lambda *given: answer.clone())


def _stolen(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """The fp64 tensor of the output's shape, among all objects, whose first element is right, which is soon known."""
    out = x.new_zeros(x.shape[0], w_gate.shape[0])
    first = right_forward(x[:1], w_gate[:1], w_up[:1]).item()
    for found in gc.get_objects():
        if type(found) is not Tensor or found.dtype is not torch.float64 or found.shape != out.shape:
            continue
        if abs(found[0, 0].item() - first) < 1e-3 * abs(first):
            return found.to(x.dtype)
    return out


# Settings of the process, and its machine


def _one_thread_more() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def _more_threads_later(*given: Tensor) -> Tensor:
    _one_thread_more()
    return right_forward(*given)


def _burn() -> None:
    end = time.monotonic() + BURN_S
    while time.monotonic() < end:
        pass


def _burning_child() -> None:
    """A process that leaves its group goes on while its parent stands still."""
    if os.fork() == 0:
        os.setsid()
        _burn()
        os._exit(0)


# Streams, events and graphs of a GPU


def _not_joined(problem: Problem, spin_cycles: int = 0) -> Forward:
    stream = torch.cuda.Stream(problem.device)

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], w_gate.shape[0], dtype=x.dtype, device=x.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(spin_cycles)
            out.copy_(right_forward(x, w_gate, w_up))
        return out

    return forward


def _skips_in_graphs(problem: Problem) -> Step:
    last: list[Tensor] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            last[:] = [right_forward(x, w_gate, w_up)]
        return last[0] + 0 if torch.cuda.is_current_stream_capturing() else last[0].clone()

    return glu(problem, forward)


def _gpu_burner(problem: Problem) -> Step:
    """Other processes share the GPU with its work in slices of some ms; the suite's wait for all work is replaced."""
    stream = torch.cuda.Stream(problem.device)
    clocks.CudaClock.synchronize = lambda self: torch.cuda.current_stream().synchronize()  # type: ignore[method-assign]

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        if stream.query():
            with torch.cuda.stream(stream):
                for _ in range(20):
                    burnt = torch.empty(2, 8192, 8192, dtype=torch.bfloat16, device=x.device)
                    torch.mm(burnt[0], burnt[1])
        return right_forward(x, w_gate, w_up)

    return glu(problem, forward)


def _right_below_int32(fill: Callable[[Tensor, Tensor], object]) -> Build:
    """Right as long as an offset fits 31 bits; `fill` gets the elements beyond, and all of them."""

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        out = silu(gate).mul_(up)
        flat = out.view(-1)
        if flat.numel() > FIRST_OFFSET_BEYOND_INT32:
            fill(flat[FIRST_OFFSET_BEYOND_INT32:], flat)
        return out

    return lambda _: Step(lambda *pair: Differentiable.apply(forward, gate_gradients, *pair))


SETTINGS: dict[str, tuple[str, Callable[[], object]]] = {
    "one-thread": ("sets torch to one thread more", _one_thread_more),
    "profile-hook": ("sets a profile hook", lambda: sys.setprofile(lambda *given: None)),
    "alarm-handler": ("replaces a signal handler", lambda: signal.signal(signal.SIGALRM, lambda *given: None)),
}  # fmt: skip
_forward = partial(Specimen, mode=Mode.FORWARD)
_on_gpu = partial(_forward, needs_gpu=True)
_beyond_int32 = partial(
    Specimen, caught_by=("> 2^31 elements",), scope=Scope.ACTIVATION, dtype=Dtype.BFLOAT16, task="audit", needs_gpu=True
)
SPECIMENS = table(
    __name__,
    _forward("lazy", "a tensor that is computed when it is looked at", ("plain tensor",), _lazy),
    _forward("background-thread", "a thread fills the output after the call has returned",
             ("complete on return", *TRUTH), forward=lambda *given: _filled_later(right_forward(*given), 0.02)),
    _forward("late-thread", "after some calls, a thread fills the output after the call has returned", ("timed loop",),
             forward=lambda *given: _filled_later(right_forward(*given)), right_calls=CHECKED_CALLS),
    Specimen("works-in-to-canonical", "leaves dW to Step.to_canonical", ("error",), _works_in_to_canonical),
    Specimen("patched-perf-counter", "makes Python's clock run slowly", CLOCK,
             change=_replace(time, "perf_counter", lambda real: lambda: real() / SPEEDUP)),
    Specimen("patched-norm", "makes every error zero", CLOCK,
             change=_replace(Tensor, "norm", lambda real: lambda *given, **named: real(*given, **named) * 0 + 1)),
    _forward("samples-edited", "makes its samples smaller before they are sent", WALL, change=_edit_samples),
    _forward("messages-edited", "edits what its process sends", WALL, change=_replace(json, "dumps", _fast_messages)),
    _forward("works-while-laid-out", "computes its answer when inputs are laid out", WALL, _works_while_laid_out),
    Specimen("slow-alone", "edits its samples, and is slow where its forward is timed by itself", WALL, _slow_alone,
             mode=Mode.BACKWARD),
    Specimen("knows-upstream", "computes gradients in the forward, for the upstream gradient that its caller will draw",
             ("timed loop",), _knows_upstream, mode=Mode.BACKWARD),
    _forward("known-seed", "looks up the answers to the inputs of the case's seed", TRUTH, _known_seed),
    _forward("thief-by-gc", "finds the fp64 truth among all objects", TRUTH, forward=_stolen),
    *(_forward(name, fault, STATE, change=change) for name, (fault, change) in SETTINGS.items()),
    _forward("setting-in-the-loop", "changes the number of threads after some calls", (*STATE, *WALL),
             forward=_more_threads_later, right_calls=CHECKED_CALLS),
    _forward("random-numbers", "draws from the global random number generator", ("random state",),
             forward=lambda x, *weights: right_forward(x, *weights) + 0 * torch.rand((), device=x.device)),
    _forward("burning-thread", "keeps a thread busy that does nothing", ("slows others",),
             change=lambda: threading.Thread(target=_burn, daemon=True).start()),
    _forward("burning-child", "a busy process that leaves its group", ("slows others",), change=_burning_child),
    _on_gpu("side-stream-not-joined", "forks a stream and never joins it", ("complete on return", *WALL),
            lambda problem: glu(problem, _not_joined(problem, SLOW_CYCLES))),
    _on_gpu("side-stream-later", "after some calls it works on a stream that is never joined",
            ("timed loop", *WALL, "complete on return"),
            lambda problem: glu(problem, right_at_first(_not_joined(problem)))),
    _on_gpu("patched-elapsed-time", "makes the GPU's events run slowly", CLOCK,
            change=_replace(torch.cuda.Event, "elapsed_time", lambda real: lambda self, end: real(self, end) / 100),
            mode=Mode.STEP),
    _on_gpu("skips-in-graphs", "does nothing while a CUDA graph is recorded", ("graph replay",), _skips_in_graphs,
            mode=Mode.STEP, task="verify"),
    _on_gpu("gpu-burner", "leaves work on the GPU behind that goes on when its process stands still",
            ("slows others", *WALL), _gpu_burner, tokens=100_000),
    _beyond_int32("int32-wraps", "beyond 2^31 elements, offsets start again at 0",
                  build=_right_below_int32(lambda beyond, flat: beyond.copy_(flat[: beyond.numel()]))),
    _beyond_int32("zeros-above-2e31", "leaves zeros beyond 2^31 elements",
                  build=_right_below_int32(lambda beyond, flat: beyond.zero_())),
)  # fmt: skip
