"""Groups of ranks: which one is meant, what all of its ranks say, and memory that they read of each other."""

import contextlib
import functools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.backend import backend_for

if TYPE_CHECKING:
    Group = dist.ProcessGroup
else:  # there are builds without torch.distributed
    Group = getattr(dist, "ProcessGroup", object)
T = TypeVar("T")


def group_of(group: Group | DeviceMesh | None) -> Group:
    """Return the process group of a mesh of one dimension, or of all ranks for None."""
    found = group.get_group() if isinstance(group, DeviceMesh) else dist.group.WORLD if group is None else group
    if not isinstance(found, Group):
        raise ValueError("group: expected a process group that this rank is in; is torch.distributed initialised?")
    return found


def all_of(group: Group, value: Any) -> list[Any]:
    """Return every rank's value."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


@functools.cache
def _why_not_symmetric(group: Group, device: torch.device) -> str | None:
    """Say why a group's ranks cannot read each other's memory, or None; all ranks ask together, and try it once."""
    hosts = set(all_of(group, socket.gethostname()))
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    reason = None
    try:
        internals.symmetric_memory(group, device, 256)
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        reason = f"PyTorch's symmetric memory does not work here: {str(error).splitlines()[0]}"
    return next(filter(None, all_of(group, reason)), None)


def why_not_symmetric(x: torch.Tensor, group: Group) -> str | None:
    """Say why rows of x cannot travel through symmetric memory, or None; all ranks of the group ask together."""
    if x.device.type != "cuda" or backend_for(x) != "triton":
        return f"it needs GPUs and kernels of Triton, and x is on a {x.device.type.upper()}"
    return _why_not_symmetric(group, x.device)


class PeerMemory:
    """Memory of a group, in which every rank reads and writes every other's, and the stream that rows are copied on."""

    def __init__(self, group: Group, device: torch.device, size_bytes: int) -> None:
        """Allocate it, which all ranks do together."""
        self.size_bytes = size_bytes
        self.buffers, self.wait = internals.symmetric_memory(group, device, size_bytes)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None


def copy_beside(stream: torch.cuda.Stream | None, *copies: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Copy rows, (into, from), as soon as what was launched before is done; return an event, None without a stream."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        for into, rows in copies:
            into.copy_(rows, non_blocking=True)
    return None if stream is None else stream.record_event()


def join(stream: torch.cuda.Stream | None) -> None:
    """Let what is launched from now on wait for all copies."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


_met: dict[tuple[Any, ...], Any] = {}


def met(
    operation: str, group: Group, device: torch.device, sizes: dict[str, Any], make: Callable[[], T], advice: str = ""
) -> T:
    """Return what was made for calls of these sizes, which all ranks do together when they first meet one.

    Raises:
        RuntimeError: they meet it while a CUDA graph is being recorded.
        ValueError: the ranks' sizes differ; `advice` says what to do about it.
    """
    key = operation, group, device, *sizes.values()
    if key not in _met:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{operation}: call it once with these sizes before recording a CUDA graph")
        kinds = all_of(group, tuple(size if isinstance(size, int) else str(size) for size in sizes.values()))
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"the ranks call with different ({', '.join(sizes)}): {sorted(set(kinds))}{advice}")
        _met[key] = make()
    found: T = _met[key]
    return found
