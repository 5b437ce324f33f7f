"""Timed records as tables for a terminal and as plain lines for a log, with what spoils the figures said under them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows.record import Record, Status
from swiglu_bench.writers.tables import NAME_WIDTH, STYLES, Notes, absent, by, mebibytes, several_gpus, title

VERDICT_STYLES = {"faster": "green", "slower": "red", "tie": "dim"}
FEW_TOKENS = 256
"""Up to here a caller feels launches more than kernels, and the second table is shown unasked."""
CELL_WIDTH = 19


def milliseconds(value: float) -> str:
    """A time with four significant figures, in the unit that reads best."""
    if value < 1:
        return f"{value * 1e3:.4g} us"
    return f"{value:.4g} ms" if value < 1e4 else f"{value / 1e3:.4g} s"


def microjoules(value: float) -> str:
    """An energy with three significant figures, in the unit that reads best."""
    return f"{value:.3g} uJ" if value < 1e3 else f"{value / 1e3:.3g} mJ"


def rate(record: Record) -> str:
    """TFLOP/s where products set the limit, GB/s where bytes do."""
    value, unit = (record.tflops, "TFLOP/s") if record.limit_kind == "matmul" else (record.gbps, "GB/s")
    assert value is not None
    if value < 1 and unit == "TFLOP/s":
        value, unit = value * 1e3, "GFLOP/s"
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def ratio(record: Record) -> str:
    """The ratio to the baseline with half its interval, or why there is none."""
    if record.implementation == record.baseline:
        return "baseline"
    if not record.comparable:
        return "fewer gradients"
    if record.ratio is None or record.ratio_low is None or record.ratio_high is None:
        return "no baseline"
    return f"x{record.ratio:.3f} ±{(record.ratio_high - record.ratio_low) / 2:.3f}"


def a_a(record: Record) -> str:
    """The A/A pair of the record's case: ratio and interval."""
    return f"{record.aa_ratio:.4f} [{record.aa_low:.4f}, {record.aa_high:.4f}]"


def time_line(record: Record) -> str:
    """One row as one plain line, for a log."""
    head = (
        f"{record.shape} {record.scope} {record.mode} {record.dtype} tokens={record.tokens} "
        f"{record.implementation}: {record.status}"
    )
    if record.status is not Status.OK:
        return f"{head}: {record.reason}"
    if record.time_ms is not None:
        compared = ratio(record)
        if record.implementation == record.baseline and record.aa_ratio is not None:
            compared += f", A/A {a_a(record)}"
        elif record.verdict:
            compared += f" {record.verdict}"
        return f"{head}, {milliseconds(record.time_ms)}, {compared}, {rate(record)}, {record.limit_pct:.1f}% of limit"
    if record.peak_bytes is not None:
        return (
            f"{head}, saved {mebibytes(record.saved_bytes)} MiB, peak {mebibytes(record.peak_bytes)} MiB, "
            f"workspace {mebibytes(record.workspace_bytes)} MiB"
        )
    return f"{head}, worst error {record.error:.2e} (eager {record.eager_error:.2e})"


def time_tables(records: Sequence[Record], width: int, detail: bool = False) -> Iterator[RenderableType]:
    """A table per shape, scope, mode and dtype: implementations down, token counts across; wide ones in parts.

    Host time, latency, graph time and energy follow in a second table for few tokens, with `detail` for all.
    """
    for group in by(records, "shape", "scope", "mode", "dtype"):
        kept, lines = absent(group)
        notes = Notes()
        parts: list[RenderableType] = [title(group[0])]
        for tokens in _parts(kept, width):
            parts.append(_time_table(kept, tokens, notes))
        timed = [record for record in kept if record.time_ms is not None]
        if timed:
            parts += [_legend(timed), *caption(timed)]
        felt = [record for record in timed if record.latency_us is not None and (detail or record.tokens <= FEW_TOKENS)]
        parts += [_felt_table(felt, tokens) for tokens in _parts(felt, width)]
        if felt:
            parts += _felt_legend(felt)
        yield Group(*parts, *notes.lines(), *lines, Text(""))


def _parts(records: list[Record], width: int) -> Iterator[list[int]]:
    """Token counts, as many at once as fit beside each other."""
    tokens = sorted({record.tokens for record in records})
    at_once = max(1, (width - NAME_WIDTH) // (CELL_WIDTH + 3))
    for start in range(0, len(tokens), at_once):
        yield tokens[start : start + at_once]


def _time_table(records: list[Record], tokens: list[int], notes: Notes) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False, padding=(0, 1))
    table.add_column("tokens", no_wrap=True)
    for count in tokens:
        table.add_column(str(count), justify="right", no_wrap=True)
    cells = {(record.implementation, record.tokens): record for record in records}
    fastest = {count: _fastest(records, count) for count in tokens}
    for group in by(records, "implementation"):
        name = group[0].implementation
        row = [
            _time_cell(cells.get((name, count)), notes, fastest=cells.get((name, count)) is fastest[count])
            for count in tokens
        ]
        table.add_row(Text(name, style="bold"), *row)
    paired = {record.tokens: record for record in records if record.aa_ratio is not None}
    if paired.keys() & set(tokens):
        pairs = (a_a(paired[count]).replace(" ", "\n", 1) if count in paired else "" for count in tokens)
        table.add_row("A/A", *pairs, style="dim")
    return table


