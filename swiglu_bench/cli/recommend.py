"""`swiglu-bench recommend`: the best choice per token count, from finished runs or from measuring now."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiglu_bench.cli.options import (
    HOW,
    OUTPUT,
    TIMEOUT_S,
    WHAT,
    Budget,
    Device,
    DtypeOption,
    Form,
    Impl,
    InProcess,
    ScopeOption,
    Shapes,
    SkipImpl,
    Tokens,
    Wait,
)
from swiglu_bench.rows import text as formats
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.sweep import request

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from swiglu_bench.finished.recommend import Choice
    from swiglu_bench.rows.finished_run import FinishedRun

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def recommend(
    shapes: Shapes = None, tokens: Tokens = None, dtype: DtypeOption = None, scope: ScopeOption = None,
    mode: Annotated[
        str, typer.Option(help="forward, backward or step: what is to be fast.", rich_help_panel=WHAT)
    ] = "step",
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="Most that a training step may take above inputs and weights, as 1GiB or 500MiB.",
            rich_help_panel=WHAT, show_default=False,
        ),
    ] = None,
    impl: Impl = None, skip_impl: SkipImpl = None,
    run: Annotated[
        list[Path] | None,
        typer.Option(
            "--run", help="Finished runs to take it from, repeated: timed ones, and one of memory. "
            "\\[default: measure now]",
            rich_help_panel=HOW, show_default=False,
        ),
    ] = None,
    device: Device = None, budget: Budget = 20.0, in_process: InProcess = False, wait: Wait = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep what is measured in this folder.", rich_help_panel=OUTPUT, show_default=False),
    ] = None,
    form: Form = "table",
) -> None:  # fmt: skip
    """Say what to use: the best implementation per token count, how sure that is, and the line of Python for it.

    Rows that tie with the best are named. Exits 1 if nothing qualifies at one of the cases.

    Example: swiglu-bench recommend --shapes llama7b --tokens 1k,8k --max-memory 1GiB
    """
    formats.check("--format", form, "table", *formats.ROWS)
    formats.check("--mode", mode, "forward", "backward", "step")
    most = _bytes("--max-memory", max_memory) if max_memory is not None else None
    from swiglu_bench.finished.recommend import COLUMNS, rows
    from swiglu_bench.finished.recommend import recommend as choose

    options: dict[str, Any] = {
        "shapes": shapes, "tokens": tokens, "dtype": dtype, "scope": scope, "impl": impl, "skip_impl": skip_impl,
        "device": device, "in_process": in_process, "wait": wait,
    }  # fmt: skip
    console = formats.screen(form)
    if run:
        runs = [_chosen(path, options, mode) for path in run]
    else:
        runs = _measure(options, mode, budget, out, most, console)
    catalogue = {one.name: one for one in request.catalogue(request.loader(TIMEOUT_S))}
    choices = choose(runs, catalogue, most)
    if form == "table":
        for part in _parts(choices, runs):
            console.print(part)
    else:
        found = rows(choices)
        if form == "csv":
            found = [
                {**row, **{k: " ".join(v) for k, v in row.items() if isinstance(v, (list, dict))}} for row in found
            ]
        about = {"kind": "recommendation", "version": 1, "max_memory_bytes": most, "runs": [one.name for one in runs]}
        formats.put(formats.as_text(form, found, about, COLUMNS))
    raise typer.Exit(int(any(choice.record is None for choice in choices)))


def _measure(
    options: dict[str, Any], mode: str, budget: float, out: Path | None, most: int | None, console: Console
) -> list[FinishedRun]:
    """Time now, and where memory counts measure that as well."""
    from swiglu_bench.cli.measure import DEFAULTS, TIMING_ONLY, perform

    def one(command: str, **more: Any) -> FinishedRun:
        known = DEFAULTS if command == mode else {k: v for k, v in DEFAULTS.items() if k not in TIMING_ONLY}
        folder = out / command if out else None
        given = {**known, **options, "energy": False, "csv": out is not None, "out": folder, **more}
        _, found = perform(command, given, console, request.command_line())
        assert found is not None
        return found

    return [one(mode, budget=budget), *([one("memory")] if most is not None else [])]


def _chosen(path: Path, options: dict[str, Any], mode: str) -> FinishedRun:
    """What a run has of the cases asked for; of a run that measured memory, which is a step's, any mode."""
    from swiglu_bench.cli.finished import filtered
    from swiglu_bench.rows.finished_run import load_run

    memory = any(record.peak_bytes is not None for record in load_run(path, beside=False).records)
    impl, unwanted = (",".join(request.split(options[name])) or None for name in ("impl", "skip_impl"))
    if unwanted:
        raise BadInput("--skip-impl is for measuring now; choose rows of a --run with --impl.")
    return filtered(
        path, impl, options["shapes"], options["tokens"], options["dtype"], options["scope"], None if memory else mode
    )


def _parts(choices: Sequence[Choice], runs: Sequence[FinishedRun]) -> Iterator[RenderableType]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from swiglu_bench.finished.recommend import sentence
    from swiglu_bench.writers.tables import mebibytes
    from swiglu_bench.writers.time_tables import milliseconds

    groups: dict[tuple[Any, ...], list[Choice]] = {}
    for choice in choices:
        groups.setdefault(choice.case[:-1], []).append(choice)
    styles = {"clear": "green", "tie": "yellow", "unsure": "yellow", "none": "bold red"}
    for (shape, _, _, scope, mode, dtype), group in groups.items():
        table = Table(
            title=f"{shape} {scope} {mode} {dtype}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for name in ("tokens", "use", "time", "ratio", "peak", "how sure"):
            table.add_column(
                name, justify="left" if name in {"use", "how sure"} else "right", no_wrap=name != "how sure"
            )
        for choice in group:
            best = choice.record
            peak = choice.memory.peak_bytes
            memory = "-" if peak is None else f"{'' if choice.memory.measured else '~'}{mebibytes(peak)} MiB"
            name, time, ratio = "-", "", ""
            if best:
                name, time = best.implementation, milliseconds(best.time_ms or 0.0)
                ratio = f"x{best.ratio:.3f}" if best.ratio is not None else "-"
            sure = Text(sentence(choice), styles[choice.confidence])
            table.add_row(str(choice.case[-1]), Text(name, "bold"), time, ratio, memory, sure)
        yield table
        excluded: dict[str, list[str]] = {}
        for choice in group:
            for name, reason in choice.excluded.items():
                if name not in excluded.setdefault(reason, []):
                    excluded[reason].append(name)
        for reason, names in excluded.items():
            yield Text(f"not considered: {', '.join(names)}: {reason}", "dim")
    yield Text("peak: of a training step, above inputs and weights; ~: by arithmetic. From " + ", ".join(
        f"{one.name} ({one.records[0].device})" for one in runs if one.records), "dim")  # fmt: skip
    for name, usage in {c.record.implementation: c.usage for c in choices if c.record}.items():
        yield Text.assemble((f"\n{name}: ", "bold"), usage or "not one of the suite's; as its registration builds it")


def _bytes(option: str, text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = {name.lower(): size for name, size in UNITS.items()}.get(match[2].lower()) if match else None
    if not match or not unit:
        raise BadInput(f"{option}: {text!r} is not a size; give one such as 1GiB or 500MiB.")
    return int(float(match[1]) * unit)
