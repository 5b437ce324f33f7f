"""Bytes on the device: how much a forward keeps for backward, the peak, and what stays between calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
    the allocations that PyTorch's profiler sees, compiled code included. Call it once before for warm-up: what a first
    call allocates for good then counts as kept from before.
    """
    gc.collect()
    return (_on_cuda if device.type == "cuda" else _on_cpu)(device, forward, backward)


def _on_cuda(
    device: torch.device, forward: Callable[[], Tensor], backward: Callable[[Tensor], Any] | None
) -> MemoryUse:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    after_forward = torch.cuda.memory_allocated(device)
    saved = after_forward - before - _allocator_bytes(output)
    gradients = backward(output) if backward else None
    peak = torch.cuda.max_memory_allocated(device) - before
    del output, gradients
    kept = torch.cuda.memory_allocated(device) - before
    return MemoryUse(max(saved, 0), peak, max(kept, 0))


def _allocator_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's storage as the CUDA caching allocator rounds them."""
    return -(-tensor.untyped_storage().nbytes() // 512) * 512


def _on_cpu(device: torch.device, forward: Callable[[], Tensor], backward: Callable[[Tensor], Any] | None) -> MemoryUse:
    del device
    with torch.no_grad():
        marker = torch.empty(0)
    del marker
    forward_only = _CpuTrace()
    with forward_only:
        output = forward()
    saved = forward_only.current - output.untyped_storage().nbytes()
    whole = _CpuTrace()
    if backward is None:
        peak, output_bytes = forward_only.peak, output.untyped_storage().nbytes()
        del output
        return MemoryUse(max(saved, 0), peak, max(forward_only.current - output_bytes, 0))
    del output
    with whole:
        output = forward()
        gradients = backward(output)
        del output, gradients
    return MemoryUse(max(saved, 0), whole.peak, max(whole.current, 0))


class _CpuTrace:
    """Sums the profiler's allocation events of a block: bytes in use at its end and at its highest."""

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0

    def __enter__(self) -> None:
        self._profile = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)
        self._profile.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(*exception)
        results = self._profile.kineto_results
        assert results is not None
        for event in results.events():
            if event.name() == "[memory]":
                self.current += event.nbytes()  # type: ignore[attr-defined]
                self.peak = max(self.peak, self.current)
