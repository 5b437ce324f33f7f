"""Which tables each command shows: times, memory, verdicts, training, several GPUs, a workload, the contract matrix.

Columns that are figures have the head and the form that rows/record.py declares.
"""

import math
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.text import Text

from swiglu_bench.rows.figures import mebibytes, microjoules, milliseconds, plus_minus, together, tokens_text
from swiglu_bench.rows.finished_run import FinishedRun, case_label, case_of, table_label
from swiglu_bench.rows.record import FIGURES, MOST_STEAL, AuditVerdict, Record, Status, TensorCheck, grouped, unique
from swiglu_bench.show.ranking import quickest, totals, workload_of
from swiglu_bench.show.table import STYLES, TABLE, Cell, Column, Grid, Notes, across, by, by_reason, dim, figure_grid

FEW_TOKENS = 256
"""Up to here a caller feels launches more than kernels, and the second table is shown unasked."""
NAME_WIDTH, CELL_WIDTH, FELT_WIDTH = 26, 19, 27
FELT = ("host_us", "latency_us", "graph_us")
MEMORY = ("saved_bytes", "peak_bytes", "workspace_bytes")
COUNTED = ("tensor_pct", "dram_bytes", "l2_bytes", "registers_per_thread")
MOST_GPUS = 8
"""More GPUs than these are counted instead of listed."""
VERDICT_WIDTH, FIGURE_WIDTH = 12, 11
MATRIX_LOOK = {"box": None, "padding": (0, 1, 0, 0)}
SYMBOLS: dict[str, tuple[str, str]] = {
    AuditVerdict.PASS: ("✓", "green"),
    AuditVerdict.FAIL: ("✗", "bold red"),
    AuditVerdict.UNSUPPORTED: ("–", "yellow"),
    AuditVerdict.NOT_RUN: ("·", "dim"),
}
NAME: tuple[str, Callable[[Record], Cell]] = ("implementation", lambda row: Text(row.implementation, "bold"))


def tables(run: FinishedRun, width: int, detail: bool) -> Iterator[RenderableType]:
    """The tables of the run's command."""
    if all(record.kind == "training" for record in run.records):
        return training_tables([record.own for record in run.records])
    if all(record.kind == "tp" for record in run.records):
        return tp_tables(run.records)
    if any(record.time_ms is not None or record.unconfirmed_ms is not None for record in run.records):
        shown = time_tables(run.records, width, detail=detail)
        return chain(shown, workload_tables(run.records, workload_of(run.about)))
    if any(record.peak_bytes is not None for record in run.records):
        return memory_tables(run.records, width)
    return verify_tables(run.records, width, detail)


def legend(names: Iterable[str]) -> str:
    """What figures of a table mean, as it is declared of them."""
    return "; ".join(f"{FIGURES[name].head}: {FIGURES[name].caption}" for name in names).replace("`", "") + "."


def ratio_text(row: Record) -> str:
    """Its ratio with half of the interval; empty for the baseline and where there is none."""
    return "" if row.ratio is None or row.verdict == "baseline" else f"{row.ratio:.3f} ± {row.half_width:.3f}"


def status_text(row: Record, notes: Notes, where: str = "") -> Text:
    """How a row without figures ended, and the number of its reason."""
    return Text(f"{row.status} {notes.mark(where + row.reason)}", STYLES[row.status])


def missing(rows: Iterable[Record]) -> Iterator[str]:
    """Why rows have no figures: a line for each status and reason, with all implementations that it holds for."""
    for status, own in grouped((row for row in rows if row.status is not Status.OK), attrgetter("status")).items():
        yield from by_reason(status, ((row.reason, row.implementation) for row in own))


Body = Callable[[list[Record], Notes], Iterable[RenderableType]]


