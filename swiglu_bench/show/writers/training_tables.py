"""What a training run prints: whether each implementation learns the same, whether it is faster, and every reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.rows.record import Record, Status, grouped
from swiglu_bench.rows.training import SAVING_TOLERANCE
from swiglu_bench.show.writers.tables import Columns, cells_of, new_table, ratio_text

MEANING = {"same": "good", "within seeds": "good", "differs": "bad", "faster": "good", "slower": "bad"}
STYLES = {"good": "green", "bad": "bold red", "middle": "yellow"}
TEXT_COLUMNS = ("curve", "verdict")
"""Columns that hold no numbers."""
SPEED_NOTE = (
    "ratio: step time relative to eager's in the same round, median and half the 95% interval; expected: by Amdahl's "
    "law from the blocks' share of eager's step and the ratio of one block by itself; * off by more than "
    f"{SAVING_TOLERANCE:.0%} of the saving."
)
PARTS_NOTE = (
    "fwd, bwd: all SwiGLU blocks of a step; MLP: their share of it; saved (for backward) and peak (of forward and "
    "backward) are in addition to weights and the optimiser's state."
)


@dataclass(frozen=True)
class TableCell:
    """A text, and whether it is good news."""

    text: str
    meaning: str = ""
    """good, bad or middle; empty for a number."""


@dataclass(frozen=True)
class TrainingTable:
    """A table before it is drawn, on a terminal or a page."""

    title: str
    columns: Sequence[str]
    """The first is the implementation."""
    rows: Sequence[Sequence[TableCell]]
    note: str
    """What the columns mean."""


def grids(summaries: Sequence[Record]) -> Iterator[TrainingTable]:
    """The tables for which there is anything: learning, speed, and where time and memory go."""
    trained = [one for one in summaries if one.final_loss is not None]
    if trained:
        yield _table("Does it learn the same?", LEARNING, trained, _rule(trained))
    timed = [one for one in trained if one.step_ms is not None]
    if timed:
        yield _table("Is it faster?", SPEED, timed, SPEED_NOTE)
        yield _table("Where time and memory go", PARTS, timed, PARTS_NOTE)


def tables(summaries: Sequence[Record]) -> Iterator[RenderableType]:
    """Everything for a terminal: the tables, what they mean, and what is missing from them."""
    for grid in grids(summaries):
        name = grid.columns[0]
        table = new_table(grid.columns, grid.title, text={name, *TEXT_COLUMNS}, wrap={name})
        table.columns[0].min_width = 10
        for row in grid.rows:
            table.add_row(*(Text(cell.text, STYLES.get(cell.meaning, "")) for cell in row))
        yield table
        yield Text(grid.note, "dim")
    yield from map(Text, remarks(summaries))


def remarks(summaries: Sequence[Record]) -> Iterator[str]:
    """Sentences on the rows that need one."""
    for one in summaries:
        if one.frozen and one.final_loss is not None:
            yield (
                f"{one.implementation} yields no weight gradients: its blocks keep their initial weights, "
                "so by design it learns less and does less work."
            )
    off = [
        f"{one.implementation} (it takes {one.ratio:.3f} of eager's time, {one.expected_ratio:.3f} was expected)"
        for one in summaries
        if one.as_expected is False
    ]
    if off:
        yield f"The saving differs from the expected one by more than {SAVING_TOLERANCE:.0%} of it: {', '.join(off)}."
    not_ok = (one for one in summaries if one.status is not Status.OK)
    for (status, reason), those in grouped(not_ok, attrgetter("status", "reason")).items():
        yield f"{status}: {', '.join(one.implementation for one in those)}: {reason}"


def _rule(rows: Sequence[Record]) -> str:
    """How the curves were compared."""
    count = rows[0].seeds
    over = "one seed" if count == 1 else f"{count} seeds, ± their spread"
    text = f"final loss: mean over the last fifth of {rows[0].steps} steps, over {over}."
    judged = next((one for one in rows if one.difference is not None), None)
    if judged is None:
        return text
    rounding, quantised = _number(judged.rounding, ".2g") or "not known", any(one.precision for one in rows)
    spread = _number(judged.eager_spread, ".2g") or "not known, with one seed"
    return (
        f"{text} same: each seed's difference is at most 3 times the effect of another summation order on eager "
        f"({rounding}); within seeds: the mean difference is at most the spread of eager's seeds ({spread}); "
        "else differs, or unknown with one seed."
        + " For quantised rows, ± is half the 95% interval of the difference."
        * quantised
    )


def _difference(one: Record) -> str:
    if one.difference is None or not one.precision or one.difference_low is None or one.difference_high is None:
        return _number(one.difference, "+.2g")
    return f"{one.difference:+.1g} ± {(one.difference_high - one.difference_low) / 2:.1g}"


def _curve(one: Record) -> TableCell:
    text = "baseline" if one.difference is None else one.curve
    return TableCell(f"{text} (frozen)", "middle") if one.frozen else TableCell(text, MEANING.get(one.curve, ""))


def _verdict(one: Record) -> TableCell:
    text = f"{one.verdict}, less work" if one.frozen else one.verdict
    return TableCell(text, "middle" if one.frozen else MEANING.get(one.verdict, ""))


def _table(title: str, columns: Columns, rows: Sequence[Record], note: str) -> TrainingTable:
    heads = [head.format(metric=rows[0].metric, unit=rows[0].unit) for head in columns]
    values = [[one.implementation, *cells_of(one, columns)] for one in rows]
    cells = [[value if isinstance(value, TableCell) else TableCell(value) for value in row] for row in values]
    return TrainingTable(title, ("implementation", *heads), cells, note)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _with_spread(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return ""
    digits = 4 if mean < 10 else 2  # of a perplexity
    return f"{mean:.{digits}f}" if spread is None else f"{mean:.{digits}f} ± {spread:.{digits}f}"


LEARNING: Columns = {
    "final loss": lambda one: _with_spread(one.final_loss, one.final_loss_spread),
    "minus eager's": _difference,
    "curve": _curve,
    "{metric}": lambda one: _with_spread(one.metric_mean, one.metric_spread),
}
SPEED: Columns = {
    "step ms": "step_ms", "ratio": ratio_text, "verdict": _verdict,
    "expected": lambda one: one.shown("expected_ratio") + " *" * (one.as_expected is False), "{unit}/s": "rate",
}  # fmt: skip
PARTS: Columns = {
    "fwd ms": "block_forward_ms", "bwd ms": "block_backward_ms", "AdamW ms": "optimizer_ms", "MLP": "block_share",
    "saved MiB": "saved_bytes", "peak MiB": "peak_bytes",
}  # fmt: skip
