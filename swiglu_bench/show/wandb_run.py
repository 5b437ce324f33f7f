"""A Weights & Biases run from its start to its end, and what it holds: figures, tables, charts, a summary.

W&B is an extra: whatever goes wrong with it is told in one line, and the benchmark goes on.
"""

import contextlib
import enum
import functools
import io
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from swiglu_bench.cases.errors import one_line
from swiglu_bench.rows.figures import MIB
from swiglu_bench.rows.finished_run import case_of as work_of
from swiglu_bench.rows.record import COLUMNS, FIGURES, Record, Status, grouped, unique
from swiglu_bench.show.ranking import median_ratios, ranked

START_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60
"""How long a run waits for the network; what is not uploaded by then stays on disk for `wandb sync`."""
CURVES = {name.replace("_bytes", "_mib"): name for name, figure in FIGURES.items() if figure.curve}
"""What is drawn over tokens, as <figure>/<scope>/<mode>/<shape>/<dtype>/<implementation>, and of which column."""
CHARTS = ("time_ms", "ratio", "limit_pct", "peak_mib")
"""Those that get a line chart over tokens, all implementations in one."""
STANDING = ("fastest_at", "median_ratio", "best_ratio", "worst_error_ratio", *(f"rows_{status}" for status in Status))
"""What is told of each implementation over the whole run."""
TRAINED = ("final_loss", "metric_mean", "step_ms", "curve", "verdict")
"""What the summary says of each implementation that was trained."""
FACTS = {
    "shapes": "shape", "scopes": "scope", "routings": "routing", "modes": "mode", "dtypes": "dtype", "tokens": "tokens",
    "implementations": "implementation", "baselines": "baseline", "hosts": "host", "gpus": "gpu_uuid",
}  # fmt: skip


