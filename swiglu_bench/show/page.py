"""A report as one HTML file that needs no network: charts, tables and the chart libraries inside it."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from altair.utils.schemapi import debug_mode
from rich.text import Text

from swiglu_bench.machine.sources import standing
from swiglu_bench.rows.figures import size, together, token_text, up_to
from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.record import AuditVerdict, Record, Status, grouped, unique
from swiglu_bench.show import ranking, tables
from swiglu_bench.show.charts import Chart, Style, answers, colours, style_of, theme, training_charts
from swiglu_bench.show.ranking import Winner, workload_of
from swiglu_bench.show.sections import Section, by_work, caption, remarks, sections
from swiglu_bench.show.table import STYLES, Cell, Grid, across, meaning

EXPORT = "window.vegaEmbed = vegaEmbed;"
OPEN = 4
"""Sections of a page that are not folded: the first, which have the most rows."""
MACHINE = ("device", "driver", "cuda", "torch", "triton", "version")
"""What rows say of the machine, where there is no run.json."""
MOST_NAMED = 4
"""Implementations that the first table names of a kind of work."""
BEHIND = "†"
"""Marks runs of other kernels than those of this checkout."""
WORK = {"glu": "x to silu(x Wg) * (x Wu)", "activation": "gate, up to silu(gate) * up", "mlp": "x to out, all of it",
        "experts": "x and its routing to out: sort, products, gate and weighted sum"}  # fmt: skip
WITHOUT_WORK: dict[str, Any] = {"split": False, "won": None, "memory_from": "", "failed": [], "problems": None}
"""What the template asks of every section and a training has none of."""
Spec = dict[str, Any]


@debug_mode(False)  # checking each part of a chart against Vega-Lite's schema takes longer than all else
def page(runs: Sequence[FinishedRun], made_by: str, progress: Callable[[str], object] = str) -> str:
    """The page; `made_by` is the command that makes it, `progress` is told what is being made."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.globals |= {"meaning": meaning, "token_text": token_text}
    numbers, specs = colours(runs), list[Spec]()
    found = [(section, style_of(section, numbers)) for section in by_work(sections(runs))]
    shown = []
    for number, (section, style) in enumerate(found, start=1):
        progress(f"section {number} of {len(found)}: {section.title}")
        shown.append(_section(section, style, specs))
    shown += [_training(run, Style(numbers), specs) for run in runs if run.losses is not None]
    described = (str(run.about["machine"].get("device", "")) for run in runs if "machine" in run.about)
    devices = unique([*(section.device for section, _ in found if section.device), *described])
    shown.sort(key=lambda section: (section["split"], section["kind"] == "verify"))
    name_apart(shown)
    told = [{"name": run.label, "commands": run.commands, "settings": run.about.get("settings") or {}} for run in runs]
    document = {"charts": specs, "themes": {name: theme(name == "dark") for name in ("light", "dark")}}
    data = json.dumps(document, ensure_ascii=False, allow_nan=False, default=str)
    return environment.get_template("page.html").render(
        title=f"SwiGLU on {together(devices)}" if devices else "SwiGLU",
        parts=[part for part in ([s for s in shown if s["split"] is split] for split in (False, True)) if part],
        behind=BEHIND if any(marked_run(run) != run.label for run in runs) else "",
        open=OPEN,
        audits=[audit(run) for run in runs if run.audit],
        machines=machines(runs),
        runs=told,
        made_by=made_by,
        libraries=_libraries(),
        data=data.replace("<", "\\u003c"),  # so that it may stand inside a script element
    )


@functools.cache
def _libraries() -> str:
    import vl_convert

    return vl_convert.javascript_bundle(EXPORT).replace("</script", "<\\/script")


def _section(section: Section, style: Style, specs: list[Spec]) -> dict[str, Any]:
    """What the template shows of a section; its charts go to the end of `specs`."""
    found = list(answers(section, style))
    grids = [figures(shape, rows) for shape, rows in grouped(section.timed, attrgetter("shape")).items()]
    grids += [grid for run in section.runs for grid in tables.workload_grids(section.of(run), workload_of(run.about))]
    return {
        **{name: getattr(section, name) for name in ("kind", "split", "title", "names", "device")},
        "won": won(section, style) if section.kind == "time" else None,
        "work": WORK.get(section.scope, "") or _split(section.rows[0]),
        "runs": together([marked_run(run) for run in section.runs]),
        "memory_from": together(section.memory_from),
        "headline": caption(section),
        "remarks": list(remarks(section)),
        "charts": [_charts(charts[0][1].title.text, charts, specs) for _, charts, _ in found if charts],
        "absent": unique(reason for _, _, reason in found if reason),
        "grids": grids,
        **_problems(section.rows),
    }


