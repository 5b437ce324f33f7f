"""A process in which nothing is timed: what autotuners would choose among is compiled side by side, and not compared.

What it compiles is on disk afterwards, where the process that is timed finds it: Triton keeps kernels there. Choices
stay here: they would be made while other processes use the GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def compile_ahead() -> None:
    """Let this process's autotuners, Triton's and Inductor's, work so from now on."""
    from torch._inductor import config

    config.fx_graph_cache = config.autotune_local_cache = False  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):
        from triton.runtime import autotuner

        autotuner.Autotuner.do_bench = staticmethod(_once)
        autotuner.Autotuner.check_disk_cache = lambda self, key, configs, time_all: bool(time_all())
        autotuner.Autotuner.run = _all_compiled(autotuner.Autotuner.run)


def _once(call: Callable[[], object], quantiles: object = None) -> list[float]:
    """Call it, as a benchmark does: what cannot run raises, all others are as fast."""
    call()
    return [1.0, 1.0, 1.0]


def _all_compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    def compiled_before(self: Any, *arguments: Any, **options: Any) -> Any:
        _compile_all(self, arguments, options)
        return run(self, *arguments, **options)

    return compiled_before


def _compile_all(autotuner: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Compile all candidates; whatever is wrong with one is told when it is run.

    Of arguments that it has compiled for already, Triton compiles nothing.
    """
    if len(autotuner.configs) < 2:
        return
    with contextlib.suppress(Exception):
        from triton.runtime._async_compile import AsyncCompileMode

        with ThreadPoolExecutor(cores()) as threads, AsyncCompileMode(threads, ignore_errors=True):
            autotuner.warmup(*arguments, **options)


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
