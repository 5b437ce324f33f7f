"""The command `tune`: what to tune, and tables of what was found and of what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from swiglu_bench.cases.cases import parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.shapes import load_shapes
from swiglu_bench.cli.listing import table
from swiglu_bench.options import (
    HOW,
    OUTPUT,
    WHAT,
    Device,
    JsonForm,
    Seed,
    Tokens,
    Wait,
    command_of,
    complete_shapes,
    option,
)
from swiglu_bench.request import INTERRUPTED, held
from swiglu_bench.show import text

if TYPE_CHECKING:
    import torch

    from swiglu_bench.tasks.tune import Job
    from swiglu_kernels.tiles.tuning import TunedEntry, TunedMachine

DEFAULT_KERNELS = "forward,forward-preact,input-grad,weight-grad,experts-*"
"""Those that swiglu_glu launches by default, and for mixtures of experts those of swiglu_experts."""
LEGEND = "tile: rows x columns x depth, warps, stages, row tiles of a group. ratio: best other / shipped, 95% interval."
STYLES = {"faster": "bold green", "slower": "dim", "tie": "dim"}


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is tuned, and for how long candidates are timed."""

    shapes: Annotated[
        str, option(WHAT, "Shape or sweep names, or random:N, comma-separated.", autocompletion=complete_shapes)
    ] = "llama7b"
    tokens: Tokens = None
    dtype: Annotated[str, option(WHAT, "bf16, fp16, comma-separated.")] = "bf16"
    kernel: Annotated[str, option(WHAT, "Kernels by name or glob, comma-separated; '*': all.")] = DEFAULT_KERNELS
    candidates: Annotated[
        int, option(HOW, "Portable tiles to try for each, the nearest to the shipped one first.", min=1, max=500)
    ] = 24
    budget: Annotated[float, option(HOW, "Seconds for each of the two rounds of timing.", min=0.01)] = 5.0
    seed: Seed = 0
    device: Device = None
    wait: Wait = True
    show: Annotated[bool, option(OUTPUT, "Show what is kept, and measure nothing.", "--show")] = False
    clear: Annotated[bool, option(OUTPUT, "Remove what is kept, and measure nothing.", "--clear")] = False


def _tune(options: TuneOptions, form: JsonForm = "table") -> None:
    """Find the fastest tiles of swiglu_kernels for this GPU and keep them; otherwise the shipped ones run.

    Each candidate is checked against the shipped tile and timed beside it in interleaved rounds. It is kept only if it
    is faster by more than noise, for this GPU, these versions and token counts up to the next power of two. For
    experts, whose portable kernels are tuned, the number of rows that an expert has on average counts instead. The file
    is swiglu-kernels/tuning.json in the user's cache folder; SWIGLU_KERNELS_TUNING names another, or is `off`.

    Example: swiglu-bench tune --shapes llama7b --tokens 1,16,128,1024 --kernel forward
    """
    text.check("--format", form, text.TABLE, "json")
    if options.show and options.clear:
        raise BadInput("--show was given together with --clear; leave one of them out.")
    from swiglu_bench.machine import machine
    from swiglu_bench.tasks import tune as task
    from swiglu_kernels.runtime.backend import backend_for
    from swiglu_kernels.tiles import tuning

    path = tuning.path()
    if path is None:
        raise BadInput(f"{tuning.VARIABLE} is off, so that no tuned tile is read or written; unset it, or name a file.")
    console, json = text.screen(form), form == "json"
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if options.clear:
        said = task.clear(path)
        say(said)
        if json:
            text.put(text.as_json({"kind": "tuning", "file": path, "cleared": said, "rows": []}))
        return
    device = machine.find_device(options.device)
    here = tuning.machine_of(device)
    if options.show:
        if json:
            rows = [dataclasses.asdict(entry) | {"choice": str(entry.choice)} for entry in tuning.entries()]
            text.put(text.as_json({"kind": "tuning", "file": path, "rows": rows}))
            return
        console.print(*_kept(tuning.entries(), here))
        say(f"{LEGEND} Kept in {path}", style="dim")
        return
    if here is None or backend_for(device) == "torch":
        raise BadInput(
            "tune needs an NVIDIA GPU of compute capability 8.0 or newer and Triton, because it times kernels; "
            "--show and --clear work anywhere."
        )
    shapes, dtypes = load_shapes(options.shapes, options.seed), parse_dtypes(options.dtype)
    tokens = parse_tokens(options.tokens) if options.tokens is not None else None
    jobs = task.jobs_of(options.kernel, shapes, dtypes, tokens, device, here)
    status, done = _tune_jobs(jobs, options, device, here, path, console)
    if json:
        text.put(text.as_json({"kind": "tuning", "file": path, "rows": [job.row() for job in done]}))
        raise typer.Exit(status)
    console.print(_table_of(done))
    for job in done:
        if not isinstance(job.found, str):
            for choice, reason in job.found.rejected.items():
                say(f"rejected: {job.kernel}, {job.problem.tokens} tokens, {choice}: {reason[:160]}", style="dim")
    say(f"{LEGEND} Kept in {path}", style="dim")
    raise typer.Exit(status)


def _tune_jobs(
    jobs: Sequence[Job], options: TuneOptions, device: torch.device, here: TunedMachine, path: Path, console: Console
) -> tuple[int, list[Job]]:
    """Tune under a bar while the device is locked; the exit status, and the jobs that are done."""
    from swiglu_bench.measure.clock import make_clock
    from swiglu_bench.measure.rounds import Rule
    from swiglu_bench.show.console import Bar
    from swiglu_bench.tasks.tune import Job, Tuner, tune_all

    rule = Rule(budget_s=options.budget, min_s=min(1.0, options.budget / 2))
    status, done = 0, list[Job]()
    with held(device, options.wait), Bar(console, len(jobs), "tuning") as bar:
        tuner = Tuner(device, make_clock(device), rule, options.candidates, options.seed)
        try:
            for job in tune_all(
                tuner, jobs, path, here, lambda count, doing: bar.tell(doing, count), partial(typer.echo, err=True)
            ):
                done.append(job)
                status |= isinstance(job.found, str)
        except KeyboardInterrupt:
            status = INTERRUPTED
    return int(status), done


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


def _kept(entries: Sequence[TunedEntry], here: TunedMachine | None) -> Iterator[RenderableType]:
    """A table for each machine and set of versions that something is kept for."""
    if not entries:
        yield Text("No tuned tile is kept: the shipped ones run.")
    for made_on in dict.fromkeys(entry.machine for entry in entries):
        versions = f"torch {made_on.torch}, Triton {made_on.triton}, kernels {made_on.kernels}"
        used = "in use here" if made_on == here else "not in use here"
        title = f"{made_on.gpu} ({made_on.capability}), {versions}: {used}"
        tiles = table(
            title, "kernel", "dtype", "tokens up to, or rows", "hidden", "intermediate", "choice", "ratio", "at (UTC)"
        )
        for entry in entries:
            if entry.machine == made_on:
                ratio = "{:.4f} [{:.4f}, {:.4f}]".format(*entry.ratio)
                at = map(str, (entry.tokens, entry.hidden, entry.intermediate))
                tiles.add_row(entry.kernel, entry.dtype, *at, str(entry.choice), ratio, entry.at)
        yield tiles


tune = command_of(TuneOptions, _tune)
