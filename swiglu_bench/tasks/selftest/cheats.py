"""Implementations that cheat: work where nobody times it, a clock or judge of their own, stolen answers, and settings,
threads and streams that are not theirs.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import platformdirs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Dtype, Mode, Scope
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Desk, Draw, make_problem
from swiglu_bench.check.judge import compute_truth
from swiglu_bench.contenders.pytorch import compiled
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
from swiglu_bench.worker import environments
from swiglu_bench.worker.workbench import Workbench
from swiglu_bench.worker.worker import SampleReport

SPEEDUP = 10
ELSEWHERE_S = 0.0008
"""Less than drawing the upstream gradient takes, and more than the call."""
LIES = 36
"""More samples than the rounds of the self-test have, and fewer than with as many again."""
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
    """Arithmetic in `to_canonical`, which is read at the build and never runs on gradients."""
    return Step(
        glu(problem).forward, dict(problem.weights),
        lambda gradients: {name: value * 1.0 for name, value in gradients.items()},
    )  # fmt: skip


# Clocks and samples


def _replace(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Callable[[], None]:
    """What puts `replacement(the real one)` in the place of `owner.name`."""
    return lambda: setattr(owner, name, replacement(getattr(owner, name)))


def _shorter(factor: float, real: Any) -> Any:
    """Reports the `factor` of what a sample took."""

    def sample(self: Workbench, *given: Any, **named: Any) -> SampleReport:
        report = real(self, *given, **named)
        return dataclasses.replace(report, ms=report.ms * factor, host_us=report.host_us * factor)

    return sample


def hiding(share: float) -> Callable[[], None]:
    """Take so much off each sample before it is reported."""
    return _replace(Workbench, "sample", partial(_shorter, 1 - share))


_edit_samples = _replace(Workbench, "sample", partial(_shorter, 1 / SPEEDUP))


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


def _slow_backward(problem: Problem) -> Step:
    """No forward's time is subtracted from that of a chain of backwards, so that a slow one hides nothing."""
    _edit_samples()

    def backward(*given: Tensor) -> Gradients:
        for _ in range(20):
            found = right_backward(*given)
        return found

    return glu(problem, backward=backward)


def _true_later(real: Any) -> Any:
    number = itertools.count(1)

    def sample(self: Workbench, *given: Any, **named: Any) -> SampleReport:
        return (_shorter(1 / SPEEDUP, real) if next(number) <= LIES else real)(self, *given, **named)

    return sample


