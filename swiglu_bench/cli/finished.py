"""The commands about finished runs: comparing two, showing one, listing all, sending one to W&B, a report, a choice."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType

from swiglu_bench import options, request
from swiglu_bench.cases.cases import parse_dtypes, parse_tokens
from swiglu_bench.cases.errors import BadInput, one_of
from swiglu_bench.machine.machine import slug_of
from swiglu_bench.options import HOW, OUTPUT, WHAT, JsonForm, Text, Texts, command_of, option
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.figures import write_whole
from swiglu_bench.rows.record import unique
from swiglu_bench.show import text

if TYPE_CHECKING:
    from swiglu_bench.rows.finished_run import FinishedRun

CHOOSE = "Which rows"
RunPath = Annotated[Path, typer.Argument(help="Folder of a run, or its records.csv.", show_default=False)]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The options that choose rows of a finished run."""

    impl: Annotated[
        Text, option(CHOOSE, "Names or globs, comma-separated.", autocompletion=options.complete_implementations)
    ] = None
    shape: Annotated[Text, option(CHOOSE, "Names or globs.", *options.SHAPE)] = None
    tokens: Annotated[Text, option(CHOOSE, "As 1,128,1k,8k.")] = None
    dtype: Annotated[Text, option(CHOOSE, "bf16, fp16, fp32.")] = None
    scope: Annotated[Text, option(CHOOSE, "activation, glu, mlp.")] = None
    mode: Annotated[Text, option(CHOOSE, "forward, backward, step.", *options.MODE)] = None

    def of(self, path: Path, baseline: str | None = None) -> FinishedRun:
        """A run with these rows, its ratios relative to `baseline` where that is given."""
        from swiglu_bench.rows.finished_run import load_run, rebased

        names = _parts("--impl", self.impl)
        chosen = load_run(path).only(
            implementation=[] if baseline else names,
            shape=_parts("--shape", self.shape),
            tokens=[str(count) for count in parse_tokens(self.tokens)] if self.tokens is not None else [],
            dtype=[known.value for known in parse_dtypes(self.dtype)] if self.dtype is not None else [],
            scope=_parts("--scope", self.scope),
            mode=_parts("--mode", self.mode),
        )
        return rebased(chosen, baseline).only(implementation=names) if baseline else chosen


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

    Exits 0 if no row is worse than allowed, 1 if a row is worse or broken, 3 if it is undecided whether one is worse,
    2 if the runs cannot be compared.

    Commands that measure save a run for `compare NAME` with `--save-baseline NAME`.

    Example: swiglu-bench compare earlier/forward results/nvidia-h200/forward
    """
    one_of("--format", form, "table", "github", *text.ROWS)
    one_of("--by", by, "auto", "ratio", "time")
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", max_regression)
    if not share:
        raise BadInput(f"--max-regression: {max_regression!r} is not a percentage; give one such as 2% or 0.5%.")
    from swiglu_bench.show import compare

    before, after = _runs(before, after)
    found = compare.compare(rows.of(before), rows.of(after), float(share[1]) / 100, by)
    status = {"fine": 0, "regression": 1, "cannot tell": 3}[found.outcome]
    if form == "github":
        text.put(compare.comparison_markdown(found) + "\n")
    else:
        about = {
            "kind": "comparison", "version": 1, "before": str(before), "after": str(after), "by": found.by,
            "max_regression": found.tolerance, "outcome": found.outcome.value, "exit_status": status,
            "warnings": found.warnings,
        }  # fmt: skip
        told = [change.row() for change in found.changes]
        _put(form, compare.comparison_tables(found), told, about, compare.COLUMNS)
    raise typer.Exit(status)


def _runs(before: Path, after: Path | None) -> tuple[Path, Path]:
    """The runs to compare: a name is that of a baseline, which is of the command of the other run."""
    from swiglu_bench.rows.finished_run import load_run, newest_run

    named = not before.exists() and before.name == str(before)
    if after is None:
        commands = run_folder.baseline_commands(before.name) if named else []
        after = newest_run(Path("results"), commands)
        if after is None:
            of = f" of {' or '.join(commands)}" * bool(commands)
            raise BadInput(f"There is no run{of} below results/; name the run to compare with the first.")
    return (run_folder.find_baseline(before.name, load_run(after, beside=False).command) if named else before), after


@dataclass(frozen=True, kw_only=True)
class ShowOptions(RowOptions):
    """These, and what is shown of the rows."""

    sort: Annotated[
        Text,
        option(OUTPUT, "By a figure of the rows, such as ratio (implementations by its median), or by implementation."),
    ] = None
    reverse: Annotated[bool, option(OUTPUT, "Sort in the opposite order.", "--reverse")] = False
    pivot: Annotated[
        Text, option(OUTPUT, "Show one figure of the rows, such as time_ms: implementations down, token counts across.")
    ] = None
    baseline: Annotated[
        Text, option(CHOOSE, "Compute ratios to this implementation instead, which was timed in the same rounds.")
    ] = None
    export: Annotated[
        Text, option(OUTPUT, f"In the format of another program: {', '.join(text.EXPORTS)}.", "--export")
    ] = None
    schema: Annotated[
        bool, option(OUTPUT, "Print the JSON Schema of what --format json prints; RUN may be left out.", "--schema")
    ] = False


def _show(
    wanted: ShowOptions,
    run: Annotated[Path | None, typer.Argument(help="Folder of a run, or its records.csv.", show_default=False)] = None,
    *,
    detail: options.TimeDetail = False,
    form: Annotated[
        str, option(OUTPUT, "table, json, jsonl, csv, parquet (with --output), or with --pivot github.", "--format")
    ] = "table",
    output: Annotated[Path | None, option(OUTPUT, "New file instead of stdout.", "--output", "-o")] = None,
) -> None:  # fmt: skip
    """Show a finished run again: its tables, filtered and sorted, or its rows for another program.

    Example: swiglu-bench show results/nvidia-h200/step-mlp --baseline compile --sort ratio
    """
    one_of("--format", form, "table", "github", "parquet", *text.ROWS)
    export, pivot = wanted.export, wanted.pivot
    if export is not None:
        one_of("--export", export, *text.EXPORTS)
    if (export or wanted.schema) and (pivot or form != text.TABLE or (export and wanted.schema)):
        raise BadInput("--export, --schema, --pivot and --format exclude each other; give one of them.")
    if wanted.schema:
        from swiglu_bench.rows.finished_run import load_run

        text.put(text.schema(load_run(run, beside=False).records[0].own.kind if run else "run"), output)
        return
    if run is None:
        raise BadInput("Missing argument RUN: give the folder of a run, or its records.csv.")
    if output and form == "table" and not export:
        raise BadInput("--output is for rows; give --format json, jsonl, csv, parquet or github with it.")
    if form == "parquet" and not output:
        raise BadInput("--format parquet is binary and needs --output FILE.")
    if form == "github" and not pivot:
        raise BadInput("--format github needs --pivot FIGURE, such as --pivot time_ms.")
    chosen = wanted.of(run, wanted.baseline)
    from swiglu_bench.rows.finished_run import latest
    from swiglu_bench.show import history as showing

    if wanted.sort:
        chosen = showing.ordered(chosen, wanted.sort, wanted.reverse)
    if export:
        text.put(text.exported(export, latest(chosen.records), chosen.about), output)
    elif pivot:
        found = showing.pivot(chosen, showing.figure(chosen, pivot, "--pivot"))
        if form == "github":
            text.put(showing.pivot_markdown(found) + "\n", output)
        elif form == "parquet" and output:
            text.write_parquet(found, output)
        else:
            about = {"kind": "pivot", "figure": pivot, "run": str(run)}
            _put(form, showing.pivot_tables(found, pivot), found, about, found[0] if found else (), output)
    elif form == text.TABLE:
        from swiglu_bench.show.tables import tables

        _print(tables(chosen, text.screen().width, detail))
    elif form == "parquet" and output:
        text.write_parquet(chosen.frame, output)
    else:
        text.put(showing.as_text(chosen, form), output)


def _put(
    form: str, tables: Iterable[RenderableType], rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any],
    columns: Iterable[str], output: Path | None = None,
) -> None:  # fmt: skip
    if form == text.TABLE:
        _print(tables)
    else:
        text.put(text.as_text(form, rows, about, columns), output)


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
    from swiglu_bench.show.history import COLUMNS, history_tables, lines

    if not root.is_dir():
        raise BadInput(f"{root} is not a folder; give one with runs in it.")
    found = lines(root)[: limit or None]
    if not found:
        raise BadInput(f"No run is in {root} or below; give a folder with runs in it.")
    about = {"kind": "history", "version": 1, "folder": str(root)}
    _put(form, history_tables(found, root, text.screen().width), found, about, COLUMNS)


def _publish(wanted: options.WandbRunOptions, run: RunPath, form: options.JsonForm = "table") -> None:
    """Send a finished run to Weights & Biases, as --log-wandb would have. Exits 1 if not all of it could be sent.

    Example: swiglu-bench publish results/nvidia-h200/forward --wandb-tags reference
    """
    from swiglu_bench.output import wandb_run
    from swiglu_bench.rows.finished_run import load_run, seeds_of

    found = load_run(run)
    slug = slug_of(found.records[0].device if found.records[0].cuda else "cpu")
    say = partial(text.screen(form).print, markup=False, highlight=False, soft_wrap=True)
    sent = wandb_run(wanted, found.command, slug, found.about, found.place, lambda line: say(f"Warning: {line}"))
    with contextlib.closing(sent):
        for row in seeds_of(found.place) if found.place else ():
            for number in range(row.steps or 0):
                sent.step(row, number)
        for record in found.records:
            sent.write(record)
    if sent.url_or_path:
        say(f"W&B: {sent.place}")
    if form == "json":
        told = {"url_or_path": sent.url_or_path, "upload": sent.upload, "rows_sent": len(found.records)}
        text.put(text.as_json({"kind": "publication", "run": str(run), **told, "failed": sent.failed}))
    raise typer.Exit(int(sent.failed))


def _parts(option: str, names: str | None) -> list[str]:
    return request.split([names], option) if names is not None else []


NEEDS = {"altair": "altair", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}
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
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise BadInput(f"report needs {', '.join(missing)}; install them with: pip install {' '.join(missing)}.")
    if dark and not (png or svg):
        raise BadInput("--dark is for pictures, and a page follows its reader's setting; give --png or --svg, too.")
    if not output and not png and not svg:
        output = Path("report.html")
    _check_places(output, png, svg)
    from swiglu_bench.show.console import Bar
    from swiglu_bench.show.sections import folders, load, only

    rows, err = list[dict[str, Any]](), form != text.TABLE
    found: list[FinishedRun] = []
    with Bar(Console(stderr=True), doing="reading runs") as bar:
        paths = [path for given in runs for path in folders(given)]
        for number, path in enumerate(paths, start=1):
            bar.tell(f"run {number} of {len(paths)}: {path}")
            found.append(load(path))
        if not any(run.implementations for run in found):
            raise BadInput(f"{', '.join(map(str, runs))}: no rows; give a run that has some.")
        if names := request.split(impl, "--impl"):
            found = only(found, names)
        if output:
            from swiglu_bench.show.page import page

            html = page(found, request.command_line(), bar.tell).encode("utf-8")
            with _writing("--output", output):
                write_whole(output, html)
            typer.echo(f"Report: {output}", err=err)
        for folder in filter(None, (png, svg)):
            rows += _write_pictures(found, folder, "png" if folder is png else "svg", dark, err, bar.tell)
    if form == "json":
        read = [run.label for run in found]
        text.put(text.as_json({"kind": "report", "runs": read, "page": output, "rows": rows}))


@contextlib.contextmanager
def _writing(option: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"{option}: {place} cannot be written: {reason}; give one that can.") from None


def _check_places(page: Path | None, png: Path | None, svg: Path | None) -> None:
    """Whether there is room for everything, before the work starts; nothing but an HTML page is ever replaced."""
    for name, folder in (("--output", page and page.parent), ("--png", png), ("--svg", svg)):
        if folder:
            with _writing(name, folder):
                folder.mkdir(parents=True, exist_ok=True)
    if page and page.is_dir():
        raise BadInput(f"--output: {page} is a folder; give a file.")
    if page and page.exists() and not page.read_bytes()[:15].lower().startswith(b"<!doctype html>"):
        raise BadInput(f"--output: {page} exists and is not an HTML page; give another name.")


def _write_pictures(
    runs: Sequence[FinishedRun], folder: Path, form: Literal["png", "svg"], dark: bool, err: bool,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    from swiglu_bench.show.charts import pictures
    from swiglu_bench.show.pictures import picture

    rows: list[dict[str, Any]] = []
    for name, chart in pictures(runs):
        tell(f"{name}.{form}")
        if isinstance(chart, str):
            typer.echo(f"no {name}: {chart}", err=err)
            rows.append({"picture": name, "file": None, "reason": chart})
            continue
        file = folder / f"{name}.{form}"
        with _writing(f"--{form}", folder):
            file.write_bytes(picture(chart, form, dark))
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
    precision: options.PrecisionOption = None
    mode: Annotated[str, option(WHAT, "forward, backward or step: what should be fast.", *options.MODE)] = "step"
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
    one_of("--mode", wanted.mode, "forward", "backward", "step")
    most = _bytes("--max-memory", wanted.max_memory) if wanted.max_memory is not None else None
    if not wanted.run:
        request.check_names(vars(wanted))
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
        status, timed = _measured(wanted.mode, wanted, console, budget=wanted.budget, energy=False)
        if not any(record.time_ms is not None for record in timed.records):
            raise typer.Exit(status)  # the sweep has said why
        runs = [timed, *([_measured("memory", wanted, console)[1]] if most is not None else [])]
    choices = ranking.recommend(runs, catalogue, most)
    about = {"kind": "recommendation", "version": 1, "max_memory_bytes": most, "runs": [run.name for run in runs]}
    _put(form, ranking.recommendation_tables(choices, runs), choices, about, choices[0])
    raise typer.Exit(int(any(choice["implementation"] is None for choice in choices)))


def _measured(command: str, wanted: RecommendOptions, console: Console, **more: Any) -> tuple[int, FinishedRun]:
    from swiglu_bench.tasks.sweep import perform

    own = {"mode", "max_memory", "run", "budget", "out"}
    given = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(wanted) if field.name not in own}
    out = wanted.out / command if wanted.out else None
    options_of_command = options.COMMANDS[command](**given, **more, csv=out is not None, out=out)
    return perform(command, options_of_command, console, request.command_line())


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


compare, show = command_of(RowOptions, _compare), command_of(ShowOptions, _show)
recommend, publish = command_of(RecommendOptions, _recommend), command_of(options.WandbRunOptions, _publish)
