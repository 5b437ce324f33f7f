"""Where the rows of a sweep go besides the screen, opened before any work starts; and which are there already.

A case is finished when every chosen implementation has its row, all of one run and each with the fingerprint it would
get now, of all that determines it. Ratios are within a run, so a case is run again as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import locks, sources
from swiglu_bench.machine.machine import Machine
from swiglu_bench.options import AuditOptions, SweepOptions, TpOptions, TrainOptions, WandbOptions, given
from swiglu_bench.request import Request, Say, split
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.figures import cell
from swiglu_bench.rows.finished_run import verb
from swiglu_bench.rows.record import Record
from swiglu_bench.show import Writer
from swiglu_bench.show.text import CsvFile
from swiglu_bench.version import __version__
from swiglu_bench.worker.environments import packages_of
from swiglu_bench.worker.policy import Settings

if TYPE_CHECKING:
    from swiglu_bench.options import WandbRunOptions
    from swiglu_bench.show.wandb_run import WandbRun


@dataclass
class Opened:
    """What takes the rows of a command; `run` is the content of run.json."""

    folder: Path | None
    run: dict[str, Any]
    files: CsvFile | None = None
    wandb: WandbRun | None = None

    @property
    def writers(self) -> list[Writer]:
        """The writers that were opened."""
        return [writer for writer in (self.files, self.wandb) if writer]

    def describe(self) -> None:
        """Write run.json."""
        if self.folder:
            run_folder.write_run_file(self.folder, self.run)

    def places(self, what: str) -> Iterator[str]:
        """Where the rows are; `what` names the content of the files."""
        if self.folder:
            yield f"{what}: {self.folder}"
            if (self.folder / "traces").is_dir():
                yield f"Traces, for https://ui.perfetto.dev: {self.folder / 'traces'}"
        if self.wandb and self.wandb.url_or_path:
            yield f"W&B: {self.wandb.place}"


def opened(request: Request, this: Machine, warn: Say) -> contextlib.AbstractContextManager[Opened]:
    """Everything that the request wants rows to go to. Raises BadInput where one of them cannot be opened."""
    command, options = request.command, request.options
    run_folder.check_out(options.out, options.resume, options.force)

    def earlier(folder: Path) -> dict[str, Any]:
        if options.force:
            run_folder.remove_rows(folder)
        return {}

    into = Opened(folder_of(command, options, this, request.settings.run_id), about(request, this))
    return writing(into, "run", earlier, command, options, this.slug, warn)


@contextlib.contextmanager
def writing(
    into: Opened, kind: str, earlier: Callable[[Path], dict[str, Any]], command: str, options: WandbOptions, slug: str,
    warn: Say,
) -> Iterator[Opened]:  # fmt: skip
    """Open the files for a kind of row, where there is a folder, and W&B, where the options want it.

    `earlier` says what a folder with other runs adds to run.json; it raises BadInput where the folder may not have any.
    """
    with ExitStack() as stack:
        if into.folder:
            run_folder.create_folder(into.folder)
            stack.enter_context(locks.folder(into.folder, into.run["command"]))
            into.run |= earlier(into.folder)
            into.files = stack.enter_context(closing(CsvFile(into.folder, warn, kind)))
            into.describe()
        if options.log_wandb:
            into.wandb = stack.enter_context(closing(wandb_run(options, command, slug, into.run, into.folder, warn)))
        yield into


def wandb_run(
    options: WandbRunOptions, command: str, slug: str, run: dict[str, Any], folder: Path | None, warn: Say
) -> WandbRun:
    """A W&B run that takes rows, where the `--wandb-...` options say, named and tagged by command and device."""
    from swiglu_bench.show.wandb_run import WandbRun

    return WandbRun(
        project=options.wandb_project, config=run, name=f"{command} {slug}", group=options.wandb_group or command,
        tags=list(dict.fromkeys([command, slug, *split(options.wandb_tags)])), entity=options.wandb_entity,
        run_id=options.wandb_id, folder=folder, warn=warn,
    )  # fmt: skip


def about(request: Request, this: Machine) -> dict[str, Any]:
    """The content of run.json: the command, its options, the settings that follow from them, the machine, versions."""
    settings = request.settings
    how = {
        "baseline": ", ".join(sorted({settings.baseline_of(case) for case in request.cases})),
        "l2": ("both" if settings.hot_beside else "cold") if settings.cold_l2 else "hot", "energy": settings.energy,
        "layers": settings.layers, **dataclasses.asdict(settings.rule),
    }  # fmt: skip
    return {
        "command": settings.command, "run_id": settings.run_id, "options": given(request.options), "settings": how,
        "machine": this.as_dict(), "versions": {known.name: _versions(known) for known in request.implementations},
        **({"workload": request.workload} if request.workload else {}),
    }  # fmt: skip


@contextlib.contextmanager
def logs(folder: Path | None, wanted: Callable[[], bool]) -> Iterator[Path]:
    """A folder for what implementations print; a temporary one stays if it is `wanted` in the end: rows name it."""
    place = folder / "logs" if folder else Path(tempfile.mkdtemp(prefix="swiglu-bench-"))
    run_folder.create_folder(place)
    try:
        yield place
    finally:
        if not folder and not wanted():
            shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder is not empty, or gone
            for file in place.rglob("*.log"):
                if file.stat().st_size == 0:
                    file.unlink()
            for folder_or_file in [*place.iterdir(), place]:  # one for each GPU, where there are several
                if folder_or_file.is_dir() and not any(folder_or_file.iterdir()):
                    folder_or_file.rmdir()


def folder_of(
    command: str, options: SweepOptions | AuditOptions | TpOptions | TrainOptions, this: Machine, moment: str
) -> Path | None:
    """Where the files of a command go; None for --no-csv. Raises BadInput for --no-csv with --out."""
    if options.out and not options.csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    return (options.out or default_folder(this, command, moment)) if options.csv else None


def default_folder(this: Machine, name: str, moment: str) -> Path:
    """Where the files of a run go by default; `moment` is a run id, or a time from `machine.now`."""
    digits = moment.replace("-", "").replace(":", "")
    date, clock = digits[:8], digits[9:15]
    return Path("results") / this.slug / f"{date[:4]}-{date[4:6]}-{date[6:]}" / f"{clock}-{name}"


# Which cases are finished

CASE = ("shape", "hidden", "intermediate", "experts", "top_k", "tokens", "dtype", "scope", "mode", "seed")
"""The columns that say which case a row is of."""

IRRELEVANT = {"command", "run_id", "detail", "folder"}
"""The settings that do not change a figure."""

CaseKey = tuple[str, ...]


def key_of_case(case: Case) -> CaseKey:
    """The case as its rows name it."""
    shape, experts = case.shape, case.shape.experts
    mixture = (experts.count, experts.top_k) if experts else (None, None)
    sizes = (case.name, shape.hidden, shape.intermediate, *mixture)
    return tuple(map(cell, (*sizes, case.tokens, case.dtype, case.scope, case.mode, case.seed)))


def key_of_row(row: Record | Mapping[str, str]) -> CaseKey:
    """The case that a row is of."""
    return tuple(cell(row.get(name) if isinstance(row, Mapping) else getattr(row, name)) for name in CASE)


class Fingerprints:
    """Hashes of what made each row: sources, versions, machine, settings and the case."""

    def __init__(self, implementations: Sequence[Implementation], settings: Settings, this: Machine) -> None:
        self._common = {
            "sources": sources.code(),
            "version": __version__,
            "tuned tiles": this.tuned_tiles,
            "machine": {name: getattr(this, name) for name in sources.MACHINE},
            "settings": {name: value for name, value in dataclasses.asdict(settings).items() if name not in IRRELEVANT},
        }
        self.names = [known.name for known in implementations]
        self._files = {known.name: known.file for known in implementations}
        of_file = {known.name: sources.of_file(Path(known.file)) if known.file else "" for known in implementations}
        self._own = {
            known.name: {"name": known.name, "source": of_file[known.name], "versions": _versions(known)}
            for known in implementations
        }

    def of(self, case: CaseKey, implementation: str, files: str = "") -> str:
        """16 hexadecimal digits for the row of an implementation at a case whose process loaded these `files`."""
        made_of = {**self._common, "implementation": self._own[implementation], "case": case, "files": files}
        return hashlib.sha256(json.dumps(made_of, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def now(self, case: CaseKey, implementation: str, row: Mapping[str, str]) -> str:
        """The fingerprint that an earlier row would get, its files read again."""
        return self.of(case, implementation, sources.digests_now(row.get("files", ""), self._files[implementation]))


class Remaining:
    """Which cases a sweep still has to run, given the rows that earlier sweeps left in its folder."""

    def __init__(
        self, cases: Sequence[Case], fingerprints: Fingerprints, command: str, rows: Iterable[Mapping[str, str]] = ()
    ) -> None:
        self._fingerprints, self._verb = fingerprints, verb(command)
        self._earlier: dict[CaseKey, dict[str, Mapping[str, str]]] = {}
        for row in rows:
            if verb(row["command"]) == self._verb:
                self._earlier.setdefault(key_of_row(row), {})[row["implementation"]] = row
        keys = [(case, key_of_case(case)) for case in cases]
        finished = {key for _, key in keys if self._finished(key)}
        self.todo = [case for case, key in keys if key not in finished]
        self.kept = [row for _, key in keys if key in finished for row in self._kept(key)]
        """The rows of finished cases."""

    def _kept(self, case: CaseKey) -> list[Mapping[str, str]]:
        """The rows that the chosen implementations have; an empty one where there is none."""
        return [self._earlier.get(case, {}).get(cell(name), {}) for name in self._fingerprints.names]

    def _finished(self, case: CaseKey) -> bool:
        rows, names = self._kept(case), self._fingerprints.names
        wanted = [self._fingerprints.now(case, name, row) for name, row in zip(names, rows, strict=True)]
        return [row.get("fingerprint") for row in rows] == wanted and len({row["run_id"] for row in rows}) == 1

    def stamp(self, record: Record) -> None:
        """Enter the fingerprint of a record."""
        record.fingerprint = self._fingerprints.of(key_of_row(record), record.implementation, record.files)

    def replaced_by(self, record: Record) -> Callable[[Mapping[str, str]], bool] | None:
        """Which rows of the folder the record's case replaces; None where there are none, or they were named before."""
        case = key_of_row(record)
        if not self._earlier.pop(case, None):
            return None
        names = {cell(name) for name in self._fingerprints.names}
        return lambda row: (
            key_of_row(row) == case and row["implementation"] in names and verb(row["command"]) == self._verb
        )


def _versions(implementation: Implementation) -> dict[str, str]:
    modules = {name.partition(".")[0] for name in (implementation.package, implementation.source)}
    names = {name for module in modules for name in _distributions().get(module, [])}
    return {name: importlib.metadata.version(name) for name in names} | packages_of(implementation)


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Which distributions a module belongs to: the search through all that are installed takes half a second."""
    return importlib.metadata.packages_distributions()