def _split(row: Record) -> str:
    """How the work of a row of `tp` is split."""
    if row.kind != "tp":
        return ""
    tokens = "its part of the tokens" if row.sequence_parallel else "all tokens"
    return f"{row.ranks} ranks, each with a part of the {'experts' if row.experts else 'weights'} and with {tokens}"


def _training(run: FinishedRun, style: Style, specs: list[Spec]) -> dict[str, Any]:
    rows = run.summaries
    first, settings = next(iter(rows), None), run.about.get("settings", {})
    workload = settings.get("workload", {})
    work = [f"blocks {workload['hidden']}x{workload['intermediate']}"] if workload else []
    work += [f"{first.steps} steps from {first.seeds} seed{'s' * (first.seeds != 1)}"] if first and first.steps else []
    work += [str(settings["data"])] if settings.get("data") else []
    charts = list(training_charts(run, style))
    ended = sum(row.final_loss is not None for row in rows)
    return WITHOUT_WORK | {
        "kind": "training",
        "title": ", ".join(filter(None, [f"training of {first.model if first else ''}", settings.get("dtype", "")])),
        "names": run.label,
        "work": "; ".join(work),
        "device": first.device if first else "",
        "runs": marked_run(run),
        "headline": f"{ended} of {len(rows)} trained to the end.",
        "remarks": list(tables.training_remarks(rows)),
        "charts": [_charts(question, [("", chart)], specs) for question, chart in charts if not isinstance(chart, str)],
        "absent": [chart for _, chart in charts if isinstance(chart, str)],
        "grids": list(tables.training_grids(rows)),
    }


def _charts(question: str, charts: Sequence[tuple[str, Chart]], specs: list[Spec]) -> dict[str, Any]:
    """A question with its charts, which go to `specs` without what the page says or decides itself: title and width."""
    options = [{"text": text, "chart": number} for number, (text, _) in enumerate(charts, start=len(specs))]
    for _, chart in charts:
        whole = chart.to_dict(validate=False).items()
        spec = {name: of for name, of in whole if name not in {"title", "config", "$schema"}}
        spec["usermeta"]["question"] = question
        specs.append(spec | {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}})
    return {"question": question, "about": specs[-1]["usermeta"]["about"], "options": options}


def figures(shape: str, rows: Sequence[Record]) -> Grid:
    """Time and ratio of every case of a shape; in a cell the time, and below it the ratio and the verdict."""
    counts = sorted({row.tokens for row in rows})

    def cell(row: Record) -> Cell:
        text = "\n".join([row.shown("time_ms"), f"{tables.compared(row)} {row.verdict}".strip()])
        return Text(text, STYLES.get(row.verdict, ""))

    grid = across("tokens", rows, counts, cell)
    title = f"{shape}: time in ms, ratio to the baseline ± half its 95% interval"
    return Grid(["tokens", *map(token_text, counts)], grid.rows, title)


def _problems(rows: Sequence[Record]) -> dict[str, Any]:
    """Every row without figures, those with the same status and reason together, failures first; who failed."""
    found = grouped((row for row in rows if row.status is not Status.OK), attrgetter("status", "reason"))
    lines, failed = list[list[Cell]](), list[str]()
    for (status, reason), same in sorted(found.items(), key=lambda item: item[0][0] is Status.SKIPPED):
        names = ", ".join(unique(row.implementation for row in same))
        where = "; ".join(
            f"{shape}, {dtype}, {', '.join(map(token_text, sorted({row.tokens for row in own})))} tokens"
            for (shape, dtype), own in grouped(same, attrgetter("shape", "dtype")).items()
        )
        lines.append([Text(status, STYLES[status]), names, where, reason])
        failed += [f"{status}: {names}"] if status is not Status.SKIPPED else []
    heads = ("status", "implementation", "cases", "reason")
    return {"failed": failed, "problems": Grid(heads, lines, "Without figures, and why") if lines else None}


def name_apart(shown: Sequence[dict[str, Any]]) -> None:
    """Give each section a title that no other has: with its device and its runs, as far as those are needed."""
    for more in ("device", "names"):
        for same in grouped(shown, itemgetter("title")).values():
            if len({section[more] for section in same}) > 1:
                for section in same:
                    section["title"] += f" ({section[more]})"
    for number, section in enumerate(shown):
        section["id"] = f"section-{number}"
        section["title"] = section["title"][:1].upper() + section["title"][1:]


