"""The commands that check: `audit`, `selftest`; and those about our kernels: `inspect` compiles, `tune` finds tiles."""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench import options, request
from swiglu_bench.cases.cases import Case, Mode, Precision, Scope, expand, parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput, matching, one_line
from swiglu_bench.cases.shapes import dense_shapes, load_shapes, with_tokens
from swiglu_bench.cli.listing import table
from swiglu_bench.machine import machine
from swiglu_bench.options import HOW, OUTPUT, SHAPE, WHAT, AuditOptions, JsonForm, complete_shapes, option
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import grouped
from swiglu_bench.show import text
from swiglu_bench.worker import forkserver

if TYPE_CHECKING:
    import torch

    from swiglu_bench.tasks.tune import Job
    from swiglu_kernels.standalone.compiled import Resources
    from swiglu_kernels.tiles.tuning import TunedEntry, TunedMachine

INSPECT_LEGEND = """\
registers and spills (stack) are per thread, shared memory is per program, instructions are counted in the PTX; \
compiled here for each target, without a GPU."""

INSPECT_TOKENS = (8192,)
INSTRUCTIONS = {"wgmma": "wgmma", "tcgen05": "tcgen05", "mma": "mma.sync", "tma": "TMA"}
"""Fields of a report, and what the table calls them."""


def audit(options: AuditOptions, form: JsonForm = "table") -> None:
    """Check every implementation against everything a user may want of it: the contract matrix.

    Sizes, strides, NaN, biases, autocast, compilation, graphs, huge tensors and more; each cell is pass, fail,
    unsupported or not run, with its reason. The exit status is 0 whatever the cells say, unless --strict is given.

    Example: swiglu-bench audit --impl 'eager,liger,fused*' --scope glu
    """
    dtypes = parse_dtypes(options.dtype) if options.dtype is not None else [None]
    if len(dtypes) > 1:
        raise BadInput("--dtype: audit takes one, for the checks that have none of their own; give bf16, fp16 or fp32.")
    if options.out and run_folder.has_rows(options.out, run_folder.AUDIT):
        raise BadInput(f"--out: {options.out} has the cells of an earlier audit; give another folder.")
    device = request.find_device(options.device, interpret=True)
    scopes = request.scopes_of(options.scope if options.scope is not None else ",".join(Scope))
    chosen = request.implementations_of(options)
    if not options.impl:
        chosen = [known for known in chosen if Precision.UNQUANTISED in known.precisions]
    if not options.in_process:
        forkserver.start("swiglu_bench.tasks.contract.matrix")
    from swiglu_bench.tasks.untimed import Asked, run_audit  # after Triton was told to interpret

    status, about, cells = run_audit(chosen, Asked(scopes, dtypes[0]), device, options, text.screen(form))
    if form == "json":
        text.put(text.as_json({"kind": "audit", **about, "rows": [cell.row() for cell in cells]}))
    raise typer.Exit(status)


def selftest(
    impl: options.Impl = None,
    skip_impl: options.SkipImpl = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    wait: options.Wait = True,
    false_alarms: Annotated[
        int | None,
        option(HOW, "Random cases that must all pass; 0: none. \\[default: 50 on a GPU, 20 on a CPU]", min=0),
    ] = None,
    zoo: Annotated[bool, option(HOW, "Run the wrong implementations.")] = True,
    form: JsonForm = "table",
) -> None:
    """Test the suite itself: it must catch dozens of wrong or cheating implementations, and accuse no correct one.

    Prints which check caught which. Exits 1 if a wrong one is not caught, or if a correct one fails at a random case.

    Example: swiglu-bench selftest --false-alarms 50 --skip-impl 'compile*'
    """
    if not zoo and false_alarms == 0:
        raise BadInput("--no-zoo and --false-alarms 0 leave nothing to run; leave one of them out.")
    chosen_device = request.find_device(device, interpret=True)
    from swiglu_bench.tasks.selftest.run import run_selftest  # after Triton was told to interpret

    chosen = request.implementations_of(AuditOptions(impl=impl, skip_impl=skip_impl, in_process=True))
    count = false_alarms if false_alarms is not None else 50 if chosen_device.type == "cuda" else 20
    with request.held(chosen_device, wait):
        found = run_selftest(chosen, chosen_device, seed, count, zoo, text.screen(form))
    if form == "json":
        text.put(text.as_json({"kind": "selftest", **dataclasses.asdict(found)}))
    raise typer.Exit(request.INTERRUPTED if found.interrupted else int(not found.passed))


