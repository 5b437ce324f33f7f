"""Processes in which nothing is timed, beside others that use the GPU; and, run as a program, one that keeps it busy.

What they compile is on disk afterwards, where the process that is timed finds it: Triton keeps kernels there. Choices
of autotuners stay here, because the others would have a part in them; where all candidates have to be compiled, side
by side, they are not even compared.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

SIDE = {"cpu": 256, "cuda": 4096}
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_FOR_EVER = contextlib.ExitStack()


def keep_no_choice(inductor: bool) -> None:
    """From now on keep no autotuner's choice on disk; `inductor`: nor torch.compile's, whose import takes long."""
    if inductor or "torch._inductor.config" in sys.modules:
        from torch._inductor import config

        config.fx_graph_cache = config.autotune_local_cache = False
    with contextlib.suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        Autotuner.check_disk_cache = _kept_nowhere


def choose_nothing(inductor: bool) -> None:
    """Keep no choice, and let autotuners take the first candidate that runs."""
    keep_no_choice(inductor)
    _FOR_EVER.enter_context(first_candidates())


@contextlib.contextmanager
def first_candidates() -> Iterator[None]:
    """While this is entered, Triton's autotuners take the first candidate that runs: only right results count."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    bench, run = Autotuner._bench, Autotuner.run

    def first_only(self: Any, *arguments: Any, **options: Any) -> list[float]:
        if self.taken:
            return [math.inf, math.inf, math.inf]
        found: list[float] = bench(self, *arguments, **options)
        self.taken = math.isfinite(found[0])
        return found

    def with_none_taken(self: Any, *arguments: Any, **options: Any) -> Any:
        self.taken = False
        return run(self, *arguments, **options)

    with mock.patch.multiple(
        Autotuner, check_disk_cache=_kept_nowhere, do_bench=staticmethod(_once), _bench=first_only, run=with_none_taken
    ):
        yield


@contextlib.contextmanager
def every_candidate() -> Iterator[None]:
    """While this is entered, autotuners of Triton compile all candidates of a call, one for each CPU at a time."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    run = Autotuner.run

    def compiled_before(self: Any, *arguments: Any, **options: Any) -> Any:
        if len(self.configs) > 1:
            with contextlib.suppress(Exception), AsyncCompileMode(threads, ignore_errors=True):
                self.warmup(*arguments, **options)
        return run(self, *arguments, **options)

    with ThreadPoolExecutor(CPUS) as threads, mock.patch.object(Autotuner, "run", compiled_before):
        yield


def _kept_nowhere(self: Any, key: object, configs: object, bench: Callable[[], object]) -> bool:
    return bool(bench())


def _once(call: Callable[[], object], quantiles: object = None) -> list[float]:
    call()
    return [1.0, 1.0, 1.0]


@contextlib.contextmanager
def competitors(device: torch.device) -> Iterator[int]:
    """Let programs compete until this is left, one for each CPU and one for a GPU; how many there are."""
    on = ["cpu"] * CPUS + ([str(device)] if device.type == "cuda" else [])
    started = [subprocess.Popen([sys.executable, __file__, kind], stdin=subprocess.PIPE) for kind in on]
    try:
        yield len(started)
    finally:
        for program in started:
            program.kill()
            program.wait()


def _compete(name: str) -> None:
    import torch

    torch.set_num_threads(1)
    device = torch.device(name)
    matrix = torch.randn(SIDE[device.type], SIDE[device.type], device=device)
    began_under = os.getppid()
    while os.getppid() == began_under:
        for _ in range(20):
            matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    _compete(sys.argv[1])
