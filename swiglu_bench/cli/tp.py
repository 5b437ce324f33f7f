"""`swiglu-bench tp`: options in, a group of ranks at work, tables out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from swiglu_bench import request
from swiglu_bench.cases.cases import Mode, Scope, parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.options import (
    HOW,
    WHAT,
    Csv,
    Device,
    DtypeOption,
    JsonForm,
    Out,
    Quiet,
    Seed,
    Shapes,
    SkipImpl,
    Texts,
    Tokens,
    Wait,
    WandbOptions,
    command_of,
    option,
)
from swiglu_bench.show import text

if TYPE_CHECKING:
    from swiglu_bench.machine.machine import Machine
    from swiglu_bench.tasks.tp.plan import SplitPlan
    from swiglu_bench.worker.policy import Settings

DEFAULT = {
    Scope.MLP: ("eager", "compile", "compile-async-tp", "liger", "fused-auto", "fused-mlp-auto"),
    Scope.EXPERTS: ("eager", "grouped", "liger-experts", "fused-experts"),
}
"""Take part unless told otherwise."""
ON_REQUEST_ON_A_CPU = "On a CPU, compiling takes longer than everything else; --impl selects it."


@dataclass(frozen=True, kw_only=True)
class TpOptions(WandbOptions):
    """What is split over how many GPUs, how it is timed, and where results go."""

    gpus: Annotated[
        str | None,
        option(WHAT, "GPUs in a group, such as 4, or several in turn, such as 1,2,4; on a CPU, processes. "
               "Under torchrun, the group's own. "
               "\\[default: all GPUs; 2 processes on a CPU]", show_default=False),
    ] = None  # fmt: skip
    shapes: Shapes = None
    tokens: Tokens = None
    modes: Annotated[str, option(WHAT, "forward, step, comma-separated.")] = "forward,step"
    dtype: DtypeOption = None
    impl: Annotated[
        Texts,
        option(WHAT, "Implementations of the scope mlp, or experts: names, globs, or path/to/file.py:name (which runs "
               "that file's code); comma-separated or repeated. eager is always included. \\[default: eager, compile, "
               "compile-async-tp, liger, fused-auto, fused-mlp-auto; for experts eager, grouped, liger-experts, "
               "fused-experts]", show_default=False),
    ] = None  # fmt: skip
    skip_impl: SkipImpl = None
    sequence_parallel: Annotated[
        str,
        option(WHAT, "no (every rank has all tokens; all-reduce), yes (each has its part of them; all-gather and "
               "reduce-scatter) or both. Experts only have yes, with all-to-all."),
    ] = "both"  # fmt: skip
    seed: Seed = 0
    device: Device = None
    budget: Annotated[
        float | None,
        option(HOW, "Seconds for a case's rounds, of which there are at least ten; if it is given, cases that take "
               "very long on this machine are timed too. \\[default: 3]", min=0.01),
    ] = None  # fmt: skip
    timeout: Annotated[
        float,
        option(HOW, "Seconds without progress, compiling included, after which a group of ranks is ended.", min=1.0),
    ] = 180.0
    wait: Wait = True
    out: Out = None
    csv: Csv = True
    quiet: Quiet = False


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
    modes = [Mode(text.check("--modes", part.strip(), "forward", "step")) for part in options.modes.split(",")]
    if options.out and not options.csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    request.check_wandb(options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, talks on stderr
    os.environ.setdefault("GLOG_minloglevel", "2")
    from swiglu_bench.worker.ranks import default_environment, under_torchrun

    default_environment()
    from swiglu_bench.machine import machine
    from swiglu_bench.tasks.tp.court import quiet as hush
    from swiglu_bench.tasks.tp.run import TpRun
    from swiglu_bench.worker import forkserver

    spot = under_torchrun()
    plan, settings, sizes = _asked(options, ways, modes, spot)
    if dry_run:
        _put_plan(form, plan, settings, sizes)
        return
    this = machine.describe(settings.device)
    if not spot:
        _check_affordable(options, plan, settings, sizes, this)
    about = {
        "gpus": sizes, "modes": [mode.value for mode in modes], "sequence_parallel": options.sequence_parallel,
        "seed": options.seed, "implementations": plan.names, "budget_s": plan.budget_s, "timeout_s": options.timeout,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_"))},
    }  # fmt: skip
    if not spot:
        forkserver.start("swiglu_bench.tasks.tp.run", "torch.distributed.tensor.parallel", "torch._dynamo")
    hush()
    first = spot is None or spot[0] == 0
    run = TpRun(this, settings, about, text.screen(form), options.quiet or not first)
    if first:
        run.begin(options, options.csv, options.out, len(plan.cases) * len(sizes))
    status = run.join(plan, settings, *spot) if spot else run.spawn(plan, sizes, settings, options.wait)
    if form == "json" and first:
        text.put(text.as_json({"kind": "tp", **run.about, "rows": [row.row() for row in run.rows]}))
    raise typer.Exit(status)


def _asked(
    options: TpOptions, ways: tuple[bool, ...], modes: list[Mode], spot: tuple[int, int] | None
) -> tuple[SplitPlan, Settings, list[int]]:
    """What is measured, how, and with which numbers of ranks. Raises BadInput."""
    from swiglu_bench.cases.shapes import load_shapes
    from swiglu_bench.machine import machine
    from swiglu_bench.tasks.tp.plan import SplitPlan, cases_of
    from swiglu_bench.tasks.tp.run import default_rule
    from swiglu_bench.worker.policy import Settings, Task

    device = machine.find_device(options.device)
    if spot and device.type == "cuda":
        device = machine.find_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    elif options.device and ":" in options.device:
        raise BadInput(
            f"--device: {options.device} is one GPU; give cuda or cpu, and choose GPUs by CUDA_VISIBLE_DEVICES."
        )
    sizes = _sizes(options.gpus, device.type, spot)
    on_gpu = device.type == "cuda"
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
        modes,
        parse_dtypes(options.dtype if options.dtype is not None else "bf16" if on_gpu else "fp32"),
        parse_tokens(options.tokens) if options.tokens is not None else None,
        options.seed, sizes, True in ways,
    )  # fmt: skip
    chosen, beside, skipped = _choose(scope, options.impl, options.skip_impl, on_gpu, None if spot else options.timeout)
    run_id, command = machine.run_id(machine.now()), request.command_line()
    budget_s = 3.0 if options.budget is None else options.budget
    asked = request.asked(options.impl, chosen)
    plan = SplitPlan(run_id, cases, chosen, ways, budget_s, options.timeout, beside, skipped, asked, command)
    return plan, Settings(Task.TIME, device, command, run_id, rule=default_rule(budget_s)), sizes


def _put_plan(form: str, plan: SplitPlan, settings: Settings, sizes: list[int]) -> None:
    """Print the cases, and whether the device's memory holds them."""
    from swiglu_bench.cli import listing
    from swiglu_bench.machine import machine
    from swiglu_bench.tasks.tp.run import sharing

    free_bytes = machine.free_memory_bytes(settings.device)
    rows = [
        {"ranks": size} | row
        for size in sizes
        for row in listing.planned(settings, plan.cases, free_bytes, sharing(size, settings))
    ]
    listing.put_plan(form, "tp", rows, plan.names, free_bytes)


