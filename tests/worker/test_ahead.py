"""Autotuners where nothing is timed: every candidate compiled, the first that runs taken, nothing kept."""

from collections.abc import Iterator
from typing import Any

import pytest

from swiglu_bench.worker.ahead import choose_nothing, every_candidate, first_candidates, keep_no_choice

autotuner = pytest.importorskip("triton.runtime.autotuner")


def named(size: int) -> None:
    """What an autotuner takes names from."""


class Kernel:
    """Takes note of what is compiled and what is run; sizes below 4 do not run."""

    arg_names = ("size",)
    fn = staticmethod(named)

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.ran: list[int] = []

    def warmup(self, *_: Any, SIZE: int, **__: Any) -> None:
        self.compiled.append(SIZE)

    def run(self, *_: Any, SIZE: int, **__: Any) -> int:
        if SIZE < 4:
            raise autotuner.OutOfResources(2, 1, "shared memory")
        self.ran.append(SIZE)
        return SIZE


@pytest.fixture(autouse=True)
def inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Inductor's settings; they and the autotuner are as they were afterwards."""
    config = pytest.importorskip("torch._inductor.config")
    for name in ("do_bench", "check_disk_cache", "_bench", "run"):
        monkeypatch.setattr(autotuner.Autotuner, name, vars(autotuner.Autotuner)[name])
    with config.patch(fx_graph_cache=True, autotune_local_cache=True):
        yield config


def tuned(kernel: Kernel, cache_results: bool = False) -> Any:
    configs = [autotuner.Config({"SIZE": size}) for size in (2, 4, 8, 16)]
    return autotuner.Autotuner(
        kernel, kernel.arg_names, configs, ["size"], None, None, cache_results=cache_results,
    )  # fmt: skip


@pytest.mark.parametrize("cache_results", [False, True])
def test_the_first_candidate_that_runs_is_taken(cache_results: bool, inductor: Any) -> None:
    choose_nothing(inductor=True)
    kernel = Kernel()
    one = tuned(kernel, cache_results)
    assert [one.run(7), one.run(7), one.run(9)] == [4, 4, 4]
    assert kernel.ran == [4] * 5, "once to see whether it runs, for each size, and once for each call"
    assert not kernel.compiled
    assert not any((inductor.fx_graph_cache, inductor.autotune_local_cache)), "nor does Inductor keep a choice"


def test_where_others_use_the_gpu_a_choice_is_made_and_not_kept(inductor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {4: 3.0, 8: 1.0, 16: 2.0}
    kernel = Kernel()

    def bench(self: Any, *_: Any, config: Any, **__: Any) -> list[float]:
        size = config.kwargs["SIZE"]
        return [times.get(size, float("inf"))] * 3

    monkeypatch.setattr(autotuner.Autotuner, "_bench", bench)
    kept = []
    monkeypatch.setattr(autotuner.Autotuner, "check_disk_cache", lambda *_: kept.append(1))
    keep_no_choice(inductor=True)
    assert tuned(kernel, cache_results=True).run(7) == 8
    assert not kept
    assert not any((inductor.fx_graph_cache, inductor.autotune_local_cache))


def test_all_candidates_are_compiled_where_that_is_wanted() -> None:
    choose_nothing(inductor=True)
    kernel = Kernel()
    with every_candidate():
        assert tuned(kernel).run(7) == 4
    assert kernel.compiled == [2, 4, 8, 16]
    assert kernel.ran == [4, 4]
    tuned(kernel).run(11)
    assert kernel.compiled == [2, 4, 8, 16], "and no longer"


def test_the_first_candidate_is_taken_for_a_while(inductor: Any) -> None:
    before = dict(vars(autotuner.Autotuner))
    with first_candidates():
        assert tuned(Kernel()).run(7) == 4
        assert all((inductor.fx_graph_cache, inductor.autotune_local_cache)), "which is not Triton's own"
    assert dict(vars(autotuner.Autotuner)) == before
