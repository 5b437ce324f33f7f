"""What a training step costs, trainees side by side, and how much faster one block is by itself."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swiglu_bench.cases.cases import Case, Mode, Scope
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem
from swiglu_bench.measure.clock import Clock, CpuClock, CudaClock, LatencyClock, answers, make_clock
from swiglu_bench.measure.resources import measure_memory
from swiglu_bench.measure.rounds import Rounds, Rule, on_clock, run_rounds
from swiglu_bench.measure.statistics import Interval, percentile, verdict
from swiglu_bench.rows.kinds import BASELINE
from swiglu_bench.rows.record import Status
from swiglu_bench.rows.run_folder import read_records
from swiglu_bench.tasks.train.blocks import Trainee
from swiglu_bench.tasks.train.loop import FittedModel
from swiglu_bench.tasks.train.model import Experiment

TURN_S = 0.1
"""A turn is as many steps as take about this long, so that its start and its last wait weigh little."""
TURN_STEPS = (2, 64)
WATCHED_STEPS, WARM_STEPS = 5, 5
"""Steps to see where the time goes. Warm ones come first: a rested device is faster than one at its power limit."""
TWIN = "eager, again"
Tell = Callable[[str], None]


def time_steps(experiment: Experiment, trainees: Sequence[Trainee], rule: Rule, seed: int, tell: Tell) -> None:
    """Enter into their rows what a step costs, or why one failed. Raises DeviceLost where one breaks the device.

    The learning rate is zero, which does not change a step's cost and leaves all weights as they are.
    """
    device, doing = experiment.device, "While it was timed"
    # From an idle device through a turn to an idle device: a step queues more than a GPU's queue holds.
    clock = LatencyClock(CudaClock(device, cold_l2=False)) if device.type == "cuda" else CpuClock()
    torch.manual_seed(seed)
    network, models, optimizers = experiment.make(), dict[str, FittedModel](), dict[tuple[int, ...], Any]()
    for trainee in trainees:
        with trainee.may_fail(device, doing):
            model = models[trainee.name] = FittedModel(experiment, trainee, network)
            key = tuple(map(id, model.parameters))  # the same parameters need only one optimiser's state
            model.optimizer = optimizers.setdefault(key, model.optimizer)
    for name, model in models.items():
        tell(f"warming up {name}")
        with model.trainee.may_fail(device, doing):
            _two_steps(model, seed, clock)
    models = {name: model for name, model in models.items() if model.trainee.row.status is Status.OK}
    if BASELINE not in models:
        return
    rounds, steps = _rounds(models, clock, rule, seed, tell)
    twin = rounds.ratio(TWIN, BASELINE)
    for name, model in models.items():
        tell(f"where the time goes: {name}")
        with model.trainee.may_fail(device, doing):
            if failure := rounds.timings[name].failure:
                raise failure
            if twin is None:
                raise RuntimeError("eager could not be timed")
            _enter(model, seed, rounds, steps, twin)


def _two_steps(model: FittedModel, seed: int, clock: Clock) -> float:
    """Seconds for one of them. The first time they compile, tune, and let the optimiser make its state."""
    model.install()
    clock.synchronize()
    began = time.perf_counter()
    for number in range(2):
        model.learn(model.experiment.data.batch(seed, number))
        model.update()
    clock.synchronize()
    return (time.perf_counter() - began) / 2


def _rounds(models: dict[str, FittedModel], clock: Clock, rule: Rule, seed: int, tell: Tell) -> tuple[Rounds, int]:
    """The rounds, and how many steps there are in a turn."""
    least, most = TURN_STEPS
    steps = max(least, min(most, math.ceil(TURN_S / _two_steps(models[BASELINE], seed, clock))))

    def prepare(model: FittedModel, number: int) -> Callable[[], None]:
        model.install()
        batches = [model.experiment.data.batch(seed, number * steps + one) for one in range(steps)]

        def turn() -> None:
            for batch in batches:
                model.learn(batch)
                model.update()

        return turn

    contenders = [on_clock(name, clock, partial(prepare, model)) for name, model in models.items()]
    contenders.append(on_clock(TWIN, clock, partial(prepare, models[BASELINE])))
    rounds = run_rounds(
        contenders,
        rule,
        baseline=BASELINE,
        seed=seed,
        on_round=lambda number: tell(f"timing, round {number}"),
        device_works=partial(answers, models[BASELINE].experiment.device),
    )
    return rounds, steps


def _enter(model: FittedModel, seed: int, rounds: Rounds, steps: int, twin: Interval) -> None:
    """Measure where the time and the memory of its step go, and enter that and its times into its row."""
    experiment, row = model.experiment, model.trainee.row
    model.install()
    watched_ms, forward_ms, backward_ms, optimizer_ms = _measure_parts(model, seed)
    batch = experiment.data.batch(seed, 0)
    try:
        memory = measure_memory(
            experiment.device, lambda: experiment.loss(model.network, batch)[0], lambda loss: loss.backward()
        )
    finally:
        model.optimizer.zero_grad(set_to_none=True)
    times_ms = rounds.timings[row.implementation].ms
    row.step_ms = percentile(times_ms, 50) / steps
    row.rate = experiment.workload.tokens / row.step_ms * 1e3
    row.verdict, row.rounds, row.stopped_by = "baseline", len(times_ms), rounds.stopped_by
    ratio = rounds.ratio(row.implementation, BASELINE) if row.implementation != BASELINE else None
    if ratio:
        row.ratio, row.ratio_low, row.ratio_high = ratio.median, ratio.low, ratio.high
        row.verdict = verdict(ratio, twin.noise).value
    row.aa_low, row.aa_high = twin.low, twin.high
    row.block_share = (forward_ms + backward_ms) / watched_ms
    row.block_forward_ms, row.block_backward_ms, row.optimizer_ms = forward_ms, backward_ms, optimizer_ms
    row.saved_bytes, row.peak_bytes = memory.saved_bytes, memory.peak_bytes


class Moments:
    """When something happened, by its name; on a GPU, when the GPU came to it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._noted: dict[str, list[Any]] = {}

    def note(self, what: str) -> None:
        """Note that it happens now."""
        moment: Any = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
        if self._on_gpu:
            moment.record()
        self._noted.setdefault(what, []).append(moment)

    def between_ms(self, first: str, last: str) -> float:
        """Time from one to the other, summed over all times that they happened."""
        pairs = zip(self._noted.get(first, ()), self._noted.get(last, ()), strict=True)
        return sum(one.elapsed_time(other) if self._on_gpu else (other - one) * 1e3 for one, other in pairs)


