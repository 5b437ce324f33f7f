"""What a reader has to know before believing times: said under tables, in logs and in reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from swiglu_bench.rows.figures import together, tokens_text
from swiglu_bench.rows.record import MOST_STEAL, Record, grouped, unique

MOST_GPUS = 8
"""More GPUs than these are counted instead of listed."""


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
        _, worst = max(busy, key=lambda one: one[1].others)
        stolen = max(load.steal for _, load in busy)
        hosts = f", and a virtual machine's host took {stolen:.0%} of the time" if stolen > MOST_STEAL else ""
        yield (
            (
                f"The machine was busy: other programs used up to {worst.others:.1f} of {worst.cpus} CPUs{hosts}: "
                f"{_tokens([row for row, _ in busy])}."
            ),
            "bold red",
        )
    gpus = {row.gpu_uuid: f"{row.host} {row.gpu_uuid if row.gpu_index is None else row.gpu_index}" for row in timed}
    names = sorted(name for uuid, name in gpus.items() if uuid)
    if len(names) > 1:
        more = f" and {len(names) - MOST_GPUS} more" if len(names) > MOST_GPUS else ""
        yield (
            (
                f"The cases ran on {len(names)} GPUs ({', '.join(names[:MOST_GPUS])}{more}): each ratio is of one GPU, "
                "times at two token counts may be from two."
            ),
            "dim",
        )
    for note in unique(row.gpu_note for row in timed if row.gpu_note):
        yield note, "yellow"
    for remarks, rows in grouped((row for row in timed if row.remarks), attrgetter("remarks")).items():
        yield f"{together(unique(row.implementation for row in rows))}, {_tokens(rows)}: {remarks}", "yellow"


def _tokens(rows: Sequence[Record]) -> str:
    return tokens_text(row.tokens for row in rows)
