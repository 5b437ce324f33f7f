"""What is made of finished runs together: `report`, one HTML file or pictures, and `recommend`, the best choices."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from swiglu_bench import options, request
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cli.finished import RowOptions
from swiglu_bench.options import HOW, OUTPUT, WHAT, JsonForm, Text, Texts, command_of, option
from swiglu_bench.rows.record import unique
from swiglu_bench.show import text

if TYPE_CHECKING:
    from rich.console import Console

    from swiglu_bench.rows.finished_run import FinishedRun

NEEDS = {"altair": "altair", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}
"""Modules of the extra `report`, and their packages."""
UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, a folder of them, or CSV files of runs.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        option(OUTPUT, "The page. \\[default: report.html, unless pictures are asked for]", "--output", "-o"),
    ] = None,
    png: Annotated[Path | None, option(OUTPUT, "Folder for the charts as PNG.")] = None,
    svg: Annotated[Path | None, option(OUTPUT, "Folder for the charts as SVG.")] = None,
    dark: Annotated[bool, option(OUTPUT, "Pictures with a dark background.", "--dark")] = False,
    impl: Annotated[
        Texts, option(WHAT, "Only these implementations: names or globs, comma-separated or repeated.")
    ] = None,
    form: JsonForm = "table",
) -> None:  # fmt: skip
    """Make one HTML file of runs, readable without a network: who wins where, charts,
    loss curves, the contract matrix, the machine.

    Runs of different work or from different machines have separate sections; nothing is compared across them. Memory
    and speed are plotted against each other if a memory run of the same cases is given along with a step run.

    Example: swiglu-bench report results/nvidia-h200/{forward,step,memory} -o report.html
    """
    text.check("--format", form, text.TABLE, "json")
    _check_installed()
    if dark and not (png or svg):
        raise BadInput("--dark is for pictures, and a page follows its reader's setting; give --png or --svg, too.")
    if not output and not png and not svg:
        output = Path("report.html")
    _check_places(output, png, svg)
    from rich.console import Console

    from swiglu_bench.show.console import Bar
    from swiglu_bench.show.sections import folders, load, only

    rows, err = list[dict[str, Any]](), form != text.TABLE
    found: list[FinishedRun] = []
    with Bar(Console(stderr=True), doing="reading runs") as bar:
        tell = bar.tell
        paths = [path for given in runs for path in folders(given)]
        for number, path in enumerate(paths, start=1):
            tell(f"run {number} of {len(paths)}: {path}")
            found.append(load(path))
        if not any(run.implementations for run in found):
            raise BadInput(f"{', '.join(map(str, runs))}: no rows; give a run that has some.")
        if names := request.split(impl, "--impl"):
            found = only(found, names)
        if output:
            from swiglu_bench.show.page import page

            _write_page(output, page(found, request.command_line(), tell))
            typer.echo(f"Report: {output}", err=err)
        if png:
            rows += _write_pictures(found, png, "png", dark, err, tell)
        if svg:
            rows += _write_pictures(found, svg, "svg", dark, err, tell)
    if form == "json":
        read = [run.label for run in found]
        text.put(text.as_json({"kind": "report", "runs": read, "page": output, "rows": rows}))


def _check_places(page: Path | None, png: Path | None, svg: Path | None) -> None:
    """Whether there is room for everything, before the work starts; nothing but an HTML page is ever replaced."""
    for name, folder in (("--output", page and page.parent), ("--png", png), ("--svg", svg)):
        try:
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{name}: {folder} cannot be written: {error.strerror}; give one that can.") from None
    if page and page.is_dir():
        raise BadInput(f"--output: {page} is a folder; give a file.")
    if page and page.exists() and not page.read_bytes()[:15].lower().startswith(b"<!doctype html>"):
        raise BadInput(f"--output: {page} exists and is not an HTML page; give another name.")


def _check_installed() -> None:
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise BadInput(f"report needs {', '.join(missing)}; install them with: pip install 'swiglu-bench[report]'.")


def _write_page(path: Path, html: str) -> None:
    """Whole or not at all."""
    from swiglu_bench.rows.figures import reason, write_whole

    try:
        write_whole(path, html.encode("utf-8"))
    except OSError as error:
        raise BadInput(f"--output: {path} cannot be written: {reason(error)}; give a file that can.") from None


def _write_pictures(
    runs: Sequence[FinishedRun],
    folder: Path,
    form: Literal["png", "svg"],
    dark: bool,
    err: bool,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """The charts as files; each with its file, or why there is none."""
    from swiglu_bench.show.charts import pictures
    from swiglu_bench.show.documents import picture

    rows: list[dict[str, Any]] = []
    for name, chart in pictures(runs):
        tell(f"{name}.{form}")
        if isinstance(chart, str):
            typer.echo(f"no {name}: {chart}", err=err)
            rows.append({"picture": name, "file": None, "reason": chart})
            continue
        file = folder / f"{name}.{form}"
        try:
            file.write_bytes(picture(chart, form, dark))
        except OSError as error:
            raise BadInput(f"--{form}: {folder} cannot be written: {error.strerror}; give one that can.") from None
        rows.append({"picture": name, "file": file, "reason": ""})
    typer.echo(f"{sum(row['file'] is not None for row in rows)} pictures: {folder}", err=err)
    return rows


@dataclass(frozen=True, kw_only=True)
class RecommendOptions:
    """Which cases, from which runs or measured how."""

    shapes: options.Shapes = None
    tokens: options.Tokens = None
    dtype: options.DtypeOption = None
    scope: options.ScopeOption = None
    mode: Annotated[str, option(WHAT, "forward, backward or step: what should be fast.")] = "step"
    max_memory: Annotated[
        Text, option(WHAT, "Most memory that a training step may use above inputs and weights, such as 1GiB or 500MiB.")
    ] = None
    impl: options.Impl = None
    skip_impl: options.SkipImpl = None
    seed: options.ShapeSeed = 0
    run: Annotated[
        list[Path] | None,
        option(HOW, "Finished runs to use, repeated: timed ones, and one of memory. \\[default: measure now]", "--run"),
    ] = None
    device: options.Device = None
    budget: options.Budget = 20.0
    in_process: options.InProcess = False
    wait: options.Wait = True
    out: Annotated[Path | None, option(OUTPUT, "Store what is measured in this folder.")] = None
    resume: options.Resume = False
    force: options.Force = False


def _recommend(wanted: RecommendOptions, form: options.Form = "table") -> None:
    """Say what to use: the best implementation per token count, how sure that is, and the line of Python for it.

    Rows that tie with the best are named. Exits 1 if nothing qualifies at one of the cases.

    Example: swiglu-bench recommend --shapes llama7b --tokens 1k,8k --max-memory 1GiB
    """
    text.check("--format", form, "table", *text.ROWS)
    text.check("--mode", wanted.mode, "forward", "backward", "step")
    most = _bytes("--max-memory", wanted.max_memory) if wanted.max_memory is not None else None
    from swiglu_bench.show import ranking

    console = text.screen(form)
    catalogue = {known.name: known for known in request.catalogue(request.loader(options.TIMEOUT_S))}
    if wanted.run:
        if request.split(wanted.skip_impl):
            raise BadInput("--skip-impl is for measuring now; choose rows of a --run with --impl.")
        runs = [_chosen(path, wanted) for path in wanted.run]
    else:
        if most is not None and not wanted.impl:  # what needs the least memory is a variant, not compared unasked
            names = [name for name, known in catalogue.items() if not known.on_request]
            wanted = dataclasses.replace(wanted, impl=names)
        runs = [_measured(wanted.mode, wanted, console, budget=wanted.budget, energy=False)]
        if not any(record.time_ms is not None for record in runs[0].records):
            raise typer.Exit(1)  # the sweep has said why
        runs += [_measured("memory", wanted, console)] if most is not None else []
    choices = ranking.recommend(runs, catalogue, most)
    if form == "table":
        for part in ranking.recommendation_tables(choices, runs):
            console.print(part)
    else:
        about = {"kind": "recommendation", "version": 1, "max_memory_bytes": most, "runs": [run.name for run in runs]}
        rows = [choice.row() for choice in choices]
        text.put(text.as_text(form, rows, about, rows[0]))
    raise typer.Exit(int(any(choice.record is None for choice in choices)))


def _measured(command: str, wanted: RecommendOptions, console: Console, **more: Any) -> FinishedRun:
    from swiglu_bench.tasks.sweep import perform

    own = {"mode", "max_memory", "run", "budget", "out"}
    given = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(wanted) if field.name not in own}
    out = wanted.out / command if wanted.out else None
    options_of_command = options.COMMANDS[command](**given, **more, csv=out is not None, out=out)
    return perform(command, options_of_command, console, request.command_line())[1]


def _chosen(path: Path, wanted: RecommendOptions) -> FinishedRun:
    """What a run has of the cases asked for; of a run that measured memory, which is a step's, any mode."""
    from swiglu_bench.rows.finished_run import load_run

    found = load_run(path, beside=False)
    if found.command in {"tp", "train"}:
        raise BadInput(f"--run: {path} is a run of {found.command}; give one of forward, backward, step or memory.")
    memory, modes = any(row.peak_bytes is not None for row in found.records), unique(row.mode for row in found.records)
    if not memory and wanted.mode not in modes:
        few = f"{path} has rows of {', '.join(modes)} and none of {wanted.mode}"
        raise BadInput(f"--run: {few}; give --mode {modes[0]}.")
    rows = RowOptions(
        impl=",".join(request.split(wanted.impl, "--impl")) or None, shape=wanted.shapes, tokens=wanted.tokens,
        dtype=wanted.dtype, scope=wanted.scope, mode=None if memory else wanted.mode,
    )  # fmt: skip
    return rows.of(path)


def _bytes(option: str, value: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value)
    unit = UNITS.get(match[2].lower()) if match else None
    if not match or not unit:
        raise BadInput(f"{option}: {value!r} is not a size; give one such as 1GiB or 500MiB.")
    return int(float(match[1]) * unit)


recommend = command_of(RecommendOptions, _recommend)
