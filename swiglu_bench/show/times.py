"""Timed records as tables for a terminal and as plain lines for a log, with what spoils the figures said under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.rows.figures import mebibytes, microjoules, milliseconds, plus_minus, together, tokens_text
from swiglu_bench.rows.record import MOST_STEAL, Record, Status, grouped, unique
from swiglu_bench.show.ranking import quickest
from swiglu_bench.show.table import (
    NAME_WIDTH,
    TABLE,
    VERDICT_STYLES,
    Cell,
    Notes,
    across,
    blocks,
    by,
    by_reason,
    dim,
    status_text,
)

FEW_TOKENS = 256
"""Up to here a caller feels launches more than kernels, and the second table is shown unasked."""
CELL_WIDTH, FELT_WIDTH = 19, 21
MOST_GPUS = 8
"""More GPUs than these are counted instead of listed."""


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
    head = (
        f"{record.shape} {record.scope} {record.mode} {record.dtype} tokens={record.tokens} "
        f"{record.implementation}: {record.status}"
    )
    if record.status is not Status.OK:
        return f"{head}: {record.reason}"
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
        return (
            f"{head}, saved {mebibytes(record.saved_bytes)} MiB, peak {mebibytes(record.peak_bytes)} MiB, "
            f"workspace {mebibytes(record.workspace_bytes)} MiB"
        )
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
        felt = [record for record in timed if record.latency_us is not None and (detail or record.tokens <= FEW_TOKENS)]
        yield from _in_parts("host / latency / graph", felt, width, _felt_cell)
        if felt:
            yield from dim(_felt_legend(felt))
        yield from _profiles(timed, width)

    return blocks(records, TABLE, lambda group: "", body)


def _parts(records: list[Record], width: int, cell_width: int) -> Iterator[list[int]]:
    """Token counts, as many at once as fit beside each other."""
    tokens = sorted({record.tokens for record in records})
    at_once = max(1, (width - NAME_WIDTH) // (cell_width + 3))
    for start in range(0, len(tokens), at_once):
        yield tokens[start : start + at_once]


def _in_parts(head: str, records: list[Record], width: int, cell: Callable[[Record], Cell]) -> Iterator[RenderableType]:
    for tokens in _parts(records, width, FELT_WIDTH):
        yield across(head, records, tokens, cell).terminal()


def _time_cell(record: Record, first: bool, notes: Notes) -> Text:
    if record.status is not Status.OK:
        return status_text(record, notes).append("\n")
    assert record.time_ms is not None
    return Text.assemble(
        (milliseconds(record.time_ms) + (" *" if first else ""), "bold green" if first else ""),
        (f" {record.verdict}" if record.verdict else "", VERDICT_STYLES.get(record.verdict, "")),
        f"\n{ratio(record)}\n",
        (rate(record) + ("\n" if record.limit_pct is None else f" {record.limit_pct:.0f}%\n"), "dim"),
    )


def _felt_cell(record: Record) -> Text:
    figures = (record.host_us, record.latency_us, record.graph_us)
    text = Text(" / ".join("-" if figure is None else f"{figure:.4g}" for figure in figures))
    if record.uj_per_token is not None:
        text.append(f"\n{microjoules(record.uj_per_token)} a token", "dim")
    return text


def _felt_legend(felt: list[Record]) -> Iterator[str]:
    energy = any(record.uj_per_token is not None for record in felt)
    yield (
        "us: host, until the call returns; latency, from an idle GPU to an idle GPU; graph, a replay as a CUDA graph."
        + (" Energy of the whole GPU, calls back to back." if energy else "")
    )
    reasons = [(record.graph_reason, record.implementation) for record in felt if record.graph_reason]
    yield from by_reason("no graph time", reasons)


def _profiles(timed: list[Record], width: int) -> Iterator[RenderableType]:
    """What `ncu` counted, and why it did not."""
    counted = [record for record in timed if record.registers_per_thread is not None]
    yield from _in_parts("tensor / DRAM / L2 / regs", counted, width, _counted_cell)
    if counted:
        yield Text(
            "tensor: share of cycles with active tensor cores; DRAM, L2: MiB moved by a call; regs: registers per "
            "thread of its longest kernel. By Nsight Compute, in a call that is not timed.",
            "dim",
        )
    yield from dim(
        by_reason("no profile", [(row.profile_note, row.implementation) for row in timed if row.profile_note])
    )


def _counted_cell(record: Record) -> str:
    tensor = "-" if record.tensor_pct is None else f"{record.tensor_pct:.0f}%"
    sizes = f"{mebibytes(record.dram_bytes)} / {mebibytes(record.l2_bytes)}"
    return f"{tensor} / {sizes} / {record.registers_per_thread}"


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
        alone = next(
            (row.grouped_ms for row in (first, *others) if row.grouped_ms is not None and row.comparable), None
        )
        line += f"; torch's grouped products alone {milliseconds(alone)}" if alone is not None else ""
        yield f"{line}."


def caution_lines(records: Sequence[Record]) -> Iterator[str]:
    """What spoils the figures of each table as plain lines, for a log."""
    for first, *others in by((record for record in records if record.time_ms is not None), *TABLE):
        for text, _ in cautions([first, *others]):
            yield f"{first.shape} {first.scope} {first.mode} {first.dtype}: {text}"


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
    if len(names) > 1:
        listed = ", ".join(names[:MOST_GPUS]) + (f" and {len(names) - MOST_GPUS} more" if names[MOST_GPUS:] else "")
        each = "each ratio is of one GPU, times at two token counts may be from two"
        yield f"The cases ran on {len(names)} GPUs ({listed}): {each}.", "dim"
    for note in unique(row.gpu_note for row in timed if row.gpu_note):
        yield note, "yellow"
    for remarks, rows in grouped((row for row in timed if row.remarks), attrgetter("remarks")).items():
        yield f"{together(unique(row.implementation for row in rows))}, {_tokens(rows)}: {remarks}", "yellow"


def _tokens(rows: Sequence[Record]) -> str:
    return tokens_text(row.tokens for row in rows)
