"""What a faster block should make of a whole step, by Amdahl's law, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from swiglu_bench.cases import VARIANTS, BadInput, Case, Mode, Scope
from swiglu_bench.measure.clock import make_clock
from swiglu_bench.measure.rounds import Contender as Player
from swiglu_bench.measure.rounds import Rule, run_rounds
from swiglu_bench.measure.statistics import Interval
from swiglu_bench.problem import make_problem
from swiglu_bench.train.blocks import Contender
from swiglu_bench.trial import Trial
from swiglu_bench.writers.csv_file import read_records

TOLERANCE = 0.2
"""Of the saving: how far what was measured may be from what was expected."""


def expected(share: float, block_ratio: float) -> float:
    """Step time over eager's, where the blocks' `share` of eager's step takes `block_ratio` of its time."""
    return 1 - share + share * block_ratio


def disagrees(wanted: float, measured: Interval, noise: float) -> bool:
    """Whether the saving is off by more than a fifth of itself, and by more than the measurement can err."""
    off = abs(measured.median - wanted)
    sure = max(measured.half_width, noise)
    return off > TOLERANCE * max(abs(1 - wanted), abs(1 - measured.median)) and off > sure


def from_run(path: Path, case: Case) -> dict[str, float]:
    """Ratios to eager from the records of `swiglu-bench step --scope mlp` at the same sizes.

    Raises BadInput where there is none.
    """
    rows = read_records(path)
    same = rows[
        (rows["mode"] == "step")
        & (rows["scope"] == "mlp")
        & (rows["hidden"] == case.shape.hidden)
        & (rows["intermediate"] == case.shape.intermediate)
        & (rows["tokens"] == case.tokens)
        & (rows["dtype"] == case.dtype.value)
        & (rows["status"] == "ok")
        & (rows["baseline"] == "eager")
        & rows["ratio"].notna()
    ]
    if same.empty:
        raise BadInput(
            f"--step-run: {path} has no row of this block; make one with: swiglu-bench step --scope mlp "
            f"--shapes {case.shape.name} --tokens {case.tokens} --dtype {case.dtype.value}."
        )
    return {str(name): float(ratio) for name, ratio in zip(same["implementation"], same["ratio"], strict=True)}


def measure(
    contenders: Sequence[Contender], case: Case, device: torch.device, rule: Rule, baseline: str
) -> dict[str, float]:
    """The same ratios now, of forward and backward of one block by itself, on a cold L2 cache.

    Contenders without the scope mlp have none, nor have those that fail alone.
    """
    problem = make_problem(case, device)
    players = []
    for contender in contenders:
        if Scope.MLP not in contender.implementation.scopes:
            continue
        try:
            trial = Trial(contender.implementation, problem)
            trial.train(0)
        except Exception:  # its training has said so, or will
            continue
        players.append(Player(contender.name, partial(_prepare, trial)))
    if baseline not in {player.name for player in players}:
        return {}
    rounds = run_rounds(players, make_clock(device), rule, baseline=baseline)
    ratios = {name: rounds.ratio(name, baseline) for name in rounds.timings if name != baseline}
    return {name: ratio.median for name, ratio in ratios.items() if ratio}


def _prepare(trial: Trial, number: int):  # type: ignore[no-untyped-def]
    return trial.prepare(Mode.STEP, number % VARIANTS)
