"""The command `tune`: what to tune, and tables of what was found and of what is kept."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.cases.cases import parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.cli.listing import table
from swiglu_bench.options import HOW, OUTPUT, WHAT, Device, JsonForm, Seed, Tokens, Wait, complete_shapes, option
from swiglu_bench.request import INTERRUPTED, held
from swiglu_bench.rows import text

if TYPE_CHECKING:
    from swiglu_bench.tasks.tune import Job
    from swiglu_kernels.tiles.tuning import Entry, Machine

DEFAULT_KERNELS = "forward,forward-preact,input-grad,weight-grad,experts-*"
"""Those that swiglu_glu launches by default, and for mixtures of experts those of swiglu_experts."""
LEGEND = "tile: rows x columns x depth, warps, stages, row tiles of a group. ratio: best other / shipped, 95% interval."
MULTIPLE = 16
"""Sizes are multiples of this: then the kernels access memory 16 bytes at a time (`launch.vectorises`)."""
STYLES = {"faster": "bold green", "slower": "dim", "tie": "dim"}


def tune(
    shapes: Annotated[
        str, option(WHAT, "Shape or sweep names, or random:N, comma-separated.", autocompletion=complete_shapes)
    ] = "llama7b",
    tokens: Tokens = None,
    dtype: Annotated[str, option(WHAT, "bf16, fp16, comma-separated.")] = "bf16",
    kernel: Annotated[str, option(WHAT, "Kernels by name or glob, comma-separated; '*': all.")] = DEFAULT_KERNELS,
    candidates: Annotated[
        int, option(HOW, "Portable tiles to try for each, the nearest to the shipped one first.", min=1, max=500)
    ] = 24,
    budget: Annotated[float, option(HOW, "Seconds for each of the two rounds of timing.", min=0.01)] = 5.0,
    seed: Seed = 0,
    device: Device = None,
    wait: Wait = True,
    show: Annotated[bool, option(OUTPUT, "Show what is kept, and measure nothing.", "--show")] = False,
    clear: Annotated[bool, option(OUTPUT, "Remove what is kept, and measure nothing.", "--clear")] = False,
    form: JsonForm = "table",
) -> None:
    """Find the fastest tiles of swiglu_kernels for this GPU and keep them; otherwise the shipped ones run.

    Each candidate is checked against the shipped tile and timed beside it in interleaved rounds. It is kept only if it
    is faster by more than noise, for this GPU, these versions and token counts up to the next power of two. For
    experts, whose portable kernels are tuned, the number of rows that an expert has on average counts instead. The file
    is swiglu-kernels/tuning.json in the user's cache folder; SWIGLU_KERNELS_TUNING names another, or is `off`.

    Example: swiglu-bench tune --shapes llama7b --tokens 1,16,128,1024 --kernel forward
    """
    text.check("--format", form, text.TABLE, "json")
    if show and clear:
        raise BadInput("--show was given together with --clear; leave one of them out.")
    from swiglu_bench.machine import machine
    from swiglu_bench.show.writers.console import Bar
    from swiglu_bench.tasks.tune import Effort, clear_file, tune_all
    from swiglu_kernels.launches.backend import backend_for, multiprocessors
    from swiglu_kernels.tiles import tuning

    path = tuning.path()
    if path is None:
        raise BadInput(f"{tuning.VARIABLE} is off, so that no tuned tile is read or written; unset it, or name a file.")
    console, json = text.screen(form), form == "json"
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if clear:
        said = clear_file(path)
        say(said)
        if json:
            text.put(text.as_json({"kind": "tuning", "file": path, "cleared": said, "rows": []}))
        return
    chosen = machine.find_device(device)
    if show:
        if json:
            rows = [dataclasses.asdict(one) | {"choice": str(one.choice)} for one in tuning.entries()]
            text.put(text.as_json({"kind": "tuning", "file": path, "rows": rows}))
            return
        console.print(*_kept(tuning.entries(), tuning.machine_of(chosen)))
        say(f"{LEGEND} Kept in {path}", style="dim")
        return
    here = tuning.machine_of(chosen)
    if here is None or backend_for(chosen) == "torch":
        raise BadInput(
            "tune needs an NVIDIA GPU of compute capability 8.0 or newer and Triton, because it times kernels; "
            "--show and --clear work anywhere."
        )
    jobs = _jobs(shapes, seed, tokens, dtype, kernel, (here.major_minor, multiprocessors(chosen)), here.gpu)
    status, done = 0, []
    effort, on_stderr = Effort(candidates, budget, seed), partial(typer.echo, err=True)
    with held(chosen, wait), Bar(console, len(jobs), "tuning") as bar:
        try:
            for job in tune_all(jobs, chosen, here, path, effort, bar.tell, on_stderr):
                done.append(job)
                status |= isinstance(job.found, str)
        except KeyboardInterrupt:
            status = INTERRUPTED
    if json:
        text.put(text.as_json({"kind": "tuning", "file": path, "rows": list(map(_row_of, done))}))
        raise typer.Exit(int(status))
    console.print(_table_of(done))
    for job in done:
        if not isinstance(job.found, str):
            for choice, reason in job.found.rejected.items():
                say(f"rejected: {job.kernel}, {job.problem.tokens} tokens, {choice}: {reason[:160]}", style="dim")
    say(f"{LEGEND} Kept in {path}", style="dim")
    raise typer.Exit(int(status))


def _jobs(
    shapes: str, seed: int, tokens: str | None, dtype: str, kernel: str, gpu: tuple[tuple[int, int], int], card: str
) -> list[Job]:
    """Everything to tune, checked before any work; `gpu` has its compute capability and number of multiprocessors."""
    import torch

    from swiglu_bench.cases.shapes import load_shapes
    from swiglu_bench.tasks.tune import Job
    from swiglu_kernels.tiles.candidates import KERNELS, TUNED_DTYPES, Problem

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
    for shape in load_shapes(shapes, seed):
        if shape.hidden % MULTIPLE or shape.intermediate % MULTIPLE:
            needed = f"give sizes that are multiples of {MULTIPLE}"
            raise BadInput(f"--shapes: {shape.name} keeps its shipped tiles; {needed}.")
        experts = (shape.experts.count, shape.experts.top_k) if shape.experts else (0, 1)
        mine = [name for name in names if name.startswith("experts-") == bool(shape.experts)]
        if not mine:
            kind = "a mixture of experts" if shape.experts else "a dense block"
            raise BadInput(f"--kernel: none of {kernel} is of {shape.name}, {kind}; experts-* are those of experts.")
        for one in dtypes:
            problems = [
                Problem(count, shape.hidden, shape.intermediate, one, *gpu, *experts, card)
                for count in sorted(set(parse_tokens(tokens) if tokens is not None else shape.tokens))
            ]
            served = {problem.kept_for: problem for problem in problems}  # of the most tokens that share a choice
            for first, second in itertools.pairwise(problems) if tokens is not None else ():
                if first.kept_for == second.kept_for:
                    what = "tiles of {} rows" if shape.experts else "up to {} tokens"
                    share = f"{first.tokens} and {second.tokens} share one choice"
                    raise BadInput(f"--tokens: {share}, that of {what.format(first.kept_for)}; leave one out.")
            jobs += [Job(name, shape.name, problem) for problem in served.values() for name in mine]
    return jobs


def _row_of(job: Job) -> dict[str, Any]:
    """What was found for one kernel, as data."""
    problem, found = job.problem, job.found
    row = {
        "kernel": job.kernel, "shape": job.shape, "dtype": job.dtype, "tokens": problem.tokens,
        "hidden": problem.hidden, "intermediate": problem.intermediate,
    }  # fmt: skip
    if isinstance(found, str):
        return row | {"verdict": "error", "reason": found}
    return row | {
        "verdict": found.verdict, "shipped": str(found.shipped), "best": str(found.best), "winner": str(found.winner),
        "shipped_ms": found.shipped_ms, "best_ms": found.best_ms, "ratio": found.ratio.median,
        "ratio_low": found.ratio.low, "ratio_high": found.ratio.high, "tried": found.tried,
        "rejected": {str(choice): reason for choice, reason in found.rejected.items()},
    }  # fmt: skip


def _table_of(jobs: Iterable[Job]) -> RenderableType:
    tiles = table("Tiles", "kernel", "problem", "shipped", "best other", "ratio", "verdict", "tried")
    for job in jobs:
        found = job.found
        problem = f"{job.shape} {job.dtype}\n{job.problem.tokens} tokens"
        if isinstance(found, str):
            tiles.add_row(job.kernel, problem, Text(found, "red"), "", "", Text("error", "red"), "")
            continue
        timed = ((found.shipped, found.shipped_ms), (found.best, found.best_ms))
        shipped, best = (f"{choice}\n{ms * 1e3:.4g} us" for choice, ms in timed)
        ratio = f"{found.ratio.median:.4f}\n[{found.ratio.low:.4f}, {found.ratio.high:.4f}]"
        verdict = Text(found.verdict, STYLES[found.verdict])
        tried = f"{found.tried}" + (f"\n{len(found.rejected)} rejected" if found.rejected else "")
        tiles.add_row(job.kernel, problem, shipped, best, ratio, verdict, tried)
    return tiles


def _kept(entries: Sequence[Entry], here: Machine | None) -> Iterator[RenderableType]:
    """A table for each machine and set of versions that something is kept for."""
    if not entries:
        yield Text("No tuned tile is kept: the shipped ones run.")
    for made_on in dict.fromkeys(one.machine for one in entries):
        versions = f"torch {made_on.torch}, Triton {made_on.triton}, kernels {made_on.kernels}"
        used = "in use here" if made_on == here else "not in use here"
        title = f"{made_on.gpu} ({made_on.capability}), {versions}: {used}"
        tiles = table(
            title, "kernel", "dtype", "tokens up to, or rows", "hidden", "intermediate", "choice", "ratio", "at (UTC)"
        )
        for one in entries:
            if one.machine == made_on:
                ratio = "{:.4f} [{:.4f}, {:.4f}]".format(*one.ratio)
                at = map(str, (one.tokens, one.hidden, one.intermediate))
                tiles.add_row(one.kernel, one.dtype, *at, str(one.choice), ratio, one.at)
        yield tiles
