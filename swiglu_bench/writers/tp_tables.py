"""What `tp` prints: a table for each shape, mode, number of ranks and way of splitting. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows.grouping import grouped
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.writers.tables import new_table

STYLES = {"faster": "green", "slower": "red", "tie": "", "baseline": "dim"}
SPEED = (
    "ms: median of the slowest rank; ratio: relative to eager split the same way, in the same round, ± half the 95% "
    "interval; 1 GPU ms: the whole block by the same implementation on one GPU; eff.: that time / ranks / ms."
)
PARTS = (
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
        yield _parts(group)
    if groups:
        yield Text(SPEED, "dim")
        yield Text(PARTS, "dim")
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
    one = rows[0]
    split = "sequence parallel" if one.sequence_parallel else "all tokens on every rank"
    sizes = f"{one.shape} ({one.hidden} x {one.intermediate}), {one.dtype}"
    block = "mlp"
    if one.experts:
        block, split = f"{one.experts} experts", "expert parallel"
    title = f"{one.mode}, {block} {sizes}, {one.ranks} x {one.device}, {split}"
    table = _table(title, "ms", "ratio", "verdict", "1 GPU ms", "eff.")
    for row, tokens in _with_tokens(rows):
        half = (row.ratio_high - row.ratio_low) / 2 if row.ratio_high is not None and row.ratio_low is not None else 0
        shown = row.ratio is not None and row.verdict != "baseline"
        table.add_row(
            tokens, row.implementation, f"{row.time_ms:.4g}",
            f"{row.ratio:.3f} ± {half:.3f}" if shown else "",
            Text(row.verdict, STYLES.get(row.verdict, "")),
            _short(row.single_ms),
            "" if row.efficiency is None else f"{row.efficiency:.0%}",
        )  # fmt: skip
    noise = {row.tokens: f"{row.aa_low:.3f} to {row.aa_high:.3f} at {row.tokens:,}" for row in rows if row.aa_low}
    if noise:
        table.caption = f"eager against itself (A/A): {', '.join(noise.values())} tokens"
        table.caption_justify = "left"
    return table


def _parts(rows: Sequence[Record]) -> Table:
    table = _table("Where its time goes", "compute\nms", "comm\nms", "hidden", "bus\nGB/s", "peak\nMiB")
    for row, tokens in _with_tokens(rows):
        bus = "" if row.bus_gbps is None else _short(row.bus_gbps)
        limit = "" if row.bus_ceiling_gbps is None else f" of {_short(row.bus_ceiling_gbps)}"
        table.add_row(
            tokens, row.implementation, _short(row.compute_ms), _short(row.comm_ms),
            "" if row.hidden_share is None else f"{row.hidden_share:.0%}", bus + limit,
            "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.1f}",
        )  # fmt: skip
    return table


def _table(title: str, *columns: str) -> Table:
    name = {"implementation"}
    table = new_table(("tokens", *name, *columns), title, text={*name, "verdict"}, wrap=name)
    table.columns[1].min_width = 16
    return table


def _with_tokens(rows: Sequence[Record]) -> Iterator[tuple[Record, str]]:
    """Each row with its token count, where that is another than above."""
    last = None
    for row in rows:
        yield row, "" if row.tokens == last else f"{row.tokens:,}"
        last = row.tokens


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
