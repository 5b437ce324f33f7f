"""Step times side by side: one network whose blocks are exchanged, contenders taking turns of a few steps in rounds."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from swiglu_bench.measure.clock import Clock, CpuClock, CudaClock, DeviceLost, LatencyClock, answers
from swiglu_bench.measure.memory import MemoryUse, measure_memory
from swiglu_bench.measure.rounds import Contender as Player
from swiglu_bench.measure.rounds import Rule, run_rounds
from swiglu_bench.measure.statistics import Interval, percentile, verdict
from swiglu_bench.session.settings import TWIN
from swiglu_bench.spec.errors import one_line
from swiglu_bench.train import breakdown
from swiglu_bench.train.blocks import Block, Contender, blocks, trained
from swiglu_bench.train.loop import install, learn_from, optimizer, precision
from swiglu_bench.train.model import Experiment, sites

TURN_S = 0.1
"""A turn is as many steps as take about this long: the host's start and the last wait then weigh little."""
TURN_STEPS = (2, 64)
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Speed:
    """What a training step costs with one contender in the model."""

    step_ms: float
    ratio: Interval | None
    """Of its time to eager's in the same rounds; None for eager."""
    verdict: str
    twin: Interval
    """The same ratio of eager to itself."""
    rounds: int
    stopped_by: str
    parts: breakdown.Breakdown
    memory: MemoryUse
    """Of forward and backward: saved for backward, and peak above weights and the optimiser's state."""


class Stage:
    """The network and every contender's blocks for it; contenders whose parameters are the same share an optimiser.

    The learning rate is zero, which costs a step nothing and leaves all weights as they are.
    """

    def __init__(self, experiment: Experiment, contenders: Sequence[Contender], seed: int) -> None:
        torch.manual_seed(seed)
        self.experiment = experiment
        self.seed = seed
        self.network = experiment.make()
        self.places = sites(self.network)
        case = experiment.case()
        self.failures: dict[str, str] = {}
        self.blocks: dict[str, list[Block]] = {}
        for contender in contenders:
            try:
                self.blocks[contender.name] = blocks(contender, case, self.network)
            except Exception as error:  # whatever an implementation raises costs its own row
                self.failures[contender.name] = one_line(error)
        parameters = {name: trained(self.network, those) for name, those in self.blocks.items()}
        shared: dict[tuple[int, ...], torch.optim.Optimizer] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        for name, those in parameters.items():
            key = tuple(map(id, those))
            if key not in shared:
                shared[key] = optimizer(those, experiment.device)
            self.optimizers[name] = shared[key]

    def enter(self, name: str) -> None:
        """Put a contender's blocks into the network."""
        install(self.network, self.blocks[name], self.places)

    def step(self, name: str, number: int) -> None:
        """Train one step with the blocks that are in it."""
        self.learn(number)
        self.update(name)

    def learn(self, number: int) -> None:
        """Forward and backward."""
        learn_from(self.experiment, self.network, self.experiment.data.batch(self.seed, number))

    def update(self, name: str) -> None:
        """The optimiser's part."""
        self.optimizers[name].step()
        self.optimizers[name].zero_grad(set_to_none=True)

    def memory(self, name: str) -> MemoryUse:
        """Bytes of one forward and backward."""
        self.enter(name)
        batch = self.experiment.data.batch(self.seed, 0)
        try:
            return measure_memory(
                self.experiment.device, lambda: _loss(self.experiment, self.network, batch), _backward
            )
        finally:
            self.optimizers[name].zero_grad(set_to_none=True)


def clock_of(device: torch.device) -> Clock:
    """From an idle device through a turn to an idle device: a step queues more than a GPU's queue holds."""
    return LatencyClock(CudaClock(device, cold_l2=False)) if device.type == "cuda" else CpuClock()


def race(
    experiment: Experiment, contenders: Sequence[Contender], baseline: str, rule: Rule, seed: int, tell: Tell
) -> tuple[dict[str, Speed], dict[str, str]]:
    """Speeds by name, and for contenders that failed why. Raises DeviceLost where one breaks the device."""
    clock = clock_of(experiment.device)
    stage = Stage(experiment, contenders, seed)
    for name in list(stage.blocks):
        tell(f"warming up {name}")
        try:
            _warm(stage, name, clock)
        except Exception as error:
            _must_answer(clock, error)
            stage.failures[name] = one_line(error)
            del stage.blocks[name]
    if baseline not in stage.blocks:
        return {}, stage.failures
    steps = _steps_a_turn(stage, baseline, clock)

    def prepare(name: str, number: int) -> Callable[[], None]:
        stage.enter(name)
        batches = [experiment.data.batch(seed, number * steps + one) for one in range(steps)]

        def turn() -> None:
            for batch in batches:
                learn_from(experiment, stage.network, batch)
                stage.update(name)

        return turn

    whose = {name: name for name in stage.blocks} | {TWIN: baseline}
    players = [Player(name, partial(prepare, own)) for name, own in whose.items()]
    rounds = run_rounds(
        players, clock, rule, baseline=baseline, seed=seed, on_round=lambda number: tell(f"timing, round {number}")
    )
    twin = rounds.ratio(TWIN, baseline)
    speeds: dict[str, Speed] = {}
    for name in stage.blocks:
        timing = rounds.timings[name]
        if timing.failure or twin is None:
            stage.failures[name] = one_line(timing.failure) if timing.failure else "eager could not be timed"
            continue
        tell(f"where the time goes: {name}")
        try:
            stage.enter(name)
            parts = breakdown.measure(stage.blocks[name], experiment.device, stage.learn, partial(stage.update, name))
            memory = stage.memory(name)
        except Exception as error:
            _must_answer(clock, error)
            stage.failures[name] = one_line(error)
            continue
        ratio = rounds.ratio(name, baseline) if name != baseline else None
        said = verdict(ratio, twin.noise).value if ratio else "baseline"
        step_ms = percentile(timing.ms, 50) / steps
        speeds[name] = Speed(step_ms, ratio, said, twin, len(timing.samples), rounds.stopped_by, parts, memory)
    return speeds, stage.failures


def default_rule(budget_s: float) -> Rule:
    """Fewer rounds than a kernel's: turns are long."""
    return dataclasses.replace(Rule(), warmup_rounds=2, max_rounds=200, budget_s=budget_s)


def _warm(stage: Stage, name: str, clock: Clock) -> None:
    """Compile, tune, and let the optimiser make its state."""
    stage.enter(name)
    for number in range(2):
        stage.step(name, number)
    clock.synchronize()


def _steps_a_turn(stage: Stage, name: str, clock: Clock) -> int:
    stage.enter(name)
    clock.synchronize()
    began = time.perf_counter()
    for number in range(2):
        stage.step(name, number)
    clock.synchronize()
    one_s = (time.perf_counter() - began) / 2
    least, most = TURN_STEPS
    return max(least, min(most, math.ceil(TURN_S / one_s)))


def _must_answer(clock: Clock, error: Exception) -> None:
    if not answers(clock):
        raise DeviceLost(one_line(error)) from error


def _loss(experiment: Experiment, network: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with precision(experiment):
        return experiment.loss(network, batch)[0]


def _backward(loss: torch.Tensor) -> None:
    loss.backward()