def inspect(
    target: Annotated[str, option(WHAT, "Compute capabilities, such as sm_80,sm_90,sm_100.")] = "sm_80,sm_90,sm_100",
    shapes: Annotated[
        str, option(WHAT, "Shapes to specialise for.", *SHAPE, autocompletion=complete_shapes)
    ] = "llama7b",
    tokens: Annotated[
        str | None, option(WHAT, "Token counts, which choose the tiles. \\[default: 8k; of random:N, those drawn]")
    ] = None,
    dtype: Annotated[str, option(WHAT, "bf16, fp16, fp32, comma-separated.")] = "bf16",
    seed: options.ShapeSeed = 0,
    form: JsonForm = "table",
) -> None:
    """Compile every kernel for GPUs that need not be present: registers, spills, shared memory, wgmma and TMA counts.

    Exits 1 if a kernel spills registers.

    Example: swiglu-bench inspect --target sm_90 --tokens 1,128,8k
    """
    matches = [re.fullmatch(r"(?:sm_)?(\d{1,2})(\d)a?", part.strip()) for part in target.split(",")]
    if not all(matches):
        raise BadInput(f"--target: {target!r} is not a list of compute capabilities; give sm_80, sm_90 or sm_100.")
    capabilities = [(int(match[1]), int(match[2])) for match in matches if match]
    sizes, dtypes = with_tokens(dense_shapes(shapes, "inspect", seed), INSPECT_TOKENS), parse_dtypes(dtype)
    counts = parse_tokens(tokens) if tokens is not None else None
    cases = expand(sizes, scopes=[Scope.GLU], modes=[Mode.STEP], dtypes=dtypes, tokens=counts)
    reports = list(_compiled(cases, capabilities))
    if form == "json":
        text.put(text.as_json({"kind": "kernels", "rows": [dataclasses.asdict(report) for report in reports]}))
    else:
        text.screen().print(*_tables(reports), Text(INSPECT_LEGEND, "dim"))
    raise typer.Exit(int(any(report.stack_bytes for report in reports)))


def _compiled(cases: list[Case], capabilities: list[tuple[int, int]]) -> Iterator[Resources]:
    if importlib.util.find_spec("triton") is None:
        raise BadInput("inspect needs Triton, which is not installed; it exists for Linux.")
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels are never compiled
    import torch

    from swiglu_kernels.standalone import compiled

    for capability in capabilities:
        sizes = [
            (case.tokens, case.shape.hidden, case.shape.intermediate, getattr(torch, case.dtype.value), capability)
            for case in cases
        ]
        wanted = [(name, *size) for size in sizes for name in compiled.launches(*size)]
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), _say_nothing) as pool:
            try:
                reports = list(pool.map(_compiled_report, wanted))
            except BrokenProcessPool:  # LLVM ends its process over what it does not know
                reports = ["the compiler ended its process"]
        for report in reports:
            if isinstance(report, str):
                cannot = f"Triton cannot compile for sm_{capability[0]}{capability[1]} ({report})"
                raise BadInput(f"--target: {cannot}; give one that it knows, such as sm_80, sm_90 or sm_100.")
            yield report


def _compiled_report(what: tuple[Any, ...]) -> Resources | str:
    from swiglu_kernels.standalone import compiled

    try:
        return compiled.report(*what)
    except Exception as error:
        return one_line(error)