def _works_in_the_pause(_: Problem) -> Step:
    """What the forward begins, as in another thread, is done when the upstream gradient has been drawn, untimed.

    On a GPU it would be the host that waits there, ahead of what is timed.
    """
    done: dict[int, float] = {}

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        done[gate.data_ptr()] = time.monotonic() + ELSEWHERE_S
        return silu(gate) * up

    def backward(dz: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(max(0.0, done.pop(gate.data_ptr(), 0.0) - time.monotonic()))
        return gate_gradients(dz, gate, up)

    return Step(lambda *pair: Differentiable.apply(forward, backward, *pair))


def _lazy_gradients(problem: Problem) -> Step:
    """Gradients of weights are computed when they are collected, which comes after the clock."""
    real, waiting, number = Built._found, dict[str, list[Callable[[], Tensor]]](), itertools.count(1)

    def found(self: Built, leaves: list[Tensor]) -> dict[str, Tensor]:
        collected = real(self, leaves)
        for name in [name for name in waiting if name in collected]:
            collected[name].copy_(torch.stack([compute() for compute in waiting.pop(name)]).sum(0))
        return collected

    Built._found = found  # type: ignore[method-assign]

    def backward(dz: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor) -> Gradients:
        if next(number) <= CHECKED_CALLS:
            return right_backward(dz, x, w_gate, w_up)
        flat, d_hidden = x.flatten(0, -2), dz.flatten(0, -2)
        d_gate, d_up = gate_gradients(d_hidden, flat @ w_gate.T, flat @ w_up.T)
        waiting.setdefault("w_gate", []).append(lambda: d_gate.T @ flat)
        waiting.setdefault("w_up", []).append(lambda: d_up.T @ flat)
        return (d_gate @ w_gate + d_up @ w_up).view_as(x), torch.empty_like(w_gate), torch.empty_like(w_up)

    return glu(problem, backward=backward)


def _forked_answer(real: Any) -> Any:
    """A process that leaves the group makes the answer, while its parent has long answered and stands still."""

    def sample(self: Workbench, draw: Draw, *given: Any, **named: Any) -> SampleReport:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if os.fork():
            times = {"ms": 0.02, "host_us": 20.0, "queue_us": 20.0}
            return SampleReport(**times, queue_filled=True, delivered=["output"], faults={})
        os.setsid()
        torch.set_num_threads(1)  # a fork has none of the pool's threads
        with torch.no_grad():
            (x,) = self._built.desk.activations(draw)
            self._boxes["results"].tensors["output"].copy_(right_forward(x, *self._problem.weights.values()))
        os._exit(0)

    del real
    return sample


def _fork_answers(real: Any) -> Any:
    def send_bytes(self: Connection, message: bytes) -> None:
        child = os.fork()
        if not child:
            real(self, message)
            os._exit(0)
        os.waitpid(child, 0)

    return send_bytes


def _first_event_again(problem: Problem) -> Step:
    """The sample begins when half of the work is done."""

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        gate = silu(x @ w_gate.T)
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            if frame.f_code is clocks.CudaClock.sample.__code__:
                frame.f_locals["start"].record()
        return gate * (x @ w_up.T)

    return glu(problem, forward)


def _knows_upstream(problem: Problem) -> Step:
    """The forward of a backward's sample is not timed, and the seed stands in a frame."""
    own, ready = Desk(problem), list[Gradients]()

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        found = (frame.f_locals.get("draw") for frame, _ in traceback.walk_stack(sys._getframe(1)))
        draw = next((each for each in found if isinstance(each, Draw)), None)
        ready[:] = [right_backward(own.upstream(draw), x, w_gate, w_up)] if draw else []
        return right_forward(x, w_gate, w_up)

    return glu(problem, forward, lambda *given: ready.pop() if ready else right_backward(*given))


def _without_time(real: Any) -> Any:
    return lambda *given, **named: dataclasses.replace(real(*given, **named), ms=0.0)


# What others keep on disk


def _spoil(folder: str | Path, files: str) -> None:
    for file in Path(folder).rglob(files):
        file.write_text("spoilt", encoding="utf-8")


def _spoil_compiled() -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    _spoil(cache_dir(), "*.py")


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


def _on_a_stream(problem: Problem, spin_cycles: int = 0, joined_early: bool = False) -> Forward:
    """Work on a stream that is never joined or, if `joined_early`, by an event from before the work."""
    stream = torch.cuda.Stream(problem.device)

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], w_gate.shape[0], dtype=x.dtype, device=x.device)
        stream.wait_stream(torch.cuda.current_stream())
        before = stream.record_event() if joined_early else None
        with torch.cuda.stream(stream):
            torch.cuda._sleep(spin_cycles)
            out.copy_(right_forward(x, w_gate, w_up))
        if before:
            torch.cuda.current_stream().wait_event(before)
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


def _unchanged(value: Tensor) -> Tensor:
    return value