class WandbRun:
    """Logs each record to a W&B run as it comes; WANDB_MODE=offline keeps the run on disk and needs no account.

    `warn` hears, once, why the run could not start, and once of the first failure after that. Nothing is ever asked on
    the terminal, and W&B's own messages are kept off it.
    """

    url_or_path: str = ""
    """Where the run is: its web page, or offline its folder; empty without a run."""
    upload: str = ""
    """The command that uploads an offline run."""
    failed: bool = False

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path | None = None,
        warn: Callable[[str], object] = warnings.warn,
        run_id: str | None = None,
        **about: Any,
    ) -> None:
        """Start the run, or go on with the one of `run_id` where there is one.

        `config` holds command, settings and machine, `folder` gets W&B's local files, and `about` is what else
        `wandb.init` takes: project, name, tags, group, entity.
        """
        self._records: list[Record] = []
        self._warn = warn
        self._run: Any = None
        try:
            about |= {"id": run_id, "resume": "allow"} if run_id else {}
            self._run, outage = _start(folder, config=config, **about)
            folder = Path(self._run.dir).parent
            self._later = f"wandb sync {folder}"
            if outage:
                warn(f"W&B cannot be reached, the run is kept on disk: {outage}. To upload it later: {self._later}")
            if not self._run.disabled:
                self.url_or_path = str(folder if self._run.offline else self._run.url)
                self.upload = self._later if self._run.offline else ""
            for figure in CURVES:
                self._run.define_metric(f"{figure}/*", step_metric="tokens", summary="none")
            self._run.define_metric("tokens", hidden=True, summary="none")
            for figure in ("loss", "step_ms"):
                self._run.define_metric(f"{figure}/*", step_metric="step", summary="none")
        except Exception as error:  # W&B raises many kinds, and none may cost the run
            self._run, self.failed = None, True
            advice = "Log in with `wandb login`, or set WANDB_MODE=offline to keep the run on disk."
            warn(f"The run is not logged to W&B: {one_line(error)}. {advice}")

    def write(self, record: Record) -> None:
        """Log the figures of an `ok` record at its number of tokens; every record goes into the table."""
        self._records.append(record)
        if record.status is not Status.OK:
            return
        found = {f"{name}/{case_of(record)}/{record.implementation}": value for name, value in curves(record).items()}
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
            values = {name: unique(getattr(row, of) for row in self._records) for name, of in FACTS.items()}
            facts = {name: [value for value in found if value not in (None, "")] for name, found in values.items()}
            self._attempt(lambda run: run.config.update(facts, allow_val_change=True))
        self._attempt(lambda run: run.finish())
        self._run = None

    def _attempt(self, action: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # as above: an outage, a dead service process, a full disk
            if not self.failed:
                self._warn(f"W&B has failed, the run goes on: {one_line(error)}. To upload it later: {self._later}")
            self.failed = True

    @property
    def place(self) -> str:
        """Where the run is, for a reader; empty without a run."""
        return f"{self.url_or_path} (to upload it: {self.upload})" if self.upload else self.url_or_path


def _start(folder: Path | None, **about: Any) -> tuple[Any, str]:
    """A run; and where W&B cannot be reached, an offline one and what went wrong."""
    import wandb

    wanted = {
        "console": "off", "init_timeout": START_TIMEOUT_S, "finish_timeout": FINISH_TIMEOUT_S,
        "finish_timeout_raises": True, "x_disable_stats": True,  # these poll the GPU, which is being timed
    }  # fmt: skip
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


def curves(record: Record) -> dict[str, float]:
    """Those figures of CURVES that the record has."""
    known = {name: (value, column) for name, column in CURVES.items() if (value := getattr(record, column)) is not None}
    return {name: value / MIB if FIGURES[column].unit == "B" else value for name, (value, column) in known.items()}


def case_of(record: Record) -> str:
    """The part of a metric's name that curves of one chart have in common."""
    return f"{record.scope}/{record.mode}/{record.shape}/{record.dtype}"


def standing(records: Sequence[Record]) -> dict[str, dict[str, float | None]]:
    """Of each implementation the columns of STANDING: cases won, ratios, worst error, and how many rows ended how."""
    cases = (ranked(same) for same in grouped(records, work_of).values())
    wins = Counter(first.implementation for first, *_ in filter(None, cases) if first.ratio is not None)
    medians, found = median_ratios(records), {}
    for name, own in grouped(records, attrgetter("implementation")).items():
        ratios = [record.ratio for record in own if record.ratio is not None and record.status is Status.OK]
        errors = [record.error_ratio for record in own if record.error_ratio is not None]
        figures = (
            wins[name], medians.get(name), min(ratios, default=None),
            max(errors, key=lambda error: (math.isnan(error), error), default=None),
            *(sum(record.status is status for record in own) for status in Status),
        )  # fmt: skip
        found[name] = dict(zip(STANDING, figures, strict=True))
    return found


def summarize(records: Sequence[Record]) -> dict[str, float | str]:
    """The figures of a whole run: where each implementation stands, the best over all, and how many rows failed."""
    summary: dict[str, Any] = {}
    for name, own in standing(records).items():
        without = {"fastest_at"} if own["best_ratio"] is None else ()
        summary |= {f"{key}/{name}": value for key, value in own.items() if key not in without}
    for record in records:
        if record.kind == "training":
            summary |= {f"{name}/{record.implementation}": getattr(record, name) for name in TRAINED}
    if medians := median_ratios(records):
        summary["best_implementation"] = min(medians, key=lambda name: medians[name])
        summary["best_median_ratio"] = min(medians.values())
    summary["failures"] = sum(record.failed for record in records)
    return {name: value for name, value in summary.items() if value is not None}


def tables(records: Sequence[Record]) -> dict[str, Any]:
    """`records`: every row and column; `standing`: one line each; `not_ok`: why a row has no figures; `remarks`."""
    import wandb

    def noted(column: str, wanted: Callable[[Record], object]) -> tuple[list[str], list[list[Any]]]:
        rows = [[row.implementation, case_of(row), row.tokens, row.status.value, getattr(row, column)]
                for row in records if wanted(row)]  # fmt: skip
        return ["implementation", "case", "tokens", "status", column], rows

    heads = ["implementation", *(column.removeprefix("rows_") for column in STANDING)]
    found = {
        "records": (list(COLUMNS), [[_plain(getattr(record, name)) for name in COLUMNS] for record in records]),
        "standing": (heads, [[name, *own.values()] for name, own in standing(records).items()]),
        "not_ok": noted("reason", lambda row: row.status is not Status.OK),
        "remarks": noted("remarks", lambda row: row.remarks),
    }
    return {name: wandb.Table(columns=columns, data=data) for name, (columns, data) in found.items() if data}


def charts(records: Sequence[Record]) -> dict[str, Any]:
    """W&B's own charts: per case a line chart over tokens for each figure, and bars at the most tokens."""
    import wandb

    found: dict[str, Any] = {}
    for case, rows in grouped((record for record in records if record.status is Status.OK), case_of).items():
        for figure in CHARTS:
            known = [(row.implementation, row.tokens, curves(row)[figure]) for row in rows if figure in curves(row)]
            if not known:
                continue
            lines = {name: sorted(point[1:] for point in own) for name, own in grouped(known, itemgetter(0)).items()}
            xs, ys = ([[point[axis] for point in line] for line in lines.values()] for axis in (0, 1))
            title = f"{case}: {FIGURES[CURVES[figure]].heading}"
            if max(map(len, xs)) > 1:
                found[f"charts/{figure}/{case}"] = wandb.plot.line_series(xs, ys, list(lines), title, "tokens")
            most = max(tokens for _, tokens, _ in known)
            bars = sorted((value, name) for name, tokens, value in known if tokens == most)
            table = wandb.Table(columns=["implementation", figure], data=[[name, value] for value, name in bars])
            found[f"bars/{figure}/{case}"] = wandb.plot.bar(table, "implementation", figure, f"{title}, {most} tokens")
    return found


def _plain(value: object) -> object:
    """W&B takes an enumeration's member, in a column of texts, for another type."""
    return value.value if isinstance(value, enum.Enum) else value
