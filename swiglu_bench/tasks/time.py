"""The task `time`: contenders timed in interleaved rounds, their samples held against the parent's clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.costs import Product
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.machine.nvml import Gpu, NoAnswer
from swiglu_bench.machine.system import LoadWatch
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds, TimedCall, run_rounds
from swiglu_bench.measure.statistics import noise_interval, percentile
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.tasks.beside import measure_beside, profile
from swiglu_bench.tasks.case import TWINS, Able, CaseRun, Entry, blame, sentence
from swiglu_bench.tasks.time_row import GpuWatch, note_comparison, note_gpu, note_time, note_work
from swiglu_bench.worker import policy
from swiglu_bench.worker.batches import Batches, Unsettled, WrongResult, WrongTime
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Court, name_of
from swiglu_bench.worker.policy import Tell
from swiglu_bench.worker.turns import (
    RoundJudge,
    Turn,
    Turns,
    alone_ms,
    contender_of,
    find_culprit,
    slow_the_next,
    slower,
    slows_the_next,
)  # fmt: skip

Bare = tuple[tuple[Product, ...], bool]
"""Bare products, and whether they are in fp8."""
MOST_BURNT = 0.1
"""Share of the time in which a contender may use a CPU while it has to stand still."""
MOST_IDLE = 0.15
"""Share of a CPU that a contender's process may use while it has nothing to do. One that spins may get no more."""
log = logging.getLogger(__name__)


def time(court: Court, case: Case, implementations: Sequence[Implementation]) -> Iterator[Record]:
    """Each implementation checked and timed."""
    return _TimedCase(court, case).rows(implementations)


