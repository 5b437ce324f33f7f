"""What `tp` prints: a table for each shape, mode, number of ranks and way of splitting. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows.grouping import grouped
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.writers.tables import Columns, cells_of, new_table, ratio_text

STYLES = {"faster": "green", "slower": "red", "tie": "", "baseline": "dim"}
SPEED_NOTE = (
    "ms: median of the slowest rank; ratio: relative to eager split the same way, in the same round, ± half the 95% "
    "interval; 1 GPU ms: the whole block by the same implementation on one GPU; eff.: that time / ranks / ms."
)
PARTS_NOTE = (
    "compute: without the collectives; comm: the collectives alone; hidden: the share of comm that is overlapped, "
    "below 0 if the whole takes longer than both together; bus GB/s: of these collectives, and of large ones on this "
    "machine; peak: the highest of all ranks, above inputs and weights."
)


def tables(rows: Sequence[Record]) -> Iterator[RenderableType]:
    """All of them, what they mean, and every reason."""
    timed = [row for row in rows if row.time_ms is not None]
    groups = grouped(timed, attrgetter("ranks", "shape", "mode", "dtype", "sequence_parallel"))
    for group in groups.values():
        yield _speed(group)
        yield _table("Where its time goes", PARTS, group)
    if groups:
        yield Text(SPEED_NOTE, "dim")
        yield Text(PARTS_NOTE, "dim")
    yield from (Text(line) for line in remarks(rows))


def remarks(rows: Sequence[Record]) -> Iterator[str]:
    """A sentence for whatever is missing, failed, or has no time on one GPU; the same reason once."""
    told: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status is not Status.OK:
            told.setdefault((row.status.value, row.implementation, row.reason), []).append(_place(row))
        elif row.single_reason:
            reason = f"no time without collectives or on one GPU: {row.single_reason}"
            told.setdefault(("alone", row.implementation, reason), []).append(_place(row))
    everywhere = len({_place(row) for row in rows})
    for (status, name, reason), places in told.items():
        at = (
            ""
            if len(places) == everywhere
            else f" at {places[0]}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")
        )
        yield f"{status}: {name}{at}: {reason}"


def line(row: Record) -> str:
    """A row without a table."""
    what = f"{row.ranks} ranks {_place(row)} {row.implementation}"
    if row.time_ms is None:
        return f"{what} {row.status}: {row.reason}"
    ratio = "" if row.ratio is None else f" ({row.ratio:.3f} of eager, {row.verdict})"
    return f"{what} {row.time_ms:.4g} ms{ratio}"


def _place(row: Record) -> str:
    split = "split sequence" if row.sequence_parallel else "all tokens"
    return f"{row.mode} {row.shape} {row.dtype} {row.tokens} tokens, {split}"


def _speed(rows: Sequence[Record]) -> Table:
    first = rows[0]
    split = "sequence parallel" if first.sequence_parallel else "all tokens on every rank"
    sizes = f"{first.shape} ({first.hidden} x {first.intermediate}), {first.dtype}"
    block = "mlp"
    if first.experts:
        block, split = f"{first.experts} experts", "expert parallel"
    title = f"{first.mode}, {block} {sizes}, {first.ranks} x {first.device}, {split}"
    table = _table(title, SPEED, rows)
    noise = {row.tokens: f"{row.aa_low:.3f} to {row.aa_high:.3f} at {row.tokens:,}" for row in rows if row.aa_low}
    if noise:
        table.caption = f"eager against itself (A/A): {', '.join(noise.values())} tokens"
        table.caption_justify = "left"
    return table


def _bus(row: Record) -> str:
    limit = row.shown("bus_ceiling_gbps")
    return row.shown("bus_gbps") + (f" of {limit}" if limit else "")


def _table(title: str, columns: Columns, rows: Sequence[Record]) -> Table:
    """A line per row, with its token count where that is another than above."""
    name, last = {"implementation"}, None
    table = new_table(("tokens", *name, *columns), title, text={*name, "verdict"}, wrap=name)
    table.columns[1].min_width = 16
    for row in rows:
        tokens = "" if row.tokens == last else f"{row.tokens:,}"
        table.add_row(tokens, row.implementation, *cells_of(row, columns))
        last = row.tokens
    return table


SPEED: Columns = {
    "ms": "time_ms", "ratio": ratio_text, "verdict": lambda row: Text(row.verdict, STYLES.get(row.verdict, "")),
    "1 GPU ms": "single_ms", "eff.": "efficiency",
}  # fmt: skip
PARTS: Columns = {
    "compute\nms": "compute_ms", "comm\nms": "comm_ms", "hidden": "hidden_share", "bus\nGB/s": _bus,
    "peak\nMiB": "peak_bytes",
}  # fmt: skip
