"""The ranks of one group: who they are, how they meet, and clocks that let all start a timed call together.

What ranks tell each other goes through a group of its own, on CPUs with gloo: it neither queues work on a GPU nor waits
for any.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swiglu_bench.measure.clock import Action, Clock, CpuClock, CudaClock, Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """This process as one of `size` ranks, which all have joined."""

    rank: int
    size: int
    device: torch.device
    control: Any
    """The gloo group for what ranks tell each other."""
    mesh: DeviceMesh

    @classmethod
    def join(cls, device: torch.device, patience_s: float) -> Group:
        """Meet the others where the environment says, as torchrun sets it."""
        patience = timedelta(seconds=patience_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
        control = dist.new_group(backend="gloo", timeout=patience)
        size = dist.get_world_size()
        return cls(dist.get_rank(), size, device, control, init_device_mesh(device.type, (size,)))

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

    def meet(self) -> None:
        """Wait for all; fails where a rank has left a collective that others wait in."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        dist.barrier(group=self.control)

    def clock(self) -> Clock:
        """The device's clock, for calls that all ranks make together."""
        return AlignedCudaClock(self.device) if self.device.type == "cuda" else AlignedCpuClock(self.control)


class AlignedCudaClock(CudaClock):
    """The GPU's clock with a small collective right before the first event: no rank starts before the others."""

    def __init__(self, device: torch.device) -> None:
        self._token = torch.zeros(1, device=device)
        super().__init__(device)

    def align(self) -> None:
        """Queue it; behind the spin, so that the host is ahead on all ranks."""
        dist.all_reduce(self._token)


class AlignedCpuClock(CpuClock):
    """The wall clock with a barrier right before each call."""

    def __init__(self, control: Any) -> None:
        super().__init__()
        self._control = control

    def sample(
        self, call: Action, lead_us: float, prepare: Action = lambda: None, hand_over: Action = lambda: None
    ) -> Sample:
        """Run `call` once and time it."""

        def meet() -> None:
            prepare()
            dist.barrier(group=self._control)

        return super().sample(call, lead_us, meet, hand_over)
