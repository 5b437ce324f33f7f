"""A report as one HTML file that needs no network: words, charts, tables and the chart libraries inside it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from swiglu_bench.charts.style import FORMS, Style, slots, theme, token_text
from swiglu_bench.charts.training import dash
from swiglu_bench.report import charts, memory_charts, ranking, sentences, tables, training
from swiglu_bench.report.frames import groups, unique
from swiglu_bench.report.load import ReportedRun
from swiglu_bench.report.points import NoChart
from swiglu_bench.report.sections import WORK, Section, sections
from swiglu_bench.rows.training_run import Training
from swiglu_bench.writers.training_tables import grids

EXPORT = "window.vegaEmbed = vegaEmbed;"
"""What of the chart libraries the page's own script uses."""
Draw = Callable[[pd.DataFrame, Style], alt.LayerChart]


@dataclass(frozen=True)
class Question:
    """What one kind of chart answers."""

    name: str
    draw: Draw
    each: tuple[str, ...]
    """Columns whose values have a chart each: of shape, dtype and tokens."""


QUESTIONS = {
    "time": (
        Question("speed-up", charts.speedup, ("shape",)),
        Question("fastest", charts.crossover, ()),
        Question("time", charts.time, ("shape",)),
        Question("limit", charts.limit, ("shape",)),
        Question("memory-and-time", memory_charts.pareto, ("shape", "tokens")),
        Question("error", charts.error, ("dtype",)),
    ),
    "memory": (
        Question("memory", memory_charts.memory, ("shape", "tokens")),
        Question("error", charts.error, ("dtype",)),
    ),
    "verify": (Question("error", charts.error, ("dtype",)),),
}
"""What each kind of section asks, the most important first."""


@dataclass(frozen=True)
class Drawn:
    """The charts of one question, or why there is none."""

    name: str
    charts: list[tuple[str, alt.LayerChart]] = field(default_factory=list)
    """What tells them apart, and the chart."""
    reason: str = ""


def draw(section: Section, style: Style) -> Iterator[Drawn]:
    """Every question of a section, answered or with the reason why not."""
    for question in QUESTIONS[section.kind]:
        found, reasons = [], []
        for text, rows in _each(section.rows, question.each):
            try:
                found.append((text, question.draw(rows, style)))
            except NoChart as error:
                reasons.append(str(error))
        yield Drawn(question.name, found, reasons[0] if reasons and not found else "")


def colours(runs: Sequence[ReportedRun]) -> dict[str, int]:
    """The number of each implementation's colour: one in all sections."""
    from swiglu_bench.implementations import CATALOGUE

    names = [name for run in runs for name in run.implementations]
    return slots(names, [implementation.name for implementation in CATALOGUE])


def styles(found: Sequence[Section], numbers: Mapping[str, int]) -> list[Style]:
    """How each section is drawn."""
    return [
        Style(
            numbers,
            ranking.alike(section.rows) if section.kind == "time" else {},
            frozenset(section.ok.loc[~section.ok["comparable"].astype(bool), "implementation"]),
        )
        for section in found
    ]


def page(runs: Sequence[ReportedRun], made_by: str) -> str:
    """The page; `made_by` is the command that makes it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    found, numbers = sections(runs), colours(runs)
    specs: list[dict[str, Any]] = []
    shown = [_section(one, style, specs) for one, style in zip(found, styles(found, numbers), strict=True)]
    shown += [_training(run.name, run.training, Style(numbers), specs) for run in runs if run.training]
    here = Path(__file__).parent
    return environment.get_template("page.html").render(
        title=_title(found, runs),
        sections=[{"id": f"section-{number}", **section} for number, section in enumerate(shown)],
        audits=[tables.audit(run) for run in runs if len(run.audit)],
        machines=tables.machines(runs),
        runs=[
            {"name": run.name, "path": str(run.path), "commands": run.commands, "settings": _settings(run)}
            for run in runs
        ],
        made_by=made_by,
        style=(here / "page.css").read_text(encoding="utf-8"),
        script=(here / "page.js").read_text(encoding="utf-8"),
        libraries=_libraries(),
        data=_json({"charts": specs, "themes": {"light": theme(dark=False), "dark": theme(dark=True)}}),
    )


@functools.cache
def _libraries() -> str:
    """Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert

    return vl_convert.javascript_bundle(EXPORT).replace("</script", "<\\/script")


