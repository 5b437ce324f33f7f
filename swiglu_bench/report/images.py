"""The charts of a report as PNG or SVG files, for papers and documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import altair as alt

from swiglu_bench.charts.style import Style
from swiglu_bench.report import training
from swiglu_bench.report.load import ReportedRun
from swiglu_bench.report.page import colours, draw, styles
from swiglu_bench.report.sections import Section, sections

Picture = alt.LayerChart | alt.VConcatChart


def charts_of(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, Picture | str]]:
    """A file name without its ending, and the chart or why there is none; no name comes twice."""
    found, numbers, taken = sections(runs), colours(runs), set[str]()
    for section, style in zip(found, styles(found, numbers), strict=True):
        for drawn in draw(section, style):
            stem = _stem(section, drawn.name)
            if drawn.reason:
                yield stem, drawn.reason
            for text, chart in drawn.charts:
                name = "-".join(part for part in (stem, _slug(text)) if part)
                yield _new(name, taken), chart
    for run in runs:
        if run.training:
            yield _new(f"{_slug(run.name)}-curves", taken), training.picture(run.training, Style(numbers))


def _new(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "-again"
    taken.add(name)
    return name


def _stem(section: Section, question: str) -> str:
    """ReportedRun, scope, mode, dtype and question, without saying a word twice."""
    what = section.mode if section.kind == "time" else section.kind
    parts = [section.run.name, section.scope, what, section.dtype, question]
    return "-".join(dict.fromkeys(map(_slug, parts)))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
