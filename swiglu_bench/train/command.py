"""`swiglu-bench train`: options in, models trained, two tables out."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiglu_bench.cases import BadInput, Dtype, did_you_mean, parse_dtypes
from swiglu_bench.options import (
    HOW,
    OUTPUT,
    WHAT,
    Device,
    Impl,
    LogWandb,
    Out,
    SkipImpl,
    Wait,
    WandbProject,
)
from swiglu_bench.record import Status
from swiglu_bench.registry import Implementation

if TYPE_CHECKING:
    from swiglu_bench.machine import Machine
    from swiglu_bench.train.blocks import Contender
    from swiglu_bench.train.model import Experiment
    from swiglu_bench.train.session import Plan, Results
    from swiglu_bench.train.summary import Summary
    from swiglu_bench.writers.wandb_run import WandbRun

DEFAULT = (
    "eager", "compile", "liger", "unsloth", "fused", "fused-dw-torch", "fused-dw-triton", "fused-auto",
    "fused-mlp-auto",
)  # fmt: skip
"""Trained unless told otherwise, with all that need a third party's package."""
INTERRUPTED = 130


def train(
    task: Annotated[str, typer.Option(help="digits, mnist or llama.", rich_help_panel=WHAT)] = "digits",
    model: Annotated[
        str | None,
        typer.Option(
            help="Sizes: a file of configs/train by name, or a YAML path. "
            "\\[default: the task's; llama: llama-1b on a GPU, llama-tiny on a CPU]",
            rich_help_panel=WHAT, show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="mnist: a folder that has MNIST/raw with the IDX files; llama: a text file. "
            "\\[default for llama: the sources of Python's standard library]",
            rich_help_panel=WHAT, show_default=False,
        ),
    ] = None,
    impl: Impl = None,
    skip_impl: SkipImpl = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the images. \\[default: the model's]", min=1, rich_help_panel=WHAT,
                                 show_default=False),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps, instead of epochs. \\[default: the model's]", min=1, rich_help_panel=WHAT,
                                 show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many times each is trained.", min=1, rich_help_panel=WHAT)] = 3,
    seed: Annotated[int, typer.Option(help="The first seed.", min=0, max=2**31, rich_help_panel=WHAT)] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bf16 (autocast) or fp32, of products; weights are fp32. \\[default: bf16 on a GPU, fp32 on a CPU]",
            rich_help_panel=WHAT, show_default=False,
        ),
    ] = None,
    device: Device = None,
    interpret: Annotated[
        bool,
        typer.Option("--interpret", help="On a CPU, run Triton kernels in its interpreter: for tiny models, untimed.",
                     rich_help_panel=HOW),
    ] = False,
    budget: Annotated[
        float, typer.Option(help="Seconds for the rounds in which steps are timed.", min=0.01, rich_help_panel=HOW)
    ] = 20.0,
    step_run: Annotated[
        Path | None,
        typer.Option(
            help="A run of `step --scope mlp` with this block, for the expected speed-up. \\[default: measured now]",
            rich_help_panel=HOW, show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(help="Steps between checkpoints; 0: at Ctrl-C only. They are removed when a run ends.", min=0,
                     rich_help_panel=OUTPUT),
    ] = 0,
    wait: Wait = True,
    out: Out = None,
    csv: Annotated[
        bool,
        typer.Option("--csv/--no-csv", help="Write train.csv, runs.csv, summary.csv, run.json and the curves.",
                     rich_help_panel=OUTPUT),
    ] = True,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on in the folder of --out, from its checkpoints.", rich_help_panel=OUTPUT),
    ] = False,
    log_wandb: LogWandb = False,
    wandb_project: WandbProject = "swiglu-bench",
) -> None:  # fmt: skip
    """Train the same model with each implementation: whether it learns the same, and whether it is faster.

    All begin with the same weights and see the same batches. Curves are compared with what other seeds, and sums in
    another order, make of eager's; steps are timed in interleaved rounds afterwards. Exits 1 if one fails or differs.

    Example: swiglu-bench train --task llama --steps 40 --impl 'eager,compile,liger,fused-mlp-auto'
    """
    if epochs is not None and steps is not None:
        raise BadInput("--epochs and --steps were given together; leave one of them out.")
    if out and not csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    if resume and not out:
        raise BadInput("--resume needs the folder of the run to go on with; give it as --out FOLDER.")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, talks on stderr
    from swiglu_bench import machine

    one = machine.find_device(device)
    if interpret:
        if one.type != "cpu":
            raise BadInput("--interpret is for a CPU; a GPU runs the kernels themselves. Leave it out.")
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from swiglu_bench.train import amdahl, workload
    from swiglu_bench.train.model import experiment as prepare

    if task not in workload.TASKS:
        raise BadInput(f"--task: {task!r} is not a task; {did_you_mean(task, workload.TASKS)}")
    chosen = _choose(impl, skip_impl)
    experiment = prepare(
        workload.load(task, model, one.type == "cuda"), data, one, _dtype(dtype, one.type), epochs, steps
    )
    ratios = amdahl.from_run(step_run, experiment.case()) if step_run else None
    this = machine.describe(one)
    settings = {
        "task": task, "workload": experiment.workload.model_dump(), "data": experiment.data.about,
        "steps": experiment.steps, "dtype": experiment.dtype.value, "seed": seed, "seeds": seeds,
        "interpret": interpret, "budget_s": budget, "step_run": step_run, "checkpoint_every": checkpoint_every,
    }  # fmt: skip
    run = _Run(experiment, chosen, this, task, model or "", interpret)
    plan = run.plan(range(seed, seed + seeds), budget, ratios, checkpoint_every)
    raise typer.Exit(run.go(plan, settings, csv, out, resume, wandb_project if log_wandb else None, wait))


