"""The task `tp`, the groups of ranks as places of the loop, and what the command does with the rows."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import WEIGHTS, Dtype
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.contenders import ASYNC
from swiglu_bench.loop import Ending, run_cases
from swiglu_bench.machine import locks, machine
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rule, TimedCall, run_rounds
from swiglu_bench.options import TpOptions
from swiglu_bench.output import Opened, folder_of, writing
from swiglu_bench.rows import run_folder
from swiglu_bench.rows.record import Record, Status, row_of
from swiglu_bench.show import pictures
from swiglu_bench.show.console import RanksWriter, Screen
from swiglu_bench.tasks.tp import ALONE, COLLECTIVES, LOCAL, SINGLE, TWIN, SplitCase, fill, key
from swiglu_bench.tasks.tp.court import WHOLE, RankContender, RankCourt, RankRoundJudge
from swiglu_bench.worker import policy
from swiglu_bench.worker.admission import Admitting
from swiglu_bench.worker.chains import WrongResult
from swiglu_bench.worker.child import ContenderFailed
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.places import CaseRows, OneDevice, Work
from swiglu_bench.worker.policy import Settings, check_work
from swiglu_bench.worker.ranks import GroupLost, LocalRanks, Send
from swiglu_bench.worker.turns import contender_of
from swiglu_bench.worker.worker import BuildReport, Malformed, MemoryReport, SampleReport

FAILURES = (ContenderFailed, Malformed, BadInput)
Machines = Sequence[Mapping[str, Any]]
"""Of all ranks."""


def default_rule(budget_s: float) -> Rule:
    """Few rounds suffice: a call of many ranks is long."""
    return Rule(warmup_rounds=2, min_rounds=10, max_rounds=200, min_s=0.5, budget_s=budget_s)


def sharing(case: SplitCase, settings: Settings) -> int:
    """How many of the ranks share a device's memory: on a CPU all, each of which runs every case whole, too."""
    return case.ranks if settings.device.type == "cpu" else 1


def too_large(cases: Sequence[SplitCase], settings: Settings) -> dict[SplitCase, str]:
    """The cases that the device's memory does not hold with so many ranks, and why."""
    free_bytes = machine.free_memory_bytes(settings.device)
    found = {case: policy.too_large(settings, case, free_bytes, sharing(case, settings)) for case in cases}
    return {case: reason for case, reason in found.items() if reason}


def operations(cases: Sequence[SplitCase], implementations: Sequence[Implementation], rule: Rule) -> dict[Dtype, float]:
    """Operations of the fewest rounds on a CPU, by dtype: split, without collectives, and whole per rank."""
    found = dict.fromkeys((case.dtype for case in cases), 0.0)
    here = sum(each.unavailable("cpu") is None for each in implementations)
    for case in cases:
        rounds = (rule.warmup_rounds + rule.min_rounds) * here * len(case.ways)
        found[case.dtype] += (2 + case.ranks) * rounds * costs.flops(case, (*WEIGHTS[case.scope], "x"))
    return found


def check_affordable(
    options: TpOptions, cases: Sequence[SplitCase], able: Sequence[Implementation], settings: Settings
) -> None:
    """Raise BadInput where the memory holds no case, or a CPU would take too long."""
    large, this = too_large(cases, settings), machine.describe(settings.device)
    if len(large) == len(cases):
        case, reason = next(iter(large.items()))
        raise BadInput(f"--shapes: {case.label} is too large: {reason[:-1]}; give smaller shapes or fewer --gpus.")
    if options.budget is None:
        check_work(this, settings.device, operations(cases, able, settings.rule), "--shapes", "--tokens")


# On every rank


def blanks(
    settings: Settings, case: SplitCase, implementations: Sequence[Implementation], machines: Machines
) -> dict[tuple[str, bool], Record]:
    """The rows of a case before anything was measured; the first rank's machine stands for all."""
    this, hosts = machines[0], list(dict.fromkeys(str(rank["host"]) for rank in machines))
    about = {name: this[name] for name in ("device", "driver", "cuda", "torch", "triton", "version")}
    run = _named(settings) | {"settings": {"baseline": settings.baseline_of(case)}}
    return {
        (known.name, way): row_of(
            "tp", run, run_id=settings.run_id, shape=case.shape.name, hidden=case.shape.hidden,
            intermediate=case.shape.intermediate, tokens=case.tokens, dtype=case.dtype.value, mode=case.mode.value,
            seed=case.seed, ranks=case.ranks, sequence_parallel=way, implementation=known.name,
            experts=case.shape.experts.count if case.shape.experts else None,
            hosts=len(hosts), host=" ".join(hosts), timestamp=machine.now(), **about,
        )
        for known in implementations
        for way in case.ways
    }  # fmt: skip


