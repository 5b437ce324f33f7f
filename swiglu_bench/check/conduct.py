"""What a contender leaves behind in its process: torch's and Python's global state before and after its turns.

Its state is its own: no other contender shares its process. It is put back all the same before each of its turns, so
that what is timed is what was asked for, and what a user's own process would be left with is named in its row.
"""

from __future__ import annotations

import gc
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch


def _signal_handlers() -> tuple[Any, ...]:
    return tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))


def _set_signal_handlers(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip((signal.SIGINT, signal.SIGTERM, signal.SIGALRM), handlers, strict=True):
        if handler is not None:
            signal.signal(number, handler)


def _random_states() -> tuple[Any, ...]:
    on_gpu = torch.cuda.is_initialized()
    numbers = pickle.dumps(numpy.random.get_state())  # the position in it, too: most draws change nothing else
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if on_gpu else b""
    return torch.get_rng_state().numpy().tobytes(), cuda, numbers, random.getstate()


def _set_device(device: torch.device | None) -> None:
    torch.set_default_device(device if device != torch.device("cpu") else None)


def _set_warnings_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]


_Setting = tuple[Callable[[], Any], Callable[[Any], object]]
SETTINGS: dict[str, _Setting] = {
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, _set_device),
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch's deterministic mode": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms,
    ),
    "torch's precision of fp32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "the trace hook": (sys.gettrace, sys.settrace),
    "the profile hook": (sys.getprofile, sys.setprofile),
    "signal handlers": (_signal_handlers, _set_signal_handlers),
}  # fmt: skip
"""What changes a model's results or its other work, by the name that a row says: read, and put back."""
PUT_BACK: dict[str, _Setting] = {
    "the garbage collector": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the warnings filters": (lambda: list(warnings.filters), _set_warnings_filters),
}
"""What libraries change when they are imported, and torch.compile when it runs: put back, and no fault."""


class GlobalState:
    """The state as it was before a contender's code ran."""

    def __init__(self) -> None:
        """Remember it."""
        self._values = {name: read() for name, (read, _) in (SETTINGS | PUT_BACK).items()}
        self._modes = self._count_modes()
        self.changed: set[str] = set()
        """Names of what has been found changed so far."""

    def put_back(self) -> None:
        """Make all of it what it was, but for modes."""
        for name, (read, write) in (SETTINGS | PUT_BACK).items():
            if read() != self._values[name]:
                write(self._values[name])
                if name in SETTINGS:
                    self.changed.add(name)
        if self._count_modes() != self._modes:
            self.changed.add("torch's function or dispatch modes")

    @staticmethod
    def _count_modes() -> tuple[int, int]:
        counts = (getattr(torch._C, f"_len_torch_{kind}_stack", int) for kind in ("function", "dispatch"))
        function, dispatch = (int(count()) for count in counts)
        return function, dispatch


def random_state() -> tuple[Any, ...]:
    """The state of all global random number generators."""
    return _random_states()
