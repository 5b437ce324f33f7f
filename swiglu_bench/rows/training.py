"""What a training run keeps: the lines of train.csv and runs.csv. No torch in here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

STEPS, RUNS, SUMMARY = "train.csv", "runs.csv", "summary.csv"


@dataclass(frozen=True)
class Row:
    """One step: a line of train.csv."""

    implementation: str
    seed: int
    step: int
    loss: float
    learning_rate: float
    step_ms: float
    """Wall clock until the loss is known, compilation in the first; not interleaved, so not for comparing."""


@dataclass(frozen=True)
class Judged:
    """Of the held-out data after the last step."""

    loss: float
    metric: float
    """Accuracy, or perplexity."""


@dataclass(frozen=True)
class End:
    """A contender trained from one seed to the end: a line of runs.csv."""

    implementation: str
    seed: int
    steps: int
    parameters: int
    """Weights that learnt."""
    held_out_loss: float
    metric: float
    seconds: float
    """Since it was begun, or gone on with, checks and checkpoints included."""


STEP_COLUMNS = tuple(one.name for one in dataclasses.fields(Row))
RUN_COLUMNS = tuple(one.name for one in dataclasses.fields(End))
