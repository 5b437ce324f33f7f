"""The commands about this machine: what it can do at best, how noisy it is, and what would spoil a measurement."""

from __future__ import annotations

import csv
import dataclasses
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from swiglu_bench.cli.options import HOW, OUTPUT, WHAT, Device, JsonForm, Wait
from swiglu_bench.rows import text as formats
from swiglu_bench.spec.cases import parse_dtypes
from swiglu_bench.spec.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from rich.table import Table

    from swiglu_bench.machine.ceilings_cache import Figure
    from swiglu_bench.machine.doctor import Finding
    from swiglu_bench.measure.noise import Pair, Summary

SHAPES = "llama7b,llama3-8b,llama3-70b"
"""Whose products `ceilings` measures on a GPU, at 8192 tokens; on a CPU those of the smoke shape, at 512."""
NOISE_COLUMNS = (
    "pair", "time_ms", "ratio", "ratio_low", "ratio_high", "noise", "verdict", "detectable", "rounds", "stopped_by",
)  # fmt: skip
SEVERITY_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "dim"}


def ceilings(
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, comma-separated.", rich_help_panel=WHAT)] = "bf16,fp32",
    device: Device = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again what was measured today.", rich_help_panel=HOW)
    ] = False,
    wait: Wait = True,
    form: JsonForm = "table",
) -> None:
    """Measure this machine's best rates: copies over sizes, square products and those of the llama shapes.

    They are kept for a day; sweeps take their limits from them.

    Example: swiglu-bench ceilings --dtype bf16
    """
    formats.check("--format", form, "table", "json")
    import torch

    from swiglu_bench.machine import machine
    from swiglu_bench.machine.ceilings_cache import Limits
    from swiglu_bench.measure.ceilings import COPY_BYTES, PRODUCT_SIDE
    from swiglu_bench.measure.clock import make_clock
    from swiglu_bench.spec.shapes import load_shapes

    dtypes = parse_dtypes(dtype)
    chosen = machine.find_device(device)
    this, console, found = machine.describe(chosen), formats.screen(form), list[dict[str, Any]]()
    on_gpu, side, most = chosen.type == "cuda", PRODUCT_SIDE[chosen.type], COPY_BYTES[chosen.type]
    sheet = this.datasheet
    most_gbps = sheet.gbps if sheet else None

    table = _table(f"Limits of {this.device}", "what", "measured", "datasheet", "of it", "at (UTC)")

    def add(what: str, measure: Callable[[], Figure], unit: str, most: float | None, style: str = "") -> None:
        row = _measured(measure, unit, most)
        found.append({"what": what.removesuffix(" *"), "default": what.endswith("*"), **row})
        table.add_row(what, *_figure(row), style=style)

    with _held(chosen, wait):
        limits = Limits(this, chosen, make_clock(chosen), refresh)
        for size_bytes in [most >> shift for shift in (6, 4, 2, 1)]:
            text = f"copy, {size_bytes / 2**20:,.0f} MiB"
            add(text, partial(limits.copy, size_bytes), "GB/s", most_gbps)
        add(f"copy, {most / 2**20:,.0f} MiB *", limits.copy, "GB/s", most_gbps, "bold")
        for one in dtypes:
            rate = sheet.rate(one.value) if sheet else None
            torch_type = getattr(torch, one.value)
            table.add_section()
            square = f"{one.value} product, {side} cubed *"
            add(square, partial(limits.product, torch_type), "TFLOP/s", rate, "bold")
            for shape in load_shapes(SHAPES if on_gpu else "smoke"):
                for n, k in ((shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)):
                    text = f"{shape.name}: {side}x{k} by {k}x{n}"
                    add(text, partial(limits.product, torch_type, (side, n, k)), "TFLOP/s", rate)
    if form == "json":
        formats.put(formats.as_json({"kind": "ceilings", "machine": this.as_dict(), "rows": found}))
        return
    console.print(table)
    kept = f"GB/s: bytes read plus bytes written. * what sweeps take their limits from. Kept for a day in {limits.path}"
    if not sheet:
        kept = f"No datasheet is known for this device. {kept}"
    console.print(kept, style="dim", markup=False, highlight=False)


