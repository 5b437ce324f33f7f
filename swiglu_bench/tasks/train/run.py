"""One call of `swiglu-bench train`: its folder, locks, W&B run and screen around the session, and its exit status."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from swiglu_bench import output, request
from swiglu_bench.affordable import check_work
from swiglu_bench.cases import registry
from swiglu_bench.cases.cases import Dtype, Precision, Scope, parse_dtypes, parse_precisions
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import locks, machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.kinds import BASELINE, row_of
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.rows.training import PERMUTED, TrainingStep, as_of_all_runs
from swiglu_bench.show.charts.export import NoPicture, save
from swiglu_bench.show.writers.console import Bar
from swiglu_bench.show.writers.tables import nothing_done
from swiglu_bench.show.writers.training_tables import tables
from swiglu_bench.show.writers.wandb_run import WandbRun
from swiglu_bench.tasks.train import model, workload
from swiglu_bench.tasks.train.blocks import Trainee, why_not
from swiglu_bench.tasks.train.files import TrainingFolder
from swiglu_bench.tasks.train.options import TrainOptions
from swiglu_bench.tasks.train.session import TrainingSession
from swiglu_bench.tasks.train.step_costs import read_ratios

DEFAULT = ("eager", "compile", "unsloth", "fused-auto", "fused-mlp-auto")
"""The implementations trained by default, besides those that need a package of others."""


class TrainingRun:
    """Who takes part, what is printed and written, and the exit status. Raises BadInput before any work starts."""

    def __init__(self, options: TrainOptions, device: torch.device, console: Console) -> None:
        self.options, self.console = options, console
        name = options.model or workload.default_model(options.task, device.type == "cuda")
        sizes, chosen = workload.load(options.task, name), chosen_implementations(options)
        precision = _precision(options)
        dtype = _dtype("bf16" if precision else options.dtype, device.type)
        experiment = self.experiment = model.prepare(sizes, options, device, dtype, precision)
        self.step_ratios = read_ratios(options.step_run, experiment.case) if options.step_run else None
        self.machine, started = machine.describe(device), machine.now()
        settings = {
            "task": options.task, "workload": sizes.model_dump(), "data": experiment.data.about,
            "steps": experiment.steps, "dtype": experiment.dtype.value, "precision": experiment.precision.value,
            "seed": options.seed, "seeds": options.seeds,
            "interpret": options.interpret, "budget_s": options.budget_s, "step_run": options.step_run,
            "checkpoint_every": options.checkpoint_every,
        }  # fmt: skip
        self.about: dict[str, Any] = {
            "command": request.command_line(), "run_id": machine.run_id(started), "settings": settings,
            "machine": self.machine.as_dict(),
        }  # fmt: skip
        where = (experiment.case, device.type, options.interpret, self.machine.compute_capability)
        self.trainees: list[Trainee] = []
        self._asked = request.asked(options.impl, chosen)
        self.rows: list[Record] = []
        for title, one in [(BASELINE, chosen[0]), (PERMUTED, chosen[0]), *((one.name, one) for one in chosen[1:])]:
            row = row_of(
                "training", self.about, run_id=self.about["run_id"], task=options.task, model=name,
                implementation=title, trains=one.trains, device=self.machine.device,
                torch=self.machine.torch, triton=self.machine.triton, version=self.machine.version, timestamp=started,
                precision=one.precision_of(experiment.case).value,
            )  # fmt: skip
            self.rows.append(row)
            if reason := why_not(one, *where):
                row.status, row.reason = Status.SKIPPED, reason
            else:
                row.steps, row.metric, row.unit = experiment.steps, sizes.metric, sizes.unit
                self.trainees.append(Trainee(one, row, permuted=title == PERMUTED))

    def plan(self, free_bytes: int) -> dict[str, Any]:
        """What would be trained, and whether the device's memory holds it."""
        case, needed_bytes = self.experiment.case, int(self.experiment.needed_bytes(len(self.trainees)))
        return {
            "task": self.options.task, "model": self.rows[0].model, "hidden": case.shape.hidden,
            "intermediate": case.shape.intermediate, "dtype": case.dtype.value, "tokens": case.tokens,
            "steps": self.experiment.steps, "seeds": self.options.seeds, "needed_bytes": needed_bytes,
            "fits": needed_bytes <= free_bytes,
        }  # fmt: skip

    def check_affordable(self) -> None:
        """Raise BadInput for a model that the device's memory does not hold, or that would train for too long here."""
        experiment, free_bytes = self.experiment, machine.free_memory_bytes(self.experiment.device)
        plan = self.plan(free_bytes)
        if not plan["fits"]:
            raise BadInput(
                f"--model: {plan['model']} needs about {plan['needed_bytes'] / 2**30:.1f} GiB and the device has "
                f"{free_bytes / 2**30:.1f} GiB free; give a smaller model, or fewer implementations."
            )
        trainings = len(self.trainees) * self.options.seeds
        flops = 6 * experiment.parameters * experiment.case.tokens * experiment.steps * trainings
        if self.options.budget is None:
            check_work(self.machine, experiment.device, {experiment.dtype: flops}, "--model", "--steps")

    def perform(self) -> int:
        """Train and time everything, then print and write the tables; the exit status."""
        self.check_affordable()
        options, experiment, status = self.options, self.experiment, 0
        with ExitStack() as stack:
            folder = self._open_folder(stack) if options.csv else None
            wandb = None
            if options.log_wandb:
                place = folder.path if folder else None
                made = output.wandb_run(options, "train", self.machine.slug, self.about, place, self._warn)
                wandb = stack.enter_context(closing(made))
            stack.enter_context(locks.device(experiment.device, self.about["command"], options.wait, self._say))
            self._say(
                f"{options.task} on {self.machine.device}: {experiment.data.about}; blocks "
                f"{experiment.case.shape.name}, {experiment.case.tokens} tokens a step, {experiment.steps} steps, "
                f"{experiment.dtype.value}{f', blocks in {experiment.precision}' if experiment.precision else ''}."
            )
            session = TrainingSession(experiment, self.trainees, options, self.step_ratios, folder)
            left = sum((trainee.name, seed) not in session.finished for trainee, seed in session.wanted)
            if done := len(session.wanted) - left:
                self._say(f"{done} of {done + left} trainings are finished in {options.out} and are kept.")
            try:
                with TrainingProgress(self.console, experiment.steps, left, wandb) as progress:
                    session.run(progress.listen)
            except KeyboardInterrupt:
                status = request.INTERRUPTED
            except DeviceLost as error:
                status = 1
                self._warn(f"The GPU is lost to this process ({error}); what had ended by then is kept.")
            self._show(folder, wandb)
        if status == request.INTERRUPTED:
            self._say("Interrupted: finished work was kept; continue with --resume.", style="yellow")
            return status
        nothing = nothing_done([row for row in self.rows if row.implementation in self._asked], "trained")
        if nothing:
            self._warn(nothing)
        return status or int(bool(nothing) or any(row.failed for row in self.rows))

    def _show(self, folder: TrainingFolder | None, wandb: WandbRun | None) -> None:
        """Print the tables, and write what was found."""
        for table in tables(self.rows):
            self.console.print(table, highlight=False)
        if folder:
            folder.summarise(self.rows)
            self._say(self.draw(folder.path))
            self._say(f"Losses, summary and machine: {folder.path}")
        if wandb:
            for row in self.rows:
                wandb.write(as_of_all_runs(row))
            if wandb.url_or_path:
                self._say(f"W&B: {wandb.place}")

    def draw(self, folder: Path) -> str:
        """Write curves.png and curves.svg; what was written, or why nothing was, in one sentence."""
        losses = {one.name: one.losses for one in self.trainees if one.losses}
        known = [row.implementation for row in self.rows if row.implementation != PERMUTED]
        frozen = [row.implementation for row in self.rows if row.frozen]

        def make() -> Any:
            from swiglu_bench.show.charts.style import Style, slots
            from swiglu_bench.show.charts.training import curves

            if not losses:
                raise NoPicture("nothing was trained to the end")
            title = f"{self.options.task}: loss over steps"
            return curves(losses, list(losses), title, Style(slots(losses, known)), frozen)

        try:
            return f"Curves: {save(folder, 'curves', make)}"
        except NoPicture as reason:
            return f"No picture of the curves: {reason}."

    def _open_folder(self, stack: ExitStack) -> TrainingFolder:
        name = f"train-{self.options.task}"
        path = self.options.out or output.default_folder(self.machine, name, self.about["run_id"])
        run_folder.create_folder(path)
        stack.enter_context(locks.folder(path, self.about["command"]))
        folder = TrainingFolder(path, self.about, self.options.resume, self._warn)
        stack.callback(folder.flush)
        return folder

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _warn(self, text: str) -> None:
        self._say(f"Warning: {text}", style="yellow")


