"""The command `swiglu-bench train`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from swiglu_bench import request
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cli.options import command_of
from swiglu_bench.options import HOW, JsonForm, option
from swiglu_bench.rows import text
from swiglu_bench.tasks.train.options import TrainOptions


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
    if options.resume and not options.out:
        raise BadInput("--resume needs the folder of the run to continue; give it as --out FOLDER.")
    request.check_wandb(options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, logs to stderr
    device = request.find_device(options.device, options.interpret)
    if options.interpret and device.type != "cpu":
        raise BadInput("--interpret is for a CPU; a GPU runs the kernels themselves. Leave it out.")
    from swiglu_bench.tasks.train.run import TrainingRun  # after Triton was told to interpret

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


train = command_of(TrainOptions, _train)
