"""All ranks as one court: every rank runs the same code, and what each finds is merged.

A time is that of the slowest rank, a verdict that of the worst. A contender's part is that of any contender's process
(`Workbench`), but all share a process here, with the judge.
"""

import dataclasses
import gc
import logging
import os
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from swiglu_bench.cases import registry
from swiglu_bench.cases.cases import Mode
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Desk, Draw, sizes, torch_dtype
from swiglu_bench.check.results import GlobalState, Letterbox
from swiglu_bench.contenders import experts, pytorch, split
from swiglu_bench.machine import machine
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.resources import measure_memory
from swiglu_bench.rows.record import Record
from swiglu_bench.tasks.tp import ALONE, LOCAL, SINGLE, Collective, SplitCase, Splitting, bus_bytes, key
from swiglu_bench.tasks.tp.judge import OF_TOKENS, PartOfTokens, RankJudge, gather_into, said
from swiglu_bench.worker import policy
from swiglu_bench.worker.admission import Drawn
from swiglu_bench.worker.child import Contender
from swiglu_bench.worker.court import CaseTask, Court
from swiglu_bench.worker.judge_bench import JudgeBench
from swiglu_bench.worker.places import Work
from swiglu_bench.worker.policy import Settings, Tell
from swiglu_bench.worker.ranks import OWN_S, Group
from swiglu_bench.worker.turns import FULL_SHARE, RoundJudge
from swiglu_bench.worker.workbench import Workbench, forget_compiled
from swiglu_bench.worker.worker import BuildReport, CallReport, FaultReport, MemoryReport, Report, SampleReport

R = TypeVar("R", bound=Report)
LARGE_BYTES = {"cuda": 2**29, "cpu": 2**22}
"""Of the tensor whose collectives are the ceiling: far beyond what latency matters to."""
WARMUPS, SAMPLES = 3, 9
WHOLE = "One GPU runs the case whole."
"""How the reason of a row begins whose case is too large for that."""


