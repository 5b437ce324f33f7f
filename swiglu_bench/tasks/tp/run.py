"""One call of `swiglu-bench tp`: its folder and screen around groups of ranks, and what the death of one costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from swiglu_bench import output
from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import WEIGHTS, Case, Dtype
from swiglu_bench.machine import locks
from swiglu_bench.machine.machine import Machine, free_memory_bytes
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.request import INTERRUPTED
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show import documents, tables
from swiglu_bench.show.console import Bar
from swiglu_bench.show.table import nothing_done
from swiglu_bench.show.wandb_run import WandbRun
from swiglu_bench.tasks.tp.bench import RankBench
from swiglu_bench.tasks.tp.case import blanks, run_case
from swiglu_bench.tasks.tp.files import Folder
from swiglu_bench.tasks.tp.options import TpOptions
from swiglu_bench.tasks.tp.place import RankPlace
from swiglu_bench.tasks.tp.plan import Plan
from swiglu_bench.tasks.tp.ranks import GroupLost, Launched, Spawned, follow
from swiglu_bench.worker import policy
from swiglu_bench.worker.child import DoesNotEnd
from swiglu_bench.worker.settings import Settings


def sharing(size: int, settings: Settings) -> int:
    """How many of so many ranks share a device's memory: on a CPU all, each of which runs every case whole, too."""
    return size if settings.device.type == "cpu" else 1


def too_large(cases: Sequence[Case], size: int, settings: Settings) -> dict[Case, str]:
    """The cases that the device's memory does not hold with so many ranks, and why."""
    free_bytes, processes = free_memory_bytes(settings.device), sharing(size, settings)
    found = {case: policy.too_large(settings, case, free_bytes, processes) for case in cases}
    return {case: reason for case, reason in found.items() if reason}


def work(plan: Plan, sizes: Sequence[int], rule: Rule) -> dict[Dtype, float]:
    """Operations of the fewest rounds on a CPU, by dtype: split, without collectives, and whole per rank."""
    found = dict.fromkeys((case.dtype for case in plan.cases), 0.0)
    here = sum(one.name not in plan.skipped and one.unavailable("cpu") is None for one in plan.implementations)
    rounds = (rule.warmup_rounds + rule.min_rounds) * here * len(plan.ways)
    for case in plan.cases:
        found[case.dtype] += sum(2 + size for size in sizes) * rounds * costs.flops(case, (*WEIGHTS[case.scope], "x"))
    return found


