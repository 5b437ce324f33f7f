"""Figures of documents made from a run, so that no picture is older than its figures.

A document holds a marked block; `python -m swiglu_bench.show.report.figures README.md` (`make figures`) makes the
pictures again, in docs/figures, and fills the block:

    <!-- figure: results/nvidia-h200/forward speed-up eager compile liger fused -->
    <!-- end -->

After the run comes the question, as `report --svg` names it, then the implementations; without any, all are drawn. The
question to a CSV of `swiglu-bench noise` is `pairs`, to the tp.csv of `swiglu-bench tp` `scaling`, with rows chosen as
`mode=step`. A block `<!-- sentence: RUN names -->` gets what the report says in short about the run, and no picture,
a block `<!-- winners: RUN names -->` a table of who is the fastest at each token count.
"""

from __future__ import annotations

import html
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from swiglu_bench.cases.errors import BadInput, one_line
from swiglu_bench.rows import csv_table
from swiglu_bench.rows.figures import together
from swiglu_bench.rows.record import unique
from swiglu_bench.rows.run_folder import read_about, read_layout
from swiglu_bench.show.charts.export import picture
from swiglu_bench.show.charts.scaling import points_of, scaling
from swiglu_bench.show.charts.style import HEIGHT, PALETTE, WIDTH
from swiglu_bench.show.report import ranking, sentences, training
from swiglu_bench.show.report.load import ReportedRun, load, only
from swiglu_bench.show.report.questions import Picture, colours, pictures, style_of
from swiglu_bench.show.report.sections import sections
from swiglu_bench.show.writers.markdown import choose, fill_blocks, table


def fill(document: Path) -> tuple[str, dict[Path, tuple[Picture, bool]]]:
    """The document's text with every block made again, and by file the charts of its pictures: light ones, dark ones.

    Paths in the text are relative to the document.
    """
    inside = document.parent.name == "docs" and not (document.parent / "docs").exists()  # a checkout may be called docs
    folder = Path("figures" if inside else "docs/figures")
    files: dict[Path, tuple[Picture, bool]] = {}

    def figure(source: Path, words: list[str]) -> str:
        question, *chosen = words
        chart: Picture
        if question == "scaling":
            name, chart, said = _scaling(source, chosen)
        elif source.suffix == ".csv":
            name, (chart, said) = f"{source.stem}-{question}", pairs(source)
        else:
            name, chart, said = _of_run(source, question, chosen)
        light, dark = (folder / f"{name}{end}.svg" for end in ("", "-dark"))
        files.update({document.parent / light: (chart, False), document.parent / dark: (chart, True)})
        return (
            f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{dark.as_posix()}">\n'
            f'  <img src="{light.as_posix()}" alt="{html.escape(said)}">\n</picture>'
        )

    makers = {"figure": figure, "sentence": lambda source, names: _said(_chosen(source, names)), "winners": _winners}
    text = fill_blocks(document, makers)
    return text, files


def _chosen(source: Path, names: Sequence[str]) -> list[ReportedRun]:
    return only([load(source)], names) if names else [load(source)]


def _winners(source: Path, names: Sequence[str]) -> str:
    """Token counts down: the baseline's time, who is the fastest, ties included, and how many times as fast."""
    runs = _chosen(source, names)
    section, *_ = sections(runs)
    style = style_of(section, colours(runs))
    times = {row.tokens: row.time_ms or 0.0 for row in section.timed if row.implementation == row.baseline}
    lines = [
        [
            f"{place.tokens:,}",
            f"{times[place.tokens]:.3f} ms",
            together([f"`{name}`" for name in style.standing(place.first)]),
            f"{place.speedup:.2f}",
        ]
        for place in sorted(ranking.places(section.rows), key=lambda place: place.tokens)
    ]
    return table(["tokens", f"`{section.baseline}`", "fastest", "times as fast"], lines, text={"fastest"})


