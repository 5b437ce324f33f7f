"""Send every specimen through the suite and see which of its checks catch it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from swiglu_bench.audit import matrix
from swiglu_bench.implementations import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.audit_cell import CellStatus
from swiglu_bench.rows.record import Status
from swiglu_bench.selftest import cheats, gpu, wrong
from swiglu_bench.selftest.specimen import Specimen
from swiglu_bench.session import session
from swiglu_bench.session.settings import Settings, Task
from swiglu_bench.spec.cases import Case, Shape

SPECIMENS: tuple[Specimen, ...] = (*wrong.SPECIMENS, *cheats.SPECIMENS, *gpu.SPECIMENS)

SHAPES = {"cpu": Shape("zoo", 64, 96, "sizes of the self-test", (33,)),
          "cuda": Shape("zoo", 512, 1024, "sizes of the self-test", (1000,))}  # fmt: skip
RULE = Rule(warmup_rounds=2, min_rounds=10, max_rounds=12, budget_s=60.0)
NEEDS_GPU = "needs a GPU"


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

    def case_of(specimen: Specimen) -> tuple[str, Case]:
        shape = SHAPES[device.type]
        case = Case(shape, shape.tokens[0], specimen.dtype, specimen.scope, specimen.mode)
        return specimen.task, case

    swept = [specimen for specimen in here if specimen.task != "audit"]
    for (task, case), group in groupby(sorted(swept, key=lambda one: str(case_of(one))), key=case_of):
        chosen = {specimen.name: specimen for specimen in group}
        tell(f"{case.label}: {', '.join(chosen)}")
        settings = Settings(
            task=Task(task), device=device, command="selftest", run_id="selftest", rule=RULE, energy=False
        )
        contenders = [pytorch.eager, *(specimen.implementation for specimen in chosen.values())]
        for record in session.run([case], contenders, settings, this):
            if record.implementation in chosen:
                checks = tuple(dict.fromkeys(one.check for one in record.tensor_checks if not one.ok))
                if record.status is Status.OK or (record.status is Status.ERROR and not checks):
                    checks = ()
                yield Catch(chosen[record.implementation], checks, record.reason)
            elif record.status is not Status.OK:
                raise AssertionError(f"eager itself is {record.status} at {case.label}: {record.reason}")
    for specimen in here:
        if specimen.task == "audit":
            tell(specimen.name)
            yield _audited(specimen, device)
    for specimen in specimens:
        if specimen not in here:
            yield Catch(specimen, reason=NEEDS_GPU, ran=False)


def _audited(specimen: Specimen, device: torch.device) -> Catch:
    (cell,) = matrix.audit([specimen.implementation], [specimen.scope], device, only=specimen.caught_by)
    if cell.verdict is CellStatus.NOT_RUN:
        return Catch(specimen, reason=cell.reason, ran=False)
    return Catch(specimen, (cell.check,) if cell.verdict is CellStatus.FAIL else (), cell.reason)