def blocks(
    records: Iterable[Record], fields: Sequence[str], what: Callable[[list[Record]], str], body: Body
) -> Iterator[RenderableType]:
    """For each group of rows that agree in `fields`: `what` they are, what `body` shows of them, and every reason.

    Implementations that were skipped everywhere for one reason are a line under the tables and not part of them.
    """
    for group in by(records, *fields):
        kept, skipped = list[Record](), list[tuple[str, str]]()
        for own in by(group, "implementation"):
            reasons = {record.reason for record in own}
            if all(record.status is Status.SKIPPED for record in own) and len(reasons) == 1:
                skipped.append((reasons.pop(), own[0].implementation))
            else:
                kept += own
        first, notes = group[0], Notes()
        sizes = f"  ({first.sizes})  "
        head = Text.assemble((first.shape, "bold"), sizes, f"{first.scope} {first.mode} {first.dtype} {what(group)}")
        head.rstrip()
        shown = [*(body(kept, notes) if kept else ()), *_losses(kept)]
        yield Group(head, *shown, *notes.lines(), *dim(by_reason("skipped", skipped)), Text(""))


def _losses(records: list[Record]) -> Iterator[Text]:
    """What quantising cost each implementation, at the token count where that is most."""
    found = []
    for own in by((record for record in records if record.loss is not None), "implementation"):
        worst = max(own, key=lambda record: record.loss or 0.0)
        found.append(f"{worst.implementation} {worst.loss:.2e} (eager {worst.eager_loss:.2e})")
    if found:
        yield Text(f"loss, the relative error from the fp64 result of unquantised operands: {', '.join(found)}", "dim")


def rate(record: Record) -> str:
    """TFLOP/s where products set the limit, GB/s where bytes do; empty where the command counts neither."""
    value, unit = (record.gbps, "GB/s") if record.limit_kind == "bandwidth" else (record.tflops, "TFLOP/s")
    if value is None:
        return ""
    if value < 1 and unit == "TFLOP/s":
        value, unit = value * 1e3, "GFLOP/s"
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def compared(record: Record) -> str:
    """The ratio to the baseline with half its interval, or why there is none."""
    if record.implementation == record.baseline:
        return "baseline"
    if not record.comparable:
        return "fewer gradients"
    return plus_minus(*record.interval) if record.interval else ""


def ratio(record: Record) -> str:
    """The same for a terminal: a ratio has an x before it."""
    if record.interval and record.comparable and record.implementation != record.baseline:
        return f"x{plus_minus(*record.interval)}"
    return compared(record) or "no baseline"


def a_a(record: Record) -> str:
    """The A/A pair of the record's case: ratio and interval."""
    return f"{record.aa_ratio:.4f} [{record.aa_low:.4f}, {record.aa_high:.4f}]"


def time_line(record: Record) -> str:
    """One row as one plain line, for a log."""
    head = f"{case_label(case_of(record))} {record.implementation}: {record.status}"
    if record.status is not Status.OK:
        says = "" if record.unconfirmed_ms is None else f" Unconfirmed: {milliseconds(record.unconfirmed_ms)}."
        return f"{head}: {record.reason}{says}"
    if record.loss is not None:
        head += f", loss {record.loss:.2e} (eager {record.eager_loss:.2e})"
    if record.time_ms is not None:
        against = ratio(record)
        if record.implementation == record.baseline and record.aa_ratio is not None:
            against += f", A/A {a_a(record)}"
        elif record.verdict:
            against += f" {record.verdict}"
        limit = "limit unknown" if record.limit_pct is None else f"{record.limit_pct:.1f}% of limit"
        return f"{head}, {milliseconds(record.time_ms)}, {against}, {rate(record)}, {limit}"
    if record.peak_bytes is not None:
        sizes = (f"{name.removesuffix('_bytes')} {mebibytes(getattr(record, name))} MiB" for name in MEMORY)
        return ", ".join([head, *sizes])
    return f"{head}, worst error {record.error:.2e} (eager {record.eager_error:.2e})"


