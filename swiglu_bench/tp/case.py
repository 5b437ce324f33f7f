"""One case on every rank: contenders built, checked and timed together, and their rows filled."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from swiglu_bench.check import tolerance
from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import make_problem, torch_dtype
from swiglu_bench.measure.memory import measure_memory
from swiglu_bench.measure.rounds import Contender, Rule, run_rounds
from swiglu_bench.rows.ranks import Row
from swiglu_bench.rows.record import Status, TensorCheck
from swiglu_bench.spec.cases import VARIANTS, Case, Mode
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.spec.problem import Problem
from swiglu_bench.tp import collectives, contenders, figures, traffic
from swiglu_bench.tp.figures import COLLECTIVES, LOCAL, SINGLE, TWIN, key
from swiglu_bench.tp.group import Group, GroupClock, RankFailed
from swiglu_bench.tp.plan import ALONE, ASYNC
from swiglu_bench.tp.truth import Judges, check_same, make_judges, own_part


class Sink(Protocol):
    """Who hears of it; rank 0's alone does anything."""

    def mark(self, name: str) -> None:
        """Whose code runs now; "" for nobody's."""

    def tell(self, doing: str, fraction: float) -> None:
        """How far the case is."""

    def rows(self, rows: list[Row]) -> None:
        """A case has ended."""


