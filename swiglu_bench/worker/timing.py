"""The time of one case: rounds, batches by the parent's clock, and the rows that come of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.costs import Product
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import BEFORE
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.nvml import Gpu, NoAnswer
from swiglu_bench.machine.system import LoadWatch
from swiglu_bench.measure import rounds as interleaved
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds, run_rounds
from swiglu_bench.measure.statistics import Interval, noise_interval, percentile, verdict
from swiglu_bench.rows.record import GpuState, Record, Status
from swiglu_bench.worker.admission import failure as failed_check
from swiglu_bench.worker.batches import Batches, Unsettled, WrongTime
from swiglu_bench.worker.places import Contender, Place
from swiglu_bench.worker.round_judge import RoundJudge, WrongResult, contender_of
from swiglu_bench.worker.settings import Settings, Tell
from swiglu_bench.worker.slowing import Turn
from swiglu_bench.worker.turns import Turns

Bare = tuple[tuple[Product, ...], bool]
"""Bare products, and whether they are in fp8."""
MOST_PERCENT = 110.0
"""Of its limit, that a right measurement can show: the limit is measured too."""
MOST_BURNT = 0.1
"""Share of the time in which a contender may use a CPU while it has to stand still."""


@dataclass
class Entry:
    """A contender of the case that was admitted."""

    contender: Contender
    record: Record
    gradients: tuple[str, ...]


class GpuWatch:
    """What the GPU did during the rounds."""

    def __init__(self, gpu: Gpu | None, note: str) -> None:
        self.gpu, self.note = gpu, note
        self.states: list[GpuState] = []
        self.others: set[int] | None = None

    def look_round(self) -> None:
        """See who else is on the GPU now."""
        if not self.gpu:
            return
        try:
            self.others = (self.others or set()) | set(self.gpu.other_processes())
        except NoAnswer as reason:
            self.note = f"Who else uses the GPU is not known: {reason}."

    def on_round(self) -> None:
        """Keep the state of the moment."""
        if self.gpu:
            self.states.append(self.gpu.state())


class CaseTimer:
    """Times the admitted contenders of one case and fills their rows."""

    def __init__(self, place: Place, case: Case, ceilings: Ceilings, gpu: Gpu | None, gpu_note: str) -> None:
        self._place, self._case, self._ceilings = place, case, ceilings
        self._settings, self._machine = place.settings, place.machine
        self.watch = GpuWatch(gpu, gpu_note)
        self.turns: list[Turn] = []
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
        with self._place.held():
            rounds, wrong = self._play(
                [*(entry.contender for entry in entries), *twins], limits, grouped, names, baseline, tell
            )
            for name, entry in by_name.items():
                self._close(entry, rounds.timings[name].failure or wrong.get(name))
            self._check_turns(entries, twins, rounds)
            self._check_batches(entries, rounds, names, tell)
            burnt = self._place.burners()
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
                _note_comparison(record, rounds, noise, aliases)
                _note_gpu(record, self.watch)
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
        judge, rule = RoundJudge(self._place, names), self._settings.rule
        timed = [self._in_turn(contender_of(one, judge, led=self._case.mode)) for one in contenders]
        timed += [interleaved.TimedCall(name, partial(self._take_products, *p)) for p, name in limits.items()]
        timed += [interleaved.TimedCall(name, partial(self._take_grouped, g)) for g, name in grouped.items()]

        def on_round(number: int) -> dict[str, Exception]:
            if number >= 0:
                self.watch.on_round()
                tell(f"timing, round {number + 1}", 0.9 * min(1.0, number / rule.min_rounds))
            return judge.judge()

        rounds = run_rounds(timed, rule, baseline=baseline or None, seed=self._case.seed, on_round=on_round)
        return rounds, judge.judge_last()

    def _check_turns(self, entries: Sequence[Entry], twins: Sequence[Contender], rounds: Rounds) -> None:
        """Hold what their turns took against those of the baseline's processes."""
        sound = {entry.contender.name: entry for entry in entries if entry.record.status is Status.OK}
        base = sound.get(self._settings.baseline_of(self._case)) if twins else None
        if base:
            equals = [base.contender, *(twin for twin in twins if not rounds.timings[twin.name].failure)]
            others = [entry.contender for entry in sound.values() if entry is not base]
            turns = Turns(self._place, self._case.mode, equals, others)
            for name, failure in turns.disagreements(rounds).items():
                self._close(sound[name], failure)

    def _check_batches(
        self, entries: Sequence[Entry], rounds: Rounds, names: Callable[[str], Sequence[str]], tell: Tell
    ) -> None:
        """Hold the samples against the parent's clock."""
        tell("timing batches", 0.88)
        sound = {entry.contender.name: entry for entry in entries if entry.record.status is Status.OK}
        claimed_ms = {name: _claimed_ms(rounds, name) for name in sound}
        batches = Batches(self._place, self._case, {name: entry.contender for name, entry in sound.items()}, names)
        host_bound = (
            [name for name in sound if _host_bound(rounds, name)] if self._settings.device.type == "cuda" else []
        )
        baseline = self._settings.baseline_of(self._case)
        for name, failure in batches.disagreements(claimed_ms, baseline, host_bound).items():
            self._close(sound[name], failure)

    def _in_turn(self, contender: interleaved.TimedCall) -> interleaved.TimedCall:
        def take(number: int, lead_us: float) -> Sample:
            sample = contender.take(number, lead_us)
            if number >= 0:
                self.turns.append(Turn(contender.name, self.turns[-1].name if self.turns else "", sample.ms))
            return sample

        return interleaved.TimedCall(contender.name, take)

    def _grouped_of(self, gradients: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
        """For each set of gradients a name to time the bare products of experts under, where torch has them."""
        if not self._case.shape.experts:
            return {}
        wanted = [one for one in dict.fromkeys(gradients) if not self._place.judge.lay_out_grouped(one)]
        return {one: f"grouped products {number}" for number, one in enumerate(wanted)}

    def _take_grouped(self, gradients: tuple[str, ...], number: int, lead_us: float) -> Sample:
        return self._place.judge.sample_grouped(gradients, lead_us)

    def _take_products(self, products: tuple[Product, ...], in_fp8: bool, number: int, lead_us: float) -> Sample:
        return self._place.judge.sample_products(products, in_fp8, lead_us)

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
            log = self._place.log_of(entry.contender)
            record.end(Status.ERROR, f"While it was timed, {sentence(failure)}{log}")


def _claimed_ms(rounds: Rounds, name: str) -> float:
    """What a call takes by a contender's samples, or what the host needs for it where that is more."""
    samples = rounds.timings[name].samples
    return percentile([max(sample.ms, sample.host_us / 1e3) for sample in samples], 50)


def _host_bound(rounds: Rounds, name: str) -> bool:
    """Whether a call takes the host longer than the GPU, by a contender's samples."""
    return percentile([sample.host_us / 1e3 - sample.ms for sample in rounds.timings[name].samples], 50) > 0


def blame(record: Record, check: str, reason: str) -> None:
    """Make a row incorrect over a check that belongs to no tensor."""
    record.tensor_checks = (*record.tensor_checks, failed_check(check, reason))
    record.end(Status.INCORRECT, f"conduct: {reason}.")


def sentence(failure: BaseException) -> str:
    """What happened, as the reason of a row."""
    own = type(failure).__module__.startswith("swiglu_bench.") and str(failure)
    return f"{failure}." if own else f"{one_line(failure)}."


def products_of(case: Case, contenders: Iterable[tuple[tuple[str, ...], bool]]) -> dict[Bare, str]:
    """For each set of bare products that contenders need, a name to time them under.

    A contender is given by its gradients and whether it quantises: its bare products are in fp8 then.
    """
    wanted = dict.fromkeys((tuple(costs.products(case, gradients)), in_fp8) for gradients, in_fp8 in contenders)
    return {bare: f"bare products {number}" for number, bare in enumerate(wanted) if bare[0]}


def note_time(record: Record, rounds: Rounds, settings: Settings, cache: str) -> None:
    """Enter the samples of a row and how they were taken."""
    record.samples_ms = tuple(rounds.timings[record.implementation].ms)
    rounds.note(record.implementation, record)
    record.l2 = cache or ("cold" if settings.cold_l2 else "hot")
    record.regime = "rested" if settings.rule.rest_s else "steady"


def note_work(
    record: Record, case: Case, gradients: tuple[str, ...], ceilings: Ceilings, products_ms: list[float], this: Machine
) -> None:
    """Enter rates, and how far the time is from the machine's limit."""
    assert record.time_ms is not None
    record.copy_gbps, record.matmul_tflops = ceilings.copy_gbps, ceilings.matmul_tflops
    record.ceilings_at = ceilings.measured_at
    if this.datasheet:
        rate = this.datasheet.rate(case.dtype) * (2 if record.precision else 1)  # of fp8, where a GPU has it
        record.datasheet_gbps, record.datasheet_tflops = this.datasheet.gbps, rate
    record.flops = costs.flops(case, gradients)
    weight_bytes = 1 if record.weights_quantised == BEFORE else case.dtype.bytes
    record.min_bytes = costs.min_bytes(case, gradients, record.idle_experts, weight_bytes)
    record.tflops = record.flops / record.time_ms / 1e9
    record.gbps = record.min_bytes / record.time_ms / 1e6
    limits = {"matmul": percentile(products_ms, 50)} if products_ms else {}
    if record.l2 == "cold" or record.min_bytes > (this.cache_bytes or 0):  # else it need not leave the cache
        limits["bandwidth"] = record.min_bytes / ceilings.copy_gbps / 1e6
    if limits:
        record.limit_ms, record.limit_kind = max((ms, kind) for kind, ms in limits.items())
        record.limit_pct = 100 * record.limit_ms / record.time_ms
    if ceilings.unsure:
        record.remark(ceilings.unsure)
    if record.limit_pct and record.limit_pct > MOST_PERCENT:
        record.remark(f"Its limit is not shown: it would be {record.limit_pct:.0f}%, a measuring error.")
        record.limit_ms = record.limit_pct = None
        record.limit_kind = ""
    _reject_impossible(record, this)


def _reject_impossible(record: Record, this: Machine) -> None:
    """A figure above the vendor's limit is a measuring error, not a result."""
    rate, gbps = record.datasheet_tflops, record.datasheet_gbps
    if not rate or not gbps or not record.tflops or not record.gbps or not record.time_ms or not record.min_bytes:
        return
    beyond_l2 = max(0, record.min_bytes - (this.cache_bytes or 0))  # what was written last may still be in L2
    too_many_bytes = beyond_l2 / record.time_ms / 1e6 > gbps and record.l2 == "cold"
    if record.tflops > rate or too_many_bytes:
        reason = (
            f"Measured {record.tflops:.0f} TFLOP/s and {record.gbps:.0f} GB/s, above the datasheet's "
            f"{rate:.0f} and {gbps:.0f}: the timing is wrong."
        )
        record.time_ms = record.time_p10_ms = record.time_p90_ms = record.host_us = record.cycles = None
        record.ratio = record.ratio_low = record.ratio_high = None
        record.tflops = record.gbps = record.limit_pct = None
        record.verdict, record.samples_ms, record.twin_ms, record.states = "", (), (), ()
        record.end(Status.ERROR, reason)


def _note_comparison(record: Record, rounds: Rounds, noise: Interval | None, aliases: Sequence[str]) -> None:
    if noise:
        record.aa_ratio, record.aa_low, record.aa_high = noise.median, noise.low, noise.high
    if not record.baseline or not record.comparable:
        return
    ratio = rounds.ratio(record.implementation, record.baseline)
    if ratio:
        record.ratio, record.ratio_low, record.ratio_high = ratio.median, ratio.low, ratio.high
    if record.implementation == record.baseline and aliases:
        record.twin_ms = tuple(rounds.timings[aliases[0]].ms)
    elif ratio and noise:
        record.verdict = verdict(ratio, noise.noise)


def _note_gpu(record: Record, watch: GpuWatch) -> None:
    record.gpu_note = watch.note
    record.other_processes = None if watch.others is None else len(watch.others)
    record.states = tuple(watch.states)
    clocks = [state.sm_mhz for state in watch.states if state.sm_mhz is not None]
    powers = [state.power_w for state in watch.states if state.power_w is not None]
    temperatures = [state.temperature_c for state in watch.states if state.temperature_c is not None]
    throttles = [state.throttle for state in watch.states if state.throttle is not None]
    if clocks:
        record.sm_mhz = percentile(clocks, 50)
        record.cycles = record.sm_mhz * 1e3 * record.time_ms if record.time_ms else None
    record.power_w = percentile(powers, 50) if powers else None
    record.temperature_c = temperatures[-1] if temperatures else None
    if throttles:
        record.throttle = " ".join(dict.fromkeys(" ".join(throttles).split()))
        record.throttled_share = sum(map(bool, throttles)) / len(throttles)
