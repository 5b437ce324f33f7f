"""A Weights & Biases run, from its start to its end; what is in it: wandb_content.py.

W&B is an extra: whatever goes wrong with it is told in one line, and the benchmark goes on.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swiglu_bench.cases.errors import one_line
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show.writers.wandb_content import FIGURES, case_of, charts, facts, figures, summarize, tables

START_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60
"""How long a run waits for the network; what is not uploaded by then stays on disk for `wandb sync`."""


class WandbRun:
    """Logs each record to a W&B run as it comes; WANDB_MODE=offline keeps the run on disk and needs no account.

    `warn` hears, once, why the run could not start, and once of the first failure after that. Nothing is ever asked on
    the terminal, and W&B's own messages are kept off it.
    """

    url_or_path: str = ""
    """Where the run is: its web page, or offline its folder; empty without a run."""
    upload: str = ""
    """The command that uploads an offline run."""

    def __init__(
        self,
        project: str,
        config: dict[str, Any],
        name: str,
        tags: Sequence[str] = (),
        group: str | None = None,
        folder: Path | None = None,
        warn: Callable[[str], object] = warnings.warn,
        *,
        entity: str | None = None,
        run_id: str | None = None,
    ) -> None:
        """Start the run, or go on with the one of `run_id` where there is one.

        `config` holds command, settings and machine, `folder` gets W&B's local files.
        """
        self._records: list[Record] = []
        self._warn = warn
        self._warned = False
        self._run: Any = None
        try:
            about = {"project": project, "config": config, "name": name, "tags": tags, "group": group}
            about |= {"entity": entity} if entity else {}
            about |= {"id": run_id, "resume": "allow"} if run_id else {}
            self._run, outage = _start(folder, **about)
            folder = Path(self._run.dir).parent
            self._later = f"wandb sync {folder}"
            if outage:
                warn(f"W&B cannot be reached, the run is kept on disk: {outage}. To upload it later: {self._later}")
            if not self._run.disabled:
                self.url_or_path = str(folder if self._run.offline else self._run.url)
                self.upload = self._later if self._run.offline else ""
            for figure in FIGURES:
                self._run.define_metric(f"{figure}/*", step_metric="tokens", summary="none")
            self._run.define_metric("tokens", hidden=True, summary="none")
            for figure in ("loss", "step_ms"):
                self._run.define_metric(f"{figure}/*", step_metric="step", summary="none")
        except Exception as error:  # W&B raises many kinds, and none may cost the run
            self._run, self._warned = None, True
            warn(
                f"The run is not logged to W&B: {one_line(error)}. "
                "Log in with `wandb login`, or set WANDB_MODE=offline to keep the run on disk."
            )

    def write(self, record: Record) -> None:
        """Log the figures of an `ok` record at its number of tokens; every record goes into the table."""
        self._records.append(record)
        if record.status is not Status.OK:
            return
        found = {f"{name}/{case_of(record)}/{record.implementation}": value for name, value in figures(record).items()}
        if found:
            self._attempt(lambda run: run.log({"tokens": record.tokens, **found}))

    def step(self, row: Record, number: int = -1) -> None:
        """Log a step of a training, by default the last one that the row of the seed has."""
        curve, at = f"{row.implementation}/seed{row.seed}", range(len(row.series["loss"]))[number]
        found = {"step": at} | {f"{name}/{curve}": row.series[name][at] for name in ("loss", "step_ms")}
        self._attempt(lambda run: run.log(found))

    def close(self) -> None:
        """Log tables, charts, summary and what was run, and end the run, waiting a limited time for the upload."""
        if self._records:
            self._attempt(lambda run: run.log({**tables(self._records), **charts(self._records)}))
            self._attempt(lambda run: run.summary.update(summarize(self._records)))
            self._attempt(lambda run: run.config.update(facts(self._records), allow_val_change=True))
        self._attempt(lambda run: run.finish())
        self._run = None

    @property
    def failed(self) -> bool:
        """Whether anything could not be logged."""
        return self._warned

    def _attempt(self, action: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # as above: an outage, a dead service process, a full disk
            if not self._warned:
                self._warn(f"W&B has failed, the run goes on: {one_line(error)}. To upload it later: {self._later}")
            self._warned = True

    @property
    def place(self) -> str:
        """Where the run is, for a reader; empty without a run."""
        return f"{self.url_or_path} (to upload it: {self.upload})" if self.upload else self.url_or_path


def _start(folder: Path | None, **about: Any) -> tuple[Any, str]:
    """A run; and where W&B cannot be reached, an offline one and what went wrong."""
    import wandb

    wanted = {
        "console": "off",
        "init_timeout": START_TIMEOUT_S,
        "finish_timeout": FINISH_TIMEOUT_S,
        "finish_timeout_raises": True,
        "x_disable_stats": True,  # it polls the GPU, which is being timed
    }
    known = {name: value for name, value in wanted.items() if name in wandb.Settings.model_fields}
    with _no_terminal():
        wandb.setup(settings=wandb.Settings(silent=True))  # silent in `init` comes too late for the login's messages
        begin = functools.partial(wandb.init, **about, dir=folder and str(folder))
        try:
            return begin(settings=wandb.Settings(silent=True, **known)), ""
        except wandb.errors.CommError as error:
            if isinstance(error, wandb.errors.AuthenticationError):
                raise
            wandb.teardown()  # the service that waited in vain
            wandb.setup(settings=wandb.Settings(silent=True))
            return begin(mode="offline", settings=wandb.Settings(silent=True, **known)), one_line(error)


@contextlib.contextmanager
def _no_terminal() -> Iterator[None]:
    """Without a key W&B asks for one wherever stdin is a terminal; where it is not, it raises."""
    stdin, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = stdin
