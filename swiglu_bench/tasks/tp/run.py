"""One call of `swiglu-bench tp`: a case on all ranks, and what takes its rows when groups of ranks come and go."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from swiglu_bench import output
from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import WEIGHTS, Case, Dtype
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import locks, machine
from swiglu_bench.machine.machine import Machine
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds, Rule, TimedCall, run_rounds
from swiglu_bench.options import WandbOptions
from swiglu_bench.outlets import Files, Outlets
from swiglu_bench.request import INTERRUPTED
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import Record, Status, row_of
from swiglu_bench.show import documents, tables
from swiglu_bench.show.console import Bar
from swiglu_bench.tasks.tp.court import RankContender, RankCourt, RankRoundJudge
from swiglu_bench.tasks.tp.plan import ALONE, ASYNC, COLLECTIVES, LOCAL, SINGLE, TWIN, SplitPlan, fill, key
from swiglu_bench.worker import policy
from swiglu_bench.worker.admission import Admitting
from swiglu_bench.worker.batches import WrongResult
from swiglu_bench.worker.child import ContenderFailed, DoesNotEnd
from swiglu_bench.worker.policy import Settings
from swiglu_bench.worker.ranks import GroupLost, LocalRanks, Send
from swiglu_bench.worker.turns import contender_of
from swiglu_bench.worker.worker import BuildReport, Malformed, MemoryReport, SampleReport

FAILURES = (ContenderFailed, Malformed, BadInput)


def default_rule(budget_s: float) -> Rule:
    """Few rounds suffice: a call of many ranks is long."""
    return Rule(warmup_rounds=2, min_rounds=10, max_rounds=200, min_s=0.5, budget_s=budget_s)


def sharing(size: int, settings: Settings) -> int:
    """How many of so many ranks share a device's memory: on a CPU all, each of which runs every case whole, too."""
    return size if settings.device.type == "cpu" else 1


def too_large(cases: Sequence[Case], size: int, settings: Settings) -> dict[Case, str]:
    """The cases that the device's memory does not hold with so many ranks, and why."""
    free_bytes, processes = machine.free_memory_bytes(settings.device), sharing(size, settings)
    found = {case: policy.too_large(settings, case, free_bytes, processes) for case in cases}
    return {case: reason for case, reason in found.items() if reason}


def work(plan: SplitPlan, sizes: Sequence[int], rule: Rule) -> dict[Dtype, float]:
    """Operations of the fewest rounds on a CPU, by dtype: split, without collectives, and whole per rank."""
    found = dict.fromkeys((case.dtype for case in plan.cases), 0.0)
    here = sum(each.name not in plan.skipped and each.unavailable("cpu") is None for each in plan.implementations)
    rounds = (rule.warmup_rounds + rule.min_rounds) * here * len(plan.ways)
    for case in plan.cases:
        found[case.dtype] += sum(2 + size for size in sizes) * rounds * costs.flops(case, (*WEIGHTS[case.scope], "x"))
    return found


# On every rank


def take_part(send: Send, plan: SplitPlan, settings: Settings, processes: int = 0) -> None:
    """Be a rank: measure all cases together with the others; rank 0 sends the rows. Raises GroupLost.

    So many `processes` were started on this machine; 0: by torchrun.
    """
    court = RankCourt.join(settings, plan, processes, send)
    send("machines", court.machines)
    for case in plan.cases:
        rows = run_case(court, plan, case, send)
        send("rows", [as_data(row) for row in rows.values()])


def as_data(row: Record) -> dict[str, Any]:
    """A row with its samples as plain data."""
    return {"columns": row.row(), "samples_ms": row.samples_ms, "twin_ms": row.twin_ms, "series": dict(row.series)}


def from_data(data: dict[str, Any], about: dict[str, Any]) -> Record:
    """The row that was plain data; `about` is run.json."""
    row = row_of("tp", about, **data["columns"] | {"status": Status(data["columns"]["status"])})
    row.samples_ms, row.twin_ms, row.series = tuple(data["samples_ms"]), tuple(data["twin_ms"]), data["series"]
    return row


