"""`swiglu-bench tp`: options in, a group of ranks at work, tables out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiglu_bench import request
from swiglu_bench.cases.cases import Mode, Scope, parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.cli.options import command_of
from swiglu_bench.options import HOW, JsonForm, TpOptions, option
from swiglu_bench.show import text

if TYPE_CHECKING:
    import torch

    from swiglu_bench.machine.machine import Machine
    from swiglu_bench.tasks.tp import SplitCase
    from swiglu_bench.worker.settings import Settings

DEFAULT = {
    Scope.MLP: ("eager", "compile", "compile-async-tp", "liger", "fused-auto", "fused-mlp-auto"),
    Scope.EXPERTS: ("eager", "grouped", "liger-experts", "fused-experts"),
}
"""Take part unless told otherwise."""
ON_REQUEST_ON_A_CPU = "On a CPU, compiling takes longer than everything else; --impl selects it."


def _tp(
    options: TpOptions,
    dry_run: Annotated[bool, option(HOW, "Print the cases and the memory they need, and stop.", "--dry-run")] = False,
    form: JsonForm = "table",
) -> None:
    """Time the MLP split over several GPUs: tensor parallelism, or expert parallelism, with its collectives.

    Gate and up are split by rows, down by columns. Each rank has its own experts, and tokens are sent to them. Output
    and every gradient are checked against fp64 on all ranks before anything is timed. It starts a process for each GPU
    itself; under torchrun, which may span several hosts, it is one of the processes. Exits 1 if a row is incorrect or
    an error.

    Example: swiglu-bench tp --gpus 4 --shapes llama7b,llama3-70b --tokens 1k,4k,16k
    """
    text.check("--format", form, "table", "json")
    request.check_wandb(options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, talks on stderr
    os.environ.setdefault("GLOG_minloglevel", "2")
    from swiglu_bench.worker.ranks import default_environment, under_torchrun

    default_environment()
    from rich.console import Console

    from swiglu_bench.machine import machine
    from swiglu_bench.tasks.tp import run
    from swiglu_bench.tasks.tp.court import quiet as hush
    from swiglu_bench.worker import forkserver
    from swiglu_bench.worker.places import Work
    from swiglu_bench.worker.settings import Settings, Task

    spot = under_torchrun()
    device, sizes = _where(options, spot)
    cases = _cases(options, device.type == "cuda", sizes)
    chosen, left = _choose(options, cases[0].scope, device.type == "cuda", None if spot else options.timeout)
    rule, run_id = run.default_rule(3.0 if options.budget is None else options.budget), machine.run_id(machine.now())
    settings = Settings(Task.TIME, device, request.command_line(), run_id, rule=rule)
    names = [known.name for known in chosen]
    if dry_run:
        _put_plan(form, cases, settings, names)
        return
    if not spot:
        able = [known for known in chosen if known.name not in left]
        _check_affordable(options, cases, able, settings, machine.describe(device))
    about = {
        "gpus": sizes, "modes": list(dict.fromkeys(case.mode.value for case in cases)),
        "sequence_parallel": options.sequence_parallel, "seed": options.seed, "implementations": names,
        "budget_s": rule.budget_s, "timeout_s": options.timeout,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_"))},
    }  # fmt: skip
    if not spot:
        forkserver.start("swiglu_bench.tasks.tp.run", "torch.distributed.tensor.parallel", "torch._dynamo")
    hush()
    console, first = text.screen(form), spot is None or spot[0] == 0
    if not first:  # rank 0 takes the rows
        console, options = Console(quiet=True), dataclasses.replace(options, out=None, csv=False, log_wandb=False)
    kind = run.UnderTorchrun if spot else run.RankGroups
    places = kind(device, cases, left, lambda said: console.print(said, markup=False, highlight=False, soft_wrap=True))
    work = Work(run.tp, chosen, settings, options.timeout, Path(), options.wait)
    status, written, rows = run.perform(
        options, work, cases, places, request.asked(options.impl, chosen), about, console
    )
    if form == "json" and first:
        text.put(text.as_json({"kind": "tp", **written, "rows": [row.row() for row in rows]}))
    raise typer.Exit(status)


def _where(options: TpOptions, spot: tuple[int, int] | None) -> tuple[torch.device, list[int]]:
    """The device, and the numbers of ranks; raises BadInput for more GPUs than there are."""
    import torch

    from swiglu_bench.machine import machine
    from swiglu_bench.tasks.tp import parse_gpus

    device = machine.find_device(options.device)
    asked, there = parse_gpus(options.gpus) if options.gpus is not None else [], torch.cuda.device_count()
    if spot:
        if asked and asked != [spot[1]]:
            raise BadInput(f"--gpus: torchrun started {spot[1]} processes; leave the option out.")
        if device.type == "cuda":
            device = machine.find_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        return device, [spot[1]]
    if options.device and ":" in options.device:
        raise BadInput(
            f"--device: {options.device} is one GPU; give cuda or cpu, and choose GPUs by CUDA_VISIBLE_DEVICES."
        )
    if device.type == "cuda" and asked and max(asked) > there:
        raise BadInput(
            f"--gpus: {max(asked)} were asked for, and there are {there} here; over several hosts, use torchrun."
        )
    return device, asked or [there if device.type == "cuda" else 2]


def _cases(options: TpOptions, on_gpu: bool, sizes: list[int]) -> list[SplitCase]:
    """What is measured with each number of ranks. Raises BadInput."""
    from swiglu_bench.cases.shapes import load_shapes
    from swiglu_bench.tasks.tp import WAYS, cases_of

    ways = WAYS[text.check("--sequence-parallel", options.sequence_parallel, *WAYS)]
    modes = [Mode(text.check("--modes", part.strip(), "forward", "step")) for part in options.modes.split(",")]
    names = options.shapes if options.shapes is not None else "llama7b" if on_gpu else "smoke"
    shapes = load_shapes(names, options.seed)
    if len({bool(shape.experts) for shape in shapes}) > 1:
        raise BadInput("--shapes: mixtures of experts and dense blocks have other contenders; give one kind at a time.")
    if shapes[0].experts:
        if options.sequence_parallel == "no":
            raise BadInput("--sequence-parallel: with experts each rank has its part of the tokens; leave it out.")
        ways = (True,)
    dtypes = parse_dtypes(options.dtype if options.dtype is not None else "bf16" if on_gpu else "fp32")
    tokens = parse_tokens(options.tokens) if options.tokens is not None else None
    return cases_of(shapes, modes, dtypes, tokens, options.seed, sizes, ways)


def _put_plan(form: str, cases: Sequence[SplitCase], settings: Settings, names: list[str]) -> None:
    """Print the cases, and whether the device's memory holds them."""
    from swiglu_bench.cli import listing
    from swiglu_bench.machine import machine
    from swiglu_bench.tasks.tp.run import sharing

    free_bytes = machine.free_memory_bytes(settings.device)
    rows = [
        {"ranks": case.ranks} | row
        for case in cases
        for row in listing.planned(settings, [case], free_bytes, sharing(case, settings))
    ]
    listing.put_plan(form, "tp", rows, names, free_bytes)


