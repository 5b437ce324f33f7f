"""The commands about finished runs: comparing two, showing one, listing all."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from swiglu_bench import formats
from swiglu_bench.cases import BadInput, parse_dtypes, parse_tokens
from swiglu_bench.options import HOW, OUTPUT, complete_implementations

if TYPE_CHECKING:
    from swiglu_bench.runs import Run

CHOOSE = "Which rows"
RunPath = Annotated[Path, typer.Argument(help="Folder of a run, or its records.csv.", show_default=False)]
ImplFilter = Annotated[
    str | None,
    typer.Option(
        "--impl", help="Names or globs, comma-separated.", rich_help_panel=CHOOSE, show_default=False,
        autocompletion=complete_implementations,
    ),
]  # fmt: skip
ShapeFilter = Annotated[
    str | None, typer.Option("--shape", help="Names or globs.", rich_help_panel=CHOOSE, show_default=False)
]
TokensFilter = Annotated[
    str | None, typer.Option("--tokens", help="As 1,128,1k,8k.", rich_help_panel=CHOOSE, show_default=False)
]
DtypeFilter = Annotated[
    str | None, typer.Option("--dtype", help="bf16, fp16, fp32.", rich_help_panel=CHOOSE, show_default=False)
]
ScopeFilter = Annotated[
    str | None, typer.Option("--scope", help="activation, glu, mlp.", rich_help_panel=CHOOSE, show_default=False)
]
ModeFilter = Annotated[
    str | None, typer.Option("--mode", help="forward, backward, step.", rich_help_panel=CHOOSE, show_default=False)
]


def compare(
    before: RunPath,
    after: RunPath,
    max_regression: Annotated[
        str, typer.Option(help="How much worse a row may be, as 2%; beyond it it exits with 1.", rich_help_panel=HOW)
    ] = "2%",
    by: Annotated[
        str,
        typer.Option(
            help="ratio (to the baseline: drift of the machine cancels), time, or auto: ratio where both runs have the "
            "same baseline.",
            rich_help_panel=HOW,
        ),
    ] = "auto",
    impl: ImplFilter = None, shape: ShapeFilter = None, tokens: TokensFilter = None, dtype: DtypeFilter = None,
    scope: ScopeFilter = None, mode: ModeFilter = None,
    form: Annotated[
        str, typer.Option("--format", help="table, github (Markdown), json, jsonl or csv.", rich_help_panel=OUTPUT)
    ] = "table",
) -> None:  # fmt: skip
    """Compare two runs row by row: quotient, interval, verdict. Made for CI.

    Exits 0 if no row is worse than allowed, 1 if one is or broke, 3 if that cannot be told, 2 if the runs cannot be
    compared.

    Example: swiglu-bench compare results/nvidia-h200/2026-11-20/forward results/nvidia-h200/2026-11-21/forward
    """
    formats.check("--format", form, "table", "github", *formats.ROWS)
    formats.check("--by", by, "auto", "ratio", "time")
    tolerance = _share("--max-regression", max_regression)
    from swiglu_bench.compare import comparison, report

    runs = [filtered(path, impl, shape, tokens, dtype, scope, mode) for path in (before, after)]
    wanted = None if by == "auto" else cast(Literal["ratio", "time"], by)
    found = comparison.compare(runs[0], runs[1], tolerance, wanted)
    status = {"fine": 0, "regression": 1, "cannot tell": 3}[found.outcome]
    if form == "table":
        screen = formats.screen()
        for part in report.tables(found):
            screen.print(part)
    elif form == "github":
        sys.stdout.write(report.markdown(found) + "\n")
    else:
        about = {
            "kind": "comparison", "version": 1, "before": str(before), "after": str(after), "by": found.by,
            "max_regression": tolerance, "outcome": found.outcome.value, "exit_status": status,
            "warnings": found.warnings,
        }  # fmt: skip
        sys.stdout.write(formats.as_text(form, report.rows(found), about, report.COLUMNS))
    raise typer.Exit(status)


def filtered(
    path: Path, impl: str | None, shape: str | None, tokens: str | None, dtype: str | None, scope: str | None,
    mode: str | None,
) -> Run:  # fmt: skip
    """A run with the rows that the options choose."""
    from swiglu_bench.runs import load_run

    return load_run(path).only(
        implementation=_parts(impl),
        shape=_parts(shape),
        tokens=[str(count) for count in parse_tokens(tokens)] if tokens is not None else [],
        dtype=[one.value for one in parse_dtypes(dtype)] if dtype is not None else [],
        scope=_parts(scope),
        mode=_parts(mode),
    )


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _share(option: str, text: str) -> float:
    """0.02 of 2%."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not match:
        raise BadInput(f"{option}: {text!r} is not a percentage; give one such as 2% or 0.5%.")
    return float(match[1]) / 100