def _named(settings: Settings) -> dict[str, str]:
    return {"run_id": settings.run_id, "command": settings.command}


def tp(court: Court, case: SplitCase, implementations: Sequence[Implementation]) -> Iterator[Record]:
    """Check and time a case on all ranks, whose court it is. Raises GroupLost."""
    ranks = cast(RankCourt, court)
    rows = blanks(ranks.settings, case, implementations, ranks.machines)
    of_ranks = ranks.on_all(lambda: [ranks.why_not(case, *which) for which in rows])
    for row, *reasons in zip(rows.values(), *of_ranks, strict=True):
        if reason := next(filter(None, reasons), ""):
            row.end(Status.SKIPPED, reason, "memory" if reason.startswith(WHOLE) else "")
    able = {which: row for which, row in rows.items() if row.status is Status.OK}
    try:
        if able:
            _SplitCase(ranks, case, able).run()
    except FAILURES as error:  # nothing that a contender's code runs for
        for row in able.values():
            row.end(Status.ERROR, f"{str(error).removeprefix('NoReference: ')}.")
    yield from rows.values()


class _SplitCase:
    """One case: `rows` are those of the contenders that may take part, by name and way of splitting."""

    def __init__(self, court: RankCourt, case: SplitCase, rows: dict[tuple[str, bool], Record]) -> None:
        self._court, self._case, self._rows = court, case, rows
        court.tell("fp64", 0.0)
        self._drawn = court.begin()
        self._admitting = Admitting(court, case, self._drawn)
        self._judged: dict[str, tuple[RankContender, tuple[str, ...]]] = {}
        """Contenders whose results are judged in the rounds, and their gradients, by key."""
        self._beside: dict[str, RankContender] = {}
        """Those whose results nobody looks at."""

    def run(self) -> None:
        """Check, time, and fill the rows."""
        for number, ((name, way), row) in enumerate(self._rows.items()):
            split = ", split sequence" if way else ""
            self._court.tell(f"checking {name}{split}", 0.1 + 0.5 * number / len(self._rows))
            try:
                self._admit(name, way, row)
            except FAILURES as error:
                row.end(Status.ERROR, f"{error}.")
                if name == ASYNC:  # torch's own experiment: that it does not work here is no fault of the run
                    row.end(Status.SKIPPED, f"It does not work here: {error}.")
        for name in dict.fromkeys(ALONE.get(row.implementation, row.implementation) for row in self._sound()):
            self._court.tell(f"checking {name} on one GPU", 0.6)
            reason = self._admit_alone(name)
            for (other, _), row in self._rows.items():
                if ALONE.get(other, other) == name:
                    row.single_reason = reason
        if self._judged:
            self._time()

    def _sound(self) -> list[Record]:
        return [row for row in self._rows.values() if row.status is Status.OK]

    def _admit(self, name: str, way: bool, row: Record) -> None:
        contender = RankContender(self._court, self._court.known[name], way)
        admission = self._admitting.admit(contender)
        if name == ASYNC:
            contender.tell("check_fused", self._drawn.draws[0])
        row.first_call_ms = admission.first_call_ms
        row.note_checks(admission.checks)
        if row.status is Status.OK:
            row.peak_bytes = contender.ask(MemoryReport, "memory", self._drawn.draws[0]).peak_bytes
            self._judged[contender.name] = contender, admission.gradients

    def _admit_alone(self, name: str) -> str:
        """Without collectives, on this rank's part; and the whole on each GPU by itself: what is wrong with it."""
        known = self._court.known[name]
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
        """The rounds, and what they say of each row."""
        court, case, rule = self._court, self._case, self._court.settings.rule
        judge = RankRoundJudge(court, lambda name: case.mode.results(self._judged[name][1]))
        gbps, timed = dict[bool, float | None](), list[TimedCall]()
        base = court.settings.baseline_of(case)
        for way in sorted({row.sequence_parallel for row in self._sound()}):
            if key(base, way) in self._judged:  # once more, so that what is noise is known
                twin = RankContender(court, court.known[base], way, TWIN)
                self._judged[twin.name] = twin, self._admitting.build(twin)
            if court.group.size > 1:
                timed.append(TimedCall(key(COLLECTIVES, way), partial(court.take_collectives, way)))
            court.tell("the ceiling of the collectives", 0.68)
            gbps[way] = court.ceiling_gbps(way)
        timed += [contender_of(contender, judge) for contender, _ in self._judged.values()]
        timed += [TimedCall(name, partial(_take_unjudged, beside, judge)) for name, beside in self._beside.items()]

        def on_round(number: int) -> dict[str, Exception]:
            court.tell(f"timing, round {number}", 0.7 + 0.3 * min(1, number / rule.min_rounds))
            return judge.judge()

        def now() -> float:  # rank 0's clock, so that all stop in the same round
            return court.group.first(time.perf_counter())

        baseline = next((key(base, way) for way in gbps if key(base, way) in self._judged), None)
        rounds = run_rounds(timed, rule, baseline=baseline, seed=case.seed, on_round=on_round, now=now)
        for name, error in judge.judge_last().items():
            rounds.timings[name].failure = rounds.timings[name].failure or error
        changed = court.judge.changed_weights("any")
        for row in self._sound():
            name = key(row.implementation, row.sequence_parallel)
            failure = rounds.timings[name].failure
            if changed:
                row.end(Status.ERROR, "The weights were changed while the case ran.")
            elif isinstance(failure, WrongResult):
                row.end(Status.INCORRECT, f"{failure} in the timed loop.")
            elif failure:
                row.end(Status.ERROR, f"In the timed loop: {failure}.")
            else:
                try:
                    row.note_checks(self._admitting.check_again(*self._judged[name]), " after it was timed")
                except FAILURES as error:
                    row.end(Status.ERROR, f"After it was timed: {error}.")
        for row in self._sound():
            fill(row, rounds, case, gbps[row.sequence_parallel])


