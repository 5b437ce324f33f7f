"""The first thing on a page: who is the fastest at which work, model and token count, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from swiglu_bench.rows.figures import together, token_text
from swiglu_bench.rows.record import grouped, unique
from swiglu_bench.show.charts.style import Style
from swiglu_bench.show.report import ranking
from swiglu_bench.show.report.ranking import Place
from swiglu_bench.show.report.sections import Section
from swiglu_bench.show.report.sentences import overall
from swiglu_bench.show.report.tables import marked

DEEP = 0.5
"""A gain over the baseline of this share has the deepest colour."""


def matrix(sections: Sequence[tuple[Section, Style]]) -> dict[str, Any] | None:
    """Rows by section and shape, a column per token count, and what it says in one sentence. `split` has the rows of
    runs over several GPUs, which are many.

    None where no section names a winner; a section without a winner has no rows, but keeps its number.
    """
    found = [ranking.places(section.rows) for section, _ in sections]
    every = [place for places in found for place in places]
    counts = sorted({place.tokens for place in every})
    titles = [_title(section, [one for one, _ in sections]) for section, _ in sections]
    groups = []
    for number, (places, (section, style)) in enumerate(zip(found, sections, strict=True)):
        by_shape = {
            shape: {place.tokens: _cell(place, style) for place in own}
            for shape, own in grouped(places, attrgetter("shape")).items()
        }
        shapes = sorted(by_shape, key=lambda shape: -len(by_shape[shape]))
        rows = grouped(section.rows, attrgetter("shape"))
        lines = [
            {"shape": shape, "label": marked(shape, rows[shape]), "cells": [by_shape[shape].get(one) for one in counts]}
            for shape in shapes
        ]
        if lines:
            groups.append({"section": number, "title": titles[number], "lines": lines, "split": "-tp" in section.scope})
    if not groups:
        return None
    return {
        "sentence": overall(every),
        "baselines": together(unique(place.baseline for place in every), "or"),
        "counts": [token_text(count) for count in counts],
        "groups": [one for one in groups if not one["split"]],
        "split": [one for one in groups if one["split"]],
    }


def _title(section: Section, every: Sequence[Section]) -> str:
    """What tells a section's rows from those of the others."""
    parts = [f"{section.mode} of {section.scope}"]
    differ = [name for name in ("dtype", "routing", "device") if len({getattr(one, name) for one in every}) > 1]
    parts += [text for name in differ if (text := getattr(section, name))]
    title = ", ".join(parts)
    alike = [one for one in every if one.title == section.title and one.device == section.device]
    return f"{title} ({section.names})" if len(alike) > 1 else title


def _cell(place: Place, style: Style) -> dict[str, Any]:
    """One case; of those that tie, the first of the suite's list. One that stands for others counts as one."""
    first = style.standing(place.first)
    level = place.baseline in first
    name = place.baseline if level else first[0]
    _, low, high = place.ratio
    about = [f"{together(first)} tie for the first place" if first[1:] else f"{name} is the fastest"]
    about += (
        [] if level else [f"{place.speedup:.3f} times the speed of {place.baseline} [{1 / high:.3f}, {1 / low:.3f}]"]
    )
    about += [f"the next, {place.runner_up}, takes {place.longer:.1%} longer"] if place.runner_up else []
    return {
        "tokens": token_text(place.tokens),
        "name": name,
        "ties": len(first) - 1,
        "speedup": "" if level else f"{place.speedup:.2f}×",
        "next": f"+{place.longer:.1%}" if place.runner_up else "",
        "colour": style.colour(name),
        "depth": 0 if level else round(10 + 40 * min(1.0, (place.speedup - 1) / DEEP)),
        "about": "; ".join(about),
    }
