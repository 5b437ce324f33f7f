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


def picture(chart: Picture, form: Literal["png", "svg"], dark: bool = False) -> bytes:
    """The chart with its title; PNG at twice its size, for dense screens."""
    import vl_convert

    from swiglu_bench.show.charts import theme

    spec = json.dumps(chart.to_dict() | {"config": theme(dark, GROUND[dark]), "padding": PADDING})
    if form == "svg":
        return f"{vl_convert.vegalite_to_svg(spec)}\n".encode()
    return vl_convert.vegalite_to_png(spec, scale=2)


def save(folder: Path, stem: str, make: Callable[[], Picture | str], done: str, lacking: str) -> str:
    """Write STEM.png and STEM.svg of the chart that `make` returns; a sentence: what is `done`, or `lacking` and why.

    It is lacking where `make` returns a reason, the extra `report` is not installed, or the folder cannot be written.
    """
    missing = [module for module in NEEDS if importlib.util.find_spec(module) is None]
    if missing:
        return f"{lacking}: {', '.join(missing)} missing; pip install {' '.join(missing)}."
    if isinstance(chart := make(), str):
        return f"{lacking}: {chart}."
    try:
        for form in FORMS:
            (folder / f"{stem}.{form}").write_bytes(picture(chart, form))
    except OSError as error:
        return f"{lacking}: {folder} cannot be written: {error.strerror}."
    return f"{done}: {folder / f'{stem}.png'}"


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

    return save(folder, "scaling", make, "Scaling", "No scaling figure")
