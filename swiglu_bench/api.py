"""The suite from Python: `swiglu_bench.run(...)` does what a command does, `swiglu_bench.load(...)` reads what it left.

    import swiglu_bench

    found = swiglu_bench.run("forward", shapes="llama7b", tokens=[1, 1024], impl=["eager", "compile", "fused"])
    found                                  # in a notebook: the tables
    found.frame                            # a pandas DataFrame with the columns of records.csv
    found.frame.pivot_table("ratio", "implementation", "tokens")
    found.compare(swiglu_bench.load("results/nvidia-h200/2026-11-21/forward")).outcome

Implementations run in child processes, as on the command line.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType

from swiglu_bench.cli.measure import DEFAULTS, TASKS, TIMING_ONLY, perform
from swiglu_bench.finished import comparison, comparison_tables, show
from swiglu_bench.rows.finished_run import FinishedRun, load_run
from swiglu_bench.spec.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    import pandas

LISTS = ("shapes", "tokens", "dtype", "scope", "gpus")
"""Options that are one text with commas; from Python they may be lists."""
REPEATED = ("impl", "skip_impl", "wandb_tags")
"""Options that may be given several times."""
HTML_WIDTH = 140


@dataclass(frozen=True, repr=False)
class Results(FinishedRun):
    """The rows of a run, their table, and what to do with them. In a notebook it shows itself as tables."""

    failed: bool = False
    """Whether a row is incorrect or an error, or could not be kept; on the command line the exit status 1."""

    @property
    def ok(self) -> pandas.DataFrame:
        """The rows with status `ok`: those whose figures count."""
        frame = self.frame
        return frame[frame["status"] == "ok"]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, column: str) -> pandas.Series:
        return self.frame[column]

    def best(self) -> pandas.DataFrame:
        """Per case the row with the lowest ratio to the baseline, of those that do the same work as it."""
        ranked = self.ok[self.ok["comparable"] & self.ok["ratio"].notna()]
        case = ["shape", "scope", "mode", "dtype", "tokens"]
        return ranked.loc[
            ranked.groupby(case, sort=False)["ratio"].idxmin(), [*case, "implementation", "time_ms", "ratio"]
        ]

    def compare(self, other: FinishedRun, max_regression: float = 0.02) -> Compared:
        """This run as the earlier one, `other` as the later; `swiglu-bench compare` says how it judges."""
        return Compared(comparison.compare(self, other, max_regression))

    def __repr__(self) -> str:
        return _plain(show.tables(self, HTML_WIDTH, False)) if self.records else f"{self.name}: no rows"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from show.tables(self, options.max_width, False)

    def _repr_html_(self) -> str:
        return _html(show.tables(self, HTML_WIDTH, False))


class Compared:
    """Two runs side by side."""

    def __init__(self, found: comparison.Comparison) -> None:
        self.found = found

    @property
    def outcome(self) -> str:
        """`fine`, `regression` or `cannot tell`."""
        return self.found.outcome.value

    @property
    def warnings(self) -> tuple[str, ...]:
        """What stands against comparing them."""
        return self.found.warnings

    @property
    def frame(self) -> pandas.DataFrame:
        """One row per change."""
        import pandas

        return pandas.DataFrame(comparison_tables.rows(self.found), columns=list(comparison_tables.COLUMNS))

    def __repr__(self) -> str:
        return _plain(comparison_tables.tables(self.found))

    def _repr_html_(self) -> str:
        return _html(comparison_tables.tables(self.found))


def load(path: str | PathLike[str]) -> Results:
    """A finished run: its folder or its records.csv. Raises BadInput, a ValueError, for what is not one."""
    found = load_run(Path(path))
    return Results(found.records, found.about, found.place)


def run(command: str = "forward", *, progress: bool = True, **options: Any) -> Results:
    """Measure or check, as `swiglu-bench COMMAND` does; options are those of the command line, with underscores.

    Args:
        command: forward, backward, step, memory or verify.
        progress: show the bar and the growing table on stderr.
        options: `shapes`, `tokens`, `dtype`, `scope`, `impl`, `skip_impl` (texts or lists), `seed`, `device`,
            `gpus` (a list or `all`), `ray` (an address),
            `baseline`, `budget` (seconds a case), `l2`, `regime`, `energy`, `timeout`, `in_process`, `wait`,
            `out` (a folder: then files are written), `resume`, `log_wandb` and `wandb_...`.

    Returns:
        All rows, those of implementations that were skipped or failed included, each with its reason.

    Raises BadInput, a ValueError, for an option that does not exist or a value that it does not take, before any work.
    """
    if command not in TASKS:
        raise BadInput(f"{command!r} is not a command that measures; {did_you_mean(command, list(TASKS))}")
    known = {name: value for name, value in DEFAULTS.items() if TASKS[command] == "time" or name not in TIMING_ONLY}
    given = dict(options)
    for name in given:
        if name not in known or name == "dry_run":
            raise BadInput(f"{command} has no option {name!r}; {did_you_mean(name, list(known))}")
    given.setdefault("csv", given.get("out") is not None)
    given.setdefault("quiet", not progress)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", _text(value))]
    for name in LISTS:
        if given.get(name) is not None:
            given[name] = _text(given[name])
    for name in REPEATED:
        if isinstance(given.get(name), str):
            given[name] = [given[name]]
    if given.get("out") is not None:
        given["out"] = Path(given["out"])
    console = Console(stderr=True, quiet=not progress)
    status, found = perform(command, known | given, console, shlex.join(["swiglu-bench", command, *words]))
    assert found is not None, "only a dry run has no rows"
    return Results(found.records, found.about, found.place, failed=status != 0)


def _text(value: object) -> str:
    """An option as the command line has it."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return ",".join(map(str, value))
    return str(value)


def _plain(renderables: Iterable[RenderableType]) -> str:
    console = Console(width=HTML_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(*renderables)
    return captured.get().rstrip()


def _html(renderables: Iterable[RenderableType]) -> str:
    console = Console(width=HTML_WIDTH, record=True, file=io.StringIO(), force_jupyter=False)
    console.print(*renderables)
    return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.25'>{code}</pre>")
