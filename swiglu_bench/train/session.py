"""All of a training run: every contender from every seed, then step times side by side, then the summary."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Status
from swiglu_bench.rows.training import PERMUTED, End, Judged, Row, Summary
from swiglu_bench.spec.errors import one_line
from swiglu_bench.train import alone, paired, verdict
from swiglu_bench.train.blocks import Contender
from swiglu_bench.train.files import Folder
from swiglu_bench.train.loop import Training
from swiglu_bench.train.model import Experiment
from swiglu_bench.train.summary import note_curve, note_expectation, note_speed, note_training

BASELINE = "eager"


@dataclass(frozen=True)
class TrainingSchedule:
    """What is to be done."""

    experiment: Experiment
    contenders: Sequence[Contender]
    """eager first, and its permuted twin among them."""
    seeds: Sequence[int]
    rule: Rule
    """Of the timing."""
    timed: Callable[[Contender], bool]
    step_ratios: Mapping[str, float] | None = None
    """Ratios of the block by itself from an earlier `step` run; None: measured now."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only when interrupted."""


@dataclass
class Results:
    """What has been found so far, by contender's name."""

    losses: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    judged: dict[str, dict[int, Judged]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    speeds: dict[str, paired.Speed] = field(default_factory=dict)
    block_ratios: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def finals(self, name: str) -> dict[int, float]:
        """Final loss by seed."""
        return {seed: verdict.final(losses) for seed, losses in self.losses.get(name, {}).items()}


Listen = Callable[[Row | None, str], None]
"""Hears each step, or None and what is going on."""


def run(plan: TrainingSchedule, results: Results, folder: Folder | None, listen: Listen) -> None:
    """Do it all; what was found until an interruption is in `results`. Raises DeviceLost with a broken device."""
    finished = folder.finished() if folder else {}
    for seed in plan.seeds:
        for contender in plan.contenders:
            name = contender.name
            if (name, seed) in finished:
                losses, judged, results.parameters[name] = finished[name, seed]
                results.losses.setdefault(name, {})[seed] = losses
                results.judged.setdefault(name, {})[seed] = judged
                continue
            if name in results.failures:
                continue
            try:
                _train(plan, contender, seed, results, folder, listen)
            except Exception as error:  # whatever an implementation raises costs its own row
                _must_answer(plan.experiment.device, error)
                results.failures[name] = f"Seed {seed}: {one_line(error)}"
            _free(plan.experiment.device)
    _time(plan, results, listen)


def summaries(plan: TrainingSchedule, results: Results, about: Callable[[Contender], Summary]) -> list[Summary]:
    """A row for each contender but the permuted one; `about` makes it."""
    experiment = plan.experiment
    unit = experiment.workload.tokens
    found = []
    for contender in plan.contenders:
        name = contender.name
        summary = about(contender)
        summary.steps, summary.parameters = experiment.steps, results.parameters.get(name)
        summary.metric, summary.unit = experiment.metric, experiment.unit
        finals = results.finals(name)
        judged = results.judged.get(name, {})
        note_training(
            summary,
            list(finals.values()),
            [judged[seed].loss for seed in finals],
            [judged[seed].metric for seed in finals],
        )
        if name != BASELINE:
            compared = verdict.compare(finals, results.finals(BASELINE), results.finals(PERMUTED))
            note_curve(summary, compared)
        if name in results.speeds:
            speed = results.speeds[name]
            note_speed(summary, speed, unit)
            if name in results.block_ratios and BASELINE in results.speeds:
                note_expectation(summary, results.block_ratios[name], results.speeds[BASELINE].parts, speed)
        if name in results.failures:
            summary.status, summary.reason = Status.ERROR, f"{results.failures[name].rstrip('.')}."
        found.append(summary)
    return found


def _train(
    plan: TrainingSchedule, contender: Contender, seed: int, results: Results, folder: Folder | None, listen: Listen
) -> None:
    name, began = contender.name, time.monotonic()
    listen(None, f"{name}, seed {seed}")
    training = Training(plan.experiment, contender, seed)
    losses: list[float] = []
    checkpoint = folder.checkpoint(name, seed) if folder else None
    if folder and checkpoint:
        if checkpoint.exists():
            training.load(checkpoint)
        losses += folder.losses_before(name, seed, training.step)
        if len(losses) != training.step:  # rows that a full disk refused
            training, losses = Training(plan.experiment, contender, seed), folder.losses_before(name, seed, 0)
    results.parameters[name] = sum(parameter.numel() for parameter in training.parameters)
    with _between_steps() as interrupted:
        while training.step < plan.experiment.steps:
            row = training.advance()
            losses.append(row.loss)
            if folder:
                folder.write(row)
            listen(row, "")
            stop, every = interrupted(), plan.checkpoint_every
            if folder and checkpoint and (stop or (every and training.step % every == 0)):
                listen(None, f"keeping {name}, seed {seed}, at step {training.step}")
                folder.flush()
                training.save(checkpoint)
            if stop:
                raise KeyboardInterrupt
    judged, took_s = training.judge(), time.monotonic() - began
    results.losses.setdefault(name, {})[seed] = losses
    results.judged.setdefault(name, {})[seed] = judged
    if folder:
        end = End(name, seed, plan.experiment.steps, results.parameters[name], judged.loss, judged.metric, took_s)
        folder.end(end)


@contextlib.contextmanager
def _between_steps() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the step at hand to end, so that weights, losses and step number fit; a second one does not.

    What is yielded says whether there was one.
    """
    asked: list[int] = []

    def note(number: int, frame: types.FrameType | None) -> None:
        if asked:
            signal.default_int_handler(number, frame)
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def _time(plan: TrainingSchedule, results: Results, listen: Listen) -> None:
    """Step times of all that trained, and what they ought to be."""
    contenders = [one for one in plan.contenders if plan.timed(one) and one.name not in results.failures]
    if BASELINE not in {one.name for one in contenders}:
        return
    experiment = plan.experiment
    speeds, failures = paired.race(
        experiment, contenders, BASELINE, plan.rule, plan.seeds[0], lambda doing: listen(None, doing)
    )
    results.speeds |= speeds
    results.failures |= {name: f"While it was timed: {reason}" for name, reason in failures.items()}
    _free(experiment.device)
    if plan.step_ratios is not None:
        results.block_ratios |= plan.step_ratios
        return
    listen(None, "the block by itself")
    left = [one for one in contenders if one.name in speeds]
    results.block_ratios |= alone.measure(left, experiment.case(), experiment.device, plan.rule, BASELINE)


def _free(device: torch.device) -> None:
    """The next model needs the memory of the last."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _must_answer(device: torch.device, error: Exception) -> None:
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            raise DeviceLost(one_line(error)) from error
