"""The command line: options in, a sweep run, rows out. The only place that ties the rooms together.

Nothing heavy is imported at the top, so that `--help` and shell completion are instant.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from swiglu_bench import __version__, machine_commands, run_commands
from swiglu_bench.cases import BadInput, Case, Mode, Scope, did_you_mean, expand, parse_dtypes, parse_tokens
from swiglu_bench.options import (
    L2,
    TIMEOUT_S,
    WHAT,
    Baseline,
    Budget,
    Csv,
    Detail,
    Device,
    DryRun,
    DtypeOption,
    Energy,
    Impl,
    InProcess,
    LogWandb,
    Out,
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
    WandbProject,
    complete_shapes,
)
from swiglu_bench.report import command as report_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from rich.console import Console

    from swiglu_bench.cells import Cell
    from swiglu_bench.registry import Implementation
    from swiglu_kernels.compiled import Report

app = typer.Typer(
    help="Benchmark and validate implementations of SwiGLU, silu(x Wg) * (x Wu).",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MEASURE, RUNS, LOOK, MACHINE = "Measure and check", "Finished runs", "Look", "This machine"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swiglu-bench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print it.", callback=_version, is_eager=True)] = False,
) -> None:
    del version


def _timing_command(mode: Mode, summary: str, example: str) -> None:
    """Add the command that times a mode."""

    def command(
        shapes: Shapes = None, tokens: Tokens = None, dtype: DtypeOption = None, scope: ScopeOption = None,
        impl: Impl = None, skip_impl: SkipImpl = None, seed: Seed = 0, device: Device = None,
        baseline: Baseline = "eager", budget: Budget = 20.0, l2: L2 = "cold", regime: Regime = "steady",
        energy: Energy = True, timeout: Timeout = TIMEOUT_S, in_process: InProcess = False, wait: Wait = True,
        dry_run: DryRun = False, detail: TimeDetail = False, out: Out = None, resume: Resume = False, csv: Csv = True,
        log_wandb: LogWandb = False, wandb_project: WandbProject = "swiglu-bench",
    ) -> None:  # fmt: skip
        _sweep(mode.value, "time", mode, locals())

    app.command(mode.value, rich_help_panel=MEASURE, help=f"{summary}\n\nExample: {example}")(command)


def _checking_command(name: str, summary: str, example: str) -> None:
    """Add a command that runs each contender forward and backward once, untimed."""

    def command(
        shapes: Shapes = None, tokens: Tokens = None, dtype: DtypeOption = None, scope: ScopeOption = None,
        impl: Impl = None, skip_impl: SkipImpl = None, seed: Seed = 0, device: Device = None,
        timeout: Timeout = TIMEOUT_S, in_process: InProcess = False, wait: Wait = True, dry_run: DryRun = False,
        detail: Detail = False, out: Out = None, resume: Resume = False, csv: Csv = True,
        log_wandb: LogWandb = False, wandb_project: WandbProject = "swiglu-bench",
    ) -> None:  # fmt: skip
        _sweep(name, name, Mode.STEP, locals())

    app.command(name, rich_help_panel=MEASURE, help=f"{summary}\n\nExample: {example}")(command)


_timing_command(
    Mode.FORWARD,
    "Time the forward pass (inference: nothing is kept for backward).",
    "swiglu-bench forward --shapes llama7b --tokens 1,128,8k",
)
_timing_command(
    Mode.BACKWARD,
    "Time the backward pass, each sample after a fresh forward that is not timed.",
    "swiglu-bench backward --shapes llama3-8b --scope mlp",
)
_timing_command(
    Mode.STEP,
    "Time forward and backward together: what a training step pays.",
    "swiglu-bench step --shapes llama7b --baseline compile",
)
_checking_command(
    "memory",
    "Measure what is saved for backward, the peak and the workspace, beside what arithmetic predicts.",
    "swiglu-bench memory --shapes llama7b --log-wandb",
)
_checking_command(
    "verify",
    "Check the output and every gradient against fp64, judged by what eager loses. Exits 1 on any failure. "
    "On a CPU the Triton kernels run through Triton's interpreter, on small shapes.",
    "swiglu-bench verify --impl 'fused*'",
)


@app.command(rich_help_panel=MEASURE)
def audit(
    impl: Impl = None, skip_impl: SkipImpl = None, scope: ScopeOption = None, dtype: DtypeOption = None,
    device: Device = None, timeout: Timeout = TIMEOUT_S, in_process: InProcess = False, wait: Wait = True,
    out: Out = None, csv: Csv = True,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any cell is a fail.")] = False,
) -> None:  # fmt: skip
    """Ask every implementation for everything a user may want of it: the contract matrix.

    Sizes, strides, NaN, biases, autocast, compilation, graphs, huge tensors and more; each cell is pass, fail,
    unsupported or not run, with its reason. It states facts: the exit status is 0 unless --strict.

    Example: swiglu-bench audit --impl 'eager,liger,fused*' --scope glu
    """
    one = _device(device, interpret=True)
    dtypes = parse_dtypes(dtype) if dtype is not None else [None]
    if len(dtypes) > 1:
        raise BadInput("--dtype: audit takes one, for the checks that have none of their own; give bf16, fp16 or fp32.")
    if out and not csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    scopes = _scopes(scope if scope is not None else "activation,glu,mlp")
    chosen = _implementations({"impl": impl, "skip_impl": skip_impl, "in_process": in_process, "timeout": timeout})
    if not in_process:
        from swiglu_bench import zygote

        zygote.start()
    from swiglu_bench import isolated_audit, machine  # after Triton was told to interpret
    from swiglu_bench.audit import matrix
    from swiglu_bench.audit.report import run_audit

    def ask(tell: Callable[[str], None], logs: Path) -> Iterator[Cell]:
        if in_process:
            return matrix.audit(chosen, scopes, one, dtypes[0], tell=tell)
        return isolated_audit.audit(chosen, scopes, one, dtypes[0], tell, timeout_s=timeout, logs=logs)

    about, console = {"command": _command_line(), "machine": machine.describe(one)}, _console()
    with _held(one, wait, console):
        status = run_audit(ask, about, out, csv, strict, console)
    raise typer.Exit(status)


@app.command(rich_help_panel=MEASURE)
def selftest(
    impl: Impl = None, skip_impl: SkipImpl = None, device: Device = None, seed: Seed = 0, wait: Wait = True,
    false_alarms: Annotated[
        int | None,
        typer.Option(
            help="Random cases at which all must pass; 0: none. \\[default: 200 on a GPU, 20 on a CPU]",
            min=0, show_default=False,
        ),
    ] = None,
    zoo: Annotated[bool, typer.Option("--zoo/--no-zoo", help="Send the wrong implementations through.")] = True,
) -> None:  # fmt: skip
    """Test the suite itself: dozens of wrong or cheating implementations must be caught, and no right one.

    Prints which check caught which. Exits 1 if one gets through, or if an implementation fails at a random case.

    Example: swiglu-bench selftest --false-alarms 50 --skip-impl 'compile*'
    """
    one = _device(device, interpret=True)
    from swiglu_bench.selftest.report import run_selftest  # after Triton was told to interpret

    chosen = _implementations({"impl": impl, "skip_impl": skip_impl, "in_process": True, "timeout": None})
    count = false_alarms if false_alarms is not None else 200 if one.type == "cuda" else 20
    console = _console()
    with _held(one, wait, console):
        status = run_selftest(chosen, one, seed, count, zoo, console)
    raise typer.Exit(status)


@app.command("list", rich_help_panel=LOOK)
def list_(device: Device = None) -> None:
    """Show implementations with their availability, shapes and sweeps, and this machine.

    Example: swiglu-bench list
    """
    from swiglu_bench import listing, machine, shapes

    chosen = machine.find_device(device)
    console = _console()
    console.print(*listing.implementations(_catalogue(_loader(TIMEOUT_S)), chosen.type))
    console.print(*listing.shapes(shapes.all_configs()))
    console.print(listing.machine(machine.describe(chosen).as_dict()))


@app.command(rich_help_panel=LOOK)
def inspect(
    target: Annotated[
        str, typer.Option(help="Compute capabilities, as sm_80,sm_90,sm_100.", rich_help_panel=WHAT)
    ] = "sm_80,sm_90,sm_100",
    shapes: Annotated[
        str, typer.Option(help="Shapes to specialise for.", rich_help_panel=WHAT, autocompletion=complete_shapes)
    ] = "llama7b",
    tokens: Annotated[str, typer.Option(help="Token counts, which choose the tiles.", rich_help_panel=WHAT)] = "8k",
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, comma-separated.", rich_help_panel=WHAT)] = "bf16",
) -> None:
    """Compile every kernel for GPUs that need not be here: registers, spills, shared memory, wgmma and TMA counts.

    Exits 1 if a kernel spills registers.

    Example: swiglu-bench inspect --target sm_90 --tokens 1,128,8k
    """
    from swiglu_bench import listing
    from swiglu_bench.shapes import load_shapes

    matches = [re.fullmatch(r"(?:sm_)?(\d+)(\d)a?", part.strip()) for part in target.split(",")]
    if not all(matches):
        raise BadInput(f"--target: {target!r} is not a list of compute capabilities; give sm_80, sm_90 or sm_100.")
    capabilities = [(int(match[1]), int(match[2])) for match in matches if match]
    cases = expand(
        load_shapes(shapes),
        scopes=[Scope.GLU],
        modes=[Mode.STEP],
        dtypes=parse_dtypes(dtype),
        tokens=parse_tokens(tokens),
    )
    reports = _compile(cases, capabilities)
    _console().print(*listing.kernels(reports))
    raise typer.Exit(int(any(report.stack_bytes for report in reports)))


app.command(rich_help_panel=RUNS)(report_command.report)
app.command(rich_help_panel=RUNS)(run_commands.compare)
app.command(rich_help_panel=MACHINE)(machine_commands.ceilings)
app.command(rich_help_panel=MACHINE)(machine_commands.noise)
app.command(rich_help_panel=MACHINE)(machine_commands.doctor)


def _compile(cases: list[Case], capabilities: list[tuple[int, int]]) -> list[Report]:
    import importlib.util

    if importlib.util.find_spec("triton") is None:
        raise BadInput("inspect needs Triton, which is not installed; it exists for Linux.")
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels are never compiled
    import torch

    from swiglu_kernels import compiled

    return [
        compiled.report(name, *sizes, getattr(torch, case.dtype.value), capability)
        for capability in capabilities
        for case in cases
        for sizes in [(case.tokens, case.shape.hidden, case.shape.intermediate)]
        for name in compiled.launches(*sizes, getattr(torch, case.dtype.value), capability)
    ]


def _sweep(command: str, task: str, mode: Mode, options: dict[str, Any]) -> None:
    """From option strings to an exit status; every check of the input comes before any work."""
    from swiglu_bench import listing, machine

    if options["detail"] and task == "memory":
        raise BadInput(f"--detail shows the errors of tensors, which {command} does not; give it to verify.")
    console = _console()
    device = _device(options["device"], interpret=task == "verify")
    interpreter = task == "verify" and device.type == "cpu"
    cases = _cases(command, device, mode, options)
    chosen = _implementations(options)
    for path in dict.fromkeys(one.file for one in chosen if ".py:" in one.address):
        console.print(f"Note: --impl runs the code of {path}.", markup=False, highlight=False, soft_wrap=True)
    cold_l2 = _choice("--l2", options.get("l2", "cold"), ("cold", "hot")) == "cold"
    rested = _choice("--regime", options.get("regime", "steady"), ("steady", "rested")) == "rested"
    if options["dry_run"]:
        console.print(*listing.dry_run(cases, chosen, machine.free_memory_bytes(device)))
        return

    if not options["in_process"]:
        from swiglu_bench import zygote

        zygote.start()
    from swiglu_bench.measure.rounds import Rule
    from swiglu_bench.output import Output
    from swiglu_bench.runner import Settings, Task
    from swiglu_bench.sweep import Process, sweep

    settings = Settings(
        task=Task(task),
        device=device,
        command=_command_line(),
        run_id=f"{machine.now().replace(':', '').replace('-', '')}-{os.getpid()}",
        baseline=options.get("baseline", ""),
        rule=Rule(budget_s=options.get("budget", 0.0), rest_s=REST_S if rested else 0.0),
        cold_l2=cold_l2,
        energy=options.get("energy", False),
        detail=options["detail"],
        interpreter=interpreter,
    )
    output = Output(
        csv=options["csv"],
        folder=options["out"],
        wandb_project=options["wandb_project"] if options["log_wandb"] else None,
        resume=options["resume"],
    )
    process = Process(None if options["in_process"] else options["timeout"], options["wait"])
    raise typer.Exit(sweep(command, cases, chosen, settings, machine.describe(device), output, console, process))


def _device(text: str | None, interpret: bool) -> torch.device:
    """The device to use; where Triton's interpreter will be needed, it is switched on before Triton is imported."""
    from swiglu_bench.machine import find_device

    device = find_device(text)
    if interpret and device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    return device


