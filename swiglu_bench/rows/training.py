"""The rows of a training run (one per step, per seed and per implementation), and a finished run read back."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from swiglu_bench.rows.csv_table import read
from swiglu_bench.rows.record import Outcome, Record, Status
from swiglu_bench.rows.run_folder import read_about
from swiglu_bench.spec.errors import BadInput

Losses = dict[str, dict[int, list[float]]]
"""Of every step, by implementation and seed."""
Ended = dict[tuple[str, int], tuple["TrainedSeed", list[float]]]
"""What was trained to the end, by implementation and seed, and its losses."""

STEPS, SEEDS, SUMMARY = "train.csv", "runs.csv", "summary.csv"
BASELINE = "eager"
PERMUTED = "eager, permuted"
"""eager with its intermediate features in another order: the same model, rounded differently."""
SAVING_TOLERANCE = 0.2
"""How far the measured saving may be from the expected one, as a share of the saving."""


@dataclass(frozen=True)
class TrainingStep:
    """One step: a line of train.csv."""

    implementation: str
    seed: int
    step: int
    loss: float
    learning_rate: float
    step_ms: float
    """Wall clock until the loss is known, compilation in the first; not interleaved, so not for comparing."""


@dataclass(frozen=True)
class TrainedSeed:
    """An implementation trained from one seed to the end: a line of runs.csv."""

    implementation: str
    seed: int
    steps: int
    parameters: int
    """Trained weights."""
    held_out_loss: float
    metric: float
    """Accuracy or perplexity on the held-out data, after the last step."""
    seconds: float
    """Since the start, or since the run was resumed, checks and checkpoints included."""


class Curve(enum.StrEnum):
    """How a loss curve compares with eager's."""

    SAME = "same"
    """It differs no more than rounding in another order does."""
    WITHIN_SEEDS = "within seeds"
    """It differs more than that, or rounding is not known, and no more than the spread of eager's seeds."""
    DIFFERS = "differs"
    """It differs more than both."""
    UNKNOWN = "unknown"
    """It differs more than rounding does, and a single seed has no spread."""


@dataclass
class Summary(Outcome):
    """An implementation's line of summary.csv; None means: not measured, or does not apply."""

    KIND: ClassVar = "training"
    """What a run of these is called in JSON."""

    run_id: str
    task: str
    model: str
    implementation: str
    trains: str
    """everything, or inputs: the weights of its blocks keep their initial values."""
    status: Status
    reason: str = ""
    seeds: int = 0
    """Seeds from which it was trained to the end."""
    steps: int | None = None
    parameters: int | None = None
    """Trained weights."""

    # does it train the same
    final_loss: float | None = None
    """Mean over seeds of the mean loss over the last fifth of the steps."""
    final_loss_spread: float | None = None
    difference: float | None = None
    rounding: float | None = None
    eager_spread: float | None = None
    curve: str = ""
    held_out_loss: float | None = None
    metric: str = ""
    metric_mean: float | None = None
    metric_spread: float | None = None

    # does it train faster
    step_ms: float | None = None
    rate: float | None = None
    unit: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    verdict: str = ""
    aa_low: float | None = None
    aa_high: float | None = None
    rounds: int | None = None
    stopped_by: str = ""
    block_share: float | None = None
    block_forward_ms: float | None = None
    block_backward_ms: float | None = None
    optimizer_ms: float | None = None
    block_ratio: float | None = None
    """Time of one block by itself, relative to eager's."""
    expected_ratio: float | None = None
    as_expected: bool | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None

    # machine
    device: str = ""
    torch: str = ""
    triton: str = ""
    version: str = ""
    timestamp: str = ""

    precision: str = ""
    """What its blocks quantise operands to; empty where nothing."""
    difference_low: float | None = None
    """Ends of the 95% interval of `difference` over seeds (Student's t); None with one seed."""
    difference_high: float | None = None

    @property
    def frozen(self) -> bool:
        """Whether the weights of its blocks are not trained, so that by design it learns less and does less work."""
        return self.trains == "inputs"

    @property
    def half_width(self) -> float:
        """Half of the ratio's 95% interval; 0 where there is none."""
        return ((self.ratio_high or 0.0) - (self.ratio_low or 0.0)) / 2

    @property
    def noise(self) -> float:
        """How far from 1 the interval of eager's ratio to itself reaches; 0 where there is none."""
        return max(abs((self.aa_low or 1.0) - 1), abs((self.aa_high or 1.0) - 1))

    @property
    def failed(self) -> bool:
        """Whether it ended in an error, or trains everything in eager's precision and its curve still differs."""
        as_eager = not self.frozen and not self.precision
        return self.status is Status.ERROR or (self.curve == Curve.DIFFERS and as_eager)

    def record(self, about: dict[str, Any]) -> Record:
        """The row in the form of all runs, with what `about`, the run's run.json, says of the model.

        Its case is a step of the whole model, which has the model's name as its shape. A curve that differs from
        eager's makes it incorrect.
        """
        settings = about.get("settings", {})
        sizes, machine = settings.get("workload", {}), about.get("machine", {})
        wrong = self.failed and self.status is Status.OK
        return Record(
            run_id=self.run_id, command=str(about.get("command", "swiglu-bench train")), shape=self.model,
            hidden=sizes.get("hidden", 0), intermediate=sizes.get("intermediate", 0),
            tokens=sizes.get("batch", 0) * sizes.get("sequence", 1), dtype=settings.get("dtype", ""), scope="model",
            mode="train", seed=settings.get("seed", 0), implementation=self.implementation, weight_layout="",
            gradients="", status=Status.INCORRECT if wrong else self.status,
            reason="Its loss curve differs from eager's." if wrong else self.reason, comparable=not self.frozen,
            time_ms=None if wrong else self.step_ms, rounds=self.rounds, stopped_by=self.stopped_by, baseline=BASELINE,
            ratio=1.0 if self.verdict == "baseline" else self.ratio, ratio_low=self.ratio_low,
            ratio_high=self.ratio_high, verdict=self.verdict, aa_low=self.aa_low, aa_high=self.aa_high,
            saved_bytes=self.saved_bytes, peak_bytes=self.peak_bytes, host=machine.get("host", ""), device=self.device,
            driver=machine.get("driver", ""), cuda=machine.get("cuda", ""), torch=self.torch, triton=self.triton,
            version=self.version, timestamp=self.timestamp, precision=self.precision, source=self,
        )  # fmt: skip


