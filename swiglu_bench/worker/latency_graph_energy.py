"""What is measured beside the rounds, after them: latency, CUDA-graph time and energy of each contender, on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.errors import one_line
from swiglu_bench.machine.nvml import Gpu
from swiglu_bench.measure.resources import joules_per_call
from swiglu_bench.measure.rounds import Rule, run_rounds
from swiglu_bench.measure.statistics import percentile
from swiglu_bench.worker.places import Place
from swiglu_bench.worker.round_judge import RoundJudge, WrongResult, contender_of
from swiglu_bench.worker.settings import Tell
from swiglu_bench.worker.timing import Entry

MOST_ROUNDS = 50
SHARE_OF_BUDGET = 0.25
"""What latency and graphs may each take, of the case's budget for its rounds."""
REPLAYED_ALONE = "A backward alone is not recorded: replays would run on saved tensors that it has overwritten."


def measure_beside(place: Place, case: Case, entries: Sequence[Entry], gpu: Gpu | None, tell: Tell) -> None:
    """Fill the columns of rows that are right so far, each in rounds of its own. A CPU has none of these figures."""
    if place.settings.device.type != "cuda" or not entries:
        return
    rule = replace(
        place.settings.rule, max_rounds=MOST_ROUNDS, min_s=0.0, budget_s=place.settings.rule.budget_s * SHARE_OF_BUDGET
    )

    def names(name: str) -> Sequence[str]:
        (mine,) = (entry for entry in entries if entry.contender.name == name)
        return case.mode.results(mine.gradients)

    with place.held():
        tell("latency", 0.9)
        judge = RoundJudge(place, names, full_share=0.0)
        contenders = [contender_of(entry.contender, judge, led=case.mode, latency=True) for entry in entries]
        rounds = run_rounds(contenders, rule, seed=case.seed, on_round=lambda number: judge.judge())
        for entry in entries:
            timing = rounds.timings[entry.contender.name]
            if timing.samples and not timing.failure:
                entry.record.latency_us = percentile(timing.ms, 50) * 1e3
        tell("CUDA graphs", 0.93)
        _graphs(place, case, entries, RoundJudge(place, names, full_share=0.0), rule)
        if place.settings.energy and gpu and case.mode is not Mode.BACKWARD:
            tell("energy", 0.96)
            for entry in random.Random(case.seed).sample(list(entries), len(entries)):
                _energy(entry, gpu)


def _graphs(place: Place, case: Case, entries: Sequence[Entry], judge: RoundJudge, rule: Rule) -> None:
    """Replays on inputs drawn anew for each round; a wrong replay has no time."""
    by_name = {entry.contender.name: entry.record for entry in entries}
    contenders = []
    for entry in entries:
        record = entry.record
        if case.mode is Mode.BACKWARD:
            record.graph_reason = REPLAYED_ALONE
            continue
        try:
            record.graph_reason = entry.contender.tell("record", case.mode)
        except Exception as error:  # its process may have ended over it
            record.graph_reason = f"It cannot be recorded: {one_line(error)}."
        if not record.graph_reason:
            contenders.append(contender_of(entry.contender, judge, "replay"))
    if not contenders:
        return
    rounds = run_rounds(contenders, rule, seed=case.seed, on_round=lambda number: judge.judge())
    for name, timing in rounds.timings.items():
        if isinstance(timing.failure, WrongResult):
            by_name[name].graph_reason = f"Its replay is incorrect: {timing.failure}."
        elif timing.failure:
            by_name[name].graph_reason = f"Its replay fails: {one_line(timing.failure)}."
        else:
            by_name[name].graph_us = percentile(timing.ms, 50) * 1e3 / place.settings.layers
            if place.settings.layers > 1:
                by_name[name].remark(f"graph_us is the time of one of {place.settings.layers} layers in a CUDA graph.")


def _energy(entry: Entry, gpu: Gpu) -> None:
    """Joules of a contender's calls back to back; NVML may have no counter, and the contender may fail."""
    record = entry.record
    try:
        record.energy_j = joules_per_call(lambda calls: entry.contender.tell("repeat", calls), gpu.energy_j)
        record.uj_per_token = record.energy_j / record.tokens * 1e6
    except Exception as error:
        record.gpu_note = record.gpu_note or f"There is no energy: {one_line(error)}."
