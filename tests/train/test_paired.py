import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import BY_NAME, contender, decoder, images

from swiglu_bench.measure.rounds import Rule
from swiglu_bench.spec.implementation import Step
from swiglu_bench.spec.problem import Problem
from swiglu_bench.train import breakdown, paired
from swiglu_bench.train.blocks import Contender
from swiglu_bench.train.paired import Stage, race

RULE = Rule(warmup_rounds=1, min_rounds=4, max_rounds=5, min_s=0, budget_s=5)
CPU = torch.device("cpu")


def failing(message: str, after: int = 0) -> Contender:
    """eager that raises at a call, or when it is built."""
    calls = iter(range(10**6))

    def build(problem: Problem) -> Step:
        step = BY_NAME["eager"].build(problem)
        if after == 0:
            raise RuntimeError(message)

        def forward(x: Any) -> Any:
            if next(calls) >= after:
                raise RuntimeError(message)
            return step.forward(x)

        return Step(forward)

    return Contender(message, dataclasses.replace(BY_NAME["eager"], build=build))


def test_all_take_turns_and_have_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "TURN_S", 0.001)
    told: list[str] = []
    names = ["eager", "eager-packed", "unsloth"]
    speeds, failures = race(decoder(tmp_path), [contender(name) for name in names], "eager", RULE, 0, told.append)
    assert failures == {}
    assert list(speeds) == names
    eager = speeds["eager"]
    assert (eager.ratio, eager.verdict) == (None, "baseline")
    for name in names[1:]:
        ratio = speeds[name].ratio
        assert ratio
        assert ratio.low <= ratio.median <= ratio.high
        assert speeds[name].verdict in ("faster", "slower", "tie")
    for speed in speeds.values():
        assert speed.step_ms > 0
        assert 0 < speed.parts.share < 1
        assert speed.parts.optimizer_ms > 0
        assert speed.memory.peak_bytes > speed.memory.saved_bytes > 0
    assert "timing, round 1" in told


def test_one_that_fails_costs_itself_wherever_it_fails(tmp_path: Path) -> None:
    contenders = [contender("eager"), failing("built"), failing("warm", after=1), failing("in rounds", after=20)]
    speeds, failures = race(images(tmp_path), contenders, "eager", RULE, 0, lambda _: None)
    assert list(speeds) == ["eager"]
    assert failures == {name: f"RuntimeError: {name}" for name in ("built", "warm", "in rounds")}


def test_without_a_baseline_there_is_no_race(tmp_path: Path) -> None:
    speeds, failures = race(images(tmp_path), [failing("eager")], "eager", RULE, 0, lambda _: None)
    assert speeds == {}
    assert failures == {"eager": "RuntimeError: eager"}


def test_timing_leaves_weights_as_they_are_and_gradients_behind_none(tmp_path: Path) -> None:
    stage = Stage(images(tmp_path), [contender("eager"), contender("eager-packed"), contender("fused")], 0)
    everything = {id(p): p for those in stage.blocks.values() for block in those for p in block.parameters()}
    everything |= {id(p): p for p in stage.network.parameters()}
    before = {key: parameter.clone() for key, parameter in everything.items()}
    for name in stage.blocks:
        stage.enter(name)
        stage.step(name, 0)
        stage.memory(name)
        assert all(parameter.grad is None for parameter in everything.values())
    assert all(torch.equal(before[key], parameter) for key, parameter in everything.items())


def test_parts_are_of_the_blocks_that_are_watched(tmp_path: Path) -> None:
    stage = Stage(decoder(tmp_path), [contender("eager")], 0)
    stage.enter("eager")
    parts = breakdown.measure(stage.blocks["eager"], CPU, stage.learn, lambda: stage.update("eager"))
    assert parts.block_forward_ms > 0
    assert parts.block_backward_ms > 0
    assert parts.step_ms > parts.block_forward_ms + parts.block_backward_ms + parts.optimizer_ms
    assert all(block.watch is None for block in stage.blocks["eager"])


def test_the_watch_sums_over_blocks_whatever_their_order() -> None:
    watch = breakdown.Watch(CPU)
    x = torch.ones(2, requires_grad=True)
    out = watch.leave(watch.leave(watch.enter(watch.enter(x) * 2)) * 3)
    out.sum().backward()
    assert watch.spent_ms("enter", "leave") > 0
    assert watch.spent_ms("back", "done") > 0
    assert torch.equal(x.grad, torch.full((2,), 6.0)) if x.grad is not None else False


def test_on_a_gpu_the_watch_reads_the_gpu_s_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        now_ms = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.now_ms += 2.0
            self.at_ms = Event.now_ms

        def elapsed_time(self, other: "Event") -> float:
            return other.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = breakdown.Watch(torch.device("cuda"))
    watch.mark()
    x = torch.ones(2, requires_grad=True)
    watch.leave(watch.enter(x) * 2).sum().backward()
    watch.mark()
    assert watch.spent_ms("enter", "leave") == 2.0
    assert watch.spent_ms("back", "done") == 2.0
    assert watch.between_ms() == [10.0]