def _take_unjudged(contender: RankContender, judge: RankRoundJudge, number: int, lead_us: float) -> Sample:
    """A turn on the inputs of its round, whose results nobody looks at."""
    return contender.ask(SampleReport, "sample", judge.draw(number, contender.name), lead_us).sample()


# The groups as places of the loop


def take_part(send: Send, work: Work, cases: Sequence[SplitCase], skipped: Mapping[str, str]) -> None:
    """Be one of the ranks of this machine: measure all cases together with the others. Raises GroupLost."""
    court = RankCourt.join(work, skipped, processes=cases[0].ranks)
    send("machines", court.machines)
    court.tell = lambda doing, share: send("at", (doing, share))
    court.tell_whose = partial(send, "whose")
    for case in cases:
        send("rows", [as_data(row) for row in court.run(work.task, case, work.implementations)])


def as_data(row: Record) -> dict[str, Any]:
    """A row with its samples as plain data."""
    samples = {"samples_ms": row.samples_ms, "twin_ms": row.twin_ms, "series": dict(row.series)}
    return {"columns": row.row(), "baseline": row.baseline, **samples}


def from_data(data: dict[str, Any], settings: Settings) -> Record:
    """The row that was plain data."""
    columns = data["columns"] | {"status": Status(data["columns"]["status"])}
    row = row_of("tp", _named(settings) | {"settings": {"baseline": data["baseline"]}}, **columns)
    row.samples_ms, row.twin_ms, row.series = tuple(data["samples_ms"]), tuple(data["twin_ms"]), data["series"]
    return row


