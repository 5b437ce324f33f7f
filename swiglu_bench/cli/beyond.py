"""The commands that go beyond one layer on one GPU: `train` a whole model, and `tp`, a layer on several GPUs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from swiglu_bench import request
from swiglu_bench.cases.cases import Dtype, Mode, Precision, Scope, parse_dtypes, parse_precisions, parse_tokens
from swiglu_bench.cases.errors import BadInput, one_of
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.cases.registry import load, select
from swiglu_bench.cases.shapes import load_shapes, model_file
from swiglu_bench.cli import listing
from swiglu_bench.contenders import ALLTOALL, DEEPEP
from swiglu_bench.machine import machine, system
from swiglu_bench.options import HOW, TASKS, JsonForm, TpOptions, TrainOptions, command_of, option
from swiglu_bench.rows.record import BASELINE, Record
from swiglu_bench.show import text

if TYPE_CHECKING:
    import torch

    from swiglu_bench.tasks.tp import SplitCase

TRAINED = ("eager", "compile", "unsloth", "fused-auto", "fused-mlp-auto")
"""The implementations trained by default, besides those that need a package of others."""
SPLIT = {
    Scope.MLP: ("eager", "compile", "compile-async-tp", "liger", "fused-auto", "fused-mlp-auto"),
    Scope.EXPERTS: ("grouped", "grouped-compile", ALLTOALL, DEEPEP, "liger-experts", "fused-experts"),
}
"""The implementations split by default."""
WAYS = {"no": (False,), "yes": (True,), "both": (False, True)}
"""Whether tokens are split over the ranks, too."""
ON_REQUEST_ON_A_CPU = "On a CPU, compiling takes longer than everything else; --impl selects it."


def _train(
    options: TrainOptions,
    dry_run: Annotated[bool, option(HOW, "Print the model and the memory it needs, and stop.", "--dry-run")] = False,
    form: JsonForm = "table",
) -> None:
    """Train the same model with each implementation: does it learn the same, and is it faster?

    All start with the same weights and see the same batches. The difference of a loss curve from eager's is compared
    with what another seed and another order of summation do to eager's own. Then training steps are timed in
    interleaved rounds. A curve that differs counts as incorrect.

    Example: swiglu-bench train --task llama --steps 40 --impl 'eager,compile,liger,fused-mlp-auto'
    """
    _begin(options)
    if options.epochs is not None and options.steps is not None:
        raise BadInput("--epochs and --steps were given together; leave one of them out.")
    one_of("--task", options.task, *TASKS)
    if options.model is not None:
        model_file(options.model)
    if options.data is not None and options.task == "digits":
        raise BadInput("--data is for mnist and llama; the task digits brings its own.")
    if options.data is not None and not os.path.exists(options.data):
        raise BadInput(f"--data: there is no {str(options.data)!r}; give a text file, or for mnist a folder.")
    kind = request.device_type(options.device)
    if options.interpret and kind != "cpu":
        raise BadInput("--interpret is for a CPU; a GPU runs the kernels themselves. Leave it out.")
    precision, dtype = _arithmetic(options, kind)
    device = request.find_device(options.device, options.interpret)
    known = request.catalogue(load)
    able = [each for each in known if not each.on_request and precision in each.precisions and Scope.MLP in each.scopes]
    usual = {each.name for each in able if precision or each.name in TRAINED or each.package or each.address}
    chosen = _after_baseline(options, known, usual, load)
    from swiglu_bench.tasks.train import TrainingRun  # after Triton was told to interpret

    run = TrainingRun(options, device, chosen, precision, dtype, request.command_line())
    if dry_run:
        free_bytes = machine.free_memory_bytes(device)
        listing.put_plan(form, "train", [run.plan(free_bytes)], [row.implementation for row in run.rows], free_bytes)
        return
    status = run.perform(text.screen(form), request.asked(options.impl, chosen))
    _end(form, "training", status, run.about, run.rows)


def _arithmetic(options: TrainOptions, device_type: str) -> tuple[Precision, Dtype]:
    """How the operands of the blocks' products are quantised, and the dtype of products. Raises BadInput."""
    dtypes = parse_dtypes(options.dtype if options.dtype is not None else "bf16" if device_type == "cuda" else "fp32")
    if options.precision is not None:
        found = parse_precisions(options.precision)
        if len(found) > 1:
            many = f"{options.precision!r} names {len(found)}"
            raise BadInput(f"--precision: train takes one, and {many}; leave others out.")
        if found[0]:
            if options.dtype is not None and dtypes != [Dtype.BFLOAT16]:
                other = f"--dtype is {options.dtype}; leave --dtype out"
                raise BadInput(f"--precision quantises bf16 operands, and {other}.")
            return found[0], Dtype.BFLOAT16
    if dtypes not in ([Dtype.BFLOAT16], [Dtype.FLOAT32]):
        raise BadInput(f"--dtype: {options.dtype!r} is not one that train takes; give bf16 or fp32.")
    return Precision.UNQUANTISED, dtypes[0]


