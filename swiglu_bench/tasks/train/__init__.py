"""A call of `swiglu-bench train`: who takes part, where results go, and what is printed."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from swiglu_bench.cases.cases import Dtype, Precision
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.loop import Ending
from swiglu_bench.machine import locks, machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.options import TrainOptions
from swiglu_bench.output import Opened, folder_of, writing
from swiglu_bench.rows.finished_run import PERMUTED, STEPS, as_of_all_runs
from swiglu_bench.rows.record import Record, Status, row_of
from swiglu_bench.show.console import Screen, TrainingProgress
from swiglu_bench.show.pictures import save
from swiglu_bench.show.tables import training_tables
from swiglu_bench.show.text import CsvFile
from swiglu_bench.tasks.train import run
from swiglu_bench.tasks.train.blocks import Trainee, why_not
from swiglu_bench.tasks.train.model import default_model, load_sizes, prepare
from swiglu_bench.worker.policy import check_work

LOST = {DeviceLost: "The GPU is lost to this process ({}); what was trained to the end before that is kept."}


class TrainingRun:
    """Who takes part, and what is trained. Raises BadInput before any work starts."""

    def __init__(
        self, options: TrainOptions, device: torch.device, chosen: Sequence[Implementation], precision: Precision,
        dtype: Dtype, command: str,
    ) -> None:  # fmt: skip
        self.options, model = options, options.model or default_model(options.task, device.type == "cuda")
        self.experiment = experiment = prepare(
            load_sizes(options.task, model), device, dtype, precision,
            data=options.data, epochs=options.epochs, steps=options.steps,
        )  # fmt: skip
        self.machine, started = machine.describe(device), machine.now()
        settings = {
            "task": options.task, "workload": experiment.workload.model_dump(), "data": experiment.data.about,
            "steps": experiment.steps, "dtype": dtype.value, "precision": precision.value,
            "seed": options.seed, "seeds": options.seeds, "interpret": options.interpret, "budget_s": options.budget_s,
        }  # fmt: skip
        self.about: dict[str, Any] = {"command": command, "run_id": machine.run_id(started), "settings": settings}
        self.about["machine"] = self.machine.as_dict()
        self.rows, self.trainees = list[Record](), list[Trainee]()
        eager, *others = chosen
        for title, each in ((eager.name, eager), (PERMUTED, eager), *((other.name, other) for other in others)):
            self._enter(title, each, model, started)

    def _enter(self, title: str, implementation: Implementation, model: str, started: str) -> None:
        """A row for an implementation and, if it can be trained here, its trainee."""
        experiment, this, interpret = self.experiment, self.machine, self.options.interpret
        row = row_of(
            "training", self.about, run_id=self.about["run_id"], task=self.options.task, model=model,
            implementation=title, trains=implementation.trains, device=this.device, torch=this.torch,
            triton=this.triton, version=this.version, timestamp=started,
            precision=implementation.precision_of(experiment.case).value,
        )  # fmt: skip
        self.rows.append(row)
        kind, capability = experiment.device.type, this.compute_capability
        if reason := why_not(implementation, experiment.case, kind, interpret, capability):
            row.end(Status.SKIPPED, reason)
            return
        row.steps, row.metric, row.unit = experiment.steps, experiment.workload.metric, experiment.workload.unit
        permuted, interpreted = title == PERMUTED, interpret and implementation.backend == "triton"
        self.trainees.append(Trainee(implementation, row, permuted, timed=not permuted and not interpreted))

    def plan(self, free_bytes: int) -> dict[str, Any]:
        """What would be trained, and whether the device's memory holds it."""
        case, needed_bytes = self.experiment.case, int(self.experiment.needed_bytes(len(self.trainees)))
        return {
            "task": self.options.task, "model": self.rows[0].model, "hidden": case.shape.hidden,
            "intermediate": case.shape.intermediate, "dtype": case.dtype.value, "tokens": case.tokens,
            "steps": self.experiment.steps, "seeds": self.options.seeds, "needed_bytes": needed_bytes,
            "fits": needed_bytes <= free_bytes,
        }  # fmt: skip

    def _check_affordable(self) -> None:
        """Raise BadInput for a model that the device's memory does not hold, or that would train for too long here."""
        experiment, free_bytes = self.experiment, machine.free_memory_bytes(self.experiment.device)
        plan = self.plan(free_bytes)
        if not plan["fits"]:
            needed, free = (f"{size / 2**30:.1f} GiB" for size in (plan["needed_bytes"], free_bytes))
            few = f"{plan['model']} needs about {needed} and the device has {free} free"
            raise BadInput(f"--model: {few}; give a smaller model, or fewer implementations.")
        trainings = len(self.trainees) * self.options.seeds
        flops = 6 * experiment.parameters * experiment.case.tokens * experiment.steps * trainings
        if self.options.budget is None:
            check_work(self.machine, experiment.device, {experiment.dtype: flops}, "--model", "--steps")

    def perform(self, console: Console, asked: frozenset[str]) -> int:
        """Train and time everything, then print and write the tables; the exit status."""
        self._check_affordable()
        options, experiment, screen, this = self.options, self.experiment, Screen(console), self.machine
        seeds = range(options.seed, options.seed + options.seeds)
        rule = Rule(warmup_rounds=2, max_rounds=200, budget_s=options.budget_s)  # fewer rounds: turns are long
        to = Opened(folder_of(f"train-{options.task}", options, this, self.about["run_id"]), self.about)
        ending = Ending(screen, LOST)
        with (
            writing(to, "seeds", _earlier, "train", options, this.slug, screen.warn) as into,
            locks.device(experiment.device, self.about["command"], options.wait, screen.say),
        ):
            what = f"{options.task} on {this.device}: {experiment.data.about}; blocks {experiment.case.shape.name}, "
            what += f"{experiment.case.tokens} tokens a step, {experiment.steps} steps, {experiment.dtype.value}"
            what += f", blocks in {experiment.precision}." if experiment.precision else "."
            console.print(what, markup=False, highlight=False)
            with ending, TrainingProgress(console, len(self.trainees) * len(seeds), into.wandb) as progress:
                for row in run.train(experiment, self.trainees, seeds, rule, progress.listen):
                    if into.files:
                        into.files.write(row)
            for table in training_tables(self.rows):
                console.print(table, highlight=False)
            if into.folder:
                with closing(CsvFile(into.folder, screen.warn, "training")) as file:
                    for row in self.rows:
                        file.write(row)
                screen.say(self._draw(into.folder))
            for row in self.rows if into.wandb else ():
                into.wandb.write(as_of_all_runs(row))  # type: ignore[union-attr]
        return ending.status(into, self.rows, asked, "trained", what="Losses, summary and machine")

    def _draw(self, folder: Path) -> str:
        """Write curves.png and curves.svg; what was written, or why nothing was, in one sentence."""
        losses = {trainee.name: trainee.losses for trainee in self.trainees if trainee.losses}
        known = [row.implementation for row in self.rows if row.implementation != PERMUTED]
        frozen = [row.implementation for row in self.rows if row.frozen]

        def make() -> Any:
            from swiglu_bench.show.charts import Style, curves, slots

            if not losses:
                return "nothing was trained to the end"
            title = f"{self.options.task}: loss over steps"
            return curves(losses, list(losses), title, Style(slots(losses, known)), frozen)

        return save(folder, "curves", make, "Curves", "No picture of the curves")


def _earlier(folder: Path) -> dict[str, Any]:
    """Raise BadInput for a folder that holds a training run."""
    if (folder / STEPS).exists():
        raise BadInput(f"--out: {folder} holds a training run; give another folder.")
    return {}
