"""Every private name of PyTorch that these kernels use: looked for once, and done without where a release has none.

    what is done with them                                                    what happens without
    calls that were made before go past PyTorch's dispatcher (`door.py`)      every call goes through it
    operators with little between the call and the kernel (`operator.py`)     operators as `torch.library` makes them
    a backward overwrites what its forward saved (`operator.py`)              it allocates new buffers
    calls that were made before are repeated from a record (`series.py`)      each launch is looked up by its arguments
    tensors are compared with those of such calls (`door.py`)                 they are compared one property at a time
    products of fp8 alone are PyTorch's (`ops/fp8/choice.py`)                 they are the portable kernels'
    ranks read each other's memory (`runtime/ranks.py`)                       rows travel by collectives

OFF says which of these are off here, and which names are missing.
"""

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.autograd import forward_ad


def _find(*paths: str) -> tuple[list[Any], str]:
    """Return what torch has under these names, None for what it has not, and a list of the missing names."""
    found = []
    for path in paths:
        value: Any = torch
        for name in path.split("."):
            value = getattr(value, name, None)
        found.append(value)
    missing = (f"torch.{path}" for path, value in zip(paths, found, strict=True) if value is None)
    return found, ", ".join(missing)


(dispatch_modes, function_modes, transforms, profiler, tracing, _level), _unwatched = _find(
    "_C._len_torch_dispatch_stack", "_C._len_torch_function_stack", "_C._are_functorch_transforms_active",
    "_C._autograd._profiler_enabled", "_C._get_tracing_state", "autograd.forward_ad._current_level",
)  # fmt: skip
(below_autograd, any_requires_grad, after_autograd), _no_operators = _find(
    "_C._AutoDispatchBelowAutograd", "_C._any_requires_grad", "_C._after_autograd_keyset"
)
"""A context, a function of an operator's arguments, and a set of dispatch keys; see `has_operators`."""
(_task_id, _keeps_graph, _storage_of, _storage_uses, _uses), _no_counts = _find(
    "_C._current_graph_task_id", "_C._autograd._get_current_graph_task_keep_graph", "_C._storage_address",
    "_C._storage_Use_Count", "Tensor._use_count",
)  # fmt: skip
(_dispatch_mode,), _no_record = _find("utils._python_dispatch.TorchDispatchMode")
(_guards,), _no_guards = _find("_C._dynamo.guards.TensorGuards")
(scaled_mm,), _no_scaled_mm = _find("_scaled_mm")
(scaled_mm_v2, _scaling), _no_scaled_mm_v2 = _find("_scaled_mm_v2", "nn.functional.ScalingType")
scaled_mm_of_blocks = not _no_scaled_mm_v2
"""Whether scales of a weight's blocks may be padded alone."""
(_disable_dynamo, _current_device, spin), _ = _find("_compile._disable_dynamo", "_C._cuda_getDevice", "cuda._sleep")
current_device: Callable[[], int] = _current_device or torch.cuda.current_device
"""The index of the current CUDA device, once there is one."""

adds_in_float32 = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether a product of 16 bits can be added in float32 in one call."""
can_count, can_record = not _no_counts, not _no_record
DispatchMode: Any = _dispatch_mode or object
"""What is done by PyTorch's dispatcher passes an object of this class while it is entered."""
has_operators = not (_no_operators or transforms is None)
can_see_watchers = not (_unwatched or _no_operators)
"""Whether dispatch_modes, function_modes, transforms, profiler, tracing and dual_level are all there."""
dual_level: Callable[[], int] = functools.partial(operator.attrgetter("_current_level"), forward_ad)
"""How many levels of forward-mode differentiation are entered, less one."""
_OFF = {
    "every call goes through PyTorch's dispatcher, some 30 us longer": _unwatched or _no_operators,
    "operators are those of torch.library, some 40 us longer": _no_operators,
    "a backward allocates what it could have overwritten": _no_counts,
    "every launch of a call is looked up": _no_record,
    "the tensors of a call are compared in Python, some 5 us longer": _no_guards,
    "fp8 products alone are the portable kernels'": _no_scaled_mm,
}
OFF = tuple(f"{loss}: this PyTorch has no {missing}" for loss, missing in _OFF.items() if missing)
"""One sentence for each thing that is off."""
if OFF:
    warnings.warn(f"swiglu_kernels works, but {'; '.join(OFF)}", stacklevel=2)


