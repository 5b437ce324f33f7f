"""What a report asks of each kind of section, and the charts that answer, for the page and as picture files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from swiglu_bench.rows.figures import token_text
from swiglu_bench.rows.record import Record, grouped
from swiglu_bench.show.charts.style import Style, slots
from swiglu_bench.show.report import charts, memory_charts, ranking, training
from swiglu_bench.show.report.drawing import NoChart
from swiglu_bench.show.report.load import ReportedRun
from swiglu_bench.show.report.sections import Section, sections

Picture = alt.LayerChart | alt.VConcatChart
EACH: dict[str, Callable[[Any], str]] = {
    "shape": str,
    "dtype": str,
    "tokens": lambda count: f"{token_text(count)} tokens",
}
"""What charts of one question may differ in, and what tells them apart."""


@dataclass(frozen=True)
class Question:
    """What one kind of chart answers."""

    name: str
    draw: Callable[[Sequence[Record], Style], alt.LayerChart]
    each: tuple[str, ...] = ()
    """Columns whose values have a chart each: of EACH."""


ERROR = Question("error", charts.error, ("dtype",))
QUESTIONS = {
    "time": (
        Question("speed-up", charts.speedup, ("shape",)),
        Question("time", charts.time, ("shape",)),
        Question("limit", charts.limit, ("shape",)),
        Question("memory-and-time", memory_charts.pareto, ("shape", "tokens")),
        ERROR,
    ),
    "memory": (Question("memory", memory_charts.memory, ("shape", "tokens")), ERROR),
    "verify": (ERROR,),
}
"""What each kind of section asks, the most important first."""


@dataclass(frozen=True)
class Answer:
    """The charts of one question, or why there is none."""

    name: str
    charts: list[tuple[str, alt.LayerChart]] = field(default_factory=list)
    """What tells them apart, and the chart."""
    reason: str = ""


def answers(section: Section, style: Style) -> Iterator[Answer]:
    """Every question of a section, answered or with the reason why not."""
    for question in QUESTIONS[section.kind]:
        found, reasons = [], []
        for text, rows in _parts(section.rows, question.each):
            try:
                found.append((text, question.draw(rows, style)))
            except NoChart as error:
                reasons.append(str(error))
        yield Answer(question.name, found, "" if found else reasons[0])


def _parts(rows: Sequence[Record], each: tuple[str, ...]) -> Iterator[tuple[str, Sequence[Record]]]:
    """The rows that have a chart each, the largest token count first, with what tells the charts apart."""
    several = [column for column in each if len({getattr(row, column) for row in rows}) > 1]
    parts = grouped(rows, lambda row: tuple(getattr(row, column) for column in each)).values()
    for part in sorted(parts, key=lambda part: -part[0].tokens if "tokens" in each else 0):
        yield ", ".join(EACH[column](getattr(part[0], column)) for column in several), part


def colours(runs: Sequence[ReportedRun]) -> dict[str, int]:
    """The number of each implementation's colour: one in all sections."""
    from swiglu_bench.contenders import CATALOGUE

    names = [name for run in runs for name in run.implementations]
    return slots(names, [implementation.name for implementation in CATALOGUE])


def style_of(section: Section, numbers: Mapping[str, int]) -> Style:
    """How a section is drawn."""
    alike = ranking.alike(section.rows) if section.kind == "time" else {}
    return Style(numbers, alike, frozenset(row.implementation for row in section.ok if not row.comparable))


def pictures(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, Picture | str]]:
    """A file name without its ending, and the chart or why there is none; no name comes twice."""
    numbers, taken = colours(runs), set[str]()

    def new(name: str) -> str:
        while name in taken:
            name += "-again"
        taken.add(name)
        return name

    for section in sections(runs):
        for answer in answers(section, style_of(section, numbers)):
            what = section.mode if section.kind == "time" else section.kind
            parts = [section.names, section.scope, what, section.dtype, answer.name]
            stem = "-".join(dict.fromkeys(map(_slug, parts)))
            if answer.reason:
                yield stem, answer.reason
            for text, chart in answer.charts:
                yield new("-".join(filter(None, (stem, _slug(text))))), chart
    for run in runs:
        if run.training:
            yield new(f"{_slug(run.name)}-curves"), training.picture(run.training, Style(numbers))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
