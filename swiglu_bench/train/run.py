"""One run of `swiglu-bench train`: its folder, locks, W&B run and screen around the session, and its exit status."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from swiglu_bench.charts.training import draw
from swiglu_bench.machine import locks, machine
from swiglu_bench.machine.machine import Machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import Status
from swiglu_bench.rows.training import PERMUTED, Summary
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.sweep import request
from swiglu_bench.sweep.output import default_folder
from swiglu_bench.train import paired, session
from swiglu_bench.train.blocks import Contender, why_not
from swiglu_bench.train.files import Folder
from swiglu_bench.train.model import Experiment
from swiglu_bench.train.progress import Show
from swiglu_bench.train.session import Results, TrainingSchedule
from swiglu_bench.train.summary import in_order
from swiglu_bench.writers import wandb_run
from swiglu_bench.writers.training_tables import tables
from swiglu_bench.writers.wandb_run import WandbRun

INTERRUPTED = 130


class TrainRun:
    """One call of the command: who takes part, what is said, and the exit status."""

    def __init__(
        self,
        experiment: Experiment,
        chosen: Sequence[Implementation],
        this: Machine,
        task: str,
        model: str,
        interpret: bool,
        console: Console,
    ) -> None:
        self.console = console
        self.rows: list[Summary] = []
        self.about: dict[str, Any] = {}
        self.experiment = experiment
        self.this = this
        self.task = task
        self.model = model
        self.interpret = interpret
        self.command = request.command_line()
        self.started = machine.now()
        self.run_id = machine.run_id(self.started)
        self.names = [one.name for one in chosen]
        where = (experiment.case(), experiment.device.type, interpret, this.compute_capability)
        reasons = {one.name: why_not(one, *where) for one in chosen}
        self.able = [one for one in chosen if reasons[one.name] is None]
        self.skipped = [self._skip(one, reason) for one in chosen if (reason := reasons[one.name])]

    def plan(
        self, seeds: Sequence[int], budget_s: float, ratios: dict[str, float] | None, checkpoint_every: int
    ) -> TrainingSchedule:
        """eager, eager with its sums in another order, and the others."""
        eager, *others = [Contender(one.name, one) for one in self.able]
        contenders = [eager, Contender(PERMUTED, eager.implementation, permuted=True), *others]

        def timed(one: Contender) -> bool:
            return not one.permuted and not (self.interpret and one.implementation.backend == "triton")

        return TrainingSchedule(
            self.experiment, contenders, seeds, paired.default_rule(budget_s), timed, ratios, checkpoint_every
        )

    def go(
        self,
        plan: TrainingSchedule,
        settings: dict[str, Any],
        csv: bool,
        out: Path | None,
        resume: bool,
        project: str | None,
        wait: bool,
    ) -> int:
        """The exit status."""
        about = self.about = {
            "command": self.command, "run_id": self.run_id, "settings": settings, "machine": self.this.as_dict(),
        }  # fmt: skip
        results, lost, interrupted = session.Results(), "", False
        with ExitStack() as stack:
            folder = None
            if csv:
                path = out or default_folder(self.this, f"train-{self.task}", self.started)
                run_folder.create_folder(path)
                stack.enter_context(locks.folder(path, self.command))
                folder = Folder(path, about, resume, self._warn)
                stack.callback(folder.close)
            wandb = self._wandb(project, about, folder.path if folder else None) if project else None
            if wandb:
                stack.callback(wandb.close)
            stack.enter_context(locks.device(self.experiment.device, self.command, wait, self._say))
            self._say(self._what())
            wanted = {(one.name, seed) for one in plan.contenders for seed in plan.seeds}
            done = len(wanted & folder.finished().keys()) if folder else 0
            if done:
                self._say(f"{done} of {len(wanted)} trainings are finished in {out} and are kept.")
            show = stack.enter_context(Show(self.console, plan.experiment.steps, len(wanted) - done, wandb))
            try:
                session.run(plan, results, folder, show.listen)
            except KeyboardInterrupt:
                interrupted = True
            except DeviceLost as error:
                lost = f"The GPU is lost to this process ({error}); what had ended by then is kept."
            show.__exit__(None, None, None)
            summaries = session.summaries(plan, results, self._about)
            if lost:
                self._warn(lost)
            self._tell(summaries, results, folder, wandb)
        if interrupted:
            self._say("Interrupted: what ran was kept; go on with --resume.", style="yellow")
            return INTERRUPTED
        return int(bool(lost) or any(one.failed for one in summaries))

    def _tell(self, summaries: list[Summary], results: Results, folder: Any, wandb: WandbRun | None) -> None:
        shown = {one.implementation: one for one in (*summaries, *self.skipped)}
        self.rows = rows = in_order(shown, ["eager", PERMUTED, *self.names[1:]])
        for table in tables(rows):
            self.console.print(table, highlight=False)
        if folder:
            folder.summarise(rows)
            frozen = [one.implementation for one in rows if one.frozen]
            self._say(draw(folder.path, results.losses, f"{self.task}: loss over steps", self.names, frozen))
            self._say(f"Losses, summary and machine: {folder.path}")
        if wandb:
            figures = ("final_loss", "metric_mean", "step_ms", "ratio", "expected_ratio", "curve", "verdict")
            wandb.conclude({f"{name}/{one.implementation}": getattr(one, name) for one in rows for name in figures})
            if wandb.url_or_path:
                self._say(f"W&B: {wandb.url_or_path}")

    def _what(self) -> str:
        experiment, w = self.experiment, self.experiment.workload
        return (
            f"{self.task} on {self.this.device}: {experiment.data.about}; blocks {w.hidden}x{w.intermediate}, "
            f"{w.tokens} tokens a step, {experiment.steps} steps, {experiment.dtype.value}."
        )

    def _wandb(self, project: str, about: dict[str, Any], folder: Path | None) -> WandbRun:
        name, tags = f"train {self.task} {self.this.slug}", ["train", self.task, self.this.slug]
        run = wandb_run.WandbRun(project=project, config=about, name=name, tags=tags, folder=folder, warn=self._warn)
        for figures in ("loss/*", "step_ms/*"):
            run.define(figures, "step")
        return run

    def _about(self, contender: Contender) -> Summary:
        return self._row(contender.name, contender.implementation.trains)

    def _skip(self, one: Implementation, reason: str) -> Summary:
        row = self._row(one.name, one.trains)
        row.status, row.reason = Status.SKIPPED, reason
        return row

    def _row(self, name: str, trains: str) -> Summary:
        return Summary(
            self.run_id, self.task, self.model, name, trains, Status.OK, device=self.this.device,
            torch=self.this.torch, triton=self.this.triton, version=self.this.version, timestamp=self.started,
        )  # fmt: skip

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _warn(self, text: str) -> None:
        self._say(f"Warning: {text}", style="yellow")
