"""A chart as the content of a picture file, and as the two files of a run's folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import altair as alt

NEEDS = ("altair", "vl_convert")
GROUND = {False: "#ffffff", True: "#0d1117"}
"""Opaque, so that a picture reads the same wherever it stands."""
PADDING = {"left": 24, "top": 8, "right": 48, "bottom": 8}
"""Pixels for texts that are wider in the reader's font than in the one that the picture was laid out with."""
FORMS: tuple[Literal["png", "svg"], ...] = ("png", "svg")


class NoPicture(RuntimeError):
    """Why there is none, as part of a sentence."""


def picture(chart: alt.LayerChart | alt.VConcatChart, form: Literal["png", "svg"], dark: bool = False) -> bytes:
    """The chart with its title; PNG at twice its size, for dense screens."""
    import vl_convert

    from swiglu_bench.show.charts.style import theme

    spec = json.dumps(chart.to_dict() | {"config": theme(dark, GROUND[dark]), "padding": PADDING})
    if form == "svg":
        return f"{vl_convert.vegalite_to_svg(spec)}\n".encode()
    return vl_convert.vegalite_to_png(spec, scale=2)


def save(folder: Path, stem: str, make: Callable[[], alt.VConcatChart]) -> Path:
    """Write STEM.png and STEM.svg of the chart that `make` returns; the former of them.

    Raises NoPicture where the extra `report` is not installed, the folder cannot be written, or `make` raises it.
    """
    missing = [module for module in NEEDS if importlib.util.find_spec(module) is None]
    if missing:
        raise NoPicture(f"{', '.join(missing)} missing; pip install 'swiglu-bench[report]'")
    chart, files = make(), {form: folder / f"{stem}.{form}" for form in FORMS}
    try:
        for form, file in files.items():
            file.write_bytes(picture(chart, form))
    except OSError as error:
        raise NoPicture(f"{folder} cannot be written: {error.strerror}") from None
    return files["png"]
