"""The rounds of one case: all contenders interleaved, the baseline's twin and the bare products among them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.check.judge import Judge
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.machine.nvml import Gpu, NoAnswer
from swiglu_bench.measure.ceilings import bare_products
from swiglu_bench.measure.clock import Clock
from swiglu_bench.measure.replaced import put_back
from swiglu_bench.measure.rounds import Contender, Rounds, run_rounds
from swiglu_bench.measure.statistics import Interval, percentile, verdict
from swiglu_bench.rows.record import GpuState, Record, Status
from swiglu_bench.session.latency_graph_energy import Asides
from swiglu_bench.session.settings import TWIN, Admitted, Settings, Tell
from swiglu_bench.spec import costs
from swiglu_bench.spec.cases import VARIANTS, Case, Mode
from swiglu_bench.spec.errors import one_line
from swiglu_bench.spec.problem import Problem

if TYPE_CHECKING:
    from swiglu_bench.machine.machine import Machine
    from swiglu_bench.session.settings import Settings

log = logging.getLogger(__name__)


@dataclass
class _Watch:
    """What the GPU did during the rounds."""

    gpu: Gpu | None
    note: str
    states: list[GpuState] = field(default_factory=list)
    others: set[int] | None = None

    def look_round(self) -> None:
        """Who else is on the GPU now."""
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


class Timer:
    """Times the contenders of a case and fills their rows; `mark` is as a session has it."""

    def __init__(self, settings: Settings, machine: Machine, clock: Clock, mark: Callable[[str], None]) -> None:
        self.settings = settings
        self.machine = machine
        self.clock = clock
        self.mark = mark
        self.gpu: Gpu | None = None
        self.gpu_note = ""
        if settings.device.type == "cuda":
            try:
                self.gpu = Gpu(settings.device)
            except NoAnswer as reason:
                self.gpu_note = f"{reason}."

    def time(
        self, problem: Problem, entries: Sequence[Admitted], judges: Sequence[Judge], ceilings: Ceilings, tell: Tell
    ) -> Iterator[Record]:
        """Play the rounds, then what is measured aside, and yield every entry's row.

        Raises DeviceLost where a contender breaks the device.
        """
        case, rule = problem.case, self.settings.rule
        by_name = {entry.record.implementation: entry for entry in entries}
        baseline = self.settings.baseline if self.settings.baseline in by_name else None
        contenders = [Contender(name, partial(_prepare, entry.built, case.mode)) for name, entry in by_name.items()]
        if baseline:
            contenders.append(Contender(TWIN, partial(_prepare, by_name[baseline].built, case.mode)))
        limits = _limits(problem, entries)
        contenders += [Contender(name, partial(_same_call, make)) for name, make in limits.values()]
        whose = {name: name for name in by_name} | ({TWIN: baseline} if baseline else {})
        watch = _Watch(self.gpu, self.gpu_note)

        def inspect(name: str, number: int, result: Callable[[], Produced]) -> None:
            if name in by_name and by_name[name].record.status is Status.OK:
                found = judges[number % VARIANTS].judge(result())
                checks = tuple(one if one.ok else dataclasses.replace(one, check="timed loop") for one in found)
                by_name[name].record.note_checks(checks, when=" in the timed loop")

        def on_round(number: int) -> None:
            watch.on_round()
            tell(f"timing, round {number}", 0.5 + 0.4 * min(1.0, number / rule.min_rounds))

        watch.look_round()
        rounds = run_rounds(
            contenders,
            self.clock,
            rule,
            baseline=baseline,
            seed=case.seed,
            before_inspection=lambda number: judges[number % VARIANTS].poison(),
            inspect=inspect,
            inspected_rounds=VARIANTS,  # each variant once: a remembered answer is right for one of them
            on_round=on_round,
            on_turn=lambda name: self.mark(whose.get(name, "")),
        )
        self.mark("")
        watch.look_round()
        replaced = put_back()
        if replaced:  # whoever did it: no time of this case is one
            reason = f"While the case was timed, somebody replaced {', '.join(replaced)}."
            yield from (entry.record.end(Status.ERROR, reason) for entry in entries)
            return
        for entry in entries:
            failure = rounds.timings[entry.record.implementation].failure
            if failure:
                log.info("%s, in the timed loop:", entry.record.implementation, exc_info=failure)
                entry.record.end(Status.ERROR, f"In the timed loop: {one_line(failure)}")
        if baseline and by_name[baseline].record.status is not Status.OK:
            baseline = None  # the time of a wrong answer is no judge
        twin = rounds.ratio(TWIN, baseline) if baseline else None
        for entry in entries:
            record, gradients = entry.record, entry.built.gradients
            if baseline:
                record.baseline = baseline
                record.comparable = case.mode is Mode.FORWARD or gradients == by_name[baseline].built.gradients
            if record.status is Status.OK:
                self._note_time(record, rounds)
                _note_comparison(record, rounds, twin)
                _note_gpu(record, watch)
                limit = limits.get(tuple(costs.products(case, gradients)))
                products_ms = rounds.timings[limit[0]].ms if limit else []
                self._note_work(record, case, gradients, ceilings, products_ms)
        sound = [entry for entry in entries if entry.record.status is Status.OK]
        Asides(self.settings, self.clock, self.gpu, self.mark).measure(problem, sound, judges, tell)
        for entry in entries:
            yield entry.record

    def _note_time(self, record: Record, rounds: Rounds) -> None:
        record.samples_ms = tuple(rounds.timings[record.implementation].ms)
        rounds.note(record.implementation, record)
        record.l2, record.regime = self.clock.cache, "rested" if self.settings.rule.rest_s else "steady"

    def _note_work(
        self, record: Record, case: Case, gradients: tuple[str, ...], ceilings: Ceilings, products_ms: list[float]
    ) -> None:
        assert record.time_ms is not None
        record.copy_gbps, record.matmul_tflops = ceilings.copy_gbps, ceilings.matmul_tflops
        record.ceilings_at = ceilings.measured_at
        sheet = self.machine.datasheet
        if sheet:
            record.datasheet_gbps, record.datasheet_tflops = sheet.gbps, sheet.rate(case.dtype)
        record.flops, record.min_bytes = costs.flops(case, gradients), costs.min_bytes(case, gradients)
        record.tflops = record.flops / record.time_ms / 1e9
        record.gbps = record.min_bytes / record.time_ms / 1e6
        copy_ms = record.min_bytes / ceilings.copy_gbps / 1e6
        bound_by_products = record.flops / ceilings.matmul_tflops / 1e9 > copy_ms
        if products_ms and bound_by_products:
            record.limit_kind, record.limit_ms = "matmul", max(copy_ms, percentile(products_ms, 50))
        else:
            record.limit_kind, record.limit_ms = "bandwidth", copy_ms
        record.limit_pct = 100 * record.limit_ms / record.time_ms
        self._reject_impossible(record)

    def _reject_impossible(self, record: Record) -> None:
        """A figure above the vendor's limit is a measuring error, not a result."""
        rate, gbps = record.datasheet_tflops, record.datasheet_gbps
        if not rate or not gbps or not record.tflops or not record.gbps or not record.time_ms or not record.min_bytes:
            return
        beyond_l2 = max(0, record.min_bytes - (self.machine.l2_bytes or 0))  # what was written last may still be in L2
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


