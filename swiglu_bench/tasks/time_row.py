"""What goes into a timed row: by the rounds rates, limits, ratios, verdict and the GPU's state; after them, on a GPU,
latency, CUDA graphs and energy; and if asked for, a trace and counters.
"""

import logging
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import BEFORE
from swiglu_bench.check.inputs import Draw, new_seed
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.system import Gpu, NoAnswer
from swiglu_bench.measure import profilers
from swiglu_bench.measure.resources import UNJOINED, joules_per_call
from swiglu_bench.measure.rounds import Rounds, Rule, run_rounds
from swiglu_bench.measure.statistics import Interval, percentile, verdict
from swiglu_bench.rows.record import GpuState, Record, Status
from swiglu_bench.tasks.case import Entry, blame
from swiglu_bench.worker.admission import NOT_JOINED
from swiglu_bench.worker.chains import WrongResult
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.one_call import program
from swiglu_bench.worker.policy import Settings, Tell
from swiglu_bench.worker.turns import RoundJudge, contender_of
from swiglu_bench.worker.worker import TimesReport

MOST_PERCENT = 110.0
"""Of its limit, that a right measurement can show: the limit is measured too."""
MOST_ROUNDS = 50
SHARE_OF_BUDGET = 0.25
"""What latency and graphs may each take, of the case's budget for its rounds."""
TRACED_CALLS = 3
REPLAYED_ALONE = "A backward alone is not recorded: replays would run on saved tensors that it has overwritten."
log = logging.getLogger(__name__)


class GpuWatch:
    """What the GPU did during the rounds."""

    def __init__(self, gpu: Gpu | None, note: str) -> None:
        self.gpu, self._nvml_note = gpu, note
        self.states: list[GpuState] = []
        self.others: set[int] | None = None

    def look_round(self) -> None:
        """See who else is on the GPU now."""
        if not self.gpu:
            return
        try:
            self.others = (self.others or set()) | set(self.gpu.other_processes())
        except NoAnswer as reason:
            self._nvml_note = f"Who else uses the GPU is not known: {reason}."

    def on_round(self) -> None:
        """Keep the state of the moment."""
        if self.gpu:
            self.states.append(self.gpu.state())

    def note(self, record: Record) -> None:
        """Enter the GPU's clocks, power, temperature and throttling during the rounds."""
        record.gpu_note, record.states = self._nvml_note, tuple(self.states)
        record.other_processes = None if self.others is None else len(self.others)
        clocks = [state.sm_mhz for state in self.states if state.sm_mhz is not None]
        powers = [state.power_w for state in self.states if state.power_w is not None]
        temperatures = [state.temperature_c for state in self.states if state.temperature_c is not None]
        throttles = [state.throttle for state in self.states if state.throttle is not None]
        if clocks:
            record.sm_mhz = percentile(clocks, 50)
            record.cycles = record.sm_mhz * 1e3 * record.time_ms if record.time_ms else None
        record.power_w = percentile(powers, 50) if powers else None
        record.temperature_c = temperatures[-1] if temperatures else None
        if throttles:
            record.throttle = " ".join(dict.fromkeys(" ".join(throttles).split()))
            record.throttled_share = sum(map(bool, throttles)) / len(throttles)


def note_time(record: Record, rounds: Rounds, settings: Settings, this: Machine) -> None:
    """Enter the samples of a row and how they were taken."""
    record.samples_ms = tuple(rounds.timings[record.implementation].ms)
    rounds.note(record.implementation, record)
    record.l2 = "cpu" if this.device_type == "cpu" else "cold" if settings.cold_l2 else "hot"
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
        measured = f"Measured {record.tflops:.0f} TFLOP/s and {record.gbps:.0f} GB/s"
        record.end(Status.ERROR, f"{measured}, above the datasheet's {rate:.0f} and {gbps:.0f}: the timing is wrong.")


def note_comparison(record: Record, rounds: Rounds, noise: Interval | None, aliases: Sequence[str]) -> None:
    """Enter the ratio to the baseline, and whether it is more than the `noise` between the baseline's processes."""
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
        record.cycles_ratio = _in_cycles(record, rounds, record.verdict, noise.noise)


def _in_cycles(record: Record, rounds: Rounds, said: str, noise: float, where: str = "") -> float | None:
    """The ratio to the baseline in cycles of the GPU's clock; where its verdict is another, the row says so."""
    ratio = rounds.ratio(record.implementation, record.baseline, in_cycles=True)
    if ratio is None:
        return None
    if (found := verdict(ratio, noise)) != said:
        there = f"there the ratio is {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), {found}"
        record.remark(f"Its verdict{where} is not confirmed in cycles of the GPU's clock: {there}.")
    return ratio.median


# After the rounds