def blanks(
    plan: SplitPlan, case: Case, machines: Sequence[dict[str, object]], size: int
) -> dict[tuple[str, bool], Record]:
    """The rows of a case before anything was measured. `machines`: of the ranks; the first stands for all."""
    this, hosts = machines[0], list(dict.fromkeys(str(rank["host"]) for rank in machines))
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


def run_case(court: RankCourt, plan: SplitPlan, case: Case, send: Send) -> dict[tuple[str, bool], Record]:
    """Check and time a case on all ranks: its rows. Raises ranks.GroupLost."""
    rows = blanks(plan, case, court.machines, court.group.size)
    of_ranks = court.own(lambda: [court.why_not(case, *which) for which in rows])
    for ((name, _), row), *reasons in zip(rows.items(), *of_ranks, strict=True):
        if reason := plan.skipped.get(name) or next(filter(None, reasons), ""):
            row.end(Status.SKIPPED, reason)
    able = {which: row for which, row in rows.items() if row.status is Status.OK}
    try:
        if able:
            _SplitCase(court, plan, case, able, send).run()
    except FAILURES as error:  # nothing that a contender's code runs for
        for row in able.values():
            row.end(Status.ERROR, f"{str(error).removeprefix('NoReference: ')}.")
    court.end()
    return rows


class _SplitCase:
    """One case: `rows` are those of the contenders that may take part, by name and way of splitting."""

    def __init__(
        self, court: RankCourt, plan: SplitPlan, case: Case, rows: dict[tuple[str, bool], Record], send: Send
    ) -> None:
        self._court, self._plan, self._case, self._rows, self._send = court, plan, case, rows, send
        self._known = {each.name: each for each in plan.everybody}
        self._tell("fp64", 0.0)
        self._drawn = court.begin(case)
        self._admitting = Admitting(court, case, self._drawn)
        self._gradients: dict[str, tuple[str, ...]] = {}
        """Of the contenders whose results are judged in the rounds, by key."""
        self._judged: dict[str, RankContender] = {}
        self._beside: dict[str, RankContender] = {}

    def run(self) -> None:
        """Check, time, and fill the rows."""
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
        contender = RankContender(self._court, self._known[name], way)
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
            part, whole = RankContender(self._court, known, LOCAL), RankContender(self._court, known, SINGLE)
            part.ask(BuildReport, "build")
            part.ask(SampleReport, "sample", self._drawn.draws[0], 100.0)
            self._beside[part.name] = part
            checks = self._admitting.admit(whole).checks
        except FAILURES as error:
            return str(error)
        failed = [f"{check.tensor}: {check.reason}" for check in checks if not check.ok]
        if not failed:
            self._beside[whole.name] = whole
        return "; ".join(failed)

    def _time(self) -> None:
        case, ways = self._case, sorted({way for (_, way), row in self._rows.items() if _sound(row)})
        judge = RankRoundJudge(self._court, self._results)
        gbps: dict[bool, float | None] = {}
        timed: list[TimedCall] = []
        for way in ways:
            self._twin(way)
            if self._court.group.size > 1:
                timed.append(TimedCall(key(COLLECTIVES, way), partial(self._court.take_collectives, way)))
            self._tell("the ceiling of the collectives", 0.68)
            gbps[way] = self._court.ceiling_gbps(way)
        timed += [contender_of(contender, judge) for contender in self._judged.values()]
        timed += [
            TimedCall(name, partial(_take_unjudged, contender, judge)) for name, contender in self._beside.items()
        ]
        rule, bases = default_rule(self._plan.budget_s), [key("eager", way) for way in ways]

        def on_round(number: int) -> dict[str, Exception]:
            self._tell(f"timing, round {number}", 0.7 + 0.3 * min(1, number / rule.min_rounds))
            return judge.judge()

        baseline = next((base for base in bases if base in self._judged), None)
        rounds = run_rounds(timed, rule, baseline=baseline, seed=case.seed, on_round=on_round, now=self._now)
        for name, error in judge.judge_last().items():
            rounds.timings[name].failure = rounds.timings[name].failure or error
        changed = self._court.judge.changed_weights("any")
        for (name, way), row in self._rows.items():
            if _sound(row) and changed:
                row.end(Status.ERROR, "The weights were changed while the case ran.")
            elif _sound(row):
                self._close(row, key(name, way), rounds)
        for (name, way), row in self._rows.items():
            if _sound(row):
                fill(row, rounds, case, name, way, gbps[way])

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
            twin = RankContender(self._court, self._known["eager"], way, TWIN)
            self._gradients[twin.name], self._judged[twin.name] = self._admitting.build(twin), twin

    def _now(self) -> float:
        """Rank 0's clock, so that all stop in the same round."""
        return self._court.group.first(time.perf_counter())

    def _tell(self, doing: str, fraction: float) -> None:
        self._send("at", (self._case.label, doing, fraction))

    def _results(self, name: str) -> Sequence[str]:
        return self._case.mode.results(self._gradients[name])


