"""Timed records as tables for a terminal and as plain lines for a log, with what spoils the figures said under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows.figures import mebibytes, microjoules, milliseconds, plus_minus
from swiglu_bench.rows.ranking import quickest
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.writers.cautions import cautions
from swiglu_bench.show.writers.tables import NAME_WIDTH, STYLES, TABLE, Notes, blocks, by, by_reason, new_table

VERDICT_STYLES = {"faster": "green", "slower": "red", "tie": "dim"}
FEW_TOKENS = 256
"""Up to here a caller feels launches more than kernels, and the second table is shown unasked."""
CELL_WIDTH, FELT_WIDTH = 19, 21


def rate(record: Record) -> str:
    """TFLOP/s where products set the limit, GB/s where bytes do; empty where the command counts neither."""
    value, unit = (record.gbps, "GB/s") if record.limit_kind == "bandwidth" else (record.tflops, "TFLOP/s")
    if value is None:
        return ""
    if value < 1 and unit == "TFLOP/s":
        value, unit = value * 1e3, "GFLOP/s"
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def ratio(record: Record) -> str:
    """The ratio to the baseline with half its interval, or why there is none."""
    if record.implementation == record.baseline:
        return "baseline"
    if not record.comparable:
        return "fewer gradients"
    return f"x{plus_minus(*record.interval)}" if record.interval else "no baseline"


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
        compared = ratio(record)
        if record.implementation == record.baseline and record.aa_ratio is not None:
            compared += f", A/A {a_a(record)}"
        elif record.verdict:
            compared += f" {record.verdict}"
        limit = "limit unknown" if record.limit_pct is None else f"{record.limit_pct:.1f}% of limit"
        return f"{head}, {milliseconds(record.time_ms)}, {compared}, {rate(record)}, {limit}"
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
        for tokens in _parts(kept, width, CELL_WIDTH):
            yield _time_table(kept, tokens, notes)
        timed = [record for record in kept if record.time_ms is not None]
        if timed:
            yield _legend(timed)
            yield from _loads(timed)
            yield from (Text(*caution) for caution in cautions(timed))
        felt = [record for record in timed if record.latency_us is not None and (detail or record.tokens <= FEW_TOKENS)]
        for tokens in _parts(felt, width, FELT_WIDTH):
            yield _grid("host / latency / graph", felt, tokens, _felt_cell)
        if felt:
            yield from _felt_legend(felt)
        yield from _profiles(timed, width)

    return blocks(records, TABLE, lambda group: "", body)


def _parts(records: list[Record], width: int, cell_width: int) -> Iterator[list[int]]:
    """Token counts, as many at once as fit beside each other."""
    tokens = sorted({record.tokens for record in records})
    at_once = max(1, (width - NAME_WIDTH) // (cell_width + 3))
    for start in range(0, len(tokens), at_once):
        yield tokens[start : start + at_once]


def _grid(head: str, records: list[Record], tokens: list[int], cell: Callable[[Record], Text]) -> Table:
    """Implementations down, token counts across."""
    table = new_table((head, *map(str, tokens)), text={head})
    for own in by(records, "implementation"):
        cells = {record.tokens: record for record in own}
        shown = (cell(cells[count]) if count in cells else "" for count in tokens)
        table.add_row(Text(own[0].implementation, "bold"), *shown)
    return table


def _time_table(records: list[Record], tokens: list[int], notes: Notes) -> Table:
    fastest = [quickest(same) for same in by(records, "tokens")]

    def cell(record: Record) -> Text:
        if record.status is not Status.OK:
            return Text(f"{record.status} {notes.mark(record.reason)}\n", style=STYLES[record.status])
        assert record.time_ms is not None
        first = any(record is one for one in fastest)
        return Text.assemble(
            (milliseconds(record.time_ms) + (" *" if first else ""), "bold green" if first else ""),
            (f" {record.verdict}" if record.verdict else "", VERDICT_STYLES.get(record.verdict, "")),
            f"\n{ratio(record)}\n",
            (rate(record) + ("\n" if record.limit_pct is None else f" {record.limit_pct:.0f}%\n"), "dim"),
        )

    table = _grid("tokens", records, tokens, cell)
    paired = {record.tokens: record for record in records if record.aa_ratio is not None}
    if paired.keys() & set(tokens):
        pairs = (a_a(paired[count]).replace(" ", "\n", 1) if count in paired else "" for count in tokens)
        table.add_row("A/A", *pairs, style="dim")
    return table


def _felt_cell(record: Record) -> Text:
    figures = (record.host_us, record.latency_us, record.graph_us)
    text = Text(" / ".join("-" if figure is None else f"{figure:.4g}" for figure in figures))
    if record.uj_per_token is not None:
        text.append(f"\n{microjoules(record.uj_per_token)} a token", "dim")
    return text


def _felt_legend(felt: list[Record]) -> Iterator[Text]:
    energy = any(record.uj_per_token is not None for record in felt)
    yield Text(
        "us: host, until the call returns; latency, from an idle GPU to an idle GPU; graph, a replay as a CUDA graph."
        + (" Energy of the whole GPU, calls back to back." if energy else ""),
        "dim",
    )
    reasons = [(record.graph_reason, record.implementation) for record in felt if record.graph_reason]
    yield from (Text(line, "dim") for line in by_reason("no graph time", reasons))


def _profiles(timed: list[Record], width: int) -> Iterator[RenderableType]:
    """What `ncu` counted, and why it did not."""
    counted = [record for record in timed if record.registers_per_thread is not None]
    for tokens in _parts(counted, width, FELT_WIDTH):
        yield _grid("tensor / DRAM / L2 / regs", counted, tokens, _counted_cell)
    if counted:
        yield Text(
            "tensor: share of cycles with active tensor cores; DRAM, L2: MiB moved by a call; regs: registers per "
            "thread of its longest kernel. By Nsight Compute, in a call that is not timed.",
            "dim",
        )
    notes = [(record.profile_note, record.implementation) for record in timed if record.profile_note]
    yield from (Text(line, "dim") for line in by_reason("no profile", notes))


def _counted_cell(record: Record) -> Text:
    tensor = "-" if record.tensor_pct is None else f"{record.tensor_pct:.0f}%"
    sizes = f"{mebibytes(record.dram_bytes)} / {mebibytes(record.l2_bytes)}"
    return Text(f"{tensor} / {sizes} / {record.registers_per_thread}")


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


def _loads(timed: list[Record]) -> Iterator[Text]:
    """For each token count how the experts are loaded, and what their products take by themselves."""
    for first, *others in by((record for record in timed if record.expert_tokens_max is not None), "tokens"):
        rows = f"{first.expert_tokens_min} to {first.expert_tokens_max} (median {first.expert_tokens_median:g})"
        line = f"{first.tokens} tokens: {rows} per expert, {first.idle_experts} of {first.experts} without a token"
        line += f"; tiles of 128 rows would be {first.padding_share:.0%} padding"
        alone = next(
            (row.grouped_ms for row in (first, *others) if row.grouped_ms is not None and row.comparable), None
        )
        line += f"; torch's grouped products alone {milliseconds(alone)}" if alone is not None else ""
        yield Text(f"{line}.", "dim")


def _of(datasheet: float | None) -> str:
    return f" (datasheet {datasheet:.0f})" if datasheet else ""


def caution_lines(records: Sequence[Record]) -> Iterator[str]:
    """What spoils the figures of each table as plain lines, for a log."""
    for first, *others in by((record for record in records if record.time_ms is not None), *TABLE):
        for text, _ in cautions([first, *others]):
            yield f"{first.shape} {first.scope} {first.mode} {first.dtype}: {text}"
