"""The command `swiglu-bench train`: options in, trainings, curves and tables out."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from swiglu_bench import request
from swiglu_bench.cases.cases import Dtype, Precision, Scope, parse_dtypes, parse_precisions
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.cli.options import command_of
from swiglu_bench.options import HOW, JsonForm, TrainOptions, option
from swiglu_bench.rows.record import BASELINE
from swiglu_bench.show import text

DEFAULT = ("eager", "compile", "unsloth", "fused-auto", "fused-mlp-auto")
"""The implementations trained by default, besides those that need a package of others."""


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
    request.check_wandb(options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, logs to stderr
    device = request.find_device(options.device, options.interpret)
    if options.interpret and device.type != "cpu":
        raise BadInput("--interpret is for a CPU; a GPU runs the kernels themselves. Leave it out.")
    precision = _precision(options)
    chosen = chosen_implementations(options)
    from swiglu_bench.tasks.train import TrainingRun  # after Triton was told to interpret

    dtype = _dtype("bf16" if precision else options.dtype, device.type)
    run = TrainingRun(options, device, chosen, precision, dtype, request.command_line())
    if dry_run:
        from swiglu_bench.cli import listing
        from swiglu_bench.machine.machine import free_memory_bytes

        free_bytes = free_memory_bytes(device)
        listing.put_plan(form, "train", [run.plan(free_bytes)], [row.implementation for row in run.rows], free_bytes)
        return
    status = run.perform(text.screen(form), request.asked(options.impl, chosen))
    if form == "json":
        text.put(text.as_json({"kind": "training", **run.about, "rows": [row.row() for row in run.rows]}))
    raise typer.Exit(status)


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
