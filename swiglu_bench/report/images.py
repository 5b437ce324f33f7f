"""The charts of a report as PNG or SVG files, for papers and documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Literal

import altair as alt
import vl_convert

from swiglu_bench.report.load import Run
from swiglu_bench.report.look import theme
from swiglu_bench.report.page import draw, looks
from swiglu_bench.report.sections import Section, sections

GROUND = {False: "#ffffff", True: "#0d1117"}
"""Opaque, so that a picture reads the same wherever it stands."""


def charts_of(runs: Sequence[Run]) -> Iterator[tuple[str, alt.LayerChart | str]]:
    """A file name without its ending, and the chart or why there is none; no name comes twice."""
    found, taken = sections(runs), set[str]()
    for section, look in zip(found, looks(found), strict=True):
        for drawn in draw(section, look):
            stem = _stem(section, drawn.name)
            if drawn.reason:
                yield stem, drawn.reason
            for text, chart in drawn.charts:
                name = "-".join(part for part in (stem, _slug(text)) if part)
                while name in taken:
                    name += "-again"
                taken.add(name)
                yield name, chart


def picture(chart: alt.LayerChart | alt.VConcatChart, form: Literal["png", "svg"], dark: bool = False) -> bytes:
    """The chart with its title as the content of a file; PNG at twice its size, for dense screens."""
    spec = json.dumps(chart.to_dict() | {"config": theme(dark, GROUND[dark])})
    if form == "svg":
        return f"{vl_convert.vegalite_to_svg(spec)}\n".encode()
    return vl_convert.vegalite_to_png(spec, scale=2)


def _stem(section: Section, question: str) -> str:
    """Run, scope, mode, dtype and question, without saying a word twice."""
    what = section.mode if section.kind == "time" else section.kind
    parts = [section.run.name, section.scope, what, section.dtype, question]
    return "-".join(dict.fromkeys(map(_slug, parts)))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
