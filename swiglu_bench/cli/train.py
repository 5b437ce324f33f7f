"""`swiglu-bench train`: options in, models trained, two tables out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from swiglu_bench.cli.options import (
    HOW,
    OUTPUT,
    WHAT,
    Device,
    Impl,
    JsonForm,
    LogWandb,
    Out,
    SkipImpl,
    Wait,
    WandbProject,
)
from swiglu_bench.rows import text as formats
from swiglu_bench.spec.cases import Dtype, parse_dtypes
from swiglu_bench.spec.errors import BadInput, did_you_mean
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.sweep import request

DEFAULT = (
    "eager", "compile", "liger", "unsloth", "fused", "fused-dw-torch", "fused-dw-triton", "fused-auto",
    "fused-mlp-auto",
)  # fmt: skip
"""Trained unless told otherwise, with all that need a third party's package."""


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
    form: JsonForm = "table",
    log_wandb: LogWandb = False,
    wandb_project: WandbProject = "swiglu-bench",
) -> None:  # fmt: skip
    """Train the same model with each implementation: whether it learns the same, and whether it is faster.

    All begin with the same weights and see the same batches. Curves are compared with what other seeds, and sums in
    another order, make of eager's; steps are timed in interleaved rounds afterwards. Exits 1 if one fails or differs.

    Example: swiglu-bench train --task llama --steps 40 --impl 'eager,compile,liger,fused-mlp-auto'
    """
    formats.check("--format", form, "table", "json")
    if epochs is not None and steps is not None:
        raise BadInput("--epochs and --steps were given together; leave one of them out.")
    if out and not csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    if resume and not out:
        raise BadInput("--resume needs the folder of the run to go on with; give it as --out FOLDER.")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, talks on stderr
    from swiglu_bench.machine import machine

    one = machine.find_device(device)
    if interpret:
        if one.type != "cpu":
            raise BadInput("--interpret is for a CPU; a GPU runs the kernels themselves. Leave it out.")
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from swiglu_bench.train import amdahl, workload
    from swiglu_bench.train.model import experiment as prepare
    from swiglu_bench.train.run import TrainRun

    if task not in workload.TASKS:
        raise BadInput(f"--task: {task!r} is not a task; {did_you_mean(task, workload.TASKS)}")
    chosen = _choose(impl, skip_impl)
    name = model or workload.usual(task, one.type == "cuda")
    experiment = prepare(workload.load(task, name), data, one, _dtype(dtype, one.type), epochs, steps)
    ratios = amdahl.from_run(step_run, experiment.case()) if step_run else None
    this = machine.describe(one)
    settings = {
        "task": task, "workload": experiment.workload.model_dump(), "data": experiment.data.about,
        "steps": experiment.steps, "dtype": experiment.dtype.value, "seed": seed, "seeds": seeds,
        "interpret": interpret, "budget_s": budget, "step_run": step_run, "checkpoint_every": checkpoint_every,
    }  # fmt: skip
    run = TrainRun(experiment, chosen, this, task, name, interpret, formats.screen(form))
    plan = run.plan(range(seed, seed + seeds), budget, ratios, checkpoint_every)
    status = run.go(plan, settings, csv, out, resume, wandb_project if log_wandb else None, wait)
    if form == "json":
        formats.put(formats.as_json({"kind": "training", **run.about, "rows": [row.row() for row in run.rows]}))
    raise typer.Exit(status)


def _dtype(text: str | None, device_type: str) -> Dtype:
    if text is None:
        return Dtype.BFLOAT16 if device_type == "cuda" else Dtype.FLOAT32
    found = parse_dtypes(text)
    if found not in ([Dtype.BFLOAT16], [Dtype.FLOAT32]):
        raise BadInput(f"--dtype: {text!r} is not one that train takes; give bf16 or fp32.")
    return found[0]


def _choose(impl: list[str] | None, skip_impl: list[str] | None) -> list[Implementation]:
    """The chosen implementations with eager before them, which every curve is compared with."""
    from swiglu_bench.spec.registry import load, select

    known = request.catalogue(load)
    usual = [one.name for one in known if one.name in DEFAULT or (not one.on_request and (one.package or one.address))]
    chosen = select(known, request.split(impl) or usual, request.split(skip_impl))
    eager = next(one for one in known if one.name == "eager")
    return [eager, *(one for one in chosen if one.name != "eager")]
