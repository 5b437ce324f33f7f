"""Which tables each command shows: memory, verdicts, training, several GPUs, a workload, the contract matrix.

Those of times are in times.py. Columns that are figures have the head and the form that rows/record.py declares.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.text import Text

from swiglu_bench.rows.figures import mebibytes, milliseconds, plus_minus
from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.record import FIGURES, AuditVerdict, Record, Status, TensorCheck, grouped, unique
from swiglu_bench.show.ranking import WORK, totals, workload_of
from swiglu_bench.show.table import (
    NAME_WIDTH,
    VERDICT_STYLES,
    Cell,
    Column,
    Grid,
    Notes,
    blocks,
    by,
    by_reason,
    dim,
    figure_grid,
    legend,
    missing,
    ratio_text,
    status_text,
)
from swiglu_bench.show.times import time_tables

VERDICT_WIDTH = 12
FIGURE_WIDTH = 11
BESIDE_WIDTH = 110
"""From this width on, `memory` shows predictions in columns of their own."""
VERIFY_FIGURES = ("error", "ratio", "eager's", "allowed", "max error", "max allowed")
"""Columns of `verify`, what matters most first."""
MATRIX_LOOK = {"box": None, "padding": (0, 1, 0, 0)}
SYMBOLS: dict[str, tuple[str, str]] = {
    AuditVerdict.PASS: ("✓", "green"),
    AuditVerdict.FAIL: ("✗", "bold red"),
    AuditVerdict.UNSUPPORTED: ("–", "yellow"),
    AuditVerdict.NOT_RUN: ("·", "dim"),
}
NAME = ("implementation", attrgetter("implementation"))


def tables(run: FinishedRun, width: int, detail: bool) -> Iterator[RenderableType]:
    """The tables of the run's command."""
    if all(record.kind == "training" for record in run.records):
        return training_tables([record.own for record in run.records])
    if all(record.kind == "tp" for record in run.records):
        return tp_tables(run.records)
    if any(record.time_ms is not None for record in run.records):
        shown = time_tables(run.records, width, detail=detail)
        return chain(shown, workload_tables(run.records, workload_of(run.about)))
    if any(record.peak_bytes is not None for record in run.records):
        return memory_tables(run.records, width)
    return (verify_detail_tables if detail else verify_tables)(run.records, width)