def _check_affordable(options: TpOptions, plan: SplitPlan, settings: Settings, sizes: list[int], this: Machine) -> None:
    """Raise BadInput where the memory holds no case, or a CPU would take too long."""
    from swiglu_bench.tasks.tp.run import too_large, work
    from swiglu_bench.worker.policy import check_work

    large = [too_large(plan.cases, size, settings) for size in sizes]
    if all(len(found) == len(plan.cases) for found in large):
        case, reason = next(iter(large[0].items()))
        raise BadInput(f"--shapes: {case.label} is too large: {reason[:-1]}; give smaller shapes or fewer --gpus.")
    if options.budget is None:
        check_work(this, settings.device, work(plan, sizes, settings.rule), "--shapes", "--tokens")


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
    from swiglu_bench.contenders.split import async_tp
    from swiglu_bench.tasks.tp.plan import ALONE

    load = request.loader(timeout_s)
    known = [each for each in request.catalogue(load) if scope in each.scopes]
    if scope is Scope.MLP:
        known.insert(next(number for number, each in enumerate(known) if each.name == "compile") + 1, async_tp)
    wanted = request.split(impl, "--impl")
    chosen = select(known, wanted or DEFAULT[scope], request.split(skip_impl, "--skip-impl"), load)
    chosen = [next(each for each in known if each.name == "eager"), *(each for each in chosen if each.name != "eager")]
    names = {each.name for each in chosen}
    alone = {ALONE.get(name, name) for name in names} - names
    left = {} if wanted or on_gpu else {"compile": ON_REQUEST_ON_A_CPU}
    return (
        tuple(each.declared() for each in chosen), tuple(each.declared() for each in known if each.name in alone), left,
    )  # fmt: skip


tp = command_of(TpOptions, _tp)
