"""The command `inspect`: what the compiler makes of each kernel of swiglu_kernels."""

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

from swiglu_bench.cases.cases import Case, Mode, Scope, expand, parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput, one_line
from swiglu_bench.cli.listing import table
from swiglu_bench.options import WHAT, JsonForm, ShapeSeed, complete_shapes, option
from swiglu_bench.rows import text
from swiglu_bench.rows.grouping import grouped

if TYPE_CHECKING:
    from swiglu_kernels.standalone.compiled import Report

LEGEND = """\
registers and spills (stack) are per thread, shared memory is per program, instructions are counted in the PTX; \
compiled here for each target, without a GPU."""

TOKENS = (8192,)
INSTRUCTIONS = {"wgmma": "wgmma", "tcgen05": "tcgen05", "mma": "mma.sync", "tma": "TMA"}
"""Fields of a report, and what the table calls them."""


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
    sizes, dtypes = with_tokens(dense_shapes(shapes, "inspect", seed), TOKENS), parse_dtypes(dtype)
    counts = parse_tokens(tokens) if tokens is not None else None
    cases = expand(sizes, scopes=[Scope.GLU], modes=[Mode.STEP], dtypes=dtypes, tokens=counts)
    reports = list(_compiled(cases, capabilities))
    if form == "json":
        text.put(text.as_json({"kind": "kernels", "rows": [dataclasses.asdict(report) for report in reports]}))
    else:
        text.screen().print(*_tables(reports), Text(LEGEND, "dim"))
    raise typer.Exit(int(any(report.stack_bytes for report in reports)))


def _compiled(cases: list[Case], capabilities: list[tuple[int, int]]) -> Iterator[Report]:
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
                reports = list(pool.map(_report, wanted))
            except BrokenProcessPool:  # LLVM ends its process over what it does not know
                reports = ["the compiler ended its process"]
        for report in reports:
            if isinstance(report, str):
                raise BadInput(
                    f"--target: Triton cannot compile for sm_{capability[0]}{capability[1]} ({report}); "
                    "give one that it knows, such as sm_80, sm_90 or sm_100."
                )
            yield report


def _report(what: tuple[Any, ...]) -> Report | str:
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


def _tables(reports: Iterable[Report]) -> Iterator[Table]:
    """A table for each target, dtype and token count, without kinds of instructions that none of its kernels has."""
    for (capability, dtype, tokens), same in grouped(reports, attrgetter("capability", "dtype", "tokens")).items():
        counts = {
            name: [getattr(one, name) for one in same]
            for name in INSTRUCTIONS
            if any(getattr(one, name) for one in same)
        }
        figures = ("registers", "spills", "shared", *(INSTRUCTIONS[name] for name in counts))
        found = table(f"sm_{capability.replace('.', '')}, {dtype}, {tokens} tokens", "kernel", *figures, right=figures)
        for one, *own in zip(same, *counts.values(), strict=True):
            spills = Text(f"{one.stack_bytes} B", "bold red") if one.stack_bytes else Text("none", "green")
            shared = f"{one.shared_bytes / 1024:.0f} KiB"
            found.add_row(one.kernel, str(one.registers), spills, shared, *(str(count or "-") for count in own))
        yield found