def _measured(measure: Callable[[], Figure], unit: str, datasheet: float | None) -> dict[str, Any]:
    """One limit, or why it could not be measured."""
    import torch

    row = {"value": None, "unit": unit, "datasheet": datasheet, "measured_at": "", "failure": ""}
    try:
        figure = measure()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return row | {"failure": " ".join(str(error).split())}
    return row | {"value": figure.value, "measured_at": figure.at_text}


def _figure(row: dict[str, Any]) -> list[str]:
    """Cells of one limit."""
    if row["failure"]:
        return [f"failed: {row['failure'][:60]}", "", "", ""]
    value, most = row["value"], row["datasheet"]
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    share = [f"{most:,.0f} {row['unit']}", f"{value / most:.0%}"] if most else ["-", "-"]
    return [f"{text} {row['unit']}", *share, row["measured_at"][11:16]]


def noise(
    pairs: Annotated[int, typer.Option(help="A/A pairs to time.", min=2, rich_help_panel=WHAT)] = 100,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Rows of the product that is timed; 8192 of llama7b take about 2 ms on an H200. "
            "\\[default: 8192 on a GPU, 64 of the smoke shape on a CPU]",
            min=1, rich_help_panel=WHAT, show_default=False,
        ),
    ] = None,
    device: Device = None,
    budget: Annotated[float, typer.Option(help="Seconds for each pair.", min=0.01, rich_help_panel=HOW)] = 10.0,
    wait: Wait = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New CSV file, one line a pair. \\[default: results/GPU/DATE/TIME-noise.csv]",
            rich_help_panel=OUTPUT, show_default=False,
        ),
    ] = None,
    form: JsonForm = "table",
) -> None:  # fmt: skip
    """Time the same work under two names, many times: how often a difference is seen where there is none.

    Each pair is judged as a sweep judges a contender, by the same rounds, stopping rule and noise floor. Exits 1 if
    more than 5% of the pairs got a verdict.

    Example: swiglu-bench noise --pairs 100
    """
    formats.check("--format", form, "table", "json")
    import torch
    from rich.progress import track

    from swiglu_bench.machine import machine
    from swiglu_bench.measure.ceilings import bare_products
    from swiglu_bench.measure.clock import make_clock
    from swiglu_bench.measure.noise import measure_pair, summarise
    from swiglu_bench.measure.rounds import Rule
    from swiglu_bench.spec.shapes import load_shapes
    from swiglu_bench.sweep.output import default_folder

    chosen = machine.find_device(device)
    on_gpu = chosen.type == "cuda"
    (shape,) = load_shapes("llama7b" if on_gpu else "smoke")
    rows = tokens or (8192 if on_gpu else 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    console, found = formats.screen(form), []
    this = machine.describe(chosen)
    what = f"{pairs} A/A pairs of the two products of {shape.name} at {rows} tokens on {this.device}"
    console.print(what, markup=False, highlight=False, soft_wrap=True)
    path = out or default_folder(this, "noise.csv", machine.now())
    with _held(chosen, wait), _new_file(path) as file:
        clock, call = make_clock(chosen), bare_products([(rows, shape.intermediate, shape.hidden)] * 2, chosen, dtype)
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(NOISE_COLUMNS)
        try:
            for number in track(range(pairs), "timing pairs", console=console, transient=True):
                found.append(measure_pair(call, clock, Rule(budget_s=budget), number))
                lines.writerow(_noise_row(number, found[-1]))
                file.flush()
        except KeyboardInterrupt:
            console.print(f"Interrupted after {len(found)} pairs.", style="yellow")
    if len(found) < 2:
        raise typer.Exit(130)
    summary = summarise(found)
    if form == "json":
        told = {"kind": "noise", "machine": this.as_dict(), "file": str(path), **dataclasses.asdict(summary)}
        lines_as_rows = [dict(zip(NOISE_COLUMNS, _noise_row(*one), strict=True)) for one in enumerate(found)]
        formats.put(formats.as_json(told | {"rows": lines_as_rows}))
    else:
        console.print(_noise_table(summary, found))
    console.print(f"Every pair: {path}", markup=False, highlight=False, soft_wrap=True)
    if len(found) < pairs:
        raise typer.Exit(130)
    raise typer.Exit(int(summary.false_positives > 0.05 * summary.pairs))


def _new_file(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("x", newline="", encoding="utf-8")
    except FileExistsError:
        raise BadInput(f"--out: {path} is already there; give a new file.") from None
    except OSError as error:
        raise BadInput(f"--out: {path} cannot be written: {error.strerror}; give a file that can.") from None


def _noise_row(number: int, pair: Pair) -> list[object]:
    ratio = pair.ratio
    figures = [pair.time_ms, ratio.median, ratio.low, ratio.high, pair.noise]
    return [
        number, *(f"{figure:.9g}" for figure in figures), pair.verdict.value, f"{pair.detectable:.9g}", pair.rounds,
        pair.stopped_by,
    ]  # fmt: skip


def _noise_table(summary: Summary, found: Sequence[Pair]) -> Table:
    table = _table("Noise floor of this machine", "figure", "value", "meaning")
    times = sorted(pair.time_ms for pair in found)
    eighty, ninety_five = summary.detectable
    count = summary.pairs
    for row in (
        ("time", f"{times[len(times) // 2]:.4g} ms", "median of the pairs' medians"),
        ("false positives", f"{summary.false_positives} of {count}", "pairs called faster or slower; at most 5%"),
        ("intervals without 1", f"{summary.excluding_1} of {count}", "before the noise floor counts; about 5%"),
        ("half-width", f"{summary.half_width:.3%}", "of the ratio's 95% interval, median"),
        ("smallest detectable", f"{eighty:.3%}", "a true difference that 80% of the pairs would have shown"),
        ("", f"{ninety_five:.3%}", "and 95% of them"),
    ):  # fmt: skip
        table.add_row(*row)
    return table


def doctor(
    device: Device = None,
    clock: Annotated[
        bool,
        typer.Option("--clock", help="Compare the suite's clock with the GPU's profiler, too.", rich_help_panel=HOW),
    ] = False,
    wait: Wait = True,
    form: JsonForm = "table",
) -> None:  # fmt: skip
    """Look for what would spoil a measurement here, and say what to do about it. Exits 1 if anything fails.

    Example: swiglu-bench doctor --clock
    """
    formats.check("--format", form, "table", "json")
    from swiglu_bench.machine import machine
    from swiglu_bench.machine.doctor import Severity, examine

    chosen = machine.find_device(device)
    with _held(chosen, wait):
        findings = list(examine(chosen, cross_check=clock))
    if form == "json":
        formats.put(formats.as_json([dataclasses.asdict(one) for one in findings]))
    else:
        console = formats.screen()
        console.print(_doctor_table(findings))
        counts = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
        console.print(", ".join(f"{count} {severity}" for severity, count in counts.items() if count), highlight=False)
    raise typer.Exit(int(any(one.severity is Severity.FAIL for one in findings)))


def _doctor_table(findings: Sequence[Finding]) -> Table:
    from rich.text import Text

    table = _table("", "check", "", "found", "what to do")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for one in findings:
        severity = Text(one.severity, SEVERITY_STYLES[one.severity])
        table.add_row(one.check, severity, Text(one.found), Text(one.advice, "dim"))
    return table


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in {"measured", "datasheet", "of it", "value"} else "left")
    return table


def _held(device: torch.device, wait: bool) -> AbstractContextManager[None]:
    """A GPU for this command alone; who waits says so beside what may be a file."""
    from swiglu_bench.machine import locks

    return locks.device(device, shlex.join(["swiglu-bench", *sys.argv[1:]]), wait, partial(typer.echo, err=True))
