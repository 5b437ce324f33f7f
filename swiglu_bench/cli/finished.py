"""The commands about finished runs: comparing two, showing one, listing all, sending one to W&B."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiglu_bench import options
from swiglu_bench.cases.cases import parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.options import HOW, OUTPUT, Text, command_of, option
from swiglu_bench.request import split
from swiglu_bench.show import text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swiglu_bench.rows.finished_run import FinishedRun

CHOOSE = "Which rows"
RunPath = Annotated[Path, typer.Argument(help="Folder of a run, or its records.csv.", show_default=False)]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The options that choose rows of a finished run."""

    impl: Annotated[
        Text, option(CHOOSE, "Names or globs, comma-separated.", autocompletion=options.complete_implementations)
    ] = None
    shape: Annotated[Text, option(CHOOSE, "Names or globs.")] = None
    tokens: Annotated[Text, option(CHOOSE, "As 1,128,1k,8k.")] = None
    dtype: Annotated[Text, option(CHOOSE, "bf16, fp16, fp32.")] = None
    scope: Annotated[Text, option(CHOOSE, "activation, glu, mlp.")] = None
    mode: Annotated[Text, option(CHOOSE, "forward, backward, step.")] = None

    def of(self, path: Path, baseline: str | None = None) -> FinishedRun:
        """A run with these rows, its ratios relative to `baseline` where that is given."""
        from swiglu_bench.rows.finished_run import load_run

        chosen = load_run(path).only(
            implementation=[] if baseline else self.names,
            shape=_parts("--shape", self.shape),
            tokens=[str(count) for count in parse_tokens(self.tokens)] if self.tokens is not None else [],
            dtype=[known.value for known in parse_dtypes(self.dtype)] if self.dtype is not None else [],
            scope=_parts("--scope", self.scope),
            mode=_parts("--mode", self.mode),
        )
        if baseline:
            from swiglu_bench.rows.finished_run import rebased

            chosen = rebased(chosen, baseline).only(implementation=self.names)
        return chosen

    @property
    def names(self) -> list[str]:
        """The parts of --impl."""
        return _parts("--impl", self.impl)


def _compare(
    rows: RowOptions,
    before: Annotated[
        Path,
        typer.Argument(help="Folder of a run, its records.csv, or the name of a saved baseline.", show_default=False),
    ],
    after: Annotated[
        Path | None,
        typer.Argument(help="Folder of the later run, or its records.csv. \\[default: the latest below results/]"),
    ] = None,
    *,
    max_regression: Annotated[
        str, option(HOW, "How much worse a row may be, such as 2%; beyond that it exits with 1.")
    ] = "2%",
    by: Annotated[
        str,
        option(HOW, "ratio (to the baseline: drift of the machine cancels), time, or auto: ratio where both runs have "
               "the same baseline."),
    ] = "auto",
    form: Annotated[str, option(OUTPUT, "table, github (Markdown), json, jsonl or csv.", "--format")] = "table",
) -> None:  # fmt: skip
    """Compare two runs row by row: quotient, interval, verdict. Made for CI.

    Exits 0 if no row is worse than allowed, 1 if one is or is broken, 3 if that is undecided, 2 if the runs cannot be
    compared.

    `--save-baseline NAME` of the measuring commands saves what `compare NAME` compares with.

    Example: swiglu-bench compare earlier/forward results/nvidia-h200/forward
    """
    text.check("--format", form, "table", "github", *text.ROWS)
    text.check("--by", by, "auto", "ratio", "time")
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", max_regression)
    if not share:
        raise BadInput(f"--max-regression: {max_regression!r} is not a percentage; give one such as 2% or 0.5%.")
    from swiglu_bench.show import compare

    before, after = _runs(before, after)
    found = compare.compare(rows.of(before), rows.of(after), float(share[1]) / 100, by)
    status = {"fine": 0, "regression": 1, "cannot tell": 3}[found.outcome]
    if form == "table":
        _print(compare.comparison_tables(found))
    elif form == "github":
        text.put(compare.comparison_markdown(found) + "\n")
    else:
        about = {
            "kind": "comparison", "version": 1, "before": str(before), "after": str(after), "by": found.by,
            "max_regression": found.tolerance, "outcome": found.outcome.value, "exit_status": status,
            "warnings": found.warnings,
        }  # fmt: skip
        text.put(text.as_text(form, [change.row() for change in found.changes], about, compare.COLUMNS))
    raise typer.Exit(status)


def _runs(before: Path, after: Path | None) -> tuple[Path, Path]:
    """The runs to compare: a name is that of a baseline, which is of the command of the other run."""
    from swiglu_bench.rows import run_folder
    from swiglu_bench.rows.finished_run import load_run, newest_run

    named = not before.exists() and before.name == str(before)
    if after is None:
        commands = run_folder.baseline_commands(before.name) if named else []
        after = newest_run(Path("results"), commands)
        if after is None:
            of = f" of {' or '.join(commands)}" * bool(commands)
            raise BadInput(f"There is no run{of} below results/; name the run to compare with the first.")
    return (run_folder.find_baseline(before.name, load_run(after, beside=False).command) if named else before), after