def time_tables(records: Sequence[Record], width: int, detail: bool = False) -> Iterator[RenderableType]:
    """A table per shape, scope, mode and dtype: implementations down, token counts across; wide ones in parts.

    Host time, latency, graph time and energy follow in a second table for few tokens, with `detail` for all.
    """

    def body(kept: list[Record], notes: Notes) -> Iterator[RenderableType]:
        fastest = [quickest(same) for same in by(kept, "tokens")]
        pairs = {record.tokens: record for record in kept if record.aa_ratio is not None}

        def cell(record: Record) -> Cell:
            return _time_cell(record, any(record is row for row in fastest), notes)

        for tokens in _parts(kept, width, CELL_WIDTH):
            table = across("tokens", kept, tokens, cell).terminal()
            if pairs.keys() & set(tokens):
                each = (a_a(pairs[count]).replace(" ", "\n", 1) if count in pairs else "" for count in tokens)
                table.add_row("A/A", *each, style="dim")
            yield table
        timed = [record for record in kept if record.time_ms is not None]
        if timed:
            yield _legend(timed)
            yield from dim(_loads(timed))
            yield from (Text(*caution) for caution in cautions(timed))
        felt = [
            record
            for record in timed
            if any(_others(record)) or (record.latency_us is not None and (detail or record.tokens <= FEW_TOKENS))
        ]
        yield from _in_parts(FELT, felt, width, lambda record: "\n".join((*_others(record), _energy(record))), notes)
        if felt:
            energy = any(record.uj_per_token is not None for record in felt)
            yield Text(f"us. {legend(FELT)}{' Energy of the whole GPU, calls back to back.' * energy}", "dim")
        yield from dim(by_reason("no graph time", _noted(felt, "graph_reason")))
        counted = [record for record in timed if record.registers_per_thread is not None]
        yield from _in_parts(COUNTED, counted, width, lambda record: "", notes)
        if counted:
            yield Text(f"MiB. {legend(COUNTED)}", "dim")
        yield from dim(by_reason("no profile", _noted(timed, "profile_note")))

    return blocks(records, TABLE, lambda group: "", body)


def _noted(rows: Iterable[Record], column: str) -> Iterator[tuple[str, str]]:
    return ((getattr(row, column), row.implementation) for row in rows if getattr(row, column))


