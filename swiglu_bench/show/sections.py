"""Runs read back for a report, cut into sections: rows of one kind of work.

Rows of a section have the same device, scope, mode and dtype. What is ranked are rows of one case of one run. Memory is
measured by a run of its own; it joins the times of a step by device and case, and nothing else is joined.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal, Self

from swiglu_bench.cases.errors import BadInput, matching
from swiglu_bench.rows.figures import header, reason, together, tokens_text
from swiglu_bench.rows.finished_run import STEPS, FinishedRun, case_of, latest, read_run
from swiglu_bench.rows.record import LAYOUTS, Record, Status, grouped, unique
from swiglu_bench.rows.run_folder import AUDIT, RECORDS, SPLIT, read_about, read_layout
from swiglu_bench.show.tables import MEMORY, cautions

FILES = (RECORDS, AUDIT, STEPS, SPLIT)
"""Each makes a folder a run."""
Kind = Literal["time", "memory", "verify"]
KINDS: tuple[Kind, ...] = ("time", "memory", "verify")
WAITS = 0.95
"""Where the host was ahead of the GPU in fewer of the rounds than this, a time may hold waiting for the host."""


def load(path: Path) -> FinishedRun:
    """Read a run's folder, or a records.csv or audit.csv by itself; of a training, the folder or any of its files.

    The rows are one per device, case and implementation: the last one written. Raises BadInput where nothing is there,
    or what is there is neither.
    """
    if not path.exists():
        raise BadInput(f"{path} does not exist; give a run's folder, a {RECORDS} or an {AUDIT}.")
    if path.is_dir() and not _is_run(path):
        raise BadInput(f"{path} holds none of {', '.join(FILES)}; give a run's folder, as results/GPU/DATE/RUN.")
    audit = path / AUDIT if path.is_dir() else path if _is_audit(path) else None
    cells = read_layout(audit, "audit") if audit and audit.exists() else []
    measured = any((path / name).exists() for name in (RECORDS, SPLIT, STEPS)) if path.is_dir() else not cells
    if not measured:
        return FinishedRun([], read_about(path if path.is_dir() else path.parent), path, cells)
    run = read_run(path, beside=False)
    if run.losses is not None:
        return run
    rows = [row for own in grouped(run.records, attrgetter("device")).values() for row in latest(own)]
    return FinishedRun(rows, run.about, path, cells)


def folders(path: Path) -> list[Path]:
    """The path itself or, where it is a folder of runs such as results/GPU/DATE, those runs in order."""
    if not path.is_dir() or _is_run(path):
        return [path]
    return sorted({file.parent for name in FILES for file in path.rglob(name)}) or [path]


def only(runs: Sequence[FinishedRun], patterns: Sequence[str]) -> list[FinishedRun]:
    """The runs with the rows of these implementations alone, names or globs; raises BadInput for one without rows."""
    names = unique(name for run in runs for name in run.implementations)
    wanted = matching(names, patterns, "--impl: no row of these runs is of {!r}")
    kept = (run.keep(wanted) for run in runs)
    return [run for run in kept if run.implementations]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in FILES)


def _is_audit(path: Path) -> bool:
    try:
        return header(path) == LAYOUTS["audit"].columns()
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {reason(error)}.") from None


@dataclass(frozen=True)
class Section:
    """Rows about the same work on the same kind of device, whatever the shape and token count."""

    kind: Kind
    runs: Sequence[FinishedRun]
    device: str
    scope: str
    mode: str
    rows: Sequence[Record]
    memory_from: Sequence[str] = ()
    """The runs whose memory figures stand in the rows, where they are others."""

    @property
    def dtype(self) -> str:
        """The dtype of the rows; a section of `verify` may have several, comma-separated."""
        return ", ".join(unique(row.dtype for row in self.rows))

    @property
    def routing(self) -> str:
        """How tokens were sent to experts; empty for a dense block."""
        return self.rows[0].routing

    @property
    def names(self) -> str:
        """The runs that the rows are from."""
        return together([run.label for run in self.runs])

    @property
    def title(self) -> str:
        """What the section is about, without the machine."""
        head = {"time": self.mode, "memory": "memory", "verify": "verification"}[self.kind]
        parts = (f"{head} of {self.scope}", self.dtype, self.routing and f"{self.routing} routing")
        return ", ".join(filter(None, parts))

    @property
    def split(self) -> bool:
        """Whether the work was split over several GPUs."""
        return any(row.kind == "tp" for row in self.rows)

    @property
    def ok(self) -> list[Record]:
        """The rows whose figures count."""
        return [row for row in self.rows if row.status is Status.OK]

    @property
    def timed(self) -> list[Record]:
        """The rows whose times count."""
        return [row for row in self.ok if row.time_ms is not None]

    @property
    def baseline(self) -> str:
        """What ratios are relative to; empty where no row has one."""
        return next((row.baseline for row in self.rows if row.baseline), "")

    def of(self, run: FinishedRun) -> list[Record]:
        """The rows that are from one of the runs."""
        cases = {case_of(row) for row in run.records}
        return [row for row in self.rows if case_of(row) in cases]

    def joined(self, other: Self) -> Self:
        """This section with the rows of another one added."""
        memory_from = unique([*self.memory_from, *other.memory_from])
        runs, rows = [*self.runs, *other.runs], [*self.rows, *other.rows]
        return dataclasses.replace(self, runs=runs, rows=rows, memory_from=memory_from)


def sections(runs: Sequence[FinishedRun]) -> list[Section]:
    """All sections of each of these runs: times first, then memory, then verification."""
    found = [section for run in runs if run.losses is None for section in _of_run(run)]
    memories = [section for section in found if section.kind == "memory"]
    return sorted((_with_memory(section, memories) for section in found), key=lambda of: KINDS.index(of.kind))


def by_work(found: Sequence[Section]) -> list[Section]:
    """The sections with those of the same kind of work as one, those with the most rows first of each kind.

    Sections that measured the same case stay apart.
    """
    works, work = list[Section](), attrgetter("kind", "device", "scope", "mode", "routing", "baseline")
    for section in found:
        mine = {case_of(row) for row in section.rows}
        for number, other in enumerate(works):
            alike = work(section) == work(other) and (section.kind == "verify" or section.dtype == other.dtype)
            if alike and mine.isdisjoint(map(case_of, other.rows)):
                works[number] = other.joined(section)
                break
        else:
            works.append(section)
    return sorted(works, key=lambda section: (KINDS.index(section.kind), -len(section.rows)))


def _of_run(run: FinishedRun) -> Iterator[Section]:
    checked: dict[tuple[str, ...], list[Record]] = {}
    key = attrgetter("device", "scope", "mode", "routing", "dtype")
    for (device, scope, mode, routing, _), rows in grouped(run.records, key).items():
        kind = _kind(rows)
        if kind == "verify":
            checked.setdefault((device, scope, mode, routing), []).extend(rows)
        else:
            yield Section(kind, [run], device, scope, mode, rows)
    for (device, scope, mode, _), rows in checked.items():
        yield Section("verify", [run], device, scope, mode, rows)


def _kind(rows: Sequence[Record]) -> Kind:
    """What was measured or, where every row failed, what the command was to measure."""
    if any(row.time_ms is not None for row in rows):
        return "time"
    if any(row.peak_bytes is not None for row in rows):
        return "memory"
    said = re.match(r"(?:\S*swiglu-bench )?(memory|verify)\b", rows[0].command)
    if said:
        return "memory" if said[1] == "memory" else "verify"
    return "verify" if any(row.status is Status.OK for row in rows) else "time"


def _with_memory(section: Section, memories: Sequence[Section]) -> Section:
    """The section with the memory of the same cases on the same machine, from the last run that has it."""
    if section.kind != "time" or section.mode != "step" or any(row.peak_bytes is not None for row in section.rows):
        return section
    for other in reversed(memories):
        if other.device != section.device:
            continue
        sizes = {_work(row): {name: getattr(row, name) for name in MEMORY} for row in other.ok}
        if any(sizes.get(_work(row), {}).get("peak_bytes") is not None for row in section.rows):
            rows = [dataclasses.replace(row, **sizes.get(_work(row), {})) for row in section.rows]
            return dataclasses.replace(section, rows=rows, memory_from=[other.names])
    return section


def _work(row: Record) -> tuple[object, ...]:
    return *case_of(row), row.implementation


def caption(section: Section) -> str:
    """How many rows are ok, and how much of the allowed error they use at most."""
    used = max((row.error_ratio for row in section.ok if row.error_ratio is not None), default=None)
    most = f"; the largest error is {used:.0%} of what is allowed" if used is not None else ""
    return f"{len(section.ok)} of {len(section.rows)} rows are ok{most}."


def remarks(section: Section) -> Iterator[str]:
    """What spoils the times of a section, and who is not ranked."""
    if section.kind != "time":
        return
    noise = [row.noise for row in section.ok if row.noise is not None]
    if noise:
        yield f"Noise: {section.baseline} against itself in the same rounds stays within {max(noise):.2%} of 1."
    yield from (text for text, _ in cautions(section.timed))
    waiting = [row for row in section.ok if row.queue_filled is not None and row.queue_filled < WAITS]
    lesser = [row for row in section.timed if not row.comparable]
    for why, rows in (
        ("queue_filled below 1, so that times may include waiting for the host", waiting),
        ("fewer gradients than the baseline, not ranked (*)", lesser),
    ):
        if rows:
            names = together(unique(row.implementation for row in rows))
            yield f"{names} at {tokens_text(row.tokens for row in rows)}: {why}."
