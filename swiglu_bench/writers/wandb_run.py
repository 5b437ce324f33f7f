"""Records as a Weights & Biases run: curves over tokens, one table of all rows, and a summary per implementation.

W&B is an extra: whatever goes wrong with it is told in one line, and the benchmark goes on.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swiglu_bench.record import COLUMNS, Record, Status

FIGURES: dict[str, Callable[[Record], float | None]] = {
    "time_ms": lambda record: record.time_ms,
    "ratio": lambda record: record.ratio,
    "tflops": lambda record: record.tflops,
    "gbps": lambda record: record.gbps,
    "limit_pct": lambda record: record.limit_pct,
    "error_ratio": lambda record: record.error_ratio,
    "saved_mib": lambda record: _mib(record.saved_bytes),
    "peak_mib": lambda record: _mib(record.peak_bytes),
    "workspace_mib": lambda record: _mib(record.workspace_bytes),
}
"""What is drawn over tokens, as <figure>/<scope>/<mode>/<shape>/<dtype>/<implementation>."""

START_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60
"""How long a run waits for the network; what is not uploaded by then stays on disk for `wandb sync`."""


class WandbRun:
    """Logs each record to a W&B run as it comes; WANDB_MODE=offline keeps the run on disk and needs no account.

    `warn` hears, once, why the run could not start, and once of the first failure after that. Nothing is ever asked on
    the terminal, and W&B's own messages are kept off it.
    """

    url_or_path: str = ""
    """Where the run is: its web page, or offline its folder and the command that uploads it; empty without a run."""

    def __init__(
        self,
        project: str,
        config: dict[str, Any],
        name: str,
        tags: Sequence[str] = (),
        group: str | None = None,
        folder: Path | None = None,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        """Start the run; `config` holds command, settings and machine, `folder` gets W&B's local files."""
        self._records: list[Record] = []
        self._warn = warn
        self._warned = False
        self._run: Any = None
        try:
            about = {"project": project, "config": config, "name": name, "tags": tags, "group": group}
            self._run, outage = _start(folder, **about)
            self._upload = f"wandb sync {Path(self._run.dir).parent}"
            if outage:
                warn(f"W&B cannot be reached, the run is kept on disk: {outage} To upload it later: {self._upload}")
            self.url_or_path = self._where()
            for figure in FIGURES:
                self._run.define_metric(f"{figure}/*", step_metric="tokens")
        except Exception as error:  # W&B raises many kinds, and none may cost the run
            self._run = None
            warn(
                f"The run is not logged to W&B: {_first_line(error)} "
                "Log in with `wandb login`, or set WANDB_MODE=offline to keep the run on disk."
            )

    def write(self, record: Record) -> None:
        """Log the figures of an `ok` record at its number of tokens; every record goes into the table."""
        self._records.append(record)
        if record.status is not Status.OK:
            return
        case = f"{record.scope}/{record.mode}/{record.shape}/{record.dtype}/{record.implementation}"
        figures = {f"{figure}/{case}": value for figure, get in FIGURES.items() if (value := get(record)) is not None}
        if figures:
            self._attempt(lambda run: run.log({"tokens": record.tokens, **figures}))

    def close(self) -> None:
        """Log the table and the summary and end the run, waiting a limited time for the upload."""
        if self._records:
            self._attempt(lambda run: run.log({"records": _table(self._records)}))
            self._attempt(lambda run: run.summary.update(summarize(self._records)))
        self._attempt(lambda run: run.finish())
        self._run = None

    def _attempt(self, action: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # as above: an outage, a dead service process, a full disk
            if not self._warned:
                self._warn(f"W&B has failed, the run goes on: {_first_line(error)} To upload it later: {self._upload}")
            self._warned = True

    def _where(self) -> str:
        if self._run.disabled:
            return ""
        if self._run.offline:
            return f"{Path(self._run.dir).parent} (to upload it: {self._upload})"
        return str(self._run.url)


def summarize(records: Sequence[Record]) -> dict[str, float]:
    """The figures of a whole run: per implementation its ratios, its worst error and how many rows ended how."""
    summary: dict[str, float] = {}
    for name in dict.fromkeys(record.implementation for record in records):
        own = [record for record in records if record.implementation == name]
        ratios = [record.ratio for record in own if record.ratio is not None and record.status is Status.OK]
        errors = [record.error_ratio for record in own if record.error_ratio is not None]
        if ratios:
            summary[f"best_ratio/{name}"] = min(ratios)
            summary[f"median_ratio/{name}"] = statistics.median(ratios)
        if errors:
            summary[f"worst_error_ratio/{name}"] = max(errors, key=lambda error: (math.isnan(error), error))
        for status in Status:
            summary[f"rows_{status}/{name}"] = sum(record.status is status for record in own)
    return summary


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
            return begin(mode="offline", settings=wandb.Settings(silent=True, **known)), _first_line(error)


@contextlib.contextmanager
def _no_terminal() -> Iterator[None]:
    """Without a key W&B asks for one wherever stdin is a terminal; where it is not, it raises."""
    stdin, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = stdin


def _table(records: Sequence[Record]) -> Any:
    import wandb

    rows = ([str(value) if isinstance(value, Status) else value for value in r.row().values()] for r in records)
    return wandb.Table(columns=list(COLUMNS), data=list(rows))


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def _first_line(error: Exception) -> str:
    """The error's first line, ending as a sentence."""
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return text if text.endswith(".") else f"{text}."
