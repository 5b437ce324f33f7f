"""A sweep from its cases to its exit status: rows from the runner, at once to the screen, the files and W&B."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from swiglu_bench import runner
from swiglu_bench.cases import BadInput, Case
from swiglu_bench.machine import Machine
from swiglu_bench.record import Status
from swiglu_bench.registry import Implementation
from swiglu_bench.writers import Writer, csv_file, tables
from swiglu_bench.writers.console import ConsoleWriter

TABLES = {
    runner.Task.TIME: tables.time_tables,
    runner.Task.MEMORY: tables.memory_tables,
    runner.Task.VERIFY: tables.verify_tables,
}
INTERRUPTED = 130


@dataclass(frozen=True)
class Output:
    """Where rows go besides the screen."""

    csv: bool
    folder: Path | None
    """None: results/GPU/DATE/TIME-COMMAND."""
    wandb_project: str | None
    """None: not to W&B."""


def sweep(
    command: str,
    cases: Sequence[Case],
    chosen: Sequence[Implementation],
    settings: runner.Settings,
    this: Machine,
    output: Output,
    console: Console,
) -> int:
    """Run all cases; 0 when every row is ok or skipped, 1 with an incorrect one or an error, 130 when interrupted."""

    def warn(text: str) -> None:
        console.print(f"Warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    show = tables.verify_detail_tables if settings.detail else TABLES[settings.task]
    shown = ConsoleWriter(console, show, len(cases), tables_anyway=settings.detail)

    def listen(progress: runner.Progress) -> None:
        case = progress.case
        doing = f"{case.shape.name}, {case.tokens} tokens, {progress.doing}"
        number = f"case {progress.case_number + 1}/{progress.case_count}"
        shown.advance(progress.case_number + progress.fraction, f"{number}: {doing}")

    interrupted = False
    with ExitStack() as stack:
        writers, places = _open(stack, command, settings, this, output, warn)
        try:
            with shown:
                for record in runner.run(cases, chosen, settings, this, listen):
                    for writer in (shown, *writers):
                        writer.write(record)
        except KeyboardInterrupt:
            interrupted = True
        shown.close()
    for place in filter(None, (tell() for tell in places)):
        console.print(place, markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        console.print(f"Interrupted: {len(shown.records)} rows were kept.", style="yellow")
        return INTERRUPTED
    return int(any(record.status in {Status.INCORRECT, Status.ERROR} for record in shown.records))


def _open(
    stack: ExitStack,
    command: str,
    settings: runner.Settings,
    this: Machine,
    output: Output,
    warn: Callable[[str], None],
) -> tuple[list[Writer], list[Callable[[], str]]]:
    """The writers, opened before any work starts; and for each a function that says where its results are."""
    if output.folder and not output.csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    writers: list[Writer] = []
    places: list[Callable[[], str]] = []
    folder = (output.folder or _default_folder(this, command, settings.run_id)) if output.csv else None
    about = {
        "command": settings.command,
        "run_id": settings.run_id,
        "settings": {
            "baseline": settings.baseline,
            "l2": "cold" if settings.cold_l2 else "hot",
            **dataclasses.asdict(settings.rule),
        },
        "machine": this.as_dict(),
    }
    if folder:
        csv_file.create_folder(folder)
        csv_file.write_run_file(folder, about)
        rows = csv_file.CsvFile(folder, warn=warn)
        stack.callback(rows.close)
        writers.append(rows)
        places.append(lambda: f"Rows, samples and machine: {folder}")
    if output.wandb_project:
        from swiglu_bench.writers.wandb_run import WandbRun

        run = WandbRun(
            project=output.wandb_project,
            config=about,
            name=f"{command} {this.slug}",
            tags=[command, this.slug],
            folder=folder,
            warn=warn,
        )
        stack.callback(run.close)
        writers.append(run)
        places.append(lambda: run.url_or_path and f"W&B: {run.url_or_path}")
    return writers, places


def _default_folder(this: Machine, command: str, run_id: str) -> Path:
    date, clock = run_id[:8], run_id[9:15]
    return Path("results") / this.slug / f"{date[:4]}-{date[4:6]}-{date[6:]}" / f"{clock}-{command}"
