"""One kernel launch as data, and the decision how wide its offsets must be.

Describing a launch before running it lets the same description be compiled without a GPU (see `compiled.py`), so that
what is inspected is what runs.
"""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import torch

from swiglu_kernels.runtime import kept

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    """A jit kernel with everything it is called with.

    `arguments` maps the kernel's parameter names to tensors, TMA descriptors, integers, and constexpr values. `then` is
    launched next. `scratch`, one of the tensors, is for these launches alone: it may be another one each time.
    `traps` says what a trap in the kernel means; to be able to, the first run of each compiled kernel is waited for.
    `registers` bounds those of a thread.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    then: "Launch | None" = None
    scratch: torch.Tensor | None = None
    traps: str = ""
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told. a * b + c is rounded once, whatever a Triton does by default."""
        more: dict[str, Any] = {} if self.registers is None else {"maxnreg": self.registers}
        if self.arguments.get("EARLY"):  # the kernel waits by itself: see early.py
            more["launch_pdl"] = True
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **more}

    def run(self) -> Any:
        """Launch on the device of the tensors, and what comes then; see `run_alone`."""
        compiled = self.run_alone()
        if self.then is not None:
            self.then.run()
        return compiled

    def run_alone(self) -> Any:
        """Launch on the device of the tensors and return the compiled kernel; an empty grid launches nothing."""
        if 0 in self.grid:
            return None
        tensors = (getattr(value, "base", value) for value in self.arguments.values())  # a TMA descriptor has a base
        device = next(value.device for value in tensors if isinstance(value, torch.Tensor))
        with on_device(device):
            bind(device)
            name_alike(self.kernel)
            compiled = kept.compiling(lambda: self.kernel[self.grid](**self.arguments, **self.options))
            if self.traps and not torch.cuda.is_current_stream_capturing():
                _wait_for_first(compiled, self.traps)
            return compiled


def _wait_for_first(compiled: Any, traps: str) -> None:
    """Wait for the first run of a compiled kernel. Raises RuntimeError with `traps` where that breaks the GPU."""
    if not getattr(compiled, "ran_once", False):
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise RuntimeError(traps) from error
        compiled.ran_once = True


def name_alike(kernel: Any) -> None:
    """Give a kernel the name in Triton's cache on disk that it has in every process.

    Triton up to 3.7 makes it of the globals of the functions that were named before: in another order of launches the
    same kernel had another name, and was compiled again.
    """
    function: Any = getattr(kernel, "fn", None)
    if id(kernel) in _named or not hasattr(function, "__code__"):
        return
    _named.add(id(kernel))  # its own hash is that name
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if hasattr(type(called), "cache_key"):
            name_alike(called)
    if hasattr(type(kernel), "cache_key"):
        kernel.cache_key  # noqa: B018


_named: set[int] = set()


def bind(device: torch.device) -> None:
    """Give this thread a context, if it has none yet: the driver encodes no TMA descriptor without one.

    A thread's first launch may be its first call that needs one, where PyTorch allocates from its cache.
    """
    if device.type == "cuda" and not getattr(_thread, "bound", False):
        torch.cuda.mem_get_info(device)  # also while a graph is recorded, in which it leaves nothing
        _thread.bound = True


_thread = threading.local()
_HERE = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a CUDA device the current one, where it is not."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


def flat_needs_int64(count: int, block: int) -> bool:
    """Tell whether indices 0, 1, ... over `count` elements in whole blocks leave the 32-bit range.

    The last block is counted in full: a masked lane whose index wrapped to a negative number would pass its mask.
    """
    return -(-count // block) * block - 1 > INT32_MAX


def tile_needs_int64(*operands: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Tell whether an offset inside one tile of any operand leaves the 32-bit range.

    Kernels add 32-bit offsets within a tile to a 64-bit position of the tile, so only enormous strides matter, never
    the size of the tensor. Each operand is given as (its strides, its block sizes).
    """
    return any(
        sum(stride * (block - 1) for stride, block in zip(strides, blocks, strict=True)) > INT32_MAX
        for strides, blocks in operands
    )


def vectorises(*matrices: torch.Tensor, multiple: int = 16) -> bool:
    """Tell whether all matrices can be accessed 16 bytes at a time.

    That is where one stride is 1, the other a multiple of 16 (elements: the multiple that Triton specialises integer
    arguments for; 8 where a kernel says so itself, `multiple_of`), and the first element lies on a 16-byte boundary.
    """
    return all(
        1 in matrix.stride()
        and all(stride == 1 or (stride > 0 and stride % multiple == 0) for stride in matrix.stride())
        and matrix.data_ptr() % 16 == 0
        for matrix in matrices
    )