HIDDEN = (5, 10, 20, 40)
HIDING = {
    percent: Specimen(f"hides-{percent}", f"takes {percent}% off its samples", WALL, change=hiding(percent / 100),
                      mode=Mode.FORWARD, source=__name__)
    for percent in HIDDEN
}  # fmt: skip
"""For the question how much can be hidden; `docs/hiding.py` asks it."""
SETTINGS: dict[str, tuple[str, Callable[[], object]]] = {
    "one-thread": ("sets torch to one thread more", _one_thread_more),
    "profile-hook": ("sets a profile hook", lambda: sys.setprofile(lambda *given: None)),
    "alarm-handler": ("replaces a signal handler", lambda: signal.signal(signal.SIGALRM, lambda *given: None)),
    "user-handler": ("handles a signal of the user's", lambda: signal.signal(signal.SIGUSR2, lambda *given: None)),
    "saved-tensors": ("leaves hooks on saved tensors", lambda: saved_tensors_hooks(_unchanged, _unchanged).__enter__()),
    "environment": ("changes an environment variable", lambda: os.environ.update(PATH="/nowhere")),
    "current-folder": ("changes the current folder", lambda: os.chdir("/")),
    "numpy-errors": ("has NumPy raise for overflow", lambda: numpy.seterr(over="raise")),
}  # fmt: skip
_forward = partial(Specimen, mode=Mode.FORWARD)
_on_gpu = partial(_forward, needs="cuda")
_beyond_int32 = partial(
    Specimen, caught_by=("> 2^31 elements",), scope=Scope.ACTIVATION, dtype=Dtype.BFLOAT16, task="audit", needs="cuda"
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
    _forward("works-while-laid-out", "computes its answer when inputs are laid out", ("timed loop", *WALL),
             _works_while_laid_out),
    _forward("says-0-ms", "its samples say that calls take no time", ("error",),
             change=_replace(Workbench, "sample", _without_time)),
    _forward("edits-compiled-code", "edits the code that torch.compile keeps on disk", ("own caches",),
             change=_spoil_compiled,
             spares=lambda: Path(environments.of(compiled)["TORCHINDUCTOR_CACHE_DIR"]) / "decoy.py"),
    _forward("edits-cached-limits", "rewrites the limits of the machine that the command keeps", ("own caches",),
             change=lambda: _spoil(platformdirs.user_cache_path("swiglu-bench", appauthor=False), "limits-*.json"),
             spares=lambda: platformdirs.user_cache_path("swiglu-bench", appauthor=False) / "limits-decoy.json"),
    Specimen("slow-backward", "edits the samples of a slow backward", WALL, _slow_backward, mode=Mode.BACKWARD),
    _forward("true-later", "makes its samples smaller until the usual rounds are over", WALL,
             change=_replace(Workbench, "sample", _true_later)),
    _forward("hides-a-fifth", "takes a fifth off its samples", WALL, change=hiding(0.2), tokens=2000),
    Specimen("works-in-the-pause", "has work done elsewhere while the upstream gradient is drawn", WALL,
             _works_in_the_pause, tokens=600, scope=Scope.ACTIVATION, needs="cpu"),
    Specimen("lazy-gradients", "computes dW when its gradients are collected", (*WALL, "use"), _lazy_gradients,
             tokens=600),
    _forward("forked-answer", "a process that it forks makes the answer after the turn", ("timed loop", *WALL),
             change=_replace(Workbench, "sample", _forked_answer)),
    _forward("fork-answers", "a process that it forks sends its answers", ("error",),
             change=_replace(Connection, "send_bytes", _fork_answers)),
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
            lambda problem: glu(problem, _on_a_stream(problem, SLOW_CYCLES))),
    _on_gpu("side-stream-later", "after some calls it works on a stream that is never joined",
            ("timed loop", *WALL, "complete on return"),
            lambda problem: glu(problem, right_at_first(_on_a_stream(problem)))),
    _on_gpu("joined-too-early", "joins a stream that it forks by an event from before the work",
            ("complete on return", *TRUTH, *WALL),
            lambda problem: glu(problem, _on_a_stream(problem, joined_early=True))),
    _on_gpu("first-event-again", "records the sample's first event again after half of the work", WALL,
            _first_event_again, tokens=64),
    _on_gpu("patched-elapsed-time", "makes the GPU's events run slowly", CLOCK,
            change=_replace(torch.cuda.Event, "elapsed_time", lambda real: lambda self, end: real(self, end) / 100),
            mode=Mode.STEP),
    _on_gpu("skips-in-graphs", "does nothing while a CUDA graph is recorded", ("graph replay",), _skips_in_graphs,
            mode=Mode.STEP, task="verify"),
    _on_gpu("gpu-burner", "leaves work on the GPU behind that goes on when its process stands still",
            ("slows others", *WALL), _gpu_burner, tokens=100_000),
    _on_gpu("on-the-current-gpu", "computes on the current GPU", ("second GPU",), task="audit",
            forward=lambda *given: right_forward(*(value.to("cuda") for value in given))),
    _beyond_int32("int32-wraps", "beyond 2^31 elements, offsets start again at 0",
                  build=_right_below_int32(lambda beyond, flat: beyond.copy_(flat[: beyond.numel()]))),
    _beyond_int32("zeros-above-2e31", "leaves zeros beyond 2^31 elements",
                  build=_right_below_int32(lambda beyond, flat: beyond.zero_())),
)  # fmt: skip
