"""Tuning on Triton's interpreter by a clock that says what a test wants, and the file that keeps what was found."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_clock import FakeClock
from tuned import ENTRY

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.measure.statistics import Verdict
from swiglu_bench.tasks import tune
from swiglu_bench.tasks.tune import CannotTune, TunedTile, Tuner
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.standalone.workloads import Runnable, Workload
from swiglu_kernels.tiles import tuning
from swiglu_kernels.tiles.candidates import Choice, TileProblem, candidates

CPU = torch.device("cpu")
PROBLEM = TileProblem(5, 32, 64, torch.float16, None)
RULE = Rule(warmup_rounds=0, min_rounds=10, max_rounds=12, min_s=0.0, budget_s=30.0)
SHIPPED, BY_TORCH, FIRST, SECOND = candidates("forward", PROBLEM, 2)

interpreted = pytest.mark.skipif(backend_for(CPU) != "interpreter", reason="Triton's interpreter is not in use")


def is_of(launch: Runnable, choice: Choice) -> bool:
    if not isinstance(launch, Launch) or choice == BY_TORCH:
        return not isinstance(launch, Launch) and choice == BY_TORCH
    tile = choice.tile
    blocks = [launch.arguments.get(name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")]
    same = blocks == [tile.rows, tile.columns, tile.depth]
    return same and (launch.num_warps, launch.num_stages) == (tile.warps, tile.stages)


def takes(shipped: float = 2.0, first: float = 2.0, second: float = 2.0, torch: float = 2.0) -> FakeClock:
    """A clock by which the choices take so many milliseconds."""
    speeds = {SHIPPED: shipped, FIRST: first, SECOND: second, BY_TORCH: torch}
    return FakeClock(lambda launch: next(ms for choice, ms in speeds.items() if is_of(launch, choice)))


def tuned(clock: FakeClock, tell: Callable[[str], None] = lambda doing: None) -> TunedTile:
    return Tuner(CPU, clock, RULE, 2).tune("forward", PROBLEM, tell)


# Who wins


@interpreted
@pytest.mark.parametrize(
    ("ms", "best", "verdict", "winner"),
    [
        ({"first": 0.8, "second": 0.7}, SECOND, Verdict.FASTER, SECOND),
        ({"torch": 0.8}, BY_TORCH, Verdict.FASTER, BY_TORCH),
        ({"first": 0.9999}, FIRST, Verdict.TIE, SHIPPED),  # within the noise
    ],
)
def test_the_fastest_wins(ms: dict[str, float], best: Choice, verdict: Verdict, winner: Choice) -> None:
    found = tuned(takes(shipped=1.0, **ms))
    assert (found.shipped, found.best, found.verdict, found.winner) == (SHIPPED, best, verdict, winner)
    figures = (found.ratio.median, found.best_ms, found.shipped_ms)
    assert figures == pytest.approx((min(ms.values()), min(ms.values()), 1.0), rel=0.01)
    assert (found.tried, found.rejected) == (4, {})


@interpreted
def test_luck_in_the_first_round_of_timing_counts_for_nothing() -> None:
    """A candidate that was fast until the final began."""
    said: list[str] = []
    clock = FakeClock(lambda launch: 0.5 if is_of(launch, FIRST) and said[-1] == "timing 4" else 1.0)
    assert tuned(clock, said.append).winner == SHIPPED
    assert said[-2:] == ["timing 4", "timing the fastest"]


# What may not win


Change = Callable[[Choice, Callable[[Workload], None]], None]


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Do something to a workload after each launch of a choice."""

    def install(choice: Choice, act: Callable[[Workload], None]) -> None:
        describe, run = Workload.describe, Launch.run
        works: list[Workload] = []

        def described(work: Workload, wanted: Choice) -> Launch:
            works.append(work)
            return describe(work, wanted)

        def ran(launch: Launch) -> None:
            run(launch)
            if is_of(launch, choice):
                act(works[-1])

        monkeypatch.setattr(Workload, "describe", described)
        monkeypatch.setattr(Launch, "run", ran)

    return install


def fails(reason: str) -> Callable[[Workload], None]:
    def act(work: Workload) -> None:
        raise RuntimeError(reason)

    return act


