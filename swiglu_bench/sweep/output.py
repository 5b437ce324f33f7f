"""Where the rows of a sweep go besides the screen: opened before any work starts, closed however it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.machine import locks
from swiglu_bench.machine.machine import Machine
from swiglu_bench.rows import run_folder
from swiglu_bench.session.settings import Settings
from swiglu_bench.spec.errors import BadInput
from swiglu_bench.writers import Writer, csv_file

if TYPE_CHECKING:
    from swiglu_bench.writers.wandb_run import WandbRun


@dataclass(frozen=True)
class Wandb:
    """Where a W&B run belongs."""

    project: str = "swiglu-bench"
    entity: str | None = None
    group: str | None = None
    """None: the command."""
    tags: tuple[str, ...] = ()
    """Besides those that every run gets."""
    id: str | None = None
    """Of a run to go on with, or to give a new one."""


@dataclass(frozen=True)
class Output:
    """What the user asked for."""

    csv: bool
    folder: Path | None
    """None: results/GPU/DATE/TIME-COMMAND."""
    wandb: Wandb | None
    """None: not to W&B."""
    resume: bool = False
    """Keep the cases of the folder that are finished, and run the others."""
    quiet: bool = False
    """On the screen, only what needs attention."""


@dataclass
class Opened:
    """What came of it."""

    folder: Path | None
    files: csv_file.CsvFile | None = None
    writers: list[Writer] = field(default_factory=list)
    places: list[Callable[[], str]] = field(default_factory=list)
    """Each says where results are; empty where there are none."""


@contextlib.contextmanager
def opened(
    command: str, settings: Settings, this: Machine, output: Output, warn: Callable[[str], None]
) -> Iterator[Opened]:
    """Everything that is to take rows; raises BadInput where one of them cannot."""
    if output.folder and not output.csv:
        raise BadInput("--out was given together with --no-csv; leave one of them out.")
    if output.resume and not output.folder:
        raise BadInput("--resume needs the folder of the sweep to go on with; give it as --out FOLDER.")
    into = Opened((output.folder or default_folder(this, command, settings.run_id)) if output.csv else None)
    with ExitStack() as stack:
        if into.folder:
            run_folder.create_folder(into.folder)
            stack.enter_context(locks.folder(into.folder, settings.command))
            into.files = csv_file.CsvFile(into.folder, warn=warn)
            run_folder.write_run_file(into.folder, about(settings, this))
            stack.callback(into.files.close)
            into.writers.append(into.files)
            into.places.append(lambda: f"Rows, samples and machine: {into.folder}")
        if output.wandb:
            run = wandb_run(output.wandb, command, this.slug, about(settings, this), into.folder, warn)
            stack.callback(run.close)
            into.writers.append(run)
            into.places.append(lambda: run.url_or_path and f"W&B: {run.url_or_path}")
        yield into


def wandb_run(
    wanted: Wandb, command: str, slug: str, config: dict[str, Any], folder: Path | None, warn: Callable[[str], None]
) -> WandbRun:
    """A W&B run that takes rows, named and tagged by command and device."""
    from swiglu_bench.writers.wandb_run import WandbRun

    return WandbRun(
        project=wanted.project,
        config=config,
        name=f"{command} {slug}",
        tags=list(dict.fromkeys([command, slug, *wanted.tags])),
        group=wanted.group or command,
        entity=wanted.entity,
        run_id=wanted.id,
        folder=folder,
        warn=warn,
    )


def about(settings: Settings, this: Machine) -> dict[str, Any]:
    """What run.json says: the command, its settings, the machine."""
    return {
        "command": settings.command,
        "run_id": settings.run_id,
        "settings": {
            "baseline": settings.baseline,
            "l2": "cold" if settings.cold_l2 else "hot",
            "energy": settings.energy,
            **dataclasses.asdict(settings.rule),
        },
        "machine": this.as_dict(),
    }


@contextlib.contextmanager
def logs(folder: Path | None, wanted: Callable[[], bool]) -> Iterator[Path]:
    """A folder for what implementations print, in the run's folder or a temporary one; empty files do not stay.

    A temporary one stays only where it is `wanted` in the end, because rows name it.
    """
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
            for folder_or_file in [*place.iterdir(), place]:  # of each GPU, where there are several
                if folder_or_file.is_dir() and not any(folder_or_file.iterdir()):
                    folder_or_file.rmdir()


def default_folder(this: Machine, name: str, moment: str) -> Path:
    """Where the files of a run go unless told otherwise; `moment` is a run id, or a time as `machine.now` gives it."""
    digits = moment.replace("-", "").replace(":", "")
    date, clock = digits[:8], digits[9:15]
    return Path("results") / this.slug / f"{date[:4]}-{date[4:6]}-{date[6:]}" / f"{clock}-{name}"
