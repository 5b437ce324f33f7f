"""The ranks of one group: who they are, what they agree on, and a clock that times the slowest of them.

Decisions of ranks must be the same everywhere, or one waits for a collective that another never starts. So whatever a
decision depends on (a sample, a failure, the time spent) goes through here first. That traffic has a group of its own,
on CPUs with gloo: it neither queues work on a GPU nor waits for any.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swiglu_bench.measure.clock import Clock, CpuClock, CudaClock, DeviceLost, Sample
from swiglu_bench.spec.errors import one_line

T = TypeVar("T")


class RankFailed(RuntimeError):
    """Some rank failed at what all of them did; every rank raises it with the same message."""


@dataclass(frozen=True)
class Group:
    """This process as one of `size` ranks, which all have joined."""

    rank: int
    size: int
    device: torch.device
    control: Any
    """The gloo group of the ranks' agreements."""
    mesh: DeviceMesh
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def join(cls, device: torch.device, timeout_s: float, **where: Any) -> Group:
        """Meet the others; `where` is what init_process_group takes, by default the environment as torchrun sets it."""
        patience = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience, **where)
        control = dist.new_group(backend="gloo", timeout=patience)
        size = dist.get_world_size()
        return cls(dist.get_rank(), size, device, control, init_device_mesh(device.type, (size,)))

    def close(self) -> None:
        """Part."""
        dist.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def first(self, value: T) -> T:
        """Rank 0's value."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def largest(self, *values: float) -> list[float]:
        """Of each value, the largest of all ranks'."""
        box = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.control)
        return [float(one) for one in box]

    def together(self, work: Callable[[], T]) -> T:
        """Do the work; raises RankFailed on all ranks where one of them fails.

        One that fails before a collective that others have begun leaves them waiting, until the group's timeout.
        """
        value: Any = None
        error = ""
        try:
            value = work()
        except Exception as raised:  # whatever a contender raises costs its own row
            self._must_answer(raised)
            error = one_line(raised)
            cause: BaseException | None = raised
        else:
            cause = None
        errors = self.gather(error)
        failed = next((rank for rank, one in enumerate(errors) if one), None)
        if failed is not None:
            everywhere = all(one == errors[failed] for one in errors)
            raise RankFailed(errors[failed] if everywhere else f"rank {failed}: {errors[failed]}") from cause
        return value

    def _must_answer(self, error: Exception) -> None:
        """Raise DeviceLost, which ends this process and so the group, where the GPU is broken for it."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                raise DeviceLost(one_line(error)) from error


class AlignedCudaClock(CudaClock):
    """The GPU's clock with a small collective right before the first event: no rank starts before the others."""

    def __init__(self, device: torch.device) -> None:
        self._token = torch.zeros(1, device=device)
        super().__init__(device)

    def align(self) -> None:
        """Queue it; behind the spin, so that the host is ahead on all ranks."""
        dist.all_reduce(self._token)


class AlignedCpuClock(CpuClock):
    """The wall clock with a barrier before each call."""

    def __init__(self, control: Any) -> None:
        self._control = control

    def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
        """Run `call` once and time it."""
        dist.barrier(group=self._control)
        return super().sample(call, lead_us)


class GroupClock:
    """Times one call on all ranks; a sample is the slowest rank's, and every rank gets the same.

    What ranks tell each other is told after the sample, outside of what is timed.
    """

    def __init__(self, group: Group, clock: Clock | None = None) -> None:
        self._group = group
        on_gpu = group.device.type == "cuda"
        self._clock = clock or (AlignedCudaClock(group.device) if on_gpu else AlignedCpuClock(group.control))
        self.cache = self._clock.cache
        self.synchronize = self._clock.synchronize
        self._now = 0.0

    def now(self) -> float:
        """Seconds that the slowest rank had spent after the last sample."""
        return self._now

    def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
        """Run `call` once and time it; raises RankFailed where it failed on any rank."""
        found = Sample(0.0, 0.0, True, None)
        failure: Exception | None = None
        try:
            found = self._clock.sample(call, lead_us)
        except Exception as error:
            failure = error
        spent_s = time.perf_counter() - self._group.began
        ms, host_us, gap, failed, self._now = self._group.largest(
            found.ms, found.host_us, float(not found.queue_filled), float(failure is not None), spent_s
        )
        if failed:
            reasons = self._group.gather(one_line(failure) if failure else "")
            rank = next(number for number, one in enumerate(reasons) if one)
            raise RankFailed(f"rank {rank}: {reasons[rank]}") from failure
        return Sample(ms, host_us, not gap, found.result)
