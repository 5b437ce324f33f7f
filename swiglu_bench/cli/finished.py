"""The commands about finished runs: comparing two, showing one, listing all."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from swiglu_bench.cli.options import (
    HOW,
    OUTPUT,
    Form,
    TimeDetail,
    WandbEntity,
    WandbGroup,
    WandbId,
    WandbProject,
    WandbTags,
    complete_implementations,
)
from swiglu_bench.rows import text as formats
from swiglu_bench.spec.cases import parse_dtypes, parse_tokens
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.sweep.request import split

if TYPE_CHECKING:
    from swiglu_bench.rows.finished_run import FinishedRun
    from swiglu_bench.rows.training_run import Training

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
    from swiglu_bench.finished import comparison, comparison_tables

    runs = [filtered(path, impl, shape, tokens, dtype, scope, mode) for path in (before, after)]
    wanted = None if by == "auto" else cast(Literal["ratio", "time"], by)
    found = comparison.compare(runs[0], runs[1], tolerance, wanted)
    status = {"fine": 0, "regression": 1, "cannot tell": 3}[found.outcome]
    if form == "table":
        screen = formats.screen()
        for part in comparison_tables.tables(found):
            screen.print(part)
    elif form == "github":
        formats.put(comparison_tables.markdown(found) + "\n")
    else:
        about = {
            "kind": "comparison", "version": 1, "before": str(before), "after": str(after), "by": found.by,
            "max_regression": tolerance, "outcome": found.outcome.value, "exit_status": status,
            "warnings": found.warnings,
        }  # fmt: skip
        formats.put(formats.as_text(form, comparison_tables.rows(found), about, comparison_tables.COLUMNS))
    raise typer.Exit(status)


def show(
    run: RunPath,
    impl: ImplFilter = None, shape: ShapeFilter = None, tokens: TokensFilter = None, dtype: DtypeFilter = None,
    scope: ScopeFilter = None, mode: ModeFilter = None,
    sort: Annotated[
        str | None,
        typer.Option(
            help="A figure of records.csv, such as ratio: implementations by its median; or implementation.",
            rich_help_panel=OUTPUT, show_default=False,
        ),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.", rich_help_panel=OUTPUT)] = False,
    pivot: Annotated[
        str | None,
        typer.Option(
            help="Show one figure of records.csv, such as time_ms: implementations down, token counts across.",
            rich_help_panel=OUTPUT, show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Form the ratios to this implementation, timed in the same rounds, instead.", rich_help_panel=CHOOSE,
            show_default=False,
        ),
    ] = None,
    detail: TimeDetail = False,
    form: Annotated[
        str,
        typer.Option(
            "--format", help="table, json, jsonl, csv, parquet (with --output), or with --pivot github.",
            rich_help_panel=OUTPUT,
        ),
    ] = "table",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New file instead of stdout.", rich_help_panel=OUTPUT, show_default=False),
    ] = None,
) -> None:  # fmt: skip
    """Show a finished run again: its tables, filtered and sorted, or its rows for another program.

    Of a training: the tables that `train` printed; --impl, --format and --output choose what of it.

    Example: swiglu-bench show results/nvidia-h200/2026-11-21/step-mlp --baseline compile --sort ratio
    """
    formats.check("--format", form, "table", "github", "parquet", *formats.ROWS)
    if output and form == "table":
        raise BadInput("--output is for rows; give --format json, jsonl, csv, parquet or github with it.")
    if form == "parquet" and not output:
        raise BadInput("--format parquet is no text; give the file as --output FILE.")
    from swiglu_bench.rows import training_run

    trained = training_run.folder_of(run)
    if trained:
        others = {
            "--shape": shape, "--tokens": tokens, "--dtype": dtype, "--scope": scope, "--mode": mode, "--sort": sort,
            "--reverse": reverse, "--pivot": pivot, "--baseline": baseline, "--detail": detail,
            "--format github": form == "github",
        }  # fmt: skip
        refused = ", ".join(name for name, given in others.items() if given)
        if refused:
            raise BadInput(f"{run} is a training run, which is shown by --impl, --format and --output; omit {refused}.")
        _show_training(training_run.load(trained).only(_parts(impl)), form, output)
        return
    if form == "github" and not pivot:
        raise BadInput("--format github needs --pivot FIGURE, such as --pivot time_ms.")
    from swiglu_bench.finished import show as showing
    from swiglu_bench.rows.finished_run import as_text

    if baseline:
        from swiglu_bench.rows.rebase import rebased

        everything = rebased(filtered(run, None, shape, tokens, dtype, scope, mode), baseline)
        chosen = everything.only(implementation=_parts(impl))
    else:
        chosen = filtered(run, impl, shape, tokens, dtype, scope, mode)
    if sort:
        chosen = showing.ordered(chosen, sort, reverse)
    rows = showing.pivot(chosen, showing.figure(pivot, "--pivot")) if pivot else None
    if form == "table":
        screen = formats.screen()
        for part in (
            showing.grid(rows, str(pivot)) if rows is not None else showing.tables(chosen, screen.width, detail)
        ):
            screen.print(part)
    elif form == "parquet":
        assert output is not None
        formats.write_parquet(chosen.frame if rows is None else rows, output)
    elif form == "github":
        formats.put(showing.markdown(rows or []) + "\n", output)
    elif rows is None:
        formats.put(as_text(chosen, form), output)
    else:
        about = {"kind": "pivot", "figure": pivot, "run": str(run)}
        formats.put(formats.as_text(form, rows, about, rows[0] if rows else ()), output)


def _show_training(training: Training, form: str, output: Path | None) -> None:
    """The tables that `train` printed, or the rows of summary.csv."""
    from swiglu_bench.rows.training import SUMMARY_COLUMNS
    from swiglu_bench.writers.training_tables import tables

    rows = [one.row() for one in training.summaries]
    if form == "table":
        screen = formats.screen()
        for part in tables(training.summaries):
            screen.print(part, highlight=False)
    elif form == "parquet":
        assert output is not None
        formats.write_parquet(rows, output)
    else:
        formats.put(formats.as_text(form, rows, {"kind": "training", **training.about}, SUMMARY_COLUMNS), output)


def history(
    root: Annotated[Path, typer.Argument(help="Folder with runs at any depth.")] = Path("results"),
    limit: Annotated[int, typer.Option(help="At most so many; 0: all.", min=0, rich_help_panel=OUTPUT)] = 0,
    form: Form = "table",
) -> None:
    """List all runs under a folder, newest first: what each was, how it went, where it is.

    Example: swiglu-bench history results
    """
    formats.check("--format", form, "table", *formats.ROWS)
    from swiglu_bench.finished import history as listing

    if not root.is_dir():
        raise BadInput(f"{root} is not a folder; give one with runs in it.")
    found = listing.lines(root)[: limit or None]
    if not found:
        raise BadInput(f"No run is in {root} or below; give a folder with runs in it.")
    if form == "table":
        screen = formats.screen()
        for part in listing.tables(found, root, screen.width):
            screen.print(part)
        return
    if form == "csv":
        found = [{k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in line.items()} for line in found]
    formats.put(formats.as_text(form, found, {"kind": "history", "version": 1, "folder": str(root)}, listing.COLUMNS))


def publish(
    run: RunPath,
    wandb_project: WandbProject = "swiglu-bench", wandb_entity: WandbEntity = None, wandb_group: WandbGroup = None,
    wandb_tags: WandbTags = None, wandb_id: WandbId = None,
) -> None:  # fmt: skip
    """Send a finished run to Weights & Biases, as --log-wandb would have. Exits 1 if not all of it could be sent.

    Example: swiglu-bench publish results/nvidia-h200/2026-11-21/forward --wandb-tags reference
    """
    from contextlib import closing

    from swiglu_bench.machine.machine import slug_of
    from swiglu_bench.rows.finished_run import load_run
    from swiglu_bench.sweep.output import Wandb, wandb_run
    from swiglu_bench.sweep.request import split

    found = load_run(run)
    if not found.records:
        raise BadInput(f"{run} has no rows to publish; give a run that has some.")
    wanted = Wandb(wandb_project, wandb_entity, wandb_group, tuple(split(wandb_tags)), wandb_id)
    slug = slug_of(found.records[0].device if found.records[0].cuda else "cpu")
    say = partial(formats.screen().print, markup=False, highlight=False, soft_wrap=True)
    with closing(
        wandb_run(wanted, found.command, slug, found.about, found.place, lambda text: say(f"Warning: {text}"))
    ) as sent:
        for record in found.records:
            sent.write(record)
    if sent.url_or_path:
        say(f"W&B: {sent.url_or_path}")
    raise typer.Exit(int(sent.failed))


def filtered(
    path: Path, impl: str | None, shape: str | None, tokens: str | None, dtype: str | None, scope: str | None,
    mode: str | None,
) -> FinishedRun:  # fmt: skip
    """A run with the rows that the options choose."""
    from swiglu_bench.rows.finished_run import load_run

    return load_run(path).only(
        implementation=_parts(impl),
        shape=_parts(shape),
        tokens=[str(count) for count in parse_tokens(tokens)] if tokens is not None else [],
        dtype=[one.value for one in parse_dtypes(dtype)] if dtype is not None else [],
        scope=_parts(scope),
        mode=_parts(mode),
    )


def _parts(text: str | None) -> list[str]:
    return split([text]) if text else []


def _share(option: str, text: str) -> float:
    """0.02 of 2%."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not match:
        raise BadInput(f"{option}: {text!r} is not a percentage; give one such as 2% or 0.5%.")
    return float(match[1]) / 100