def measure_beside(court: Court, case: Case, entries: Sequence[Entry], gpu: Gpu | None, tell: Tell) -> None:
    """Fill the columns of rows that are right so far, each in rounds of its own. A CPU has none of these figures."""
    if court.settings.device.type != "cuda" or not entries:
        return
    budget_s = court.settings.rule.budget_s * SHARE_OF_BUDGET
    rule = replace(court.settings.rule, max_rounds=MOST_ROUNDS, min_s=0.0, budget_s=budget_s)

    def names(name: str) -> Sequence[str]:
        (mine,) = (entry for entry in entries if entry.contender.name == name)
        return case.mode.results(mine.gradients)

    def taken(timed_by: str) -> Rounds:
        judge = RoundJudge(court, names, full_share=0.0)
        contenders = [contender_of(entry.contender, judge, led=case.mode, timed_by=timed_by) for entry in entries]
        return run_rounds(contenders, rule, seed=case.seed, on_round=lambda number: judge.judge())

    with court.held():
        for timed_by in ("latency", "hot") if court.settings.hot_beside else ("latency",):
            tell(timed_by, 0.9)
            rounds = taken(timed_by)
            for entry in entries:
                timing = rounds.timings[entry.contender.name]
                if timing.samples and not timing.failure:
                    setattr(entry.record, f"{timed_by}_us", percentile(timing.ms, 50) * 1e3)
                    if timed_by == "hot":
                        entry.record.hot_ratio, entry.record.hot_verdict = _beside(entry.record, rounds, "hot")
        tell("CUDA graphs", 0.93)
        _graphs(court, case, entries, RoundJudge(court, names, full_share=0.0), rule)
        if court.settings.energy and gpu and case.mode is not Mode.BACKWARD and case.accumulate == 1:
            tell("energy", 0.96)
            for entry in random.Random(case.seed).sample(list(entries), len(entries)):
                if entry.record.status is Status.OK:
                    _energy(entry, gpu)


def measure_new_tokens(court: Court, case: Case, entries: Sequence[Entry], tell: Tell) -> None:
    """Enter the longest of each contender's first calls with further token counts."""
    count = court.settings.new_tokens
    if not count:
        return
    fewest = max(1, case.tokens // 2)
    others = [tokens for tokens in range(fewest, 2 * case.tokens + 2 * count) if tokens != case.tokens]
    counts = random.Random(new_seed()).sample(others, count)
    for entry in entries:
        tell(f"{entry.record.implementation} with other token counts", 0.97)
        with court.held():
            try:
                entry.record.worst_new_ms = max(entry.contender.ask(TimesReport, "first_calls", counts).ms)
            except Exception as error:  # whatever a contender has against another number of tokens
                entry.record.remark(f"It was not called with {count} further token counts: {one_line(error)}.")


def _beside(record: Record, rounds: Rounds, kind: str) -> tuple[float | None, str]:
    """The ratio to the baseline and its verdict, by the A/A noise of the case; (None, "") where there is none."""
    compared = record.comparable and record.implementation != record.baseline and record.baseline in rounds.timings
    ratio = rounds.ratio(record.implementation, record.baseline) if compared else None
    if ratio is None:
        return None, ""
    if record.aa_ratio is None or record.aa_low is None or record.aa_high is None:
        return ratio.median, ""
    noise = Interval(record.aa_ratio, record.aa_low, record.aa_high).noise
    found = verdict(ratio, noise)
    _in_cycles(record, rounds, found, noise, f" of {kind}_ratio")
    return ratio.median, found


def _graphs(court: Court, case: Case, entries: Sequence[Entry], judge: RoundJudge, rule: Rule) -> None:
    by_name = {entry.contender.name: entry.record for entry in entries}
    contenders = []
    for entry in entries:
        record = entry.record
        if case.mode is Mode.BACKWARD or case.accumulate > 1:
            record.graph_reason = REPLAYED_ALONE if case.accumulate == 1 else "Several micro-batches are not recorded."
            continue
        try:
            record.graph_reason = entry.contender.tell("record", case.mode)
        except Exception as error:  # its process may have ended over it
            record.graph_reason = f"It cannot be recorded: {one_line(error)}."
        if record.graph_reason == UNJOINED:
            entry.contender.end()  # it is of no use after that
            blame(record, *NOT_JOINED)
        elif not record.graph_reason:
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
            by_name[name].graph_ratio, by_name[name].graph_verdict = _beside(by_name[name], rounds, "graph")
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
    parts = (record.shape, record.scope, record.mode, record.dtype, record.tokens, record.implementation)
    name = re.sub(r"[^\w.-]+", "-", "-".join(map(str, parts)))
    file = folder / "traces" / f"{name}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        entry.contender.tell("trace", [Draw(new_seed()) for _ in range(TRACED_CALLS)], str(file.absolute()))
        record.trace = file.relative_to(folder).as_posix()
    except Exception as error:  # whatever the contender, the profiler or the disk has against it
        log.info("the trace of %s:", record.implementation, exc_info=error)
        record.profile_note = f"There is no trace: {one_line(error)}."


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
