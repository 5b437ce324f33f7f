"""A training run as a section: who learns as eager does, who is the fastest of those, and the curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from swiglu_bench.rows.figures import together
from swiglu_bench.rows.record import BASELINE, Record
from swiglu_bench.rows.training import PERMUTED, Curve, FinishedTraining
from swiglu_bench.show.charts import training as chart
from swiglu_bench.show.charts.style import Style
from swiglu_bench.show.report import ranking
from swiglu_bench.show.report.drawing import DRAWN
from swiglu_bench.show.writers.tables import ratio_text
from swiglu_bench.show.writers.training_tables import remarks

LEARNS = {
    Curve.SAME: "as eager does, to within rounding",
    Curve.WITHIN_SEEDS: "as eager does, within the spread of its seeds",
    Curve.DIFFERS: "differently from eager",
    Curve.UNKNOWN: "differently by more than rounding explains, which one seed cannot judge",
}


def context(training: FinishedTraining) -> dict[str, Any]:
    """Title, work and device of the section."""
    first = next(iter(training.summaries), None)
    settings = training.about.get("settings", {})
    workload, dtype = settings.get("workload", {}), settings.get("dtype", "")
    work = [f"blocks {workload['hidden']}x{workload['intermediate']}"] if workload else []
    work += [f"{first.steps} steps from {_count(first.seeds, 'seed')}"] if first and first.steps else []
    work += [str(settings["data"])] if settings.get("data") else []
    return {
        "title": ", ".join(filter(None, [f"training of {first.model if first else 'nothing'}", dtype])),
        "work": "; ".join(work),
        "device": first.device if first else "",
    }


def sentences(training: FinishedTraining) -> list[str]:
    """The most important first: who learns the same and who of those is the fastest, in one; then what spoils it."""
    rows = training.summaries
    headline = " ".join([*_learning(rows), *_fastest(rows)])
    return [headline, *_noise(rows), *remarks(rows)]


def drawn(training: FinishedTraining) -> list[str]:
    """Who has curves: what was trained to the end from a seed."""
    return [name for name in training.names if training.losses.get(name)]


def hidden(training: FinishedTraining) -> set[str]:
    """Who starts hidden, because the differences of what learns less by design would flatten the others'."""
    return {one.implementation for one in training.summaries if one.frozen}


def charts(training: FinishedTraining, style: Style) -> Iterator[tuple[str, str, alt.LayerChart | str]]:
    """Question, what is drawn how, and the chart or why there is none; who is drawn is the page's choice."""
    names = drawn(training)
    question = "How does the loss fall?"
    if names:
        about = "means over seeds; thin: eager's seeds one by one" if BASELINE in names else "means over seeds"
        yield question, about, _choosable(chart.over_steps(training.losses, names, style), training)
    else:
        yield question, "", "Nothing was trained to the end, so there is no curve."
    question, others = "How far is each loss from eager's?", [name for name in names if name != BASELINE]
    if others and BASELINE in training.losses:
        about = "loss minus eager's from the same seed and at the same step, mean over seeds"
        about += f"; dotted: {PERMUTED}, its sums in another order" if PERMUTED in others else ""
        yield question, about, _choosable(chart.from_eager(training.losses, names, style), training)
    else:
        yield question, "", "Nothing was trained beside eager, so there is no difference to draw."


def picture(training: FinishedTraining, style: Style) -> alt.VConcatChart | str:
    """Both charts as one, or why there is none."""
    names, first = drawn(training), training.summaries[0]
    if not names:
        return "Nothing was trained to the end, so there is no curve."
    title = f"{first.task}: loss over steps"
    return chart.curves(training.losses, names, title, style, hidden(training))


def _choosable(one: alt.LayerChart, training: FinishedTraining) -> alt.LayerChart:
    """A chart whose legend is the page's list of names."""
    one.layer = [layer.transform_filter(DRAWN) for layer in one.layer]  # each may have data of its own
    for layer in one.layer:
        layer.encoding.color.legend = layer.encoding.strokeDash.legend = None
    shown = [name for name in drawn(training) if name not in hidden(training)]
    return one.add_params(alt.param(name="shown", value=shown)).properties(usermeta={})


def _learning(rows: Sequence[Record]) -> Iterator[str]:
    """How the curves compare, of those that are to learn the same."""
    if not any(one.final_loss is not None for one in rows):
        yield "Nothing was trained to the end."
        return
    judged = [one for one in rows if one.curve and not one.frozen and one.implementation != PERMUTED]
    if not judged:
        yield "No implementation was trained beside eager that learns all weights, so no curves are compared."
    for curve in Curve:
        names = [one.implementation for one in judged if one.curve == curve]
        if names and len(names) == len(judged) > 1:
            yield f"All {len(names)} that train every weight learn {LEARNS[curve]}."
        elif names:
            yield f"{together(names)} {_verb('learn', names)} {LEARNS[curve]}."


def _fastest(rows: Sequence[Record]) -> Iterator[str]:
    """Who has the shortest step among those that learn what eager learns, and who cannot be told from it."""
    able = [one for one in rows if one.ratio is not None and not one.frozen and not one.failed]
    if not able:
        return
    best, *others = sorted(able, key=lambda one: one.ratio or 0.0)
    ties = [one.implementation for one in others if ranking.tie(_interval(best), _interval(one), best.noise or 0.0)]
    figures = f"{ratio_text(best)} of eager's time"
    name, saving = best.implementation, f"{1 - (best.ratio or 1.0):.1%} off a whole step ({figures})"
    if best.verdict != "faster":
        yield f"Nothing is faster than eager: {name}, the next, takes {figures}."
    elif ties:
        yield f"{together([name, *ties])} tie for the fastest step: {name}, with the lowest ratio, takes {saving}."
    else:
        yield f"{name} is the fastest: it takes {saving}."


def _interval(one: Record) -> ranking.Ratio:
    return one.ratio or 0.0, one.ratio_low or 0.0, one.ratio_high or 0.0


def _noise(rows: Sequence[Record]) -> Iterator[str]:
    timed = [one for one in rows if one.aa_low is not None]
    if timed:
        spent = any(one.stopped_by == "budget" for one in timed)
        end = "; the budget was spent before every ratio was known to within 0.5%" if spent else ""
        yield (
            f"Noise: eager against itself in the same rounds stays within {timed[0].noise or 0.0:.2%} of 1, interval "
            f"included{end}."
        )


def _verb(verb: str, names: Sequence[str]) -> str:
    return verb if len(names) > 1 else f"{verb}s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
