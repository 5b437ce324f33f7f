"""The command `tune`: what to tune, and tables of what was found and of what is kept."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiglu_bench.cli.machine import _held, _table
from swiglu_bench.cli.options import HOW, OUTPUT, WHAT, Device, Seed, Tokens, Wait, complete_shapes
from swiglu_bench.rows.text import screen
from swiglu_bench.spec.cases import parse_dtypes, parse_tokens
from swiglu_bench.spec.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from swiglu_bench.tuning.tuner import Found
    from swiglu_kernels.tiles.candidates import Problem
    from swiglu_kernels.tiles.tuning import Entry, Machine

DEFAULT_KERNELS = "forward,forward-preact,input-grad,weight-grad"
"""Those that swiglu_glu launches unless told otherwise."""
LEGEND = "tile: rows x columns x depth, warps, stages, row tiles of a group. ratio: best other / shipped, 95% interval."
MULTIPLE = 16
"""Of the sizes: what the kernels can access 16 bytes at a time (`launch.vectorises`)."""
STYLES = {"faster": "bold green", "slower": "dim", "tie": "dim"}


@dataclass
class Job:
    """One kernel for one problem, and what came of it: a finding, or why there is none."""

    kernel: str
    shape: str
    problem: Problem
    found: Found | str = ""


def tune(
    shapes: Annotated[
        str, typer.Option(help="Shape or sweep names, comma-separated.", rich_help_panel=WHAT,
                          autocompletion=complete_shapes),
    ] = "llama7b",
    tokens: Tokens = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, comma-separated.", rich_help_panel=WHAT)] = "bf16",
    kernel: Annotated[
        str, typer.Option(help="Kernels by name or glob, comma-separated; '*' are all ten.", rich_help_panel=WHAT)
    ] = DEFAULT_KERNELS,
    candidates: Annotated[
        int,
        typer.Option(help="Portable tiles to try for each, the nearest to the shipped one first.", min=1, max=500,
                     rich_help_panel=HOW),
    ] = 24,
    budget: Annotated[
        float, typer.Option(help="Seconds for each of the two rounds of timing.", min=0.01, rich_help_panel=HOW)
    ] = 5.0,
    seed: Seed = 0, device: Device = None, wait: Wait = True,
    show: Annotated[
        bool, typer.Option("--show", help="Show what is kept, and measure nothing.", rich_help_panel=OUTPUT)
    ] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove what is kept, and measure nothing.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:  # fmt: skip
    """Find the fastest tiles of swiglu_kernels for this GPU and keep them; without, the shipped ones run.

    Each candidate is checked against the shipped tile and timed beside it in interleaved rounds. It is kept only if
    it is faster by more than noise, for this GPU, these versions and token counts up to the next power of two. The
    file is swiglu-kernels/tuning.json in the user's cache folder; SWIGLU_KERNELS_TUNING names another, or is `off`.

    Example: swiglu-bench tune --shapes llama7b --tokens 1,16,128,1024 --kernel forward
    """
    if show and clear:
        raise BadInput("--show was given together with --clear; leave one of them out.")
    from swiglu_bench.machine import machine
    from swiglu_bench.tuning import tuned_file
    from swiglu_kernels.launches.backend import multiprocessors
    from swiglu_kernels.tiles import tuning

    path = tuning.path()
    if path is None:
        raise BadInput(f"{tuning.VARIABLE} is off, so that no tuned tile is read or written; unset it, or name a file.")
    console = screen()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if clear:
        say(tuned_file.clear(path))
        return
    chosen = machine.find_device(device)
    if show:
        console.print(*_kept(tuning.entries(), tuning.machine_of(chosen)))
        say(f"{LEGEND} Kept in {path}", style="dim")
        return
    here = _here(chosen)
    jobs = _jobs(shapes, tokens, dtype, kernel, (here.major_minor, multiprocessors(chosen)))
    status, done = 0, []
    with _held(chosen, wait):
        try:
            for job in _tune_all(jobs, chosen, here, path, candidates, budget, seed):
                done.append(job)
                status |= isinstance(job.found, str)
        except KeyboardInterrupt:
            status = 130
    console.print(_table_of(done))
    for line in _rejections(done):
        say(line, style="dim")
    say(f"{LEGEND} Kept in {path}", style="dim")
    raise typer.Exit(int(status))


def _here(device: torch.device) -> Machine:
    """What choices are kept under; raises BadInput where there is nothing to tune."""
    from swiglu_kernels import backend_for
    from swiglu_kernels.tiles import tuning

    here = tuning.machine_of(device)
    if here is None or backend_for(device) == "torch":
        raise BadInput(
            "tune needs an NVIDIA GPU of compute capability 8.0 or newer and Triton, for it times kernels; "
            "--show and --clear work anywhere."
        )
    return here


def _jobs(shapes: str, tokens: str | None, dtype: str, kernel: str, gpu: tuple[tuple[int, int], int]) -> list[Job]:
    """Everything to tune, checked before any work; `gpu` is its capability and its number of multiprocessors."""
    import torch

    from swiglu_bench.spec.shapes import load_shapes
    from swiglu_kernels.tiles.candidates import KERNELS, TUNED_DTYPES, Problem, bucket

    names: list[str] = []
    for pattern in (part.strip() for part in kernel.split(",")):
        hits = fnmatch.filter(KERNELS, pattern)
        if not hits:
            raise BadInput(f"--kernel: there is no kernel {pattern!r}; {did_you_mean(pattern, list(KERNELS))}")
        names += [name for name in hits if name not in names]
    dtypes = [getattr(torch, one.value) for one in dict.fromkeys(parse_dtypes(dtype))]
    if not set(dtypes) <= set(TUNED_DTYPES):
        raise BadInput("--dtype: float32 keeps its shipped tiles; give bf16 or fp16.")
    jobs = []
    for shape in load_shapes(shapes):
        if shape.hidden % MULTIPLE or shape.intermediate % MULTIPLE:
            raise BadInput(
                f"--shapes: {shape.name} keeps its shipped tiles; give sizes that are multiples of {MULTIPLE}."
            )
        counts = sorted(set(parse_tokens(tokens) if tokens is not None else shape.tokens))
        for first, second in itertools.pairwise(counts):
            if bucket(first) == bucket(second):
                up_to = f"that of up to {bucket(first)} tokens"
                raise BadInput(f"--tokens: {first} and {second} share one choice, {up_to}; leave one out.")
        jobs += [
            Job(name, shape.name, Problem(count, shape.hidden, shape.intermediate, one, *gpu))
            for one, count, name in itertools.product(dtypes, counts, names)
        ]
    return jobs


def _tune_all(
    jobs: Sequence[Job], device: torch.device, here: Machine, path: Path, most: int, budget_s: float, seed: int
) -> Iterator[Job]:
    """Tune one after another and keep each winner at once; where the device is lost, the rest is not tuned."""
    from swiglu_bench.machine.machine import now
    from swiglu_bench.measure.clock import DeviceLost, make_clock
    from swiglu_bench.measure.rounds import Rule
    from swiglu_bench.tuning import tuned_file
    from swiglu_bench.tuning.tuner import CannotTune, tune
    from swiglu_kernels.tiles import tuning
    from swiglu_kernels.tiles.candidates import bucket

    clock, rule = make_clock(device), Rule(budget_s=budget_s, min_s=min(1.0, budget_s / 2))
    with screen().status("tuning") as line:
        for number, job in enumerate(jobs):
            problem = job.problem
            at = f"{number + 1} of {len(jobs)}: {job.kernel}, {job.shape}, {problem.tokens} tokens"
            tell = partial(lambda at, doing: line.update(f"{at}: {doing}"), at)
            try:
                job.found = found = tune(job.kernel, problem, device, clock, rule, most, seed, tell)
            except (CannotTune, DeviceLost) as error:
                job.found = str(error)
                yield job
                if isinstance(error, DeviceLost):
                    return
                continue
            ratio = found.ratio
            entry = tuning.Entry(
                machine=here, kernel=job.kernel, dtype=_name(problem), tokens=bucket(problem.tokens),
                hidden=problem.hidden, intermediate=problem.intermediate, choice=found.winner,
                ratio=(ratio.median, ratio.low, ratio.high), at=now(),
            )  # fmt: skip
            tuned_file.keep(path, entry, found.winner != found.shipped, partial(typer.echo, err=True))
            yield job


def _name(problem: Problem) -> str:
    return str(problem.dtype).removeprefix("torch.")


def _table_of(jobs: Iterable[Job]) -> RenderableType:
    from rich.text import Text

    table = _table("Tiles", "kernel", "problem", "shipped", "best other", "ratio", "verdict", "tried")
    for job in jobs:
        at, found = job.problem, job.found
        problem = f"{job.shape} {_name(at)}\n{at.tokens} tokens"
        if isinstance(found, str):
            table.add_row(job.kernel, problem, Text(found, "red"), "", "", Text("error", "red"), "")
            continue
        ratio = f"{found.ratio.median:.4f}\n[{found.ratio.low:.4f}, {found.ratio.high:.4f}]"
        verdict = Text(found.verdict, STYLES[found.verdict])
        shipped, best = (
            f"{choice}\n{ms * 1e3:.4g} us"
            for choice, ms in ((found.shipped, found.shipped_ms), (found.best, found.best_ms))
        )
        tried = f"{found.tried}" + (f"\n{len(found.rejected)} rejected" if found.rejected else "")
        table.add_row(job.kernel, problem, shipped, best, ratio, verdict, tried)
    return table


def _rejections(jobs: Iterable[Job]) -> Iterator[str]:
    """A line for each candidate that did not run or was wrong."""
    for job in jobs:
        if not isinstance(job.found, str):
            for choice, reason in job.found.rejected.items():
                yield f"rejected: {job.kernel}, {job.problem.tokens} tokens, {choice}: {reason[:160]}"


def _kept(entries: Sequence[Entry], here: Machine | None) -> Iterator[RenderableType]:
    """A table for each machine and set of versions that something is kept for."""
    from rich.text import Text

    if not entries:
        yield Text("No tuned tile is kept: what is shipped runs.")
    for made_on in dict.fromkeys(one.machine for one in entries):
        versions = f"torch {made_on.torch}, Triton {made_on.triton}, kernels {made_on.kernels}"
        used = "in use here" if made_on == here else "not in use here"
        title = f"{made_on.gpu} ({made_on.capability}), {versions}: {used}"
        table = _table(
            title, "kernel", "dtype", "tokens up to", "hidden", "intermediate", "choice", "ratio", "at (UTC)"
        )
        for one in entries:
            if one.machine == made_on:
                ratio = "{:.4f} [{:.4f}, {:.4f}]".format(*one.ratio)
                sizes = map(str, (one.tokens, one.hidden, one.intermediate))
                table.add_row(one.kernel, one.dtype, *sizes, str(one.choice), ratio, one.at)
        yield table
