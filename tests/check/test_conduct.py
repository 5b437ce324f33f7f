import gc
import os
import pkgutil
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from swiglu_bench.check import results
from swiglu_bench.check.results import PUT_BACK, SETTINGS, GlobalState, put_functions_back, random_state


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _all_as_it_was() -> Iterator[None]:
    state = GlobalState()
    yield
    state.put_back()


BLAMED: dict[str, Callable[[], object]] = {
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's gradient mode": lambda: torch.set_grad_enabled(False),
    "torch's anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "torch's deterministic mode": lambda: torch.use_deterministic_algorithms(True),
    "torch's precision of fp32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "the trace hook": lambda: sys.settrace(lambda *given: None),
    "the profile hook": lambda: sys.setprofile(lambda *given: None),
    "torch's flags of its libraries": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "torch's flushing of denormals": lambda: torch.set_flush_denormal(True),
    "torch's autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "torch's threads in a backward": lambda: torch._C._set_multithreading_enabled(False),
    "hooks of all modules": lambda: torch.nn.modules.module.register_module_forward_hook(lambda *given: None),
    "hooks of new threads": lambda: threading.setprofile(lambda *given: None),
    "the garbage collector's thresholds": lambda: gc.set_threshold(1, 1, 1),
    "the interval between threads": lambda: sys.setswitchinterval(1.0),
    "signal handlers": lambda: signal.signal(signal.SIGUSR2, lambda *given: None),
    "hooks on saved tensors": lambda: saved_tensors_hooks(torch.neg, torch.neg).__enter__(),
    "the environment": lambda: os.environ.update(PATH="/nowhere"),
    "the current folder": lambda: os.chdir("/"),
    "NumPy's handling of errors": lambda: np.seterr(over="raise"),
}
SILENT: dict[str, Callable[[], object]] = {
    "the garbage collector": gc.disable,
    "the recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 100),
    "the warnings filters": lambda: warnings.simplefilter("ignore"),
}


def test_every_setting_has_a_change_above() -> None:
    assert (set(SETTINGS), set(PUT_BACK)) == (set(BLAMED), set(SILENT))


@pytest.mark.parametrize("name", [*BLAMED, *SILENT])
def test_a_changed_setting_is_put_back_and_remembered_unless_libraries_change_it(name: str) -> None:
    (read, _), change = (SETTINGS | PUT_BACK)[name], (BLAMED | SILENT)[name]
    before, state = read(), GlobalState()
    change()
    changed = read()
    state.put_back()
    assert (changed != before, read()) == (True, before)
    assert (name in state.changed) is (name in BLAMED)
    assert state.changed <= {name, "torch's function or dispatch modes"}, "a default device is a mode as well"


def test_where_a_compiler_lets_its_processes_find_packages_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    results._variables.cache_clear()
    state = GlobalState()
    os.environ["PYTHONPATH"] += ":/nowhere"
    state.put_back()
    results._variables.cache_clear()
    assert not state.changed


def test_a_mode_that_was_entered_and_never_left_is_named() -> None:
    state, mode = GlobalState(), Mode()
    with mode:
        state.put_back()
    assert state.changed == {"torch's function or dispatch modes"}


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.rand, random.random, lambda: None])
def test_the_state_of_every_global_generator_is_looked_at(draw: Callable[[], object]) -> None:
    draw()  # some draws change a generator's position only
    before = random_state()
    torch.randn(3, generator=torch.Generator())
    np.random.default_rng().random()
    random.Random(1).random()
    assert random_state() == before, "generators of one's own are no matter"
    drawn = draw()
    assert (random_state() == before) is (drawn is None)


def test_an_operator_of_torch_that_somebody_replaces_is_told() -> None:
    state, library = GlobalState(), torch.library.Library("aten", "IMPL")
    library.impl("hardswish", lambda value: value, "CPU")
    try:
        state.put_back()
        assert state.changed == {"torch's own operators"}
    finally:
        library._destroy()


@pytest.mark.parametrize("name", ["time.perf_counter", "torch.cuda.Event.elapsed_time", "torch.Tensor.norm"])
def test_a_replaced_function_is_named_and_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put_functions_back() == []
    real = pkgutil.resolve_name(name)
    monkeypatch.setattr(name, lambda *arguments: real(*arguments))
    assert put_functions_back() == [name]
    assert pkgutil.resolve_name(name) is real
