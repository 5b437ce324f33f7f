"""All of a training run: every trainee from every seed, then their step times side by side, then the verdicts."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import BASELINE, Status
from swiglu_bench.rows.training import PERMUTED, Ended, TrainedSeed, TrainingStep
from swiglu_bench.tasks.train.blocks import Trainee
from swiglu_bench.tasks.train.files import TrainingFolder
from swiglu_bench.tasks.train.loop import SeedTraining
from swiglu_bench.tasks.train.model import Experiment
from swiglu_bench.tasks.train.options import TrainOptions
from swiglu_bench.tasks.train.step_costs import measure_ratios, time_steps
from swiglu_bench.tasks.train.verdicts import enter_curve, enter_expectation, enter_learning, final

UNTRAINED = "It had not been trained to the end from any seed when this ended; --resume goes on."
"""Why a trainee that did not fail has no figures."""
Listen = Callable[[TrainingStep | str], None]
"""Gets each step, and a text about everything else that begins."""


@dataclass(frozen=True)
class TrainingSession:
    """Trains and times; what is found is entered into the trainees."""

    experiment: Experiment
    trainees: Sequence[Trainee]
    """eager first, and its permuted twin among them."""
    options: TrainOptions
    step_ratios: Mapping[str, float] | None = None
    """Ratios of the block by itself from an earlier `step` run; None: measured now."""
    folder: TrainingFolder | None = None

    @cached_property
    def finished(self) -> Ended:
        """What the folder holds."""
        return self.folder.finished() if self.folder else {}

    @property
    def wanted(self) -> list[tuple[Trainee, int]]:
        """Every trainee from every seed."""
        first = self.options.seed
        return [(trainee, seed) for seed in range(first, first + self.options.seeds) for trainee in self.trainees]

    def run(self, listen: Listen) -> None:
        """Do everything; what was found until an interruption is kept. Raises DeviceLost with a broken device."""
        device = self.experiment.device
        try:
            for trainee, seed in self.wanted:
                if (trainee.name, seed) in self.finished:
                    trainee.add(*self.finished[trainee.name, seed])
                elif trainee.row.status is Status.OK:
                    with trainee.may_fail(device, f"Seed {seed}"):
                        self._train(trainee, seed, listen)
                    _free(device)
            self._time(listen)
        finally:
            self._judge()

    def _train(self, trainee: Trainee, seed: int, listen: Listen) -> None:
        """Train from one seed to the end, from its checkpoint where there is one."""
        experiment, folder, name, began = self.experiment, self.folder, trainee.name, time.monotonic()
        listen(f"{name}, seed {seed}")
        training = SeedTraining(experiment, trainee, seed)
        losses: list[float] = []
        checkpoint = folder.checkpoint(name, seed) if folder else None
        if folder and checkpoint:
            if checkpoint.exists():
                training.load(checkpoint)
            losses = folder.losses_before(name, seed, training.step)
            if len(losses) != training.step:  # rows that a full disk refused
                training, losses = SeedTraining(experiment, trainee, seed), folder.losses_before(name, seed, 0)
        parameters = trainee.row.parameters = sum(parameter.numel() for parameter in training.parameters)
        with _deferred_interrupt() as interrupt:
            while training.step < experiment.steps:
                step = training.advance()
                losses.append(step.loss)
                if folder:
                    folder.write(step)
                listen(step)
                stop, every = interrupt.is_set(), self.options.checkpoint_every
                if folder and checkpoint and (stop or (every and training.step % every == 0)):
                    listen(f"keeping {name}, seed {seed}, at step {training.step}")
                    folder.flush()
                    training.save(checkpoint)
                if stop:
                    raise KeyboardInterrupt
        held_out_loss, metric = training.judge()
        seconds = time.monotonic() - began
        trained = TrainedSeed(name, seed, experiment.steps, parameters, held_out_loss, metric, seconds)
        trainee.add(trained, losses)
        if folder:
            folder.end(trained)

    def _time(self, listen: Listen) -> None:
        """Measure the steps of everything that trained, and one block by itself."""
        experiment, options = self.experiment, self.options
        trainees = [
            one for one in self.trainees if one.row.status is Status.OK and not one.permuted
            and not (options.interpret and one.implementation.backend == "triton")
        ]  # fmt: skip
        if BASELINE not in {one.name for one in trainees}:
            return
        rule = Rule(warmup_rounds=2, max_rounds=200, budget_s=options.budget_s)  # fewer rounds: turns are long
        time_steps(experiment, trainees, rule, options.seed, listen)
        _free(experiment.device)
        timed, ratios = {one.name: one for one in trainees if one.row.step_ms is not None}, self.step_ratios
        if ratios is None:
            listen("the block by itself")
            ratios = measure_ratios(list(timed.values()), experiment.case, experiment.device, rule)
        for name in timed.keys() & ratios.keys():
            enter_expectation(timed[name].row, self.trainees[0].row, ratios[name])

    def _judge(self) -> None:
        finals = {one.name: {seed: final(losses) for seed, losses in one.losses.items()} for one in self.trainees}
        for one in self.trainees:
            if one.row.status is Status.OK and not one.losses:
                one.row.status, one.row.reason = Status.SKIPPED, UNTRAINED
            enter_learning(one.row, one.seeds.values(), finals[one.name])
            if one.name != BASELINE:
                enter_curve(one.row, finals[one.name], finals[BASELINE], finals.get(PERMUTED, {}))


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, which is heeded after a step, when weights and losses agree; a second one interrupts."""
    asked = threading.Event()

    def note(number: int, frame: types.FrameType | None) -> None:
        if asked.is_set():
            signal.default_int_handler(number, frame)
        asked.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _free(device: torch.device) -> None:
    """The next model needs the GPU memory of the last."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