def _measure_parts(model: FittedModel, seed: int) -> list[float]:
    """Milliseconds of a step, and of its blocks' forward, its blocks' backward and its optimiser, as medians."""
    device, found = model.experiment.device, []
    for number in range(WARM_STEPS + WATCHED_STEPS):
        moments = Moments(device)
        hooks = [hook for block in model.blocks for hook in _hooks(block.core, moments)]
        try:
            moments.note("start")
            model.learn(model.experiment.data.batch(seed, number))
            moments.note("update")
            model.update()
            moments.note("end")
        finally:
            for hook in hooks:
                hook.remove()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spans = (("start", "end"), ("enter", "leave"), ("enter backward", "leave backward"), ("update", "end"))
        found.append([moments.between_ms(*span) for span in spans])
    return [statistics.median(column) for column in zip(*found[WARM_STEPS:], strict=True)]


def _hooks(core: torch.nn.Module, moments: Moments) -> list[torch.utils.hooks.RemovableHandle]:
    """Note when a block begins and ends; the backwards of blocks never overlap."""
    return [
        core.register_forward_pre_hook(lambda *_: moments.note("enter")),
        core.register_forward_hook(lambda *_: moments.note("leave")),
        core.register_full_backward_pre_hook(lambda *_: moments.note("enter backward")),
        core.register_full_backward_hook(lambda *_: moments.note("leave backward")),
    ]


def measure_ratios(trainees: Sequence[Trainee], case: Case, device: torch.device, rule: Rule) -> dict[str, float]:
    """Time of forward and backward of one block relative to eager's, with a cold L2 cache.

    Left out are implementations without the scope mlp, and those that fail by themselves.
    """
    problem, clock = make_problem(case, device), make_clock(device)
    contenders = []
    for trainee in trainees:
        if Scope.MLP not in trainee.implementation.scopes:
            continue
        try:
            built = Built(trainee.implementation, problem)
            built.train(Draw(0))
        except Exception:  # its training has reported the reason, or will
            continue
        contenders.append(on_clock(trainee.name, clock, partial(_prepare, built)))
    if BASELINE not in {contender.name for contender in contenders}:
        return {}
    rounds = run_rounds(contenders, rule, baseline=BASELINE, device_works=partial(answers, device))
    ratios = {name: rounds.ratio(name, BASELINE) for name in rounds.timings if name != BASELINE}
    return {name: ratio.median for name, ratio in ratios.items() if ratio}


def read_ratios(path: Path, case: Case) -> dict[str, float]:
    """The same from the records of `swiglu-bench step --scope mlp` at the same sizes; raises BadInput without any."""
    rows = read_records(path)
    wanted = {
        "mode": "step", "scope": "mlp", "hidden": case.shape.hidden, "intermediate": case.shape.intermediate,
        "tokens": case.tokens, "dtype": case.dtype.value, "status": "ok", "baseline": "eager",
    }  # fmt: skip
    same = rows[(rows[list(wanted)] == list(wanted.values())).all(axis=1) & rows["ratio"].notna()]
    if same.empty:
        raise BadInput(
            f"--step-run: {path} has no row of this block; make one with: swiglu-bench step --scope mlp "
            f"--shapes {case.shape.name} --tokens {case.tokens} --dtype {case.dtype.value}."
        )
    return {str(name): float(ratio) for name, ratio in zip(same["implementation"], same["ratio"], strict=True)}


def _prepare(built: Built, number: int) -> Callable[[], object]:
    call = built.call(Mode.STEP, Draw(number), upstream_first=True)
    call.prepare()
    return partial(call.run, nullcontext)
