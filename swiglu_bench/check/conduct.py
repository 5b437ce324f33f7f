"""What a contender leaves behind in its process: torch's and Python's global state before and after its turns.

Its state is its own: no other contender shares its process. It is put back all the same before each of its turns, so
that what is timed is what was asked for, and what a user's own process would be left with is named in its row.
"""

from __future__ import annotations

import gc
import pickle
import pkgutil
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch

_WATCHED = (
    "time.perf_counter", "time.sleep", "torch.cuda.synchronize", "torch.cuda.current_stream", "torch.cuda._sleep",
    "torch.cuda.Event", "torch.cuda.Event.record", "torch.cuda.Event.query", "torch.cuda.Event.synchronize",
    "torch.cuda.Event.elapsed_time", "torch.equal", "torch.isfinite", "torch.Tensor.norm", "torch.Tensor.to",
    "torch.autograd.backward", "torch.nn.functional.silu", "torch.nn.functional.linear", "torch.nn.functional.gelu",
    "torch.nn.functional.softmax", "torch.nn.functional.scaled_dot_product_attention",
    "torch.nn.functional.cross_entropy", "torch.matmul", "torch.mm", "torch.addmm", "torch.sigmoid", "torch.mul",
    "torch.add", "torch.empty", "torch.zeros", "torch.Tensor.__matmul__", "torch.Tensor.__mul__",
    "torch.Tensor.__add__", "torch.Tensor.backward",
)  # fmt: skip
"""The functions that timing and other models rely on, recorded before any contender's code has run."""
_PLACES = {name: (pkgutil.resolve_name(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in _WATCHED}
_REAL = {name: getattr(*place, None) for name, place in _PLACES.items()}


def put_back() -> list[str]:
    """Restore the functions that were replaced since this module was imported, and return their names."""
    replaced = [name for name, place in _PLACES.items() if getattr(*place, None) is not _REAL[name]]
    for name in replaced:
        setattr(*_PLACES[name], _REAL[name])
    return replaced


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


def _flushes_denormals() -> bool:
    return bool((torch.full((), 1e-310, dtype=torch.float64) * 1.0).item() == 0)  # torch tells it in no other way


_FLAGS = tuple(
    (owner, name)
    for owner, names in (
        (torch.backends.mkldnn, ("enabled",)),
        (torch.backends.cudnn, ("enabled", "benchmark", "deterministic")),
        (torch.backends.cuda.matmul, [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]),
        (torch.utils.deterministic, ("fill_uninitialized_memory",)),
    )
    for name in names
)  # fmt: skip


def _flags() -> tuple[Any, ...]:
    return tuple(getattr(owner, name) for owner, name in _FLAGS)


def _set_flags(values: tuple[Any, ...]) -> None:
    for (owner, name), value in zip(_FLAGS, values, strict=True):
        if getattr(owner, name) != value:
            setattr(owner, name, value)


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _set_autocast(values: tuple[bool, ...]) -> None:
    for kind, value in zip(("cpu", "cuda"), values, strict=True):
        torch.set_autocast_enabled(kind, value)


_HOOKS = tuple(
    value for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and name.endswith("hooks") and isinstance(value, dict)
)  # fmt: skip


def _module_hooks() -> tuple[dict[Any, Any], ...]:
    return tuple(dict(hooks) for hooks in _HOOKS)


def _set_module_hooks(values: tuple[dict[Any, Any], ...]) -> None:
    for hooks, value in zip(_HOOKS, values, strict=True):
        hooks.clear()
        hooks.update(value)


def _thread_hooks() -> tuple[Any, Any]:
    return threading.getprofile(), threading.gettrace()


def _set_thread_hooks(hooks: tuple[Any, Any]) -> None:
    for put, hook in zip((threading.setprofile, threading.settrace), hooks, strict=True):
        put(hook)


def _replaced_operators() -> set[str]:
    """Operators of torch's own for which somebody has registered another implementation; fakes of them do no harm."""
    known: set[str] = getattr(torch.library, "_impls", set())
    return {name for name in known if name.startswith("aten/") and not name.endswith("/Meta")}


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
    "torch's flags of its libraries": (_flags, _set_flags),
    "torch's flushing of denormals": (_flushes_denormals, torch.set_flush_denormal),
    "torch's autocast": (_autocast, _set_autocast),
    "torch's threads in a backward": (
        torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled,
    ),
    "hooks of all modules": (_module_hooks, _set_module_hooks),
    "hooks of new threads": (_thread_hooks, _set_thread_hooks),
    "the garbage collector's thresholds": (gc.get_threshold, lambda values: gc.set_threshold(*values)),
    "the interval between threads": (sys.getswitchinterval, sys.setswitchinterval),
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
        self._modes, self._operators = self._count_modes(), _replaced_operators()
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

        if _replaced_operators() - self._operators:
            self.changed.add("torch's own operators")

    @staticmethod
    def _count_modes() -> tuple[int, int]:
        counts = (getattr(torch._C, f"_len_torch_{kind}_stack", int) for kind in ("function", "dispatch"))
        function, dispatch = (int(count()) for count in counts)
        return function, dispatch


def random_state() -> tuple[Any, ...]:
    """The state of all global random number generators."""
    return _random_states()