class RankCourt:
    """All ranks and their judges, as this rank has them; to a task, a Court."""

    def __init__(self, group: Group, work: Work, skipped: Mapping[str, str]) -> None:
        """`skipped` has the implementations that take no part, and why."""
        self.group, self.skipped = group, skipped
        self.settings: Settings = dataclasses.replace(work.settings, device=group.device)
        self.clock, self.machine = group.clock(), machine.describe(group.device)
        self.machines: list[dict[str, Any]] = group.gather(self.machine.as_dict())
        """Of all ranks."""
        self.known = {declared.name: registry.find(declared) for declared in work.implementations}
        alone = {ALONE.get(name) for name in self.known}
        for stand_in in (pytorch.compiled, experts.grouped_compiled):
            if stand_in.name in alone:
                self.known.setdefault(stand_in.name, stand_in)
        self.tell: Tell = lambda doing, share: None
        """Hears what is being done and which share of the case is done."""
        self.tell_whose: Callable[[str], object] = lambda name: None
        """Hears whose code runs next; "" for nobody's."""
        self._whose = ""
        self._ceilings: dict[Any, float | None] = {}
        self._bare: dict[bool, Callable[[], None]] = {}

    @classmethod
    def join(cls, work: Work, skipped: Mapping[str, str], processes: int = 0) -> Self:
        """Meet the others where the environment says, and load implementations.

        So many `processes` were started on this machine and share its CPU; 0: by torchrun, which has seen to that.
        """
        quiet()
        device = work.settings.device
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // max(1, processes)))
        return cls(Group.join(device, work.timeout_s, watched=processes > 0), work, skipped)

    @property
    def judge(self) -> JudgeBench:
        """All ranks' judges of the case."""
        return cast(JudgeBench, self.judges)

    def run(self, task: CaseTask, case: SplitCase, implementations: Sequence[Implementation]) -> Iterator[Record]:
        """The rows of a task at a case, the same on all ranks. Raises GroupLost."""
        self.case = case
        yield from task(cast(Court, self), case, implementations)
        self._bare.clear()
        self.__dict__.pop("judges", None)
        forget_compiled()
        gc.collect()
        torch.cuda.empty_cache()

    def on_all(self, action: Callable[[], Any], whose: str = "") -> list[Any]:
        """What all ranks return; raises ContenderFailed and GroupLost. It is told before `whose` code runs."""
        if whose != self._whose:
            self.tell_whose(whose)
            self._whose = whose
        return self.group.together(action, self.group.limit_s if whose else max(self.group.limit_s, OWN_S))

    def begin(self) -> Drawn:
        """Take up the case: what is drawn for it, the same on all ranks."""
        drawn = self.group.first(Drawn.new())

        def take_up() -> None:
            self.judges = RankJudge(self.group, self.case, drawn, self.on_all)

        self.on_all(take_up)
        return drawn

    def end(self) -> None:
        """Leave the others."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def why_not(self, case: SplitCase, name: str, way: bool) -> str:
        """Why an implementation takes no part, in one sentence, or "" if it does; of this rank."""
        known, device = self.known[name], self.group.device
        if name in self.skipped:
            return self.skipped[name]
        if large := policy.too_large(self.settings, case, machine.free_memory_bytes(device)):
            return f"{WHOLE} {large}"
        if case.mode is not Mode.FORWARD and known.trains != "everything":
            return "It yields no weight gradients, which a step has."
        refusal = split.why_not(known, device.type, way, case.ranks)
        return refusal or policy.inapplicable(self.settings, self.machine, case.local, known) or ""

    def take_collectives(self, way: bool, number: int, lead_us: float) -> Sample:
        """Time the bare collectives of a call of the case once."""

        def take() -> Sample:
            if way not in self._bare:
                elements = self.case.tensor_bytes // self.case.dtype.bytes
                self._bare[way] = bare(self.group, self.case.collectives(way), elements, torch_dtype(self.case))
            return self.clock.sample(self._bare[way], lead_us)

        samples = self.on_all(take)
        return dataclasses.replace(samples[0], **_slowest(samples))

    def ceiling_gbps(self, way: bool) -> float | None:
        """Bus bandwidth of large collectives of the same kinds in 10^9 bytes per second, measured once; None alone."""
        if self.group.size == 1:
            return None
        these, dtype = dataclasses.replace(self.case, mode=Mode.FORWARD).collectives(way), torch_dtype(self.case)

        def gbps() -> float:
            size_bytes = LARGE_BYTES[self.group.device.type]
            call = bare(self.group, these, size_bytes // dtype.itemsize, dtype)
            for _ in range(WARMUPS):
                call()
            ms = statistics.median(self.clock.sample(call, 100.0).ms for _ in range(SAMPLES))
            return bus_bytes(these, size_bytes, self.group.size) / ms / 1e6

        if (these, dtype) not in self._ceilings:
            self._ceilings[these, dtype] = min(self.on_all(gbps))
        return self._ceilings[these, dtype]


class RankContender(Workbench, Contender):
    """One implementation on all ranks, run one way: a Contender of `worker`, and its Workbench on this rank.

    It is called `alias` where it is one.
    """

    def __init__(self, court: RankCourt, implementation: Implementation, kind: Splitting, alias: str = "") -> None:
        super().__init__(court.settings, implementation, GlobalState())
        self.name, self.implementation, self.kind = key(alias or implementation.name, kind), implementation, kind
        self._court, self.clock = court, court.clock

    def ask(self, kind: type[R], method: str, *arguments: Any) -> R:
        """As Contender has it."""
        if method == "deliver_weights":  # each rank's judge has them
            return cast(R, CallReport(delivered=[], faults={}, conduct={}))

        def answer() -> Any:
            try:  # the case has begun
                return self._take_up() if method == "build" else getattr(self, method)(*arguments)
            finally:
                self.conduct()  # puts back what is not its own

        return cast(R, merged(self._court.on_all(answer, self.implementation.name)))

    def tell(self, method: str, *arguments: Any) -> str:
        """As Contender has it."""
        if method != "open_letterbox":  # each rank's judge has its own
            self.ask(Report, method, *arguments)
        return ""

    def end(self) -> None:
        """It ends with the case."""

    def _take_up(self) -> BuildReport:
        """Build: split one way, without collectives, or whole."""
        group, judges, kind = self._court.group, self._court.judges, self.kind
        known, whole, self._problem = self._court.known[self.implementation.name], judges.whole, judges.split.problem
        desk, tokens, by_tokens = Desk(whole), whole.case.tokens, kind is True
        if kind == SINGLE:
            self._problem = whole
        elif kind != LOCAL:
            known = split.split(known, group.mesh, whole, bool(kind))
        elif whole.case.shape.experts:
            by_tokens = known.name not in experts.FUSED
            known = dataclasses.replace(known, build=partial(split.without_exchanges, known=known, rank=group.rank))
        if by_tokens:
            desk, tokens = PartOfTokens(whole, group), tokens // group.size
        self._built = Built(known, self._problem)
        self._built.desk = desk
        own = {name: value.to_local() if hasattr(value, "to_local") else value
               for name, value in self._built.parameters.items()}  # fmt: skip
        self._weights = own | self._problem.parameters
        found = sizes(self._problem.case)
        found["output"] = found["x"]
        found |= {name: (tokens, found[name][1]) for name in OF_TOKENS}
        wanted = {name: found[name] for name in ("output", *self._built.gradients)}
        self._boxes["results"] = Letterbox.here(wanted, torch_dtype(whole.case), group.device)
        judges.seats[self.name] = kind, self._boxes["results"].tensors
        return BuildReport(gradients=list(self._built.gradients))

    def memory(self, draw: Draw) -> MemoryReport:
        """Bytes of one call of the case's mode."""
        call = self._built.call(self._problem.case.mode, draw, upstream_first=True)
        call.begin()
        call.prepare()

        def run() -> Tensor:
            call.run(nullcontext)
            return cast(Tensor, call.results()["output"])

        return MemoryReport(**dataclasses.asdict(measure_memory(self._problem.device, run, None)))

    def check_fused(self, draw: Draw) -> None:
        """Raise NothingFused unless the call, compiled before, runs a product fused with a collective."""
        split.check_fused(self._built.call(self._problem.case.mode, draw, upstream_first=True))


