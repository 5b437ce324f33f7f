"""The commands about this machine: its best rates, its noise floor, and what would spoil a measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput, one_line
from swiglu_bench.cases.shapes import load_shapes
from swiglu_bench.cli.listing import table
from swiglu_bench.machine import machine
from swiglu_bench.options import HOW, OUTPUT, TIMEOUT_S, WHAT, Device, JsonForm, Wait, option
from swiglu_bench.request import INTERRUPTED, held
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import LAYOUTS, Record
from swiglu_bench.show import text

if TYPE_CHECKING:
    from swiglu_bench.machine.ceilings_cache import Limits, MeasuredRate
    from swiglu_bench.tasks.noise import Summary

Measure = Callable[[], "MeasuredRate"]
SHAPES = "llama7b,llama3-8b,llama3-70b"
"""Whose products `ceilings` measures on a GPU, at 8192 tokens; on a CPU those of the smoke shape, at 512."""
SEVERITY_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "dim"}


def ceilings(
    dtype: Annotated[str, option(WHAT, "bf16, fp16, fp32, comma-separated.")] = "bf16,fp32",
    device: Device = None,
    refresh: Annotated[bool, option(HOW, "Measure again what was measured today.", "--refresh")] = False,
    wait: Wait = True,
    form: JsonForm = "table",
) -> None:
    """Measure this machine's best rates: copies over sizes, square products and those of the llama shapes.

    They are kept for a day, and sweeps use them as their limits.

    Example: swiglu-bench ceilings --dtype bf16
    """
    from swiglu_bench.machine.ceilings_cache import Limits
    from swiglu_bench.measure.clock import make_clock

    dtypes, chosen = parse_dtypes(dtype), machine.find_device(device)
    this = machine.describe(chosen)
    with held(chosen, wait):
        limits = Limits(this, chosen, make_clock(chosen), refresh)
        rows = list(_limits(limits, dtypes))
    if form == "json":
        text.put(text.as_json({"kind": "ceilings", "machine": this.as_dict(), "rows": rows}))
        return
    console = text.screen()
    console.print(_limits_table(f"Limits of {this.device}", rows))
    kept = f" Kept for a day in {limits.path}" if limits.kept else ""
    unknown = "" if this.datasheet else "No datasheet is known for this device. "
    note = f"{unknown}GB/s: bytes read plus bytes written. *: the limits that sweeps use.{kept}"
    console.print(note, style="dim", markup=False, highlight=False)


def _limits(limits: Limits, dtypes: Sequence[Dtype]) -> Iterator[dict[str, Any]]:
    import torch

    from swiglu_bench.machine.ceilings_cache import COPY_BYTES, PRODUCT_SIDE

    def row(what: str, measure: Measure, unit: str, most: float | None, default: bool) -> dict[str, Any]:
        found = {"what": what, "default": default, "value": None, "unit": unit, "datasheet": most, "measured_at": "",
                 "failure": ""}  # fmt: skip
        try:
            figure = measure()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            return found | {"failure": one_line(error)}
        return found | {"value": figure.value, "measured_at": figure.at_text}

    kind, sheet = limits.device.type, limits.machine.datasheet
    most, side, gbps = COPY_BYTES[kind], PRODUCT_SIDE[kind], sheet.gbps if sheet else None
    for size_bytes in [most >> shift for shift in (6, 4, 2, 1)]:
        yield row(f"copy, {size_bytes / 2**20:,.0f} MiB", partial(limits.copy, size_bytes), "GB/s", gbps, False)
    yield row(f"copy, {most / 2**20:,.0f} MiB", limits.copy, "GB/s", gbps, True)
    for dtype in dtypes:
        rate, product = sheet.rate(dtype.value) if sheet else None, partial(limits.product, getattr(torch, dtype.value))
        yield row(f"{dtype.value} product, {side} cubed", product, "TFLOP/s", rate, True)
        for shape in load_shapes(SHAPES if kind == "cuda" else "smoke"):
            for n, k in ((shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)):
                what = f"{shape.name}: {side}x{k} by {k}x{n}"
                yield row(what, partial(product, (side, n, k)), "TFLOP/s", rate, False)


def _limits_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    figures = ("measured", "datasheet", "of it")
    found = table(title, "what", *figures, "at (UTC)", right=figures)
    for row in rows:
        what, style = (f"{row['what']} *", "bold") if row["default"] else (row["what"], "")
        if row["default"] and row["unit"] == "TFLOP/s":
            found.add_section()
        if row["failure"]:
            found.add_row(what, f"failed: {row['failure'][:60]}", style=style)
            continue
        value, most = row["value"], row["datasheet"]
        rate = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        share = (f"{most:,.0f} {row['unit']}", f"{value / most:.0%}") if most else ("-", "-")
        found.add_row(what, f"{rate} {row['unit']}", *share, row["measured_at"][11:16], style=style)
    return found


def noise(
    pairs: Annotated[int, option(WHAT, "A/A pairs to time.", min=2)] = 100,
    tokens: Annotated[
        str | None,
        option(WHAT, "Tokens of the forward that is timed; 8k of llama7b take 2 ms on an H200. \\[default: 8k "
               "on a GPU, 64 of the smoke shape on a CPU]"),
    ] = None,
    device: Device = None,
    under_load: Annotated[
        bool, option(HOW, "Run competing programs: one on every CPU, and one on the GPU.", "--under-load")
    ] = False,
    budget: Annotated[float, option(HOW, "Seconds for each pair.", min=0.01)] = 10.0,
    wait: Wait = True,
    out: Annotated[
        Path | None,
        option(OUTPUT, "Folder for noise.csv, one line per pair. \\[default: results/GPU/DATE/TIME-noise]"),
    ] = None,
    form: JsonForm = "table",
) -> None:  # fmt: skip
    """Time eager under several names, many times: how often a difference is reported where there is none.

    Each pair is judged as a sweep judges a contender, by processes, rounds, stopping rule and noise floor. Exits 1 if
    more than 5% of the pairs got a verdict.

    Example: swiglu-bench noise --pairs 100
    """
    counts = parse_tokens(tokens) if tokens is not None else []
    if len(counts) > 1:
        raise BadInput(f"--tokens: noise takes one token count, and {tokens!r} has {len(counts)}; leave others out.")
    if out and run_folder.has_rows(out, LAYOUTS["noise"].file):
        raise BadInput(f"--out: {out / LAYOUTS['noise'].file} is there already; give another folder.")
    from swiglu_bench.contenders import pytorch
    from swiglu_bench.loop import Ending
    from swiglu_bench.measure.rounds import Rule
    from swiglu_bench.output import default_folder
    from swiglu_bench.show.console import Bar, Screen
    from swiglu_bench.tasks import noise as measuring
    from swiglu_bench.tasks.case import court_of
    from swiglu_bench.worker.ahead import competitors
    from swiglu_bench.worker.policy import Settings, Task

    chosen = machine.find_device(device)
    on_gpu = chosen.type == "cuda"
    (shape,) = load_shapes("llama7b" if on_gpu else "smoke")
    dtype = Dtype.BFLOAT16 if on_gpu else Dtype.FLOAT32
    case = Case(shape, counts[0] if counts else 8192 if on_gpu else 64, dtype, Scope.GLU, Mode.FORWARD)
    this, screen = machine.describe(chosen), Screen(text.screen(form))
    path = (out or default_folder(this, "noise", machine.now())) / LAYOUTS["noise"].file
    settings = Settings(Task.TIME, chosen, "noise", machine.run_id(machine.now()), rule=Rule(budget_s=budget))
    found: list[Record] = []
    with held(chosen, wait), ExitStack() as stack:
        run_folder.create_folder(path.parent)
        file = text.Table(path, LAYOUTS["noise"].header())
        others = stack.enter_context(competitors(chosen)) if under_load else 0
        beside = f" beside {others} programs that compete with them" if others else ""
        screen.say(f"{pairs} A/A pairs of {case.label} on {this.device}{beside}")
        court = stack.enter_context(court_of(settings, this, TIMEOUT_S))
        series = measuring.noise(court, case, [pytorch.eager])
        with Ending(screen, {}) as ending:
            bar = stack.enter_context(Bar(screen.console, pairs))
            for number in range(pairs):
                bar.tell(f"timing pair {number + 1} of {pairs}", number)
                found.append(next(series))
                file.append([found[-1].row().values()])
        if ending.interrupted:
            screen.say(f"Interrupted after {len(found)} pairs.", style="yellow")
    if len(found) < 2:
        raise typer.Exit(INTERRUPTED)
    summary = measuring.summarise(found)
    if form == "json":
        about = {"kind": "noise", "machine": this.as_dict(), "file": str(path), **dataclasses.asdict(summary)}
        text.put(text.as_json(about | {"rows": [pair.row() for pair in found]}))
    else:
        screen.console.print(_noise_table(summary, found))
    screen.say(f"Every pair: {path}")
    if len(found) < pairs:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(int(summary.false_positives > 0.05 * len(found)))


def _share(difference: float) -> str:
    return f"{difference:.3%}" if difference < 1 else f"{1 + difference:.3g} times"


def _noise_table(summary: Summary, pairs: Sequence[Record]) -> Table:
    times = sorted(pair.time_ms or 0.0 for pair in pairs)
    eighty, ninety_five = summary.detectable
    count = summary.pairs
    rows = (
        ("time", f"{times[len(times) // 2]:.4g} ms", "median of the pairs' medians"),
        ("false positives", f"{summary.false_positives} of {count}", "pairs judged faster or slower; at most 5%"),
        ("intervals without 1", f"{summary.excluding_1} of {count}", "of 95%, before the noise is applied"),
        ("half-width", _share(summary.half_width), "of the ratio's 95% interval, median"),
        ("noise", _share(summary.noise), "between equal baseline processes (A/A), median"),
        ("smallest detectable", _share(eighty), "a true difference that 80% of the pairs would have shown"),
        ("", _share(ninety_five), "and 95% of them"),
    )  # fmt: skip
    return table("Noise floor of this machine", "figure", "value", "meaning", right=["value"], rows=rows)


def doctor(
    device: Device = None,
    clock: Annotated[bool, option(HOW, "Compare the suite's clock with the GPU's profiler, too.", "--clock")] = False,
    kernels: Annotated[
        bool, option(HOW, "First check the hand-scheduled kernels with this Triton; keep the verdicts.", "--kernels")
    ] = False,
    wait: Wait = True,
    form: JsonForm = "table",
) -> None:
    """Look for what would spoil a measurement here, and say what to do about it. Exits 1 if anything fails.

    Example: swiglu-bench doctor --clock
    """
    from swiglu_bench.machine.doctor import Severity, examine

    chosen = machine.find_device(device)
    with held(chosen, wait):
        if kernels:
            from swiglu_kernels import check

            try:
                check(chosen, tell=partial(typer.echo, err=True))
            except RuntimeError as error:
                raise BadInput(f"--kernels: {error}.") from None
        findings = list(examine(chosen, cross_check=clock))
    if form == "json":
        text.put(text.as_json({"kind": "doctor", "rows": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        console, checks = text.screen(), table("", "check", "", "found", "what to do")
        checks.columns[0].no_wrap = checks.columns[1].no_wrap = True
        for finding in findings:
            severity = Text(finding.severity, SEVERITY_STYLES[finding.severity])
            checks.add_row(finding.check, severity, Text(finding.found), Text(finding.advice, "dim"))
        console.print(checks)
        counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
        console.print(", ".join(f"{count} {severity}" for severity, count in counts.items() if count), highlight=False)
    raise typer.Exit(int(any(finding.severity is Severity.FAIL for finding in findings)))
