"""One call of `swiglu-bench tp`: its folder and screen around groups of ranks, and what the death of one costs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from swiglu_bench.charts import scaling
from swiglu_bench.machine import locks, machine
from swiglu_bench.machine.machine import Machine
from swiglu_bench.processes.child import Died
from swiglu_bench.processes.worker import NOBODY
from swiglu_bench.rows.ranks import Row
from swiglu_bench.rows.record import Status
from swiglu_bench.sweep import output, request
from swiglu_bench.sweep.output import default_folder
from swiglu_bench.tp.files import Folder
from swiglu_bench.tp.launch import END_S, Ranks
from swiglu_bench.tp.plan import RankTask
from swiglu_bench.tp.rank import Silent, catalogue
from swiglu_bench.tp.session import blank
from swiglu_bench.writers import tp_tables
from swiglu_bench.writers.console import Bar
from swiglu_bench.writers.wandb_run import WandbRun

INTERRUPTED = 130


class TpRun:
    """Takes rows as they come: into files, to W&B, onto the screen. `settings` are for run.json."""

    def __init__(self, this: Machine, run_id: str, settings: dict[str, Any], console: Console, quiet: bool) -> None:
        self.this, self.console, self.quiet = this, console, quiet
        self.rows: list[Row] = []
        self.about: dict[str, Any] = {
            "command": request.command_line(), "run_id": run_id, "settings": settings, "machine": this.as_dict(),
            "groups": {},
        }  # fmt: skip
        self._stack = ExitStack()
        self._folder: Folder | None = None
        self._wandb: WandbRun | None = None
        self._lost = False
        self._fatal: set[str] = set()
        """Implementations that ended a group at the case that is to come again."""

    def open(self, csv: bool, out: Path | None, project: str | None, total: int) -> None:
        """Open what takes rows; `total` cases are to come, over all groups. Raises BadInput."""
        if csv:
            path = out or default_folder(self.this, "tp", self.about["run_id"])
            self._folder = Folder(path, self.warn)
            self._stack.enter_context(locks.folder(path, self.about["command"]))
            self._folder.describe(self.about)
        if project:
            self._wandb = WandbRun(project, self.about, f"tp {self.this.slug}", ["tp", self.this.slug], "tp",
                                   self._folder.path if self._folder else None, self.warn)  # fmt: skip
            self._wandb.define("tp/*", "tokens")
            self._stack.callback(self._wandb.close)
        self._bar = Bar(self.console, disable=self.quiet or not self.console.is_terminal)
        self._task = self._bar.add_task("starting ranks", total=total)
        self._done = 0
        self._bar.start()
        self._stack.callback(self._bar.stop)

    def spawn(self, plan: RankTask, sizes: Sequence[int], device_type: str, wait: bool) -> int:
        """Let groups of processes on this machine work on the plan, one size after the other; the exit status."""
        interrupted = False
        with self._stack:
            try:
                for number in range(max(sizes) if device_type == "cuda" else 0):
                    one = torch.device("cuda", number)
                    self._stack.enter_context(locks.device(one, self.about["command"], wait, self.say))
                folder = self._folder.path if self._folder else None
                logs = self._stack.enter_context(output.logs(folder, lambda: self._lost))
                for size in sizes:
                    self._one_size(plan, size, device_type, logs)
            except KeyboardInterrupt:
                interrupted = True
            self._conclude(plan)
        if interrupted:
            self.say("Interrupted: what ran was kept.", "yellow")
            return INTERRUPTED
        return self.status

    def join(self, plan: RankTask, device: torch.device, timeout_s: float) -> int:
        """Be one of the ranks that torchrun started; rank 0 takes the rows. The exit status."""
        from swiglu_bench.tp.group import Group
        from swiglu_bench.tp.session import Session

        with self._stack:
            self._stack.enter_context(locks.device(device, self.about["command"], False, self.say))
            group = Group.join(device, timeout_s)
            session = Session(
                group, plan, catalogue(plan.implementations), _Here(self) if group.rank == 0 else Silent()
            )
            about = session.about()
            if group.rank == 0:
                self.note_group(group.size, about)
            session.run()
            failed = group.first(self.status)
            group.close()
            if group.rank == 0:
                self._conclude(plan)
        return failed

    def note_group(self, size: int, about: dict[str, Any]) -> None:
        """Enter the machines of a group's ranks."""
        self.about["groups"][str(size)] = about
        if self._folder:
            self._folder.describe(self.about)

    def take(self, rows: Sequence[Row]) -> None:
        """The rows of a case."""
        for row in rows:
            if row.implementation in self._fatal:
                row.status = Status.ERROR
        self._fatal.clear()
        self.rows += rows
        self._done += 1
        self.tell("", 0.0)
        if self._folder:
            self._folder.write(rows)
        for row in rows:
            if self._wandb and row.time_ms is not None:
                way = "sequence" if row.sequence_parallel else "tokens"
                name = f"{row.mode}/{row.shape}/{row.dtype}/{way}/{row.ranks}/{row.implementation}"
                shown = {"time_ms": row.time_ms, "ratio": row.ratio, "efficiency": row.efficiency,
                         "hidden_share": row.hidden_share, "bus_gbps": row.bus_gbps}  # fmt: skip
                found = {f"tp/{figure}/{name}": value for figure, value in shown.items() if value is not None}
                self._wandb.log({"tokens": row.tokens, **found})
            if row.failed if self.quiet else not self.console.is_terminal and row.status is not Status.SKIPPED:
                self.say(tp_tables.line(row))

    def tell(self, doing: str, fraction: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=self._done + fraction, description=doing)

    @property
    def status(self) -> int:
        """The exit status so far."""
        return int(self._lost or any(row.failed for row in self.rows))

    def say(self, text: str, style: str = "") -> None:
        """A line for people."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that needs attention."""
        self.say(f"Warning: {text}", "yellow")

    def _one_size(self, plan: RankTask, size: int, device_type: str, logs: Path) -> None:
        """All cases with so many ranks; a group that dies is replaced by one without the implementation that ran."""
        while plan.cases:
            ranks = Ranks(size, device_type, plan, logs)
            ended, patience_s = 0, 0.0
            try:
                for kind, value in ranks.events():
                    if kind == "about":
                        self.note_group(size, value)
                    elif kind == "rows":
                        ended += 1
                        self.take(value)
                    else:
                        self.tell(f"{size} ranks, {plan.cases[ended].label}: {value[0]}", value[1])
                patience_s = END_S
                return
            except Died as death:
                self._lost = True
                if death.culprit == NOBODY:
                    self._give_up(plan, size, ended, f"The group of {size} ended: {death}.")
                    return
                name, case = plan.names[death.culprit], plan.cases[ended]
                reason = f"It ended the group of {size} ranks at {case.label}: {death}."
                self.warn(f"{name}: {reason} The others go on without it.")
                self._fatal.add(name)
                plan = plan.without(name, reason, ended)
            finally:
                ranks.end(patience_s)

    def _give_up(self, plan: RankTask, size: int, ended: int, reason: str) -> None:
        """Nobody's code ran: no further group would fare better."""
        for case in plan.cases[ended:]:
            rows = [
                blank(plan.run_id, case, size, way, name, [self.this], machine.now())
                for name in plan.names
                for way in plan.ways
            ]
            for row in rows:
                row.status, row.reason = Status.ERROR, reason
            self.take(rows)

    def _conclude(self, plan: RankTask) -> None:
        self._bar.stop()
        if not self.quiet:
            for table in tp_tables.tables(self.rows):
                self.console.print(table, highlight=False)
        if self._folder:
            if len({row["ranks"] for row in self._folder.rows()}) > 1:
                self.say(scaling.draw(self._folder.path, self._folder.rows(), plan.names))
            self.say(f"Rows, samples and machines: {self._folder.path}")
        if self._wandb and self._wandb.url_or_path:
            self.say(f"W&B: {self._wandb.url_or_path}")


class _Here(Silent):
    """Rank 0 under torchrun hears itself."""

    def __init__(self, run: TpRun) -> None:
        self._run = run

    def tell(self, doing: str, fraction: float) -> None:
        """Onto the screen."""
        self._run.tell(doing, fraction)

    def rows(self, rows: list[Row]) -> None:
        """Into the files."""
        self._run.take(rows)
