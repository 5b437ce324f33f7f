"""The loop: for each case build, validate and measure every contender, and yield one Record at a time."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial

import torch

from swiglu_bench import costs, machine
from swiglu_bench.admission import admit
from swiglu_bench.cases import VARIANTS, WEIGHTS, Case, Mode
from swiglu_bench.measure.ceilings import Ceilings, bare_products, measure_ceilings
from swiglu_bench.measure.clock import Clock, make_clock
from swiglu_bench.measure.originals import put_back
from swiglu_bench.measure.rounds import Contender, Rounds, Rule, run_rounds
from swiglu_bench.measure.statistics import percentile
from swiglu_bench.problem import Problem, make_problem, torch_dtype
from swiglu_bench.record import Record, Status, TensorCheck
from swiglu_bench.registry import Implementation
from swiglu_bench.trial import Produced, Trial
from swiglu_bench.yardstick import Yardstick, make_yardstick


class Task(StrEnum):
    """What a run wants of each contender."""

    TIME = "time"
    MEMORY = "memory"
    VERIFY = "verify"


@dataclass(frozen=True)
class Settings:
    """How a run goes about its cases."""

    task: Task
    device: torch.device
    command: str
    run_id: str
    baseline: str = "eager"
    rule: Rule = field(default_factory=Rule)
    cold_l2: bool = True
    interpreter: bool = False
    detail: bool = False
    """Show of each tensor that was verified how its elements' errors are distributed."""


@dataclass(frozen=True)
class Progress:
    """Where a run is: shown by whoever listens."""

    case_number: int
    case_count: int
    case: Case
    doing: str
    fraction: float
    """Of this case."""


Listener = Callable[[Progress], None]


def run(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    settings: Settings,
    this_machine: machine.Machine,
    listen: Listener = lambda progress: None,
) -> Iterator[Record]:
    """Work through the cases and yield every row as soon as it is known."""
    session = _Session(implementations, settings, this_machine)
    for number, case in enumerate(cases):

        def tell(doing: str, fraction: float, number: int = number, case: Case = case) -> None:
            listen(Progress(number, len(cases), case, doing, fraction))

        tell("preparing", 0.0)
        yield from session.run_case(case, tell)
        _tidy(settings.device)


Tell = Callable[[str, float], None]


@dataclass
class _Entry:
    """A contender of the case at hand that passed validation."""

    trial: Trial
    record: Record


