"""The way of a case through a group of ranks, from its implementations to their rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import machine
from swiglu_bench.measure import rounds as interleaved
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds, Rule, run_rounds
from swiglu_bench.rows.record import Record, Status, row_of
from swiglu_bench.tasks.tp import figures
from swiglu_bench.tasks.tp.figures import COLLECTIVES, TWIN, key
from swiglu_bench.tasks.tp.place import RankContender, RankPlace, merged
from swiglu_bench.tasks.tp.plan import ALONE, ASYNC, LOCAL, SINGLE, Plan
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.batches import WrongResult
from swiglu_bench.worker.child import ContenderFailed
from swiglu_bench.worker.reports import BuildReport, Malformed, MemoryReport, SampleReport
from swiglu_bench.worker.settings import Tell
from swiglu_bench.worker.turns import RoundJudge, contender_of

FAILURES = (ContenderFailed, Malformed, BadInput)


def default_rule(budget_s: float) -> Rule:
    """Few rounds suffice: a call of many ranks is long."""
    return Rule(warmup_rounds=2, min_rounds=10, max_rounds=200, min_s=0.5, budget_s=budget_s)


def blanks(plan: Plan, case: Case, machines: Sequence[dict[str, object]], size: int) -> dict[tuple[str, bool], Record]:
    """The rows of a case before anything was measured. `machines`: of the ranks; the first stands for all."""
    this, hosts = machines[0], list(dict.fromkeys(str(one["host"]) for one in machines))
    about = {name: this[name] for name in ("device", "driver", "cuda", "torch", "triton", "version")}
    asked = {"run_id": plan.run_id, "command": plan.command}
    return {
        (name, way): row_of(
            "tp", asked, run_id=plan.run_id, shape=case.shape.name, hidden=case.shape.hidden,
            intermediate=case.shape.intermediate, tokens=case.tokens, dtype=case.dtype.value, mode=case.mode.value,
            seed=case.seed, ranks=size, sequence_parallel=way, implementation=name,
            experts=case.shape.experts.count if case.shape.experts else None,
            hosts=len(hosts), host=" ".join(hosts), timestamp=machine.now(), **about,
        )
        for name in plan.names
        for way in plan.ways
    }  # fmt: skip


def run_case(place: RankPlace, plan: Plan, case: Case, rows: dict[tuple[str, bool], Record], tell: Tell) -> None:
    """Check, time, and fill the rows. Raises ranks.GroupLost."""
    reasons = place.own("why_not", case, plan.names, plan.ways)
    for one, row, *of_ranks in zip(rows, rows.values(), *reasons, strict=True):
        reason = plan.skipped.get(one[0]) or next(filter(None, of_ranks), None)
        if reason:
            row.end(Status.SKIPPED, reason)
    able = {one: row for one, row in rows.items() if row.status is Status.OK}
    try:
        if able:
            _CaseRun(place, plan, case, able, tell).run()
    except FAILURES as error:  # a question that no contender's code runs for
        for row in able.values():
            row.end(Status.ERROR, f"{str(error).removeprefix('NoReference: ')}.")
    place.own("end_case")


class _CaseRun:
    """One case: `rows` are those of the contenders that may take part, by name and way of splitting."""

    def __init__(
        self, place: RankPlace, plan: Plan, case: Case, rows: dict[tuple[str, bool], Record], tell: Tell
    ) -> None:
        self._place, self._plan, self._case, self._rows, self._tell = place, plan, case, rows, tell
        self._known = {one.name: one for one in plan.everybody}
        self._drawn = Drawn.new()
        self._admitting = Admitting(place, case, self._drawn)
        self._gradients: dict[str, tuple[str, ...]] = {}
        """Of the contenders whose results are judged in the rounds, by key."""
        self._judged: dict[str, RankContender] = {}
        self._beside: dict[str, RankContender] = {}

    def run(self) -> None:
        """Check, time, and fill the rows."""
        self._tell("fp64", 0.0)
        self._place.own("begin_case", self._case, self._drawn)
        for number, ((name, way), row) in enumerate(self._rows.items()):
            self._tell(f"checking {name}{', split sequence' if way else ''}", 0.1 + 0.5 * number / len(self._rows))
            try:
                self._admit(name, way, row)
            except FAILURES as error:
                row.end(Status.ERROR, f"{error}.")
                if name == ASYNC:  # torch's own experiment: that it does not work here is no fault of the run
                    row.end(Status.SKIPPED, f"It does not work here: {error}.")
        for name in dict.fromkeys(ALONE.get(name, name) for (name, _), row in self._rows.items() if _sound(row)):
            self._tell(f"checking {name} on one GPU", 0.6)
            reason = self._admit_alone(name)
            for (other, _), row in self._rows.items():
                if ALONE.get(other, other) == name:
                    row.single_reason = reason
        if self._judged:
            self._time()

    def _admit(self, name: str, way: bool, row: Record) -> None:
        contender = self._place.seat(self._known[name], way)
        admission = self._admitting.admit(contender)
        if name == ASYNC:
            contender.tell("check_fused", self._drawn.draws[0])
        row.first_call_ms = admission.first_call_ms
        row.note_checks(admission.checks)
        if _sound(row):
            row.peak_bytes = contender.ask(MemoryReport, "memory", self._drawn.draws[0]).peak_bytes
            self._judged[contender.name], self._gradients[contender.name] = contender, admission.gradients

    def _admit_alone(self, name: str) -> str:
        """Without collectives, on this rank's part; and the whole on each GPU by itself: what is wrong with it."""
        known = self._known[name]
        try:
            part, whole = self._place.seat(known, LOCAL), self._place.seat(known, SINGLE)
            part.ask(BuildReport, "build")
            part.ask(SampleReport, "sample", self._drawn.draws[0], 100.0)
            self._beside[part.name] = part
            checks = self._admitting.admit(whole).checks
        except FAILURES as error:
            return str(error)
        failed = [f"{one.tensor}: {one.reason}" for one in checks if not one.ok]
        if not failed:
            self._beside[whole.name] = whole
        return "; ".join(failed)

    def _time(self) -> None:
        case, ways = self._case, sorted({way for (_, way), row in self._rows.items() if _sound(row)})
        judge = RoundJudge(self._place, self._results)
        gbps: dict[bool, float | None] = {}
        timed: list[interleaved.TimedCall] = []
        for way in ways:
            self._twin(way)
            if self._place.ranks.size > 1:
                timed.append(interleaved.TimedCall(key(COLLECTIVES, way), partial(self._take_collectives, way)))
            self._tell("the ceiling of the collectives", 0.68)
            of_ranks = self._place.own("ceiling_gbps", way)
            gbps[way] = None if None in of_ranks else min(of_ranks)
        timed += [contender_of(one, judge) for one in self._judged.values()]
        timed += [
            interleaved.TimedCall(name, partial(_take_unjudged, one, judge)) for name, one in self._beside.items()
        ]
        rule, bases = default_rule(self._plan.budget_s), [key("eager", way) for way in ways]

        def on_round(number: int) -> dict[str, Exception]:
            self._tell(f"timing, round {number}", 0.7 + 0.3 * min(1, number / rule.min_rounds))
            return judge.judge()

        baseline = next((one for one in bases if one in self._judged), None)
        rounds = run_rounds(timed, rule, baseline=baseline, seed=case.seed, on_round=on_round)
        for name, error in judge.judge_last().items():
            rounds.timings[name].failure = rounds.timings[name].failure or error
        changed = self._place.judge.changed_weights("any")
        for (name, way), row in self._rows.items():
            if _sound(row) and changed:
                row.end(Status.ERROR, "The weights were changed while the case ran.")
            elif _sound(row):
                self._close(row, key(name, way), rounds)
        for (name, way), row in self._rows.items():
            if _sound(row):
                figures.fill(row, rounds, case, name, way, gbps[way])

    def _close(self, row: Record, name: str, rounds: Rounds) -> None:
        """End the row of one that failed in the rounds, or does so after them."""
        failure = rounds.timings[name].failure
        if isinstance(failure, WrongResult):
            row.end(Status.INCORRECT, f"{failure} in the timed loop.")
        elif failure:
            row.end(Status.ERROR, f"In the timed loop: {failure}.")
        else:
            try:
                failed = self._admitting.check_again(self._judged[name], self._gradients[name])
                row.note_checks(failed, " after it was timed")
            except FAILURES as error:
                row.end(Status.ERROR, f"After it was timed: {error}.")

    def _twin(self, way: bool) -> None:
        """Eager once more, so that what is noise is known."""
        eager = key("eager", way)
        if eager in self._judged:
            twin = self._place.seat(self._known["eager"], way, TWIN)
            self._gradients[twin.name], self._judged[twin.name] = self._admitting.build(twin), twin

    def _take_collectives(self, way: bool, number: int, lead_us: float) -> Sample:
        answers = self._place.own("sample_collectives", way, lead_us)
        return merged([SampleReport.checked(answer) for answer in answers]).sample()

    def _results(self, name: str) -> Sequence[str]:
        return self._case.mode.results(self._gradients[name])


def _take_unjudged(contender: RankContender, judge: RoundJudge, number: int, lead_us: float) -> Sample:
    """A turn on the inputs of its round, whose results nobody looks at."""
    return contender.ask(SampleReport, "sample", judge.draw(number, contender.name), lead_us).sample()


def _sound(row: Record) -> bool:
    return row.status is Status.OK