def _show(
    rows: RowOptions, run: RunPath,
    sort: Annotated[
        Text,
        option(OUTPUT, "A figure of the rows, such as ratio (implementations by its median), or implementation."),
    ] = None,
    reverse: Annotated[bool, option(OUTPUT, "The other way round.", "--reverse")] = False,
    pivot: Annotated[
        Text,
        option(OUTPUT, "Show one figure of the rows, such as time_ms: implementations down, token counts across."),
    ] = None,
    baseline: Annotated[
        Text, option(CHOOSE, "Compute ratios to this implementation instead, which was timed in the same rounds.")
    ] = None,
    detail: options.TimeDetail = False,
    form: Annotated[
        str, option(OUTPUT, "table, json, jsonl, csv, parquet (with --output), or with --pivot github.", "--format")
    ] = "table",
    output: Annotated[Path | None, option(OUTPUT, "New file instead of stdout.", "--output", "-o")] = None,
) -> None:  # fmt: skip
    """Show a finished run again: its tables, filtered and sorted, or its rows for another program.

    Example: swiglu-bench show results/nvidia-h200/step-mlp --baseline compile --sort ratio
    """
    text.check("--format", form, "table", "github", "parquet", *text.ROWS)
    if output and form == "table":
        raise BadInput("--output is for rows; give --format json, jsonl, csv, parquet or github with it.")
    if form == "parquet" and not output:
        raise BadInput("--format parquet is binary and needs --output FILE.")
    if form == "github" and not pivot:
        raise BadInput("--format github needs --pivot FIGURE, such as --pivot time_ms.")
    chosen = rows.of(run, baseline)
    if sort:
        from swiglu_bench.show.history import ordered

        chosen = ordered(chosen, sort, reverse)
    if pivot:
        _show_pivot(chosen, pivot, str(run), form, output)
    else:
        _show_run(chosen, detail, form, output)


def _show_pivot(run: FinishedRun, column: str, name: str, form: str, output: Path | None) -> None:
    """One figure over token counts."""
    from swiglu_bench.show import history as showing

    rows = showing.pivot(run, showing.figure(run, column, "--pivot"))
    if form == "table":
        _print(showing.pivot_tables(rows, column))
    elif form == "github":
        text.put(showing.pivot_markdown(rows) + "\n", output)
    elif form == "parquet" and output:
        text.write_parquet(rows, output)
    else:
        about = {"kind": "pivot", "figure": column, "run": name}
        text.put(text.as_text(form, rows, about, rows[0] if rows else ()), output)


def _show_run(run: FinishedRun, detail: bool, form: str, output: Path | None) -> None:
    """The tables that the command printed, or its rows."""
    from swiglu_bench.show.history import as_text
    from swiglu_bench.show.tables import tables

    if form == "table":
        _print(tables(run, text.screen().width, detail))
    elif form == "parquet" and output:
        text.write_parquet(run.frame, output)
    else:
        text.put(as_text(run, form), output)


def _print(parts: Iterable[RenderableType]) -> None:
    screen = text.screen()
    for part in parts:
        screen.print(part, highlight=False)


def history(
    root: Annotated[Path, typer.Argument(help="Folder with runs at any depth.")] = Path("results"),
    limit: Annotated[int, option(OUTPUT, "At most so many; 0: all.", min=0)] = 0,
    form: options.Form = "table",
) -> None:
    """List all runs under a folder, newest first: what each was, how it went, where it is.

    Example: swiglu-bench history results
    """
    text.check("--format", form, "table", *text.ROWS)
    from swiglu_bench.show.history import COLUMNS, history_tables, lines

    if not root.is_dir():
        raise BadInput(f"{root} is not a folder; give one with runs in it.")
    found = lines(root)[: limit or None]
    if not found:
        raise BadInput(f"No run is in {root} or below; give a folder with runs in it.")
    if form == "table":
        _print(history_tables(found, root, text.screen().width))
    else:
        about = {"kind": "history", "version": 1, "folder": str(root)}
        text.put(text.as_text(form, [past.row() for past in found], about, COLUMNS))


def publish(
    run: RunPath, wandb_project: options.WandbProject = "swiglu-bench", wandb_entity: options.WandbEntity = None,
    wandb_group: options.WandbGroup = None, wandb_tags: options.WandbTags = None, wandb_id: options.WandbId = None,
    form: options.JsonForm = "table",
) -> None:  # fmt: skip
    """Send a finished run to Weights & Biases, as --log-wandb would have. Exits 1 if not all of it could be sent.

    Example: swiglu-bench publish results/nvidia-h200/forward --wandb-tags reference
    """
    text.check("--format", form, text.TABLE, "json")
    from contextlib import closing

    from swiglu_bench.machine.machine import slug_of
    from swiglu_bench.output import wandb_run
    from swiglu_bench.rows.finished_run import load_run, seeds_of

    found = load_run(run)
    wanted = options.WandbOptions(
        wandb_project=wandb_project, wandb_entity=wandb_entity, wandb_group=wandb_group, wandb_tags=wandb_tags,
        wandb_id=wandb_id,
    )  # fmt: skip
    slug = slug_of(found.records[0].device if found.records[0].cuda else "cpu")
    say = partial(text.screen(form).print, markup=False, highlight=False, soft_wrap=True)
    sent = wandb_run(wanted, found.command, slug, found.about, found.place, lambda line: say(f"Warning: {line}"))
    with closing(sent):
        for row in seeds_of(found.place) if found.place else ():
            for number in range(row.steps or 0):
                sent.step(row, number)
        for record in found.records:
            sent.write(record)
    if sent.url_or_path:
        say(f"W&B: {sent.place}")
    if form == "json":
        about = {
            "kind": "publication",
            "run": str(run),
            "url_or_path": sent.url_or_path,
            "upload": sent.upload,
            "rows_sent": len(found.records),
        }
        text.put(text.as_json(about | {"failed": sent.failed}))
    raise typer.Exit(int(sent.failed))


def _parts(option: str, names: str | None) -> list[str]:
    return split([names], option) if names is not None else []


compare, show = command_of(RowOptions, _compare), command_of(RowOptions, _show)
