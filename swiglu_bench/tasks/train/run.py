"""A training run: every trainee from every seed, then their step times side by side, then the verdicts.

16-bit training is chaotic: the smallest difference in rounding grows until curves part, which says nothing about which
implementation learns better. What is compared is the mean loss over the last fifth of the steps, with eager's from the
same seed, and it is judged by two things that make no model worse: another summation order, and other seeds.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from swiglu_bench.measure.clock import Clock, CpuClock, CudaClock, LatencyClock, answers
from swiglu_bench.measure.resources import measure_memory
from swiglu_bench.measure.rounds import Rounds, Rule, on_clock, run_rounds
from swiglu_bench.measure.statistics import Interval, mean_half_width, percentile, verdict
from swiglu_bench.rows.finished_run import PERMUTED, Curve
from swiglu_bench.rows.record import BASELINE, Record, Status
from swiglu_bench.tasks.train.blocks import FittedModel, SeedTraining, Trainee
from swiglu_bench.tasks.train.model import Experiment

TURN_S = 0.1
"""A turn is as many steps as take about this long, so that its start and its last wait weigh little."""
TURN_STEPS = (2, 64)
WATCHED_STEPS, WARM_STEPS = 5, 5
"""Steps to see where the time goes. Warm ones come first: a rested device is faster than one at its power limit."""
TWIN = "eager, again"
WINDOW = 0.2
"""Share of the steps, the last ones, over which losses are averaged."""
ROUNDING = 3.0
"""A difference of up to this many times the effect of another summation order still counts as rounding."""
UNTRAINED = "It had not been trained to the end from any seed when this ended."
"""Why a trainee that did not fail has no figures."""
Listen = Callable[[Record | str], None]
"""Gets the row of a seed after each step, and a text about everything else that begins."""
Finals = Mapping[int, float]


def train(
    experiment: Experiment, trainees: Sequence[Trainee], seeds: Sequence[int], rule: Rule, listen: Listen
) -> Iterator[Record]:
    """Do everything and enter it into the trainees' rows; yields a row for each seed that was trained to the end.

    `trainees` begin with eager and have its permuted twin among them. What was found until an interruption is judged.
    Raises DeviceLost where one breaks the device.
    """
    device = experiment.device
    try:
        for seed in seeds:
            for trainee in trainees:
                if trainee.row.status is Status.OK:
                    with trainee.may_fail(device, f"Seed {seed}"):
                        trainee.seeds[seed] = _train_seed(experiment, trainee, seed, listen)
                if seed in trainee.seeds:
                    yield trainee.seeds[seed]
                _free(device)
        timed = [trainee for trainee in trainees if trainee.timed and trainee.row.status is Status.OK]
        if timed and timed[0].name == BASELINE:
            time_steps(experiment, timed, rule, seeds[0], listen)
    finally:
        judge(trainees)


def _train_seed(experiment: Experiment, trainee: Trainee, seed: int, listen: Listen) -> Record:
    began = time.monotonic()
    listen(f"{trainee.name}, seed {seed}")
    training = SeedTraining(experiment, trainee, seed)
    trainee.row.parameters = training.row.parameters
    for _ in range(experiment.steps):
        training.advance()
        listen(training.row)
    training.row.held_out_loss, training.row.metric_mean = training.judge()
    training.row.seconds = time.monotonic() - began
    return training.row


def _free(device: torch.device) -> None:
    """The next model needs the GPU memory of the last."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# What a step costs


def time_steps(experiment: Experiment, trainees: Sequence[Trainee], rule: Rule, seed: int, tell: Listen) -> None:
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
    _free(device)


def _two_steps(model: FittedModel, seed: int, clock: Clock) -> float:
    """Seconds of a step. The first time they compile, tune, and let the optimiser make its state."""
    model.install()
    clock.synchronize()
    began = time.perf_counter()
    for number in range(2):
        model.learn(model.experiment.data.batch(seed, number))
        model.update()
    clock.synchronize()
    return (time.perf_counter() - began) / 2


def _rounds(models: dict[str, FittedModel], clock: Clock, rule: Rule, seed: int, tell: Listen) -> tuple[Rounds, int]:
    """The rounds, and how many steps there are in a turn."""
    least, most = TURN_STEPS
    steps = max(least, min(most, math.ceil(TURN_S / _two_steps(models[BASELINE], seed, clock))))

    def prepare(model: FittedModel, number: int) -> Callable[[], None]:
        model.install()
        batches = [model.experiment.data.batch(seed, number * steps + step) for step in range(steps)]

        def turn() -> None:
            for batch in batches:
                model.learn(batch)
                model.update()

        return turn

    contenders = [on_clock(name, clock, partial(prepare, model)) for name, model in models.items()]
    contenders.append(on_clock(TWIN, clock, partial(prepare, models[BASELINE])))
    rounds = run_rounds(
        contenders, rule, baseline=BASELINE, seed=seed, on_round=lambda number: tell(f"timing, round {number}"),
        device_works=partial(answers, models[BASELINE].experiment.device),
    )  # fmt: skip
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
    if ratio := rounds.ratio(row.implementation, BASELINE) if row.implementation != BASELINE else None:
        row.ratio, row.ratio_low, row.ratio_high = ratio.median, ratio.low, ratio.high
        row.verdict = verdict(ratio, twin.noise).value
    row.aa_low, row.aa_high = twin.low, twin.high
    row.block_share = (forward_ms + backward_ms) / watched_ms
    row.block_forward_ms, row.block_backward_ms, row.optimizer_ms = forward_ms, backward_ms, optimizer_ms
    row.saved_bytes, row.peak_bytes = memory.saved_bytes, memory.peak_bytes