def later(act: Callable[[Workload], None]) -> Callable[[Workload], None]:
    """Not when it is checked, but when it is timed."""
    runs: list[Workload] = []

    def act_later(work: Workload) -> None:
        runs.append(work)
        if len(runs) > 1:
            act(work)

    return act_later


@interpreted
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda work: work.outputs[0][3, 7].mul_(1.5), "1 of 320 elements differ, first (3, 7): "),
        (lambda work: work.outputs[0][4, 63].fill_(float("nan")), "1 of 320 elements differ, first (4, 63): nan for"),
        (fails("out of resource:\n shared memory"), "RuntimeError: out of resource: shared memory"),
        (
            later(lambda work: work.outputs[0][0, 0].fill_(77.0)),
            f"{FIRST}, when it was timed: 1 of 320 elements differ",
        ),
    ],
    ids=["wrong", "an element is not written", "it does not run", "wrong when it is timed"],
)
def test_a_bad_candidate_is_rejected(change: Change, act: Callable[[Workload], None], reason: str) -> None:
    change(FIRST, act)
    found = tuned(takes(shipped=1.0, first=0.1, second=0.9))
    assert found.winner == SECOND
    assert list(found.rejected) == [FIRST]
    assert found.rejected[FIRST].startswith(reason)


@interpreted
@pytest.mark.parametrize("when", [lambda act: act, later], ids=["checked", "timed"])
def test_one_that_breaks_the_device_ends_it(
    change: Change, monkeypatch: pytest.MonkeyPatch, when: Callable[..., Callable[[Workload], None]]
) -> None:
    monkeypatch.setattr(tune, "answers", lambda device: False)
    change(FIRST, when(fails("an illegal memory access was encountered")))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        tuned(takes())


# Where nothing can be tuned


@interpreted
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (fails("no kernel image"), "RuntimeError: no kernel image"),
        (lambda work: work.outputs[0][0].fill_(float("nan")), r"the shipped choice, 16x.*, leaves elements unwritten"),
    ],
)
def test_where_the_shipped_choice_or_no_other_works(
    change: Change, monkeypatch: pytest.MonkeyPatch, act: Callable[[Workload], None], reason: str
) -> None:
    change(SHIPPED, act)
    with pytest.raises(CannotTune, match=reason):
        tuned(takes())
    monkeypatch.undo()
    monkeypatch.setattr(tune, "difference", lambda found, expected: "all of it")
    with pytest.raises(CannotTune, match="none of 3 candidates is correct; the first: all of it"):
        tuned(takes())


# The file


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "there" / "tuning.json"))
    tuning.forget()
    yield tmp_path / "there" / "tuning.json"
    tuning.forget()


def test_a_choice_replaces_the_earlier_one_of_its_place_or_only_removes_it(path: Path) -> None:
    other, later = replace(ENTRY, tokens=16), replace(ENTRY, ratio=(0.8, 0.7, 0.9), at="later")
    for entry in (ENTRY, other, later):
        tune.keep(path, entry, True, pytest.fail)
    assert tuning.read(path) == [other, later]
    tune.keep(path, ENTRY, False, pytest.fail)
    assert tuning.read(path) == [other]


def test_many_at_once_lose_nothing(path: Path) -> None:
    entries = [replace(ENTRY, hidden=size) for size in range(1, 9)]
    writers = [threading.Thread(target=tune.keep, args=(path, entry, True, pytest.fail)) for entry in entries]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(tuning.read(path), key=lambda entry: entry.hidden) == entries


def test_a_file_that_is_not_sound_is_moved_aside(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("somebody's letters")
    said: list[str] = []
    tune.keep(path, ENTRY, True, said.append)
    assert tuning.read(path) == [ENTRY]
    assert path.with_name("tuning.json.unsound").read_text() == "somebody's letters"
    assert "it was moved to" in said[0]


def test_clearing_spares_a_file_of_another_kind_that_was_named(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("somebody's letters")
    with pytest.raises(BadInput, match=r"which is not a file of tuned choices .*; remove it yourself"):
        tune.clear(path)
    assert path.exists()