STEP_COLUMNS, SEED_COLUMNS, SUMMARY_COLUMNS = (
    tuple(one.name for one in dataclasses.fields(kind)) for kind in (TrainingStep, TrainedSeed, Summary)
)


@dataclass(frozen=True)
class FinishedTraining:
    """A training run that has ended, read from its folder."""

    path: Path
    summaries: list[Summary]
    losses: Losses
    """Of everything trained to the end, including what is not shown: differences are taken from eager's losses."""
    about: dict[str, Any]
    """run.json; empty where there is none."""

    @property
    def names(self) -> list[str]:
        """Implementations, in the order of the tables."""
        return [one.implementation for one in self.summaries]

    def keep(self, names: Collection[str]) -> FinishedTraining:
        """Keep the summaries of these implementations."""
        return dataclasses.replace(self, summaries=[one for one in self.summaries if one.implementation in names])


def training_folder(path: Path) -> Path | None:
    """The folder of the training run that a path names: the folder itself, or one of its CSV files."""
    folder = path.parent if path.name in (STEPS, SEEDS, SUMMARY) and path.is_file() else path
    return folder if (folder / STEPS).is_file() else None


def load_training(folder: Path) -> FinishedTraining:
    """Read a training run's folder; raises BadInput for one that has not ended or that this version cannot read."""
    if not (folder / SUMMARY).exists():
        raise BadInput(
            f"{folder} is a training run that has not ended: it has no {SUMMARY}; "
            "resume it with its own command, --out and --resume, or leave it out."
        )
    summaries = read(folder / SUMMARY, Summary)
    finished = ended(steps_of(folder), read(folder / SEEDS, TrainedSeed))
    losses: Losses = {}
    for (name, seed), (_, of_steps) in finished.items():
        losses.setdefault(name, {})[seed] = of_steps
    return FinishedTraining(folder, summaries, losses, read_about(folder))


def steps_of(folder: Path) -> list[TrainingStep]:
    """All steps of a training run's folder; none in a folder of another command."""
    return read(folder / STEPS, TrainingStep) if (folder / STEPS).is_file() else []


def ended(steps: Iterable[TrainingStep], seeds: Iterable[TrainedSeed]) -> Ended:
    """The seeds trained to the end, all of whose steps are there."""
    losses: dict[tuple[str, int], list[float]] = {}
    for step in steps:
        losses.setdefault((step.implementation, step.seed), []).append(step.loss)
    keyed = {(one.implementation, one.seed): one for one in seeds}
    return {key: (one, losses[key]) for key, one in keyed.items() if len(losses.get(key, ())) == one.steps}