def won(section: Section, style: Style) -> dict[str, Any] | None:
    """Who is the fastest at each case: rows by shape, a column for each token count, and the same in one line.

    None where the section has no winner.
    """
    places = list(ranking.places(section.rows))
    if not places:
        return None
    counts = sorted({place.tokens for place in places})
    rows = grouped(section.rows, attrgetter("shape"))
    lines = []
    for shape, own in grouped(places, attrgetter("shape")).items():
        cells = {place.tokens: _cell(place, style) for place in own}
        lines.append({"shape": shape, "label": marked(shape, rows[shape]), "cells": list(map(cells.get, counts))})
    first = Counter(name for place in places for name in place.first).most_common()
    ends = [place.speedups for place in places]
    return {
        "cases": len(places), "shapes": [line["label"] for line in lines], "counts": list(map(token_text, counts)),
        "lines": lines, "baseline": section.baseline, "first": first[:MOST_NAMED], "more": len(first[MOST_NAMED:]),
        "times": up_to(min(low for low, _ in ends), max(high for _, high in ends)),
    }  # fmt: skip


def _cell(place: Winner, style: Style) -> dict[str, Any]:
    """A cell of the winners; those that tie are named in the order of the suite's list, the first gives the colour."""
    first = sorted(place.first, key=list(style.slots).index)
    level = place.baseline in first
    colour = style.colour(place.baseline if level else first[0])
    return {"place": place, "first": first, "level": level, "colour": colour, "times": up_to(*place.speedups)}


def audit(run: FinishedRun) -> dict[str, Any]:
    """The contract matrix of each scope, and the reasons of all verdicts."""
    counts = Counter(cell.verdict for cell in run.audit)
    checks = unique(cell.check for cell in run.audit)
    reasons: list[list[Cell]] = [
        [Text(verdict, tables.SYMBOLS[verdict][1]), *others] for verdict, *others in tables.contract_reasons(run.audit)
    ]
    return {
        "run": run.label,
        "matrices": list(tables.contract_grids(run.audit, dict(zip(checks, checks, strict=True)))),
        "counts": ", ".join(f"{counts[verdict]} {verdict}" for verdict in AuditVerdict),
        "symbols": {verdict: symbol for verdict, (symbol, _) in tables.SYMBOLS.items()},
        "reasons": Grid(("verdict", "check", "reason", "implementation"), reasons) if reasons else None,
    }


def machines(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """What differs between the machines and versions of runs, a line for those that agree; and what does not differ."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        described = unique(tuple((name, getattr(row, name)) for name in MACHINE) for row in run.records)
        for machine in [run.about["machine"]] if "machine" in run.about else map(dict, described):
            facts = tuple(_fact(name, value) for name, value in machine.items() if value not in (None, ""))
            found.setdefault(facts, []).append(marked_run(run))
    lines = [(dict(facts), unique(names)) for facts, names in found.items()]
    every = unique(name for facts, _ in lines for name in facts)
    values = {name: unique(facts[name] for facts, _ in lines if name in facts) for name in every}
    differ = [name for name, own in values.items() if len(own) > 1]
    rows = [[", ".join(names), *(facts.get(name, "") for name in differ)] for facts, names in lines]
    return {
        "differ": Grid(["runs", *differ], rows) if len(rows) > 1 else None,
        "same": {name: own[0] for name, own in values.items() if name not in differ},
    }


def marked(name: str, rows: Iterable[Record], version: object = "") -> str:
    """The name, with a mark where rows, or a version, are of other kernels than those of this checkout."""
    versions = {version, *(row.version for row in rows)}
    return name + BEHIND if any(standing(str(of))[1] for of in versions) else name


def marked_run(run: FinishedRun) -> str:
    """The name of a run, with such a mark."""
    return marked(run.label, run.records, run.about.get("machine", {}).get("version", ""))


def _fact(name: str, value: Any) -> tuple[str, str]:
    """A field of run.json's machine with its unit beside the figure instead of in the name."""
    if name == "version":
        return name, " ".join(filter(None, (str(value), standing(str(value))[0])))
    if name.endswith("_bytes") and isinstance(value, int):
        return name.removesuffix("_bytes").replace("_", " "), size(value)
    if name.endswith("_w") and isinstance(value, int | float):
        return name.removesuffix("_w").replace("_", " "), f"{value:g} W"
    return name.replace("_", " "), str(value)