def _prepare(built: Built, mode: Mode, number: int) -> Callable[[], Callable[[], Produced]]:
    return built.prepare(mode, number % VARIANTS)


Products = tuple[costs.Product, ...]
Make = Callable[[], Callable[[], object]]


def _limits(problem: Problem, entries: Sequence[Admitted]) -> dict[Products, tuple[str, Make]]:
    """For each set of products that entries need: a name to time them under, and what makes the call."""
    limits: dict[Products, tuple[str, Make]] = {}
    for entry in entries:
        wanted = tuple(costs.products(problem.case, entry.built.gradients))
        if wanted and wanted not in limits:
            make = cache(partial(bare_products, wanted, problem.device, torch_dtype(problem.case)))
            limits[wanted] = (f"bare products {len(limits)}", make)
    return limits


def _same_call(make: Make, number: int) -> Callable[[], object]:
    """The same work in every round, made in the first: a device too full for it costs the limit, not the sweep."""
    del number
    return make()


def _note_comparison(record: Record, rounds: Rounds, twin: Interval | None) -> None:
    if twin:
        record.aa_ratio, record.aa_low, record.aa_high = twin.median, twin.low, twin.high
    if not record.baseline or not record.comparable:
        return
    ratio = rounds.ratio(record.implementation, record.baseline)
    if ratio:
        record.ratio, record.ratio_low, record.ratio_high = ratio.median, ratio.low, ratio.high
    if record.implementation == record.baseline:
        record.twin_ms = tuple(rounds.timings[TWIN].ms)
    elif ratio and twin:
        record.verdict = verdict(ratio, twin.noise)


def _note_gpu(record: Record, watch: _Watch) -> None:
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