class TpRun:
    """Takes rows as they come: into files, to W&B, onto the screen. `options` are for run.json."""

    def __init__(
        self, this: Machine, settings: Settings, options: dict[str, Any], console: Console, quiet: bool
    ) -> None:
        self.this, self.console, self.quiet = this, console, quiet
        self.rows: list[Record] = []
        self.about: dict[str, Any] = {
            "command": settings.command, "run_id": settings.run_id, "settings": options, "machine": this.as_dict(),
            "groups": {},
        }  # fmt: skip
        self._stack = ExitStack()
        self._folder: Folder | None = None
        self._wandb: WandbRun | None = None
        self._lost = False
        self._bar = Bar(self.console, doing="starting ranks", quiet=self.quiet)
        self._done = 0
        self._fatal: set[str] = set()
        """Implementations that ended a group at the case that is to come again."""

    def open(self, options: TpOptions, total: int) -> None:
        """Open what takes rows; `total` cases are to come, over all groups. Raises BadInput."""
        if options.csv:
            path = options.out or output.default_folder(self.this, "tp", self.about["run_id"])
            self._folder = self._stack.enter_context(closing(Folder(path, self.warn)))
            self._stack.enter_context(locks.folder(path, self.about["command"]))
            self._folder.describe(self.about)
        if options.log_wandb:
            folder = self._folder.path if self._folder else None
            made = output.wandb_run(options, "tp", self.this.slug, self.about, folder, self.warn)
            self._wandb = self._stack.enter_context(closing(made))
        self._bar.update(self._bar.tasks[0].id, total=total)

    def spawn(self, plan: Plan, sizes: Sequence[int], settings: Settings, wait: bool) -> int:
        """Let groups of processes on this machine work on the plan, one size after the other; the exit status."""
        interrupted = False
        with self._stack:
            self._stack.enter_context(self._bar)
            try:
                for number in range(max(sizes) if settings.device.type == "cuda" else 0):
                    one = torch.device("cuda", number)
                    self._stack.enter_context(locks.device(one, self.about["command"], wait, self.say))
                folder = self._folder.path if self._folder else None
                logs = self._stack.enter_context(output.logs(folder, lambda: self._lost))
                for size in sizes:
                    self._one_size(self._fitting(plan, size, settings), size, settings, logs)
            except KeyboardInterrupt:
                interrupted = True
            except DoesNotEnd as error:
                self._lost = True
                self.warn(f"{error} The run ends here.")
            self._conclude(plan)
        if interrupted:
            self.say("Interrupted: finished rows were kept.", "yellow")
            return INTERRUPTED
        return self._ended(plan)

    def join(self, plan: Plan, settings: Settings) -> int:
        """Be one of the ranks that torchrun started; rank 0 asks the others and takes the rows. The exit status."""
        bench = RankBench()
        with self._stack:
            self._stack.enter_context(self._bar)
            self._stack.enter_context(locks.device(settings.device, self.about["command"], False, self.say))
            bench.join(settings, plan.timeout_s, plan.everybody)
            self._stack.callback(torch.distributed.destroy_process_group)
            if bench.group.rank:
                return follow(bench)
            ranks = Launched(bench)
            try:
                self._cases(plan, RankPlace(ranks, settings))
                ranks.end(self.status)
            except GroupLost as loss:
                self._lost = True
                self._give_up(plan, self._done, ranks.size, loss)
            self._conclude(plan)
        return self._ended(plan)

    def _ended(self, plan: Plan) -> int:
        """The exit status at the end: that no row that was asked for is ok is a failure, too."""
        nothing = nothing_done([row for row in self.rows if row.implementation in plan.asked], "timed")
        if nothing:
            self.warn(nothing)
        return self.status or int(bool(nothing))

    def _take(self, rows: Sequence[Record]) -> None:
        """The rows of a case."""
        for row in rows:
            if row.implementation in self._fatal:
                row.status = Status.ERROR
        self._fatal.clear()
        self.rows += rows
        self._done += 1
        self._tell("", "", 0.0)
        for row in rows:
            if self._folder:
                self._folder.write(row)
            if self._wandb:
                self._wandb.write(row)
            if row.failed if self.quiet else not self.console.is_terminal and row.status is not Status.SKIPPED:
                self.say(tables.tp_line(row))

    def _tell(self, where: str, doing: str, fraction: float) -> None:
        self._bar.tell(where + doing, self._done + fraction)

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

    def _fitting(self, plan: Plan, size: int, settings: Settings) -> Plan:
        """The plan without the cases that the machine's memory does not hold with so many ranks; these get rows."""
        large = too_large(plan.cases, size, settings)
        for case, reason in large.items():
            rows = list(blanks(plan, case, [self.this.as_dict()] * size, size).values())
            for row in rows:
                row.end(Status.SKIPPED, reason)
            self.say(f"{size} ranks, {case.label}: skipped: {reason}")
            self._take(rows)
        return dataclasses.replace(plan, cases=tuple(case for case in plan.cases if case not in large))

    def _one_size(self, plan: Plan, size: int, settings: Settings, logs: Path) -> None:
        """All cases with so many ranks; a group that is lost is replaced by one without the implementation that ran."""
        while plan.cases:
            name, done = "", self._done
            with ExitStack() as group:
                try:
                    ranks = Spawned(size, settings, plan.everybody, plan.timeout_s, logs)
                    group.callback(ranks.end)
                    place = RankPlace(ranks, settings)
                    try:
                        self._cases(plan, place)
                    finally:
                        name = place.whose
                    return
                except GroupLost as loss:
                    self._lost, lost = True, loss
            if not name:
                self._give_up(plan, self._done - done, size, lost)
                return
            plan = dataclasses.replace(plan, cases=plan.cases[self._done - done :])
            reason = f"It ended the group of {size} ranks at {plan.cases[0].label}: {lost}."
            self.warn(f"{name}: {reason} The others continue without it.")
            self._fatal.add(name)
            plan = dataclasses.replace(plan, skipped=plan.skipped | {name: reason})

    def _cases(self, plan: Plan, place: RankPlace) -> None:
        """All cases, one after the other. Raises GroupLost."""
        size, machines = place.ranks.size, place.machines
        ranks = [{"rank": rank, "host": one["host"], "device": one["device"]} for rank, one in enumerate(machines)]
        self.about["groups"][str(size)] = {"ranks": ranks, "hosts": {one["host"]: one for one in reversed(machines)}}
        if self._folder:
            self._folder.describe(self.about)
        for case in plan.cases:
            rows = blanks(plan, case, machines, size)
            run_case(place, plan, case, rows, partial(self._tell, f"{size} ranks, {case.label}: "))
            self._take(list(rows.values()))

    def _give_up(self, plan: Plan, done: int, size: int, loss: GroupLost) -> None:
        """No further group would fare better, or there can be none: the cases that are not done."""
        for case in plan.cases[done:]:
            rows = list(blanks(plan, case, [self.this.as_dict()], size).values())
            for row in rows:
                row.end(Status.ERROR, f"The group of {size} ended: {loss}.")
            self._take(rows)

    def _conclude(self, plan: Plan) -> None:
        self._bar.stop()
        if not self.quiet:
            for table in tables.tp_tables(self.rows):
                self.console.print(table, highlight=False)
        if self._folder:
            if len({row["ranks"] for row in self._folder.rows()}) > 1:
                self.say(documents.save_scaling(self._folder.path, plan.names))
            self.say(f"Rows, samples and machines: {self._folder.path}")
        if self._wandb and self._wandb.url_or_path:
            self.say(f"W&B: {self._wandb.place}")