class CaseRun:
    """One case: `rows` are those of the contenders that may take part, by name and way of splitting."""

    def __init__(
        self,
        group: Group,
        clock: GroupClock,
        known: Mapping[str, Implementation],
        sink: Sink,
        case: Case,
        rows: dict[tuple[str, bool], Row],
    ) -> None:
        self.group, self.clock, self.known, self.sink, self.case, self.rows = group, clock, known, sink, case, rows
        unannounced = self.group.first(secrets.randbits(31))
        self.whole: Problem = self.group.together(
            lambda: make_problem(case, self.group.device, unannounced=unannounced)
        )
        check_same(self.group, self.whole)
        self.parts = {way: contenders.part_of(self.group, self.whole, way) for way in {False, *(w for _, w in rows)}}
        self.builds: dict[str, Built] = {}
        self.judges: list[Judges] = []

    def run(self, rule: Rule, ceiling_gbps: Callable[[bool], float | None]) -> None:
        """Check, time, and fill the rows; `ceiling_gbps` of a way of splitting is measured before the rounds."""
        tell, mark = self.sink.tell, self.sink.mark
        tell("fp64", 0.0)
        part = self.parts[False]
        for variant in range(VARIANTS):
            self.judges.append(self.group.together(partial(make_judges, self.group, self.whole, part, variant)))
        weights = self._prints()
        for number, ((name, way), row) in enumerate(self.rows.items()):
            mark(name)
            tell(f"checking {name}{', split sequence' if way else ''}", 0.1 + 0.5 * number / len(self.rows))
            try:
                self._admit(name, way, row)
            except RankFailed as error:
                row.status, row.reason = Status.ERROR, f"{error}."
                if name == ASYNC:  # torch's own experiment: that it does not work here is no fault of the run
                    row.status, row.reason = Status.SKIPPED, f"It does not work here: {error}."
        for name in dict.fromkeys(ALONE.get(name, name) for (name, _), row in self.rows.items() if _sound(row)):
            mark(name)
            tell(f"checking {name} on one GPU", 0.6)
            self._admit_alone(name)
        self._time(rule, ceiling_gbps)
        mark("")
        if any(self.group.gather(self._prints() != weights)):
            for row in filter(_sound, self.rows.values()):
                row.status, row.reason = Status.ERROR, "While the case ran, somebody changed the weights."
                row.time_ms = row.ratio = None

    def _admit(self, name: str, way: bool, row: Row) -> None:
        known = contenders.split(self.known[name], self.group, self.whole, way)
        began = time.perf_counter()
        built: Built = self.group.together(lambda: Built(known, self.parts[way]))
        for variant in range(VARIANTS):
            produced = self.group.together(partial(self._once, built, variant))
            row.first_call_ms = row.first_call_ms or (time.perf_counter() - began) * 1e3
            self._judge(row, produced, variant, way)
        if name == ASYNC:
            self.group.together(lambda: contenders.check_fused(built.prepare(self.case.mode, 0)))
        if _sound(row):
            peak = self.group.together(lambda: _peak_bytes(built, self.case.mode))
            row.peak_bytes = int(self.group.largest(peak)[0])
            self.builds[key(name, way)] = built

    def _admit_alone(self, name: str) -> None:
        """Without collectives, on this rank's part; and the whole on each GPU by itself, which is checked."""
        known, reason = self.known[name], ""
        try:
            built: Built = self.group.together(lambda: Built(known, self.parts[False]))
            self.group.together(partial(self._once, built, 0))
            self.builds[key(name, LOCAL)] = built
            built = self.group.together(lambda: Built(known, self.whole))
            for variant in range(VARIANTS):
                mine = own_part(self.group, self.whole, self.group.together(partial(self._once, built, variant)))
                checks = _worst(self.group.gather(self.judges[variant].single.judge(dict(mine))))
                reason = reason or "; ".join(f"{one.tensor}: {one.reason}" for one in checks if not one.ok)
            if not reason:
                self.builds[key(name, SINGLE)] = built
        except RankFailed as error:
            reason = str(error)
        for (other, _), row in self.rows.items():
            if ALONE.get(other, other) == name:
                row.single_reason = reason

    def _once(self, built: Built, variant: int) -> Produced:
        produced = built.infer(variant) if self.case.mode is Mode.FORWARD else built.train(variant)
        self.clock.synchronize()
        return produced

    def _judge(self, row: Row, produced: Produced, variant: int, way: bool, when: str = "") -> None:
        """Hold what the ranks produced against the truth; a wrong tensor on any of them makes the row incorrect."""
        values = {name: self._gathered(one) if way and name in ("output", "x") else one
                  for name, one in produced.items()}  # fmt: skip
        checks = _worst(self.group.gather(self.judges[variant].split.judge(values)))
        worst = max(checks, key=lambda one: one.used)
        row.error, row.eager_error, row.error_ratio = worst.error, worst.eager_error, worst.used
        failed = [f"{one.tensor}: {one.reason}" for one in checks if not one.ok]
        if not failed and not way:
            copies = {name: tolerance.fingerprint(one).tolist() for name, one in values.items()
                      if one is not None and name in ("output", "x")}  # fmt: skip
            others = self.group.gather(copies)
            failed = [f"{name}: the ranks' copies differ" for name in copies
                      if any(other.get(name) != others[0].get(name) for other in others)]  # fmt: skip
        if failed:
            row.status, row.reason = Status.INCORRECT, "; ".join(failed) + when + "."

    def _gathered(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """All ranks' tokens; what has not the size of a part stays as it is, for the judge to refuse."""
        expected = (self.case.tokens // self.group.size, self.case.shape.hidden)
        fits = value is not None and type(value) is torch.Tensor and tuple(value.shape) == expected
        if not all(self.group.gather(fits)):
            return value
        assert value is not None
        whole = value.new_empty(self.case.tokens, self.case.shape.hidden)
        collectives.gather_into(whole, value.detach().contiguous())
        return whole

    def _time(self, rule: Rule, ceiling_gbps: Callable[[bool], float | None]) -> None:
        case, mode = self.case, self.case.mode
        ways = {way for (name, way), row in self.rows.items() if _sound(row)}
        players = [Contender(one, _guarded(built, mode)) for one, built in self.builds.items()]
        whose = {key(name, kind): name for name, _ in self.rows for kind in (False, True, LOCAL, SINGLE)}
        gbps: dict[bool, float | None] = {}
        for way in sorted(ways):
            eager = self.builds.get(key("eager", way))
            if eager:
                players.append(Contender(key(TWIN, way), _guarded(eager, mode)))
            if self.group.size > 1:
                elements = case.tokens * case.shape.hidden
                call = collectives.bare(self.group, traffic.kinds(mode, way), elements, torch_dtype(case))
                players.append(Contender(key(COLLECTIVES, way), lambda number, call=call: call))  # type: ignore[misc]
            self.sink.tell("the ceiling of the collectives", 0.68)
            gbps[way] = ceiling_gbps(way)
        if not players:
            return

        def inspect(name: str, number: int, result: Callable[[], Produced]) -> None:
            for (own, way), row in self.rows.items():
                if key(own, way) == name and _sound(row):
                    self._judge(row, result(), number % VARIANTS, way, " in the timed loop")

        rounds = run_rounds(
            players, self.clock, rule,
            baseline=next((key("eager", way) for way in sorted(ways) if key("eager", way) in self.builds), None),
            seed=case.seed,
            before_inspection=lambda number: self.judges[number % VARIANTS].split.poison(),
            inspect=inspect, inspected_rounds=VARIANTS,
            on_round=lambda number: self.sink.tell(
                f"timing, round {number}", 0.7 + 0.3 * min(1, number / rule.min_rounds)
            ),
            on_turn=lambda name: self.sink.mark(whose.get(name, "")),
            now=self.clock.now,
        )  # fmt: skip
        for (name, way), row in self.rows.items():
            if _sound(row):
                figures.fill(row, rounds, case, name, way, gbps[way])

    def _prints(self) -> list[Any]:
        tensors = [
            *self.whole.weights.values(),
            *(one for part in self.parts.values() for one in part.weights.values()),
        ]
        return [tolerance.fingerprint(one).tolist() for one in tensors]


def _sound(row: Row) -> bool:
    return row.status is Status.OK


def _guarded(built: Built, mode: Mode) -> Callable[[int], Callable[[], Any]]:
    """What fails while it is prepared fails when it is called: in the sample, of which all ranks hear."""

    def ready(number: int) -> Callable[[], Any]:
        try:
            return built.prepare(mode, number % VARIANTS)
        except Exception as error:
            failure = error

        def fail() -> Any:
            raise failure

        return fail

    return ready


def _peak_bytes(built: Built, mode: Mode) -> int:
    """Highest use of one call, above inputs and weights."""
    call = built.prepare(mode, 0)

    def run() -> torch.Tensor:
        output = call()()["output"]
        assert output is not None
        return output

    return measure_memory(built.problem.device, run, None).peak_bytes


def _worst(of_ranks: list[tuple[TensorCheck, ...]]) -> list[TensorCheck]:
    """For each tensor the check of the rank that fails, or else of the one that is the nearest to failing."""
    worst = []
    for checks in zip(*of_ranks, strict=True):
        rank = max(range(len(checks)), key=lambda one: (not checks[one].ok, checks[one].used))
        one = checks[rank]
        worst.append(one if one.ok else dataclasses.replace(one, reason=f"on rank {rank} {one.reason}"))
    return worst