class _Session:
    """What lasts from case to case: the clock and the ceilings, measured when first needed."""

    def __init__(
        self, implementations: Sequence[Implementation], settings: Settings, this_machine: machine.Machine
    ) -> None:
        self.implementations = implementations
        self.settings = settings
        self.machine = this_machine
        self._clock: Clock | None = None
        self._ceilings: dict[torch.dtype, Ceilings] = {}

    @property
    def clock(self) -> Clock:
        if self._clock is None:
            self._clock = make_clock(self.settings.device, self.settings.cold_l2)
        return self._clock

    def ceilings(self, dtype: torch.dtype) -> Ceilings:
        if dtype not in self._ceilings:
            self._ceilings[dtype] = measure_ceilings(self.settings.device, dtype, self.clock)
        return self._ceilings[dtype]

    def run_case(self, case: Case, tell: Tell) -> Iterator[Record]:
        able: list[tuple[Implementation, Record]] = []
        for implementation in self.implementations:
            record = self._blank(case, implementation)
            reason = self._inapplicable(case, implementation)
            if reason:
                yield _end(record, Status.SKIPPED, reason)
            else:
                able.append((implementation, record))
        reason = self._unaffordable(case, len(able)) if able else None
        if reason:
            yield from (_end(record, Status.SKIPPED, reason) for _, record in able)
            return
        if not able:
            return
        try:
            problem = make_problem(case, self.settings.device)
            yardsticks = tuple(make_yardstick(problem, variant) for variant in range(VARIANTS))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
                raise  # a CPU without memory raises a plain RuntimeError
            reason = f"The device ran out of memory for the inputs and their fp64 truth: {_one_line(error)}"
            yield from (_end(record, Status.SKIPPED, reason) for _, record in able)
            return
        entries: list[_Entry] = []
        for index, (implementation, record) in enumerate(able):
            tell(f"checking {implementation.name}", 0.5 * index / len(able))
            entry = self._admit(implementation, record, problem, yardsticks)
            if entry and self.settings.task is Task.TIME:
                entries.append(entry)
            else:
                yield record
        if entries:
            yield from self._time(case, problem, entries, yardsticks, tell)

    def _blank(self, case: Case, implementation: Implementation) -> Record:
        this = self.machine
        return Record(
            run_id=self.settings.run_id,
            command=self.settings.command,
            shape=case.shape.name,
            hidden=case.shape.hidden,
            intermediate=case.shape.intermediate,
            tokens=case.tokens,
            dtype=case.dtype.value,
            scope=case.scope.value,
            mode=case.mode.value,
            seed=case.seed,
            implementation=implementation.name,
            weight_layout=implementation.weight_layout,
            gradients=" ".join(implementation.gradients(case.scope)),
            status=Status.OK,
            interpreted=self.settings.interpreter and implementation.backend == "triton",
            device=this.device,
            driver=this.driver,
            cuda=this.cuda,
            torch=this.torch,
            triton=this.triton,
            version=this.version,
            timestamp=machine.now(),
        )

    def _inapplicable(self, case: Case, implementation: Implementation) -> str | None:
        if case.scope not in implementation.scopes:
            scopes = ", ".join(sorted(implementation.scopes))
            return f"It has no {case.scope} scope; it has {scopes}."
        if self.settings.task is Task.TIME and case.mode is not Mode.FORWARD and implementation.trains == "nothing":
            return "It has no backward."
        return implementation.unavailable(self.settings.device.type, self.settings.interpreter)

    def _unaffordable(self, case: Case, contenders: int) -> str | None:
        """Why the case is too large for the device's memory or, when timing, for the budget."""
        need, free = costs.needed_bytes(case, VARIANTS), machine.free_memory_bytes(self.settings.device)
        if need > free:
            return f"It needs about {need / 2**30:.1f} GiB and the device has {free / 2**30:.1f} GiB free."
        if self.settings.task is not Task.TIME:
            return None
        ceilings = self.ceilings(torch_dtype(case))
        names = WEIGHTS[case.scope] + ("x",)
        once = max(
            costs.flops(case, names) / ceilings.matmul_tflops / 1e12,
            costs.min_bytes(case, names) / ceilings.copy_gbps / 1e9,
        )
        rule = self.settings.rule
        seconds = once * (contenders + 1) * (rule.min_rounds + rule.warmup_rounds)
        if seconds > rule.budget_s:
            return f"Its fewest rounds would take about {seconds:.0f} s, more than the budget of {rule.budget_s:g} s."
        return None

    def _admit(
        self, implementation: Implementation, record: Record, problem: Problem, yardsticks: tuple[Yardstick, ...]
    ) -> _Entry | None:
        """Build and check one contender; its record ends here unless it is returned for timing."""
        task = self.settings.task
        verify = task is Task.VERIFY
        try:
            admission = admit(implementation, problem, yardsticks, thorough=verify, distribution=verify)
            record.first_call_ms = admission.first_call_ms
            _note_checks(record, admission.checks)
            if record.status is Status.OK and task is Task.MEMORY:
                self._note_memory(record, admission.trial)
        except Exception as error:  # a contender may raise anything; it costs its row only
            _end(record, Status.ERROR, _one_line(error))
        if task is not Task.TIME or record.status is not Status.OK:
            return None
        return _Entry(admission.trial, record)

    def _note_memory(self, record: Record, trial: Trial) -> None:
        use = trial.memory()
        record.saved_bytes, record.peak_bytes, record.workspace_bytes = use.saved_bytes, use.peak_bytes, use.kept_bytes
        case = trial.problem.case
        footprint = trial.implementation.footprints.get(case.scope)
        if footprint:
            record.predicted_saved_bytes, record.predicted_peak_bytes = costs.predicted_memory(case, footprint)
            record.predicted_workspace_bytes = 0

    def _time(
        self,
        case: Case,
        problem: Problem,
        entries: list[_Entry],
        yardsticks: tuple[Yardstick, ...],
        tell: Tell,
    ) -> Iterator[Record]:
        names = [entry.record.implementation for entry in entries]
        by_name = dict(zip(names, entries, strict=True))
        baseline = self.settings.baseline if self.settings.baseline in names else None
        contenders = [
            Contender(entry.record.implementation, partial(_prepare, entry.trial, case.mode)) for entry in entries
        ]
        limits: dict[tuple[costs.Product, ...], str] = {}
        for entry in entries:
            wanted = tuple(costs.products(case, entry.trial.gradients))
            if wanted and wanted not in limits:
                limits[wanted] = f"bare products {len(limits)}"
                make_products = cache(partial(bare_products, wanted, problem.device, torch_dtype(case)))
                contenders.append(Contender(limits[wanted], partial(_same_call, make_products)))

        def inspect(name: str, number: int, result: Callable[[], Produced]) -> None:
            if name in by_name and by_name[name].record.status is Status.OK:
                found = yardsticks[number % VARIANTS].judge(result())
                checks = tuple(one if one.ok else dataclasses.replace(one, check="timed loop") for one in found)
                _note_checks(by_name[name].record, checks, when=" in the timed loop")

        def on_round(number: int) -> None:
            rule = self.settings.rule
            tell(f"timing, round {number}", 0.5 + 0.5 * min(1.0, number / rule.min_rounds))

        rounds = run_rounds(
            contenders,
            self.clock,
            self.settings.rule,
            baseline=baseline,
            seed=case.seed,
            before_inspection=lambda number: yardsticks[number % VARIANTS].poison(),
            inspect=inspect,
            inspected_rounds=VARIANTS,  # each variant once: a remembered answer is right for one of them
            on_round=on_round,
        )
        replaced = put_back()
        if replaced:  # whoever did it: no time of this case is one
            reason = f"While the case was timed, somebody replaced {', '.join(replaced)}."
            yield from (_end(entry.record, Status.ERROR, reason) for entry in entries)
            return
        if baseline and (rounds.timings[baseline].failure or by_name[baseline].record.status is not Status.OK):
            baseline = None  # the time of a wrong answer is no yardstick
        for entry in entries:
            gradients = entry.trial.gradients
            if baseline:
                entry.record.baseline = baseline
                same_work = gradients == by_name[baseline].trial.gradients
                entry.record.comparable = case.mode is Mode.FORWARD or same_work
            limit = limits.get(tuple(costs.products(case, gradients)))
            self._note_time(entry.record, rounds, case, gradients, limit)
            yield entry.record

    def _note_time(
        self, record: Record, rounds: Rounds, case: Case, gradients: tuple[str, ...], limit: str | None
    ) -> None:
        timing = rounds.timings[record.implementation]
        if timing.failure:
            _end(record, Status.ERROR, f"In the timed loop: {_one_line(timing.failure)}")
        if record.status is not Status.OK:
            return
        record.samples_ms = tuple(timing.ms)
        record.time_ms = percentile(timing.ms, 50)
        record.time_p10_ms, record.time_p90_ms = percentile(timing.ms, 10), percentile(timing.ms, 90)
        record.rounds, record.stopped_by = len(timing.samples), rounds.stopped_by
        record.host_us = percentile([sample.host_us for sample in timing.samples], 50)
        record.queue_filled = sum(sample.queue_filled for sample in timing.samples) / len(timing.samples)
        record.l2 = self.clock.cache
        if record.baseline and record.comparable:
            interval = rounds.ratio(record.implementation, record.baseline)
            if interval:
                record.ratio, record.ratio_low, record.ratio_high = interval.median, interval.low, interval.high
        ceilings = self.ceilings(torch_dtype(case))
        record.copy_gbps, record.matmul_tflops = ceilings.copy_gbps, ceilings.matmul_tflops
        record.flops, record.min_bytes = costs.flops(case, gradients), costs.min_bytes(case, gradients)
        record.tflops = record.flops / record.time_ms / 1e9
        record.gbps = record.min_bytes / record.time_ms / 1e6
        copy_ms = record.min_bytes / ceilings.copy_gbps / 1e6
        bound_by_products = record.flops / ceilings.matmul_tflops / 1e9 > copy_ms
        products_ms = rounds.timings[limit].ms if limit else []
        if products_ms and bound_by_products:
            record.limit_kind, record.limit_ms = "matmul", max(copy_ms, percentile(products_ms, 50))
        else:
            record.limit_kind, record.limit_ms = "bandwidth", copy_ms
        record.limit_pct = 100 * record.limit_ms / record.time_ms
        self._reject_impossible(record)

    def _reject_impossible(self, record: Record) -> None:
        """A figure above the vendor's limit is a measuring error, not a result."""
        sheet = self.machine.datasheet
        if not sheet or not record.tflops or not record.gbps or not record.time_ms or not record.min_bytes:
            return
        rate = sheet.tf32_tflops if record.dtype == "float32" else sheet.tflops
        beyond_l2 = max(0, record.min_bytes - (self.machine.l2_bytes or 0))  # what was written last may still be in L2
        too_many_bytes = beyond_l2 / record.time_ms / 1e6 > sheet.gbps and record.l2 == "cold"
        if record.tflops > rate or too_many_bytes:
            reason = (
                f"Measured {record.tflops:.0f} TFLOP/s and {record.gbps:.0f} GB/s, above the datasheet's "
                f"{rate:.0f} and {sheet.gbps:.0f}: the timing is wrong."
            )
            record.time_ms = record.time_p10_ms = record.time_p90_ms = record.host_us = None
            record.ratio = record.ratio_low = record.ratio_high = None
            record.tflops = record.gbps = record.limit_pct = None
            record.samples_ms = ()
            _end(record, Status.ERROR, reason)


