"""Where the rows of a command go besides the screen: opened before any work starts, closed however it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import locks
from swiglu_bench.machine.machine import Machine
from swiglu_bench.options import AuditOptions, SweepOptions, TpOptions, TrainOptions, WandbOptions, given
from swiglu_bench.request import Request, Say, split
from swiglu_bench.rows import run_folder
from swiglu_bench.show import Writer
from swiglu_bench.show.csv_file import CsvFile

if TYPE_CHECKING:
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


@contextlib.contextmanager
def opened(request: Request, this: Machine, warn: Say) -> Iterator[Opened]:
    """Everything that the request wants rows to go to. Raises BadInput where one of them cannot be opened."""
    command, options = request.command, request.options
    for name in ("resume", "force"):
        if getattr(options, name) and not options.out:
            raise BadInput(f"--{name} needs a folder that has rows; give it as --out FOLDER.")
    if options.resume and options.force:
        raise BadInput("--resume was given together with --force; leave one of them out.")

    def earlier(folder: Path) -> dict[str, Any]:
        if options.force:
            run_folder.remove_rows(folder)
        elif not options.resume and run_folder.has_rows(folder):
            raise BadInput(
                f"--out: {folder} has rows of an earlier run; add --resume to keep them and run what is "
                "missing, or --force to delete them and start again, or give another folder."
            )
        return {}

    folder = folder_of(command, options, this, request.settings.run_id)
    with writing(Opened(folder, about(request, this)), "run", earlier, command, options, this.slug, warn) as into:
        yield into


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
    options: WandbOptions, command: str, slug: str, run: dict[str, Any], folder: Path | None, warn: Say
) -> WandbRun:
    """A W&B run that takes rows, where the `--wandb-...` options say, named and tagged by command and device."""
    from swiglu_bench.show.wandb_run import WandbRun

    return WandbRun(
        project=options.wandb_project,
        config=run,
        name=f"{command} {slug}",
        tags=list(dict.fromkeys([command, slug, *split(options.wandb_tags)])),
        group=options.wandb_group or command,
        entity=options.wandb_entity,
        run_id=options.wandb_id,
        folder=folder,
        warn=warn,
    )


def about(request: Request, this: Machine) -> dict[str, Any]:
    """The content of run.json: the command, its options, the settings that follow from them, the machine."""
    settings = request.settings
    return {
        "command": settings.command,
        "run_id": settings.run_id,
        "options": given(request.options),
        "settings": {
            "baseline": ", ".join(sorted({settings.baseline_of(case) for case in request.cases})),
            "l2": "cold" if settings.cold_l2 else "hot",
            "energy": settings.energy,
            "layers": settings.layers,
            **dataclasses.asdict(settings.rule),
        },
        "machine": this.as_dict(),
        **({"workload": request.workload} if request.workload else {}),
    }


@contextlib.contextmanager
def logs(folder: Path | None, wanted: Callable[[], bool]) -> Iterator[Path]:
    """A folder for what implementations print, in the run's folder or a temporary one; empty files are removed.

    A temporary folder is kept only if it is `wanted` in the end, because rows name it.
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
