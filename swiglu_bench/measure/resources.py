"""What a call takes besides its time: bytes and joules; and a call recorded as a CUDA graph.

Bytes are those on the device: what a forward keeps for the backward, the peak, and what stays between calls. Joules
come from a counter of the whole device that moves in steps of some ten milliseconds.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
LOOP_S = 0.4
BATCH_S = 0.004
STUCK_S = 2.0
"""A counter that does not move for this long while the device works is unusable."""
UNJOINED = "unjoined work"
"""In what CUDA says of a recording at whose end a forked stream still has work: it was joined too early, or never."""
WARMUPS = 3
"""Calls before the recording, as PyTorch's notes on CUDA graphs ask, so that lazy initialisation is not recorded."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use beyond the inputs and weights that were there before."""

    saved_bytes: int
    """Held after the forward beyond the output."""
    peak_bytes: int
    """Highest use during forward and backward, the output and the gradients included."""
    kept_bytes: int
    """Still there after the output and the gradients were dropped."""


def measure_memory(
    device: torch.device, forward: Callable[[], Tensor], backward: Callable[[Tensor], Any] | None
) -> MemoryUse:
    """Run one forward, and backward of its output unless None, and count bytes.

    `backward` returns the gradients, which are dropped before the last count. CUDA: PyTorch's allocator counters. CPU:
    the allocations that PyTorch's profiler sees, compiled code included. Make one call for warm-up before, or
    allocations that only a first call makes count as kept.
    """
    gc.collect()
    if device.type != "cuda":
        return _on_cpu(forward, backward)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    output_bytes = -(-output.untyped_storage().nbytes() // 512) * 512  # as the caching allocator rounds them
    saved = torch.cuda.memory_allocated(device) - before - output_bytes
    gradients = backward(output) if backward else None
    peak = torch.cuda.max_memory_allocated(device) - before
    del output, gradients
    kept = torch.cuda.memory_allocated(device) - before
    return MemoryUse(max(saved, 0), peak, max(kept, 0))


def _on_cpu(forward: Callable[[], Tensor], backward: Callable[[Tensor], Any] | None) -> MemoryUse:
    output, current, peak = _traced(forward)
    saved = max(current - output.untyped_storage().nbytes(), 0)
    del output
    if backward is None:
        return MemoryUse(saved, peak, saved)

    def both() -> None:
        backward(forward())

    _, kept, peak = _traced(both)
    return MemoryUse(saved, peak, max(kept, 0))


def _traced(block: Callable[[], T]) -> tuple[T, int, int]:
    """The block's result, and by the profiler's allocation events the bytes in use at its end and at its highest."""
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile:
        result = block()
    current = peak = 0
    assert profile.kineto_results is not None
    for event in profile.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return result, current, peak


def joules_per_call(run: Callable[[int], object], read_j: Callable[[], float]) -> float:
    """Energy of the device during back-to-back calls, divided by their number; delays by the host are included.

    `run` makes that many calls and waits for them. The loop runs between two steps of the counter, at least 0.4 s
    apart, so that the width of a step does not matter; calls are counted in batches of about 4 ms, which bounds the
    error to about 1%. Raises RuntimeError if the counter does not move.
    """
    run(1)
    began = time.perf_counter()
    run(1)
    batch = max(1, int(BATCH_S / max(time.perf_counter() - began, 1e-6)))

    def run_to_step() -> tuple[int, float]:
        """Make calls until the counter moves; return their number and the counter's value."""
        before, since, calls = read_j(), time.perf_counter(), 0
        while True:
            run(batch)
            calls += batch
            now = read_j()
            if now != before:
                return calls, now
            if time.perf_counter() - since > STUCK_S:
                raise RuntimeError(f"The energy counter did not move in {STUCK_S:g} s.")

    _, first = run_to_step()
    start, calls, last = time.perf_counter(), 0, first
    while time.perf_counter() - start < LOOP_S:
        more, last = run_to_step()
        calls += more
    return (last - first) / calls


@dataclass(frozen=True)
class Graph:
    """A recorded call."""

    replay: Callable[[], None]
    result: Any
    """What the call returned while it was recorded; a replay writes its results into the same memory."""


def capture(call: Callable[[], Any], device: torch.device) -> Graph:
    """Record `call`, whose tensors must stay where they are. Raises what the call raises, or CUDA while recording."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        result = call()
    return Graph(graph.replay, result)
