"""What a training run prints: whether it learns the same, whether it is faster, and every reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swiglu_bench.record import Status
from swiglu_bench.train.amdahl import TOLERANCE
from swiglu_bench.train.summary import Summary

STYLES = {"same": "green", "within seeds": "green", "differs": "bold red", "faster": "green", "slower": "red"}


def tables(summaries: Sequence[Summary]) -> Iterator[RenderableType]:
    """Both tables, what they mean, and what is missing from them."""
    trained = [one for one in summaries if one.final_loss is not None]
    if trained:
        yield _learning(trained)
        yield Text(_rule(trained), "dim")
    timed = [one for one in trained if one.step_ms is not None]
    if timed:
        yield _speed(timed)
        yield Text(
            "ratio: of the step's time to eager's in the same round, median and half the 95% interval; expected: by "
            "Amdahl's law from the blocks' share of eager's step and the ratio of the block by itself; * off by more "
            f"than {TOLERANCE:.0%} of the saving.",
            "dim",
        )
        yield _parts(timed)
        yield Text(
            "fwd, bwd: all SwiGLU blocks of a step; MLP: their share of it; saved for backward, and peak of "
            "forward and backward: above weights and the optimiser's state.",
            "dim",
        )
    for line in remarks(summaries):
        yield Text(line)


def remarks(summaries: Sequence[Summary]) -> Iterator[str]:
    """Sentences on rows that need them."""
    for one in summaries:
        if one.trains == "inputs" and one.final_loss is not None:
            yield (
                f"{one.implementation} yields no weight gradients: its blocks' weights stay as they were drawn, "
                "so it learns less by design and does less work."
            )
        if one.as_expected is False:
            assert one.ratio
            assert one.expected_ratio
            yield (
                f"{one.implementation}: the step takes {one.ratio:.3f} of eager's time where {one.expected_ratio:.3f} "
                f"was expected; they disagree by more than {TOLERANCE:.0%} of the saving."
            )
    reasons: dict[str, list[str]] = {}
    for one in summaries:
        if one.status is not Status.OK:
            reasons.setdefault(f"{one.status}: {one.reason}", []).append(one.implementation)
    for reason, names in reasons.items():
        status, _, text = reason.partition(": ")
        yield f"{status}: {', '.join(names)}: {text}"


def _learning(rows: Sequence[Summary]) -> Table:
    table = _table("Does it learn the same?", "implementation", "final loss", "less eager's", "curve", rows[0].metric)
    for one in rows:
        curve = "baseline" if one.difference is None else one.curve
        if one.trains == "inputs":
            curve += " (frozen)"
        table.add_row(
            one.implementation,
            _spread(one.final_loss, one.final_loss_spread),
            "" if one.difference is None else f"{one.difference:+.2g}",
            Text(curve, STYLES.get(one.curve, "") if one.trains != "inputs" else "yellow"),
            _spread(one.metric_mean, one.metric_spread),
        )
    return table


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


def _speed(rows: Sequence[Summary]) -> Table:
    table = _table("Is it faster?", "implementation", "step ms", "ratio", "verdict", "expected", f"{rows[0].unit}/s")
    for one in rows:
        assert one.step_ms
        assert one.rate
        half = (one.ratio_high - one.ratio_low) / 2 if one.ratio_high and one.ratio_low else None
        star = " *" if one.as_expected is False else ""
        table.add_row(
            one.implementation,
            f"{one.step_ms:.4g}",
            "" if one.ratio is None or half is None else f"{one.ratio:.3f} ± {half:.3f}",
            Text(f"{one.verdict}, less work", "yellow")
            if one.trains == "inputs"
            else Text(one.verdict, STYLES.get(one.verdict, "")),
            "" if one.expected_ratio is None else f"{one.expected_ratio:.3f}{star}",
            f"{one.rate:,.0f}",
        )
    return table


def _parts(rows: Sequence[Summary]) -> Table:
    table = _table(
        "Where time and memory go", "implementation", "fwd ms", "bwd ms", "AdamW ms", "MLP", "saved MiB",
        "peak MiB",
    )  # fmt: skip
    for one in rows:
        times = (one.block_forward_ms, one.block_backward_ms, one.optimizer_ms)
        table.add_row(
            one.implementation,
            *("" if time_ms is None else f"{time_ms:.3g}" for time_ms in times),
            "" if one.block_share is None else f"{one.block_share:.0%}",
            _mib(one.saved_bytes),
            _mib(one.peak_bytes),
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    first, *others = columns
    table.add_column(first, overflow="fold", min_width=10)
    for column in others:
        table.add_column(column, no_wrap=True, justify="left" if column in ("curve", "verdict") else "right")
    return table


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds, ± their spread"


def _spread(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.4f}" if spread is None else f"{mean:.4f} ± {spread:.4f}"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f}"
