"""Tuning on Triton's interpreter by a clock that says what a test wants."""

from collections.abc import Callable

import pytest
import torch
from fake_clock import FakeClock

from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.measure.statistics import Verdict
from swiglu_bench.tuning import tuner
from swiglu_bench.tuning.tuner import CannotTune, Found, difference, tune
from swiglu_kernels.launches.backend import backend_for
from swiglu_kernels.launches.launch import Launch
from swiglu_kernels.standalone.workloads import Workload
from swiglu_kernels.tiles.candidates import Choice, Problem, candidates

CPU = torch.device("cpu")
PROBLEM = Problem(5, 32, 64, torch.float16, None)
RULE = Rule(warmup_rounds=0, min_rounds=10, max_rounds=12, min_s=0.0, budget_s=30.0)
SHIPPED, *OTHERS = candidates("forward", PROBLEM, 4)

pytestmark = pytest.mark.skipif(backend_for(CPU) != "interpreter", reason="Triton's interpreter is not in use")


def is_of(launch: Launch, choice: Choice) -> bool:
    tile = choice.tile
    blocks = [launch.arguments[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")]
    same = blocks == [tile.rows, tile.columns, tile.depth]
    return same and (launch.num_warps, launch.num_stages) == (tile.warps, tile.stages)


def takes(**ms_by_name: float) -> FakeClock:
    """A clock by whose time each candidate takes 2 ms, but those named `shipped`, `first`, `second`, ..."""
    named = dict(zip(("shipped", "first", "second", "third", "fourth"), (SHIPPED, *OTHERS), strict=True))
    speeds = {named[name]: ms for name, ms in ms_by_name.items()}
    return FakeClock(lambda launch: next((ms for choice, ms in speeds.items() if is_of(launch, choice)), 2.0))


def tuned(clock: FakeClock) -> Found:
    return tune("forward", PROBLEM, CPU, clock, RULE, 4)


# Who wins


def test_the_fastest_wins() -> None:
    found = tuned(takes(shipped=1.0, second=0.8, third=0.7))
    assert (found.shipped, found.best, found.winner) == (SHIPPED, OTHERS[2], OTHERS[2])
    assert found.verdict is Verdict.FASTER
    assert found.ratio.median == pytest.approx(0.7, rel=0.01)
    assert (found.shipped_ms, found.best_ms) == (pytest.approx(1.0, rel=0.01), pytest.approx(0.7, rel=0.01))
    assert found.tried == 5
    assert found.rejected == {}


def test_the_shipped_one_stays_where_others_are_slower() -> None:
    found = tuned(takes(shipped=1.0, first=1.2))
    assert (found.best, found.verdict, found.winner) == (OTHERS[0], Verdict.SLOWER, SHIPPED)


def test_a_gain_within_the_noise_is_none() -> None:
    found = tuned(takes(shipped=1.0, first=0.9995))
    assert (found.best, found.verdict, found.winner) == (OTHERS[0], Verdict.TIE, SHIPPED)


def test_luck_in_the_first_round_of_timing_counts_for_nothing() -> None:
    """A candidate that was fast until the final began."""
    said: list[str] = []
    clock = FakeClock(lambda launch: 0.5 if is_of(launch, OTHERS[1]) and said[-1] == "timing 5" else 1.0)
    found = tune("forward", PROBLEM, CPU, clock, RULE, 4, tell=said.append)
    assert said[-2:] == ["timing 5", "timing the fastest"]
    assert found.winner == SHIPPED


# What may not win


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Callable[[Choice, Callable[[Workload], None]], None]:
    """Do something to a workload after each launch of a choice."""

    def install(choice: Choice, act: Callable[[Workload], None]) -> None:
        describe, run = Workload.describe, Launch.run
        works: list[Workload] = []

        def described(work: Workload, one: Choice) -> Launch:
            works.append(work)
            return describe(work, one)

        def ran(launch: Launch) -> None:
            run(launch)
            if is_of(launch, choice):
                act(works[-1])

        monkeypatch.setattr(Workload, "describe", described)
        monkeypatch.setattr(Launch, "run", ran)

    return install


Change = Callable[[Choice, Callable[[Workload], None]], None]


def test_a_wrong_candidate_is_never_timed(change: Change) -> None:
    change(OTHERS[0], lambda work: work.outputs[0][3, 7].mul_(1.5))
    found = tuned(takes(shipped=1.0, first=0.1, second=0.9))
    assert found.winner == OTHERS[1]
    assert list(found.rejected) == [OTHERS[0]]
    assert found.rejected[OTHERS[0]].startswith("1 of 320 elements differ, first (3, 7): ")


def test_an_element_that_is_not_written_is_wrong(change: Change) -> None:
    change(OTHERS[0], lambda work: work.outputs[0][4, 63].fill_(float("nan")))
    assert "first (4, 63): nan for" in tuned(takes(shipped=1.0, first=0.1)).rejected[OTHERS[0]]


def test_one_that_is_wrong_only_when_it_is_timed_is_rejected(change: Change) -> None:
    runs = []

    def later(work: Workload) -> None:
        runs.append(work)
        if len(runs) > 1:
            work.outputs[0][0, 0] = 77.0

    change(OTHERS[0], later)
    found = tuned(takes(shipped=1.0, first=0.1, second=0.9))
    assert found.winner == OTHERS[1]
    assert "when it was timed: 1 of 320 elements differ" in found.rejected[OTHERS[0]]


def test_one_that_cannot_run_costs_itself_only(change: Change) -> None:
    def fail(work: Workload) -> None:
        raise RuntimeError("out of resource:\n shared memory")

    change(OTHERS[0], fail)
    found = tuned(takes(shipped=1.0, second=0.9))
    assert found.winner == OTHERS[1]
    assert found.rejected == {OTHERS[0]: "RuntimeError: out of resource: shared memory"}


def test_one_that_breaks_the_device_ends_it(change: Change) -> None:
    clock = takes()

    def fail(work: Workload) -> None:
        clock.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    change(OTHERS[0], fail)
    with pytest.raises(DeviceLost, match="forward with 16x"):
        tuned(clock)


# Where nothing can be tuned


def test_what_is_shipped_does_not_run(change: Change) -> None:
    def fail(work: Workload) -> None:
        raise RuntimeError("no kernel image")

    change(SHIPPED, fail)
    with pytest.raises(CannotTune, match="RuntimeError: no kernel image"):
        tuned(takes())


def test_what_is_shipped_leaves_elements_unwritten(change: Change) -> None:
    change(SHIPPED, lambda work: work.outputs[0][0].fill_(float("nan")))
    with pytest.raises(CannotTune, match=r"what is shipped, 16x.*, leaves elements unwritten"):
        tuned(takes())


def test_all_candidates_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "difference", lambda found, expected: "all of it")
    with pytest.raises(CannotTune, match="none of 4 candidates is right; the first: all of it"):
        tuned(takes())


# What counts as equal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_differences(dtype: torch.dtype) -> None:
    right = torch.randn(100, 50).to(dtype)
    rounded_otherwise = torch.nextafter(right, torch.full_like(right, 9.0))
    assert difference([rounded_otherwise], [right]) == ""
    for wrong_value in (right[7, 3] + 0.5, torch.nan, torch.inf):
        wrong = right.clone()
        wrong[7, 3] = wrong_value
        assert difference([right, wrong], [right, right]).startswith("1 of 5000 elements differ, first (7, 3): ")
    shifted = right.roll(1, 0)
    assert "elements differ" in difference([shifted], [right])
