"""Pictures of charts in folders: PNG and SVG, by the extra `report`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from swiglu_bench.rows.run_folder import SPLIT, read_layout

if TYPE_CHECKING:
    from swiglu_bench.show.charts import Picture

NEEDS = ("altair", "vl_convert")
GROUND = {False: "#ffffff", True: "#0d1117"}
"""Opaque, so that a picture reads the same wherever it stands."""
PADDING = {"left": 24, "top": 8, "right": 48, "bottom": 8}
"""Pixels for texts that are wider in the reader's font than in the one that the picture was laid out with."""
FORMS: tuple[Literal["png", "svg"], ...] = ("png", "svg")


class NoPicture(RuntimeError):
    """Why there is none, as part of a sentence."""


def picture(chart: Picture, form: Literal["png", "svg"], dark: bool = False) -> bytes:
    """The chart with its title; PNG at twice its size, for dense screens."""
    import vl_convert

    from swiglu_bench.show.charts import theme

    spec = json.dumps(chart.to_dict() | {"config": theme(dark, GROUND[dark]), "padding": PADDING})
    if form == "svg":
        return f"{vl_convert.vegalite_to_svg(spec)}\n".encode()
    return vl_convert.vegalite_to_png(spec, scale=2)


def save(folder: Path, stem: str, make: Callable[[], Picture]) -> Path:
    """Write STEM.png and STEM.svg of the chart that `make` returns; the former of them.

    Raises NoPicture where the extra `report` is not installed, the folder cannot be written, or `make` raises it.
    """
    missing = [module for module in NEEDS if importlib.util.find_spec(module) is None]
    if missing:
        raise NoPicture(f"{', '.join(missing)} missing; pip install {' '.join(missing)}")
    chart, files = make(), {form: folder / f"{stem}.{form}" for form in FORMS}
    try:
        for form, file in files.items():
            file.write_bytes(picture(chart, form))
    except OSError as error:
        raise NoPicture(f"{folder} cannot be written: {error.strerror}") from None
    return files["png"]


def save_scaling(folder: Path, known: Sequence[str]) -> str:
    """Write scaling.png and scaling.svg of a folder's tp.csv; what was written, or why nothing, in one sentence.

    `known` names the catalogue, for the colours.
    """
    rows = read_layout(folder / SPLIT, "tp")
    counts = {row.ranks for row in rows if row.time_ms is not None}
    single = any(row.single_ms for row in rows)
    if len(counts - {1}) < 2 and not (counts - {1} and (single or 1 in counts)):
        return "No scaling figure: it needs rows with several numbers of GPUs, such as --gpus 1,2,4 makes."

    def make() -> Picture:
        from swiglu_bench.show.charts import scaling, scaling_points

        return scaling(scaling_points(rows), known)

    try:
        return f"Scaling: {save(folder, 'scaling', make)}"
    except NoPicture as reason:
        return f"No scaling figure: {reason}."
