"""What a training run prints: its progress, whether each implementation learns the same and is faster, every reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rich.console import Console, RenderableType
from rich.text import Text

from swiglu_bench.rows.record import Record, Status, grouped
from swiglu_bench.show.writers.console import Bar
from swiglu_bench.show.writers.tables import Columns, cells_of, new_table, ratio_text
from swiglu_bench.show.writers.wandb_run import WandbRun

MEANING = {"same": "good", "within seeds": "good", "differs": "bad", "faster": "good", "slower": "bad"}
STYLES = {"good": "green", "bad": "bold red", "middle": "yellow"}
TEXT_COLUMNS = ("curve", "verdict")
"""Columns that hold no numbers."""
SPEED_NOTE = "ratio: step time relative to eager's in the same round, median and half the 95% interval."
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
    trained = [row for row in summaries if row.final_loss is not None]
    if trained:
        yield _table("Does it learn the same?", LEARNING, trained, _rule(trained))
    timed = [row for row in trained if row.step_ms is not None]
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
    for row in summaries:
        if row.frozen and row.final_loss is not None:
            yield (
                f"{row.implementation} yields no weight gradients: its blocks keep their initial weights, "
                "so by design it learns less and does less work."
            )
    not_ok = (row for row in summaries if row.status is not Status.OK)
    for (status, reason), those in grouped(not_ok, attrgetter("status", "reason")).items():
        yield f"{status}: {', '.join(row.implementation for row in those)}: {reason}"


def _rule(rows: Sequence[Record]) -> str:
    """How the curves were compared."""
    count = rows[0].seeds
    over = "one seed" if count == 1 else f"{count} seeds, ± their spread"
    text = f"final loss: mean over the last fifth of {rows[0].steps} steps, over {over}."
    judged = next((row for row in rows if row.difference is not None), None)
    if judged is None:
        return text
    rounding, quantised = _number(judged.rounding, ".2g") or "not known", any(row.precision for row in rows)
    spread = _number(judged.eager_spread, ".2g") or "not known, with one seed"
    return (
        f"{text} same: each seed's difference is at most 3 times the effect of another summation order on eager "
        f"({rounding}); within seeds: the mean difference is at most the spread of eager's seeds ({spread}); "
        "else differs, or unknown with one seed."
        + " For quantised rows, ± is half the 95% interval of the difference."
        * quantised
    )


def _difference(row: Record) -> str:
    if row.difference is None or not row.precision or row.difference_low is None or row.difference_high is None:
        return _number(row.difference, "+.2g")
    return f"{row.difference:+.1g} ± {(row.difference_high - row.difference_low) / 2:.1g}"


def _curve(row: Record) -> TableCell:
    text = "baseline" if row.difference is None else row.curve
    return TableCell(f"{text} (frozen)", "middle") if row.frozen else TableCell(text, MEANING.get(row.curve, ""))


def _verdict(row: Record) -> TableCell:
    text = f"{row.verdict}, less work" if row.frozen else row.verdict
    return TableCell(text, "middle" if row.frozen else MEANING.get(row.verdict, ""))


def _table(title: str, columns: Columns, rows: Sequence[Record], note: str) -> TrainingTable:
    heads = [head.format(metric=rows[0].metric, unit=rows[0].unit) for head in columns]
    values = [[row.implementation, *cells_of(row, columns)] for row in rows]
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
    "final loss": lambda row: _with_spread(row.final_loss, row.final_loss_spread),
    "minus eager's": _difference,
    "curve": _curve,
    "{metric}": lambda row: _with_spread(row.metric_mean, row.metric_spread),
}
SPEED: Columns = {
    "step ms": "step_ms", "ratio": ratio_text, "verdict": _verdict, "{unit}/s": "rate",
}  # fmt: skip
PARTS: Columns = {
    "fwd ms": "block_forward_ms", "bwd ms": "block_backward_ms", "AdamW ms": "optimizer_ms", "MLP": "block_share",
    "saved MiB": "saved_bytes", "peak MiB": "peak_bytes",
}  # fmt: skip


class TrainingProgress(Bar):
    """A bar with the live loss, or without a terminal a line for each of `count` trainings; logs to W&B."""

    def __init__(self, console: Console, count: int, wandb: WandbRun | None = None) -> None:
        super().__init__(console, count)
        self._wandb = wandb
        self._done = 0

    def listen(self, event: Record | str) -> None:
        """The row of a seed after a step, or what else begins."""
        if isinstance(event, str):
            self.tell(event, self._done)
            return
        losses, steps = event.series["loss"], event.steps or 0
        where = f"{event.implementation}, seed {event.seed}: step {len(losses)}/{steps}"
        if self._wandb:
            self._wandb.step(event)
        self._done += len(losses) == steps
        text = f"{where}, loss {losses[-1]:.4f}"
        self.tell(text, self._done + len(losses) / steps * (len(losses) < steps))
        if len(losses) == steps and not self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
