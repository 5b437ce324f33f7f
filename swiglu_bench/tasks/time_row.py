"""What the rounds say of a contender, entered in its row: rates, limits, ratios, verdict, and the GPU's state."""

from __future__ import annotations

from collections.abc import Sequence

from swiglu_bench.cases import costs
from swiglu_bench.cases.cases import Case
from swiglu_bench.cases.implementation import BEFORE
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.nvml import Gpu, NoAnswer
from swiglu_bench.measure.rounds import Rounds
from swiglu_bench.measure.statistics import Interval, percentile, verdict
from swiglu_bench.rows.record import GpuState, Record, Status
from swiglu_bench.worker.policy import Settings

MOST_PERCENT = 110.0
"""Of its limit, that a right measurement can show: the limit is measured too."""


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
        record.end(Status.ERROR, reason)


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


def note_gpu(record: Record, watch: GpuWatch) -> None:
    """Enter the GPU's clocks, power, temperature and throttling during the rounds."""
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
