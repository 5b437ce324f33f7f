"""What the tasks time, memory and verify have in common: a case's truth, and the admission of each contender."""

import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.errors import BadInput, one_line
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.machine import sources
from swiglu_bench.machine.machine import Machine
from swiglu_bench.measure.clock import DeviceLost
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.worker import environments, policy
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.admission import failure as failed_check
from swiglu_bench.worker.child import Child, Contender
from swiglu_bench.worker.court import Court, JudgeLost
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.worker import LoadedReport

log = logging.getLogger(__name__)

TWINS = ("twin 1", "twin 2", "twin 3")
"""Processes of the baseline beside its first: the difference between them is this machine's noise."""


@dataclass
class Entry:
    """An implementation that takes part in the case, and its row."""

    implementation: Implementation
    record: Record
    contender: Contender = field(init=False)
    """Its process, once it was asked for."""
    gradients: tuple[str, ...] = ()


class CaseRun(ABC):
    """One case in a court. A subclass says what is done with contenders once the truth is known."""

    def __init__(self, court: Court, case: Case) -> None:
        self.court, self.case = court, case
        self.task = court.settings.task
        self.baseline = court.settings.baseline_of(case)
        self.drawn = Drawn.new()
        self.seats = 0
        """How many contenders' processes fit on the device."""

    def rows(self, implementations: Sequence[Implementation]) -> Iterator[Record]:
        """All rows of the case; how one implementation ends never keeps another from its row."""
        settings, this = self.court.settings, self.court.machine
        able: list[Entry] = []
        for implementation in implementations:
            record = policy.blank(settings, this, self.case, implementation)
            reason = policy.inapplicable(settings, this, self.case, implementation)
            if reason:
                yield record.end(Status.SKIPPED, reason)
            else:
                able.append(Entry(implementation, record))
        if not able:
            return
        waiting = {known.record.implementation: known.record for known in able}
        try:
            for record in self._judged(able):
                del waiting[record.implementation]
                yield record
        except JudgeLost as error:
            for record in waiting.values():
                yield record.end(Status.ERROR, f"The judge's process failed: {error}.")
            return
        with suppress(JudgeLost):
            self.court.judge.end_case()

    @abstractmethod
    def measure(self, able: Sequence[Entry]) -> Iterator[Record]:
        """The rows of the implementations that take part, the baseline first; the truth is known."""

    def too_long(self, contenders: int) -> str | None:
        """Why there is no time for the case, or None."""
        return None

    def start_early(self, able: Sequence[Entry]) -> None:  # noqa: B027
        """Start processes that can load while the truth is computed."""

    def _judged(self, able: Sequence[Entry]) -> Iterator[Record]:
        judge, settings, case = self.court.judge, self.court.settings, self.case
        self.admitting = Admitting(
            self.court, case, self.drawn, thorough=self.task is Task.VERIFY, used=self.court.kept.used,
            works_idle=self.works_idle,
        )  # fmt: skip
        free_bytes = judge.free_bytes()
        reason = policy.too_large(settings, case, free_bytes)
        long = None if reason else self.too_long(len(able))
        reason = reason or long
        idle = len(able) if self.task is Task.VERIFY else 0
        self.seats = policy.seats(settings, case, free_bytes, idle=idle)
        if not reason:
            self.start_early(able)
        reason = reason or judge.begin_case(case, self.drawn.weights)
        for draw in self.drawn.draws:
            reason = reason or judge.truth(draw, case.mode is not Mode.FORWARD)
        if reason:
            for known in able:
                yield known.record.end(Status.SKIPPED, reason, "budget" if long else "memory")
            return
        if case.shape.experts:
            load = judge.load()
            for record in (known.record for known in able):
                record.expert_tokens_min, record.expert_tokens_max = load.least, load.most
                record.expert_tokens_median, record.idle_experts = load.median, load.idle
                record.padding_share = load.padding
        # The baseline comes first, so that it can be timed before any other's code has run.
        yield from self.measure(sorted(able, key=lambda known: known.implementation.name != self.baseline))

    def admitted(self, able: Sequence[Entry], together: bool) -> Iterator[tuple[Entry, bool]]:
        """Check one after the other; where not all fit `together` on the device, each one's process ends after it."""
        everyone = [known.implementation for known in able]
        if not together:
            self.rehearse(everyone, self.seats)
        for index, known in enumerate(able):
            implementation = known.implementation
            self.court.tell(f"checking {implementation.name}", 0.5 * index / len(able))
            if together and index < 2:  # first the baseline by itself, then all the others
                first = index == 0 and implementation.name == self.baseline
                self.start(everyone[:1] if first else everyone, twins=first)
                if not first or policy.compiles(self.court.settings, implementation):
                    self.rehearse(everyone, self.seats - len(able) - len(TWINS))
                self.court.settle()
            yield known, self.admit(known, stays=together)

    def start(self, implementations: Sequence[Implementation], twins: bool = False) -> None:
        """Let their processes load side by side, and where cases are timed, the first one's `twins` as well."""
        names = [(implementation, "") for implementation in implementations]
        if twins and self.task is Task.TIME:
            names += [(implementations[0], twin) for twin in TWINS]
        self.court.start(names, self.case)

    def rehearse(self, able: Sequence[Implementation], at_once: int) -> None:
        """Compile, and check a model's use, side by side while nothing is timed: once for each shape, until versions or
        its file change."""
        case, this, rehearsed = self.case, self.court.machine, self.court.kept.rehearsed
        shape = replace(case.shape, source="", tokens=())
        keys = {known.name: (known.name, shape, case.scope, case.mode, case.dtype, case.precision) for known in able}
        versions = this.device, this.python, this.torch, this.triton, this.liger_kernel, this.version, this.tuned_tiles

        def mark(known: Implementation) -> Path:
            of_file = known.file and sources.of_file(Path(known.file))
            return environments.mark(known, (keys[known.name], versions, of_file, environments.packages_of(known)))

        def rehearse(contender: Contender) -> None:
            self.admitting.rehearse(contender)
            found = mark(contender.implementation)
            found.parent.mkdir(parents=True, exist_ok=True)
            found.touch()

        wanted = [
            known for known in able
            if policy.compiles(self.court.settings, known)
            and keys[known.name] not in rehearsed and not mark(known).exists()
        ]  # fmt: skip
        if len(wanted) < 2 or at_once < 2:  # a single one gains nothing
            return
        self.court.tell(f"compiling {len(wanted)} implementations", 0.0)
        self.court.aside(wanted, min(len(wanted), at_once), rehearse)
        rehearsed |= {keys[known.name] for known in wanted}

    def admit(self, known: Entry, stays: bool = True) -> bool:
        """Check one contender: whether it was admitted; else its record ends here.

        Unless it stays, its process ends, whatever the verdict: the others need the memory.
        """
        contender: Contender | None = None
        implementation, record = known.implementation, known.record
        try:
            known.contender = contender = self.court.contender(implementation)
            with nullcontext() if self.task is Task.VERIFY else self.court.held():
                admission = self.admitting.admit(contender)
                known.gradients = admission.gradients
                works = any(check.check == "slows others" for check in admission.checks)
                if isinstance(contender.child, Child) and not works:
                    paths = contender.ask(LoadedReport, "loaded").paths
                    record.files = sources.digests(paths, implementation.file)
                record.drawn = " ".join(str(seed) for seed in self.drawn.seeds)
                record.first_call_ms = admission.first_call_ms
                record.note_checks(admission.checks)
                self.admitting.note_use(record, contender)
                if record.status is Status.OK:
                    self.once_admitted(record, contender)
        except DeviceLost:
            raise  # in this process: no contender could be measured after it
        except BadInput as error:  # its file is not what it was when the run began
            record.end(Status.ERROR, str(error))
        except Exception as error:  # whatever a contender raises, and the end of its process, costs its own row
            log.info("%s, while it was checked:", implementation.name, exc_info=error)
            record.end(Status.ERROR, f"{sentence(error)}{self.court.log_of(contender) if contender else ''}")
        if contender and not stays:
            self.end(contender)
        return record.status is Status.OK

    def once_admitted(self, record: Record, contender: Contender) -> None:  # noqa: B027
        """Ask more of a contender that was admitted, while the others stand still."""

    def works_idle(self, contender: Contender) -> str:
        """What a contender does while it has nothing to do and must not, as a clause, or ""."""
        return ""

    def end(self, contender: Contender) -> None:
        """End a process for which there is no room now, and free the memory through which it hands over results."""
        contender.end()
        self.court.judge.close_letterboxes(contender.name)


@contextmanager
def court_of(settings: Settings, this: Machine, timeout_s: float) -> Iterator[Court]:
    """A court for a task that no sweep runs; its processes end with the context."""
    with tempfile.TemporaryDirectory(prefix="swiglu-bench-") as folder:
        court = Court(settings, this, timeout_s, Path(folder))
        try:
            yield court
        finally:
            court.end()


def blame(record: Record, check: str, reason: str) -> None:
    """Make a row incorrect over a check that belongs to no tensor."""
    record.tensor_checks = (*record.tensor_checks, failed_check(check, reason))
    record.end(Status.INCORRECT, f"conduct: {reason}.")


def sentence(failure: BaseException) -> str:
    """What happened, as the reason of a row."""
    own = type(failure).__module__.startswith("swiglu_bench.") and str(failure)
    return f"{failure}." if own else f"{one_line(failure)}."
