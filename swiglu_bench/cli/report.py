"""`swiglu-bench report`: runs in, one HTML file or pictures out."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swiglu_bench.cli.options import OUTPUT, WHAT
from swiglu_bench.spec.errors import BadInput

if TYPE_CHECKING:
    from swiglu_bench.report.load import ReportedRun

NEEDS = {"altair": "altair", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}
"""Modules of the extra `report`, and their packages."""


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, a folder of them, or CSV files of runs.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page. \\[default: report.html, unless pictures are asked for]",
            rich_help_panel=OUTPUT, show_default=False,
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Folder for the charts as PNG.", rich_help_panel=OUTPUT)] = None,
    svg: Annotated[Path | None, typer.Option(help="Folder for the charts as SVG.", rich_help_panel=OUTPUT)] = None,
    dark: Annotated[bool, typer.Option("--dark", help="Pictures on black.", rich_help_panel=OUTPUT)] = False,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl", help="Only these implementations: names or globs, comma-separated or repeated.",
            rich_help_panel=WHAT, show_default=False,
        ),
    ] = None,
) -> None:  # fmt: skip
    """Make one HTML file of runs, readable without a network: who wins where, charts,
    loss curves, the contract matrix, the machine.

    Runs of other work or from other machines have sections of their own; nothing is compared across them. Memory and
    speed are set against each other where a memory run of the same cases is given along with a step run.

    Example: swiglu-bench report results/nvidia-h200/2026-11-21/{forward,step,memory} -o report.html
    """
    _check_installed()
    if dark and not (png or svg):
        raise BadInput("--dark is for pictures, and a page follows its reader's setting; give --png or --svg, too.")
    if not output and not png and not svg:
        output = Path("report.html")
    _check_places(output, png, svg)
    from swiglu_bench.report.load import folders, load, only

    found = [load(path) for given in runs for path in folders(given)]
    patterns = [part.strip() for text in impl or [] for part in text.split(",") if part.strip()]
    if patterns:
        found = only(found, patterns)
    if output:
        from swiglu_bench.report.page import page

        _write_page(output, page(found, shlex.join(["swiglu-bench", *sys.argv[1:]])))
        typer.echo(f"Report: {output}")
    if png:
        _write_pictures(found, png, "png", dark)
    if svg:
        _write_pictures(found, svg, "svg", dark)


def _check_places(page: Path | None, png: Path | None, svg: Path | None) -> None:
    """Whether there is room for everything, before the work starts; nothing but an HTML page is ever replaced."""
    for option, folder in (("--output", page and page.parent), ("--png", png), ("--svg", svg)):
        try:
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{option}: {folder} cannot be written: {error.strerror}; give one that can.") from None
    if page and page.is_dir():
        raise BadInput(f"--output: {page} is a folder; give a file.")
    if page and page.exists() and not page.read_bytes()[:15].lower().startswith(b"<!doctype html>"):
        raise BadInput(f"--output: {page} is there and is no HTML page; give another name.")


def _check_installed() -> None:
    import importlib.util

    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise BadInput(f"report needs {', '.join(missing)}; install them with: pip install 'swiglu-bench[report]'.")


def _write_page(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise BadInput(f"--output: {path} cannot be written: {error.strerror}; give a file that can.") from None
    finally:
        temporary.unlink(missing_ok=True)


def _write_pictures(runs: Sequence[ReportedRun], folder: Path, form: Literal["png", "svg"], dark: bool) -> None:
    from swiglu_bench.charts.export import picture
    from swiglu_bench.report.images import charts_of

    count = 0
    for name, chart in charts_of(runs):
        if isinstance(chart, str):
            typer.echo(f"no {name}: {chart}")
            continue
        try:
            (folder / f"{name}.{form}").write_bytes(picture(chart, form, dark))
        except OSError as error:
            raise BadInput(f"--{form}: {folder} cannot be written: {error.strerror}; give one that can.") from None
        count += 1
    typer.echo(f"{count} pictures: {folder}")