class _TimedCase(CaseRun):
    """One case that is timed, in groups with the baseline in each where not all processes fit on the device."""

    def __init__(self, court: Court, case: Case) -> None:
        super().__init__(court, case)
        self._alone_ms: list[float] = []

    def too_long(self, contenders: int) -> str | None:
        self._ceilings = self._measured_ceilings()
        return policy.too_long(self.court.settings, self.case, contenders, self._ceilings)

    def measure(self, able: Sequence[Able]) -> Iterator[Record]:
        together = len(able) + len(TWINS) <= self.seats
        entries: list[Entry] = []
        for known, entry in self.admitted(able, together):
            if entry is None:
                yield known.record
                continue
            if together:
                self._time_alone(entry)
            entries.append(entry)
        if entries:
            at_once = len(entries) if together else max(1, self.seats - len(TWINS) - 1)
            yield from self._time(entries, at_once)

    def check_idle(self, record: Record, contender: Contender) -> None:
        """Once a run: whether its process rests when it has nothing to do, as it must in a user's own process."""
        rests = self.court.kept.rests
        if contender.name not in rests:
            share = self.court.idle_share(contender)
            if share > MOST_IDLE:
                blame(record, "slows others", f"its process uses {share:.0%} of a CPU while it has nothing to do")
            else:
                rests.add(contender.name)

    def _time_alone(self, entry: Entry) -> None:
        """Take the baseline's time before the others begin; on a CPU, processes that stand still slow nobody."""
        if entry.record.implementation == self.baseline and self.court.settings.device.type == "cuda":
            with suppress(Exception):
                self._alone_ms = alone_ms(entry.contender)

    def _time(self, entries: list[Entry], at_once: int) -> Iterator[Record]:
        """The rounds; where not all processes fit on the device, in groups with the baseline in each."""
        base = next((entry for entry in entries if entry.contender.name == self.baseline), None)
        others = [entry for entry in entries if entry is not base]
        each = max(1, at_once - 1) if base else at_once
        groups = [others[start : start + each] for start in range(0, len(others), each)] or [[]]
        for group in groups:
            members = [entry for entry in ([base, *group] if base else group) if self._ready(entry)]
            self._time_together(members, base if base in members else None)
            for entry in members if len(groups) > 1 else ():
                self.end(entry.contender)
        yield from (entry.record for entry in entries)

    def _time_together(self, members: Sequence[Entry], base: Entry | None) -> None:
        """Time some contenders, and without the one that makes others slow, should there be one."""
        twins = self._twins(base, max(1, self.seats - len(members))) if base else []
        timer = CaseTimer(self.court, self.case, self._ceilings, *self._nvml())
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
        measure_beside(self.court, self.case, sound, timer.watch.gpu, self._tell_timing)
        profile(self.court, self.case, sound, self._tell_timing)

    def _tell_timing(self, doing: str, share: float) -> None:
        self.court.tell(doing, 0.5 + 0.5 * share)

    def _slows_others(self, base: Entry, members: Sequence[Entry], turns: Sequence[Turn]) -> tuple[Entry | None, bool]:
        """The contender that makes the baseline slower than it was alone, or those slower that come next; or None.

        Also whether a second attempt says so too: other programs come and go.
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

        found = find_culprit(base.contender, [entry.contender for entry in others.values()], revive, self._alone_ms)
        if not found or not self._ready(others[found.name]):
            return others[found.name] if found else None, False
        again = find_culprit(base.contender, [others[found.name].contender], revive, self._alone_ms)
        return others[found.name], again is not None

    def _twins(self, base: Entry, most: int) -> list[Contender]:
        """Further processes of the baseline, as many as can be built; where none can, its row says so."""
        built: list[Contender] = []
        for alias in TWINS[:most]:
            twin = self.court.contender(base.contender.implementation, alias)
            try:
                self.admitting.build(twin)
            except Exception as error:
                log.info("%s of the baseline:", alias, exc_info=error)
                self.end(twin)
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
            contender = self.court.contender(entry.contender.implementation)
            if contender is not entry.contender:
                entry.contender = contender
                self.admitting.build(contender)
        except Exception as error:
            entry.record.end(Status.ERROR, f"{sentence(error)}{self.court.log_of(entry.contender)}")
            return False
        return True

    def _check_again(self, entry: Entry) -> None:
        """What was right before the rounds has to be right after them."""
        if entry.record.status is Status.OK:
            try:
                failed = self.admitting.check_again(entry.contender, entry.gradients)
            except Exception as error:
                entry.record.end(Status.ERROR, f"{sentence(error)}{self.court.log_of(entry.contender)}")
            else:
                for check in failed:
                    blame(entry.record, check.check, f"{check.reason} (after it was timed)")

    def _measured_ceilings(self) -> Ceilings:
        dtype, known = self.case.dtype.value, self.court.kept.ceilings
        if dtype not in known:
            known[dtype] = self.court.judge.ceilings(dtype)
        return known[dtype]

    def _nvml(self) -> tuple[Gpu | None, str]:
        kept = self.court.kept
        if kept.gpu_note is None:
            kept.gpu_note = ""
            if self.court.settings.device.type == "cuda":
                try:
                    kept.gpu = Gpu(self.court.settings.device)
                except NoAnswer as reason:
                    kept.gpu_note = f"{reason}."
        return kept.gpu, kept.gpu_note


class CaseTimer:
    """Times the admitted contenders of one case and fills their rows."""

    def __init__(self, court: Court, case: Case, ceilings: Ceilings, gpu: Gpu | None, gpu_note: str) -> None:
        self._court, self._case, self._ceilings = court, case, ceilings
        self._settings, self._machine = court.settings, court.machine
        self.watch = GpuWatch(gpu, gpu_note)
        self.turns: Sequence[Turn] = ()
        """Every sample of the rounds in the order in which they were taken."""

    def time(self, entries: Sequence[Entry], twins: Sequence[Contender], tell: Tell) -> None:
        """Play the rounds and fill every entry's row; `twins` are further processes of the baseline."""
        by_name = {entry.contender.name: entry for entry in entries}
        baseline = self._settings.baseline_of(self._case) if twins else ""
        gradients = {name: entry.gradients for name, entry in by_name.items()}
        gradients |= {twin.name: gradients[baseline] for twin in twins}
        limits = products_of(self._case, [(entry.gradients, bool(entry.record.precision)) for entry in entries])
        grouped = self._grouped_of(gradients.values())

        def names(name: str) -> Sequence[str]:
            return self._case.mode.results(gradients[name])

        self.watch.look_round()
        load = LoadWatch()
        with self._court.held():
            rounds, wrong = self._play(
                [*(entry.contender for entry in entries), *twins], limits, grouped, names, baseline, tell
            )
            for name, entry in by_name.items():
                self._close(entry, rounds.timings[name].failure or wrong.get(name))
            self._check_turns(entries, twins, rounds)
            self._check_batches(entries, rounds, names, tell)
            burnt = self._court.burners()
        self.watch.look_round()
        found = load.load()
        for name, share in burnt.items():
            if name in by_name and share > MOST_BURNT and by_name[name].record.status is Status.OK:
                reason = f"it used a CPU for {share:.0%} of the time in which others were timed"
                blame(by_name[name].record, "slows others", reason)
        if baseline and by_name[baseline].record.status is not Status.OK:
            baseline = ""  # the time of a wrong answer is nothing to compare with
        aliases = [twin.name for twin in twins if not rounds.timings[twin.name].failure] if baseline else []
        noise = noise_interval([rounds.ratio(name, baseline) for name in aliases])
        for entry in entries:
            record = entry.record
            if baseline:
                record.baseline = baseline
                record.comparable = self._case.mode is Mode.FORWARD or entry.gradients == by_name[baseline].gradients
            if record.status is Status.OK:
                note_time(record, rounds, self._settings, "cpu" if self._machine.device_type == "cpu" else "")
                note_comparison(record, rounds, noise, aliases)
                note_gpu(record, self.watch)
                if found:
                    record.cpus, record.other_cpus, record.steal = found.cpus, found.others, found.steal
                products = tuple(costs.products(self._case, entry.gradients)), bool(record.precision)
                timing = rounds.timings.get(limits.get(products, ""))
                products_ms = timing.ms if timing else []
                note_work(record, self._case, entry.gradients, self._ceilings, products_ms, self._machine)
                timing = rounds.timings.get(grouped.get(entry.gradients, ""))
                in_its_dtype = timing and timing.ms and not record.precision
                record.grouped_ms = percentile(timing.ms, 50) if timing and in_its_dtype else None

    def _play(
        self, contenders: Sequence[Contender], limits: Mapping[Bare, str],
        grouped: Mapping[tuple[str, ...], str], names: Callable[[str], Sequence[str]], baseline: str, tell: Tell,
    ) -> tuple[Rounds, dict[str, Exception]]:  # fmt: skip
        """The rounds, and what is wrong with the last results."""
        judge, rule = RoundJudge(self._court, names), self._settings.rule
        timed = [contender_of(contender, judge, led=self._case.mode) for contender in contenders]
        timed += [TimedCall(name, partial(self._take_products, *p)) for p, name in limits.items()]
        timed += [TimedCall(name, partial(self._take_grouped, g)) for g, name in grouped.items()]

        def on_round(number: int) -> dict[str, Exception]:
            if number >= 0:
                self.watch.on_round()
                tell(f"timing, round {number + 1}", 0.9 * min(1.0, number / rule.min_rounds))
            return judge.judge()

        rounds = run_rounds(timed, rule, baseline=baseline or None, seed=self._case.seed, on_round=on_round)
        self.turns = judge.turns
        return rounds, judge.judge_last()

    def _check_turns(self, entries: Sequence[Entry], twins: Sequence[Contender], rounds: Rounds) -> None:
        """Hold what their turns took against those of the baseline's processes."""
        sound = {entry.contender.name: entry for entry in entries if entry.record.status is Status.OK}
        base = sound.get(self._settings.baseline_of(self._case)) if twins else None
        if base:
            equals = [base.contender, *(twin for twin in twins if not rounds.timings[twin.name].failure)]
            others = [entry.contender for entry in sound.values() if entry is not base]
            turns = Turns(self._court, self._case.mode, equals, others)
            for name, failure in turns.disagreements(rounds).items():
                self._close(sound[name], failure)

    def _check_batches(
        self, entries: Sequence[Entry], rounds: Rounds, names: Callable[[str], Sequence[str]], tell: Tell
    ) -> None:
        """Hold the samples against the parent's clock."""
        tell("timing batches", 0.88)
        sound = {entry.contender.name: entry for entry in entries if entry.record.status is Status.OK}
        claimed_ms = {name: _claimed_ms(rounds, name) for name in sound}
        batches = Batches(self._court, self._case, {name: entry.contender for name, entry in sound.items()}, names)
        host_bound = (
            [name for name in sound if _host_bound(rounds, name)] if self._settings.device.type == "cuda" else []
        )
        baseline = self._settings.baseline_of(self._case)
        for name, failure in batches.disagreements(claimed_ms, baseline, host_bound).items():
            self._close(sound[name], failure)

    def _grouped_of(self, gradients: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
        """Names under which the bare products of experts are timed, for each set of gradients that torch can do."""
        if not self._case.shape.experts:
            return {}
        wanted = [names for names in dict.fromkeys(gradients) if not self._court.judge.lay_out_grouped(names)]
        return {names: f"grouped products {number}" for number, names in enumerate(wanted)}

    def _take_grouped(self, gradients: tuple[str, ...], number: int, lead_us: float) -> Sample:
        return self._court.judge.sample_grouped(gradients, lead_us)

    def _take_products(self, products: tuple[Product, ...], in_fp8: bool, number: int, lead_us: float) -> Sample:
        return self._court.judge.sample_products(products, in_fp8, lead_us)

    def _close(self, entry: Entry, failure: BaseException | None) -> None:
        """End the row of a contender that failed in the rounds."""
        record = entry.record
        if isinstance(failure, WrongResult):
            blame(record, "timed loop", f"{failure} in the timed loop")
        elif isinstance(failure, WrongTime):
            blame(record, "wall clock", str(failure))
        elif isinstance(failure, Unsettled):
            record.end(Status.UNSETTLED, f"{failure}.")
        elif failure:
            log = self._court.log_of(entry.contender)
            record.end(Status.ERROR, f"While it was timed, {sentence(failure)}{log}")


def _claimed_ms(rounds: Rounds, name: str) -> float:
    """What a call takes by a contender's samples, or what the host needs for it where that is more."""
    samples = rounds.timings[name].samples
    return percentile([max(sample.ms, sample.host_us / 1e3) for sample in samples], 50)


def _host_bound(rounds: Rounds, name: str) -> bool:
    """Whether a call takes the host longer than the GPU, by a contender's samples."""
    return percentile([sample.host_us / 1e3 - sample.ms for sample in rounds.timings[name].samples], 50) > 0


def products_of(case: Case, contenders: Iterable[tuple[tuple[str, ...], bool]]) -> dict[Bare, str]:
    """Names under which bare products are timed, one for each set of products that contenders need.

    A contender is given by its gradients and whether it quantises: its bare products are in fp8 then.
    """
    wanted = dict.fromkeys((tuple(costs.products(case, gradients)), in_fp8) for gradients, in_fp8 in contenders)
    return {bare: f"bare products {number}" for number, bare in enumerate(wanted) if bare[0]}
