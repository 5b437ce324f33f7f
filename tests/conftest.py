import importlib.util
import itertools
import os
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

# The products here are tiny. A thread that waits for another one does so in a loop, which took a third of the tests'
# time, and six times as long where other programs keep the cores busy. Before NumPy, and for child processes.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
# Of more than a hundred processes each would compile the sources anew, which takes half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
from hypothesis import settings
from quick_interpreter import quicken

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    # Before anything imports triton: a kernel is bound to the interpreter when it is decorated.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1":
        quicken()

torch.set_num_threads(1)

# A shell lets its background jobs ignore Ctrl-C, and their children inherit that: tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Hypothesis's own limit is a time, which a busy machine exceeds.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

NUMBERS = itertools.count()


LONGEST = (
    "worker/test_court.py", "worker/test_ray_cluster.py", "kernels/standalone/test_compiled.py",
    "tasks/selftest/test_run.py", "cli/test_ends.py", "cli/test_measure.py", "cli/test_beyond.py",
    "tasks/tp/test_run.py", "cli/test_app.py", "worker/test_environments.py", "test_packaging.py",
    "kernels/ops/experts/test_parallel.py", "tasks/contract/test_matrix.py", "kernels/nn/test_parallel.py",
    "kernels/runtime/test_backend.py", "kernels/runtime/test_compiling.py", "worker/test_installed.py",
    "test_counts.py",
)  # fmt: skip
"""Files with tests of many seconds; of two or four workers that are dealt them in turn, each gets about as much."""


def longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """In each of the equal parts that pytest-xdist gives its workers to begin with; what it moves later is short.

    A long test that begins last is waited for while the other workers have nothing to do.
    """
    ranks = {file: rank for rank, file in enumerate(LONGEST)}
    by_rank: dict[int, list[pytest.Item]] = {rank: [] for rank in range(len(LONGEST) + 1)}
    for item in items:
        file = Path(os.path.relpath(item.path, Path(__file__).parent)).as_posix()
        by_rank[ranks.get(file, len(LONGEST))].append(item)
    short, sorted_items = iter(by_rank.pop(len(LONGEST))), list[pytest.Item]()
    for worker in range(workers):
        long = [item for rank in range(worker, len(LONGEST), workers) for item in by_rank[rank]]
        left = (len(items) - len(sorted_items)) // (workers - worker) - len(long)  # as schedulers of xdist divide
        sorted_items += [*long, *itertools.islice(short, max(0, left))]
    return [*sorted_items, *short]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    for item in items:
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=2))
        if item.get_closest_marker("network") and "network" not in str(config.getoption("markexpr")):
            item.add_marker(pytest.mark.skip(reason="needs the network: make test-network"))
    if torch.cuda.is_available():
        # A signal does not interrupt the wait for a kernel that does not end; a thread ends the process.
        for item in items:
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(method="thread"))
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # not "in item.keywords": those hold the names of parameters too
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"))


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Each test draws its own numbers, the same in every run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _memory_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """The workers of one run share a GPU: what the allocator of one keeps is missing elsewhere."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def _quiet_machine() -> Iterator[None]:
    from quiet import quiet_machine

    with quiet_machine():
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_user_s_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For child processes and longer fixtures, one for all tests: measuring the limits again takes half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is kept from run to run is kept from no test to another, nor taken from the user's own folder."""
    folder = tmp_path_factory.getbasetemp() / f"cache-{next(NUMBERS)}"
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: folder)
    # What contenders compile is the same in every test.
    compiled = tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setattr("swiglu_bench.worker.environments.root", lambda: compiled)