def _of_run(source: Path, question: str, names: Sequence[str]) -> tuple[str, Picture, str]:
    """The one chart of a run that answers a question: its name, itself, and what it shows in a sentence."""
    runs = _chosen(source, names)
    found = [(name, chart) for name, chart in pictures(runs) if name.endswith(f"-{question}")]
    if len(found) != 1:
        raise BadInput(f"{source} has {len(found)} charts {question!r}; a figure is one.")
    ((name, chart),) = found
    if isinstance(chart, str):
        raise BadInput(f"{source} has no chart {question!r}: {chart}")
    return name, chart, _said(runs, first=True)


def _scaling(source: Path, words: Sequence[str]) -> tuple[str, Picture, str]:
    """The figure of a tp.csv, of the implementations and the values of columns that the words name."""
    rows = choose(read_layout(source, "tp"), words)
    if not rows:
        raise BadInput(f"{source}: no row is of {' '.join(words)}.")
    names = ", ".join(unique(row.implementation for row in rows))
    shapes = unique(row.shape for row in rows)
    gpus = ", ".join(map(str, sorted({row.ranks for row in rows} | {1})))
    said = f"Time and efficiency of {names} at {', '.join(shapes)}, on {gpus} GPUs."
    texts = [{name: csv_table.cell(value) for name, value in row.row().items()} for row in rows]
    known = read_about(source.parent)["settings"]["implementations"]
    return f"scaling-{'-'.join(shapes)}", scaling(points_of(texts), known), said


def pairs(path: Path) -> tuple[alt.LayerChart, str]:
    """The chart, and what it shows in one sentence. Raises BadInput for a file that `noise` did not write."""
    try:
        rows = sorted(csv_table.texts(path), key=lambda row: float(row["ratio"]))
        names = ("ratio", "ratio_low", "ratio_high")
        data: list[dict[str, Any]] = [
            {"place": place, "verdict": row["verdict"], **{name: (float(row[name]) - 1) * 100 for name in names}}
            for place, row in enumerate(rows, start=1)
        ]
        floor = 100 * statistics.median(float(row["noise"]) for row in rows)
    except (OSError, KeyError, ValueError) as error:
        raise BadInput(f"{path}: expected a CSV that `swiglu-bench noise` wrote, got {one_line(error)}.") from None
    seen = sum(row["verdict"] != "tie" for row in data)
    without_1 = sum(row["ratio_low"] > 0 or row["ratio_high"] < 0 for row in data)
    said = (
        f"{len(rows)} pairs of the same call under two names: {without_1} of the 95% intervals exclude no difference, "
        f"and {seen} pairs get a verdict."
    )
    colour = alt.condition("datum.verdict == 'tie'", alt.value(PALETTE[2]), alt.value(PALETTE[7]))
    place = alt.X("place:Q", title="pair, sorted by its ratio", scale=alt.Scale(nice=False, padding=8))
    base = alt.Chart(alt.Data(values=data))
    axis = alt.Y("ratio_low:Q", title="difference in time (%), with its 95% interval")
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.55).encode(x=place, y=axis, y2="ratio_high:Q", color=colour)
    dots = base.mark_circle(size=22, opacity=1).encode(x=place, y="ratio:Q", color=colour)
    lines = alt.Chart(alt.Data(values=[{"y": floor}, {"y": -floor}])).mark_rule(strokeDash=[5, 3]).encode(y="y:Q")
    zero = alt.Chart(alt.Data(values=[{"y": 0}])).mark_rule().encode(y="y:Q")
    title = alt.Title(
        "What does the same call differ by from itself?",
        subtitle=f"{len(rows)} A/A pairs, {without_1} intervals without 0, {seen} verdicts; dashed: median noise floor",
    )
    chart = alt.LayerChart(layer=[zero, lines, bars, dots])
    chart.width, chart.height, chart.title = WIDTH, HEIGHT * 3 // 4, title
    return chart, said


def _said(runs: Sequence[ReportedRun], first: bool = False) -> str:
    """What a report says in short about a run, or the first sentence of that."""
    run, *_ = runs
    if run.training:
        return training.sentences(run.training)[0]
    section, *_ = sections(runs)
    style = style_of(section, colours(runs))
    return sentences.sentences(section, style)[0] if first else sentences.headline(section, style)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        filled, made = fill(Path(argument))
        for path, (chart, dark) in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(chart, "svg", dark))
        Path(argument).write_text(filled, encoding="utf-8")
