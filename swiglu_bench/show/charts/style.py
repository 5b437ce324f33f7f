"""What every chart shares: a colour per implementation, names, axes with ticks where figures were measured, themes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import numpy as np
from scipy.optimize import isotonic_regression

from swiglu_bench.rows.figures import token_text

PALETTE = (
    "#7d8590", "#a8754a", "#3f86e0", "#159a94", "#dd7a1c", "#b58d14", "#8b9720", "#dc4453", "#9268da", "#d957a6",
    "#2f9e5b", "#5f70dc", "#5d8ba3", "#b24ec6", "#d9705f", "#1b98c2", "#639c1e", "#c2566f", "#a47bb0", "#a9822f",
)  # fmt: skip
"""Told apart on white and on black, at about 3:1 or more against both."""
FORMS = ("circle", "square", "diamond", "triangle-up")
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3))
PER_FORM = 10
"""After so many colours, points have the next form and lines the next dashes: later hues are like earlier ones."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
WIDTH, HEIGHT = 640, 340
CHARACTER = 6.6
"""Pixels that a letter of a label takes, about."""
LABEL_GAP = 14
"""Pixels between two labels at the ends of lines."""


@dataclass(frozen=True)
class Style:
    """How implementations appear, the same in every chart of a report."""

    slots: Mapping[str, int]
    """Implementation -> number of its colour, from 0."""
    alike: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Implementation -> others that it stands for."""
    lesser: frozenset[str] = frozenset()
    """Those that do less than the baseline, and are not ranked."""

    def colour(self, name: str) -> str:
        """As #rrggbb."""
        return PALETTE[self.slots[name] % len(PALETTE)]

    def shape(self, name: str) -> str:
        """Of its points."""
        return FORMS[self.slots[name] // PER_FORM % len(FORMS)]

    def dash(self, name: str) -> tuple[int, ...]:
        """Of its lines."""
        return DASHES[self.slots[name] // PER_FORM % len(DASHES)]

    def label(self, name: str) -> str:
        """The name, and how many others it stands for; a star for one that is not ranked."""
        others = self.alike.get(name, ())
        return f"{name} +{len(others)} alike" if others else f"{name} *" if name in self.lesser else name

    def hidden(self) -> set[str]:
        """Those that another stands for."""
        return {name for others in self.alike.values() for name in others}

    def standing(self, names: Iterable[str]) -> tuple[str, ...]:
        """The names, or those that stand for them, in the order of the colours."""
        stands = {other: name for name, others in self.alike.items() for other in others}
        return tuple(sorted({stands.get(name, name) for name in names}, key=list(self.slots).index))


def slots(names: Iterable[str], known: Sequence[str]) -> dict[str, int]:
    """A colour number per name: a known one always has its own, the others get the first that are free."""
    names = list(dict.fromkeys(names))
    fixed = {name: known.index(name) for name in names if name in known}
    free = (number for number in range(len(names) + len(known)) if number not in fixed.values())
    return fixed | {name: next(free) for name in names if name not in fixed}


def theme(dark: bool, background: str | None = None) -> dict[str, Any]:
    """Vega-Lite's config. A background of None leaves the page's own."""
    text, faint, grid = ("#e6e8eb", "#a4abb5", "#33383f") if dark else ("#1c2026", "#5b636e", "#e3e6ea")
    return {
        "background": background or "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "title": {
            "anchor": "start", "fontSize": 16, "fontWeight": 600, "color": text, "offset": 14,
            "subtitleColor": faint, "subtitleFontSize": 12, "subtitlePadding": 5,
        },
        "axis": {
            "labelColor": faint, "titleColor": faint, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 400,
            "gridColor": grid, "domainColor": faint, "tickColor": faint, "titlePadding": 8, "labelLimit": 400,
        },
        "legend": {"labelColor": text, "symbolOpacity": 1, "labelFontSize": 12},
        "text": {"color": text, "fontSize": 12},
        "rule": {"color": faint},
        "style": {"halo": {"stroke": background or ("#14171b" if dark else "#ffffff"), "strokeWidth": 4}},
    }  # fmt: skip


def token_axis(counts: Iterable[int]) -> alt.X:
    """log2 with a tick at every measured count."""
    ticks = sorted({int(count) for count in counts})
    names = " : ".join(f"datum.value == {count} ? '{token_text(count)}'" for count in ticks)
    return alt.X(
        "tokens:Q",
        title="tokens in a call, log scale",
        scale=alt.Scale(type="log", base=2, domain=[ticks[0], ticks[-1]], nice=False, padding=10),
        axis=alt.Axis(values=ticks, labelExpr=f"{names} : ''", labelOverlap="greedy", labelSeparation=3),
    )


@dataclass(frozen=True)
class Range:
    """The vertical extent of a chart and its ticks, fixed so that labels can be placed by arithmetic."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def scale(self) -> alt.Scale:
        """For Vega-Lite."""
        domain = [self.low, self.high]
        if self.log:
            return alt.Scale(type="log", domain=domain, nice=False)
        return alt.Scale(domain=domain, nice=False, zero=False)

    def pixel(self, value: float, height: int = HEIGHT) -> float:
        """Distance of a value from the top of a chart that is `height` pixels high."""
        place = math.log if self.log else float
        low, high = place(self.low), place(self.high)
        return height * (1 - (place(value) - low) / (high - low))


def log_range(values: Iterable[float]) -> Range:
    """Ticks at 1, 2 and 5 times powers of ten; all three only where they do not crowd."""
    low, high = _ends(values)
    low, high = low / 1.12, high * 1.12
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) <= 8:
            break
    return Range(low, high, ticks, log=True)


def linear_range(values: Iterable[float], *include: float) -> Range:
    """Round ticks, at most nine, and a margin around the values."""
    low, high = _ends([*values, *include])
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin
    step = 10.0 ** math.floor(math.log10(high - low)) / 10
    while (high - low) / step > 9:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    first = math.ceil(low / step)
    return Range(low, high, [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)])


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near as possible to the wanted ones, in their order, at least `gap` apart and within low..high.

    Where they do not all fit, the gap shrinks.
    """
    count = len(wanted)
    steps = min(gap, (high - low) / max(1, count - 1)) * np.arange(count)
    if not count:
        return []
    order = np.argsort(wanted, kind="stable")
    # Without the gaps, the positions nearest to the wanted ones are an isotonic regression.
    nearest = isotonic_regression(np.asarray(wanted, dtype=float)[order] - steps).x
    placed = np.empty(count)
    placed[order] = np.clip(nearest, low, high - steps[-1]) + steps
    return [float(place) for place in placed]


def _ends(values: Iterable[float]) -> tuple[float, float]:
    finite = [float(value) for value in values if math.isfinite(value)]
    return min(finite), max(finite)
