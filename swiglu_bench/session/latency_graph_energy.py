"""What is measured beside the rounds, after them: latency, CUDA-graph time and energy of each contender, on a GPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from swiglu_bench.check.built import Fixed, Produced
from swiglu_bench.check.judge import Judge
from swiglu_bench.machine.nvml import Gpu
from swiglu_bench.measure.clock import Clock, CudaClock, DeviceLost, LatencyClock, answers
from swiglu_bench.measure.energy import joules_per_call
from swiglu_bench.measure.graph import Graph, capture
from swiglu_bench.measure.replaced import put_back
from swiglu_bench.measure.rounds import Contender, run_rounds
from swiglu_bench.measure.statistics import percentile
from swiglu_bench.session.settings import Admitted, Settings, Tell
from swiglu_bench.spec.cases import VARIANTS, Mode
from swiglu_bench.spec.errors import one_line
from swiglu_bench.spec.problem import Problem

if TYPE_CHECKING:
    from swiglu_bench.session.settings import Admitted, Settings, Tell

MOST_ROUNDS = 50
SHARE_OF_BUDGET = 0.25
"""What latency and graphs may each take, of the case's budget for its rounds."""
REPLAYED_ALONE = "A backward alone is not recorded: replays would run on saved tensors that it has overwritten."


class Asides:
    """Three measurements that each have rounds of their own, so that none disturbs the figure that counts.

    `mark` is as a session has it.
    """

    def __init__(self, settings: Settings, clock: Clock, gpu: Gpu | None, mark: Callable[[str], None]) -> None:
        self.settings = settings
        self.clock = clock
        self.gpu = gpu
        self.mark = mark
        budget_s = settings.rule.budget_s * SHARE_OF_BUDGET
        self.rule = dataclasses.replace(settings.rule, max_rounds=MOST_ROUNDS, min_s=0.0, budget_s=budget_s)

    def measure(self, problem: Problem, entries: Sequence[Admitted], judges: Sequence[Judge], tell: Tell) -> None:
        """Fill the columns of rows that are right so far. A CPU has none of these figures.

        Raises DeviceLost where a contender breaks the device.
        """
        if not isinstance(self.clock, CudaClock) or not entries:
            return
        tell("latency", 0.9)
        self._latency(problem, entries, LatencyClock(self.clock))
        self.mark("")
        tell("CUDA graphs", 0.93)
        self._graphs(problem, entries, judges, self.clock)
        self.mark("")
        if self.settings.energy:
            tell("energy", 0.96)
            self._energy(problem, entries)
            self.mark("")
        replaced = put_back()
        if replaced:  # whoever did it: none of these figures is one
            for record in (entry.record for entry in entries):
                record.latency_us = record.graph_us = record.energy_j = record.uj_per_token = None
                record.graph_reason = f"Meanwhile somebody replaced {', '.join(replaced)}."

    def _latency(self, problem: Problem, entries: Sequence[Admitted], clock: LatencyClock) -> None:
        mode = problem.case.mode

        def contender(entry: Admitted) -> Contender:
            built = entry.built
            return Contender(entry.record.implementation, lambda number: built.prepare(mode, number % VARIANTS))

        contenders = [contender(entry) for entry in entries]
        rounds = run_rounds(contenders, clock, self.rule, seed=problem.case.seed, on_turn=self.mark)
        for entry in entries:
            timing = rounds.timings[entry.record.implementation]
            if timing.samples and not timing.failure:
                entry.record.latency_us = percentile(timing.ms, 50) * 1e3

    def _graphs(self, problem: Problem, entries: Sequence[Admitted], judges: Sequence[Judge], clock: CudaClock) -> None:
        """Replays in rounds of their own, each on inputs copied in before it; a wrong replay has no time."""
        if problem.case.mode is Mode.BACKWARD:
            for entry in entries:
                entry.record.graph_reason = REPLAYED_ALONE
            return
        by_name = {entry.record.implementation: entry.record for entry in entries}
        recorded: dict[str, Graph] = {}
        contenders = []
        for entry in entries:
            name = entry.record.implementation
            self.mark(name)
            try:
                fixed = entry.built.fixed(problem.case.mode)
                recorded[name] = capture(fixed.call, problem.device)
            except Exception as error:  # whatever a contender or CUDA has against being recorded
                self._must_answer(error)
                entry.record.graph_reason = f"It cannot be recorded: {one_line(error)}"
                continue
            contenders.append(Contender(name, _replays(fixed, recorded[name])))

        def inspect(name: str, number: int, result: object) -> None:
            del result  # a replay returns nothing: what it computed is where the recorded call left it
            produced: Callable[[], Produced] = recorded[name].result
            checks = judges[number % VARIANTS].judge(produced())
            wrong = [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]
            if wrong:
                by_name[name].graph_reason = f"Its replay is incorrect: {'; '.join(wrong)}."

        if not contenders:
            return
        rounds = run_rounds(
            contenders,
            clock,
            self.rule,
            seed=problem.case.seed,
            inspect=inspect,
            inspected_rounds=VARIANTS,
            on_turn=self.mark,
        )
        for name, timing in rounds.timings.items():
            if timing.failure:
                by_name[name].graph_reason = f"Its replay fails: {one_line(timing.failure)}"
            elif not by_name[name].graph_reason:
                by_name[name].graph_us = percentile(timing.ms, 50) * 1e3

    def _energy(self, problem: Problem, entries: Sequence[Admitted]) -> None:
        """Each contender back to back for a while, in shuffled order; a backward alone cannot be run so."""
        if self.gpu is None or problem.case.mode is Mode.BACKWARD:
            return
        for entry in random.Random(problem.case.seed).sample(list(entries), len(entries)):
            record = entry.record
            self.mark(record.implementation)
            try:
                call = entry.built.fixed(problem.case.mode).call
                record.energy_j = joules_per_call(call, self.gpu.energy_j, self._next_turn(record.implementation))
                record.uj_per_token = record.energy_j / record.tokens * 1e6
            except Exception as error:  # NVML without a counter, or whatever the contender raises
                self._must_answer(error)
                record.gpu_note = record.gpu_note or f"There is no energy: {one_line(error)}."

    def _next_turn(self, name: str) -> Callable[[], None]:
        """Waits for a batch of calls and names the implementation anew: a time limit is for a batch, not for all."""

        def synchronize() -> None:
            self.clock.synchronize()
            self.mark(name)

        return synchronize

    def _must_answer(self, error: Exception) -> None:
        if not answers(self.clock):
            raise DeviceLost(one_line(error)) from error


def _replays(fixed: Fixed, graph: Graph) -> Callable[[int], Callable[[], None]]:
    def prepare(number: int) -> Callable[[], None]:
        fixed.load(number % VARIANTS)
        return graph.replay

    return prepare
