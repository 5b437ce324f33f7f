"""`swiglu-bench tp`: options in, a group of ranks at work, tables out."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from swiglu_bench import request
from swiglu_bench.cases.cases import Mode, Scope, parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.cli.options import command_of
from swiglu_bench.options import HOW, JsonForm, option
from swiglu_bench.show import text
from swiglu_bench.tasks.tp.options import TpOptions

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
    ways = _ways(options.sequence_parallel)
    kinds = [Mode(text.check("--modes", part.strip(), "forward", "step")) for part in options.modes.split(",")]
    if options.out and not options.csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    request.check_wandb(options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, talks on stderr
    os.environ.setdefault("GLOG_minloglevel", "2")
    from swiglu_bench.tasks.tp.ranks import default_environment, under_torchrun

    default_environment()
    from swiglu_bench.affordable import check_work
    from swiglu_bench.cases.shapes import load_shapes
    from swiglu_bench.machine import machine
    from swiglu_bench.tasks.tp.bench import quiet as hush
    from swiglu_bench.tasks.tp.case import default_rule
    from swiglu_bench.tasks.tp.plan import Plan, cases_of
    from swiglu_bench.tasks.tp.run import TpRun, sharing, too_large, work
    from swiglu_bench.worker import forkserver
    from swiglu_bench.worker.settings import Settings, Task

    spot = under_torchrun()
    one = machine.find_device(options.device)
    if spot and one.type == "cuda":
        one = machine.find_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    elif options.device and ":" in options.device:
        raise BadInput(
            f"--device: {options.device} is one GPU; give cuda or cpu, and choose GPUs by CUDA_VISIBLE_DEVICES."
        )
    sizes = _sizes(options.gpus, one.type, spot)
    on_gpu = one.type == "cuda"
    names = options.shapes if options.shapes is not None else "llama7b" if on_gpu else "smoke"
    shapes = load_shapes(names, options.seed)
    scope = Scope.EXPERTS if shapes[0].experts else Scope.MLP
    if any(bool(shape.experts) != (scope is Scope.EXPERTS) for shape in shapes):
        raise BadInput("--shapes: mixtures of experts and dense blocks have other contenders; give one kind at a time.")
    if scope is Scope.EXPERTS:
        if options.sequence_parallel == "no":
            raise BadInput("--sequence-parallel: with experts each rank has its part of the tokens; leave it out.")
        ways = (True,)
    cases = cases_of(
        shapes,
        kinds,
        parse_dtypes(options.dtype if options.dtype is not None else "bf16" if on_gpu else "fp32"),
        parse_tokens(options.tokens) if options.tokens is not None else None,
        options.seed, sizes, True in ways,
    )  # fmt: skip
    chosen, beside, skipped = _choose(scope, options.impl, options.skip_impl, on_gpu, None if spot else options.timeout)
    run_id = machine.run_id(machine.now())
    asked = request.asked(options.impl, chosen)
    budget_s = 3.0 if options.budget is None else options.budget
    command = request.command_line()
    plan = Plan(run_id, cases, chosen, ways, budget_s, options.timeout, beside, skipped, asked, command)
    settings = Settings(Task.TIME, one, command, run_id, rule=default_rule(budget_s))
    if dry_run:
        from swiglu_bench.cli import listing

        free_bytes = machine.free_memory_bytes(one)
        rows = [
            {"ranks": size} | row
            for size in sizes
            for row in listing.planned(settings, cases, free_bytes, sharing(size, settings))
        ]
        listing.put_plan(form, "tp", rows, plan.names, free_bytes)
        return
    large = [] if spot else [too_large(cases, size, settings) for size in sizes]
    if large and all(len(found) == len(cases) for found in large):
        case, reason = next(iter(large[0].items()))
        raise BadInput(f"--shapes: {case.label} is too large: {reason[:-1]}; give smaller shapes or fewer --gpus.")
    this = machine.describe(one)
    if options.budget is None and not spot:
        check_work(this, one, work(plan, sizes, settings.rule), "--shapes", "--tokens")
    if not spot:
        forkserver.start("swiglu_bench.tasks.tp.bench", "torch.distributed.tensor.parallel", "torch._dynamo")
    about = {
        "gpus": sizes, "modes": [kind.value for kind in kinds], "sequence_parallel": options.sequence_parallel,
        "seed": options.seed, "implementations": plan.names, "budget_s": budget_s, "timeout_s": options.timeout,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_"))},
    }  # fmt: skip
    hush()
    first = spot is None or spot[0] == 0
    run = TpRun(this, settings, about, text.screen(form), options.quiet or not first)
    if first:
        run.open(options, len(cases) * len(sizes))
    status = run.join(plan, settings) if spot else run.spawn(plan, sizes, settings, options.wait)
    if form == "json" and first:
        text.put(text.as_json({"kind": "tp", **run.about, "rows": [row.row() for row in run.rows]}))
    raise typer.Exit(status)


def _ways(name: str) -> tuple[bool, ...]:
    from swiglu_bench.tasks.tp.plan import WAYS

    return WAYS[text.check("--sequence-parallel", name, *WAYS)]


def _sizes(gpus: str | None, device_type: str, spot: tuple[int, int] | None) -> list[int]:
    """Numbers of ranks; raises BadInput for more GPUs than there are."""
    import torch

    from swiglu_bench.tasks.tp.plan import parse_gpus

    asked = parse_gpus(gpus) if gpus is not None else None
    if spot:
        if asked and asked != [spot[1]]:
            raise BadInput(f"--gpus: torchrun started {spot[1]} processes; leave the option out.")
        return [spot[1]]
    there = torch.cuda.device_count()
    if device_type == "cuda" and asked and max(asked) > there:
        raise BadInput(
            f"--gpus: {max(asked)} were asked for, and there are {there} here; over several hosts, use torchrun."
        )
    return asked or [there if device_type == "cuda" else 2]


def _choose(
    scope: Scope, impl: list[str] | None, skip_impl: list[str] | None, on_gpu: bool, timeout_s: float | None
) -> tuple[tuple[Implementation, ...], tuple[Implementation, ...], dict[str, str]]:
    """Without their code: eager and the chosen implementations of the scope, and those that they are timed as
    without collectives; which of the first are left out here, and why. `timeout_s` is for loading one."""
    from swiglu_bench.cases.registry import select
    from swiglu_bench.tasks.tp.contenders import async_tp
    from swiglu_bench.tasks.tp.plan import ALONE

    load = request.loader(timeout_s)
    known = [one for one in request.catalogue(load) if scope in one.scopes]
    if scope is Scope.MLP:
        known.insert(next(number for number, one in enumerate(known) if one.name == "compile") + 1, async_tp)
    wanted = request.split(impl, "--impl")
    chosen = select(known, wanted or DEFAULT[scope], request.split(skip_impl, "--skip-impl"), load)
    chosen = [next(one for one in known if one.name == "eager"), *(one for one in chosen if one.name != "eager")]
    names = {one.name for one in chosen}
    alone = {ALONE.get(name, name) for name in names} - names
    left = {} if wanted or on_gpu else {"compile": ON_REQUEST_ON_A_CPU}
    return (
        tuple(one.declared() for one in chosen), tuple(one.declared() for one in known if one.name in alone), left,
    )  # fmt: skip


tp = command_of(TpOptions, _tp)
