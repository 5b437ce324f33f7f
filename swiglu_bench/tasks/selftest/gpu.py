"""Cheats and faults that exist on a GPU only: streams, events, CUDA graphs, and tensors beyond 2^31 elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.cases.cases import Dtype, Mode, Scope
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.measure.clock import CudaClock
from swiglu_bench.tasks.selftest.specimen import (
    INDEX_CHECK,
    Forward,
    Specimen,
    gate_gradients,
    glu,
    right_at_first,
    right_forward,
    specimen,
)

SLOW_CYCLES = 20_000_000
"""A spin of some 10 ms: work that has not ended when the current stream has."""


def _not_joined(problem: Problem, spin_cycles: int = 0) -> Forward:
    """SwiGLU on a stream that begins with the current one, and for which nobody waits."""
    stream = torch.cuda.Stream(problem.device)

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], w_gate.shape[0], dtype=x.dtype, device=x.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(spin_cycles)
            out.copy_(right_forward(x, w_gate, w_up))
        return out

    return forward


@specimen("side-stream", "works on a stream of its own that waits for nobody",
          ("complete on return", "new inputs", "relative error"), mode=Mode.FORWARD, needs_gpu=True)  # fmt: skip
def side_stream(problem: Problem) -> Step:
    """Events on the current stream have nothing to time; the inputs may not be there yet."""
    stream = torch.cuda.Stream(problem.device)

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        with torch.cuda.stream(stream):
            return right_forward(x, w_gate, w_up)

    return glu(problem, forward)


@specimen("side-stream-not-joined", "forks a stream and never joins it", ("complete on return", "wall clock"),
          mode=Mode.FORWARD, needs_gpu=True)  # fmt: skip
def side_stream_not_joined(problem: Problem) -> Step:
    """The inputs are there, and the output comes after the events."""
    return glu(problem, _not_joined(problem, SLOW_CYCLES))


@specimen("deferred", "computes when torch.cuda.synchronize is called", "own clock", mode=Mode.FORWARD, needs_gpu=True)
def deferred(problem: Problem) -> Step:
    """Benchmarks synchronise after the last event."""
    todo: list[Any] = []
    real = torch.cuda.synchronize

    def synchronize(device: Any = None) -> None:
        while todo:
            todo.pop()()
        real(device)

    torch.cuda.synchronize = synchronize

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], w_gate.shape[0], dtype=x.dtype, device=x.device)
        todo.append(lambda: out.copy_(right_forward(x, w_gate, w_up)))
        return out

    return glu(problem, forward)


@specimen("patched-elapsed-time", "makes the GPU's events run slowly", "own clock", needs_gpu=True)
def patched_elapsed_time(problem: Problem) -> Step:
    """A hundred times faster."""
    real = torch.cuda.Event.elapsed_time
    torch.cuda.Event.elapsed_time = lambda self, end_event: real(self, end_event) / 100  # type: ignore
    return glu(problem)


@specimen("skips-in-graphs", "does nothing while a CUDA graph is recorded", "graph replay", task="verify",
          needs_gpu=True)  # fmt: skip
def skips_in_graphs(problem: Problem) -> Step:
    """A replay is free, and returns what it returned."""
    last: list[Tensor] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            last[:] = [right_forward(x, w_gate, w_up)]
        return last[0] + 0 if torch.cuda.is_current_stream_capturing() else last[0].clone()

    return glu(problem, forward)


class _Small(torch.autograd.Function):
    """Right as long as an offset fits 31 bits."""

    @staticmethod
    def forward(ctx: Any, wraps: bool, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = silu(gate).mul_(up)
        flat, limit = out.view(-1), 2**31
        if flat.numel() > limit:
            beyond = flat[limit:]
            beyond.copy_(flat[: beyond.numel()]) if wraps else beyond.zero_()
        return out

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[None, Tensor, Tensor]:
        return (None, *gate_gradients(dz, *ctx.saved_tensors))


def _small(name: str, description: str, wraps: bool) -> Specimen:
    """An implementation that is right up to 2^31 elements."""

    @specimen(name, description, INDEX_CHECK, scope=Scope.ACTIVATION, dtype=Dtype.BFLOAT16, task="audit",
              needs_gpu=True)  # fmt: skip
    def small(problem: Problem) -> Step:
        del problem
        return Step(lambda gate, up: _Small.apply(wraps, gate, up))

    return small


int32_wraps = _small("int32-wraps", "beyond 2^31 elements, offsets start again at 0", wraps=True)
zeros_above = _small("zeros-above-2^31", "leaves zeros beyond 2^31 elements", wraps=False)


@specimen("side-stream-later", "after some calls it works on a stream that is never joined",
          ("timed loop", "wall clock", "complete on return"), mode=Mode.FORWARD, needs_gpu=True)  # fmt: skip
def side_stream_later(problem: Problem) -> Step:
    """It waits for the check to be over."""
    return glu(problem, right_at_first(_not_joined(problem)))


@specimen("gpu-burner", "leaves work on the GPU behind that goes on when its process stands still",
          ("slows others", "wall clock"), mode=Mode.FORWARD, tokens=100_000, needs_gpu=True)  # fmt: skip
def gpu_burner(problem: Problem) -> Step:
    """The others share the GPU with it, by slices of some ms; the suite's wait for the end of all work is gone."""
    stream = torch.cuda.Stream(problem.device)
    CudaClock.synchronize = lambda self: torch.cuda.current_stream().synchronize()  # type: ignore[method-assign]

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        if stream.query():
            with torch.cuda.stream(stream):
                for _ in range(20):
                    torch.mm(_burnt(x), _burnt(x))
        return right_forward(x, w_gate, w_up)

    return glu(problem, forward)


def _burnt(x: Tensor) -> Tensor:
    return torch.empty(8192, 8192, dtype=torch.bfloat16, device=x.device)
