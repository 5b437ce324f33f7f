"""Tables and figures of documents, made from runs, so that none is typed by hand.

A document holds marked blocks; `python docs/documents.py tables README.md` (`make readme`) fills those of tables again,
`... figures README.md` (`make figures`) makes the pictures in docs/figures and fills the others:

    <!-- table: results/nvidia-h200/forward/records.csv eager compile liger -->
    <!-- end -->

Names after the path choose the rows; without any, all are shown. Among them `figure=limit_pct` shows that column of the
CSV instead of times, bytes as MiB; `across=shape` has a column for each shape, not for each token count; and
`scope=mlp`, or another column, keeps the rows that have that value. A block
`<!-- training: PATH -->` is filled from a training's summary.csv, `<!-- ranks: PATH mode=step NAMES -->` from a tp.csv,
`<!-- winners: RUN NAMES -->` says who is the fastest at each token count, `<!-- measured: RUN -->` on what a run was
measured and when,
and `<!-- columns: FILE FIRST LAST -->` what is declared of the columns of such a file.

`<!-- figure: RUN speed-up NAMES -->` is a picture: after the run comes the question, as `report --svg` names it. The
question to a CSV of `swiglu-bench noise` is `pairs`, to the tp.csv of `swiglu-bench tp` `scaling`, with rows chosen as
`mode=step`.
"""

from __future__ import annotations

import dataclasses
import html
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.rows.figures import MIB, Figure, cell, figures, plus_minus, together, up_to
from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.rows.record import COLUMNS, FIGURES, LAYOUTS, FileLayout, Record, Status, TensorCheck, grouped, unique
from swiglu_bench.rows.run_folder import CHECKS, SAMPLE_COLUMNS, SAMPLE_FIGURES, read_about, read_layout, read_rows
from swiglu_bench.show import ranking, tables
from swiglu_bench.show.pictures import picture
from swiglu_bench.show.sections import load, only, sections
from swiglu_bench.show.table import Grid, across, by, figure_grid
from swiglu_bench.show.text import CHECK_COLUMNS

if TYPE_CHECKING:
    from swiglu_bench.show.charts import Picture

Row = TypeVar("Row")
Make = Callable[[Path, list[str]], str]


def rows_table(path: Path, words: Sequence[str]) -> str:
    """Implementations down, token counts or shapes across: median time and ratio to the baseline, or one figure.

    The fastest is bold, and bytes are shown as MiB. Raises ValueError where the rows have no such figure, or several
    for one cell.
    """
    options = dict(word.split("=", 1) for word in words if word.startswith(("figure=", "across=")))
    column, figure = options.get("across", "tokens"), options.get("figure", "")
    rows = choose(read_rows(path), [word for word in words if not word.startswith(("figure=", "across="))])
    if figure:
        known = [row for row in rows if figure in COLUMNS and getattr(row, figure) is not None]
    else:
        known = [row for row in rows if row.time_ms is not None and row.status is Status.OK]
    if not known:
        raise ValueError(f"{words}: these rows have no such figure; results/README.md names the columns.")
    if len(by(known, "implementation", column)) < len(known):
        raise ValueError(
            "Several rows for one cell; choose with scope=, mode=, dtype=, shape= or tokens=, or give across=shape."
        )
    fastest = [] if figure else [ranking.quickest(same) for same in by(known, column)]

    def cell(row: Record) -> str:
        text = _figure(figure, getattr(row, figure)) if figure else _time(row)
        return f"**{text}**" if any(row is first for first in fastest) else text

    values = unique(getattr(row, column) for row in known)
    heads = [f"`{value}`" for value in values]
    if column == "tokens":
        values.sort()
        heads = [f"{count:,}" for count in values]
    return dataclasses.replace(across(column, known, values, cell, column), heads=[column, *heads]).markdown()


def _time(row: Record) -> str:
    text = f"{row.time_ms:.3f} ms"
    if row.interval:
        return text + (" (baseline)" if row.implementation == row.baseline else f" ({plus_minus(*row.interval)})")
    return text if row.comparable else f"{text} (dX only)"


def _figure(name: str, value: float) -> str:
    if FIGURES[name].unit == "B":
        return f"{value / MIB:,.0f} MiB"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def training_table(path: Path, words: Sequence[str]) -> str:
    """Implementations down: curve, step time, its ratio to eager's, memory kept."""
    timed = [row for row in choose(read_layout(path, "training"), words) if row.step_ms is not None]
    columns = (tables.NAME, tables.CURVE, *tables.SPEED, "saved_bytes")
    return figure_grid(timed, columns, text={"implementation", "curve", "verdict"}).markdown()


