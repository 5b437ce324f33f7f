"""Where the rows of `tp` and `train` go: the files of a folder, W&B and the screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from swiglu_bench import output
from swiglu_bench.machine import locks
from swiglu_bench.machine.machine import Machine
from swiglu_bench.options import WandbOptions
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import Record
from swiglu_bench.show.console import Screen
from swiglu_bench.show.table import nothing_done
from swiglu_bench.show.text import CsvFile
from swiglu_bench.show.wandb_run import WandbRun


@dataclass(frozen=True)
class Files:
    """The files that a command writes, and where."""

    out: Path | None
    """The folder; None: one named after the command and the time."""
    name: str
    """Of the command, in the name of such a folder."""
    kind: str
    """Of the rows."""
    earlier: Callable[[Path], dict[str, Any]]
    """What a folder with other runs adds to `about`; raises BadInput where it may not have any."""


class Outlets(ExitStack, Screen):
    """What takes rows; `about` becomes run.json. All that was opened is closed at the end of the `with` block."""

    def __init__(self, this: Machine, about: dict[str, Any], console: Console) -> None:
        ExitStack.__init__(self)
        Screen.__init__(self, console)
        self.this = this
        self.about: dict[str, Any] = about | {"machine": this.as_dict()}
        self.folder: Path | None = None
        self.files: CsvFile | None = None
        self.wandb: WandbRun | None = None

    def open(self, command: str, files: Files | None, options: WandbOptions) -> None:
        """Open the files, and a W&B run if the options want one. Raises BadInput."""
        if files:
            self.folder = files.out or output.default_folder(self.this, files.name, self.about["run_id"])
            run_folder.create_folder(self.folder)
            self.about |= files.earlier(self.folder)
            self.enter_context(locks.folder(self.folder, self.about["command"]))
            self.files = self.enter_context(closing(CsvFile(self.folder, self.warn, files.kind)))
            self.describe()
        if options.log_wandb:
            made = output.wandb_run(options, command, self.this.slug, self.about, self.folder, self.warn)
            self.wandb = self.enter_context(closing(made))

    def describe(self) -> None:
        """Write run.json."""
        if self.folder:
            run_folder.write_run_file(self.folder, self.about)

    def end(self, what: str, asked: Sequence[Record], done: str) -> bool:
        """Say where `what` is; whether nothing that was asked for is `done`, which is a failure."""
        if self.folder:
            self.say(f"{what}: {self.folder}")
        if self.wandb and self.wandb.url_or_path:
            self.say(f"W&B: {self.wandb.place}")
        nothing = nothing_done(asked, done)
        if nothing:
            self.warn(nothing)
        return bool(nothing)