def multiply_blocks(codes: Any, scales: Any, b_codes: Any, b_scales: Any, out: Any) -> None:
    """Write the product of codes by blocks of 1 x 128 and b_codes by 128 x 128; scales as `_scaled_mm_v2` has them."""
    of_a, of_b = [_scaling.BlockWise1x128.value], [_scaling.BlockWise128x128.value]
    scaled_mm_v2(codes, b_codes, [scales], of_a, [], [b_scales], of_b, [], None, out.dtype, out=out)


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return what tells whether as many tensors are like these, as Dynamo tells it of a compiled function's arguments.

    That is of the same types, sizes, strides, dtypes and devices, with and without gradients, and seen by the same
    dispatch keys. None where nothing here can tell it: it takes no tensor twice.
    """
    if _no_guards:
        return None
    try:
        check: Callable[..., bool] = _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) is True else None
    except (TypeError, RuntimeError, SystemError):  # of another release
        return None


def symmetric_memory(
    group: Any, device: torch.device, size_bytes: int
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Return memory of each rank that all ranks of a group read and write, and what waits on the GPU for all of them.

    All ranks call it together. A rank that does not come within the group's timeout, or 10 minutes, is an error there.
    """
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(memory, group.group_name)
    timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", timedelta(minutes=10))
    buffers = [handle.get_buffer(rank, (size_bytes,), torch.uint8) for rank in range(group.size())]
    buffers[group.rank()] = memory
    return buffers, lambda: handle.barrier(channel=0, timeout_ms=int(timeout.total_seconds() * 1000))


def transforms_active() -> bool:
    """Tell whether a transform of torch.func may be active."""
    return transforms is None or transforms()


def tangents_possible() -> bool:
    """Tell whether any tensor may have a tangent."""
    return _level is None or forward_ad._current_level >= 0


def graph_is_freed() -> bool:
    """Tell whether a backward is running after which autograd is done with its graph; False where nobody knows."""
    return can_count and _task_id() != -1 and not _keeps_graph()


def references(saved: tuple[Any, ...], number: int) -> tuple[int, int, int]:
    """Count who holds a tensor of a tuple in Python, who in C++, and who its memory; the tuple and this are among them.

    It takes the tuple because the caller of a function may hold the arguments, or not: Dynamo's frames do.
    """
    storage = saved[number].untyped_storage()
    return sys.getrefcount(saved[number]), _uses(saved[number]), _storage_uses(storage._cdata)


def held_by_no_more(saved: tuple[Any, ...], number: int, most: tuple[int, int, int]) -> bool:
    """Tell whether none of `references` is larger.

    To look at a storage from Python makes an object that holds it, which takes a microsecond: done where it may matter.
    """
    python, cpp, memory = most
    return (
        sys.getrefcount(saved[number]) <= python
        and _uses(saved[number]) <= cpp
        and (
            _storage_uses(_storage_of(saved[number])) < memory
            or _storage_uses(saved[number].untyped_storage()._cdata) <= memory
        )
    )


def fsdp_is_used() -> bool:
    """Tell whether a module of this process is managed by `fully_shard`, which writes weights and hides it."""
    states = sys.modules.get("torch.distributed._composable_state")
    return states is not None and bool(getattr(states, "_module_state_mapping", True))


def constant_in_graphs(function: Any) -> Any:
    """Let Dynamo take the function's result for a constant; a Dynamo that does not know the mark traces the function.

    As `torch.compiler.assume_constant_result` does, which imports all of Dynamo for it: a second and a half.
    """
    function._dynamo_marked_constant = True
    return function


def disabled_in_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as Dynamo does not trace it; this imports no Dynamo where PyTorch lets it."""
    return torch.compiler.disable(function) if _disable_dynamo is None else _disable_dynamo(function)
