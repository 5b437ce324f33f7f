"""The task `time`: contenders timed in interleaved rounds, their samples held against the parent's clock."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine.ceilings_cache import contradicted
from swiglu_bench.machine.system import Gpu, LoadWatch, NoAnswer
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds, TimedCall, run_rounds
from swiglu_bench.measure.statistics import Interval, noise_interval, percentile
from swiglu_bench.rows.record import Load, Record, Status
from swiglu_bench.tasks import time_row
from swiglu_bench.tasks.case import TWINS, CaseRun, Entry, blame, sentence
from swiglu_bench.worker import policy, turns
from swiglu_bench.worker.chains import Chains, Unsettled, WrongResult, WrongTime
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import Court, name_of

MOST_BURNT = 0.1
"""Share of the time in which a contender may use a CPU while it has to stand still."""
MOST_IDLE = 0.15
"""Share of a CPU that a contender's process may use while it has nothing to do. One that spins may get no more."""
log = logging.getLogger(__name__)


def time(court: Court, case: Case, implementations: Sequence[Implementation]) -> Iterator[Record]:
    """Each implementation checked and timed."""
    return _TimedCase(court, case).rows(implementations)


class _TimedCase(CaseRun):
    def __init__(self, court: Court, case: Case) -> None:
        super().__init__(court, case)
        self._alone_ms: list[float] = []
        self._base_ms: list[float] = []

    def too_long(self, contenders: int) -> str | None:
        dtype, known = self.case.dtype.value, self.court.kept.ceilings
        if dtype not in known:
            known[dtype] = self.court.judge.ceilings(dtype)
        self._ceilings = known[dtype]
        return policy.too_long(self.court.settings, self.case, contenders, self._ceilings)

    def measure(self, able: Sequence[Entry]) -> Iterator[Record]:
        together = len(able) + len(TWINS) <= self.seats
        entries: list[Entry] = []
        for entry, admitted in self.admitted(able, together):
            if not admitted:
                yield entry.record
                continue
            on_gpu = self.court.settings.device.type == "cuda"  # on a CPU, processes that stand still slow nobody
            if together and on_gpu and entry.record.implementation == self.baseline:
                with suppress(Exception):
                    self._alone_ms = turns.alone_ms(entry.contender)
            entries.append(entry)
        if entries:
            at_once = len(entries) if together else max(1, self.seats - len(TWINS) - 1)
            yield from self._time(entries, at_once)

    def works_idle(self, contender: Contender) -> str:
        """Once a run: whether its process rests when it has nothing to do, as it must in a user's own process."""
        rests = self.court.kept.rests
        share = 0.0 if contender.name in rests else self.court.idle_share(contender)
        if share > MOST_IDLE:
            return f"its process uses {share:.0%} of a CPU while it has nothing to do"
        rests.add(contender.name)
        return ""

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
        watch = time_row.GpuWatch(*self._nvml())
        played = self._fill_rows(members, twins, watch)
        for entry in members:
            self._check_again(entry)
        culprit, certain = self._slows_others(base, members, played) if base else (None, False)
        kept = {Status.OK, Status.UNSETTLED} if culprit else {Status.OK}  # without it, others may be settled
        sound = [entry for entry in members if entry.record.status in kept and entry is not culprit]
        sound = [entry for entry in sound if self._ready(entry)]
        if culprit and base:
            reason = f"beside it, {base.record.implementation} is slower"
            if certain:
                blame(culprit.record, "slows others", reason)
            else:
                once = f"{reason[0].upper()}{reason[1:]} in only one of two attempts, which is not enough to judge it."
                culprit.record.end(Status.UNSETTLED, once)
            for entry in sound:
                entry.record.end(Status.OK, "")
            self._time_together(sound, base if base in sound else None)
            return
        time_row.measure_beside(self.court, self.case, sound, watch.gpu, self._tell_timing)
        time_row.measure_new_tokens(self.court, self.case, sound, self._tell_timing)
        time_row.profile(self.court, self.case, sound, self._tell_timing)

    def _tell_timing(self, doing: str, share: float) -> None:
        self.court.tell(doing, 0.5 + 0.5 * share)

    def _slows_others(
        self, base: Entry, members: Sequence[Entry], played: Sequence[turns.Turn]
    ) -> tuple[Entry | None, bool]:
        """The contender that makes the baseline slower than it was alone, or those slower that come next; or None.

        Also whether a second attempt says so too: other programs come and go.
        """
        others = {entry.contender.name: entry for entry in members if entry is not base}
        equals = {name_of(base.contender.implementation, alias) for alias in ("", *TWINS)}
        for name in turns.slow_the_next(played, equals):
            if name in others and self._ready(base) and self._ready(others[name]):
                with suppress(Exception):
                    pair = base.contender, others[name].contender
                    if turns.slows_the_next(*pair):
                        return others[name], turns.slows_the_next(*pair)
        times = self._base_ms
        if not self._alone_ms or not times or not turns.slower(times, self._alone_ms):
            return None, False

        def revive(contender: Contender) -> Contender | None:
            entry = others[contender.name]
            return entry.contender if self._ready(entry) else None

        contenders = [entry.contender for entry in others.values()]
        found = turns.find_culprit(base.contender, contenders, revive, self._alone_ms)
        if not found or not self._ready(others[found.name]):
            return others[found.name] if found else None, False
        again = turns.find_culprit(base.contender, [others[found.name].contender], revive, self._alone_ms)
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
                    second = f"no second process of {base.record.implementation}, which would measure the noise"
                    base.record.remark(f"There are no ratios, because {second}, could be built: {sentence(error)}.")
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
        if entry.record.status in {Status.OK, Status.UNSETTLED}:
            try:
                failed = self.admitting.check_again(entry.contender, entry.gradients)
            except Exception as error:
                entry.record.end(Status.ERROR, f"{sentence(error)}{self.court.log_of(entry.contender)}")
            else:
                self.admitting.note_use(entry.record, entry.contender)
                for check in failed:
                    blame(entry.record, check.check, f"{check.reason} (after it was timed)")

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

    def _fill_rows(
        self, entries: Sequence[Entry], twins: Sequence[Contender], watch: time_row.GpuWatch
    ) -> Sequence[turns.Turn]:
        """Play the rounds and fill every entry's row: all samples in order; `twins` are more of the baseline."""
        case, by_name = self.case, {entry.contender.name: entry for entry in entries}
        baseline = self.baseline if twins else ""
        gradients = {name: entry.gradients for name, entry in by_name.items()}
        gradients |= {twin.name: gradients[baseline] for twin in twins}
        bare = self._bare(entries)

        def names(name: str) -> Sequence[str]:
            return case.mode.results(gradients[name])

        judge = turns.RoundJudge(self.court, names)
        watch.look_round()
        load = LoadWatch()
        with self.court.held():
            contenders = [*(entry.contender for entry in entries), *twins]
            timed = [turns.contender_of(each, judge, led=case.mode) for each in contenders]
            everyone = [*timed, *bare.values()]
            rounds = self._play(everyone, judge, baseline, watch)
            wrong = judge.judge_last()
            for name, entry in by_name.items():
                self._close(entry, rounds.timings[name].failure or wrong.get(name))
            self._check_turns(entries, twins, rounds, partial(self._play, everyone, judge, "", watch), watch)
            aliases = [twin.name for twin in twins if not rounds.timings[twin.name].failure]
            noise = noise_interval([rounds.ratio(name, baseline) for name in aliases]) if baseline else None
            self._check_chains(entries, [twin for twin in twins if twin.name in aliases], rounds, names, noise)
            burnt = self.court.burners()
        watch.look_round()
        found = load.load()
        for name, share in burnt.items():
            if name in by_name and share > MOST_BURNT and by_name[name].record.status is Status.OK:
                reason = f"it used a CPU for {share:.0%} of the time in which others were timed"
                blame(by_name[name].record, "slows others", reason)
        if baseline and by_name[baseline].record.status is not Status.OK:
            baseline = ""  # the time of a wrong answer is nothing to compare with
            aliases, noise = [], None

        def ms_of(work: object) -> list[float]:
            return [case.accumulate * ms for ms in rounds.timings[bare[work].name].ms] if work in bare else []

        self._check_ceilings({work: ms_of(work) for work in bare}, found)
        self._base_ms = rounds.timings[self.baseline].ms if self.baseline in by_name else []
        for entry in entries:
            record = entry.record
            if record.status is Status.UNSETTLED:
                record.unconfirmed_ms = percentile(rounds.timings[entry.contender.name].ms, 50)
                record.reason += " Another process used the GPU." if watch.others else ""
            if baseline:
                record.baseline = baseline
                record.comparable = case.mode is Mode.FORWARD or entry.gradients == by_name[baseline].gradients
            if record.status is Status.OK:
                time_row.note_time(record, rounds, self.court.settings, self.court.machine)
                time_row.note_comparison(record, rounds, noise, aliases)
                watch.note(record)
                if found:
                    record.cpus, record.other_cpus, record.steal = found.cpus, found.others, found.steal
                products_ms = ms_of((tuple(costs.products(case, entry.gradients)), bool(record.precision)))
                time_row.note_work(record, case, entry.gradients, self._ceilings, products_ms, self.court.machine)
                grouped_ms = [] if record.precision else ms_of(entry.gradients)
                record.grouped_ms = percentile(grouped_ms, 50) if grouped_ms else None
        return judge.turns

    def _check_ceilings(self, samples_ms: Mapping[Any, Sequence[float]], load: Load | None) -> None:
        """Once a run, measure the machine's rates again where bare products contradict those that were kept."""
        dtype, kept, device = self.case.dtype.value, self.court.kept, self.court.settings.device.type
        busy = bool(load and load.reason(device))
        unquantised = {work: ms for work, ms in samples_ms.items() if work[1:] == (False,) and ms}
        products_ms = {work[0]: percentile(ms, 50) for work, ms in unquantised.items()}
        if dtype in kept.measured_again or not self.court.settings.cold_l2:
            return
        if contradicted(self._ceilings, products_ms, self.case.dtype.bytes, device, busy):
            log.info("the bare products contradict the kept rates of this machine; these are measured again")
            kept.measured_again.add(dtype)
            self._ceilings = kept.ceilings[dtype] = self.court.judge.ceilings(dtype, True)

    def _bare(self, entries: Sequence[Entry]) -> dict[object, TimedCall]:
        """The judge's own calls: products that contenders need, by themselves; those of experts also as torch has them.

        By the products and whether these are in fp8, and by the gradients of experts.
        """
        judge, found = self.court.judge, dict[object, TimedCall]()

        def add(work: object, name: str, take: Callable[[float], Sample]) -> None:
            found[work] = TimedCall(f"{name} {len(found)}", lambda number, lead_us: take(lead_us))

        for gradients, in_fp8 in dict.fromkeys((entry.gradients, bool(entry.record.precision)) for entry in entries):
            products = tuple(costs.products(self.case, gradients))
            if products and (products, in_fp8) not in found:
                add((products, in_fp8), "bare products", partial(judge.sample_products, products, in_fp8))
            if self.case.shape.experts and gradients not in found and not judge.lay_out_grouped(gradients):
                add(gradients, "grouped products", partial(judge.sample_grouped, gradients))
        return found

    def _play(
        self, timed: Sequence[TimedCall], judge: turns.RoundJudge, baseline: str, watch: time_row.GpuWatch,
        before: Rounds | None = None,
    ) -> Rounds:  # fmt: skip
        """The rounds; with those `before`, as many again, which no contender can tell from more of the same."""
        rule = self.court.settings.rule
        if before:
            rule = before.as_many(rule)
            timed = [each for each in timed if not before.timings[each.name].failure]

        def on_round(number: int) -> dict[str, Exception]:
            if number >= 0:
                if not before:  # a state for each sample that is kept
                    watch.on_round()
                self._tell_timing(f"timing, round {number + 1}", 0.9 * min(1.0, number / rule.min_rounds))
            return judge.judge()

        seen = run_rounds(timed, rule, baseline=baseline or None, seed=self.case.seed + bool(before), on_round=on_round)
        watch.look_round()
        return seen

    def _check_turns(
        self, entries: Sequence[Entry], twins: Sequence[Contender], rounds: Rounds, again: Callable[[Rounds], Rounds],
        watch: time_row.GpuWatch,
    ) -> None:  # fmt: skip
        """Hold what their turns took against those of the baseline's processes; `again` plays as many rounds."""
        sound = {entry.contender.name: entry for entry in entries if entry.record.status is Status.OK}
        if twins and (base := sound.get(self.baseline)):
            equals = [base.contender, *(twin for twin in twins if not rounds.timings[twin.name].failure)]
            others = [entry.contender for entry in sound.values() if entry is not base]
            held = turns.Turns(self.court.settings.device.type, equals, others, again, lambda: watch.others != set())
            for name, failure in held.disagreements(rounds).items():
                self._close(sound[name], failure)

    def _check_chains(
        self, entries: Sequence[Entry], twins: Sequence[Contender], rounds: Rounds,
        names: Callable[[str], Sequence[str]], noise: Interval | None,
    ) -> None:  # fmt: skip
        self._tell_timing("timing chains", 0.88)
        sound = {entry.contender.name: entry for entry in entries if entry.record.status is Status.OK}
        contenders = {name: entry.contender for name, entry in sound.items()}
        equals = {twin.name: twin for twin in twins} if self.baseline in sound else {}
        chains = Chains(self.court, self.case, contenders | equals, names, equals)
        samples = {name: rounds.timings[name].samples for name in (*sound, *equals)}
        batches = self.case.accumulate  # of which a call in a chain is one
        gpu_ms = {name: percentile([each.ms / batches for each in own], 50) for name, own in samples.items()}
        host_ms = {n: percentile([each.host_us / 1e3 / batches for each in own], 50) for n, own in samples.items()}
        apart = max(noise.high, 1 / noise.low if noise.low else math.inf) if noise else 1.0
        on_gpu = self.court.settings.device.type == "cuda"
        found = chains.disagreements(gpu_ms, self.baseline, host_ms if on_gpu else None, apart)
        for name, failure in found.items():
            self._close(sound[name], failure)

    def _close(self, entry: Entry, failure: BaseException | None) -> None:
        record = entry.record
        if isinstance(failure, WrongResult):
            blame(record, "timed loop", f"{failure} in the timed loop")
        elif isinstance(failure, WrongTime):
            blame(record, "wall clock", str(failure))
        elif isinstance(failure, Unsettled):
            record.end(Status.UNSETTLED, f"{failure}.")
        elif failure:
            log = self.court.log_of(entry.contender)
            record.end(Status.ERROR, f"While it was timed, {sentence(failure)}{log}")
