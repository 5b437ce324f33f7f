"""Markdown tables made from CSV files of runs, so that no figure in a document is typed by hand.

A document holds a marked block; `python -m swiglu_bench.show.writers.markdown README.md` (`make readme`) fills it
again:

    <!-- table: results/nvidia-h200/forward/records.csv eager compile liger -->
    <!-- end -->

Names after the path choose the rows; without any, all are shown. Among them `figure=limit_pct` shows that column of the
CSV instead of times, bytes as MiB; `across=shape` has a column for each shape, not for each token count; and
`scope=mlp`, or another column, keeps the rows that have that value. A block
`<!-- training: PATH -->` is filled from a training's summary.csv, `<!-- ranks: PATH mode=step NAMES -->` from a tp.csv,
and `<!-- columns: FILE FIRST LAST -->` from what is declared of the columns of such a file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from swiglu_bench.rows import csv_table, samples
from swiglu_bench.rows.figures import MIB, Figure, figures, plus_minus, size
from swiglu_bench.rows.ranking import quickest
from swiglu_bench.rows.record import COLUMNS, FIGURES, LAYOUTS, Layout, Record, Status, TensorCheck, grouped, unique
from swiglu_bench.rows.run_folder import CHECKS, read_layout, read_rows
from swiglu_bench.show.writers.csv_file import CHECK_COLUMNS
from swiglu_bench.show.writers.tables import by

Row = TypeVar("Row")
TOKENS = "tokens"
Make = Callable[[Path, list[str]], str]
"""What fills a block, from the path and the words after it."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text: Collection[str] = ()) -> str:
    """A Markdown table; columns of figures to the right, those whose heads are in `text` to the left."""
    rule = ["---" if name in text else "---:" for name in head]
    first, *others = (f"| {' | '.join(line)} |" for line in (head, rule, *rows))
    return "\n".join([first.replace("|  |", "| |"), *others])


def time_table(rows: Iterable[Record], across: str = TOKENS) -> str:
    """Implementations down, token counts or shapes across: median time, ratio to the baseline, the fastest in bold."""
    timed = [row for row in rows if row.time_ms is not None and row.status is Status.OK]
    fastest = [quickest(same) for same in by(timed, across)]

    def cell(row: Record) -> str:
        text = f"{row.time_ms:.3f} ms"
        if row.interval:
            text += " (baseline)" if row.implementation == row.baseline else f" ({plus_minus(*row.interval)})"
        elif not row.comparable:
            text += " (dX only)"
        return f"**{text}**" if any(row is one for one in fastest) else text

    return _over(across, timed, cell)


def figure_table(rows: Iterable[Record], figure: str, across: str = TOKENS) -> str:
    """Implementations down, token counts or shapes across: one figure of records.csv; bytes are shown as MiB.

    Raises ValueError where the rows have no such figure, or several for one cell.
    """
    known = [row for row in rows if figure in COLUMNS and getattr(row, figure) is not None]
    if not known:
        raise ValueError(f"figure={figure}: these rows have no such figure; results/README.md names the columns.")

    def cell(row: Record) -> str:
        value = getattr(row, figure)
        if FIGURES[figure].unit == "B":
            return f"{value / MIB:,.0f} MiB"
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    return _over(across, known, cell)


def _over(across: str, rows: list[Record], cell: Callable[[Record], str]) -> str:
    """A column for each value of `across`: of token counts in order, of shapes as they come."""
    if len(by(rows, "implementation", across)) < len(rows):
        raise ValueError(
            "Several rows for one cell; choose with scope=, mode=, dtype=, shape= or tokens=, or give across=shape."
        )
    values = unique(getattr(row, across) for row in rows)
    heads = [f"`{value}`" for value in values]
    if across == TOKENS:
        values.sort()
        heads = [f"{count:,}" for count in values]
    lines = []
    for name, own in grouped(rows, attrgetter("implementation")).items():
        cells = {getattr(row, across): cell(row) for row in own}
        lines.append([f"`{name}`", *(cells.get(value, "") for value in values)])
    return table([across, *heads], lines, text={across})


