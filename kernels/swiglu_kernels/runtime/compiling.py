"""Launches compiled without being launched: for any GPU, or side by side in processes, for Triton's cache on disk.

    python -m swiglu_kernels.runtime.compiling <PICKLED

A process reads a pickled list of launches (`portable_form`) and a compute capability from its standard input.
"""

import contextlib
import dataclasses
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from swiglu_kernels.runtime import kept
from swiglu_kernels.runtime.backend import Capability
from swiglu_kernels.runtime.launch import INT32_MAX, Launch, name_alike

PACKAGE = Path(__file__).parents[1]
MOST_PROCESSES = 16
Plain = dict[str, Any]
"""A launch that another process can make again."""


@contextlib.contextmanager
def _compiling_for(capability: Capability) -> Iterator[None]:
    """Put in the place of Triton's driver one of a GPU that need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    number = capability[0] * 10 + capability[1]
    before = getattr(driver, "_active", None)  # None: Triton looks for one when it needs it
    target = GPUTarget("cuda", number, 32)
    made = SimpleNamespace(
        get_current_target=lambda: target, get_current_stream=lambda device=None: 0,
        get_current_device=lambda: 1000 + number,  # a number for each target: Triton keeps what it has compiled by it
    )  # fmt: skip
    driver.set_active(made)
    try:
        yield
    finally:
        driver.set_active(before)


def compile_launch(launch: Launch, capability: Capability) -> Any:
    """Return the kernel of a launch compiled for a compute capability, specialised to its arguments as Triton does."""
    with _compiling_for(capability):
        name_alike(launch.kernel)
        return kept.compiling(lambda: launch.kernel.warmup(**launch.arguments, grid=launch.grid, **launch.options))


def kind_of(launch: Launch) -> tuple[Any, ...]:
    """Return what decides how a launch is compiled, and is equal for launches that share a compiled kernel."""
    function = launch.kernel.fn
    found: list[Any] = [function.__module__, function.__name__, *launch.options.items()]
    for parameter in launch.kernel.params:
        value: Any = launch.arguments.get(parameter.name)
        if isinstance(value, torch.Tensor):
            found.append((value.dtype, value.is_meta or value.data_ptr() % 16 == 0))
        elif hasattr(value, "block_shape"):
            found.append((value.base.dtype, *value.block_shape))
        elif parameter.is_constexpr or value is None or isinstance(value, float):
            found.append(type(value) if isinstance(value, float) else value)
        elif parameter.do_not_specialize:
            found.append(value > INT32_MAX)
        else:
            found.append((value == 1, value % 16 == 0, value > INT32_MAX))
    return tuple(found)


def portable_form(launch: Launch) -> Plain:
    """Return what makes the launch again in another process, of tensors without memory."""
    function = launch.kernel.fn
    arguments = {name: _without_memory(value) for name, value in launch.arguments.items()}
    plain = {field.name: getattr(launch, field.name) for field in dataclasses.fields(Launch)}
    return plain | {"kernel": (function.__module__, function.__name__), "arguments": arguments, "then": None,
                    "scratch": None}  # fmt: skip


def _without_memory(value: Any) -> Any:
    if hasattr(value, "block_shape"):
        return dataclasses.replace(value, base=_without_memory(value.base))
    if not isinstance(value, torch.Tensor):
        return value
    offset = 0 if value.is_meta else value.data_ptr() % 16 // value.element_size()
    made = torch.empty(1, dtype=value.dtype, device="meta")
    return made.as_strided(value.shape, value.stride(), offset)


def _launch_of(plain: Plain) -> Launch:
    module, name = plain["kernel"]
    return Launch(**plain | {"kernel": getattr(importlib.import_module(module), name)})


def compile_side_by_side(launches: Sequence[Plain], capability: Capability) -> int:
    """Compile for Triton's cache in as many processes as there are CPUs; return in how many.

    What does not compile here is left for the call that needs it, which then says why.
    """
    count = min(len(launches), len(os.sched_getaffinity(0)), MOST_PROCESSES)
    running = []
    for number in range(count):
        process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE.name}.runtime.compiling"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(),
        )  # fmt: skip
        running.append((process, pickle.dumps((launches[number::count], capability))))
    for process, content in running:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            process.stdin.write(content)
            process.stdin.close()
    for process, _ in running:
        process.wait()
    return count


def environment() -> dict[str, str]:
    """The environment in which `python -m` finds this package, wherever it was loaded from."""
    path = [str(PACKAGE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def main() -> None:
    """Compile what standard input names; one that fails leaves the others."""
    launches, capability = pickle.load(sys.stdin.buffer)
    for plain in launches:
        with contextlib.suppress(Exception):  # a compiler may raise anything
            compile_launch(_launch_of(plain), capability)


if __name__ == "__main__":
    main()
