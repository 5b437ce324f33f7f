"""The bare collectives of traffic.py, run and timed by themselves."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from swiglu_bench.measure.clock import Clock
from swiglu_bench.tasks.tp.group import Group
from swiglu_bench.tasks.tp.traffic import Kind, bus_bytes

LARGE_BYTES = {"cuda": 2**29, "cpu": 2**22}
"""Of the tensor whose collectives are the ceiling: far beyond what latency matters to."""
WARMUPS, SAMPLES = 3, 9


def gather_into(whole: Tensor, part: Tensor) -> None:
    """All ranks' parts along the first dimension, in rank order."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, part)


def scatter_sum(part: Tensor, whole: Tensor) -> None:
    """This rank's part, along the first dimension, of the sum of all ranks' tensors."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, whole)


def bare(group: Group, these: tuple[Kind, ...], elements: int, dtype: torch.dtype) -> Callable[[], None]:
    """A call that runs these, one after the other, on tensors of so many elements."""
    elements -= elements % group.size**2
    whole = torch.zeros(elements, dtype=dtype, device=group.device)  # sums of zeros stay finite however often
    part = torch.zeros(elements // group.size, dtype=dtype, device=group.device)
    from_all = torch.zeros_like(part)
    calls: dict[Kind, Callable[[], object]] = {
        Kind.ALL_REDUCE: lambda: dist.all_reduce(whole),
        Kind.ALL_GATHER: lambda: gather_into(whole, part),
        Kind.REDUCE_SCATTER: lambda: scatter_sum(part, whole),
        Kind.ALL_TO_ALL: lambda: dist.all_to_all_single(from_all, part),
    }

    def run() -> None:
        for kind in these:
            calls[kind]()

    return run


def ceiling_gbps(group: Group, clock: Clock, these: tuple[Kind, ...], dtype: torch.dtype) -> float | None:
    """Bus bandwidth of the same collectives on a large tensor, in 10^9 bytes per second; None for one rank."""
    if group.size == 1:
        return None
    size_bytes = LARGE_BYTES[group.device.type]
    call = bare(group, these, size_bytes // dtype.itemsize, dtype)
    for _ in range(WARMUPS):
        call()
    ms = statistics.median(clock.sample(call, 100.0).ms for _ in range(SAMPLES))
    return bus_bytes(these, size_bytes, group.size) / ms / 1e6
