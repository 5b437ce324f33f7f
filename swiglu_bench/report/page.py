"""A report as one HTML file that needs no network: sentences, charts, tables and the chart libraries inside it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import altair as alt

from swiglu_bench.charts.style import FORMS, Style, theme
from swiglu_bench.charts.training import dash
from swiglu_bench.report import sentences, tables, training
from swiglu_bench.report.load import ReportedRun
from swiglu_bench.report.questions import answers, colours, style_of
from swiglu_bench.report.sections import WORK, Section, sections
from swiglu_bench.rows.grouping import grouped, unique
from swiglu_bench.rows.quantities import together
from swiglu_bench.rows.record import Status
from swiglu_bench.rows.training import FinishedTraining
from swiglu_bench.rows.workload import workload_of
from swiglu_bench.writers.training_tables import grids
from swiglu_bench.writers.workload_tables import grids as workload_grids

HERE = Path(__file__).parent
EXPORT = "window.vegaEmbed = vegaEmbed;"
"""What of the chart libraries the page's own script uses."""
Spec = dict[str, Any]


def page(runs: Sequence[ReportedRun], made_by: str) -> str:
    """The page; `made_by` is the command that makes it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    found, numbers, specs = sections(runs), colours(runs), list[Spec]()
    shown = [_section(one, style_of(one, numbers), specs) for one in found]
    shown += [_training(run.name, run.training, Style(numbers), specs) for run in runs if run.training]
    devices = unique(section.device for section in found if section.device)
    devices = unique(
        [*devices, *(str(run.about["machine"].get("device", "")) for run in runs if "machine" in run.about)]
    )
    return environment.get_template("page.html").render(
        title=f"SwiGLU on {together(devices)}" if devices else "SwiGLU",
        sections=shown,
        audits=[tables.audit(run) for run in runs if run.audit],
        machines=tables.machines(runs),
        runs=[{"name": run.name, "commands": run.commands, "settings": _settings(run)} for run in runs],
        made_by=made_by,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
        libraries=_libraries(),
        data=_json({"charts": specs, "themes": {"light": theme(dark=False), "dark": theme(dark=True)}}),
    )


@functools.cache
def _libraries() -> str:
    """Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert

    return vl_convert.javascript_bundle(EXPORT).replace("</script", "<\\/script")


def _section(section: Section, style: Style, specs: list[Spec]) -> dict[str, Any]:
    """What the template shows of a section; its charts go to the end of `specs`."""
    blocks = []
    for answer in answers(section, style):
        block = _block(answer.name, answer.reason, answer.charts, specs)
        if block["options"]:
            first = answer.charts[0][1]
            block |= {"question": first.title.text, "about": first.usermeta["about"]}
        blocks.append(block)
    drawn = unique(row.implementation for row in section.rows if row.status in {Status.OK, Status.INCORRECT})
    by_shape = grouped(section.timed, attrgetter("shape"))
    return {
        "title": section.title,
        "work": WORK.get(section.scope, ""),
        "device": section.device,
        "run": section.run.name,
        "memory_from": section.memory_from,
        "headline": sentences.headline(section, style),
        "sentences": sentences.sentences(section, style),
        "names": [_chip(name, style) for name in drawn],
        "blocks": blocks,
        "tables": [tables.figures(shape, rows) for shape, rows in by_shape.items()],
        "grids": list(workload_grids(section.rows, workload_of(section.run.about))),
        "problems": tables.problems(section.rows),
    }


def _training(run: str, trained: FinishedTraining, style: Style, specs: list[Spec]) -> dict[str, Any]:
    """What the template shows of a training run, in the same places."""
    hidden, said = training.hidden(trained), training.sentences(trained)
    blocks = []
    for question, about, chart in training.charts(trained, style):
        reason, charts = (chart, []) if isinstance(chart, str) else ("", [("", chart)])
        blocks.append(_block(question, reason, charts, specs) | {"about": about})
    return {
        **training.context(trained),
        "run": run,
        "memory_from": "",
        "headline": said[0],
        "sentences": said,
        "names": [
            _chip(name, style) | {"shown": name not in hidden, "dash": dash(name, style), "point": ""}
            for name in training.drawn(trained)
        ],
        "blocks": blocks,
        "tables": [],
        "grids": list(grids(trained.summaries)),
        "problems": [],
    }


def _block(
    question: str, reason: str, charts: Sequence[tuple[str, alt.LayerChart]], specs: list[Spec]
) -> dict[str, Any]:
    """A question with its charts, or the reason why there are none."""
    options = [{"text": text, "chart": number} for number, (text, _) in enumerate(charts, start=len(specs))]
    specs += [_for_page(chart.to_dict()) for _, chart in charts]
    return {"question": question, "about": "", "reason": reason, "options": options}


def _for_page(spec: Spec) -> Spec:
    """A chart without what the page says or decides itself: title, theme, width."""
    spec = {name: value for name, value in spec.items() if name not in {"title", "config", "$schema"}}
    if "columns" in spec["usermeta"]:
        return spec
    return spec | {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}


def _chip(name: str, style: Style) -> dict[str, Any]:
    """An entry of the list of names, which is the charts' legend."""
    point = "square" if FORMS.index(style.shape(name)) % 2 == 1 else "circle"
    return {
        "name": name, "colour": style.colour(name), "shown": name not in style.hidden(), "label": style.label(name),
        "dash": style.dash(name), "point": point,
    }  # fmt: skip


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


def _json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).replace("<", "\\u003c")
