"""`swiglu-bench report`: runs in, one HTML file or pictures out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.options import OUTPUT, WHAT, JsonForm, Texts, option
from swiglu_bench.request import command_line, split
from swiglu_bench.rows import text

if TYPE_CHECKING:
    from swiglu_bench.show.report.load import ReportedRun

NEEDS = {"altair": "altair", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}
"""Modules of the extra `report`, and their packages."""


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

    from swiglu_bench.show.report.load import folders, load, only
    from swiglu_bench.show.writers.console import Bar

    rows, err = list[dict[str, Any]](), form != text.TABLE
    found: list[ReportedRun] = []
    with Bar(Console(stderr=True), doing="reading runs") as bar:
        tell = bar.tell
        paths = [path for given in runs for path in folders(given)]
        for number, path in enumerate(paths, start=1):
            tell(f"run {number} of {len(paths)}: {path}")
            found.append(load(path))
        if not any(run.implementations for run in found):
            raise BadInput(f"{', '.join(map(str, runs))}: no rows; give a run that has some.")
        if names := split(impl, "--impl"):
            found = only(found, names)
        if output:
            from swiglu_bench.show.report.page import page

            _write_page(output, page(found, command_line(), tell))
            typer.echo(f"Report: {output}", err=err)
        if png:
            rows += _write_pictures(found, png, "png", dark, err, tell)
        if svg:
            rows += _write_pictures(found, svg, "svg", dark, err, tell)
    if form == "json":
        read = [one.name for one in found]
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
    import importlib.util

    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise BadInput(f"report needs {', '.join(missing)}; install them with: pip install 'swiglu-bench[report]'.")


def _write_page(path: Path, text: str) -> None:
    """Whole or not at all."""
    from swiglu_bench.rows.csv_table import reason, write_whole

    try:
        write_whole(path, text.encode("utf-8"))
    except OSError as error:
        raise BadInput(f"--output: {path} cannot be written: {reason(error)}; give a file that can.") from None


def _write_pictures(
    runs: Sequence[ReportedRun],
    folder: Path,
    form: Literal["png", "svg"],
    dark: bool,
    err: bool,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The charts as files; each with its file, or why there is none."""
    from swiglu_bench.show.charts.export import picture
    from swiglu_bench.show.report.questions import pictures

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
