"""`swiglu-bench tp`: options in, a group of ranks at work, tables out."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from swiglu_bench.rows import text as formats
from swiglu_bench.spec.cases import Mode, parse_dtypes, parse_tokens
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.sweep import request
from swiglu_bench.sweep.options import (
    HOW,
    WHAT,
    Csv,
    Device,
    DtypeOption,
    JsonForm,
    LogWandb,
    Out,
    Quiet,
    Seed,
    Shapes,
    SkipImpl,
    Tokens,
    Wait,
    WandbProject,
)

DEFAULT = ("eager", "compile", "compile-async-tp", "liger", "fused-auto", "fused-mlp-auto")
"""Take part unless told otherwise."""
ON_REQUEST_ON_A_CPU = "On a CPU compiling takes longer than all the rest; --impl names it."


def tp(
    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs in a group, as 4, or several in turn, as 1,2,4; on a CPU processes. Under torchrun its own. "
            "\\[default: all GPUs; 2 processes on a CPU]",
            rich_help_panel=WHAT, show_default=False,
        ),
    ] = None,
    shapes: Shapes = None,
    tokens: Tokens = None,
    modes: Annotated[str, typer.Option(help="forward, step, comma-separated.", rich_help_panel=WHAT)] = "forward,step",
    dtype: DtypeOption = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            help="Implementations of the scope mlp: names, globs, or path/to/file.py:name (which runs that file's "
            "code); comma-separated or repeated. eager is always there. "
            "\\[default: eager, compile, compile-async-tp, liger, fused-auto, fused-mlp-auto]",
            rich_help_panel=WHAT, show_default=False,
        ),
    ] = None,
    skip_impl: SkipImpl = None,
    sequence_parallel: Annotated[
        str,
        typer.Option(
            help="no (every rank has all tokens; all-reduce), yes (each has its part of them; all-gather and "
            "reduce-scatter) or both.",
            rich_help_panel=WHAT,
        ),
    ] = "both",
    seed: Seed = 0,
    device: Device = None,
    budget: Annotated[
        float, typer.Option(help="Seconds for a case's rounds, of which there are at least ten.", min=0.01,
                            rich_help_panel=HOW)
    ] = 3.0,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds without progress, compiling included, after which a group of ranks is ended.",
                     min=1.0, rich_help_panel=HOW),
    ] = 180.0,
    wait: Wait = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cases and the memory they need, and stop.", rich_help_panel=HOW)
    ] = False,
    out: Out = None,
    csv: Csv = True,
    form: JsonForm = "table",
    quiet: Quiet = False,
    log_wandb: LogWandb = False,
    wandb_project: WandbProject = "swiglu-bench",
) -> None:  # fmt: skip
    """Time the MLP split over several GPUs: tensor parallelism, with the collectives it needs.

    Gate and up are split by rows, down by columns. Output and every gradient are checked against fp64 on all ranks
    before anything is timed. It starts a process for each GPU itself; under torchrun, also over several hosts, it is
    one of the processes. Exits 1 if a row is incorrect or an error.

    Example: swiglu-bench tp --gpus 4 --shapes llama7b,llama3-70b --tokens 1k,4k,16k
    """
    formats.check("--format", form, "table", "json")
    ways = _ways(sequence_parallel)
    kinds = [Mode(request.choice("--modes", part.strip(), ["forward", "step"])) for part in modes.split(",")]
    if out and not csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, talks on stderr
    os.environ.setdefault("GLOG_minloglevel", "2")
    from swiglu_bench.tp.ranks import default_environment, under_torchrun

    default_environment()
    from swiglu_bench.machine import machine
    from swiglu_bench.processes import forkserver
    from swiglu_bench.session.settings import Settings, Task
    from swiglu_bench.spec.shapes import dense_shapes
    from swiglu_bench.tp.bench import quiet as hush
    from swiglu_bench.tp.case import default_rule
    from swiglu_bench.tp.plan import Plan, cases_of
    from swiglu_bench.tp.run import TpRun, sharing, too_large

    spot = under_torchrun()
    one = machine.find_device(device)
    if spot and one.type == "cuda":
        one = machine.find_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    elif device and ":" in device:
        raise BadInput(f"--device: {device} is one GPU; give cuda or cpu, and choose GPUs by CUDA_VISIBLE_DEVICES.")
    sizes = _sizes(gpus, one.type, spot)
    on_gpu = one.type == "cuda"
    cases = cases_of(
        dense_shapes(shapes if shapes is not None else "llama7b" if on_gpu else "smoke", "tp"),
        kinds,
        parse_dtypes(dtype if dtype is not None else "bf16" if on_gpu else "fp32"),
        parse_tokens(tokens) if tokens is not None else None,
        seed, sizes, True in ways,
    )  # fmt: skip
    chosen, beside, skipped = _choose(impl, skip_impl, on_gpu, None if spot else timeout)
    run_id = machine.run_id(machine.now())
    plan = Plan(run_id, cases, chosen, ways, budget, timeout, beside, skipped)
    settings = Settings(Task.TIME, one, request.command_line(), run_id, rule=default_rule(budget))
    if dry_run:
        from swiglu_bench.cli import listing

        for size in sizes:
            text, free_bytes = f"{size} ranks", machine.free_memory_bytes(one)
            planned = listing.planned(settings, cases, free_bytes, sharing(size, settings))
            listed = listing.dry_run(planned, [one.name for one in chosen], free_bytes)
            formats.screen(form).print(text, *listed)
        return
    large = [] if spot else [too_large(cases, size, settings) for size in sizes]
    if large and all(len(found) == len(cases) for found in large):
        case, reason = next(iter(large[0].items()))
        raise BadInput(f"--shapes: {case.label} is too large: {reason[:-1]}; give smaller shapes or fewer --gpus.")
    if not spot:
        forkserver.start("swiglu_bench.tp.bench", "torch.distributed.tensor.parallel", "torch._dynamo")
    about = {
        "gpus": sizes, "modes": [kind.value for kind in kinds], "sequence_parallel": sequence_parallel, "seed": seed,
        "implementations": plan.names, "budget_s": budget, "timeout_s": timeout,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_"))},
    }  # fmt: skip
    hush()
    first = spot is None or spot[0] == 0
    run = TpRun(machine.describe(one), settings, about, formats.screen(form), quiet or not first)
    run.open(csv and first, out, wandb_project if log_wandb and first else None, len(cases) * len(sizes))
    status = run.join(plan, settings) if spot else run.spawn(plan, sizes, settings, wait)
    if form == "json" and first:
        formats.put(formats.as_json({"kind": "tp", **run.about, "rows": [row.row() for row in run.rows]}))
    raise typer.Exit(status)


def _ways(text: str) -> tuple[bool, ...]:
    from swiglu_bench.tp.plan import WAYS

    return WAYS[request.choice("--sequence-parallel", text, list(WAYS))]


def _sizes(gpus: str | None, device_type: str, spot: tuple[int, int] | None) -> list[int]:
    """Numbers of ranks; raises BadInput for more GPUs than there are."""
    import torch

    from swiglu_bench.tp.plan import parse_gpus

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
    impl: list[str] | None, skip_impl: list[str] | None, on_gpu: bool, timeout_s: float | None
) -> tuple[tuple[Implementation, ...], tuple[Implementation, ...], dict[str, str]]:
    """Without their code: eager and the chosen implementations of the whole MLP, and those that they are timed as
    without collectives; which of the first are left out here, and why. `timeout_s` is for loading one."""
    from swiglu_bench.spec.cases import Scope
    from swiglu_bench.spec.registry import select
    from swiglu_bench.tp.contenders import async_tp
    from swiglu_bench.tp.plan import ALONE

    load = request.loader(timeout_s)
    known = [one for one in request.catalogue(load) if Scope.MLP in one.scopes]
    place = next(number for number, one in enumerate(known) if one.name == "compile") + 1
    known.insert(place, async_tp)
    wanted = request.split(impl)
    chosen = select(known, wanted or DEFAULT, request.split(skip_impl), load)
    chosen = [next(one for one in known if one.name == "eager"), *(one for one in chosen if one.name != "eager")]
    names = {one.name for one in chosen}
    alone = {ALONE.get(name, name) for name in names} - names
    left = {} if wanted or on_gpu else {"compile": ON_REQUEST_ON_A_CPU}
    return (
        tuple(one.declared() for one in chosen), tuple(one.declared() for one in known if one.name in alone), left,
    )  # fmt: skip
