"""Bytes on the device: how much a forward keeps for backward, the peak, and what stays between calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes above the inputs and weights that were there before."""

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
    return _on_cuda(device, forward, backward) if device.type == "cuda" else _on_cpu(forward, backward)


def _on_cuda(
    device: torch.device, forward: Callable[[], Tensor], backward: Callable[[Tensor], Any] | None
) -> MemoryUse:
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