class RankGroups(OneDevice):
    """One place: groups of ranks on this machine, one after the other, that wait for one case at a time.

    A group that is lost is replaced by one without the implementation whose code ran.
    """

    def __init__(
        self, device: torch.device, cases: Sequence[SplitCase], skipped: Mapping[str, str], say: Callable[[str], object]
    ) -> None:
        """`cases` are all that the loop will give, in their order; `skipped` has who takes no part, and why."""
        super().__init__(device, say)
        self._cases, self._always_skipped, self._skipped = cases, skipped, dict(skipped)
        self._ranks: LocalRanks | None = None
        self._heard: Iterator[tuple[str, Any]] = iter(())
        self._given_up = ""
        """Why there are no more groups of this size."""
        self._whose, self._size = "", 0
        """The implementation whose code runs now, or ran last, or "" for nobody's; and the number of ranks."""
        self.met: Callable[[Machines], object] = lambda machines: None
        """Hears of the machines of a group's ranks."""

    def start(self, work: Work, changed: Callable[[], object]) -> None:
        """As Places has it."""
        self._work, self._changed, self._large = work, changed, too_large(self._cases, work.settings)
        for number in range(max(case.ranks for case in self._cases) if self.device.type == "cuda" else 0):
            gpu = torch.device("cuda", number)
            self._held.enter_context(locks.device(gpu, work.settings.command, work.wait, self._say))

    def close(self) -> None:
        """As Places has it; raises DoesNotEnd where a rank outlives its kill."""
        try:
            self._end_group()
        finally:
            super().close()

    def _rows(self) -> Iterator[CaseRows]:
        case: SplitCase = self._case
        if self._size != case.ranks:
            self._end_group()
            self._size, self._skipped, self._given_up = case.ranks, dict(self._always_skipped), ""
        if case in self._large:
            yield CaseRows(0, self._none(case, Status.SKIPPED, self._large[case]))
            return
        fatal: set[str] = set()
        while not self._given_up:
            try:
                rows = self._from_group(case)
            except GroupLost as loss:
                self._end_group()
                if self._whose:
                    reason = f"It ended the group of {case.ranks} ranks at {case.label}: {loss}."
                    self._say(f"Warning: {self._whose}: {reason} The others continue without it.")
                    fatal.add(self._whose)
                    self._skipped[self._whose] = reason
                else:
                    self._given_up = f"The group of {case.ranks} ended: {loss}."
                continue
            for row in rows:
                row.status = Status.ERROR if row.implementation in fatal else row.status
            yield CaseRows(0, rows)
            return
        yield CaseRows(0, self._none(case, Status.ERROR, self._given_up))

    def _from_group(self, case: SplitCase) -> list[Record]:
        """The rows of the next case that the group does; a group that is there has done all before."""
        if self._ranks is None:
            self._whose, work = "", self._work
            left = self._cases[self._cases.index(case) :]
            todo = [each for each in left if each.ranks == case.ranks and each not in self._large]
            self._ranks = LocalRanks(case.ranks, take_part, (work, todo, self._skipped), work.timeout_s, work.logs)
            self._heard = self._ranks.messages()
        for kind, value in self._heard:
            if kind == "rows":
                return [from_data(data, self._work.settings) for data in value]
            if kind == "machines":
                self.met(value)
            elif kind == "whose":
                self._whose = value
            else:
                self._tell(*value)
        raise GroupLost("it ended before its last case")

    def _tell(self, doing: str, share: float) -> None:
        self.doing[0] = (f"{self._size} ranks, {doing}", share)
        self._changed()

    def _none(self, case: SplitCase, status: Status, reason: str) -> list[Record]:
        """The rows of a case for which nothing is measured."""
        found = blanks(self._work.settings, case, self._work.implementations, [self.places[0].machine.as_dict()])
        return [row.end(status, reason, "memory" * (status is Status.SKIPPED)) for row in found.values()]

    def _end_group(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks:
            ranks.end()


class UnderTorchrun(RankGroups):
    """One place: the group that torchrun started, of which this process is a rank. All ranks run the same loop."""

    def start(self, work: Work, changed: Callable[[], object]) -> None:
        """As Places has it."""
        self._work, self._changed, self._large = work, changed, {}
        self._held.enter_context(locks.device(self.device, work.settings.command, False, self._say))
        self._ranked = RankCourt.join(work, self._skipped)
        self._ranked.tell = self._tell
        self._held.callback(self._ranked.end)
        self.met(self._ranked.machines)

    def _from_group(self, case: SplitCase) -> list[Record]:
        return list(self._ranked.run(self._work.task, case, self._work.implementations))


# The command


def perform(
    options: TpOptions, work: Work, cases: Sequence[SplitCase], places: RankGroups, asked: frozenset[str],
    about: dict[str, Any], console: Console,
) -> tuple[int, dict[str, Any], list[Record]]:  # fmt: skip
    """Run all cases: the exit status, the content of run.json, and the rows. Raises BadInput."""
    this, screen, settings = places.assemble(), Screen(console), work.settings
    run: dict[str, Any] = _named(settings) | {"settings": about, "groups": {}, "machine": this.as_dict()}
    to = Opened(folder_of("tp", options, this, settings.run_id), run)
    with writing(to, "tp", _earlier, "tp", options, this.slug, screen.warn) as into:

        def met(machines: Machines) -> None:
            ranks = [{"rank": number, "host": of["host"], "device": of["device"]} for number, of in enumerate(machines)]
            hosts = {of["host"]: of for of in reversed(machines)}
            run["groups"][str(len(machines))] = {"ranks": ranks, "hosts": hosts}
            into.describe()

        places.met = met
        shown, ending = RanksWriter(console, len(cases), options.quiet), Ending(screen)
        run_cases(places, cases, work, into, shown, ending)
        shown.close()
        if into.folder and into.files and len({row["ranks"] for row in into.files.rows()}) > 1:
            screen.say(pictures.save_scaling(into.folder, [known.name for known in work.implementations]))
    return ending.status(into, shown.records, asked, "timed", what="Rows, samples and machines"), run, shown.records


def _earlier(folder: Path) -> dict[str, Any]:
    """Of run.json in a folder to which this run is added: the runs before it, whose groups make one scaling figure.

    Raises BadInput for a folder that holds something else.
    """
    if not (folder / run_folder.RUN).exists():
        return {}
    if not (folder / run_folder.SPLIT).exists():
        raise BadInput(f"--out: {folder} holds a run of another command; give another folder.")
    run = run_folder.read_about(folder)
    return {"earlier": [*run.pop("earlier", []), run]}