def _fastest(records: list[Record], tokens: int) -> Record | None:
    """The fastest row of those that do the same work as the baseline."""
    timed = [r for r in records if r.tokens == tokens and r.time_ms is not None and r.comparable]
    return min(timed, key=lambda r: r.time_ms or 0.0) if len(timed) > 1 else None


def _time_cell(record: Record | None, notes: Notes, fastest: bool) -> Text:
    if record is None:
        return Text("")
    if record.status is not Status.OK:
        return Text(f"{record.status} {notes.mark(record.reason)}\n", style=STYLES[record.status])
    assert record.time_ms is not None
    style = "bold green" if fastest else ""
    return Text.assemble(
        (milliseconds(record.time_ms) + (" *" if fastest else ""), style),
        (f" {record.verdict}" if record.verdict else "", VERDICT_STYLES.get(record.verdict, "")),
        f"\n{ratio(record)}\n",
        (f"{rate(record)} {record.limit_pct:.0f}%\n", "dim"),
    )


def _felt_table(records: list[Record], tokens: list[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("host / latency / graph", no_wrap=True)
    for count in tokens:
        table.add_column(str(count), justify="right", no_wrap=True)
    cells = {(record.implementation, record.tokens): record for record in records}
    for group in by(records, "implementation"):
        name = group[0].implementation
        table.add_row(Text(name, "bold"), *(_felt_cell(cells.get((name, count))) for count in tokens))
    return table


def _felt_cell(record: Record | None) -> Text:
    if record is None:
        return Text("")
    figures = (record.host_us, record.latency_us, record.graph_us)
    text = Text(" / ".join("-" if figure is None else f"{figure:.4g}" for figure in figures))
    if record.uj_per_token is not None:
        text.append(f"\n{microjoules(record.uj_per_token)} a token", "dim")
    return text


def _felt_legend(felt: list[Record]) -> list[RenderableType]:
    text = (
        "us: host, until the call returns; latency, from an idle GPU to an idle GPU; graph, a replay as a CUDA graph."
    )
    if any(record.uj_per_token is not None for record in felt):
        text += " Energy of the whole GPU, calls back to back."
    reasons: dict[str, list[str]] = {}
    for record in felt:
        if record.graph_reason and record.implementation not in reasons.setdefault(record.graph_reason, []):
            reasons[record.graph_reason].append(record.implementation)
    lines = [f"no graph time: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return [Text(line, style="dim") for line in (text, *lines)]


def _legend(timed: list[Record]) -> Text:
    first = timed[0]
    rounds = sorted({record.rounds or 0 for record in timed})
    spread = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    text = f"median time of {spread} interleaved rounds (* fastest)"
    if first.baseline:
        text += f"; x: time / {first.baseline}'s time in the same round, ± half its 95% interval"
    if any(record.aa_ratio is not None for record in timed):
        text += f"; A/A: {first.baseline} against itself in the same rounds: what is no further from 1 is a tie"
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


def caption(timed: Sequence[Record]) -> Iterator[Text]:
    """What a reader has to know before believing the figures: spent budgets, throttling, others on the GPU."""
    short = [record for record in timed if record.stopped_by == "budget"]
    if short:
        where = _tokens(short)
        yield Text(f"The budget was spent before every ratio was known to within 0.5%: {where}.", style="yellow")
    throttled = [record for record in timed if record.throttle]
    if throttled:
        what = ", ".join(dict.fromkeys(" ".join(record.throttle for record in throttled).split()))
        most = max(record.throttled_share or 0 for record in throttled)
        where = _tokens(throttled)
        yield Text(f"Clocks were held down by {what}, in up to {most:.0%} of the rounds: {where}.", style="yellow")
    crowded = [record for record in timed if record.other_processes]
    if crowded:
        yield Text(f"Another process used the GPU: {_tokens(crowded)}.", style="bold red")
    spread = several_gpus((record.host, record.gpu_index, record.gpu_uuid) for record in timed)
    if spread:
        yield Text(spread, style="dim")
    for note in dict.fromkeys(record.gpu_note for record in timed if record.gpu_note):
        yield Text(note, style="yellow")


def caption_lines(records: Sequence[Record]) -> Iterator[str]:
    """The captions of all tables as plain lines, for a log."""
    for group in by(records, "shape", "scope", "mode", "dtype"):
        first = group[0]
        for text in caption([record for record in group if record.time_ms is not None]):
            yield f"{first.shape} {first.scope} {first.mode} {first.dtype}: {text.plain}"


def _tokens(records: Sequence[Record]) -> str:
    counts = ", ".join(map(str, sorted({record.tokens for record in records})))
    return f"{counts} tokens"
