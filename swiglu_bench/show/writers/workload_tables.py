"""A workload's totals as a table for a terminal or a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from rich.console import RenderableType
from rich.text import Text

from swiglu_bench.rows.figures import milliseconds, plus_minus
from swiglu_bench.rows.record import Record, grouped
from swiglu_bench.show.workload import WORK, totals
from swiglu_bench.show.writers.tables import new_table
from swiglu_bench.show.writers.time_tables import VERDICT_STYLES
from swiglu_bench.show.writers.training_tables import TableCell, TrainingTable

NOTE = (
    "time: of a call, the mean over {calls:g} recorded calls with {counts} token counts; x: time for all of them / the "
    "baseline's, ± half the 95% interval."
)


def grids(records: Iterable[Record], workload: Mapping[int, float]) -> Iterator[TrainingTable]:
    """A table for each shape, scope, mode and dtype; none without a workload."""
    note = NOTE.format(calls=sum(workload.values()), counts=len(workload))
    columns = ("implementation", "time", "ratio", "")
    for work, found in grouped(totals(records, workload), attrgetter(*WORK)).items():
        fastest = min((one.time_ms for one in found if one.time_ms is not None), default=None)
        rows = [[TableCell(one.implementation), *_cells(one, one.time_ms == fastest)] for one in found]
        yield TrainingTable(f"{' '.join(work)}: the recorded workload", columns, rows, note)


def _cells(one: Record, fastest: bool) -> tuple[TableCell, ...]:
    if one.time_ms is None:
        return TableCell(one.reason), TableCell(""), TableCell("")
    compared = f"x{plus_minus(*one.interval)}" if one.interval else one.reason
    compared = "baseline" if one.implementation == one.baseline else compared
    return TableCell(milliseconds(one.time_ms) + " *" * fastest), TableCell(compared), TableCell(one.verdict)


def workload_tables(records: Iterable[Record], workload: Mapping[int, float]) -> Iterator[RenderableType]:
    """The same for a terminal."""
    for grid in grids(records, workload):
        table = new_table(grid.columns, grid.title, text={"implementation", ""}, wrap={"implementation"})
        for row in grid.rows:
            table.add_row(*(Text(cell.text, VERDICT_STYLES.get(cell.text, "")) for cell in row))
        yield table
        yield Text(grid.note, "dim")
