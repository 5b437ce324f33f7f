"""Finished runs, read back: a folder that a command wrote, or its records.csv, as rows with samples and checks.

Below it, ratios of any two rows that were timed in the same rounds, from the samples that the run kept.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases.cases import Mode
from swiglu_bench.cases.errors import BadInput, did_you_mean, matching
from swiglu_bench.measure.statistics import CONFIDENCE, Interval, ratio_interval, verdict
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.figures import typed
from swiglu_bench.rows.record import LAYOUTS, Record, Status, TensorCheck, unique
from swiglu_bench.rows.run_folder import RECORDS, SPLIT, read_about, read_layout
from swiglu_bench.rows.run_folder import beside as read_beside

if TYPE_CHECKING:
    import pandas
Losses = Mapping[str, Mapping[int, Sequence[float]]]
"""Of every step, by implementation and seed."""
SUMMARY, SEEDS, STEPS = LAYOUTS["training"].file, LAYOUTS["seeds"].file, LAYOUTS["seeds"].samples
PERMUTED = "eager, permuted"
"""eager with its intermediate features in another order: the same model, rounded differently."""


class Curve(enum.StrEnum):
    """How a loss curve compares with eager's."""

    SAME = "same"
    """It differs no more than rounding in another order does."""
    WITHIN_SEEDS = "within seeds"
    """It differs more than that, or rounding is not known, and no more than the spread of eager's seeds."""
    DIFFERS = "differs"
    """It differs more than both."""
    UNKNOWN = "unknown"
    """It differs more than rounding does, and a single seed has no spread."""


def as_of_all_runs(row: Record) -> Record:
    """The row as those of all runs are read: a step is its time, and a curve that differs makes it incorrect."""
    wrong = row.failed and row.status is Status.OK
    return dataclasses.replace(
        row, status=Status.INCORRECT if wrong else row.status,
        reason="Its loss curve differs from eager's." if wrong else row.reason,
        time_ms=None if wrong else row.step_ms, ratio=1.0 if row.verdict == "baseline" else row.ratio, source=row,
    )  # fmt: skip


@dataclass(frozen=True)
class FinishedRun:
    """The rows of one command, in the order in which they were made, and what they were made with."""

    records: Sequence[Record]
    about: dict[str, Any]
    """run.json: command, settings, machine; empty where there is none."""
    place: Path | None = None
    """Where it was read from or written to; None: nowhere."""
    audit: Sequence[Record] = ()
    """The contract matrix beside the rows."""
    losses: Losses | None = None
    """Of a training, everything trained to the end, also what is not shown: differences are from eager's losses."""

    @property
    def frame(self) -> pandas.DataFrame:
        """All rows, with a type per column; of a training or of `tp` with that command's own columns after them."""
        return run_folder.frame_of(self.records)

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return str(self.place) if self.place else str(self.about.get("run_id", "this run"))

    @property
    def command(self) -> str:
        """`forward` of `swiglu-bench forward --shapes smoke`; of several commands in one file, the last."""
        return verb(self.records[-1].command if self.records else str(self.about.get("command", "")))

    @property
    def label(self) -> str:
        """The name of its folder, which says what was run, or of its file."""
        return self.place.resolve().name if self.place and self.place.is_dir() else Path(self.name).name

    @property
    def implementations(self) -> list[str]:
        """Every name that a row has."""
        return unique(row.implementation for row in (*self.records, *self.audit))

    @property
    def commands(self) -> list[str]:
        """The exact commands that made the rows, oldest first."""
        return unique(filter(None, (*(row.command for row in self.records), str(self.about.get("command", "")))))

    def keep(self, names: Collection[str]) -> FinishedRun:
        """The rows of these implementations."""
        kept = ([row for row in rows if row.implementation in names] for rows in (self.records, self.audit))
        return dataclasses.replace(self, records=next(kept), audit=next(kept))

    @property
    def summaries(self) -> list[Record]:
        """The rows as their own command wrote them; of a training, its summary."""
        return [record.own for record in self.records]

    def only(self, **wanted: Sequence[str]) -> FinishedRun:
        """The rows whose columns match one of the values given for each, globs included; an empty list is no filter.

        Raises BadInput where a value matches no row, naming what there is.
        """
        kept = list(self.records)
        for column, patterns in wanted.items():
            known = unique(str(getattr(record, column)) for record in self.records)
            names = matching(known, patterns, f"{self.name} has no {column} {{!r}}")
            kept = [record for record in kept if not patterns or str(getattr(record, column)) in names]
        if self.records and not kept:
            raise BadInput(f"{self.name} has no row that matches all filters; leave one of them out.")
        return FinishedRun(kept, self.about, self.place)