REST_S = 0.05
"""The pause of `--regime rested`: some twenty times a large kernel, so that power and clocks recover."""
VERIFY_TOKENS = {"cpu": (33,), "cuda": (1, 127, 1024)}
"""Token counts of `verify` unless told otherwise: an odd number, and on a GPU one token and whole tiles too."""


def _cases(command: str, device: torch.device, mode: Mode, options: dict[str, Any]) -> list[Case]:
    from swiglu_bench.shapes import load_shapes

    on_gpu, verifying = device.type == "cuda", command == "verify"
    default_shapes = "smoke,odd" + (",llama7b" if on_gpu else "") if verifying else "llama7b" if on_gpu else "smoke"
    default_dtype = "fp32,fp16,bf16" if verifying else "bf16" if on_gpu else "fp32"
    default_scopes = "activation,glu,mlp" if verifying else "glu"
    default_tokens = VERIFY_TOKENS[device.type] if verifying else None
    return expand(
        load_shapes(options["shapes"] if options["shapes"] is not None else default_shapes),
        scopes=_scopes(options["scope"] if options["scope"] is not None else default_scopes),
        modes=[mode],
        dtypes=parse_dtypes(options["dtype"] if options["dtype"] is not None else default_dtype),
        tokens=parse_tokens(options["tokens"]) if options["tokens"] is not None else default_tokens,
        seed=options["seed"],
    )