def ranks_table(path: Path, words: Sequence[str]) -> str:
    """Token counts and numbers of GPUs down: the baseline's communication, then each implementation's time."""
    rows = choose(read_layout(path, "tp"), words)
    timed = [row for row in rows if row.time_ms is not None and row.ranks > 1]
    names = unique(row.implementation for row in timed)
    lines = []
    for (tokens, count), same in sorted(grouped(timed, attrgetter("tokens", "ranks")).items()):
        of = {row.implementation: row for row in same}
        if len(of) < len(same):
            raise ValueError("Several rows for one cell; choose with mode=, shape= or sequence_parallel=.")
        base = next(row for row in same if row.verdict == "baseline")
        cells = [f"{base.comm_ms:.3f} ms", f"{base.bus_gbps:.0f} of {base.bus_ceiling_gbps:.0f} GB/s"]
        cells += [_rank_cell(of[name]) if name in of else "" for name in names]
        lines.append([f"{tokens:,}", str(count), *cells])
    head = ("tokens", "GPUs", "communication alone", "bus, of its ceiling")
    return Grid([*head, *(f"`{name}`" for name in names)], lines).markdown()


def _rank_cell(row: Record) -> str:
    ratio = "baseline" if row.verdict == "baseline" or not row.interval else plus_minus(*row.interval)
    return f"{row.time_ms:.3g} ms ({ratio}), {row.efficiency:.0%}"


def columns_table(path: Path, words: Sequence[str]) -> str:
    """The columns of a file from the first to the last that the words name; without words, all of them.

    Those that a file has in common with one before it are named and not described.
    """
    declared = {layout.file: (layout.header(), _new_columns(layout)) for layout in LAYOUTS.values()}
    declared[LAYOUTS["run"].file] = COLUMNS, FIGURES
    declared |= {LAYOUTS[kind].samples: (names, SAMPLE_FIGURES) for kind, names in SAMPLE_COLUMNS.items()}
    declared[CHECKS] = CHECK_COLUMNS, figures(TensorCheck)
    names, own = declared[path.name]
    if words:
        first, last = map(names.index, words)
        names = names[first : last + 1]
    shared = ", ".join(f"`{name}`" for name in names if name not in own)
    head = ("column", "unit", "better", "meaning")
    lines = [(f"`{name}`", *own[name].described) for name in names if name in own]
    parts = [f"Described above: {shared}." if shared else "", Grid(head, lines, text=head).markdown() if lines else ""]
    return "\n\n".join(filter(None, parts))


def _new_columns(layout: FileLayout) -> dict[str, Figure]:
    """What is declared of the columns of a file that records.csv has not, by their names in it."""
    new = {name: figure for name, figure in FIGURES.items() if name not in COLUMNS}
    return new | {column: FIGURES[figure] for column, figure in layout.called.items() if figure}


def fill_blocks(document: Path, makers: Mapping[str, Make]) -> str:
    """The document's text with the content of each block of these kinds made again.

    A block is `<!-- KIND: PATH words -->`, content, `<!-- end -->`; the path is relative to the document.
    """
    kinds = "|".join(makers)
    block = rf"(?P<head><!-- (?P<kind>{kinds}): (?P<path>\S+)(?P<words>[^>]*) -->\n).*?(?P<end><!-- end -->)"

    def made(match: re.Match[str]) -> str:
        content = makers[match["kind"]](document.parent / match["path"], match["words"].split())
        return f"{match['head']}{content}\n{match['end']}"

    return re.sub(block, made, document.read_text(encoding="utf-8"), flags=re.DOTALL)


def choose(rows: Sequence[Row], words: Iterable[str]) -> list[Row]:
    """The rows of the implementations that the words name, or all, and with the values that COLUMN=VALUE asks for."""
    names = [word for word in words if "=" not in word]
    values = dict(word.split("=", 1) for word in words if "=" in word)

    def wanted(row: Any) -> bool:
        fits = all(cell(getattr(row, column)) == value.lower() for column, value in values.items())
        return fits and (not names or row.implementation in names)

    return [row for row in rows if wanted(row)]


def fill_figures(document: Path) -> tuple[str, dict[Path, tuple[Picture, bool]]]:
    """The document's text with every block made again, and by file the charts of its pictures: light ones, dark ones.

    Paths in the text are relative to the document.
    """
    inside = document.parent.name == "docs" and not (document.parent / "docs").exists()  # a checkout may be called docs
    folder = Path("figures" if inside else "docs/figures")
    files: dict[Path, tuple[Picture, bool]] = {}

    def figure(source: Path, words: list[str]) -> str:
        question, *chosen = words
        make = _scaling if question == "scaling" else _pairs if source.suffix == ".csv" else _of_run
        name, chart = make(source, question, chosen)
        title = chart.to_dict()["title"]
        said = title if isinstance(title, str) else " ".join([title["text"], *title.get("subtitle", ())])
        light, dark = (folder / f"{name}{end}.svg" for end in ("", "-dark"))
        files.update({document.parent / light: (chart, False), document.parent / dark: (chart, True)})
        return (
            f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{dark.as_posix()}">\n'
            f'  <img src="{light.as_posix()}" alt="{html.escape(said)}">\n</picture>'
        )

    return fill_blocks(document, {"figure": figure}), files


