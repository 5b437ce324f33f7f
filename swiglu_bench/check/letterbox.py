"""Memory through which a contender's process hands results to the judge's: made by the judge, mapped by the contender.

On a CPU it is a file in shared memory, on a GPU memory of the judge's process that CUDA shares between processes.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor, shared_cache

ALIGNMENT_BYTES = 512
COUNTER = {"ref_counter_handle", "ref_counter_offset"}
"""Where PyTorch counts who has memory of a GPU open: names of what it opens that by, its own and private."""
PLACE = ("storage_handle", "storage_offset_bytes")
"""What PyTorch knows memory by that it has open."""

Sizes = Mapping[str, tuple[int, ...]]


class Letterbox:
    """A tensor for each name, in one block of memory."""

    def __init__(self, memory: Tensor, sizes: Sizes, dtype: torch.dtype, file: Path | None = None) -> None:
        self._memory, self._file = memory, file
        self._counters: list[tuple[bytes, int]] = []
        self.tensors: dict[str, Tensor] = {}
        offset = 0
        for name, size in sizes.items():
            length = math.prod(size) * dtype.itemsize
            self.tensors[name] = memory[offset : offset + length].view(dtype).view(size)
            offset += _padded(length)

    @classmethod
    def make(cls, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Letterbox:
        """A new one."""
        if device.type == "cuda":
            return cls.here(sizes, dtype, device)
        length = _length(sizes, dtype)
        shared = Path("/dev/shm")
        folder = str(shared) if os.access(shared, os.W_OK) else None
        descriptor, name = tempfile.mkstemp(prefix="swiglu-bench-", dir=folder)
        os.truncate(descriptor, length)
        os.close(descriptor)
        return cls(_mapped(name, length), sizes, dtype, Path(name))

    @classmethod
    def here(cls, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Letterbox:
        """A new one in a tensor's memory, which on a CPU is this process's alone."""
        return cls(torch.zeros(_length(sizes, dtype), dtype=torch.uint8, device=device), sizes, dtype)

    def address(self) -> bytes:
        """What another process opens it by."""
        if self._file:
            return pickle.dumps((str(self._file), self._memory.numel()))
        open_it, arguments = reduce_tensor(self._memory)
        named = inspect.signature(open_it).bind(*arguments).arguments
        if named.keys() >= COUNTER:
            self._counters.append((named["ref_counter_handle"], named["ref_counter_offset"]))
        address = pickle.dumps((open_it, arguments))
        MADE_HERE[address] = self
        return address

    @classmethod
    def open(cls, address: bytes, sizes: Sizes, dtype: torch.dtype) -> Letterbox:
        """The one at an address; a file can be opened once.

        Its name goes at once: mapped memory stays, and none is left behind by processes that are killed. With
        --in-process the maker opens it itself, whose own memory CUDA refuses to map.
        """
        own = MADE_HERE.get(address)
        if own:
            return cls(own._memory, sizes, dtype)
        first, second = pickle.loads(address)
        if callable(first):
            return cls(_opened_anew(first, second), sizes, dtype)
        memory = _mapped(first, second)
        Path(first).unlink(missing_ok=True)
        return cls(memory, sizes, dtype)

    def close(self) -> None:
        """Give the memory back; the maker's part, before who has it mapped lets go, and who may lose it now.

        PyTorch keeps memory on a GPU for as long as a counter says that another process has it, and a process that is
        killed never takes itself off. The counter has no sign: one that falls below zero keeps the memory for ever.
        """
        self.tensors.clear()
        if self._file:
            self._file.unlink(missing_ok=True)
        release = getattr(torch.UntypedStorage, "_release_ipc_counter", None)
        while self._counters and release:
            release(*self._counters.pop(), device=self._memory.device)
        self._memory = torch.empty(0)


MADE_HERE: weakref.WeakValueDictionary[bytes, Letterbox] = weakref.WeakValueDictionary()
"""Letterboxes on a GPU whose addresses this process gave away."""


def _opened_anew(open_it: Callable[..., Tensor], arguments: Sequence[Any]) -> Tensor:
    """Memory of the judge's on a GPU, and not what this process still has open from an earlier letterbox in its place.

    PyTorch hands that out again, whose size may be too small, and takes this process off the new one's counter at once.
    """
    named = inspect.signature(open_it).bind(*arguments).arguments
    shared_cache.pop(tuple(named.get(name) for name in PLACE), None)
    return open_it(*arguments)


def _mapped(name: str, length: int) -> Tensor:
    return torch.from_file(name, shared=True, size=length, dtype=torch.uint8)


def _length(sizes: Sizes, dtype: torch.dtype) -> int:
    return max(ALIGNMENT_BYTES, sum(_padded(math.prod(size) * dtype.itemsize) for size in sizes.values()))


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