def training_table(rows: Iterable[Record]) -> str:
    """Implementations down: curve, step time, its ratio to eager's, memory kept."""
    lines = []
    for row in rows:
        if row.step_ms is None:
            continue
        curve, ratio = "baseline", "baseline"
        if row.interval:
            curve = f"{row.curve} (frozen)" if row.frozen else row.curve
            ratio = plus_minus(*row.interval)
        kept = "" if row.saved_bytes is None else size(row.saved_bytes)
        lines.append([f"`{row.implementation}`", curve, f"{row.step_ms:.1f} ms", ratio, kept])
    return table(["", "curve", "step", "÷ eager's", "kept"], lines, text={"", "curve"})


def ranks_table(rows: Iterable[Record]) -> str:
    """Token counts and numbers of GPUs down: the baseline's communication, then each implementation's time."""
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
    return table([*head, *(f"`{name}`" for name in names)], lines)


def _rank_cell(row: Record) -> str:
    ratio = "baseline" if row.verdict == "baseline" or not row.interval else plus_minus(*row.interval)
    return f"{row.time_ms:.3g} ms ({ratio}), {row.efficiency:.0%}"


def columns_table(path: Path, words: Sequence[str]) -> str:
    """The columns of a file from the first to the last that the words name; without words, all of them.

    Those that a file has in common with one before it are named and not described.
    """
    names, own = _declared()[path.name]
    if words:
        first, last = map(names.index, words)
        names = names[first : last + 1]
    shared = ", ".join(f"`{name}`" for name in names if name not in own)
    head = ("column", "unit", "better", "meaning")
    lines = [(f"`{name}`", *own[name].described) for name in names if name in own]
    parts = [f"Described above: {shared}." if shared else "", table(head, lines, text=head) if lines else ""]
    return "\n\n".join(filter(None, parts))


def _declared() -> Mapping[str, tuple[Sequence[str], Mapping[str, Figure]]]:
    """Of every file the columns, and what is declared of those that are not as in a file before it."""
    new = {name: one for name, one in FIGURES.items() if name not in COLUMNS}
    return {
        **{
            layout.file: (layout.header(), FIGURES if kind == "run" else new | _renamed(layout))
            for kind, layout in LAYOUTS.items()
        },
        **{LAYOUTS[kind].samples: (names, samples.FIGURES) for kind, names in samples.COLUMNS.items()},
        CHECKS: (CHECK_COLUMNS, figures(TensorCheck)),
    }  # fmt: skip


def _renamed(layout: Layout) -> dict[str, Figure]:
    return {column: FIGURES[figure] for column, figure in layout.called.items() if figure}


def fill(document: Path) -> str:
    """The document's text with every marked table made again; paths are relative to the document."""

    def times(path: Path, words: list[str]) -> str:
        options = dict(word.split("=", 1) for word in words if word.startswith(("figure=", "across=")))
        across, figure = options.get("across", TOKENS), options.get("figure")
        rows = choose(read_rows(path), [word for word in words if not word.startswith(("figure=", "across="))])
        return figure_table(rows, figure, across) if figure else time_table(rows, across)

    def training(path: Path, words: list[str]) -> str:
        return training_table(choose(read_layout(path, "training"), words))

    def several_gpus(path: Path, words: list[str]) -> str:
        return ranks_table(choose(read_layout(path, "tp"), words))

    makers = {"table": times, "training": training, "ranks": several_gpus, "columns": columns_table}
    return fill_blocks(document, makers)


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
        fits = all(csv_table.cell(getattr(row, column)) == value.lower() for column, value in values.items())
        return fits and (not names or row.implementation in names)

    return [row for row in rows if wanted(row)]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(fill(Path(name)), encoding="utf-8")