def _measure_parts(model: FittedModel, seed: int) -> list[float]:
    """Milliseconds of a step, and of its blocks' forward, its blocks' backward and its optimiser, as medians.

    On a GPU from when it comes to a part until it has done it. The backwards of blocks never overlap.
    """
    device, found = model.experiment.device, []
    on_gpu = device.type == "cuda"

    def now() -> Any:
        if not on_gpu:
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def spent_ms(moments: Sequence[Any]) -> float:
        """Time between the moments of each pair, summed."""
        pairs = zip(moments[::2], moments[1::2], strict=True)
        return sum(begin.elapsed_time(end) if on_gpu else (end - begin) * 1e3 for begin, end in pairs)

    for number in range(WARM_STEPS + WATCHED_STEPS):
        step, forward, backward, update = parts = [list[Any]() for _ in range(4)]
        hooks = [
            register(lambda *_, part=part: part.append(now()))
            for core in (block.core for block in model.blocks)
            for register, part in (
                (core.register_forward_pre_hook, forward), (core.register_forward_hook, forward),
                (core.register_full_backward_pre_hook, backward), (core.register_full_backward_hook, backward),
            )
        ]  # fmt: skip
        try:
            step.append(now())
            model.learn(model.experiment.data.batch(seed, number))
            update.append(now())
            model.update()
            end = now()
        finally:
            for hook in hooks:
                hook.remove()
        step.append(end)
        update.append(end)
        if on_gpu:
            torch.cuda.synchronize(device)
        found.append([spent_ms(part) for part in parts])
    return [statistics.median(column) for column in zip(*found[WARM_STEPS:], strict=True)]


# Whether it learned the same


def judge(trainees: Sequence[Trainee]) -> None:
    """Enter into each row how far it learned, and how its curves compare with eager's."""
    finals = {trainee.name: {seed: final(of) for seed, of in trainee.losses.items()} for trainee in trainees}
    for trainee in trainees:
        row, seeds, own = trainee.row, trainee.seeds.values(), finals[trainee.name]
        row.seeds = len(seeds)
        if row.status is Status.OK and not seeds:
            row.status, row.reason = Status.SKIPPED, UNTRAINED
        if seeds:
            metrics = [seed.metric_mean or 0.0 for seed in seeds]
            row.final_loss, row.final_loss_spread = statistics.fmean(own.values()), spread(own.values())
            row.held_out_loss = statistics.fmean(seed.held_out_loss or 0.0 for seed in seeds)
            row.metric_mean, row.metric_spread = statistics.fmean(metrics), spread(metrics)
        if trainee.name != BASELINE:
            enter_curve(row, own, finals[BASELINE], finals.get(PERMUTED, {}))


def final(losses: Sequence[float]) -> float:
    """Mean of the last fifth of the steps, at least one."""
    return statistics.fmean(losses[-max(1, round(len(losses) * WINDOW)) :])


def spread(values: Collection[float]) -> float | None:
    """Standard deviation over seeds; None for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else None


def enter_curve(row: Record, own: Finals, eager: Finals, permuted: Finals) -> None:
    """Enter how its curves compare with eager's from the same seeds; a loss that is not finite differs."""
    if not (differences := [own[seed] - eager[seed] for seed in sorted(own.keys() & eager.keys())]):
        return
    row.difference, largest = statistics.fmean(differences), max(map(abs, differences))
    if len(differences) > 1 and math.isfinite(row.difference):
        half = mean_half_width(differences)
        row.difference_low, row.difference_high = row.difference - half, row.difference + half
    row.rounding = max((abs(permuted[seed] - eager[seed]) for seed in permuted.keys() & eager.keys()), default=None)
    row.eager_spread = spread(eager.values())
    if not all(map(math.isfinite, differences)):
        row.curve = Curve.DIFFERS
    elif largest == 0 or largest <= ROUNDING * (row.rounding or 0.0):
        row.curve = Curve.SAME
    elif row.eager_spread is None:
        row.curve = Curve.UNKNOWN
    else:
        row.curve = Curve.WITHIN_SEEDS if abs(row.difference) <= row.eager_spread else Curve.DIFFERS
