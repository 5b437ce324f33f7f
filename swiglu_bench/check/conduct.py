"""What a contender leaves behind in its process: torch's and Python's global state, and functions that it replaced.

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
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""How a setting is read, and how it is put back."""


def _each(places: Iterable[Any], read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> _Setting:
    """Several settings of one kind, read and put back together."""
    places = tuple(places)

    def put_back(values: tuple[Any, ...]) -> None:
        for place, value in zip(places, values, strict=True):
            if read(place) != value:
                write(place, value)

    return lambda: tuple(map(read, places)), put_back


def _set_device(device: torch.device | None) -> None:
    torch.set_default_device(device if device != torch.device("cpu") else None)


def _set_warnings_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]


def _flushes_denormals() -> bool:
    return bool((torch.full((), 1e-310, dtype=torch.float64) * 1.0).item() == 0)  # torch tells it in no other way


_FLAGS = (
    (torch.backends.mkldnn, "enabled"), (torch.backends.cudnn, "enabled"), (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"), (torch.utils.deterministic, "fill_uninitialized_memory"),
    *((torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction") for kind in ("fp16", "bf16")),
)  # fmt: skip
_HOOKS = [
    value for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and name.endswith("hooks") and isinstance(value, dict)
]  # fmt: skip


def _refill(hooks: dict[Any, Any], value: dict[Any, Any]) -> None:
    hooks.clear()
    hooks.update(value)


def _replaced_operators() -> set[str]:
    """Operators of torch's own that were registered again with another implementation; fakes do no harm."""
    known: set[str] = getattr(torch.library, "_impls", set())
    return {name for name in known if name.startswith("aten/") and not name.endswith("/Meta")}


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
    "torch's flags of its libraries": _each(
        _FLAGS, lambda flag: getattr(*flag), lambda flag, value: setattr(flag[0], flag[1], value)
    ),
    "torch's flushing of denormals": (_flushes_denormals, torch.set_flush_denormal),
    "torch's autocast": _each(("cpu", "cuda"), torch.is_autocast_enabled, torch.set_autocast_enabled),
    "torch's threads in a backward": (
        torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled,
    ),
    "hooks of all modules": _each(_HOOKS, dict, _refill),
    "hooks of new threads": _each(
        ((threading.getprofile, threading.setprofile), (threading.gettrace, threading.settrace)),
        lambda pair: pair[0](), lambda pair, hook: pair[1](hook),
    ),
    "the garbage collector's thresholds": (gc.get_threshold, lambda values: gc.set_threshold(*values)),
    "the interval between threads": (sys.getswitchinterval, sys.setswitchinterval),
    "the trace hook": (sys.gettrace, sys.settrace),
    "the profile hook": (sys.getprofile, sys.setprofile),
    "signal handlers": _each(
        (signal.SIGINT, signal.SIGTERM, signal.SIGALRM), signal.getsignal,
        lambda number, handler: signal.signal(number, handler) if handler is not None else None,
    ),
}  # fmt: skip
"""What changes a model's results or its other work, by the name that a row says: read, and put back."""
PUT_BACK: dict[str, _Setting] = {
    "the garbage collector": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the warnings filters": (lambda: list(warnings.filters), _set_warnings_filters),
}
"""What libraries change when they are imported, and torch.compile when it runs: put back, and no fault."""


class GlobalState:
    """The global state as it was before a contender's code ran, and what has been found changed since."""

    def __init__(self) -> None:
        self._values = {name: read() for name, (read, _) in (SETTINGS | PUT_BACK).items()}
        self._modes, self._operators = self._count_modes(), _replaced_operators()
        self.changed: set[str] = set()
        """Names of what has been found changed so far."""

    def put_back(self) -> None:
        """Restore every setting; modes and operators cannot be restored, and are only noted as changed."""
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
    on_gpu = torch.cuda.is_initialized()
    numbers = pickle.dumps(numpy.random.get_state())  # the position in it, too: most draws change nothing else
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if on_gpu else b""
    return torch.get_rng_state().numpy().tobytes(), cuda, numbers, random.getstate()


# Functions that timing and other models rely on, recorded before any contender's code has run

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
_PLACES = {name: (pkgutil.resolve_name(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in _WATCHED}
_REAL = {name: getattr(*place, None) for name, place in _PLACES.items()}


def put_functions_back() -> list[str]:
    """Restore the functions that were replaced since this module was imported, and return their names."""
    replaced = [name for name, place in _PLACES.items() if getattr(*place, None) is not _REAL[name]]
    for name in replaced:
        setattr(*_PLACES[name], _REAL[name])
    return replaced
