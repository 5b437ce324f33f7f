"""The way of a case, from its implementations to their rows."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.machine.nvml import Gpu, NoAnswer
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.rows.record import Record, Status, TensorCheck
from swiglu_bench.worker import policy
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.latency_graph_energy import measure_beside
from swiglu_bench.worker.places import Contender, JudgeLost, Place, name_of
from swiglu_bench.worker.profiling import profile
from swiglu_bench.worker.reports import MemoryReport
from swiglu_bench.worker.settings import Task, Tell
from swiglu_bench.worker.slowing import Turn, alone_ms, find_culprit, slow_the_next, slower, slows_the_next
from swiglu_bench.worker.timing import CaseTimer, Entry, blame, sentence

MOST_IDLE = 0.15
"""Of a CPU, that a contender's process may use while it has nothing to do. One that spins may get no more."""

log = logging.getLogger(__name__)

TWINS = ("twin 1", "twin 2", "twin 3")
"""Processes of the baseline beside its first: how far apart they come is this machine's noise."""


@dataclass
class Kept:
    """What lasts from case to case at one place."""

    used: dict[tuple[str, ...], tuple[TensorCheck, ...]] = field(default_factory=dict)
    """Verdicts on how a model uses an implementation."""
    rehearsed: set[tuple[str, ...]] = field(default_factory=set)
    """Implementations with the shape, scope, mode and dtype for which they were compiled beforehand."""
    rests: set[str] = field(default_factory=set)
    """Contenders whose processes were seen to rest."""
    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    gpu: Gpu | None = None
    gpu_note: str | None = None


def run_case(
    place: Place, case: Case, implementations: Sequence[Implementation], tell: Tell, kept: Kept
) -> Iterator[Record]:
    """All rows of one case; how one implementation ends never keeps another from its row."""
    able: list[tuple[Implementation, Record]] = []
    for implementation in implementations:
        record = policy.blank(place.settings, place.machine, case, implementation)
        reason = policy.inapplicable(place.settings, place.machine, case, implementation)
        if reason:
            yield record.end(Status.SKIPPED, reason)
        else:
            able.append((implementation, record))
    if not able:
        return
    waiting = {record.implementation: record for _, record in able}
    try:
        for record in _CaseRun(place, case, tell, kept).run(able):
            del waiting[record.implementation]
            yield record
    except JudgeLost as error:
        yield from (record.end(Status.ERROR, f"The judge's process failed: {error}.") for record in waiting.values())
        return
    with suppress(JudgeLost):
        place.judge.end_case()