class RankRoundJudge(RoundJudge):
    """Draws alike on all ranks."""

    court: RankCourt

    def draw(self, number: int, name: str) -> Draw:
        """As rank 0 draws."""
        return self.court.group.first(super().draw(number, name))

    def judge(self) -> dict[str, Exception]:
        """Whether a round is judged in full, is rank 0's lot too."""
        self._full_share = float(self.court.group.first(random.SystemRandom().random() < FULL_SHARE))
        return super().judge()


def merged(reports: Sequence[Any]) -> Any:
    """One report of all ranks', which are of one kind, or None."""
    first = reports[0]
    if first is None:
        return None
    if isinstance(first, MemoryReport):
        return max(reports, key=lambda report: report.peak_bytes)
    found: dict[str, Any] = {}
    if isinstance(first, CallReport | SampleReport):
        reasons = [{name: fault.reason for name, fault in report.faults.items()} for report in reports]
        faults = {name: fault.check for report in reports for name, fault in report.faults.items()}
        found["faults"] = {n: FaultReport(check=check, reason=said(reasons, n)) for n, check in faults.items()}
        found["delivered"] = [name for name in first.delivered if all(name in report.delivered for report in reports)]
    if isinstance(first, SampleReport):
        found |= _slowest(reports)
    elif isinstance(first, CallReport):
        conducts = [report.conduct for report in reports]
        found["conduct"] = {name: said(conducts, name) for conduct in conducts for name in conduct}
    return dataclasses.replace(first, **found)


def _slowest(samples: Sequence[Any]) -> dict[str, Any]:
    """The figures of a sample that all ranks have taken together."""
    found = {name: max(getattr(sample, name) for sample in samples) for name in ("ms", "host_us", "queue_us")}
    return found | {"queue_filled": all(sample.queue_filled for sample in samples), "mhz": None}


def bare(group: Group, these: tuple[Collective, ...], elements: int, dtype: torch.dtype) -> Callable[[], None]:
    """A call that runs these, one after the other, on tensors of so many elements."""
    elements -= elements % group.size**2
    whole = torch.zeros(elements, dtype=dtype, device=group.device)  # sums of zeros stay finite however often
    part = torch.zeros(elements // group.size, dtype=dtype, device=group.device)
    from_all = torch.zeros_like(part)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    calls: dict[Collective, Callable[[], object]] = {
        Collective.ALL_REDUCE: lambda: dist.all_reduce(whole),
        Collective.ALL_GATHER: lambda: gather_into(whole, part),
        Collective.REDUCE_SCATTER: lambda: reduce_scatter(part, whole),
        Collective.ALL_TO_ALL: lambda: dist.all_to_all_single(from_all, part),
    }

    def run() -> None:
        for kind in these:
            calls[kind]()

    return run


def quiet() -> None:
    """Keep what torch says of its own interfaces from every rank's screen."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")
    warnings.filterwarnings("ignore", message=".*To construct DTensor from torch.Tensor.*")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