def _section(section: Section, style: Style, specs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the template shows of a section; its charts go to the end of `specs`."""
    blocks = []
    for answer in draw(section, style):
        block: dict[str, Any] = {"reason": answer.reason, "options": [], "question": answer.name}
        for text, chart in answer.charts:
            spec = chart.to_dict()
            block["question"], block["about"] = spec["title"]["text"], spec["usermeta"]["about"]
            block["options"].append({"text": text, "chart": len(specs)})
            specs.append(_for_page(spec))
        blocks.append(block)
    drawn = section.rows[section.rows["status"].isin(["ok", "incorrect"])]
    timed = section.ok[section.ok["time_ms"].notna()]
    return {
        "title": section.title,
        "work": WORK.get(section.scope, ""),
        "device": section.device,
        "run": section.run.name,
        "memory_from": section.memory_from,
        "headline": sentences.headline(section, style),
        "sentences": sentences.sentences(section, style),
        "names": [_chip(name, style) for name in unique(drawn["implementation"])],
        "blocks": blocks,
        "tables": [tables.figures(shape, rows) for (shape,), rows in groups(timed, "shape")],
        "grids": [],
        "problems": tables.problems(section.rows),
    }


def _training(run: str, trained: Training, style: Style, specs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the template shows of a training run, in the same places."""
    hidden = training.hidden(trained)
    blocks: list[dict[str, Any]] = []
    for question, about, chart in training.charts(trained, style):
        if isinstance(chart, str):
            blocks.append({"reason": chart, "question": question, "about": about, "options": []})
            continue
        options = [{"text": "", "chart": len(specs)}]
        blocks.append({"reason": "", "question": question, "about": about, "options": options})
        specs.append(_for_page(chart.to_dict()))
    said = training.sentences(trained)
    return {
        **training.context(trained),
        "run": run,
        "memory_from": "",
        "headline": said[0],
        "sentences": said,
        "names": [
            _chip(name, style) | {"shown": name not in hidden, "dash": _dashes(dash(name, style)), "point": ""}
            for name in training.drawn(trained)
        ],
        "blocks": blocks,
        "tables": [],
        "grids": list(grids(trained.summaries)),
        "problems": [],
    }


def _each(rows: pd.DataFrame, columns: tuple[str, ...]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows in the parts that have a chart each, the largest token count first, with what tells them apart."""
    if not columns:
        yield "", rows
        return
    several = [column for column in columns if rows[column].nunique() > 1]
    parts = sorted(groups(rows, *columns), key=lambda part: -part[0][-1] if "tokens" in columns else 0)
    for key, part in parts:
        named = dict(zip(columns, key, strict=True))
        texts = [str(named["shape"])] if "shape" in several else []
        texts += [str(named["dtype"])] if "dtype" in several else []
        texts += [f"{token_text(named['tokens'])} tokens"] if "tokens" in several else []
        yield ", ".join(texts), part


def _for_page(spec: dict[str, Any]) -> dict[str, Any]:
    """A chart without what the page says or decides itself: title, theme, width."""
    for name in ("title", "config", "$schema"):
        spec.pop(name, None)
    return (
        spec
        if "columns" in spec["usermeta"]
        else spec | {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    )


def _chip(name: str, style: Style) -> dict[str, Any]:
    point = "square" if FORMS.index(style.shape(name)) % 2 == 1 else "circle"
    return {
        "name": name, "colour": style.colour(name), "shown": name not in style.hidden(), "label": style.label(name),
        "dash": _dashes(style.dash(name)), "point": point,
    }  # fmt: skip


def _dashes(lengths: Sequence[int]) -> str:
    return " ".join(map(str, lengths))


def _settings(run: ReportedRun) -> str:
    settings = run.about.get("settings")
    return ", ".join(_facts(settings)) if isinstance(settings, dict) else ""


def _facts(settings: Mapping[str, Any]) -> Iterator[str]:
    """Each setting that was given; those of a model as its own."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _facts({one: text for one, text in value.items() if one not in settings})
        elif value not in ("", None):
            yield f"{name} {value}"


def _title(found: Sequence[Section], runs: Sequence[ReportedRun]) -> str:
    devices = dict.fromkeys(section.device for section in found if section.device)
    devices |= dict.fromkeys(str(run.about["machine"].get("device", "")) for run in runs if "machine" in run.about)
    return f"SwiGLU on {sentences.together(list(devices))}" if devices else "SwiGLU"


def _json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).replace("<", "\\u003c")