def _say_nothing() -> None:
    """In a child process: LLVM says of each kernel anew that it does not know the target."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _tables(reports: Iterable[Resources]) -> Iterator[Table]:
    for (capability, dtype, tokens), same in grouped(reports, attrgetter("capability", "dtype", "tokens")).items():
        every = {name: [getattr(report, name) for report in same] for name in INSTRUCTIONS}
        counts = {name: own for name, own in every.items() if any(own)}
        figures = ("registers", "spills", "shared", *(INSTRUCTIONS[name] for name in counts))
        found = table(f"sm_{capability.replace('.', '')}, {dtype}, {tokens} tokens", "kernel", *figures, right=figures)
        for report, *own in zip(same, *counts.values(), strict=True):
            spills = Text(f"{report.stack_bytes} B", "bold red") if report.stack_bytes else Text("none", "green")
            shared = f"{report.shared_bytes / 1024:.0f} KiB"
            found.add_row(report.kernel, str(report.registers), spills, shared, *(str(count or "-") for count in own))
        yield found


# The fastest tiles

KERNELS = (
    "forward", "forward-preact", "recompute", "input-grad", "input-grad-fused", "weight-grad", "weight-grad-fused",
    "mlp-hidden-grad", "mlp-weight-grad", "experts-gate-up", "experts-down", "experts-hidden-grad",
    "experts-input-grad", "experts-weight-grad", "experts-down-weight-grad",
)  # fmt: skip
"""The names of `swiglu_kernels.tiles.candidates.KERNELS`, whose import takes seconds."""
NEEDS_GPU = (
    "tune needs an NVIDIA GPU of compute capability 8.0 or newer and Triton, because it times kernels; --show and "
    "--clear work anywhere."
)
DEFAULT_KERNELS = "forward,forward-preact,input-grad,weight-grad,experts-*"
"""Those that swiglu_glu launches by default, and for mixtures of experts those of swiglu_experts."""
TUNE_LEGEND = (
    "tile: rows x columns x depth, warps, stages, row tiles of a group. ratio: best other / shipped, 95% interval."
)
VERDICT_STYLES = {"faster": "bold green", "slower": "dim", "tie": "dim"}


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is tuned, and for how long candidates are timed."""

    shapes: Annotated[
        str, option(WHAT, "Shape or sweep names, or random:N, comma-separated.", *SHAPE, autocompletion=complete_shapes)
    ] = "llama7b"
    tokens: options.Tokens = None
    dtype: Annotated[str, option(WHAT, "bf16, fp16, comma-separated.")] = "bf16"
    kernel: Annotated[str, option(WHAT, "Kernels by name or glob, comma-separated; '*': all.")] = DEFAULT_KERNELS
    candidates: Annotated[
        int, option(HOW, "Portable tiles to try for each, the nearest to the shipped one first.", min=1, max=500)
    ] = 24
    budget: Annotated[float, option(HOW, "Seconds for each of the two rounds of timing.", min=0.01)] = 5.0
    seed: options.Seed = 0
    device: options.Device = None
    wait: options.Wait = True
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
    if options.show and options.clear:
        raise BadInput("--show was given together with --clear; leave one of them out.")
    matching(KERNELS, request.split([options.kernel], "--kernel"), "--kernel: there is no kernel {!r}")
    if not (options.show or options.clear) and request.device_type(options.device) == "cpu":
        raise BadInput(NEEDS_GPU)
    from swiglu_bench.show.console import Screen
    from swiglu_bench.tasks import tune as task
    from swiglu_kernels.runtime.backend import backend_for
    from swiglu_kernels.tiles import tuning

    path = tuning.path()
    if path is None:
        raise BadInput(f"{tuning.VARIABLE} is off, so that no tuned tile is read or written; unset it, or name a file.")
    screen, json = Screen(text.screen(form)), form == "json"
    console, say = screen.console, screen.say
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
        say(f"{TUNE_LEGEND} Kept in {path}", style="dim")
        return
    if here is None or backend_for(device) == "torch":
        raise BadInput(NEEDS_GPU)
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
    say(f"{TUNE_LEGEND} Kept in {path}", style="dim")
    raise typer.Exit(status)


def _tune_jobs(
    jobs: Sequence[Job], options: TuneOptions, device: torch.device, here: TunedMachine, path: Path, console: Console
) -> tuple[int, list[Job]]:
    from swiglu_bench.measure.clock import make_clock
    from swiglu_bench.measure.rounds import Rule
    from swiglu_bench.show.console import Bar
    from swiglu_bench.tasks.tune import Job, Tuner, tune_all

    rule = Rule(budget_s=options.budget, min_s=min(1.0, options.budget / 2))
    status, done = 0, list[Job]()
    with request.held(device, options.wait), Bar(console, len(jobs), "tuning") as bar:
        tuner = Tuner(device, make_clock(device), rule, options.candidates, options.seed)
        try:
            for job in tune_all(
                tuner, jobs, path, here, lambda count, doing: bar.tell(doing, count), partial(typer.echo, err=True)
            ):
                done.append(job)
                status |= not job.kept
        except KeyboardInterrupt:
            status = request.INTERRUPTED
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
        verdict = Text(found.verdict, VERDICT_STYLES[found.verdict])
        tried = f"{found.tried}" + (f"\n{len(found.rejected)} rejected" if found.rejected else "")
        tiles.add_row(job.kernel, problem, shipped, best, ratio, verdict, tried)
    return tiles


def _kept(entries: Sequence[TunedEntry], here: TunedMachine | None) -> Iterator[RenderableType]:
    if not entries:
        yield Text("No tuned tile is kept: the shipped ones run.")
    for made_on in dict.fromkeys(entry.machine for entry in entries):
        versions = f"torch {made_on.torch}, Triton {made_on.triton}, kernels {made_on.kernels}"
        used = "in use here" if made_on == here else "not in use here"
        title = f"{made_on.gpu} ({made_on.capability}), {versions}: {used}"
        heads = ("kernel", "dtype", "tokens up to, or rows", "hidden", "intermediate", "choice", "ratio", "at (UTC)")
        tiles = table(title, *heads)
        for entry in entries:
            if entry.machine == made_on:
                ratio = "{:.4f} [{:.4f}, {:.4f}]".format(*entry.ratio)
                at = map(str, (entry.tokens, entry.hidden, entry.intermediate))
                tiles.add_row(entry.kernel, entry.dtype, *at, str(entry.choice), ratio, entry.at)
        yield tiles


tune = options.command_of(TuneOptions, _tune)
