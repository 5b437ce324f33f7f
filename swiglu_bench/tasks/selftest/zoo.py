"""Send every specimen through the suite and see which of its checks catch it."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from swiglu_bench.cases.cases import Case, Experts, Scope, Shape
from swiglu_bench.contenders import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import AuditVerdict, Record, Status
from swiglu_bench.tasks.audit import Asked, audit_here
from swiglu_bench.tasks.selftest import conduct, experts, fp8, gpu, memory, timing, usage, wrong
from swiglu_bench.tasks.selftest.specimen import Specimen
from swiglu_bench.tasks.sweep import task_of
from swiglu_bench.worker.court import Court
from swiglu_bench.worker.settings import Settings, Task

SPECIMENS = tuple(
    value
    for module in (wrong, experts, memory, usage, timing, conduct, gpu, fp8)
    for value in vars(module).values()
    if isinstance(value, Specimen)
)

SHAPES = {"cpu": Shape("zoo", 128, 192, "sizes of the self-test", (129,)),
          "cuda": Shape("zoo", 512, 1024, "sizes of the self-test", (1000,))}  # fmt: skip
EXPERTS = Experts(8, 2)
RULE = Rule(warmup_rounds=2, min_rounds=30, max_rounds=32, min_s=0.0, budget_s=60.0)
"""More rounds than calls after which a specimen takes the check to be over."""
NEEDS_GPU, TOO_BUSY = "needs a GPU", "the machine is too busy"
ATTEMPTS = 3
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Catch:
    """What the suite made of a specimen."""

    specimen: Specimen
    checks: tuple[str, ...] = ()
    """The checks that caught it."""
    reason: str = ""
    """The suite's words, or why the specimen did not run here."""
    ran: bool = True

    @property
    def caught(self) -> bool:
        """Whether one of the checks caught it that must."""
        return bool(set(self.checks) & set(self.specimen.caught_by))


def run_zoo(
    device: torch.device, this: machine.Machine, tell: Callable[[str], None], specimens: Sequence[Specimen] = SPECIMENS
) -> Iterator[Catch]:
    """Every specimen through the code of a sweep or an audit, beside eager, whose answer it could take."""
    on_gpu = device.type == "cuda"
    here = [specimen for specimen in specimens if on_gpu or not specimen.needs_gpu]

    def case_of(specimen: Specimen) -> Case:
        shape = SHAPES[device.type]
        if specimen.scope is Scope.EXPERTS:
            shape = dataclasses.replace(shape, experts=EXPERTS)
        if specimen.precision:
            shape = dataclasses.replace(shape, hidden=512, intermediate=384)  # several blocks
        tokens = specimen.tokens or shape.tokens[0]
        return Case(shape, tokens, specimen.dtype, specimen.scope, specimen.mode, precision=specimen.precision)

    swept = sorted((one for one in here if one.task != "audit"), key=lambda one: (one.task, str(case_of(one))))
    for task, of_task in groupby(swept, key=lambda one: one.task):
        settings = Settings(
            Task(task), device, "selftest", "selftest", baseline=pytorch.eager.name, rule=RULE, energy=False
        )
        with _court(settings, this) as court:
            for case, group in groupby(of_task, key=case_of):
                yield from _swept(court, case, {specimen.name: specimen for specimen in group}, tell)
    for specimen in here:
        if specimen.task == "audit":
            tell(specimen.name)
            yield _audited(specimen, device)
    for specimen in specimens:
        if specimen not in here:
            yield Catch(specimen, reason=NEEDS_GPU, ran=False)


@contextlib.contextmanager
def _court(settings: Settings, this: machine.Machine) -> Iterator[Court]:
    with tempfile.TemporaryDirectory(prefix="swiglu-bench-") as folder:
        court = Court(settings, this, TIMEOUT_S, Path(folder))
        try:
            yield court
        finally:
            court.end()


def _swept(court: Court, case: Case, chosen: dict[str, Specimen], tell: Callable[[str], None]) -> Iterator[Catch]:
    """Some specimens at one case, each in its process; again where the machine was too busy to tell."""

    def listen(doing: str, _: float) -> None:
        tell(f"{case.label}: {doing}")

    left, court.tell = dict(chosen), listen
    for _ in range(ATTEMPTS):
        contenders = [pytorch.eager, *(specimen.implementation for specimen in left.values())]
        rows = {record.implementation: record for record in court.run(task_of(court.settings), case, contenders)}
        eager = rows.pop(pytorch.eager.name)
        if eager.status not in {Status.OK, Status.UNSETTLED}:
            raise AssertionError(f"eager itself is {eager.status} at {case.label}: {eager.reason}")
        for name, record in rows.items():
            checks = _failed(record)
            if checks or Status.UNSETTLED not in {eager.status, record.status}:
                yield Catch(left.pop(name), checks, record.reason)
        if not left:
            return
    for specimen in left.values():
        yield Catch(specimen, reason=TOO_BUSY, ran=False)


def _failed(record: Record) -> tuple[str, ...]:
    """Names of the checks that failed; one that ends with an error is caught by that."""
    found = tuple(dict.fromkeys(one.check for one in record.tensor_checks if not one.ok))
    return found or (("error",) if record.status is Status.ERROR else ())


def _audited(specimen: Specimen, device: torch.device) -> Catch:
    (cell,) = audit_here([specimen.implementation], Asked([specimen.scope], only=specimen.caught_by), device)
    if cell.verdict is AuditVerdict.NOT_RUN:
        return Catch(specimen, reason=cell.reason, ran=False)
    return Catch(specimen, (cell.check,) if cell.verdict is AuditVerdict.FAIL else (), cell.reason)
