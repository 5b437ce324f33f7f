"""How much faster a block is by itself: what `swiglu-bench step --scope mlp` measures, of the contenders at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.measure.clock import make_clock
from swiglu_bench.measure.rounds import Contender as Player
from swiglu_bench.measure.rounds import Rule, run_rounds
from swiglu_bench.spec.cases import VARIANTS, Case, Mode, Scope
from swiglu_bench.train.blocks import Contender


def measure(
    contenders: Sequence[Contender], case: Case, device: torch.device, rule: Rule, baseline: str
) -> dict[str, float]:
    """Ratios to the baseline of forward and backward of one block, on a cold L2 cache.

    Contenders without the scope mlp have none, nor have those that fail alone.
    """
    problem = make_problem(case, device)
    players = []
    for contender in contenders:
        if Scope.MLP not in contender.implementation.scopes:
            continue
        try:
            built = Built(contender.implementation, problem)
            built.train(0)
        except Exception:  # its training has said so, or will
            continue
        players.append(Player(contender.name, partial(_prepare, built)))
    if baseline not in {player.name for player in players}:
        return {}
    rounds = run_rounds(players, make_clock(device), rule, baseline=baseline)
    ratios = {name: rounds.ratio(name, baseline) for name in rounds.timings if name != baseline}
    return {name: ratio.median for name, ratio in ratios.items() if ratio}


def _prepare(built: Built, number: int) -> Callable[[], object]:
    return built.prepare(Mode.STEP, number % VARIANTS)