def memory_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope and dtype: measured bytes, and what arithmetic predicts beside or, if narrow, below."""
    beside = width >= BESIDE_WIDTH
    names = ("saved_bytes", "peak_bytes", "workspace_bytes")

    def figures(record: Record) -> Iterator[Cell]:
        for name in names:
            measured, predicted = (mebibytes(getattr(record, of + name)) for of in ("", "predicted_"))
            if beside:
                yield from (measured, Text(predicted, "dim"))
            else:
                yield Text.assemble(measured, (f"\n{predicted}", "dim"))

    def body(kept: list[Record], notes: Notes) -> Iterator[RenderableType]:
        pairs = ((FIGURES[name].head, "predicted")[: 1 + beside] for name in names)
        heads = ["tokens", "implementation", *chain.from_iterable(pairs)]
        rows: list[list[Cell]] = []
        for same_tokens in by(sorted(kept, key=lambda record: record.tokens), "tokens"):
            for record in same_tokens:
                head = (str(record.tokens) if record is same_tokens[0] else "", record.implementation)
                ok = record.status is Status.OK
                rows.append([*head, *(figures(record) if ok else [status_text(record, notes)])])
            rows.append([])
        note = f"MiB. {legend(names)}{' Below each, the arithmetic prediction.' * (not beside)}"
        name = {"implementation"}
        yield from Grid(heads, rows, note=note, text=name, wrap=name).parts()

    return blocks(records, ("shape", "scope", "dtype"), lambda group: "memory", body)


def verify_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope and dtype: error from fp64, eager's error, their ratio and the verdict per tensor.

    Where the width does not suffice for all figures, those that matter least are left out, and the legend says so.
    """
    count = max(1, min(len(VERIFY_FIGURES), (width - NAME_WIDTH - VERDICT_WIDTH) // FIGURE_WIDTH))
    legend = "error: ||value - fp64 truth|| / ||truth||; ratio: error / eager's; the worst over token counts is shown."
    if count < len(VERIFY_FIGURES):
        legend += f" Not shown in {width} columns: {', '.join(VERIFY_FIGURES[count:])}."
    else:
        legend += " max error: the largest element's, over the truth's rms."

    def body(kept: list[Record], notes: Notes) -> Iterator[RenderableType]:
        name = "implementation, tensor"
        rows = [row for same in by(kept, "implementation") for row in (*_verify_rows(same, notes, count), [])]
        yield from Grid((name, *VERIFY_FIGURES[:count], "verdict"), rows, note=legend, text={name, "verdict"}).parts()
        interpreted = unique(record.implementation for record in kept if record.interpreted)
        if interpreted:
            yield Text(f"run by Triton's interpreter on the CPU: {', '.join(interpreted)}", style="dim")

    def what(group: list[Record]) -> str:
        return f"verify, {', '.join(map(str, sorted({record.tokens for record in group})))} tokens"

    return blocks(records, ("shape", "scope", "dtype"), what, body)


def _verify_rows(records: list[Record], notes: Notes, figures: int) -> Iterator[list[Cell]]:
    """The worst check per tensor over the token counts of one implementation."""
    yield [Text(records[0].implementation, "bold")]
    for record in records:
        if record.status in {Status.SKIPPED, Status.ERROR, Status.UNSETTLED}:
            yield [*[""] * (1 + figures), status_text(record, notes, f"{record.tokens} tokens: ")]
    checks = [(record.tokens, check) for record in records for check in record.tensor_checks]
    for tensor, found in grouped(checks, lambda pair: pair[1].tensor).items():
        tokens, check = max(found, key=lambda pair: pair[1].used if pair[1].ok else math.inf)
        yield [f"  {tensor}", *_check_figures(check)[:figures], _verdict(check, notes, f"{tokens} tokens, {tensor}: ")]


def _verdict(check: TensorCheck, notes: Notes, where: str = "") -> Text:
    return Text("pass", "green") if check.ok else Text(f"FAIL {notes.mark(where + check.reason)}", "bold red")


def _check_figures(check: TensorCheck) -> list[str]:
    """In the order of VERIFY_FIGURES; dashes for a check that compares no values."""
    if not check.allowed:
        return ["-"] * len(VERIFY_FIGURES)
    relative = "-"
    if check.eager_error:
        times = check.error / check.eager_error
        relative = f"{times:.2f}" if times < 100 else f"{times:.2g}"
    others = (check.eager_error, check.allowed, check.max_error, check.max_allowed)
    return [f"{check.error:.2e}", relative, *(f"{value:.2e}" for value in others)]


def verify_detail_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope, dtype and token count: how the errors of each tensor's elements are distributed."""
    del width
    heads = ("", "error", "median", "99.9%", "max", "allowed", "worst at", "verdict")
    note = (
        "error: ||value - fp64 truth|| / ||truth||. The other figures are errors of single elements, over the "
        "truth's rms: the median, the 99.9th percentile, the largest, its limit, and its index."
    )

    def body(kept: list[Record], notes: Notes) -> Iterator[RenderableType]:
        rows: list[list[Cell]] = []
        for record in kept:
            status = "" if record.tensor_checks else status_text(record, notes)
            rows.append([Text(record.implementation, "bold"), *[""] * 6, status])
            for check in record.tensor_checks:
                figures = (check.error, check.median_error, check.p999_error, check.max_error, check.max_allowed)
                place = ",".join(map(str, check.worst_index)) or "-"
                rows.append([f"  {check.tensor}", *map(_short, figures), place, _verdict(check, notes)])
        yield from Grid(heads, rows, note=note, text={"", "verdict"}, look=MATRIX_LOOK).parts()

    return blocks(
        records, ("shape", "scope", "dtype", "tokens"), lambda group: f"verify, {group[0].tokens} tokens", body
    )


def _short(value: float | None) -> str:
    """A number with two digits, such as 3.6e-3; a dash for None."""
    return "-" if value is None else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


MEANING_STYLES = {"same": "green", "within seeds": "green", "differs": "bold red", "faster": "green",
                  "slower": "bold red"}  # fmt: skip


def training_tables(summaries: Sequence[Record]) -> Iterator[RenderableType]:
    """The tables of a training, and why figures are missing from them."""
    for grid in training_grids(summaries):
        yield from grid.parts()
    yield from map(Text, training_remarks(summaries))


def training_grids(summaries: Sequence[Record]) -> Iterator[Grid]:
    """Those tables for which there is anything: learning, speed, and where time and memory go."""
    text = {"implementation", "curve", "verdict"}

    def grid(title: str, rows: Sequence[Record], columns: Sequence[Column], note: str) -> Grid:
        return figure_grid(rows, columns, [NAME], title=title, note=note, text=text, wrap={NAME[0]}, least=10)

    trained = [row for row in summaries if row.final_loss is not None]
    if trained:
        metric: Column = (trained[0].metric, lambda row: _with_spread(row.metric_mean, row.metric_spread))
        yield grid("Does it learn the same?", trained, [*LEARNING, metric], _rule(trained))
    timed = [row for row in trained if row.step_ms is not None]
    if timed:
        rate: Column = (f"{timed[0].unit}/s", lambda row: row.shown("rate"))
        yield grid("Is it faster?", timed, [*SPEED, rate], f"{legend(['ratio'])} ±: half the 95% interval.")
        sizes = "saved and peak are beyond the optimiser's state, too."
        yield grid("Where time and memory go", timed, PARTS, f"{legend(PARTS)} {sizes}")


def training_remarks(summaries: Sequence[Record]) -> Iterator[str]:
    """Remarks on rows: frozen weights, savings that differ from the expected ones, rows without figures."""
    for row in summaries:
        if row.frozen and row.final_loss is not None:
            yield (
                f"{row.implementation} yields no weight gradients: its blocks keep their initial weights, "
                "so by design it learns less and does less work."
            )
    yield from missing(summaries)


def _rule(rows: Sequence[Record]) -> str:
    """How the curves were compared."""
    count = rows[0].seeds
    over = "one seed" if count == 1 else f"{count} seeds, ± their spread"
    text = f"final loss: mean over the last fifth of {rows[0].steps} steps, over {over}."
    judged = next((row for row in rows if row.difference is not None), None)
    if judged is None:
        return text
    rounding = "not known" if judged.rounding is None else f"{judged.rounding:.2g}"
    spread = "not known, with one seed" if judged.eager_spread is None else f"{judged.eager_spread:.2g}"
    text += (
        f" same: each seed's difference is at most 3 times the effect of another summation order on eager "
        f"({rounding}); within seeds: the mean difference is at most the spread of eager's seeds ({spread}); "
        "else differs, or unknown with one seed."
    )
    if any(row.precision for row in rows):
        text += " For quantised rows, ± is half the 95% interval of the difference."
    return text


def _difference(row: Record) -> str:
    if row.difference is None:
        return ""
    if not row.precision or row.difference_low is None or row.difference_high is None:
        return f"{row.difference:+.2g}"
    return f"{row.difference:+.1g} ± {(row.difference_high - row.difference_low) / 2:.1g}"


def _curve(row: Record) -> Text:
    text = "baseline" if row.difference is None else row.curve
    return Text(f"{text} (frozen)", "yellow") if row.frozen else Text(text, MEANING_STYLES.get(row.curve, ""))


def _step_verdict(row: Record) -> Text:
    if row.frozen:
        return Text(f"{row.verdict}, less work", "yellow")
    return Text(row.verdict, MEANING_STYLES.get(row.verdict, ""))


def _with_spread(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return ""
    digits = 4 if mean < 10 else 2  # of a perplexity
    return f"{mean:.{digits}f}" if spread is None else f"{mean:.{digits}f} ± {spread:.{digits}f}"


CURVE: Column = ("curve", _curve)
LEARNING: Sequence[Column] = (
    ("final loss", lambda row: _with_spread(row.final_loss, row.final_loss_spread)),
    ("minus eager's", _difference),
    CURVE,
)
SPEED: Sequence[Column] = ("step_ms", ("ratio", ratio_text), ("verdict", _step_verdict))
PARTS = (
    "block_forward_ms", "block_backward_ms", "optimizer_ms", "block_share", "saved_bytes", "peak_bytes",
)  # fmt: skip


def tp_tables(rows: Sequence[Record]) -> Iterator[RenderableType]:
    """A table for each shape, mode, number of ranks and way of splitting; what they mean, and every reason."""
    timed = [row for row in rows if row.time_ms is not None]
    groups = grouped(timed, attrgetter("ranks", "shape", "mode", "dtype", "sequence_parallel"))
    for group in groups.values():
        yield from _ranks_grid(_ranks_title(group[0]), group, RANKS, _ranks_noise(group)).parts()
        yield from _ranks_grid("Where its time goes", group, RANK_PARTS, "").parts()
    if groups:
        yield Text(
            f"Of the slowest rank. {legend(('ratio', 'single_ms', 'efficiency'))} ±: half the 95% interval.", "dim"
        )
        yield Text(legend(FIGURES_OF_RANKS), "dim")
    for status, own in grouped((row for row in rows if row.status is not Status.OK), attrgetter("status")).items():
        yield from map(Text, by_reason(status, _with_cases(own, rows, "reason")))
    alone = _with_cases([row for row in timed if row.single_reason], rows, "single_reason")
    yield from map(Text, by_reason("no time without collectives or on one GPU", alone))


def _with_cases(own: Sequence[Record], rows: Sequence[Record], reason: str) -> Iterator[tuple[str, str]]:
    """Each row's reason and implementation, which has its cases beside it unless it holds for all."""
    every = len(unique(map(_ranks_case, rows)))
    for (why, name), same in grouped(own, attrgetter(reason, "implementation")).items():
        cases = unique(map(_ranks_case, same))
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        yield why, name if len(cases) == every else f"{name} at {cases[0]}{more}"


def _ranks_case(row: Record) -> str:
    split = "split sequence" if row.sequence_parallel else "all tokens"
    return f"{row.mode} {row.shape} {row.dtype} {row.tokens} tokens, {split}"


def _ranks_grid(title: str, rows: Sequence[Record], columns: Sequence[Column], note: str) -> Grid:
    """A line per row, with its token count where that is another than above."""
    counts = [row.tokens for row in rows]
    new = {id(row) for row, above in zip(rows, [None, *counts], strict=False) if row.tokens != above}
    tokens: Column = ("tokens", lambda row: f"{row.tokens:,}" if id(row) in new else "")
    text = {NAME[0], "verdict"}
    return figure_grid(rows, columns, [tokens, NAME], title=title, note=note, text=text, wrap={NAME[0]}, least=16)


def _ranks_title(row: Record) -> str:
    split = "sequence parallel" if row.sequence_parallel else "all tokens on every rank"
    block = "mlp"
    if row.experts:
        block, split = f"{row.experts} experts", "expert parallel"
    sizes = f"{row.shape} ({row.hidden} x {row.intermediate}), {row.dtype}"
    return f"{row.mode}, {block} {sizes}, {row.ranks} x {row.device}, {split}"


def _ranks_noise(rows: Sequence[Record]) -> str:
    noise = {row.tokens: f"{row.aa_low:.3f} to {row.aa_high:.3f} at {row.tokens:,}" for row in rows if row.aa_low}
    return f"eager against itself (A/A): {', '.join(noise.values())} tokens" if noise else ""


def tp_line(row: Record) -> str:
    """A row of `tp` without a table."""
    what = f"{row.ranks} ranks {_ranks_case(row)} {row.implementation}"
    if row.time_ms is None:
        return f"{what} {row.status}: {row.reason}"
    ratio = "" if row.ratio is None else f" ({row.ratio:.3f} of eager, {row.verdict})"
    return f"{what} {row.time_ms:.4g} ms{ratio}"


def _bus(row: Record) -> str:
    limit = row.shown("bus_ceiling_gbps")
    return row.shown("bus_gbps") + (f" of {limit}" if limit else "")


RANK_STYLES = {"faster": "green", "slower": "red", "tie": "", "baseline": "dim"}
RANKS: Sequence[Column] = (
    "time_ms",
    ("ratio", ratio_text),
    ("verdict", lambda row: Text(row.verdict, RANK_STYLES.get(row.verdict, ""))),
    "single_ms",
    "efficiency",
)
FIGURES_OF_RANKS = ("compute_ms", "comm_ms", "hidden_share", "bus_gbps", "peak_bytes")
RANK_PARTS: Sequence[Column] = ("compute_ms", "comm_ms", "hidden_share", ("bus GB/s", _bus), "peak_bytes")
WORKLOAD_NOTE = (
    "time: of a call, the mean over {calls:g} recorded calls with {counts} token counts; x: time for all of them / the "
    "baseline's, ± half the 95% interval."
)


def workload_tables(records: Iterable[Record], workload: Mapping[int, float]) -> Iterator[RenderableType]:
    """A workload's totals for a terminal."""
    for grid in workload_grids(records, workload):
        yield from grid.parts()


def workload_grids(records: Iterable[Record], workload: Mapping[int, float]) -> Iterator[Grid]:
    """A table for each shape, scope, mode and dtype; none without a workload."""
    note = WORKLOAD_NOTE.format(calls=sum(workload.values()), counts=len(workload))
    heads, name = ("implementation", "time", "ratio", ""), {"implementation"}
    for work, found in grouped(totals(records, workload), attrgetter(*WORK)).items():
        fastest = min((row.time_ms for row in found if row.time_ms is not None), default=None)
        rows = [[row.implementation, *_total(row, row.time_ms == fastest)] for row in found]
        title = f"{' '.join(work)}: the recorded workload"
        yield Grid(heads, rows, title, note, text={*name, ""}, wrap=name)


def _total(row: Record, fastest: bool) -> tuple[Cell, Cell, Cell]:
    if row.time_ms is None:
        return row.reason, "", ""
    compared = f"x{plus_minus(*row.interval)}" if row.interval else row.reason
    compared = "baseline" if row.implementation == row.baseline else compared
    verdict = Text(row.verdict, VERDICT_STYLES.get(row.verdict, ""))
    return milliseconds(row.time_ms) + " *" * fastest, compared, verdict


def contract_tables(cells: Sequence[Record], about: Mapping[str, str]) -> Iterator[RenderableType]:
    """A matrix per scope, what its columns mean, and every reason; `about` says what each check asks."""
    letters = dict(zip(unique(cell.check for cell in cells), string.ascii_letters, strict=False))
    heads = ["", *letters.values()]
    for scope, own in grouped(cells, attrgetter("scope")).items():
        rows: list[list[Cell]] = []
        for name, row in grouped(own, attrgetter("implementation")).items():
            found = {cell.check: Text(*SYMBOLS[cell.verdict]) for cell in row}
            rows.append([Text(name, "bold"), *(found.get(check, "") for check in letters)])
        yield from Grid(heads, rows, scope, text=heads, look=MATRIX_LOOK).parts()
    yield Text.assemble(*((f"{symbol} {verdict}   ", style) for verdict, (symbol, style) in SYMBOLS.items()))
    yield Group(*dim(f"{letter} {check}: {about.get(check, '')}" for check, letter in letters.items()))
    yield from _reasons(cells)


def _reasons(cells: Sequence[Record]) -> Iterator[RenderableType]:
    """Every reason once, with all that have it: failures first, and one line for those that could not run at all."""
    whole = Counter((cell.implementation, cell.verdict, cell.reason) for cell in cells)
    count = Counter(cell.implementation for cell in cells)

    def what(cell: Record) -> tuple[str, str, str]:
        always = whole[cell.implementation, cell.verdict, cell.reason] == count[cell.implementation] > 1
        return cell.verdict, "every check" if always else cell.check, cell.reason

    order: tuple[str, ...] = (AuditVerdict.FAIL, AuditVerdict.UNSUPPORTED, AuditVerdict.NOT_RUN, AuditVerdict.PASS)
    found = grouped((cell for cell in cells if cell.reason), what)
    for (verdict, check, reason), same in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        names = grouped(same, attrgetter("implementation"))
        who = "; ".join(f"{name} ({', '.join(unique(cell.scope for cell in own))})" for name, own in names.items())
        symbol, style = SYMBOLS[verdict]
        yield Text.assemble((f"{symbol} {check}", style), f": {reason} ", (f"[{who}]", "dim"))
