"""The suite's clock against a second one: the durations of kernels that the GPU's own profiler (CUPTI) reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from swiglu_bench.measure.clock import Clock, CudaClock
from swiglu_bench.measure.statistics import percentile

REPEATS = 30
TOLERANCE = 0.02
LEAST_US = 50.0
"""What is shorter is not compared."""
MOST_BETWEEN_US = 10.0
"""An event is recorded some microseconds before the kernel behind it begins; if it were more, short calls would be
nothing else."""
SPIN = "spin_kernel"
"""The part of a kernel's name that tells the clock's own spin from the work."""


@dataclass(frozen=True)
class Agreement:
    """One workload by both clocks."""

    workload: str
    ours_us: float
    """Median of the suite's samples, half of them before and half after the profiler's."""
    profiler_us: float
    """Median over calls of the summed durations of a call's kernels."""

    between_us: float = 0.0
    """Between events and kernels: what ours is longer for one element. A part of every time of ours, long or short."""

    @property
    def difference(self) -> float:
        """Ours without what lies between, over the profiler's, minus 1."""
        return (self.ours_us - self.between_us) / self.profiler_us - 1

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance, and little lies between."""
        return abs(self.difference) <= TOLERANCE and self.between_us <= MOST_BETWEEN_US


def workloads(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls that are one kernel each: two products, a copy and an elementwise operation, of 0.2 to 2 ms on an H200."""
    for side in (4096, 8192):
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        yield f"product, {side} cubed, bf16", partial(torch.matmul, a, b)
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    yield "copy, 1 GiB", lambda: target.copy_(source)
    yield "sigmoid of 2^28 numbers, fp32", lambda: torch.sigmoid(source, out=target)


def compare(name: str, call: Callable[[], Any], clock: Clock, between_us: float) -> Agreement:
    """Time a call with the clock, with the profiler and with the clock again, so that a drift cancels.

    Raises RuntimeError where the workload is too short to be compared.
    """
    agreement = Agreement(name, *by_both(call, clock), between_us)
    if agreement.profiler_us < LEAST_US:
        raise RuntimeError(f"it takes {agreement.profiler_us:.1f} us, and a comparison needs at least {LEAST_US:g} us")
    return agreement


def by_both(call: Callable[[], Any], clock: Clock) -> tuple[float, float]:
    """Medians of a call in us: by the clock, before and after, and by the profiler."""

    def timed() -> list[float]:
        return [clock.sample(call, 100.0).ms * 1e3 for _ in range(REPEATS // 2)]

    for _ in range(3):
        call()
    clock.synchronize()
    before, theirs, after = timed(), profiled_us(call, clock), timed()
    return percentile(before + after, 50), percentile(theirs, 50)


def profiled_us(call: Callable[[], Any], clock: Clock) -> list[float]:
    """The summed durations of the kernels, copies and fills of each of some calls, made the way the clock makes them.

    Raises RuntimeError where the profiler sees no kernels, or a number of them that differs from call to call.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPEATS):
            clock.sample(call, 200.0)
        clock.synchronize()
    found = sorted(
        (event.time_range.start, event.time_range.elapsed_us())
        for event in profile.events() or []
        if event.device_type.name == "CUDA" and SPIN not in event.name
    )
    return per_call([duration for _, duration in found])


def per_call(durations_us: list[float]) -> list[float]:
    """Durations in order of time, summed over equal parts, one for each call."""
    if not durations_us:
        raise RuntimeError("The profiler saw no kernels; reading its counters may need a permission.")
    each, rest = divmod(len(durations_us), REPEATS)
    if rest:
        raise RuntimeError(f"The profiler saw {len(durations_us)} kernels in {REPEATS} calls.")
    return [sum(durations_us[start : start + each]) for start in range(0, len(durations_us), each)]


def agreements(device: torch.device) -> Iterator[Agreement | str]:
    """Each workload by both clocks, or why it could not be compared."""
    clock = CudaClock(device, cold_l2=False)  # flushing the cache would be a kernel too
    one = torch.zeros(1, device=device)
    ours_us, profiler_us = by_both(lambda: one.add_(1.0), clock)
    for name, call in workloads(device):
        try:
            yield compare(name, call, clock, max(0.0, ours_us - profiler_us))
        except RuntimeError as reason:
            yield f"{name}: {reason}"
