"""The command `swiglu-bench train`: who takes part, where results go, and what is printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiglu_bench import request
from swiglu_bench.cases.cases import Dtype, Precision, Scope, parse_dtypes, parse_precisions
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.options import (
    HOW,
    OUTPUT,
    WHAT,
    Device,
    Impl,
    JsonForm,
    Out,
    SkipImpl,
    Text,
    Wait,
    WandbOptions,
    command_of,
    option,
)
from swiglu_bench.rows.record import BASELINE, Record, Status, row_of
from swiglu_bench.show import text

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from swiglu_bench.cases.implementation import Implementation
    from swiglu_bench.tasks.train.blocks import Trainee

DEFAULT = ("eager", "compile", "unsloth", "fused-auto", "fused-mlp-auto")
"""The implementations trained by default, besides those that need a package of others."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(WandbOptions):
    """What is trained, how it is timed, and where results go."""

    task: Annotated[str, option(WHAT, "digits, mnist or llama.")] = "digits"
    model: Annotated[
        Text,
        option(WHAT, "Sizes: the name of a file in configs/train, or a YAML path. "
               "\\[default: the task's; llama: llama-1b on a GPU, llama-tiny on a CPU]"),
    ] = None  # fmt: skip
    data: Annotated[
        Path | None,
        option(WHAT, "mnist: a folder that has MNIST/raw with the IDX files; llama: a text file. "
               "\\[default for llama: the sources of Python's standard library]"),
    ] = None  # fmt: skip
    impl: Impl = None
    skip_impl: SkipImpl = None
    epochs: Annotated[int | None, option(WHAT, "Passes over the images. \\[default: the model's]", min=1)] = None
    steps: Annotated[int | None, option(WHAT, "Steps, instead of epochs. \\[default: the model's]", min=1)] = None
    seeds: Annotated[int, option(WHAT, "Number of seeds from which each is trained.", min=1)] = 3
    seed: Annotated[int, option(WHAT, "The first seed.", min=0, max=2**31)] = 0
    dtype: Annotated[
        Text,
        option(WHAT, "The dtype of products: bf16 (autocast) or fp32; weights are fp32. "
               "\\[default: bf16 on a GPU, fp32 on a CPU]"),
    ] = None  # fmt: skip
    precision: Annotated[
        Text,
        option(WHAT, "fp8-tensorwise, fp8-rowwise or fp8-blockwise: how implementations that support it "
               "quantise the operands of the blocks' products; the others train in bf16. \\[default: not at all]"),
    ] = None  # fmt: skip
    device: Device = None
    interpret: Annotated[
        bool, option(HOW, "On a CPU, run kernels in Triton's interpreter: for tiny models, not timed.", "--interpret")
    ] = False
    budget: Annotated[
        float | None,
        option(HOW, "Seconds for the rounds in which steps are timed; if it is given, models that "
               "take very long on this machine are trained too. \\[default: 20]", min=0.01),
    ] = None  # fmt: skip
    wait: Wait = True
    out: Out = None
    csv: Annotated[
        bool, option(OUTPUT, "Write train.csv, runs.csv, summary.csv, run.json and the curves.", "--csv/--no-csv")
    ] = True

    @property
    def budget_s(self) -> float:
        """Seconds for the rounds."""
        return 20.0 if self.budget is None else self.budget


