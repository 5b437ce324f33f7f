"""The suite from Python: `swiglu_bench.run(...)` does what a command does, `swiglu_bench.load(...)` reads its files.

    import swiglu_bench

    found = swiglu_bench.run("forward", shapes="llama7b", tokens=[1, 1024], impl=["eager", "compile", "fused"])
    found                                  # in a notebook: the tables
    found.frame                            # a pandas DataFrame with the columns of records.csv
    found.frame.pivot_table("ratio", "implementation", "tokens")
    found.compare(swiglu_bench.load("results/nvidia-h200/forward")).outcome

Implementations run in child processes, as on the command line.
"""

from __future__ import annotations

import inspect
import io
import shlex
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType

from swiglu_bench.cases.errors import BadInput, did_you_mean
from swiglu_bench.options import COMMANDS, SweepOptions, TimingOptions, parameters
from swiglu_bench.rows.finished_run import FinishedRun, load_run
from swiglu_bench.show import compare, tables
from swiglu_bench.tasks.sweep import perform

if TYPE_CHECKING:
    import pandas

WIDTH = 140
"""Of tables where no terminal says how wide they may be."""
LISTS = {"shapes", "tokens", "dtype", "scope"}
"""Options that are one text on the command line, with commas, and for which `run` takes lists as well."""


class _Shown:
    """Shows itself as tables: as text, on a rich console, and in a notebook."""

    def _tables(self, width: int) -> Iterable[RenderableType]:
        raise NotImplementedError

    def __repr__(self) -> str:
        console = Console(width=WIDTH, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(*self._tables(WIDTH))
        return captured.get().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        return self._tables(options.max_width)

    def _repr_html_(self) -> str:
        console = Console(width=WIDTH, record=True, file=io.StringIO(), force_jupyter=False)
        console.print(*self._tables(WIDTH))
        return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.25'>{code}</pre>")


@dataclass(frozen=True, repr=False)
class Results(_Shown, FinishedRun):
    """The rows of a run and what can be done with them. In a notebook it shows itself as tables."""

    failed: bool = False
    """Whether the command would exit with another status than 0: something is wrong, or is not known."""

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
        fastest = ranked.groupby(case, sort=False)["ratio"].idxmin()
        return ranked.loc[fastest, [*case, "implementation", "time_ms", "ratio"]]

    def compare(self, other: FinishedRun, max_regression: float = 0.02) -> Compared:
        """This run as the earlier one, `other` as the later; `swiglu-bench compare` says how it judges."""
        return Compared(compare.compare(self, other, max_regression))

    def _tables(self, width: int) -> Iterable[RenderableType]:
        return tables.tables(self, width, False) if self.records else [f"{self.name}: no rows"]


@dataclass(frozen=True, repr=False)
class Compared(_Shown):
    """Two runs side by side."""

    found: compare.Comparison

    @property
    def outcome(self) -> str:
        """`fine`, `regression` or `cannot tell`."""
        return self.found.outcome.value

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons not to compare the two."""
        return self.found.warnings

    @property
    def frame(self) -> pandas.DataFrame:
        """One row per change."""
        import pandas

        return pandas.DataFrame([change.row() for change in self.found.changes], columns=list(compare.COLUMNS))

    def _tables(self, width: int) -> Iterable[RenderableType]:
        return compare.comparison_tables(self.found)


def load(path: str | PathLike[str]) -> Results:
    """A finished run, from its folder or its records.csv. Raises BadInput, a ValueError, for anything else."""
    found = load_run(Path(path))
    return Results(found.records, found.about, found.place)


def run(command: str = "forward", *, progress: bool = True, **options: Any) -> Results:
    """Measure or check as `swiglu-bench COMMAND` does, with the options of the command line, with underscores.

    Args:
        command: forward, backward, step, memory or verify.
        progress: show the bar and the growing table on stderr.
        options: strings as on the command line, or lists instead of comma-separated strings: `tokens=[1, 1024]`.
            `baseline`, `rounds`, `l2`, `regime` and `energy` are for forward, backward and step only. Files are written
            only where `out` names a folder. `swiglu-bench COMMAND --help` explains each.

    Returns:
        All rows, including those of implementations that were skipped or failed, with the reason.

    Raises BadInput, a ValueError, for an option that does not exist or a value that it does not take, before any work.
    """
    if command not in COMMANDS:
        raise BadInput(f"{command!r} is not a command that measures; {did_you_mean(command, list(COMMANDS))}")
    types = typing.get_type_hints(COMMANDS[command])
    for name in options:
        if name not in types:
            raise BadInput(f"{command} has no option {name!r}; {did_you_mean(name, list(types))}")
    usual = {"csv": options.get("out") is not None, "quiet": not progress}
    wanted = COMMANDS[command](**usual | {name: _typed(value, types[name]) for name, value in options.items()})
    console, line = Console(stderr=True, quiet=not progress), _command_line(command, wanted)
    status, found = perform(command, wanted, console, line)
    return Results(found.records, found.about, found.place, failed=status != 0)


_own = list(inspect.signature(run, eval_str=True).parameters.values())[:-1]
_options = [
    parameter.replace(annotation=str | Iterable[object] | None) if parameter.name in LISTS else parameter
    for parameter in parameters(TimingOptions, for_typer=False)
]
_signature = inspect.Signature([*_own, *_options], return_annotation=Results)
setattr(run, "__signature__", _signature)  # noqa: B010 -- mypy knows no such attribute


def _typed(value: Any, kind: object) -> Any:
    """A value as its option takes it: lists become text with commas, or a text one of several."""
    if value is None:
        return None
    if kind == list[str] | None:
        return [value] if isinstance(value, str) else list(value)
    return _text(value) if kind == str | None else Path(value) if kind == Path | None else value


def _text(item: object) -> str:
    return ",".join(map(str, item)) if isinstance(item, Iterable) and not isinstance(item, str | bytes) else str(item)


def _command_line(command: str, options: SweepOptions) -> str:
    parts = ["swiglu-bench", command]
    for field in fields(options):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value != field.default:
            parts += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", _text(value)]
    return shlex.join(parts)
