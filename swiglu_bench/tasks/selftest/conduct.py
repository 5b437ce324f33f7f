"""Implementations that change what is not theirs: settings of torch, Python's hooks, the machine's time."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from swiglu_bench.cases.cases import Mode
from swiglu_bench.cases.implementation import Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.tasks.selftest.specimen import Specimen, glu, right_forward, specimen

BURN_S = 120.0
"""How long burners live at most."""


def _setting(name: str, description: str, change: Callable[[], object]) -> Specimen:
    """A right implementation whose build changes a setting."""

    @specimen(name, description, "global state", mode=Mode.FORWARD)
    def changing(problem: Problem) -> Step:
        change()
        return glu(problem)

    return changing


class _Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


one_thread = _setting(
    "one-thread", "sets torch to one thread more", lambda: torch.set_num_threads(torch.get_num_threads() + 1)
)
anomaly_mode = _setting(
    "anomaly-mode", "turns autograd's anomaly mode on", lambda: torch.autograd.set_detect_anomaly(True)
)
deterministic_mode = _setting(
    "deterministic-mode", "asks for deterministic algorithms", lambda: torch.use_deterministic_algorithms(True)
)
default_dtype = _setting("default-dtype", "changes the default dtype", lambda: torch.set_default_dtype(torch.float64))
no_gradients = _setting("no-gradients", "turns gradients off", lambda: torch.set_grad_enabled(False))
profile_hook = _setting("profile-hook", "sets a profile hook", lambda: sys.setprofile(lambda *given: None))
function_mode = _setting("function-mode", "enters a function mode of torch", lambda: _Mode().__enter__())
denormals_flushed = _setting("denormals-flushed", "takes denormals for zero", lambda: torch.set_flush_denormal(True))
hook_of_all_modules = _setting(
    "hook-of-all-modules", "hooks all modules of the process",
    lambda: torch.nn.modules.module.register_module_forward_hook(lambda *given: None),
)  # fmt: skip
collects_always = _setting(
    "collects-always", "has garbage collected at every allocation", lambda: gc.set_threshold(1, 1, 1)
)
alarm_handler = _setting(
    "alarm-handler", "replaces a signal handler", lambda: signal.signal(signal.SIGALRM, lambda *given: None)
)


@specimen(
    "setting-in-the-loop", "changes the number of threads after some calls", ("global state", "wall clock"),
    mode=Mode.FORWARD,
)  # fmt: skip
def setting_in_the_loop(problem: Problem) -> Step:
    """It waits for the check to be over."""
    calls: list[int] = []

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 30:
            torch.set_num_threads(torch.get_num_threads() + 1)
        return right_forward(x, w_gate, w_up)

    return glu(problem, forward)


@specimen("patched-silu", "replaces torch's silu by a slow one", "own clock", mode=Mode.FORWARD)
def patched_silu(problem: Problem) -> Step:
    """Everybody else's."""
    real = torch.nn.functional.silu

    def slow(*given: Any, **named: Any) -> Tensor:
        time.sleep(0.001)
        return real(*given, **named)

    torch.nn.functional.silu = slow
    return glu(problem)


@specimen("random-numbers", "draws from the global random number generator", "random state", mode=Mode.FORWARD)
def random_numbers(problem: Problem) -> Step:
    """Dropout elsewhere in the model then drops others."""
    return glu(problem, lambda x, *weights: right_forward(x, *weights) + 0 * torch.rand((), device=x.device))


@specimen("burning-thread", "keeps a thread busy that does nothing", "slows others", mode=Mode.FORWARD)
def burning_thread(problem: Problem) -> Step:
    """On a CPU of which there are few."""
    threading.Thread(target=_burn, daemon=True).start()
    return glu(problem)


@specimen("burning-child", "starts a process that is busy and leaves its group", "slows others", mode=Mode.FORWARD)
def burning_child(problem: Problem) -> Step:
    """It goes on while its parent stands still."""
    if os.fork() == 0:
        os.setsid()
        _burn()
        os._exit(0)
    return glu(problem)


def _burn() -> None:
    end = time.monotonic() + BURN_S
    while time.monotonic() < end:
        pass
