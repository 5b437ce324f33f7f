"""Figures of documents made from a run, so that no picture is older than its figures.

A document holds a marked block; `python -m swiglu_bench.report.figures README.md` (`make figures`) makes the pictures
again, in docs/figures, and fills the block:

    <!-- figure: results/nvidia-h200/2026-11-21/forward speed-up eager compile liger fused -->
    <!-- end -->

After the run comes the question, as `report --svg` names it, then the implementations; without any, all are drawn. The
question to a CSV of `swiglu-bench noise` is `pairs`, to the tp.csv of `swiglu-bench tp` `scaling`, with rows chosen as
`mode=step`. A block `<!-- sentence: RUN names -->` gets what the report says in short about the run, and no picture.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from swiglu_bench.charts.export import picture
from swiglu_bench.charts.scaling import points_of, scaling
from swiglu_bench.report import noise_chart, sentences, training
from swiglu_bench.report.images import Picture, charts_of
from swiglu_bench.report.load import ReportedRun, load, only
from swiglu_bench.report.page import colours, styles
from swiglu_bench.report.sections import sections
from swiglu_bench.rows import csv_table, run_folder
from swiglu_bench.rows.ranks import COLUMNS
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.writers.markdown import parse

BLOCK = re.compile(
    r"(<!-- figure: (?P<run>\S+) (?P<question>[\w-]+)(?P<names>[^>]*) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)
SENTENCE = re.compile(r"(<!-- sentence: (?P<run>\S+)(?P<names>[^>]*) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def fill(document: Path) -> tuple[str, dict[Path, bytes]]:
    """The document's text with every block made again, and the pictures; paths are relative to the document."""
    inside = document.parent.name == "docs" and not (document.parent / "docs").exists()  # a checkout may be called docs
    folder = Path("figures" if inside else "docs/figures")
    pictures: dict[Path, bytes] = {}

    def replace(match: re.Match[str]) -> str:
        source = document.parent / match["run"]
        chart: Picture
        if match["question"] == "scaling":
            name, chart, said = _scaling(source, match["names"])
        elif source.suffix == ".csv":
            name, (chart, said) = f"{source.stem}-{match['question']}", noise_chart.pairs(source)
        else:
            name, chart, said = _of_run(document, source, match["question"], match["names"].split())
        files = {dark: folder / f"{name}{'-dark' if dark else ''}.svg" for dark in (False, True)}
        for dark, file in files.items():
            pictures[document.parent / file] = picture(chart, "svg", dark)
        return (
            f'{match[1]}<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{files[True].as_posix()}">\n'
            f'  <img src="{files[False].as_posix()}" alt="{html.escape(said)}">\n</picture>\n{match["end"]}'
        )

    def say(match: re.Match[str]) -> str:
        return f"{match[1]}{_said(_chosen(document.parent / match['run'], match['names'].split()))}\n{match['end']}"

    return SENTENCE.sub(say, BLOCK.sub(replace, document.read_text(encoding="utf-8"))), pictures


def _chosen(source: Path, names: list[str]) -> list[ReportedRun]:
    runs = [load(source)]
    return only(runs, names) if names else runs


def _of_run(document: Path, source: Path, question: str, names: list[str]) -> tuple[str, Picture, str]:
    """The one chart of a run that answers a question: its name, itself, and what it shows in a sentence."""
    runs = _chosen(source, names)
    found = {name: chart for name, chart in charts_of(runs) if name.endswith(f"-{question}")}
    if len(found) != 1:
        raise BadInput(f"{document}: {source} has {len(found)} charts {question!r}; a figure is one.")
    ((name, chart),) = found.items()
    if isinstance(chart, str):
        raise BadInput(f"{document}: {source} has no chart {question!r}: {chart}")
    return name, chart, _said(runs, first=True)


def _scaling(source: Path, words: str) -> tuple[str, Picture, str]:
    """The figure of a tp.csv, of the implementations and the values of columns that the words name."""
    names, chosen = parse(words)
    rows = [
        row
        for row in csv_table.Table(source, COLUMNS).rows()
        if (not names or row["implementation"] in names)
        and all(row[column] == value for column, value in chosen.items())
    ]
    if not rows:
        raise BadInput(f"{source}: no row is of {' '.join(words.split())}.")
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    gpus = ", ".join(sorted({row["ranks"] for row in rows} | {"1"}, key=int))
    said = f"Time and efficiency of {', '.join(names)} at {', '.join(shapes)}, on {gpus} GPUs."
    run = json.loads(source.with_name(run_folder.RUN).read_text(encoding="utf-8"))
    return f"scaling-{'-'.join(shapes)}", scaling(points_of(rows), run["settings"]["implementations"]), said


def _said(runs: Sequence[ReportedRun], first: bool = False) -> str:
    """What a report says in short about a run, or the first sentence of that."""
    run, *_ = runs
    if run.training:
        return training.sentences(run.training)[0]
    section, *_ = found = sections(runs)
    style, *_ = styles(found, colours(runs))
    return sentences.sentences(section, style)[0] if first else sentences.headline(section, style)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        text, made = fill(Path(argument))
        for path, content in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        Path(argument).write_text(text, encoding="utf-8")