class _CaseRun:
    """One case at one place."""

    def __init__(self, place: Place, case: Case, tell: Tell, kept: Kept) -> None:
        self._place, self._case, self._tell, self._kept = place, case, tell, kept
        self._task, self._baseline = place.settings.task, place.settings.baseline_of(case)
        self._drawn = Drawn.new()
        self._alone_ms: list[float] = []
        self._seats = 0
        self._admitting = Admitting(place, case, self._drawn, thorough=self._task is Task.VERIFY, used=kept.used)

    def run(self, able: Sequence[tuple[Implementation, Record]]) -> Iterator[Record]:
        """The rows of the implementations that apply."""
        free = self._place.judge.free_bytes()
        reason = policy.too_large(self._place.settings, self._case, free)
        if self._task is Task.TIME and not reason:
            self._ceilings = self._measured_ceilings()
            reason = policy.too_long(self._place.settings, self._case, len(able), self._ceilings)
        verifies, cpus = self._task is Task.VERIFY, os.cpu_count() or 1
        seats = self._seats = policy.seats(self._place.settings, self._case, free, idle=len(able) if verifies else 0)
        if verifies and len(able) <= min(seats, cpus) and not reason:
            self._start([one for one, _ in able], twins=False)  # they load while the truth is computed
        reason = reason or self._place.judge.begin_case(self._case, self._drawn.weights)
        for draw in self._drawn.draws:
            reason = reason or self._place.judge.truth(draw, self._case.mode is not Mode.FORWARD)
        if reason:
            yield from (record.end(Status.SKIPPED, reason) for _, record in able)
            return
        if self._case.shape.experts:
            load = self._place.judge.load()
            for _, record in able:
                record.expert_tokens_min, record.expert_tokens_max = load.least, load.most
                record.expert_tokens_median, record.idle_experts = load.median, load.idle
                record.padding_share = load.padding
        able = self._baseline_first(able)
        if verifies:
            yield from self._verify(able, seats, cpus)
            return
        together = len(able) + len(TWINS) <= seats
        everyone = [one for one, _ in able]
        if not together:
            self._rehearse(everyone, seats)
        entries: list[Entry] = []
        for index, (implementation, record) in enumerate(able):
            self._tell(f"checking {implementation.name}", 0.5 * index / len(able))
            if together and index < 2:  # first the baseline by itself, then all the others
                first = index == 0 and implementation.name == self._baseline
                self._start(everyone[:1] if first else everyone, twins=first)
                if not first or policy.compiles(self._place.settings, implementation):
                    self._rehearse(everyone, seats - len(able) - len(TWINS))
                self._place.settle()
            entry = self._admit(implementation, record, stays=together)
            if entry and together:
                self._time_alone(entry)
            if entry and self._task is Task.TIME:
                entries.append(entry)
            else:
                yield record
        if entries:
            yield from self._time(entries, len(entries) if together else max(1, seats - len(TWINS) - 1))

    def _verify(self, able: Sequence[tuple[Implementation, Record]], seats: int, cpus: int) -> Iterator[Record]:
        """Nothing is timed: as many are checked side by side as there is room for; who is done makes room."""
        at_once = max(1, min(len(able), seats, cpus))

        def check(implementation: Implementation, record: Record) -> Record:
            self._admit(implementation, record)
            if seats < len(able):
                self._place.judge.close_letterboxes(name_of(implementation, ""))
                with suppress(Exception):  # its process may have ended
                    self._place.contender(implementation).tell("forget")
            return record

        done = self._place.side_by_side([partial(check, *one) for one in able], at_once)
        self._tell(f"checking {able[0][0].name}", 0.0)
        for index, record in enumerate(done, 1):
            yield record
            if index < len(able):
                self._tell(f"checking {able[index][0].name}", index / len(able))

    def _rehearse(self, able: Sequence[Implementation], at_once: int) -> None:
        """Have what takes long before it is timed done side by side, while nothing is: compiling, and a model's use.

        Once for each shape; a single one gains nothing.
        """
        case = self._case
        keys = {one.name: (one.name, case.shape.name, case.scope, case.mode, case.dtype) for one in able}
        wanted = [
            one for one in able
            if policy.compiles(self._place.settings, one) and keys[one.name] not in self._kept.rehearsed
        ]  # fmt: skip
        if len(wanted) < 2 or at_once < 2:
            return
        self._tell(f"compiling {len(wanted)} implementations", 0.0)
        self._place.aside(wanted, min(len(wanted), at_once), self._admitting.rehearse)
        self._kept.rehearsed |= {keys[one.name] for one in wanted}

    def _start(self, implementations: Sequence[Implementation], twins: bool) -> None:
        names = [(one, "") for one in implementations]
        if twins and self._task is Task.TIME:
            names += [(implementations[0], twin) for twin in TWINS]
        self._place.start(names, self._case)

    def _baseline_first(self, able: Sequence[tuple[Implementation, Record]]) -> list[tuple[Implementation, Record]]:
        """So that it can be timed before any other's code has run."""
        return sorted(able, key=lambda one: one[0].name != self._baseline)

    def _end(self, contender: Contender) -> None:
        """End a process for which there is no room now, and give back the memory by which it hands over results."""
        contender.end()
        self._place.judge.close_letterboxes(contender.name)

    def _time_alone(self, entry: Entry) -> None:
        """Take the baseline's time before the others begin; on a CPU, processes that stand still slow nobody."""
        settings = self._place.settings
        is_baseline = entry.record.implementation == self._baseline
        if is_baseline and self._task is Task.TIME and settings.device.type == "cuda":
            with suppress(Exception):
                self._alone_ms = alone_ms(entry.contender)

    def _admit(self, implementation: Implementation, record: Record, stays: bool = True) -> Entry | None:
        """Check one contender; its record ends here unless an entry comes back.

        Unless it stays, its process ends, whatever the verdict: the others need the memory.
        """
        contender: Contender | None = None
        try:
            contender = self._place.contender(implementation)
            with nullcontext() if self._task is Task.VERIFY else self._place.held():
                admission = self._admitting.admit(contender)
                record.drawn = " ".join(str(seed) for seed in self._drawn.seeds)
                record.first_call_ms = admission.first_call_ms
                record.note_checks(admission.checks)
                if record.status is Status.OK and self._task is Task.MEMORY:
                    self._note_memory(record, contender)
            if record.status is Status.OK and self._task is Task.TIME:
                self._check_idle(record, contender)
        except DeviceLost:
            raise  # in this process: no contender could be measured after it
        except BadInput as error:  # its file is not what it was when the run began
            record.end(Status.ERROR, str(error))
        except Exception as error:  # whatever a contender raises, and the end of its process, costs its own row
            log.info("%s, while it was checked:", implementation.name, exc_info=error)
            record.end(Status.ERROR, f"{sentence(error)}{self._place.log_of(contender) if contender else ''}")
        if contender and not stays:
            self._end(contender)
        return Entry(contender, record, admission.gradients) if contender and record.status is Status.OK else None

    def _check_idle(self, record: Record, contender: Contender) -> None:
        """Once a run: whether its process rests when it has nothing to do, as it must in a user's own process."""
        if contender.name not in self._kept.rests:
            self._kept.rests.add(contender.name)
            share = self._place.idle_share(contender)
            if share > MOST_IDLE:
                self._kept.rests.discard(contender.name)
                blame(record, "slows others", f"its process uses {share:.0%} of a CPU while it has nothing to do")

    def _note_memory(self, record: Record, contender: Contender) -> None:
        use = contender.ask(MemoryReport, "memory", self._drawn.draws[0])
        record.saved_bytes, record.peak_bytes, record.workspace_bytes = use.saved_bytes, use.peak_bytes, use.kept_bytes
        footprint = contender.implementation.footprints.get(self._case.scope)
        if footprint:
            record.predicted_saved_bytes, record.predicted_peak_bytes = costs.predicted_memory(self._case, footprint)
            record.predicted_workspace_bytes = 0

    def _time(self, entries: list[Entry], at_once: int) -> Iterator[Record]:
        """The rounds; where not all processes fit on the device, in groups with the baseline in each."""
        base = next((one for one in entries if one.contender.name == self._baseline), None)
        others = [entry for entry in entries if entry is not base]
        each = max(1, at_once - 1) if base else at_once
        groups = [others[start : start + each] for start in range(0, len(others), each)] or [[]]
        for group in groups:
            members = [entry for entry in ([base, *group] if base else group) if self._ready(entry)]
            self._time_together(members, base if base in members else None)
            for entry in members if len(groups) > 1 else ():
                self._end(entry.contender)
        yield from (entry.record for entry in entries)

    def _time_together(self, members: Sequence[Entry], base: Entry | None) -> None:
        """Time some contenders, and without the one that makes others slow, should there be one."""
        twins = self._twins(base, max(1, self._seats - len(members))) if base else []
        timer = CaseTimer(self._place, self._case, self._ceilings, *self._nvml())
        timer.time(members, twins, self._tell_timing)
        for entry in members:
            self._check_again(entry)
        culprit, certain = self._slows_others(base, members, timer.turns) if base else (None, False)
        sound = [entry for entry in members if entry.record.status is Status.OK and entry is not culprit]
        sound = [entry for entry in sound if self._ready(entry)]
        if culprit and base:
            reason = f"beside it, {base.record.implementation} is slower"
            if certain:
                blame(culprit.record, "slows others", reason)
            else:
                once = f"{reason[0].upper()}{reason[1:]} in one of two attempts, which does not decide it."
                culprit.record.end(Status.UNSETTLED, once)
            self._time_together(sound, base if base in sound else None)
            return
        measure_beside(self._place, self._case, sound, timer.watch.gpu, self._tell_timing)
        profile(self._place, self._case, sound, self._tell_timing)

    def _tell_timing(self, doing: str, share: float) -> None:
        self._tell(doing, 0.5 + 0.5 * share)

    def _slows_others(self, base: Entry, members: Sequence[Entry], turns: Sequence[Turn]) -> tuple[Entry | None, bool]:
        """The contender that makes the baseline slower than it was alone, or those slower that come next; or None.

        Also whether a second try says so too: other programs come and go.
        """
        others = {entry.contender.name: entry for entry in members if entry is not base}
        equals = {name_of(base.contender.implementation, alias) for alias in ("", *TWINS)}
        for name in slow_the_next(turns, equals):
            if name in others and self._ready(base) and self._ready(others[name]):
                with suppress(Exception):
                    if slows_the_next(base.contender, others[name].contender):
                        return others[name], slows_the_next(base.contender, others[name].contender)
        times = base.record.samples_ms
        if not self._alone_ms or not times or not slower(times, self._alone_ms):
            return None, False

        def revive(contender: Contender) -> Contender | None:
            entry = others[contender.name]
            return entry.contender if self._ready(entry) else None

        found = find_culprit(base.contender, [one.contender for one in others.values()], revive, self._alone_ms)
        if not found or not self._ready(others[found.name]):
            return others[found.name] if found else None, False
        again = find_culprit(base.contender, [others[found.name].contender], revive, self._alone_ms)
        return others[found.name], again is not None

    def _twins(self, base: Entry, most: int) -> list[Contender]:
        """Further processes of the baseline, as many as can be built; where none can, its row says so."""
        built: list[Contender] = []
        for alias in TWINS[:most]:
            twin = self._place.contender(base.contender.implementation, alias)
            try:
                self._admitting.build(twin)
            except Exception as error:
                log.info("%s of the baseline:", alias, exc_info=error)
                self._end(twin)
                if not built:
                    base.record.remark(
                        f"No second process of {base.record.implementation} could be built, which would tell noise "
                        f"from a difference, so that there are no ratios: {sentence(error)}."
                    )
                break
            built.append(twin)
        return built

    def _ready(self, entry: Entry) -> bool:
        """Build a contender again whose process ended after its check."""
        try:
            contender = self._place.contender(entry.contender.implementation)
            if contender is not entry.contender:
                entry.contender = contender
                self._admitting.build(contender)
        except Exception as error:
            entry.record.end(Status.ERROR, f"{sentence(error)}{self._place.log_of(entry.contender)}")
            return False
        return True

    def _check_again(self, entry: Entry) -> None:
        """What was right before the rounds has to be right after them."""
        if entry.record.status is Status.OK:
            try:
                failed = self._admitting.check_again(entry.contender, entry.gradients)
            except Exception as error:
                entry.record.end(Status.ERROR, f"{sentence(error)}{self._place.log_of(entry.contender)}")
            else:
                for check in failed:
                    blame(entry.record, check.check, f"{check.reason} (after it was timed)")

    def _measured_ceilings(self) -> Ceilings:
        dtype = self._case.dtype.value
        if dtype not in self._kept.ceilings:
            self._kept.ceilings[dtype] = self._place.judge.ceilings(dtype)
        return self._kept.ceilings[dtype]

    def _nvml(self) -> tuple[Gpu | None, str]:
        if self._kept.gpu_note is None:
            self._kept.gpu_note = ""
            if self._place.settings.device.type == "cuda":
                try:
                    self._kept.gpu = Gpu(self._place.settings.device)
                except NoAnswer as reason:
                    self._kept.gpu_note = f"{reason}."
        return self._kept.gpu, self._kept.gpu_note
