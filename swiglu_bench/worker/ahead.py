"""Processes in which nothing is timed, beside others that use the GPU.

What they compile is on disk afterwards, where the process that is timed finds it: Triton keeps kernels there. Choices
of autotuners stay here, because the others would have a part in them; where all candidates have to be compiled, side
by side, they are not even compared.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def keep_no_choice(inductor: bool) -> None:
    """From now on what this process's autotuners choose is not kept on disk, where a process that is timed finds it.

    `inductor`: those of torch.compile too, whose import takes seconds; they are not left out where they are there.
    """
    if inductor or "torch._inductor.config" in sys.modules:
        from torch._inductor import config

        config.fx_graph_cache = config.autotune_local_cache = False
    with contextlib.suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        Autotuner.check_disk_cache = _kept_nowhere


def choose_nothing(inductor: bool) -> None:
    """Keep no choice, and let autotuners take the first candidate that runs."""
    keep_no_choice(inductor)
    with contextlib.suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        for name, value in _taking_the_first(Autotuner).items():
            setattr(Autotuner, name, value)


@contextlib.contextmanager
def first_candidates() -> Iterator[None]:
    """While this is entered, Triton's autotuners take the first candidate that runs: only right results count."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    wanted = _taking_the_first(Autotuner)
    before = {name: vars(Autotuner)[name] for name in wanted}
    for name, value in wanted.items():
        setattr(Autotuner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(Autotuner, name, value)


@contextlib.contextmanager
def every_candidate() -> Iterator[None]:
    """While this is entered, Triton's autotuners compile all candidates of a call, as many at a time as there are CPUs.

    Of arguments that were compiled for already, Triton compiles nothing. What is wrong with a candidate is told when it
    is run.
    """
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

    with ThreadPoolExecutor(_cpus()) as threads:
        Autotuner.run = compiled_before
        try:
            yield
        finally:
            Autotuner.run = run


def _taking_the_first(autotuner: Any) -> dict[str, Any]:
    """What of Triton's class is replaced for that, and for choices that are kept nowhere."""
    return {
        "check_disk_cache": _kept_nowhere,
        "do_bench": staticmethod(_once),
        "_bench": _first_only(autotuner._bench),
        "run": _with_none_taken(autotuner.run),
    }


def _kept_nowhere(self: Any, key: object, configs: object, bench: Callable[[], object]) -> bool:
    return bool(bench())


def _once(call: Callable[[], object], quantiles: object = None) -> list[float]:
    """Call it, as a benchmark does; what cannot run raises."""
    call()
    return [1.0, 1.0, 1.0]


def _with_none_taken(run: Callable[..., Any]) -> Callable[..., Any]:
    def none_taken(self: Any, *arguments: Any, **options: Any) -> Any:
        self.taken = False
        return run(self, *arguments, **options)

    return none_taken


def _first_only(bench: Callable[..., list[float]]) -> Callable[..., list[float]]:
    def first_only(self: Any, *arguments: Any, **options: Any) -> list[float]:
        if self.taken:
            return [math.inf, math.inf, math.inf]
        found = bench(self, *arguments, **options)
        self.taken = math.isfinite(found[0])
        return found

    return first_only


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