def _dtype(text: str | None, device_type: str) -> Dtype:
    if text is None:
        return Dtype.BFLOAT16 if device_type == "cuda" else Dtype.FLOAT32
    found = parse_dtypes(text)
    if found not in ([Dtype.BFLOAT16], [Dtype.FLOAT32]):
        raise BadInput(f"--dtype: {text!r} is not one that train takes; give bf16 or fp32.")
    return found[0]


def _choose(impl: list[str] | None, skip_impl: list[str] | None) -> list[Implementation]:
    """The chosen implementations with eager before them, which every curve is compared with."""
    from swiglu_bench.implementations import CATALOGUE
    from swiglu_bench.registry import entry_point_addresses, load, select

    catalogue = [*CATALOGUE, *map(load, entry_point_addresses())]

    def split(values: list[str] | None) -> list[str]:
        return [part for value in values or [] for part in re.split(r"\s*,\s*", value.strip()) if part]

    wanted, unwanted = split(impl), split(skip_impl)
    usual = [one.name for one in catalogue if one.name in DEFAULT or one.package or one.address]
    chosen = select(catalogue, wanted or usual, unwanted)
    eager = next(one for one in catalogue if one.name == "eager")
    return [eager, *(one for one in chosen if one.name != "eager")]


class _Run:
    """One call of the command."""

    def __init__(
        self,
        experiment: Experiment,
        chosen: Sequence[Implementation],
        this: Machine,
        task: str,
        model: str,
        interpret: bool,
    ) -> None:
        from rich.console import Console

        from swiglu_bench import machine
        from swiglu_bench.train.blocks import why_not

        self.console = Console()
        self.experiment = experiment
        self.this = this
        self.task = task
        self.model = model or ("llama" if task == "llama" else task)
        self.interpret = interpret
        self.command = shlex.join(["swiglu-bench", *sys.argv[1:]])
        self.started = machine.now()
        self.run_id = f"{re.sub('[-:]', '', self.started)}-{os.getpid()}"
        self.names = [one.name for one in chosen]
        reasons = {one.name: why_not(one, experiment.device.type, interpret) for one in chosen}
        self.able = [one for one in chosen if reasons[one.name] is None]
        self.skipped = [self._skip(one, reason) for one in chosen if (reason := reasons[one.name])]

    def plan(
        self, seeds: Sequence[int], budget_s: float, ratios: dict[str, float] | None, checkpoint_every: int
    ) -> Plan:
        """eager, eager with its sums in another order, and the others."""
        from swiglu_bench.train.blocks import PERMUTED, Contender
        from swiglu_bench.train.paired import default_rule
        from swiglu_bench.train.session import Plan

        eager, *others = [Contender(one.name, one) for one in self.able]
        contenders = [eager, Contender(PERMUTED, eager.implementation, permuted=True), *others]

        def timed(one: Contender) -> bool:
            return not one.permuted and not (self.interpret and one.implementation.backend == "triton")

        return Plan(self.experiment, contenders, seeds, default_rule(budget_s), timed, ratios, checkpoint_every)

    def go(
        self,
        plan: Plan,
        settings: dict[str, Any],
        csv: bool,
        out: Path | None,
        resume: bool,
        project: str | None,
        wait: bool,
    ) -> int:
        """The exit status."""
        from swiglu_bench import locks
        from swiglu_bench.measure.clock import DeviceLost
        from swiglu_bench.train import session
        from swiglu_bench.train.files import Folder
        from swiglu_bench.train.show import Show

        about = {
            "command": self.command, "run_id": self.run_id, "settings": settings, "machine": self.this.as_dict(),
        }  # fmt: skip
        results, lost, interrupted = session.Results(), "", False
        with ExitStack() as stack:
            folder = None
            if csv:
                folder = Folder(out or self._default_folder(), about, resume, self._warn)
                stack.enter_context(locks.folder(folder.path, self.command))
                stack.callback(folder.close)
            wandb = self._wandb(project, about, folder.path if folder else None) if project else None
            if wandb:
                stack.callback(wandb.close)
            stack.enter_context(locks.device(self.experiment.device, self.command, wait, self._say))
            self._say(self._what())
            show = stack.enter_context(
                Show(self.console, plan.experiment.steps, len(plan.contenders) * len(plan.seeds), wandb)
            )
            try:
                session.run(plan, results, folder, show.listen)
            except KeyboardInterrupt:
                interrupted = True
            except DeviceLost as error:
                lost = f"The GPU is lost to this process ({error}); what had ended by then is kept."
            show.__exit__(None, None, None)
            summaries = session.summaries(plan, results, self._about)
            if lost:
                self._warn(lost)
            self._tell(summaries, results, folder, wandb)
        if interrupted:
            self._say("Interrupted: what ran was kept; go on with --resume.", style="yellow")
            return INTERRUPTED
        return int(bool(lost) or any(one.failed for one in summaries))

    def _tell(self, summaries: list[Summary], results: Results, folder: Any, wandb: WandbRun | None) -> None:
        from swiglu_bench.train.blocks import PERMUTED
        from swiglu_bench.train.chart import draw
        from swiglu_bench.train.summary import in_order
        from swiglu_bench.train.tables import tables

        shown = {one.implementation: one for one in (*summaries, *self.skipped)}
        rows = in_order(shown, ["eager", PERMUTED, *self.names[1:]])
        for table in tables(rows):
            self.console.print(table, highlight=False)
        if folder:
            folder.summarise(rows)
            self._say(draw(folder.path, results.losses, f"{self.task}: loss over steps", self.names))
            self._say(f"Losses, summary and machine: {folder.path}")
        if wandb:
            figures = ("final_loss", "metric_mean", "step_ms", "ratio", "expected_ratio", "curve", "verdict")
            wandb.conclude({f"{name}/{one.implementation}": getattr(one, name) for one in rows for name in figures})
            if wandb.url_or_path:
                self._say(f"W&B: {wandb.url_or_path}")

    def _what(self) -> str:
        experiment, w = self.experiment, self.experiment.workload
        return (
            f"{self.task} on {self.this.device}: {experiment.data.about}; blocks {w.hidden}x{w.intermediate}, "
            f"{w.tokens} tokens a step, {experiment.steps} steps, {experiment.dtype.value}."
        )

    def _wandb(self, project: str, about: dict[str, Any], folder: Path | None) -> WandbRun:
        from swiglu_bench.writers.wandb_run import WandbRun

        name, tags = f"train {self.task} {self.this.slug}", ["train", self.task, self.this.slug]
        run = WandbRun(project=project, config=about, name=name, tags=tags, folder=folder, warn=self._warn)
        for figures in ("loss/*", "step_ms/*"):
            run.define(figures, "step")
        return run

    def _about(self, contender: Contender) -> Summary:
        return self._row(contender.name, contender.implementation.trains)

    def _skip(self, one: Implementation, reason: str) -> Summary:
        row = self._row(one.name, one.trains)
        row.status, row.reason = Status.SKIPPED, reason
        return row

    def _row(self, name: str, trains: str) -> Summary:
        from swiglu_bench.train.summary import Summary

        return Summary(
            self.run_id, self.task, self.model, name, trains, Status.OK, device=self.this.device,
            torch=self.this.torch, triton=self.this.triton, version=self.this.version, timestamp=self.started,
        )  # fmt: skip

    def _default_folder(self) -> Path:
        date, _, clock = self.started.rstrip("Z").partition("T")
        return Path("results") / self.this.slug / date / f"{clock.replace(':', '')}-train-{self.task}"

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _warn(self, text: str) -> None:
        self._say(f"Warning: {text}", style="yellow")