def _scopes(text: str) -> list[Scope]:
    return [Scope(_choice("--scope", part.strip(), [scope.value for scope in Scope])) for part in text.split(",")]


T = TypeVar("T", bound=str)


def _choice(option: str, value: T, known: Sequence[str]) -> T:
    if value not in known:
        raise BadInput(f"{option}: {value!r} is not one of {', '.join(known)}; {did_you_mean(value, known)}")
    return value


Load = Callable[[str], "Implementation"]


def _loader(timeout_s: float | None) -> Load:
    """What brings implementations that are not the suite's own, by their address: without their code, unless None."""
    if timeout_s is None:
        from swiglu_bench.registry import load

        return load

    def declare(address: str) -> Implementation:
        from swiglu_bench import isolation  # takes a while; most commands name no such implementation

        return isolation.declare(address, timeout_s)

    return declare


def _catalogue(load: Load) -> list[Implementation]:
    from swiglu_bench.implementations import CATALOGUE
    from swiglu_bench.registry import entry_point_addresses

    return [*CATALOGUE, *map(load, entry_point_addresses())]


def _implementations(options: dict[str, Any]) -> list[Implementation]:
    """The chosen implementations; a baseline that was not chosen is measured along with them."""
    from swiglu_bench.registry import select

    def split(values: list[str] | None) -> list[str]:
        return [part for value in values or [] for part in re.split(r"\s*,\s*", value.strip()) if part]

    wanted, unwanted = split(options["impl"]), split(options["skip_impl"])
    load = _loader(None if options["in_process"] else options["timeout"])
    catalogue = _catalogue(load)
    chosen = select(catalogue, wanted, unwanted, load)
    baseline = options.get("baseline")
    if baseline is None or baseline in {implementation.name for implementation in chosen}:
        return chosen
    names = [implementation.name for implementation in catalogue]
    if baseline not in names:
        raise BadInput(f"--baseline: no implementation is called {baseline!r}; {did_you_mean(baseline, names)}")
    if any(fnmatch.fnmatch(baseline, pattern) for pattern in unwanted):
        return chosen
    return select(catalogue, [baseline]) + chosen


def _command_line() -> str:
    return shlex.join(["swiglu-bench", *sys.argv[1:]])


def _held(device: torch.device, wait: bool, console: Console) -> AbstractContextManager[None]:
    """A GPU for this command alone."""
    from swiglu_bench import locks

    return locks.device(
        device, _command_line(), wait, partial(console.print, markup=False, highlight=False, soft_wrap=True)
    )


def _console() -> Console:
    from rich.console import Console

    return Console()


def main() -> None:
    """The `swiglu-bench` command: bad input becomes one sentence and exit status 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        sys.exit(app(standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except BadInput as error:
        message = str(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what Typer's own parser complains about has it
            raise
        message = error.format_message()
    typer.echo(f"Error: {message}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