class Collected:
    """A writer that keeps rows in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        """Keep the row."""
        self.records.append(record)

    def close(self) -> None:
        """Do nothing: no file is open."""


def verb(command: str) -> str:
    """The subcommand of a command line."""
    return next((word for word in command.split()[1:] if not word.startswith("-")), command)


def load_run(path: Path, beside: bool = True) -> FinishedRun:
    """Read a run's folder, or its records.csv and, unless told otherwise, samples and checks that lie beside it.

    What `train` and `tp` wrote is read as well, from the folder or one of its files; a row of `train` has the row of
    its file as its source.

    Raises BadInput for what is not a run, one without rows, or one that this version cannot read.
    """
    found = read_run(path, beside)
    if not found.records:
        raise BadInput(f"{path}: no rows; give a run that has some.")
    return found


def read_run(path: Path, beside: bool) -> FinishedRun:
    """Read a run of any command; it may have no rows."""
    if trained := training_folder(path):
        return _training(trained)
    folder = path.parent if path.name in (SPLIT, run_folder.SPLIT_SAMPLES) and path.is_file() else path
    split = (folder / SPLIT).is_file()
    file = folder / SPLIT if split else run_folder.records_file(path)
    records = read_layout(file, "tp" if split else "run")
    if beside and records:
        run_folder.attach(records, file.parent)
        checks = read_beside(file.with_name(run_folder.CHECKS), _check, LAYOUTS[records[0].kind].key)
        for record in records:
            record.tensor_checks = tuple(checks.get(run_folder.key_of(record), ()))
    return FinishedRun(records, read_about(file.parent), file.parent)


def training_folder(path: Path) -> Path | None:
    """The folder of the training run that a path names: the folder itself, or one of its CSV files."""
    folder = path.parent if path.name in (STEPS, SEEDS, SUMMARY) and path.is_file() else path
    return folder if (folder / STEPS).is_file() else None


def _training(folder: Path) -> FinishedRun:
    if not (folder / SUMMARY).exists():
        raise BadInput(f"{folder} is a training run that has not ended: it has no {SUMMARY}; leave it out.")
    rows = list(map(as_of_all_runs, read_layout(folder / SUMMARY, "training")))
    losses: dict[str, dict[int, Sequence[float]]] = {}
    for row in seeds_of(folder):
        losses.setdefault(row.implementation, {})[row.seed] = row.series["loss"]
    return FinishedRun(rows, read_about(folder), folder, losses=losses)


def seeds_of(folder: Path) -> list[Record]:
    """A row with all steps for each implementation and seed that was trained to the end; none in other folders."""
    if not (folder / STEPS).is_file():
        return []
    if rows := read_layout(folder / SEEDS, "seeds"):
        run_folder.attach(rows, folder)
    return [row for row in rows if len(row.series.get("loss", ())) == row.steps]


def find_runs(root: Path) -> list[Path]:
    """The folder of every run under a folder, of whichever command that leaves rows."""
    return sorted({file.parent for name in (RECORDS, STEPS, SPLIT) for file in root.rglob(name)})


def newest_run(root: Path, commands: Collection[str] = ()) -> Path | None:
    """The run under a folder that was last written to, of these commands where any are named, and with rows."""
    folders = sorted(find_runs(root), key=lambda run: max(file.stat().st_mtime for file in run.iterdir()))
    for folder in reversed(folders):
        try:
            run = load_run(folder, beside=False)
        except BadInput:  # it was interrupted before its first row
            continue
        if not commands or run.command in commands:
            return folder
    return None


def latest(records: Iterable[Record]) -> list[Record]:
    """Of rows of the same case and implementation the last: several runs may share a file."""
    return list({(case_of(record), record.implementation): record for record in records}.values())


CASE = ("shape", "hidden", "intermediate", "scope", "mode", "dtype", "tokens")


def case_of(record: Record) -> tuple[Any, ...]:
    """What two rows have to agree in to be of the same work; the seed changes the numbers and not the work."""
    return tuple(getattr(record, name) for name in CASE)


def case_label(case: tuple[Any, ...]) -> str:
    """A case in a line of text."""
    return f"{table_label(case)} tokens={case[-1]}"


def table_label(case: tuple[Any, ...]) -> str:
    """What the cases of one table have in common, in a line of text."""
    shape, _, _, scope, mode, dtype, *_ = case
    return f"{shape} {scope} {mode} {dtype}"


def _check(row: dict[str, str]) -> TensorCheck:
    own = {name: value for name, value in row.items() if name not in LAYOUTS["run"].key and name != "worst_index"}
    place = row.get("worst_index", "").strip("()").split(",")
    check = typed(TensorCheck, own)
    return dataclasses.replace(check, worst_index=tuple(int(part) for part in place if part.strip()))


def ratio(record: Record, other: Record, confidence: float = CONFIDENCE) -> Interval | None:
    """A row's time over another's of its case, in their common rounds; None where they have none.

    Rows of two GPUs have none, whatever else they share.
    """
    mine, theirs = ((row.gpu_uuid, row.run_id, len(row.samples_ms)) for row in (record, other))
    if mine != theirs or not record.samples_ms:
        return None
    return ratio_interval(record.samples_ms, other.samples_ms, confidence)


def kept_ratio(record: Record, baseline: Record | None, confidence: float) -> Interval | None:
    """The ratio to the baseline, from the rounds where they were kept, else as the row has it, which is of 95%."""
    found = ratio(record, baseline, confidence) if baseline else None
    return found or (Interval(*record.interval) if record.interval else None)


def rebased(run: FinishedRun, baseline: str) -> FinishedRun:
    """The run with every ratio, interval and verdict relative to `baseline`, where a case has it and its rounds.

    Verdicts use the A/A pair of the rounds, which is of the baseline that the run had: a remark says so, and the pair's
    figures are left out, because they are not of `baseline`. A row of `tp` becomes one like all others. Where the
    baseline has no time, or yields other gradients than a row, the row has no ratio. Raises BadInput for a name that no
    timed row has.
    """
    timed = {(row.run_id, case_of(row), row.implementation): row for row in run.records if row.samples_ms}
    if not (names := unique(name for *_, name in timed)):
        raise BadInput(f"--baseline: {run.name} has no rounds to compute other ratios from; leave the option out.")
    if baseline not in names:
        raise BadInput(f"--baseline: no row of {run.name} has rounds of {baseline!r}; {did_you_mean(baseline, names)}")

    def relative(record: Record) -> Record:
        bare = dataclasses.replace(
            record, baseline=baseline, ratio=None, ratio_low=None, ratio_high=None, verdict="", kind="run", source=None
        )
        if other := timed.get((record.run_id, case_of(record), baseline)):
            bare.comparable = record.mode == Mode.FORWARD or record.gradients == other.gradients
            if bare.comparable and (found := ratio(record, other)):
                bare.ratio, bare.ratio_low, bare.ratio_high = found.median, found.low, found.high
                judged = record.noise is not None and record is not other
                bare.verdict = verdict(found, record.noise or 0.0).value if judged else ""
        if record.noise is not None and record.baseline != baseline:
            bare.aa_ratio = bare.aa_low = bare.aa_high = None
            if bare.verdict:
                bare.remark(f"Its verdict uses the noise (A/A) of {record.baseline}, the baseline when it was timed.")
        return bare

    return FinishedRun([relative(record) for record in run.records], run.about, run.place)
