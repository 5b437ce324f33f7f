"""A report as one HTML file that needs no network: sentences, charts, tables and the chart libraries inside it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from swiglu_bench.rows.figures import together
from swiglu_bench.rows.record import Status, grouped, unique
from swiglu_bench.rows.training import FinishedTraining
from swiglu_bench.show.charts.style import FORMS, Style, theme
from swiglu_bench.show.charts.training import dash
from swiglu_bench.show.report import ranking, sentences, tables, training
from swiglu_bench.show.report.load import ReportedRun
from swiglu_bench.show.report.matrix import matrix
from swiglu_bench.show.report.questions import answers, colours, style_of
from swiglu_bench.show.report.sections import WORK, Section, by_work, sections
from swiglu_bench.show.workload import workload_of
from swiglu_bench.show.writers.training_tables import grids
from swiglu_bench.show.writers.workload_tables import grids as workload_grids

HERE = Path(__file__).parent
EXPORT = "window.vegaEmbed = vegaEmbed;"
"""What of the chart libraries the page's own script uses."""
OPEN = 4
"""Sections that are not folded: the first of the page, which have the most rows."""
Spec = dict[str, Any]


@debug_mode(False)  # checking each part of a chart against Vega-Lite's schema takes longer than all else
def page(runs: Sequence[ReportedRun], made_by: str, progress: Callable[[str], object] = str) -> str:
    """The page; `made_by` is the command that makes it, `progress` is told what is being made."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    numbers, specs = colours(runs), list[Spec]()
    found = [(section, style_of(section, numbers)) for section in by_work(sections(runs))]
    shown = []
    for number, (section, style) in enumerate(found, start=1):
        progress(f"section {number} of {len(found)}: {section.title}")
        shown.append(_section(section, style, specs))
    trained = [_training(run, run.training, Style(numbers), specs) for run in runs if run.training]
    devices = unique(section.device for section, _ in found if section.device)
    devices = unique(
        [*devices, *(str(run.about["machine"].get("device", "")) for run in runs if "machine" in run.about)]
    )
    return environment.get_template("page.html").render(
        title=f"SwiGLU on {together(devices)}" if devices else "SwiGLU",
        matrix=matrix([one for one in found if one[0].kind == "time"]),
        behind=tables.BEHIND if any(tables.marked_run(run) != run.name for run in runs) else "",
        sections=sorted([*shown, *trained], key=lambda one: one["kind"] == "verify"),
        open=OPEN,
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
    found = list(answers(section, style))
    drawn = unique(row.implementation for row in section.rows if row.status in {Status.OK, Status.INCORRECT})
    by_shape = grouped(section.timed, attrgetter("shape"))
    places = ranking.places(section.rows) if section.kind == "time" else []
    said, remarks = sentences.sentences(section, style), sentences.remarks(section)
    first = sentences.overall(places) if places else said[0]
    return {
        "kind": section.kind,
        "title": section.title,
        "work": WORK.get(section.scope, ""),
        "device": section.device,
        "runs": together([tables.marked_run(run) for run in section.runs]),
        "memory_from": together(section.memory_from),
        "headline": first,
        "remarks": [one for one in remarks if one != first],
        "more": [one for one in said if one not in (first, *remarks)],
        "names": [_chip(name, style) for name in drawn],
        "charts": [_charts(one.charts[0][1].title.text, one.charts, specs) for one in found if one.charts],
        "absent": unique(one.reason for one in found if one.reason),
        "tables": [tables.figures(shape, rows) for shape, rows in by_shape.items()],
        "grids": [grid for run in section.runs for grid in workload_grids(section.of(run), workload_of(run.about))],
        "problems": tables.problems(section.rows),
    }


def _training(run: ReportedRun, trained: FinishedTraining, style: Style, specs: list[Spec]) -> dict[str, Any]:
    """What the template shows of a training run, in the same places."""
    hidden, said = training.hidden(trained), training.sentences(trained)
    drawn, absent = list[dict[str, Any]](), list[str]()
    for question, about, chart in training.charts(trained, style):
        if isinstance(chart, str):
            absent.append(chart)
        else:
            chart.usermeta = {"about": about}
            drawn.append(_charts(question, [("", chart)], specs))
    return {
        **training.context(trained),
        "kind": "training",
        "runs": tables.marked_run(run),
        "memory_from": "",
        "headline": said[0],
        "remarks": said[1:2],
        "more": said[2:],
        "names": [
            _chip(name, style) | {"shown": name not in hidden, "dash": dash(name, style), "point": ""}
            for name in training.drawn(trained)
        ],
        "charts": drawn,
        "absent": absent,
        "tables": [],
        "grids": list(grids(trained.summaries)),
        "problems": [],
    }


def _charts(question: str, charts: Sequence[tuple[str, alt.LayerChart]], specs: list[Spec]) -> dict[str, Any]:
    """A question with its charts."""
    options: list[dict[str, Any]] = [
        {"text": text, "chart": number} for number, (text, _) in enumerate(charts, start=len(specs))
    ]
    specs += [_for_page(chart.to_dict(validate=False), question) for _, chart in charts]
    return {"question": question, "about": specs[options[0]["chart"]]["usermeta"]["about"], "options": options}


def _for_page(spec: Spec, question: str) -> Spec:
    """A chart without what the page says or decides itself: title, theme, width."""
    spec = {name: value for name, value in spec.items() if name not in {"title", "config", "$schema"}}
    meta = spec["usermeta"] | {"question": question}
    return spec | {"usermeta": meta, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}


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
