"""The command line: which commands there are. Those that are not here are in the `*_command(s).py` beside it.

Nothing heavy is imported at the top, so that `--help` and shell completion are instant.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from swiglu_bench.cli import finished, measure, recommend, tune
from swiglu_bench.cli import machine as machine_commands
from swiglu_bench.cli import report as report_command
from swiglu_bench.cli import tp as tp_command
from swiglu_bench.cli import train as train_command
from swiglu_bench.cli.options import (
    TIMEOUT_S,
    WHAT,
    Csv,
    Device,
    DtypeOption,
    Impl,
    InProcess,
    JsonForm,
    Out,
    ScopeOption,
    Seed,
    SkipImpl,
    Timeout,
    Wait,
    complete_shapes,
)
from swiglu_bench.rows import text
from swiglu_bench.spec.cases import Case, Mode, Scope, expand, parse_dtypes, parse_tokens
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.sweep import request
from swiglu_bench.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swiglu_bench.rows.audit_cell import Cell
    from swiglu_kernels.standalone.compiled import Report

app = typer.Typer(
    help="Benchmark and validate implementations of SwiGLU, silu(x Wg) * (x Wu).",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MEASURE, RUNS, LOOK, MACHINE = "Measure and check", "Finished runs", "Look", "This machine"
JSON = ("table", "json")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swiglu-bench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print it.", callback=_version, is_eager=True)] = False,
) -> None:
    del version


measure.add_commands(app, MEASURE)


@app.command(rich_help_panel=MEASURE)
def audit(
    impl: Impl = None, skip_impl: SkipImpl = None, scope: ScopeOption = None, dtype: DtypeOption = None,
    device: Device = None, timeout: Timeout = TIMEOUT_S, in_process: InProcess = False, wait: Wait = True,
    out: Out = None, csv: Csv = True, form: JsonForm = "table",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any cell is a fail.")] = False,
) -> None:  # fmt: skip
    """Ask every implementation for everything a user may want of it: the contract matrix.

    Sizes, strides, NaN, biases, autocast, compilation, graphs, huge tensors and more; each cell is pass, fail,
    unsupported or not run, with its reason. It states facts: the exit status is 0 unless --strict.

    Example: swiglu-bench audit --impl 'eager,liger,fused*' --scope glu
    """
    text.check("--format", form, *JSON)
    one = request.find_device(device, interpret=True)
    dtypes = parse_dtypes(dtype) if dtype is not None else [None]
    if len(dtypes) > 1:
        raise BadInput("--dtype: audit takes one, for the checks that have none of their own; give bf16, fp16 or fp32.")
    if out and not csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    scopes = request.scopes_of(scope if scope is not None else "activation,glu,mlp")
    chosen = request.implementations_of(
        {"impl": impl, "skip_impl": skip_impl, "in_process": in_process, "timeout": timeout}
    )
    if not in_process:
        from swiglu_bench.processes import forkserver

        forkserver.start()
    from swiglu_bench.audit import matrix
    from swiglu_bench.cli.audit import run_audit
    from swiglu_bench.machine import machine  # after Triton was told to interpret
    from swiglu_bench.processes import audit_parent

    cells: list[Cell] = []

    def ask(tell: Callable[[str], None], logs: Path) -> Iterator[Cell]:
        if in_process:
            found = matrix.audit(chosen, scopes, one, dtypes[0], tell=tell)
        else:
            found = audit_parent.audit(chosen, scopes, one, dtypes[0], tell, timeout_s=timeout, logs=logs)
        for cell in found:
            cells.append(cell)
            yield cell

    this, console = machine.describe(one), text.screen(form)
    about = {"command": request.command_line(), "machine": this}
    with request.held(one, wait, console):
        status = run_audit(ask, about, out, csv, strict, console)
    if form == "json":
        told = {"kind": "audit", "command": about["command"], "machine": this.as_dict()}
        text.put(text.as_json(told | {"rows": [dataclasses.asdict(cell) for cell in cells]}))
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
    form: JsonForm = "table",
) -> None:  # fmt: skip
    """Test the suite itself: dozens of wrong or cheating implementations must be caught, and no right one.

    Prints which check caught which. Exits 1 if one gets through, or if an implementation fails at a random case.

    Example: swiglu-bench selftest --false-alarms 50 --skip-impl 'compile*'
    """
    text.check("--format", form, *JSON)
    one = request.find_device(device, interpret=True)
    from swiglu_bench.cli.selftest import Found, run_selftest  # after Triton was told to interpret

    chosen = request.implementations_of({"impl": impl, "skip_impl": skip_impl, "in_process": True, "timeout": None})
    count = false_alarms if false_alarms is not None else 200 if one.type == "cuda" else 20
    console, found = text.screen(form), Found()
    with request.held(one, wait, console):
        status = run_selftest(chosen, one, seed, count, zoo, console, found)
    if form == "json":
        text.put(text.as_json({"kind": "selftest", "passed": status == 0, **dataclasses.asdict(found)}))
    raise typer.Exit(status)


@app.command("list", rich_help_panel=LOOK)
def list_(device: Device = None, form: JsonForm = "table") -> None:
    """Show implementations with their availability, shapes and sweeps, and this machine.

    Example: swiglu-bench list
    """
    text.check("--format", form, *JSON)
    from swiglu_bench.cli import listing
    from swiglu_bench.machine import machine
    from swiglu_bench.spec import shapes

    chosen = machine.find_device(device)
    known, configs = request.catalogue(request.loader(TIMEOUT_S)), shapes.all_configs()
    about = machine.describe(chosen)
    if form == "json":
        text.put(text.as_json(listing.everything(known, configs, about.as_dict())))
        return
    console = text.screen()
    console.print(*listing.implementations(known, chosen.type, about.compute_capability))
    console.print(*listing.shapes(configs))
    console.print(listing.machine(about.as_dict()))


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
    form: JsonForm = "table",
) -> None:
    """Compile every kernel for GPUs that need not be here: registers, spills, shared memory, wgmma and TMA counts.

    Exits 1 if a kernel spills registers.

    Example: swiglu-bench inspect --target sm_90 --tokens 1,128,8k
    """
    text.check("--format", form, *JSON)
    from swiglu_bench.cli import listing
    from swiglu_bench.spec.shapes import load_shapes

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
    if form == "json":
        text.put(text.as_json({"kind": "kernels", "rows": [dataclasses.asdict(report) for report in reports]}))
    else:
        text.screen().print(*listing.kernels(reports))
    raise typer.Exit(int(any(report.stack_bytes for report in reports)))


app.command(rich_help_panel=MEASURE)(tp_command.tp)
app.command(rich_help_panel=MEASURE)(train_command.train)
for _command in (finished.compare, finished.show, finished.history, finished.publish):
    app.command(rich_help_panel=RUNS)(_command)
app.command(rich_help_panel=RUNS)(recommend.recommend)
app.command(rich_help_panel=RUNS)(report_command.report)
app.command(rich_help_panel=MACHINE)(machine_commands.ceilings)
app.command(rich_help_panel=MACHINE)(machine_commands.noise)
app.command(rich_help_panel=MACHINE)(machine_commands.doctor)
app.command(rich_help_panel=MACHINE)(tune.tune)


def _compile(cases: list[Case], capabilities: list[tuple[int, int]]) -> list[Report]:
    import importlib.util

    if importlib.util.find_spec("triton") is None:
        raise BadInput("inspect needs Triton, which is not installed; it exists for Linux.")
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels are never compiled
    import torch

    from swiglu_kernels.standalone import compiled

    return [
        compiled.report(name, *sizes, getattr(torch, case.dtype.value), capability)
        for capability in capabilities
        for case in cases
        for sizes in [(case.tokens, case.shape.hidden, case.shape.intermediate)]
        for name in compiled.launches(*sizes, getattr(torch, case.dtype.value), capability)
    ]


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
