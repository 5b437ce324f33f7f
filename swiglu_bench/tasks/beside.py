"""What is measured after the rounds: on a GPU latency, CUDA graphs and energy; if asked for, a trace and counters."""

from __future__ import annotations

import logging
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace

from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.errors import one_line
from swiglu_bench.check.inputs import Draw, new_seed
from swiglu_bench.machine.nvml import Gpu
from swiglu_bench.measure import profilers
from swiglu_bench.measure.resources import joules_per_call
from swiglu_bench.measure.rounds import Rule, run_rounds
from swiglu_bench.measure.statistics import percentile
from swiglu_bench.rows.record import Record
from swiglu_bench.tasks.case import Entry
from swiglu_bench.worker.batches import WrongResult
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.one_call import program
from swiglu_bench.worker.policy import Tell
from swiglu_bench.worker.turns import RoundJudge, contender_of

MOST_ROUNDS = 50
SHARE_OF_BUDGET = 0.25
"""What latency and graphs may each take, of the case's budget for its rounds."""
TRACED_CALLS = 3
REPLAYED_ALONE = "A backward alone is not recorded: replays would run on saved tensors that it has overwritten."
log = logging.getLogger(__name__)


def measure_beside(court: Court, case: Case, entries: Sequence[Entry], gpu: Gpu | None, tell: Tell) -> None:
    """Fill the columns of rows that are right so far, each in rounds of its own. A CPU has none of these figures."""
    if court.settings.device.type != "cuda" or not entries:
        return
    rule = replace(
        court.settings.rule, max_rounds=MOST_ROUNDS, min_s=0.0, budget_s=court.settings.rule.budget_s * SHARE_OF_BUDGET
    )

    def names(name: str) -> Sequence[str]:
        (mine,) = (entry for entry in entries if entry.contender.name == name)
        return case.mode.results(mine.gradients)

    with court.held():
        tell("latency", 0.9)
        judge = RoundJudge(court, names, full_share=0.0)
        contenders = [contender_of(entry.contender, judge, led=case.mode, latency=True) for entry in entries]
        rounds = run_rounds(contenders, rule, seed=case.seed, on_round=lambda number: judge.judge())
        for entry in entries:
            timing = rounds.timings[entry.contender.name]
            if timing.samples and not timing.failure:
                entry.record.latency_us = percentile(timing.ms, 50) * 1e3
        tell("CUDA graphs", 0.93)
        _graphs(court, case, entries, RoundJudge(court, names, full_share=0.0), rule)
        if court.settings.energy and gpu and case.mode is not Mode.BACKWARD:
            tell("energy", 0.96)
            for entry in random.Random(case.seed).sample(list(entries), len(entries)):
                _energy(entry, gpu)


def _graphs(court: Court, case: Case, entries: Sequence[Entry], judge: RoundJudge, rule: Rule) -> None:
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
            by_name[name].graph_us = percentile(timing.ms, 50) * 1e3 / court.settings.layers
            if court.settings.layers > 1:
                by_name[name].remark(f"graph_us is the time of one of {court.settings.layers} layers in a CUDA graph.")


def _energy(entry: Entry, gpu: Gpu) -> None:
    """Joules of a contender's calls back to back; NVML may have no counter, and the contender may fail."""
    record = entry.record
    try:
        record.energy_j = joules_per_call(lambda calls: entry.contender.tell("repeat", calls), gpu.energy_j)
        record.uj_per_token = record.energy_j / record.tokens * 1e6
    except Exception as error:
        record.gpu_note = record.gpu_note or f"There is no energy: {one_line(error)}."


def profile(court: Court, case: Case, entries: Sequence[Entry], tell: Tell) -> None:
    """Fill the columns of a profile in the rows of sound contenders.

    A contender's process ends afterwards: what a profiler leaves behind in it would be in later times.
    """
    for entry in entries if court.settings.trace or court.settings.ncu else ():
        record = entry.record
        tell(f"profiling {record.implementation}", 0.98)
        with court.held():
            if court.settings.trace:
                _trace(court, entry)
            entry.contender.end()
            if court.settings.ncu:
                _count(court, case, entry)


def _trace(court: Court, entry: Entry) -> None:
    folder, record = court.settings.folder, entry.record
    assert folder
    file = folder / "traces" / f"{_name(record)}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        entry.contender.tell("trace", [Draw(new_seed()) for _ in range(TRACED_CALLS)], str(file.absolute()))
        record.trace = file.relative_to(folder).as_posix()
    except Exception as error:  # whatever the contender, the profiler or the disk has against it
        log.info("the trace of %s:", record.implementation, exc_info=error)
        record.profile_note = f"There is no trace: {one_line(error)}."


def _name(record: Record) -> str:
    """A file name for a row."""
    parts = (record.shape, record.scope, record.mode, record.dtype, record.tokens, record.implementation)
    return re.sub(r"[^\w.-]+", "-", "-".join(map(str, parts)))


def _count(court: Court, case: Case, entry: Entry) -> None:
    record, path = entry.record, shutil.which("ncu")
    try:
        if path is None:
            raise profilers.NoCounters("ncu is not on the PATH")
        found = profilers.counters(path, program(court.settings, entry.contender.implementation, case))
    except profilers.NoCounters as reason:
        record.profile_note = f"{record.profile_note} There are no counters: {reason}.".strip()
        return
    record.tensor_pct, record.registers_per_thread = found.tensor_pct, found.registers_per_thread
    record.dram_bytes, record.l2_bytes = found.dram_bytes, found.l2_bytes
