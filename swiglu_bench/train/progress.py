"""What a person sees and W&B hears while models train: a bar with the live loss, or a line for each finished run."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console

from swiglu_bench.rows.training import Row
from swiglu_bench.writers.console import Bar
from swiglu_bench.writers.wandb_run import WandbRun


class Show:
    """Takes every step; `steps` are those of one run from one seed, `runs` how many there are."""

    def __init__(self, console: Console, steps: int, runs: int, wandb: WandbRun | None = None) -> None:
        self._console = console
        self._steps = steps
        self._wandb = wandb
        self._progress = Bar(console, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting", total=steps * runs)

    def __enter__(self) -> Show:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def listen(self, row: Row | None, doing: str) -> None:
        """A step, or what is going on instead."""
        if row is None:
            self._progress.update(self._task, description=doing)
            if not self._console.is_terminal and doing.startswith("keeping"):
                self._line(doing)
            return
        where = f"{row.implementation}, seed {row.seed}: step {row.step + 1}/{self._steps}, loss {row.loss:.4f}"
        self._progress.update(self._task, advance=1, description=where)
        if self._wandb:
            curve = f"{row.implementation}/seed{row.seed}"
            self._wandb.log({"step": row.step, f"loss/{curve}": row.loss, f"step_ms/{curve}": row.step_ms})
        if row.step + 1 == self._steps and not self._console.is_terminal:
            self._line(where)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