def _tp(
    options: TpOptions,
    dry_run: Annotated[bool, option(HOW, "Print the cases and the memory they need, and stop.", "--dry-run")] = False,
    form: JsonForm = "table",
) -> None:
    """Time the MLP split over several GPUs: tensor parallelism, or expert parallelism, with its collectives.

    For a dense block, gate and up are split by rows and down by columns. For a mixture, each rank has some of the
    experts, and tokens are sent to them. Output
    and every gradient are checked against fp64 on all ranks before anything is timed. It starts a process for each GPU
    itself; under torchrun, which may span several hosts, it is one of the processes.

    Example: swiglu-bench tp --gpus 4 --shapes llama7b,llama3-70b --tokens 1k,4k,16k
    """
    _begin(options)
    ways, modes = _ways(options)
    os.environ.setdefault("GLOG_minloglevel", "2")
    from swiglu_bench.worker.ranks import default_environment, under_torchrun

    default_environment()
    from swiglu_bench.show.console import Screen
    from swiglu_bench.tasks.tp import run
    from swiglu_bench.tasks.tp.court import quiet as hush
    from swiglu_bench.worker import forkserver
    from swiglu_bench.worker.places import Work
    from swiglu_bench.worker.policy import Settings, Task

    spot = under_torchrun()
    device, sizes = _where(options, spot)
    on_gpu = device.type == "cuda"
    cases = _cases(options, on_gpu, sizes, modes, ways)
    base = BASELINE if cases[0].scope is Scope.MLP else "grouped-compile" if on_gpu else "grouped"
    chosen = _split(options, cases[0].scope, base, None if spot else options.timeout)
    left = {} if options.impl or on_gpu else dict.fromkeys(("compile", "grouped-compile"), ON_REQUEST_ON_A_CPU)
    rule, run_id = run.default_rule(3.0 if options.budget is None else options.budget), machine.run_id(machine.now())
    settings = Settings(Task.TIME, device, request.command_line(), run_id, chosen[0].name, rule=rule)
    names = [known.name for known in chosen]
    if dry_run:
        free_bytes = machine.free_memory_bytes(device)
        plans = [(case, listing.planned(settings, [case], free_bytes, run.sharing(case, settings))) for case in cases]
        rows = [{"ranks": case.ranks} | row for case, planned in plans for row in planned]
        listing.put_plan(form, "tp", rows, names, free_bytes)
        return
    if not spot:
        run.check_affordable(options, cases, [known for known in chosen if known.name not in left], settings)
        forkserver.start("swiglu_bench.tasks.tp.run", "torch.distributed.tensor.parallel", "torch._dynamo")
    about = {
        "gpus": sizes, "modes": list(dict.fromkeys(case.mode.value for case in cases)),
        "sequence_parallel": options.sequence_parallel, "seed": options.seed, "implementations": names,
        "baseline": base, "budget_s": rule.budget_s, "timeout_s": options.timeout,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_"))},
    }  # fmt: skip
    hush()
    console, first = text.screen(form), spot is None or spot[0] == 0
    if not first:  # rank 0 takes the rows
        console, options = Console(quiet=True), dataclasses.replace(options, out=None, csv=False, log_wandb=False)
    places = (run.UnderTorchrun if spot else run.RankGroups)(device, cases, left, Screen(console).say)
    work = Work(run.tp, chosen, settings, options.timeout, Path(), options.wait)
    status, about, found = run.perform(
        options, work, cases, places, request.asked(options.impl, chosen), about, console
    )
    if not first:  # or torchrun would end rank 0 before it tells
        raise typer.Exit(0)
    _end(form, "tp", status, about, found)


def _where(options: TpOptions, spot: tuple[int, int] | None) -> tuple[torch.device, list[int]]:
    """The device, and the numbers of ranks; raises BadInput for more GPUs than there are."""
    import torch

    device = machine.find_device(options.device)
    asked, there = parse_gpus(options.gpus) if options.gpus is not None else [], torch.cuda.device_count()
    if spot:
        if asked and asked != [spot[1]]:
            raise BadInput(f"--gpus: torchrun started {spot[1]} processes; leave the option out.")
        if device.type == "cuda":
            device = machine.find_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        return device, [spot[1]]
    if options.device and ":" in options.device:
        advice = "give cuda or cpu, and choose GPUs by CUDA_VISIBLE_DEVICES"
        raise BadInput(f"--device: {options.device} is one GPU; {advice}.")
    if device.type == "cuda":
        _check_gpus(asked, there)
    return device, asked or [there if device.type == "cuda" else 2]