class TrainingProgress(Bar):
    """A bar with the live loss, or without a terminal a line for each of `count` trainings; logs to W&B."""

    def __init__(self, console: Console, steps: int, count: int, wandb: WandbRun | None = None) -> None:
        super().__init__(console, steps * count)
        self._steps = steps
        self._wandb = wandb
        self._done = 0

    def listen(self, event: TrainingStep | str) -> None:
        """A step, or what else begins."""
        if isinstance(event, str):
            text, ended = event, event.startswith("keeping")
        else:
            ended = event.step + 1 == self._steps
            where = f"{event.implementation}, seed {event.seed}: step {event.step + 1}/{self._steps}"
            text = f"{where}, loss {event.loss:.4f}"
            if self._wandb:
                self._wandb.step(event)
        self._done += isinstance(event, TrainingStep)
        self.tell(text, self._done)
        if ended and not self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def chosen_implementations(options: TrainOptions) -> list[Implementation]:
    """The chosen implementations after eager, with which every curve is compared."""
    known, precision = request.catalogue(registry.load), _precision(options)
    usual = [
        one.name
        for one in known
        if (not one.on_request and precision in one.precisions and Scope.MLP in one.scopes)
        and (precision or one.name in DEFAULT or one.package or one.address)
    ]
    wanted, unwanted = request.split(options.impl, "--impl"), request.split(options.skip_impl, "--skip-impl")
    chosen = registry.select(known, wanted or usual, unwanted)
    eager = next(one for one in known if one.name == BASELINE)
    return [eager, *(one for one in chosen if one.name != BASELINE)]


def _precision(options: TrainOptions) -> Precision:
    if options.precision is None:
        return Precision.UNQUANTISED
    found = parse_precisions(options.precision)
    if len(found) > 1:
        raise BadInput(f"--precision: train takes one, and {options.precision!r} names {len(found)}; leave others out.")
    if found[0] and options.dtype is not None and parse_dtypes(options.dtype) != [Dtype.BFLOAT16]:
        raise BadInput(f"--precision quantises bf16 operands, and --dtype is {options.dtype}; leave --dtype out.")
    return found[0]


def _dtype(text: str | None, device_type: str) -> Dtype:
    found = parse_dtypes(text if text is not None else "bf16" if device_type == "cuda" else "fp32")
    if found not in ([Dtype.BFLOAT16], [Dtype.FLOAT32]):
        raise BadInput(f"--dtype: {text!r} is not one that train takes; give bf16 or fp32.")
    return found[0]