def _check_affordable(
    options: TpOptions, cases: Sequence[SplitCase], able: Sequence[Implementation], settings: Settings, this: Machine
) -> None:
    """Raise BadInput where the memory holds no case, or a CPU would take too long."""
    from swiglu_bench.affordable import check_work
    from swiglu_bench.tasks.tp.run import operations, too_large

    large = too_large(cases, settings)
    if len(large) == len(cases):
        case, reason = next(iter(large.items()))
        raise BadInput(f"--shapes: {case.label} is too large: {reason[:-1]}; give smaller shapes or fewer --gpus.")
    if options.budget is None:
        check_work(this, settings.device, operations(cases, able, settings.rule), "--shapes", "--tokens")


def _choose(
    options: TpOptions, scope: Scope, on_gpu: bool, timeout_s: float | None
) -> tuple[list[Implementation], dict[str, str]]:
    """Without their code, eager and the chosen implementations of the scope; which of them are left out here, and why.

    `timeout_s` is for loading one.
    """
    from swiglu_bench.cases.registry import select
    from swiglu_bench.contenders.split import async_tp

    load = request.loader(timeout_s)
    known = [each for each in request.catalogue(load) if scope in each.scopes]
    if scope is Scope.MLP:
        known.insert(next(number for number, each in enumerate(known) if each.name == "compile") + 1, async_tp)
    wanted = request.split(options.impl, "--impl")
    chosen = select(known, wanted or DEFAULT[scope], request.split(options.skip_impl, "--skip-impl"), load)
    chosen = [next(each for each in known if each.name == "eager"), *(each for each in chosen if each.name != "eager")]
    left = {} if wanted or on_gpu else {"compile": ON_REQUEST_ON_A_CPU}
    return [each.declared() for each in chosen], left


tp = command_of(TpOptions, _tp)