def _check_gpus(asked: Collection[int], there: int) -> None:
    """Raise BadInput for more GPUs than there are."""
    if max(asked, default=0) > there:
        few = f"{max(asked)} were asked for, and there are {there} here"
        raise BadInput(f"--gpus: {few}; over several hosts, use torchrun.")


def parse_gpus(text: str) -> list[int]:
    """Numbers of ranks from '1,2,4', each once. Raises BadInput for anything else."""
    counts = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part.isascii() or not part.isdecimal() or not 1 <= int(part) <= 4096:
            raise BadInput(f"--gpus: {part!r} is not a number of GPUs; give positive integers such as 2 or 1,2,4.")
        counts.append(int(part))
    return list(dict.fromkeys(counts))


def _ways(options: TpOptions) -> tuple[tuple[bool, ...], list[Mode]]:
    """The ways of dealing with tokens, and the modes, without torch. Raises BadInput, also for numbers of GPUs."""
    if options.gpus is not None:
        asked, there = parse_gpus(options.gpus), system.visible_gpus()
        if there and options.device != "cpu" and "RANK" not in os.environ:  # which torchrun sets
            _check_gpus(asked, len(there))
    ways = WAYS[one_of("--sequence-parallel", options.sequence_parallel, *WAYS)]
    return ways, [Mode(one_of("--modes", part.strip(), "forward", "step")) for part in options.modes.split(",")]


def _cases(
    options: TpOptions, on_gpu: bool, sizes: list[int], modes: list[Mode], ways: tuple[bool, ...]
) -> list[SplitCase]:
    """What is measured with each number of ranks. Raises BadInput."""
    from swiglu_bench.tasks.tp import cases_of

    names = options.shapes if options.shapes is not None else "llama7b" if on_gpu else "smoke"
    shapes = load_shapes(names, options.seed)
    if options.routing is not None:
        shapes = request.routed(shapes, options.routing)
    if any(shape.is_local for shape in shapes):
        raise BadInput("--routing: local is what one rank of several sees; give balanced, uniform, zipf or single.")
    if len({bool(shape.experts) for shape in shapes}) > 1:
        raise BadInput("--shapes: mixtures of experts and dense blocks have other contenders; give one kind at a time.")
    if shapes[0].experts:
        if options.sequence_parallel == "no":
            raise BadInput("--sequence-parallel: with experts each rank has its part of the tokens; leave it out.")
        ways = (True,)
    dtypes = parse_dtypes(options.dtype if options.dtype is not None else "bf16" if on_gpu else "fp32")
    tokens = parse_tokens(options.tokens) if options.tokens is not None else None
    return cases_of(shapes, modes, dtypes, tokens, options.seed, sizes, ways)


def _split(options: TpOptions, scope: Scope, base: str, timeout_s: float | None) -> list[Implementation]:
    """The baseline and the chosen implementations of the scope, without their code; `timeout_s` is for loading one."""
    from swiglu_bench.contenders.split import MEGATRON, async_tp

    loading = request.loader(timeout_s)
    known = [each for each in request.catalogue(loading) if scope in each.scopes]
    after, of_ranks = ("compile", [async_tp]) if scope is Scope.MLP else ("grouped-compile", MEGATRON)
    place = [each.name for each in known].index(after) + 1
    known[place:place] = of_ranks
    return [each.declared() for each in _after_baseline(options, known, SPLIT[scope], loading, base)]


# Of both


def _begin(options: TrainOptions | TpOptions) -> None:
    request.check_wandb(options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts bytes on a CPU, logs to stderr


def _after_baseline(
    options: TrainOptions | TpOptions, known: Sequence[Implementation], usual: Collection[str], loading: request.Load,
    base: str = BASELINE,
) -> list[Implementation]:  # fmt: skip
    """The one that all are compared with, and the chosen implementations; without --impl the `usual` ones."""
    wanted, unwanted = request.split(options.impl, "--impl"), request.split(options.skip_impl, "--skip-impl")
    chosen = select(known, wanted, unwanted, loading, usual)
    return [*(each for each in known if each.name == base), *(each for each in chosen if each.name != base)]


def _end(form: str, kind: str, status: int, about: dict[str, Any], rows: Sequence[Record]) -> NoReturn:
    if form == "json":
        text.put(text.as_json({"kind": kind, **about, "rows": [row.row() for row in rows]}))
    raise typer.Exit(status)


train, tp = command_of(TrainOptions, _train), command_of(TpOptions, _tp)
