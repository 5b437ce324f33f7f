"""What a training run prints: whether it learns the same, whether it is faster, and every reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.rows.record import Status
from swiglu_bench.rows.training import SAVING_TOLERANCE, Summary

MEANING = {"same": "good", "within seeds": "good", "differs": "bad", "faster": "good", "slower": "bad"}
STYLES = {"good": "green", "bad": "bold red", "middle": "yellow"}
WORDS = ("curve", "verdict")
"""Columns that are no figures."""


@dataclass(frozen=True)
class Cell:
    """A text, and whether it is good news."""

    text: str
    meaning: str = ""
    """good, bad or middle; empty: it is a figure."""


@dataclass(frozen=True)
class Grid:
    """A table before it is drawn, on a terminal or a page."""

    title: str
    columns: Sequence[str]
    """The first is the implementation."""
    rows: Sequence[Sequence[Cell]]
    note: str
    """What the columns mean."""


def grids(summaries: Sequence[Summary]) -> Iterator[Grid]:
    """Whether they learn the same, whether they are faster, where time and memory go; each where anything is known."""
    trained = [one for one in summaries if one.final_loss is not None]
    if trained:
        yield _learning(trained)
    timed = [one for one in trained if one.step_ms is not None]
    if timed:
        yield _speed(timed)
        yield _parts(timed)


def tables(summaries: Sequence[Summary]) -> Iterator[RenderableType]:
    """All of it for a terminal: the tables, what they mean, and what is missing from them."""
    for grid in grids(summaries):
        table = Table(title=grid.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        first, *others = grid.columns
        table.add_column(first, overflow="fold", min_width=10)
        for column in others:
            table.add_column(column, no_wrap=True, justify="left" if column in WORDS else "right")
        for row in grid.rows:
            table.add_row(*(Text(cell.text, STYLES.get(cell.meaning, "")) for cell in row))
        yield table
        yield Text(grid.note, "dim")
    for line in remarks(summaries):
        yield Text(line)


def remarks(summaries: Sequence[Summary]) -> Iterator[str]:
    """Sentences on rows that need them."""
    for one in summaries:
        if one.frozen and one.final_loss is not None:
            yield (
                f"{one.implementation} yields no weight gradients: its blocks' weights stay as they were drawn, "
                "so it learns less by design and does less work."
            )
    off = [
        f"{one.implementation} (it takes {one.ratio:.3f} of eager's time, expected was {one.expected_ratio:.3f})"
        for one in summaries
        if one.as_expected is False
    ]
    if off:
        yield f"The step is off what was expected, by more than {SAVING_TOLERANCE:.0%} of the saving: {', '.join(off)}."
    reasons: dict[str, list[str]] = {}
    for one in summaries:
        if one.status is not Status.OK:
            reasons.setdefault(f"{one.status}: {one.reason}", []).append(one.implementation)
    for reason, names in reasons.items():
        status, _, text = reason.partition(": ")
        yield f"{status}: {', '.join(names)}: {text}"


def _learning(rows: Sequence[Summary]) -> Grid:
    lines = []
    for one in rows:
        curve = "baseline" if one.difference is None else one.curve
        lines.append(
            (
                Cell(one.implementation),
                Cell(_spread(one.final_loss, one.final_loss_spread)),
                Cell("" if one.difference is None else f"{one.difference:+.2g}"),
                Cell(f"{curve} (frozen)", "middle") if one.frozen else Cell(curve, MEANING.get(one.curve, "")),
                Cell(_spread(one.metric_mean, one.metric_spread)),
            )
        )
    columns = ("implementation", "final loss", "less eager's", "curve", rows[0].metric)
    return Grid("Does it learn the same?", columns, lines, _rule(rows))


def _rule(rows: Sequence[Summary]) -> str:
    judged = next((one for one in rows if one.difference is not None), None)
    text = f"final loss: mean over the last fifth of {rows[0].steps} steps, over {_seeds(rows[0].seeds)}."
    if judged is None:
        return text
    rounding = "not known" if judged.rounding is None else f"{judged.rounding:.2g}"
    seeds = "not known, with one seed" if judged.eager_spread is None else f"{judged.eager_spread:.2g}"
    return (
        f"{text} same: each seed's difference at most 3 times what another order of sums does to eager ({rounding}); "
        f"within seeds: the mean difference at most the spread of eager's seeds ({seeds}); else differs, "
        "or unknown with one seed."
    )


def _speed(rows: Sequence[Summary]) -> Grid:
    lines = []
    for one in rows:
        assert one.step_ms
        assert one.rate
        star = " *" if one.as_expected is False else ""
        verdict = Cell(one.verdict, MEANING.get(one.verdict, ""))
        lines.append(
            (
                Cell(one.implementation),
                Cell(f"{one.step_ms:.4g}"),
                Cell(ratio_text(one)),
                Cell(f"{one.verdict}, less work", "middle") if one.frozen else verdict,
                Cell("" if one.expected_ratio is None else f"{one.expected_ratio:.3f}{star}"),
                Cell(f"{one.rate:,.0f}"),
            )
        )
    columns = ("implementation", "step ms", "ratio", "verdict", "expected", f"{rows[0].unit}/s")
    note = (
        "ratio: of the step's time to eager's in the same round, median and half the 95% interval; expected: by "
        "Amdahl's law from the blocks' share of eager's step and the ratio of the block by itself; * off by more "
        f"than {SAVING_TOLERANCE:.0%} of the saving."
    )
    return Grid("Is it faster?", columns, lines, note)


def ratio_text(one: Summary) -> str:
    """The ratio of its step to eager's, with half of the interval; empty where there is none."""
    if one.ratio is None or one.ratio_low is None or one.ratio_high is None:
        return ""
    return f"{one.ratio:.3f} ± {(one.ratio_high - one.ratio_low) / 2:.3f}"


def _parts(rows: Sequence[Summary]) -> Grid:
    lines = []
    for one in rows:
        times = (one.block_forward_ms, one.block_backward_ms, one.optimizer_ms)
        texts = ("" if time_ms is None else f"{time_ms:.3g}" for time_ms in times)
        share = "" if one.block_share is None else f"{one.block_share:.0%}"
        memory = _mib(one.saved_bytes), _mib(one.peak_bytes)
        lines.append([Cell(text) for text in (one.implementation, *texts, share, *memory)])
    columns = ("implementation", "fwd ms", "bwd ms", "AdamW ms", "MLP", "saved MiB", "peak MiB")
    note = (
        "fwd, bwd: all SwiGLU blocks of a step; MLP: their share of it; saved for backward, and peak of "
        "forward and backward: above weights and the optimiser's state."
    )
    return Grid("Where time and memory go", columns, lines, note)


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds, ± their spread"


def _spread(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return ""
    digits = 4 if mean < 10 else 2  # of a perplexity
    return f"{mean:.{digits}f}" if spread is None else f"{mean:.{digits}f} ± {spread:.{digits}f}"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f}"
