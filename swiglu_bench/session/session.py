"""The loop: for each case build, validate and measure every contender, and yield one Record at a time."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from swiglu_bench.check.admission import admit
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import make_problem, torch_dtype
from swiglu_bench.check.judge import Judge, make_judge
from swiglu_bench.machine import ceilings_cache, machine
from swiglu_bench.machine.ceilings_cache import Ceilings
from swiglu_bench.measure.clock import Clock, DeviceLost, answers, make_clock
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.session.case_timing import Timer
from swiglu_bench.session.settings import Admitted, Listener, Settings, Task, Tell, teller
from swiglu_bench.spec import costs
from swiglu_bench.spec.cases import VARIANTS, WEIGHTS, Case, Mode
from swiglu_bench.spec.errors import one_line
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.spec.problem import Problem

log = logging.getLogger(__name__)


def run(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    settings: Settings,
    this_machine: machine.Machine,
    listen: Listener = lambda progress: None,
) -> Iterator[Record]:
    """Work through the cases in this process and yield every row as soon as it is known."""
    session = Session(settings, this_machine)
    for number, case in enumerate(cases):
        tell = teller(listen, number, cases)
        tell("preparing", 0.0)
        yield from session.run_case(case, implementations, tell)


class Session:
    """What lasts from case to case: the clock and the ceilings, measured when first needed.

    `mark` is called with the name of the implementation whose code runs next, and with "" once none does.
    """

    def __init__(
        self, settings: Settings, this_machine: machine.Machine, mark: Callable[[str], None] = lambda name: None
    ) -> None:
        self.settings = settings
        self.machine = this_machine
        self.mark = mark
        self._clock: Clock | None = None
        self._timer: Timer | None = None
        self._ceilings: dict[torch.dtype, Ceilings] = {}

    @property
    def clock(self) -> Clock:
        """The device's clock."""
        if self._clock is None:
            self._clock = make_clock(self.settings.device, self.settings.cold_l2)
        return self._clock

    @property
    def timer(self) -> Timer:
        """What times contenders on the clock."""
        if self._timer is None:
            self._timer = Timer(self.settings, self.machine, self.clock, self.mark)
        return self._timer

    def ceilings(self, dtype: torch.dtype) -> Ceilings:
        """The device's best rates for a dtype."""
        if dtype not in self._ceilings:
            self._ceilings[dtype] = ceilings_cache.ceilings(self.machine, self.settings.device, dtype, self.clock)
        return self._ceilings[dtype]

    def run_case(self, case: Case, implementations: Sequence[Implementation], tell: Tell) -> Iterator[Record]:
        """One case with all its contenders; nothing of it is left on the device afterwards."""
        yield from self._run_case(case, implementations, tell)
        _tidy(self.settings.device)

    def _run_case(self, case: Case, implementations: Sequence[Implementation], tell: Tell) -> Iterator[Record]:
        able: list[tuple[Implementation, Record]] = []
        for implementation in implementations:
            record = self.blank(case, implementation)
            reason = self.inapplicable(case, implementation)
            if reason:
                yield record.end(Status.SKIPPED, reason)
            else:
                able.append((implementation, record))
        reason = self.unaffordable(case, len(able)) if able else None
        if reason:
            yield from (record.end(Status.SKIPPED, reason) for _, record in able)
            return
        if not able:
            return
        try:
            problem = make_problem(case, self.settings.device)
            judges = tuple(make_judge(problem, variant) for variant in range(VARIANTS))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
                raise  # a CPU without memory raises a plain RuntimeError
            reason = f"The device ran out of memory for the inputs and their fp64 truth: {one_line(error)}"
            yield from (record.end(Status.SKIPPED, reason) for _, record in able)
            return
        entries: list[Admitted] = []
        for index, (implementation, record) in enumerate(able):
            tell(f"checking {implementation.name}", 0.5 * index / len(able))
            entry = self._admit(implementation, record, problem, judges)
            if entry and self.settings.task is Task.TIME:
                entries.append(entry)
            else:
                yield record
        if entries:
            yield from self.timer.time(problem, entries, judges, self.ceilings(torch_dtype(case)), tell)

    def blank(self, case: Case, implementation: Implementation) -> Record:
        """The row of one implementation at one case before anything has run."""
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
            host=this.host,
            gpu_index=this.gpu_index,
            gpu_uuid=this.gpu_uuid,
            device=this.device,
            driver=this.driver,
            cuda=this.cuda,
            torch=this.torch,
            triton=this.triton,
            version=this.version,
            timestamp=machine.now(),
        )

    def inapplicable(self, case: Case, implementation: Implementation) -> str | None:
        """Why the implementation does not take part in the case, or None."""
        refusal = implementation.refuses(case)
        if refusal:
            return refusal
        if self.settings.task is Task.TIME and case.mode is not Mode.FORWARD and implementation.trains == "nothing":
            return "It has no backward."
        settings = self.settings
        return implementation.unavailable(settings.device.type, settings.interpreter, self.machine.compute_capability)

    def unaffordable(self, case: Case, contenders: int) -> str | None:
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
        seconds = once * (contenders + 2) * (rule.min_rounds + rule.warmup_rounds)
        if seconds > rule.budget_s:
            return f"Its fewest rounds would take about {seconds:.0f} s, more than the budget of {rule.budget_s:g} s."
        return None

    def _admit(
        self, implementation: Implementation, record: Record, problem: Problem, judges: tuple[Judge, ...]
    ) -> Admitted | None:
        """Build and check one contender; its record ends here unless it is returned for timing."""
        task = self.settings.task
        verify = task is Task.VERIFY
        clock = self.clock  # made while the device works
        self.mark(implementation.name)
        try:
            admission = admit(implementation, problem, judges, thorough=verify, distribution=verify)
            record.first_call_ms = admission.first_call_ms
            record.note_checks(admission.checks)
            if record.status is Status.OK and task is Task.MEMORY:
                self._note_memory(record, admission.built)
        except Exception as error:  # a contender may raise anything; it costs its row only
            log.info("%s, while it was checked:", implementation.name, exc_info=error)
            record.end(Status.ERROR, one_line(error))
            if not answers(clock):
                raise DeviceLost(one_line(error)) from error
        self.mark("")  # not where the device is lost or the process ends: then the mark tells whose doing it was
        if task is not Task.TIME or record.status is not Status.OK:
            return None
        return Admitted(admission.built, record)

    def _note_memory(self, record: Record, built: Built) -> None:
        use = built.memory()
        record.saved_bytes, record.peak_bytes, record.workspace_bytes = use.saved_bytes, use.peak_bytes, use.kept_bytes
        case = built.problem.case
        footprint = built.implementation.footprints.get(case.scope)
        if footprint:
            record.predicted_saved_bytes, record.predicted_peak_bytes = costs.predicted_memory(case, footprint)
            record.predicted_workspace_bytes = 0


def _tidy(device: torch.device) -> None:
    """Give memory and compiled graphs of the last case back."""
    if "torch._dynamo" in sys.modules:  # else there are none, and to import it takes seconds
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