def _take_unjudged(contender: RankContender, judge: RankRoundJudge, number: int, lead_us: float) -> Sample:
    """A turn on the inputs of its round, whose results nobody looks at."""
    return contender.ask(SampleReport, "sample", judge.draw(number, contender.name), lead_us).sample()


def _sound(row: Record) -> bool:
    return row.status is Status.OK


# Where the rows go


class TpRun(Outlets):
    """Takes rows as they come. `options` are for run.json."""

    def __init__(
        self, this: Machine, settings: Settings, options: dict[str, Any], console: Console, quiet: bool
    ) -> None:
        about = {"command": settings.command, "run_id": settings.run_id, "settings": options, "groups": {}}
        super().__init__(this, about, console)
        self.quiet = quiet
        self.rows: list[Record] = []
        self._lost = False
        self._bar = Bar(self.console, doing="starting ranks", quiet=self.quiet)
        self._done = 0
        self._whose = ""
        """The implementation whose code runs now, or ran last; "" for nobody's."""
        self._size = 0
        self._fatal: set[str] = set()
        """Implementations that ended a group at the case that is to come again."""

    def begin(self, options: WandbOptions, csv: bool, out: Path | None, total: int) -> None:
        """Open what takes rows; `total` cases are to come, over all groups. Raises BadInput."""
        self.open("tp", Files(out, "tp", "tp", _earlier) if csv else None, options)
        self._bar.update(self._bar.tasks[0].id, total=total)

    def spawn(self, plan: SplitPlan, sizes: Sequence[int], settings: Settings, wait: bool) -> int:
        """Let groups of processes on this machine work on the plan, one size after the other; the exit status."""
        interrupted = False
        with self:
            self.enter_context(self._bar)
            try:
                for number in range(max(sizes) if settings.device.type == "cuda" else 0):
                    gpu = torch.device("cuda", number)
                    self.enter_context(locks.device(gpu, self.about["command"], wait, self.say))
                logs = self.enter_context(output.logs(self.folder, lambda: self._lost))
                for size in sizes:
                    self._size = size
                    self._with_groups(self._fitting(plan, size, settings), size, settings, logs)
            except KeyboardInterrupt:
                interrupted = True
            except DoesNotEnd as error:
                self._lost = True
                self.warn(f"{error} The run ends here.")
            nothing = self._conclude(plan)
        if interrupted:
            self.say("Interrupted: finished rows were kept.", "yellow")
            return INTERRUPTED
        return self.status or int(nothing)

    def join(self, plan: SplitPlan, settings: Settings, rank: int, size: int) -> int:
        """Be one of the ranks that torchrun started; rank 0 takes the rows. The exit status."""
        self._size = size
        with self:
            self.enter_context(self._bar)
            self.enter_context(locks.device(settings.device, self.about["command"], False, self.say))
            try:
                take_part(self.hear if rank == 0 else lambda kind, value: None, plan, settings)
            except GroupLost as loss:
                self._lost = True
                if rank == 0:
                    self._give_up(plan, self._done, size, loss)
            finally:
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
            nothing = rank == 0 and self._conclude(plan)
        return self.status or int(nothing)

    def hear(self, kind: str, value: Any) -> None:
        """What rank 0 sends."""
        if kind == "whose":
            self._whose = value
        elif kind == "at":
            label, doing, fraction = value
            self._bar.tell(f"{self._size} ranks, {label}: {doing}", self._done + fraction)
        elif kind == "rows":
            self._take([from_data(data, self.about) for data in value])
        elif kind == "machines":
            ranks = [{"rank": number, "host": of["host"], "device": of["device"]} for number, of in enumerate(value)]
            hosts = {of["host"]: of for of in reversed(value)}
            self.about["groups"][str(len(value))] = {"ranks": ranks, "hosts": hosts}
            self.describe()

    def _take(self, rows: Sequence[Record]) -> None:
        """The rows of a case."""
        for row in rows:
            if row.implementation in self._fatal:
                row.status = Status.ERROR
        self._fatal.clear()
        self.rows += rows
        self._done += 1
        self._bar.tell("", self._done)
        for row in rows:
            if self.files:
                self.files.write(row)
            if self.wandb:
                self.wandb.write(row)
            if row.failed if self.quiet else not self.console.is_terminal and row.status is not Status.SKIPPED:
                self.say(tables.tp_line(row))

    @property
    def status(self) -> int:
        """The exit status so far."""
        return int(self._lost or any(row.failed for row in self.rows))

    def _fitting(self, plan: SplitPlan, size: int, settings: Settings) -> SplitPlan:
        """The plan without the cases that the machine's memory does not hold with so many ranks; these get rows."""
        large = too_large(plan.cases, size, settings)
        for case, reason in large.items():
            self.say(f"{size} ranks, {case.label}: skipped: {reason}")
            self._take_none(plan, case, Status.SKIPPED, reason)
        return dataclasses.replace(plan, cases=tuple(case for case in plan.cases if case not in large))

    def _with_groups(self, plan: SplitPlan, size: int, settings: Settings, logs: Path) -> None:
        """All cases with so many ranks; a group that is lost is replaced by one without the implementation that ran."""
        while plan.cases:
            self._whose, done = "", self._done
            ranks = LocalRanks(size, take_part, (plan, settings, size), plan.timeout_s, logs)
            try:
                for kind, value in ranks.messages():
                    self.hear(kind, value)
                return
            except GroupLost as error:
                self._lost, loss = True, error
            finally:
                ranks.end()
            name = self._whose
            if not name:
                self._give_up(plan, self._done - done, size, loss)
                return
            plan = dataclasses.replace(plan, cases=plan.cases[self._done - done :])
            reason = f"It ended the group of {size} ranks at {plan.cases[0].label}: {loss}."
            self.warn(f"{name}: {reason} The others continue without it.")
            self._fatal.add(name)
            plan = dataclasses.replace(plan, skipped=plan.skipped | {name: reason})

    def _give_up(self, plan: SplitPlan, done: int, size: int, loss: GroupLost) -> None:
        """No further group would fare better, or there can be none: the cases that are not done."""
        for case in plan.cases[done:]:
            self._take_none(plan, case, Status.ERROR, f"The group of {size} ended: {loss}.")

    def _take_none(self, plan: SplitPlan, case: Case, status: Status, reason: str) -> None:
        """The rows of a case for which nothing is measured."""
        rows = blanks(plan, case, [self.this.as_dict()], self._size).values()
        self._take([row.end(status, reason) for row in rows])

    def _conclude(self, plan: SplitPlan) -> bool:
        """Show everything; whether nothing that was asked for was timed."""
        self._bar.stop()
        if not self.quiet:
            for table in tables.tp_tables(self.rows):
                self.console.print(table, highlight=False)
        if self.folder and self.files and len({row["ranks"] for row in self.files.rows()}) > 1:
            self.say(documents.save_scaling(self.folder, plan.names))
        asked = [row for row in self.rows if row.implementation in plan.asked]
        return self.end("Rows, samples and machines", asked, "timed")


def _earlier(folder: Path) -> dict[str, Any]:
    """Of run.json in a folder to which this run is added: the runs before it, whose groups make one scaling figure.

    Raises BadInput for a folder that holds something else.
    """
    file = folder / run_folder.RUN
    if not file.exists():
        return {}
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        run = None
    if not (folder / run_folder.SPLIT).exists() or not isinstance(run, dict):
        raise BadInput(f"--out: {folder} holds a run of another command; give another folder.")
    return {"earlier": [*run.pop("earlier", []), run]}
