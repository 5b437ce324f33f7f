"""Where a kernel can run, decided in one place.

Three answers: `triton` (a CUDA device that Triton compiles for), `interpreter` (the same kernels executed by Triton's
CPU interpreter, chosen by `TRITON_INTERPRET=1` before this package is imported) and `torch` (everything else, including
platforms without Triton: the plain PyTorch reference runs instead).

Kernel files take `triton` and `tl` from here, so that they import on platforms where Triton does not exist.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, Literal

import torch

from swiglu_kernels.runtime.internals import constant_in_graphs

Backend = Literal["triton", "interpreter", "torch"]
Capability = tuple[int, int]
"""Of an NVIDIA GPU, such as (9, 0)."""

MINIMUM_CAPABILITY = (8, 0)


class _NoTriton:
    """Takes the place of `triton` and `triton.language` in decorators and annotations; no kernel is ever launched."""

    constexpr: Any = object

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return function or (lambda function: function)


triton: Any = _NoTriton
tl: Any = _NoTriton
with contextlib.suppress(ImportError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
TRITON_AVAILABLE = triton is not _NoTriton
# Triton binds every kernel to the interpreter or to the compiler when it is decorated, hence once, at import.
INTERPRETING = TRITON_AVAILABLE and bool(triton.knobs.runtime.interpret)


def backend_for(where: torch.Tensor | torch.device) -> Backend:
    """Say how the kernels of this package run on a tensor or device.

    Args:
        where: a tensor (its device counts) or a device.

    Returns:
        `"triton"` on an NVIDIA GPU of compute capability 8.0 or newer, where Triton is installed;
        `"interpreter"` on every device when `TRITON_INTERPRET=1` was set before the import;
        `"torch"` otherwise, and for every float64 tensor: the public functions then run the PyTorch reference.
    """
    if isinstance(where, torch.Tensor) and where.dtype is torch.float64:
        return "torch"
    if INTERPRETING:
        return "interpreter"
    device = where.device if isinstance(where, torch.Tensor) else where
    if TRITON_AVAILABLE and device.type == "cuda" and _is_supported_gpu(device):
        return "triton"
    return "torch"


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; of any other None, but in `describing_for`."""
    if device.type != "cuda":
        return _described_for
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


_described_for: Capability | None = None


@contextlib.contextmanager
def describing_for(capability: Capability) -> Iterator[None]:
    """Describe launches on tensors of no GPU for one of a compute capability, to compile them."""
    global _described_for
    before, _described_for = _described_for, capability
    try:
        yield
    finally:
        _described_for = before


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Count those of a GPU; where there is none, launches are described to be compiled or interpreted for an H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@constant_in_graphs
def card_of(device: torch.device) -> str:
    """Return the model of a GPU as its driver names it, "" for any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@constant_in_graphs  # a GPU does not change while a compiled function lives
def _is_supported_gpu(device: torch.device) -> bool:
    if torch.version.hip is not None:
        return False
    capability = capability_of(device)
    return capability is not None and capability >= MINIMUM_CAPABILITY
