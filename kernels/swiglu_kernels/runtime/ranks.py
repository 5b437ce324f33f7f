"""Groups of ranks: which one is meant, what all of its ranks say, and whether they can read each other's memory."""

import functools
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.backend import backend_for

if TYPE_CHECKING:
    Group = dist.ProcessGroup
else:  # there are builds without torch.distributed
    Group = getattr(dist, "ProcessGroup", object)


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
