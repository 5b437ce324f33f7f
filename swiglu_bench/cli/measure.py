"""The commands that measure and check every implementation at every case: forward, backward, step, memory, verify."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import typer

from swiglu_bench.cli.options import (
    L2,
    TIMEOUT_S,
    Baseline,
    Budget,
    Csv,
    Detail,
    Device,
    DryRun,
    DtypeOption,
    Energy,
    Form,
    Gpus,
    Impl,
    InProcess,
    LogWandb,
    Out,
    Quiet,
    Ray,
    Regime,
    Resume,
    ScopeOption,
    Seed,
    Shapes,
    SkipImpl,
    TimeDetail,
    Timeout,
    Tokens,
    Wait,
    WandbEntity,
    WandbGroup,
    WandbId,
    WandbProject,
    WandbTags,
)
from swiglu_bench.rows import text
from swiglu_bench.spec.cases import Mode
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.sweep import request

if TYPE_CHECKING:
    from rich.console import Console

    from swiglu_bench.processes.pool.team import Team
    from swiglu_bench.rows.finished_run import FinishedRun

REST_S = 0.05
"""The pause of `--regime rested`: some twenty times a large kernel, so that power and clocks recover."""
TASKS = {"forward": "time", "backward": "time", "step": "time", "memory": "memory", "verify": "verify"}
"""What each command wants of a contender, by the value of `runner.Task`."""
MODES = {
    "forward": Mode.FORWARD,
    "backward": Mode.BACKWARD,
    "step": Mode.STEP,
    "memory": Mode.STEP,
    "verify": Mode.STEP,
}


def add_commands(app: typer.Typer, panel: str) -> None:
    """Give the command line all five."""
    for name, summary, example in (
        (
            "forward",
            "Time the forward pass (inference: nothing is kept for backward).",
            "swiglu-bench forward --shapes llama7b --tokens 1,128,8k",
        ),
        (
            "backward",
            "Time the backward pass, each sample after a fresh forward that is not timed.",
            "swiglu-bench backward --shapes llama3-8b --scope mlp",
        ),
        (
            "step",
            "Time forward and backward together: what a training step pays.",
            "swiglu-bench step --shapes llama7b --baseline compile",
        ),
        (
            "memory",
            "Measure what is saved for backward, the peak and the workspace, beside what arithmetic predicts.",
            "swiglu-bench memory --shapes llama7b --log-wandb",
        ),
        (
            "verify",
            "Check the output and every gradient against fp64, judged by what eager loses. Exits 1 on any failure. "
            "On a CPU the Triton kernels run through Triton's interpreter, on small shapes.",
            "swiglu-bench verify --impl 'fused*'",
        ),
    ):
        command = _timing_command(name) if TASKS[name] == "time" else _checking_command(name)
        app.command(name, rich_help_panel=panel, help=f"{summary}\n\nExample: {example}")(command)


def _timing_command(name: str) -> Any:
    """The command that times a mode."""

    def command(
        shapes: Shapes = None, tokens: Tokens = None, dtype: DtypeOption = None, scope: ScopeOption = None,
        impl: Impl = None, skip_impl: SkipImpl = None, seed: Seed = 0, device: Device = None, gpus: Gpus = None,
        ray: Ray = None, baseline: Baseline = "eager", budget: Budget = 20.0, l2: L2 = "cold",
        regime: Regime = "steady", energy: Energy = True, timeout: Timeout = TIMEOUT_S, in_process: InProcess = False,
        wait: Wait = True, dry_run: DryRun = False, detail: TimeDetail = False, quiet: Quiet = False,
        form: Form = "table", out: Out = None, resume: Resume = False, csv: Csv = True, log_wandb: LogWandb = False,
        wandb_project: WandbProject = "swiglu-bench", wandb_entity: WandbEntity = None, wandb_group: WandbGroup = None,
        wandb_tags: WandbTags = None, wandb_id: WandbId = None,
    ) -> None:  # fmt: skip
        _run(name, locals())

    return command


def _checking_command(name: str) -> Any:
    """A command that runs each contender forward and backward once, untimed."""

    def command(
        shapes: Shapes = None, tokens: Tokens = None, dtype: DtypeOption = None, scope: ScopeOption = None,
        impl: Impl = None, skip_impl: SkipImpl = None, seed: Seed = 0, device: Device = None, gpus: Gpus = None,
        ray: Ray = None, timeout: Timeout = TIMEOUT_S, in_process: InProcess = False, wait: Wait = True,
        dry_run: DryRun = False, detail: Detail = False, quiet: Quiet = False, form: Form = "table", out: Out = None,
        resume: Resume = False, csv: Csv = True, log_wandb: LogWandb = False,
        wandb_project: WandbProject = "swiglu-bench", wandb_entity: WandbEntity = None, wandb_group: WandbGroup = None,
        wandb_tags: WandbTags = None, wandb_id: WandbId = None,
    ) -> None:  # fmt: skip
        _run(name, locals())

    return command


DEFAULTS: dict[str, Any] = {
    "shapes": None, "tokens": None, "dtype": None, "scope": None, "impl": None, "skip_impl": None, "seed": 0,
    "device": None, "gpus": None, "ray": None, "baseline": "eager", "budget": 20.0, "l2": "cold", "regime": "steady",
    "energy": True, "timeout": TIMEOUT_S, "in_process": False, "wait": True, "dry_run": False, "detail": False,
    "quiet": False, "out": None, "resume": False, "csv": True, "log_wandb": False, "wandb_project": "swiglu-bench",
    "wandb_entity": None, "wandb_group": None, "wandb_tags": None, "wandb_id": None,
}  # fmt: skip
"""Every option of the timing commands but --format, as the command line has them."""
TIMING_ONLY = ("baseline", "budget", "l2", "regime", "energy")


def _run(name: str, options: dict[str, Any]) -> None:
    text.check("--format", options["form"], "table", *text.ROWS)
    console = text.screen(options["form"])
    if options["form"] == "table":
        raise typer.Exit(perform(name, options, console, request.command_line())[0])
    with contextlib.redirect_stdout(sys.stderr):  # what an implementation prints with --in-process
        status, run = perform(name, options, console, request.command_line())
    if run:
        from swiglu_bench.rows.finished_run import as_text

        text.put(as_text(run, options["form"]))
    raise typer.Exit(status)


def perform(name: str, options: dict[str, Any], console: Console, command_line: str) -> tuple[int, FinishedRun | None]:
    """Do what a command does with its options; its exit status and its rows, or None for `dry_run`.

    Raises BadInput before any work starts.
    """
    if options["detail"] and TASKS[name] == "memory":
        raise BadInput(f"--detail shows the errors of tensors, which {name} does not; give it to verify.")
    verifies = TASKS[name] == "verify"
    if not (options["in_process"] or options["dry_run"] or verifies):  # which may yet need Triton's interpreter
        from swiglu_bench.processes import forkserver

        forkserver.start()
    with request.team_of(options, interpret=verifies, console=console) as team:
        return _perform(name, options, console, command_line, team)


def _perform(
    name: str, options: dict[str, Any], console: Console, command_line: str, team: Team | None
) -> tuple[int, FinishedRun | None]:
    """`perform` on one device, or on those of a team."""
    from swiglu_bench.cli import listing
    from swiglu_bench.machine import machine

    task = TASKS[name]
    device = team.device if team else request.find_device(options["device"], interpret=task == "verify")
    interpreter = task == "verify" and device.type == "cpu"
    cases = request.cases_of(name, device, MODES[name], options)
    chosen = request.implementations_of(options)
    for path in dict.fromkeys(one.file for one in chosen if ".py:" in one.address):
        console.print(f"Note: --impl runs the code of {path}.", markup=False, highlight=False, soft_wrap=True)
    cold_l2 = request.choice("--l2", options.get("l2", "cold"), ("cold", "hot")) == "cold"
    rested = request.choice("--regime", options.get("regime", "steady"), ("steady", "rested")) == "rested"
    if options["dry_run"]:
        console.print(*listing.dry_run(cases, chosen, machine.free_memory_bytes(device)))
        return 0, None

    if not options["in_process"]:
        from swiglu_bench.processes import forkserver

        forkserver.start()
    from swiglu_bench.measure.rounds import Rule
    from swiglu_bench.rows.finished_run import Collected, FinishedRun
    from swiglu_bench.session.settings import Settings, Task
    from swiglu_bench.sweep.output import Output, Wandb, about, default_folder
    from swiglu_bench.sweep.sweep import Process, sweep

    settings = Settings(
        task=Task(task),
        device=device,
        command=command_line,
        run_id=machine.run_id(machine.now()),
        baseline=options.get("baseline", ""),
        rule=Rule(budget_s=options.get("budget", 0.0), rest_s=REST_S if rested else 0.0),
        cold_l2=cold_l2,
        energy=options.get("energy", False),
        detail=options["detail"],
        interpreter=interpreter,
    )
    wandb = Wandb(
        options["wandb_project"], options["wandb_entity"], options["wandb_group"],
        tuple(request.split(options["wandb_tags"])), options["wandb_id"],
    )  # fmt: skip
    output = Output(
        csv=options["csv"],
        folder=options["out"],
        wandb=wandb if options["log_wandb"] else None,
        resume=options["resume"],
        quiet=options["quiet"],
    )
    process = Process(None if options["in_process"] else options["timeout"], options["wait"], team)
    this, rows = team.assemble() if team else machine.describe(device), Collected()
    status = sweep(name, cases, chosen, settings, this, output, console, process, also=[rows])
    place = output.folder or default_folder(this, name, settings.run_id) if output.csv else None
    return status, FinishedRun(rows.records, about(settings, this), place)
