"""What every rank does: the cases of a plan, one after the other, and the rows of those that take no part."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.machine import machine
from swiglu_bench.machine.machine import Machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.ranks import Row
from swiglu_bench.rows.record import Status
from swiglu_bench.spec import costs
from swiglu_bench.spec.cases import VARIANTS, Case, Mode
from swiglu_bench.spec.errors import one_line
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.tp import collectives, contenders, traffic
from swiglu_bench.tp.case import CaseRun, Sink
from swiglu_bench.tp.group import Group, GroupClock, RankFailed
from swiglu_bench.tp.plan import ASYNC, RankTask, local
from swiglu_bench.tp.truth import NoReference


def default_rule(budget_s: float) -> Rule:
    """Few rounds suffice: a call of many ranks is long."""
    return Rule(warmup_rounds=2, min_rounds=10, max_rounds=200, min_s=0.5, budget_s=budget_s)


def blank(
    run_id: str, case: Case, ranks: int, way: bool, name: str, machines: Sequence[Machine], timestamp: str
) -> Row:
    """The row of an implementation before anything was measured. `machines`: of the ranks; the first stands for all."""
    this, hosts = machines[0], list(dict.fromkeys(one.host for one in machines))
    return Row(
        run_id, case.shape.name, case.shape.hidden, case.shape.intermediate, case.tokens, case.dtype.value,
        case.mode.value, case.seed, ranks, way, name,
        hosts=len(hosts), host=" ".join(hosts), device=this.device, driver=this.driver, cuda=this.cuda,
        torch=this.torch, triton=this.triton, version=this.version, timestamp=timestamp,
    )  # fmt: skip


class Session:
    """The cases of a plan on one group; `known` has the implementations by name."""

    def __init__(self, group: Group, plan: RankTask, known: Mapping[str, Implementation], sink: Sink) -> None:
        self.group, self.plan, self.known, self.sink = group, plan, known, sink
        self.clock = GroupClock(group)
        self.machine = machine.describe(group.device)
        self.machines: list[Machine] = group.gather(self.machine)
        """Of all ranks."""
        self._ceilings: dict[Any, float | None] = {}

    def about(self) -> dict[str, Any]:
        """The machines of all ranks, for run.json."""
        hosts = {one.host: one.as_dict() for one in reversed(self.machines)}
        ranks = [{"rank": rank, "host": one.host, "device": one.device} for rank, one in enumerate(self.machines)]
        return {"ranks": ranks, "hosts": hosts}

    def run(self) -> None:
        """All cases, one after the other."""
        for case in self.plan.cases:
            rows = self._case(case)
            self.sink.mark("")
            self.sink.rows(rows)
            torch._dynamo.reset()
            gc.collect()
            if self.group.device.type == "cuda":
                torch.cuda.empty_cache()

    def _case(self, case: Case) -> list[Row]:
        size = self.group.size
        rows = {
            (name, way): blank(self.plan.run_id, case, size, way, name, self.machines, machine.now())
            for name in self.plan.names
            for way in self.plan.ways
        }
        for reasons in self.group.gather({one: self._why_not(self.known[one[0]], case, one[1]) for one in rows}):
            for one, reason in reasons.items():
                if reason and rows[one].status is Status.OK:
                    rows[one].status, rows[one].reason = Status.SKIPPED, reason
        able = {one: row for one, row in rows.items() if row.status is Status.OK}
        if able:
            try:
                run = CaseRun(self.group, self.clock, self.known, self.sink, case, able)
                run.run(default_rule(self.plan.budget_s), lambda way: self._ceiling_gbps(way, torch_dtype(case)))
            except (NoReference, RankFailed) as error:
                for row in able.values():
                    row.status, row.reason = Status.ERROR, f"{one_line(error).partition(': ')[2] or error}"
        return list(rows.values())

    def _why_not(self, known: Implementation, case: Case, way: bool) -> str | None:
        """Why an implementation takes no part, in one sentence, or None if it does."""
        device, capability = self.group.device.type, self.machine.compute_capability
        needed = costs.needed_bytes(case, VARIANTS)
        free = machine.free_memory_bytes(self.group.device)
        if needed > free:
            return (
                f"One GPU, which runs the case whole, needs about {needed / 2**30:.1f} GiB and has {free / 2**30:.1f}."
            )
        if case.mode is not Mode.FORWARD and known.trains != "everything":
            return "It yields no weight gradients, which a step has."
        return (
            self.plan.skipped.get(known.name)
            or (contenders.why_no_async(device, way) if known.name == ASYNC else None)
            or known.refuses(local(case, self.group.size))
            or known.unavailable(device, False, capability)
        )

    def _ceiling_gbps(self, way: bool, dtype: torch.dtype) -> float | None:
        """Bus bandwidth of large collectives of the same kinds; measured once."""
        kinds = traffic.kinds(Mode.FORWARD, way)
        if (kinds, dtype) not in self._ceilings:
            self._ceilings[kinds, dtype] = collectives.ceiling_gbps(self.group, self.clock, kinds, dtype)
        return self._ceilings[kinds, dtype]
