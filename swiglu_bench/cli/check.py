"""The commands that check without timing: `audit`, `selftest`, and `inspect`, which compiles the kernels."""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from swiglu_bench import request
from swiglu_bench.cases.cases import Case, Mode, Precision, Scope, expand, parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput, one_line
from swiglu_bench.cli.listing import table
from swiglu_bench.options import (
    HOW,
    WHAT,
    AuditOptions,
    Device,
    Impl,
    JsonForm,
    Seed,
    ShapeSeed,
    SkipImpl,
    Wait,
    complete_shapes,
    option,
)  # fmt: skip
from swiglu_bench.rows.record import grouped
from swiglu_bench.show import text
from swiglu_bench.tasks.sweep import start_forkserver

if TYPE_CHECKING:
    from swiglu_kernels.standalone.compiled import Resources

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
    text.check("--format", form, text.TABLE, "json")
    device = request.find_device(options.device, interpret=True)
    dtypes = parse_dtypes(options.dtype) if options.dtype is not None else [None]
    if len(dtypes) > 1:
        raise BadInput("--dtype: audit takes one, for the checks that have none of their own; give bf16, fp16 or fp32.")
    scopes = request.scopes_of(options.scope if options.scope is not None else ",".join(Scope))
    chosen = request.implementations_of(options)
    if not options.impl:
        chosen = [known for known in chosen if Precision.UNQUANTISED in known.precisions]
    if not options.in_process:
        start_forkserver("swiglu_bench.tasks.contract.matrix")
    from swiglu_bench.tasks.audit import Asked, run_audit  # after Triton was told to interpret

    status, about, cells = run_audit(chosen, Asked(scopes, dtypes[0]), device, options, text.screen(form))
    if form == "json":
        text.put(text.as_json({"kind": "audit", **about, "rows": [cell.row() for cell in cells]}))
    raise typer.Exit(status)


def selftest(
    impl: Impl = None,
    skip_impl: SkipImpl = None,
    device: Device = None,
    seed: Seed = 0,
    wait: Wait = True,
    false_alarms: Annotated[
        int | None,
        option(HOW, "Random cases that must all pass; 0: none. \\[default: 50 on a GPU, 20 on a CPU]", min=0),
    ] = None,
    zoo: Annotated[bool, option(HOW, "Run the wrong implementations.")] = True,
    form: JsonForm = "table",
) -> None:
    """Test the suite itself: dozens of wrong or cheating implementations must be caught, and no correct one.

    Prints which check caught which. Exits 1 if a wrong one is not caught, or if a correct one fails at a random case.

    Example: swiglu-bench selftest --false-alarms 50 --skip-impl 'compile*'
    """
    text.check("--format", form, text.TABLE, "json")
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
    shapes: Annotated[str, option(WHAT, "Shapes to specialise for.", autocompletion=complete_shapes)] = "llama7b",
    tokens: Annotated[
        str | None, option(WHAT, "Token counts, which choose the tiles. \\[default: 8k; of random:N, those drawn]")
    ] = None,
    dtype: Annotated[str, option(WHAT, "bf16, fp16, fp32, comma-separated.")] = "bf16",
    seed: ShapeSeed = 0,
    form: JsonForm = "table",
) -> None:
    """Compile every kernel for GPUs that need not be present: registers, spills, shared memory, wgmma and TMA counts.

    Exits 1 if a kernel spills registers.

    Example: swiglu-bench inspect --target sm_90 --tokens 1,128,8k
    """
    text.check("--format", form, text.TABLE, "json")
    from swiglu_bench.cases.shapes import dense_shapes, with_tokens

    matches = [re.fullmatch(r"(?:sm_)?(\d+)(\d)a?", part.strip()) for part in target.split(",")]
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
                raise BadInput(
                    f"--target: Triton cannot compile for sm_{capability[0]}{capability[1]} ({report}); "
                    "give one that it knows, such as sm_80, sm_90 or sm_100."
                )
            yield report


def _compiled_report(what: tuple[Any, ...]) -> Resources | str:
    """In a child process: what one kernel uses, or why it cannot be compiled."""
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
    """A table for each target, dtype and token count, without kinds of instructions that none of its kernels has."""
    for (capability, dtype, tokens), same in grouped(reports, attrgetter("capability", "dtype", "tokens")).items():
        counts = {
            name: [getattr(report, name) for report in same]
            for name in INSTRUCTIONS
            if any(getattr(report, name) for report in same)
        }
        figures = ("registers", "spills", "shared", *(INSTRUCTIONS[name] for name in counts))
        found = table(f"sm_{capability.replace('.', '')}, {dtype}, {tokens} tokens", "kernel", *figures, right=figures)
        for report, *own in zip(same, *counts.values(), strict=True):
            spills = Text(f"{report.stack_bytes} B", "bold red") if report.stack_bytes else Text("none", "green")
            shared = f"{report.shared_bytes / 1024:.0f} KiB"
            found.add_row(report.kernel, str(report.registers), spills, shared, *(str(count or "-") for count in own))
        yield found