def _train(
    options: TrainOptions,
    dry_run: Annotated[bool, option(HOW, "Print the model and the memory it needs, and stop.", "--dry-run")] = False,
    form: JsonForm = "table",
) -> None:
    """Train the same model with each implementation: does it learn the same, and is it faster?

    All begin with the same weights and see the same batches. Curves are compared with the effect of other seeds and of
    another summation order on eager's; afterwards steps are timed in interleaved rounds. Exits 1 if one fails or
    differs.

    Example: swiglu-bench train --task llama --steps 40 --impl 'eager,compile,liger,fused-mlp-auto'
    """
    text.check("--format", form, "table", "json")
    if options.epochs is not None and options.steps is not None:
        raise BadInput("--epochs and --steps were given together; leave one of them out.")
    if options.out and not options.csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    request.check_wandb(options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, logs to stderr
    device = request.find_device(options.device, options.interpret)
    if options.interpret and device.type != "cpu":
        raise BadInput("--interpret is for a CPU; a GPU runs the kernels themselves. Leave it out.")
    run = TrainingRun(options, device, text.screen(form))
    if dry_run:
        from swiglu_bench.cli import listing
        from swiglu_bench.machine.machine import free_memory_bytes

        free_bytes = free_memory_bytes(device)
        listing.put_plan(form, "train", [run.plan(free_bytes)], [row.implementation for row in run.rows], free_bytes)
        return
    status = run.perform()
    if form == "json":
        text.put(text.as_json({"kind": "training", **run.about, "rows": [row.row() for row in run.rows]}))
    raise typer.Exit(status)


class TrainingRun:
    """Who takes part, and what is trained. Raises BadInput before any work starts."""

    def __init__(self, options: TrainOptions, device: torch.device, console: Console) -> None:
        from swiglu_bench.machine import machine
        from swiglu_bench.outlets import Outlets
        from swiglu_bench.rows.finished_run import PERMUTED
        from swiglu_bench.tasks.train import model  # after Triton was told to interpret

        self.options = options
        name = options.model or model.default_model(options.task, device.type == "cuda")
        sizes, self._chosen = model.load_sizes(options.task, name), chosen_implementations(options)
        precision = _precision(options)
        dtype = _dtype("bf16" if precision else options.dtype, device.type)
        self.experiment = model.prepare(
            sizes, device, dtype, precision, data=options.data, epochs=options.epochs, steps=options.steps
        )
        self.machine, started = machine.describe(device), machine.now()
        settings = {
            "task": options.task, "workload": sizes.model_dump(), "data": self.experiment.data.about,
            "steps": self.experiment.steps, "dtype": dtype.value, "precision": precision.value,
            "seed": options.seed, "seeds": options.seeds, "interpret": options.interpret, "budget_s": options.budget_s,
        }  # fmt: skip
        about = {"command": request.command_line(), "run_id": machine.run_id(started), "settings": settings}
        self.outlets = Outlets(self.machine, about, console)
        self.about = self.outlets.about
        self.rows: list[Record] = []
        self.trainees: list[Trainee] = []
        eager, *others = self._chosen
        for title, implementation in ((eager.name, eager), (PERMUTED, eager), *((each.name, each) for each in others)):
            self._enter(title, implementation, name, started)

    def _enter(self, title: str, implementation: Implementation, model: str, started: str) -> None:
        """A row for an implementation and, if it can be trained here, its trainee."""
        from swiglu_bench.rows.finished_run import PERMUTED
        from swiglu_bench.tasks.train.blocks import Trainee, why_not

        experiment, this, interpret = self.experiment, self.machine, self.options.interpret
        row = row_of(
            "training", self.about, run_id=self.about["run_id"], task=self.options.task, model=model,
            implementation=title, trains=implementation.trains, device=this.device, torch=this.torch,
            triton=this.triton, version=this.version, timestamp=started,
            precision=implementation.precision_of(experiment.case).value,
        )  # fmt: skip
        self.rows.append(row)
        if reason := why_not(
            implementation, experiment.case, experiment.device.type, interpret, this.compute_capability
        ):
            row.status, row.reason = Status.SKIPPED, reason
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
        from swiglu_bench.machine import machine
        from swiglu_bench.worker.policy import check_work

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
        from swiglu_bench.machine import locks
        from swiglu_bench.measure.clock import DeviceLost
        from swiglu_bench.measure.rounds import Rule
        from swiglu_bench.outlets import Files
        from swiglu_bench.show.console import TrainingProgress
        from swiglu_bench.tasks.train import run

        self._check_affordable()
        options, experiment, outlets, status = self.options, self.experiment, self.outlets, 0
        seeds = range(options.seed, options.seed + options.seeds)
        rule = Rule(warmup_rounds=2, max_rounds=200, budget_s=options.budget_s)  # fewer rounds: turns are long
        with outlets:
            files = Files(options.out, f"train-{options.task}", "seeds", _earlier)
            outlets.open("train", files if options.csv else None, options)
            outlets.enter_context(locks.device(experiment.device, self.about["command"], options.wait, outlets.say))
            outlets.say(
                f"{options.task} on {self.machine.device}: {experiment.data.about}; blocks "
                f"{experiment.case.shape.name}, {experiment.case.tokens} tokens a step, {experiment.steps} steps, "
                f"{experiment.dtype.value}{f', blocks in {experiment.precision}' if experiment.precision else ''}."
            )
            count = len(self.trainees) * len(seeds)
            try:
                with TrainingProgress(outlets.console, count, outlets.wandb) as progress:
                    for row in run.train(experiment, self.trainees, seeds, rule, progress.listen):
                        if outlets.files:
                            outlets.files.write(row)
            except KeyboardInterrupt:
                status = request.INTERRUPTED
            except DeviceLost as error:
                status = 1
                outlets.warn(f"The GPU is lost to this process ({error}); what had ended by then is kept.")
            nothing = self._show()
        if status == request.INTERRUPTED:
            outlets.say("Interrupted: finished work was kept.", style="yellow")
            return status
        return status or int(nothing or any(row.failed for row in self.rows))

    def _show(self) -> bool:
        """Print the tables, and write the rows and the curves; whether nothing that was asked for was trained."""
        from swiglu_bench.rows.finished_run import as_of_all_runs
        from swiglu_bench.show.tables import training_tables
        from swiglu_bench.show.text import CsvFile

        outlets, asked = self.outlets, request.asked(self.options.impl, self._chosen)
        for table in training_tables(self.rows):
            outlets.console.print(table, highlight=False)
        if outlets.folder:
            with closing(CsvFile(outlets.folder, outlets.warn, "training")) as file:
                for row in self.rows:
                    file.write(row)
            outlets.say(_draw(outlets.folder, self.options.task, self.trainees, self.rows))
        for row in self.rows if outlets.wandb else ():
            outlets.wandb.write(as_of_all_runs(row))  # type: ignore[union-attr]
        wanted = [row for row in self.rows if row.implementation in asked]
        return outlets.end("Losses, summary and machine", wanted, "trained")


def _earlier(folder: Path) -> dict[str, Any]:
    """Raise BadInput for a folder that holds a training run."""
    from swiglu_bench.rows.finished_run import STEPS

    if (folder / STEPS).exists():
        raise BadInput(f"--out: {folder} holds a training run; give another folder.")
    return {}


def _draw(folder: Path, task: str, trainees: Sequence[Trainee], rows: Sequence[Record]) -> str:
    """Write curves.png and curves.svg; what was written, or why nothing was, in one sentence."""
    from swiglu_bench.rows.finished_run import PERMUTED
    from swiglu_bench.show.documents import NoPicture, save

    losses = {trainee.name: trainee.losses for trainee in trainees if trainee.losses}
    known = [row.implementation for row in rows if row.implementation != PERMUTED]
    frozen = [row.implementation for row in rows if row.frozen]

    def make() -> Any:
        from swiglu_bench.show.charts import Style, curves, slots

        if not losses:
            raise NoPicture("nothing was trained to the end")
        return curves(losses, list(losses), f"{task}: loss over steps", Style(slots(losses, known)), frozen)

    try:
        return f"Curves: {save(folder, 'curves', make)}"
    except NoPicture as reason:
        return f"No picture of the curves: {reason}."


def chosen_implementations(options: TrainOptions) -> list[Implementation]:
    """The chosen implementations after eager, with which every curve is compared."""
    from swiglu_bench.cases import registry

    known, precision = request.catalogue(registry.load), _precision(options)
    usual = [
        each.name
        for each in known
        if (not each.on_request and precision in each.precisions and Scope.MLP in each.scopes)
        and (precision or each.name in DEFAULT or each.package or each.address)
    ]
    wanted, unwanted = request.split(options.impl, "--impl"), request.split(options.skip_impl, "--skip-impl")
    chosen = registry.select(known, wanted or usual, unwanted)
    eager = next(each for each in known if each.name == BASELINE)
    return [eager, *(each for each in chosen if each.name != BASELINE)]


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


train = command_of(TrainOptions, _train)