def _prepare(trial: Trial, mode: Mode, number: int) -> Callable[[], Callable[[], Produced]]:
    return trial.prepare(mode, number % VARIANTS)


def _same_call(make: Callable[[], Callable[[], object]], number: int) -> Callable[[], object]:
    """The same work in every round, made in the first: a device too full for it costs the limit, not the sweep."""
    del number
    return make()


def _end(record: Record, status: Status, reason: str) -> Record:
    record.status, record.reason = status, reason
    return record


def _note_checks(record: Record, checks: tuple[TensorCheck, ...], when: str = "") -> None:
    """Enter the verdict; a tensor that fails makes the row incorrect and names itself."""
    record.tensor_checks = checks
    judged = [c for c in checks if c.tensor != "conduct"]
    record.errors = " ".join(f"{c.tensor.replace(' ', '_')}={c.error:.3e}/{c.eager_error:.3e}" for c in judged)
    worst = max(judged, key=lambda c: c.used)
    record.error, record.eager_error, record.error_ratio = worst.error, worst.eager_error, worst.used
    failed = [f"{c.tensor}: {c.reason}" for c in checks if not c.ok]
    if failed:
        _end(record, Status.INCORRECT, "; ".join(failed) + when + ".")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _tidy(device: torch.device) -> None:
    """Give memory and compiled graphs of the last case back."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
