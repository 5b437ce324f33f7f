"""A chart as the content of a picture file."""

from __future__ import annotations

import json
from typing import Literal

import altair as alt
import vl_convert

from swiglu_bench.look import theme

GROUND = {False: "#ffffff", True: "#0d1117"}
"""Opaque, so that a picture reads the same wherever it stands."""


def picture(chart: alt.LayerChart | alt.VConcatChart, form: Literal["png", "svg"], dark: bool = False) -> bytes:
    """The chart with its title; PNG at twice its size, for dense screens."""
    spec = json.dumps(chart.to_dict() | {"config": theme(dark, GROUND[dark])})
    if form == "svg":
        return f"{vl_convert.vegalite_to_svg(spec)}\n".encode()
    return vl_convert.vegalite_to_png(spec, scale=2)