def _parts(records: list[Record], width: int, cell_width: int) -> Iterator[list[int]]:
    """Token counts, as many at once as fit beside each other."""
    tokens = sorted({record.tokens for record in records})
    at_once = max(1, (width - NAME_WIDTH) // (cell_width + 3))
    for start in range(0, len(tokens), at_once):
        yield tokens[start : start + at_once]


def _in_parts(
    names: Sequence[str], records: list[Record], width: int, below: Callable[[Record], str], notes: Notes
) -> Iterator[RenderableType]:
    """A table whose cells have several figures each, bytes as MiB, and a line below them."""

    def cell(record: Record) -> Cell:
        if record.status is not Status.OK:
            return status_text(record, notes)
        text = Text(" / ".join(_figure(name, getattr(record, name)) for name in names))
        return text.append(f"\n{line}", "dim") if (line := below(record)) else text

    head = " / ".join(FIGURES[name].head for name in names)
    for tokens in _parts(records, width, FELT_WIDTH):
        yield across(head, records, tokens, cell).terminal()


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return mebibytes(value) if FIGURES[name].unit == "B" else f"{value:.4g}"


def _others(record: Record) -> Iterator[str]:
    """The time with a hot L2, and the ratio in a graph where its verdict is another than that of the row."""
    if record.hot_us is not None:
        ratio = f", {record.hot_ratio:.3f}x {record.hot_verdict}" if record.hot_ratio is not None else ""
        yield f"hot {record.hot_us:.4g}{ratio}"
    if record.worst_new_ms is not None:
        yield f"worst new token count {record.worst_new_ms:.4g} ms"
    if record.graph_ratio is not None and record.graph_verdict not in ("", record.verdict):
        yield f"in a graph {record.graph_ratio:.3f}x {record.graph_verdict}"


def _energy(record: Record) -> str:
    return "" if record.uj_per_token is None else f"{microjoules(record.uj_per_token)} a token"


def _time_cell(record: Record, first: bool, notes: Notes) -> Text:
    if record.status is not Status.OK:
        text = status_text(record, notes).append("\n")
        says = record.unconfirmed_ms
        return text if says is None else text.append(f"{milliseconds(says)}\nunconfirmed\n", "dim")
    assert record.time_ms is not None
    return Text.assemble(
        (milliseconds(record.time_ms) + (" *" if first else ""), "bold green" if first else ""),
        (f" {record.verdict}" if record.verdict else "", STYLES.get(record.verdict, "")),
        f"\n{ratio(record)}\n",
        (rate(record) + ("\n" if record.limit_pct is None else f" {record.limit_pct:.0f}%\n"), "dim"),
    )


def _legend(timed: list[Record]) -> Text:
    first = timed[0]
    rounds = sorted({record.rounds or 0 for record in timed})
    spread = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    text = f"median time of {spread} interleaved rounds (* fastest)"
    if first.baseline:
        text += f"; x: time / {first.baseline}'s time in the same round, ± half its 95% interval"
    if any(record.aa_ratio is not None for record in timed):
        text += f"; A/A: {first.baseline} against itself in the same rounds: a ratio no further from 1 is a tie"
    text += "; rate; % of limit"
    if first.copy_gbps is not None and first.matmul_tflops is not None:
        text += f". Measured limits: copy {first.copy_gbps:.0f} GB/s{_of(first.datasheet_gbps)}, {first.dtype} product "
        text += f"{first.matmul_tflops:.3g} TFLOP/s{_of(first.datasheet_tflops)}; "
        text += "each case's own bare products are timed in its rounds"
    text += f". L2 {first.l2}" if first.l2 in {"cold", "hot"} else ""
    text += f", {first.regime}." if first.regime == "rested" else "."
    if any(not record.comparable for record in timed):
        text += " 'fewer gradients' rows do less work (frozen weights) and are not ranked."
    return Text(text, style="dim")


def _of(datasheet: float | None) -> str:
    return f" (datasheet {datasheet:.0f})" if datasheet else ""


def _loads(timed: list[Record]) -> Iterator[str]:
    """For each token count how the experts are loaded, and what their products take by themselves."""
    for first, *others in by((record for record in timed if record.expert_tokens_max is not None), "tokens"):
        rows = f"{first.expert_tokens_min} to {first.expert_tokens_max} (median {first.expert_tokens_median:g})"
        line = f"{first.tokens} tokens: {rows} per expert, {first.idle_experts} of {first.experts} without a token"
        line += f"; tiles of 128 rows would be {first.padding_share:.0%} padding"
        known = (row.grouped_ms for row in (first, *others) if row.grouped_ms is not None and row.comparable)
        if (alone := next(known, None)) is not None:
            line += f"; torch's grouped products alone {milliseconds(alone)}"
        yield f"{line}."


def caution_lines(records: Sequence[Record]) -> Iterator[str]:
    """What spoils the figures of each table as plain lines, for a log."""
    for first, *others in by((record for record in records if record.time_ms is not None), *TABLE):
        for text, _ in cautions([first, *others]):
            yield f"{table_label(case_of(first))}: {text}"


def cautions(timed: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Spent budgets, throttling, other processes, several GPUs, remarks: a sentence each, and its style."""
    short = [row for row in timed if row.stopped_by == "budget"]
    if short:
        yield f"The budget was spent before every ratio was known to within 0.5%: {_tokens(short)}.", "yellow"
    throttled = [row for row in timed if row.throttle]
    if throttled:
        causes = together(unique(cause for row in throttled for cause in row.throttle.split()))
        most = max(row.throttled_share or 0 for row in throttled)
        yield f"Clocks were limited by {causes}, in up to {most:.0%} of the rounds: {_tokens(throttled)}.", "yellow"
    crowded = [row for row in timed if row.other_processes]
    if crowded:
        yield f"Another process used the GPU: {_tokens(crowded)}.", "bold red"
    busy = [(row, load) for row in timed if (load := row.load) and load.reason("cpu" if row.l2 == "cpu" else "cuda")]
    if busy:
        worst = max((load for _, load in busy), key=lambda load: load.others)
        stolen = max(load.steal for _, load in busy)
        hosts = f", and a virtual machine's host took {stolen:.0%} of the time" if stolen > MOST_STEAL else ""
        used = f"other programs used up to {worst.others:.1f} of {worst.cpus} CPUs{hosts}"
        yield f"The machine was busy: {used}: {_tokens([row for row, _ in busy])}.", "bold red"
    gpus = {row.gpu_uuid: f"{row.host} {row.gpu_uuid if row.gpu_index is None else row.gpu_index}" for row in timed}
    names = sorted(name for uuid, name in gpus.items() if uuid)
    names = names if len({*names}) == len(names) else sorted(filter(None, gpus))
    if len(names) > 1:
        listed = ", ".join(names[:MOST_GPUS]) + (f" and {len(names) - MOST_GPUS} more" if names[MOST_GPUS:] else "")
        each = "each ratio is from one GPU, but times at two token counts may be from two"
        yield f"The cases ran on {len(names)} GPUs ({listed}): {each}.", "dim"
    for note in unique(row.gpu_note for row in timed if row.gpu_note):
        yield note, "yellow"
    for remarks, rows in grouped((row for row in timed if row.remarks), attrgetter("remarks")).items():
        yield f"{together(unique(row.implementation for row in rows))}, {_tokens(rows)}: {remarks}", "yellow"


def _tokens(rows: Sequence[Record]) -> str:
    return tokens_text(row.tokens for row in rows)


def memory_tables(records: Sequence[Record], width: int) -> Iterator[RenderableType]:
    """A table per shape, scope and dtype: measured bytes, and below them what arithmetic predicts."""

    def predicted(record: Record) -> str:
        return " / ".join(mebibytes(getattr(record, f"predicted_{name}")) for name in MEMORY)

    def body(kept: list[Record], notes: Notes) -> Iterator[RenderableType]:
        yield from _in_parts(MEMORY, kept, width, predicted, notes)
        yield Text(f"MiB. {legend(MEMORY)} Below, the arithmetic prediction.", "dim")

    return blocks(records, ("shape", "scope", "dtype"), lambda group: "memory", body)


def _relative(check: TensorCheck) -> str:
    if not check.eager_error:
        return "-"
    times = check.error / check.eager_error
    return f"{times:.2f}" if times < 100 else f"{times:.2g}"


def _figure_of(name: str, form: str = ".2e") -> Callable[[TensorCheck], str]:
    def shown(check: TensorCheck) -> str:
        value = getattr(check, name)
        return "-" if value is None else format(value, form).replace("e-0", "e-" if form == ".1e" else "e-0")

    return shown


VERIFY: Mapping[str, Callable[[TensorCheck], str]] = {
    "error": _figure_of("error"), "ratio": _relative, "eager's": _figure_of("eager_error"),
    "allowed": _figure_of("allowed"), "max error": _figure_of("max_error"), "max allowed": _figure_of("max_allowed"),
}  # fmt: skip
"""Columns of `verify`, what matters most first."""
DETAIL: Mapping[str, Callable[[TensorCheck], str]] = {
    **{head: _figure_of(name, ".1e") for head, name in {
        "error": "error", "median": "median_error", "99.9%": "p999_error", "max": "max_error", "allowed": "max_allowed",
    }.items()},
    "worst at": lambda check: ",".join(map(str, check.worst_index)) or "-",
}  # fmt: skip
VERIFY_NOTE = "error: ||value - fp64 truth|| / ||truth||; ratio: error / eager's; the worst over token counts is shown."
DETAIL_NOTE = (
    "error: ||value - fp64 truth|| / ||truth||. The other figures are errors of single elements, over the truth's rms: "
    "the median, the 99.9th percentile, the largest, its limit, and its index."
)


def verify_tables(records: Sequence[Record], width: int, detail: bool = False) -> Iterator[RenderableType]:
    """A table per shape, scope and dtype: error from fp64, eager's error, their ratio and the verdict per tensor.

    Where the width does not suffice for all figures, those that matter least are left out, and the legend says so.
    With `detail` one per token count, too: how the errors of each tensor's elements are distributed.
    """
    columns, note = VERIFY, VERIFY_NOTE
    fields: tuple[str, ...] = ("shape", "scope", "dtype")
    fitting = max(1, (width - NAME_WIDTH - VERDICT_WIDTH) // FIGURE_WIDTH)
    if detail:
        columns, note, fields = DETAIL, DETAIL_NOTE, (*fields, "tokens")
    elif fitting < len(columns):
        note += f" Not shown in {width} columns: {', '.join([*columns][fitting:])}."
        columns = dict([*columns.items()][:fitting])
    else:
        note += " max error: the largest element's, over the truth's rms."

    def body(kept: list[Record], notes: Notes) -> Iterator[RenderableType]:
        name = "" if detail else "implementation, tensor"
        rows = [row for own in by(kept, "implementation") for row in (*_verify_rows(own, notes, columns), [])]
        look = MATRIX_LOOK if detail else {}
        yield from Grid((name, *columns, "verdict"), rows, note=note, text={name, "verdict"}, look=look).parts()
        interpreted = unique(record.implementation for record in kept if record.interpreted)
        if interpreted:
            yield Text(f"run by Triton's interpreter on the CPU: {', '.join(interpreted)}", style="dim")

    def what(group: list[Record]) -> str:
        return f"verify, {', '.join(map(str, sorted({record.tokens for record in group})))} tokens"

    return blocks(records, fields, what, body)


def _verify_rows(
    records: list[Record], notes: Notes, columns: Mapping[str, Callable[[TensorCheck], str]]
) -> Iterator[list[Cell]]:
    """The worst check per tensor over the token counts of one implementation; dashes where no values are compared."""
    yield [Text(records[0].implementation, "bold")]
    for record in records:
        if record.status in {Status.SKIPPED, Status.ERROR, Status.UNSETTLED}:
            yield [*[""] * (1 + len(columns)), status_text(record, notes, f"{record.tokens} tokens: ")]
    checks = [(record.tokens, check) for record in records for check in record.tensor_checks]
    for tensor, found in grouped(checks, lambda pair: pair[1].tensor).items():
        tokens, check = max(found, key=lambda pair: pair[1].used if pair[1].ok else math.inf)
        verdict = Text("pass", "green")
        if not check.ok:
            verdict = Text(f"FAIL {notes.mark(f'{tokens} tokens, {tensor}: {check.reason}')}", "bold red")
        yield [f"  {tensor}", *(figure(check) if check.allowed else "-" for figure in columns.values()), verdict]


def training_tables(summaries: Sequence[Record]) -> Iterator[RenderableType]:
    """The tables of a training, and why figures are missing from them."""
    grids = (grid.parts() for grid in training_grids(summaries))
    return chain(*grids, map(Text, training_remarks(summaries)))


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
        sizes = "saved and peak do not include the optimiser's state."
        yield grid("Where time and memory go", timed, PARTS, f"{legend(PARTS)} {sizes}")


def training_remarks(summaries: Sequence[Record]) -> Iterator[str]:
    """Remarks on rows: frozen weights, savings that differ from the expected ones, rows without figures."""
    for row in summaries:
        if row.frozen and row.final_loss is not None:
            frozen = f"{row.implementation} yields no weight gradients, so the weights of its blocks are not trained"
            yield f"{frozen}: its loss may differ from eager's, and its step does less work."
    yield from missing(summaries)


def _rule(rows: Sequence[Record]) -> str:
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
        "otherwise differs, or unknown with one seed."
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
    return Text(f"{text} (frozen)", "yellow") if row.frozen else Text(text, STYLES.get(text, ""))


def _verdict(row: Record) -> Text:
    less = row.kind == "training" and row.frozen
    return Text(f"{row.verdict}, less work", "yellow") if less else Text(row.verdict, STYLES.get(row.verdict, ""))


def _with_spread(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return ""
    digits = 4 if mean < 10 else 2  # of a perplexity
    return f"{mean:.{digits}f}" if spread is None else f"{mean:.{digits}f} ± {spread:.{digits}f}"


CURVE: Column = ("curve", _curve)
_final: Column = ("final loss", lambda row: _with_spread(row.final_loss, row.final_loss_spread))
LEARNING: Sequence[Column] = (_final, ("minus eager's", _difference), CURVE)
SPEED: Sequence[Column] = ("step_ms", ("ratio", ratio_text), ("verdict", _verdict))
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
        note = f"Of the slowest rank. {legend(('ratio', 'single_ms', 'efficiency'))} ±: half the 95% interval."
        yield from dim((note, legend(FIGURES_OF_RANKS)))
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
    block, split = (f"{row.experts} experts", "expert parallel") if row.experts else ("mlp", split)
    sizes = f"{row.shape} ({row.hidden} x {row.intermediate}), {row.dtype}"
    return f"{row.mode}, {block} {sizes}, {row.ranks} x {row.device}, {split}"


def _ranks_noise(rows: Sequence[Record]) -> str:
    noise = {row.tokens: f"{row.aa_low:.3f} to {row.aa_high:.3f} at {row.tokens:,}" for row in rows if row.aa_low}
    notes = [f"{rows[0].baseline} against itself (A/A): {', '.join(noise.values())} tokens"] if noise else []
    lost = [row for row in rows if row.efficiency and row.ranks > 1 and row.efficiency * row.ranks < 1]
    if lost:
        names = (f"{row.implementation} at {row.tokens:,} tokens" for row in lost)
        notes.append(f"slower than one GPU: {', '.join(names)}")
    return "\n".join(notes)


def tp_line(row: Record) -> str:
    """A row of `tp` without a table."""
    what = f"{row.ranks} ranks {_ranks_case(row)} {row.implementation}"
    if row.time_ms is None:
        return f"{what} {row.status}: {row.reason}"
    ratio = "" if row.ratio is None else f" ({row.ratio:.3f} of {row.baseline}, {row.verdict})"
    return f"{what} {row.time_ms:.4g} ms{ratio}"


def _bus(row: Record) -> str:
    limit = row.shown("bus_ceiling_gbps")
    return row.shown("bus_gbps") + (f" of {limit}" if limit else "")


RANKS: Sequence[Column] = ("time_ms", ("ratio", ratio_text), ("verdict", _verdict), "single_ms", "efficiency")
FIGURES_OF_RANKS = ("compute_ms", "comm_ms", "hidden_share", "bus_gbps", "peak_bytes")
RANK_PARTS: Sequence[Column] = ("compute_ms", "comm_ms", "hidden_share", ("bus GB/s", _bus), "peak_bytes")
WORKLOAD_NOTE = (
    "time: of a call, the mean over {calls:g} recorded calls with {counts} token counts; x: time for all of them / the "
    "baseline's, ± half the 95% interval."
)


def workload_tables(records: Iterable[Record], workload: Mapping[int, float]) -> Iterator[RenderableType]:
    """A workload's totals for a terminal."""
    return chain.from_iterable(grid.parts() for grid in workload_grids(records, workload))


def workload_grids(records: Iterable[Record], workload: Mapping[int, float]) -> Iterator[Grid]:
    """A table for each shape, scope, mode and dtype; none without a workload."""
    note = WORKLOAD_NOTE.format(calls=sum(workload.values()), counts=len(workload))
    heads, name = ("implementation", "time", "ratio", ""), {"implementation"}
    for work, found in grouped(totals(records, workload), attrgetter(*TABLE)).items():
        fastest = min((row.time_ms for row in found if row.time_ms is not None), default=None)
        rows = [[row.implementation, *_total(row, row.time_ms == fastest)] for row in found]
        title = f"{' '.join(work)}: the recorded workload"
        yield Grid(heads, rows, title, note, text={*name, ""}, wrap=name)


def _total(row: Record, fastest: bool) -> tuple[Cell, Cell, Cell]:
    if row.time_ms is None:
        return row.reason, "", ""
    compared = f"x{plus_minus(*row.interval)}" if row.interval else row.reason
    compared = "baseline" if row.implementation == row.baseline else compared
    return milliseconds(row.time_ms) + " *" * fastest, compared, _verdict(row)


def contract_tables(cells: Sequence[Record], about: Mapping[str, str]) -> Iterator[RenderableType]:
    """A matrix per scope, what its columns mean, and every reason; `about` says what each check asks."""
    letters = dict(zip(unique(cell.check for cell in cells), string.ascii_letters, strict=False))
    for grid in contract_grids(cells, letters):
        yield grid.terminal()
    yield Text.assemble(*((f"{symbol} {verdict}   ", style) for verdict, (symbol, style) in SYMBOLS.items()))
    yield Group(*dim(f"{letter} {check}: {about.get(check, '')}" for check, letter in letters.items()))
    for verdict, check, reason, who in contract_reasons(cells):
        symbol, style = SYMBOLS[verdict]
        yield Text.assemble((f"{symbol} {check}", style), f": {reason} ", (f"[{who}]", "dim"))


def contract_grids(cells: Sequence[Record], heads: Mapping[str, str]) -> Iterator[Grid]:
    """Implementations down and checks across, a table for each scope; `heads` names the columns of the checks."""
    for scope, own in grouped(cells, attrgetter("scope")).items():
        rows: list[list[Cell]] = []
        for name, row in grouped(own, attrgetter("implementation")).items():
            found = {cell.check: Text(*SYMBOLS[cell.verdict]) for cell in row}
            rows.append([Text(name, "bold"), *(found.get(check, "") for check in heads)])
        columns = ["", *heads.values()]
        yield Grid(columns, rows, scope, text=columns, look=MATRIX_LOOK)


def contract_reasons(cells: Sequence[Record]) -> Iterator[tuple[str, str, str, str]]:
    """Every verdict, check and reason once with all that have it, failures first."""
    whole = Counter((cell.implementation, cell.verdict, cell.reason) for cell in cells)
    count = Counter(cell.implementation for cell in cells)

    def what(cell: Record) -> tuple[str, str, str]:
        always = whole[cell.implementation, cell.verdict, cell.reason] == count[cell.implementation] > 1
        return cell.verdict, "every check" if always else cell.check, cell.reason

    order: tuple[str, ...] = (AuditVerdict.FAIL, AuditVerdict.UNSUPPORTED, AuditVerdict.NOT_RUN, AuditVerdict.PASS)
    found = grouped((cell for cell in cells if cell.reason), what)
    for key, same in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        by_name = grouped(same, attrgetter("implementation"))
        who = (f"{name} ({', '.join(unique(cell.scope for cell in own))})" for name, own in by_name.items())
        yield *key, "; ".join(who)
