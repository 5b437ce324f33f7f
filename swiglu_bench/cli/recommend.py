"""`swiglu-bench recommend`: the best choice per token count, from finished runs or from measuring now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiglu_bench import options, request
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cli.finished import RowOptions
from swiglu_bench.options import HOW, OUTPUT, WHAT, Text, option
from swiglu_bench.rows import text
from swiglu_bench.rows.grouping import unique

if TYPE_CHECKING:
    from rich.console import Console

    from swiglu_bench.rows.finished_run import FinishedRun

UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def recommend(
    shapes: options.Shapes = None, tokens: options.Tokens = None, dtype: options.DtypeOption = None,
    scope: options.ScopeOption = None,
    mode: Annotated[str, option(WHAT, "forward, backward or step: what should be fast.")] = "step",
    max_memory: Annotated[
        Text, option(WHAT, "Most memory that a training step may use above inputs and weights, such as 1GiB or 500MiB.")
    ] = None,
    impl: options.Impl = None, skip_impl: options.SkipImpl = None, seed: options.ShapeSeed = 0,
    run: Annotated[
        list[Path] | None,
        option(HOW, "Finished runs to use, repeated: timed ones, and one of memory. \\[default: measure now]",
               "--run"),
    ] = None,
    device: options.Device = None, budget: options.Budget = 20.0, in_process: options.InProcess = False,
    wait: options.Wait = True,
    out: Annotated[Path | None, option(OUTPUT, "Store what is measured in this folder.")] = None,
    resume: options.Resume = False, force: options.Force = False, form: options.Form = "table",
) -> None:  # fmt: skip
    """Say what to use: the best implementation per token count, how sure that is, and the line of Python for it.

    Rows that tie with the best are named. Exits 1 if nothing qualifies at one of the cases.

    Example: swiglu-bench recommend --shapes llama7b --tokens 1k,8k --max-memory 1GiB
    """
    text.check("--format", form, "table", *text.ROWS)
    text.check("--mode", mode, "forward", "backward", "step")
    most = _bytes("--max-memory", max_memory) if max_memory is not None else None
    from swiglu_bench.show.finished import recommendation

    console = text.screen(form)
    catalogue = {one.name: one for one in request.catalogue(request.loader(options.TIMEOUT_S))}
    if run:
        if request.split(skip_impl):
            raise BadInput("--skip-impl is for measuring now; choose rows of a --run with --impl.")
        names = ",".join(request.split(impl, "--impl")) or None
        runs = [_chosen(path, mode, impl=names, shape=shapes, tokens=tokens, dtype=dtype, scope=scope) for path in run]
    else:
        if most is not None and not impl:  # what needs the least memory is a variant, which no command compares unasked
            impl = [name for name, one in catalogue.items() if not one.on_request]
        given: dict[str, Any] = {
            "shapes": shapes, "tokens": tokens, "dtype": dtype, "scope": scope, "impl": impl, "skip_impl": skip_impl,
            "seed": seed, "device": device, "in_process": in_process, "wait": wait, "csv": out is not None,
            "resume": resume, "force": force,
        }  # fmt: skip
        runs = [_measured(mode, out, console, **given, budget=budget, energy=False)]
        if not any(record.time_ms is not None for record in runs[0].records):
            raise typer.Exit(1)  # the sweep has said why
        runs += [_measured("memory", out, console, **given)] if most is not None else []
    choices = recommendation.recommend(runs, catalogue, most)
    if form == "table":
        for part in recommendation.tables(choices, runs):
            console.print(part)
    else:
        about = {"kind": "recommendation", "version": 1, "max_memory_bytes": most, "runs": [one.name for one in runs]}
        text.put(text.as_text(form, recommendation.rows(choices), about, recommendation.COLUMNS))
    raise typer.Exit(int(any(choice.record is None for choice in choices)))


def _measured(command: str, out: Path | None, console: Console, **given: Any) -> FinishedRun:
    from swiglu_bench.tasks.sweep import perform

    wanted = options.COMMANDS[command](**given, out=out / command if out else None)
    return perform(command, wanted, console, request.command_line())[1]


def _chosen(path: Path, mode: str, **given: str | None) -> FinishedRun:
    """What a run has of the cases asked for; of a run that measured memory, which is a step's, any mode."""
    from swiglu_bench.rows.finished_run import load_run

    found = load_run(path, beside=False)
    if found.command in {"tp", "train"}:
        raise BadInput(f"--run: {path} is a run of {found.command}; give one of forward, backward, step or memory.")
    memory, modes = any(row.peak_bytes is not None for row in found.records), unique(row.mode for row in found.records)
    if not memory and mode not in modes:
        raise BadInput(f"--run: {path} has rows of {', '.join(modes)} and none of {mode}; give --mode {modes[0]}.")
    return RowOptions(**given, mode=None if memory else mode).of(path)


def _bytes(option: str, value: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value)
    unit = UNITS.get(match[2].lower()) if match else None
    if not match or not unit:
        raise BadInput(f"{option}: {value!r} is not a size; give one such as 1GiB or 500MiB.")
    return int(float(match[1]) * unit)