def _chosen(source: Path, names: Sequence[str]) -> list[FinishedRun]:
    return only([load(source)], names) if names else [load(source)]


def winners_table(source: Path, names: Sequence[str]) -> str:
    """Token counts down: the baseline's time, the fastest and those that tie with it, and how many times as fast."""
    section, *_ = sections(_chosen(source, names))
    times = {row.tokens: row.time_ms or 0.0 for row in section.timed if row.implementation == row.baseline}
    order, lines = unique(row.implementation for row in section.rows), []
    for place in sorted(ranking.places(section.rows), key=lambda place: place.tokens):
        first = together([f"`{name}`" for name in sorted(place.first, key=order.index)])
        lines.append([f"{place.tokens:,}", f"{times[place.tokens]:.3f} ms", first, up_to(*place.speedups)])
    return Grid(["tokens", f"`{section.baseline}`", "fastest", "times as fast"], lines, text={"fastest"}).markdown()


def measured(source: Path, words: Sequence[str]) -> str:
    """On what the rows of a run were measured, with which versions, and when."""
    rows = choose(read_rows(source), words)
    of = {name: together(unique(getattr(row, name) for row in rows)) for name in ("device", "torch", "triton", "cuda")}
    days = sorted({row.timestamp[:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{of['device']}, PyTorch {of['torch']}, Triton {of['triton']}, CUDA {of['cuda']}, {when}."


def _of_run(source: Path, question: str, names: Sequence[str]) -> tuple[str, Picture]:
    from swiglu_bench.show.charts import pictures

    found = [(name, chart) for name, chart in pictures(_chosen(source, names)) if name.endswith(f"-{question}")]
    if len(found) != 1:
        raise BadInput(f"{source} has {len(found)} charts {question!r}; a figure is one.")
    ((name, chart),) = found
    if isinstance(chart, str):
        raise BadInput(f"{source} has no chart {question!r}: {chart}")
    return name, chart


def _scaling(source: Path, question: str, words: Sequence[str]) -> tuple[str, Picture]:
    """The figure of a tp.csv, of the implementations and the values of columns that the words name."""
    from swiglu_bench.show.charts import scaling, scaling_points

    rows = choose(read_layout(source, "tp"), words)
    if not rows:
        raise BadInput(f"{source}: no row is of {' '.join(words)}.")
    known = read_about(source.parent)["settings"]["implementations"]
    return f"{question}-{'-'.join(unique(row.shape for row in rows))}", scaling(scaling_points(rows), known)


def _pairs(path: Path, question: str, words: Sequence[str]) -> tuple[str, Picture]:
    """The chart of A/A pairs. Raises BadInput for a file that `noise` did not write."""
    from swiglu_bench.show.charts import pairs

    rows = sorted(read_layout(path, "noise"), key=lambda row: row.ratio or 0.0)
    if not rows:
        raise BadInput(f"{path} has no pairs; give a file of `swiglu-bench noise` that has some.")
    data: list[dict[str, Any]] = [
        {"place": place, "verdict": row.verdict}
        | {name: (getattr(row, name) - 1) * 100 for name in ("ratio", "ratio_low", "ratio_high")}
        for place, row in enumerate(rows, start=1)
    ]
    floor = 100 * statistics.median(row.floor or 0.0 for row in rows)
    found = sum(row["verdict"] != "tie" for row in data)
    without = sum(row["ratio_low"] > 0 or row["ratio_high"] < 0 for row in data)
    subtitle = f"{len(rows)} A/A pairs: {without} intervals that do not contain 0, {found} verdicts "
    subtitle += "other than tie; dashed: median noise floor"
    return f"{path.stem}-{question}", pairs(data, floor, subtitle)


TABLES: dict[str, Make] = {
    "table": rows_table, "training": training_table, "ranks": ranks_table, "columns": columns_table,
    "winners": winners_table, "measured": measured,
}  # fmt: skip


def main(what: str, *names: str) -> None:
    """Fill the blocks of `tables` or `figures` in these documents again."""
    for document in map(Path, names):
        if what == "tables":
            document.write_text(fill_blocks(document, TABLES), encoding="utf-8")
            continue
        filled, made = fill_figures(document)
        for path, (chart, dark) in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(chart, "svg", dark))
        document.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
