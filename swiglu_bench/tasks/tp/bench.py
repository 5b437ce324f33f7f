"""What one rank does: it builds, calls and judges contenders together with the others, as all are asked to.

A contender's part is that of any contender's process (`Workbench`), but all share a process here, with the judge.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swiglu_bench.cases import registry
from swiglu_bench.cases.cases import Case, Mode
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.built import Built
from swiglu_bench.check.conduct import GlobalState
from swiglu_bench.check.inputs import Desk, Draw, make_problem, sizes, torch_dtype
from swiglu_bench.check.results import Fault, Letterbox, same_bits
from swiglu_bench.machine import machine
from swiglu_bench.measure.clock import Clock
from swiglu_bench.measure.resources import measure_memory
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.tasks.tp import collectives, contenders, traffic
from swiglu_bench.tasks.tp.experts import without_exchanges
from swiglu_bench.tasks.tp.group import Group
from swiglu_bench.tasks.tp.judge import OF_TOKENS, SplitJudge
from swiglu_bench.tasks.tp.plan import ASYNC, LOCAL, SINGLE, Kind, local
from swiglu_bench.worker import policy
from swiglu_bench.worker.admission import Drawn
from swiglu_bench.worker.reports import BuildReport, MemoryReport, Report, SampleReport
from swiglu_bench.worker.settings import Settings
from swiglu_bench.worker.workbench import Workbench, forget_compiled

RANK = f"{__name__}:RankBench"
"""The role of a rank's process."""


class Seat(Workbench):
    """One contender in a rank's process."""

    def __init__(self, settings: Settings, implementation: Implementation, state: GlobalState, clock: Clock) -> None:
        super().__init__(settings, implementation, state)
        self._clock = clock

    def take_up(self, problem: Problem, desk: Desk, tokens: int) -> BuildReport:
        """Build for a problem; its inputs come from a desk, and it hands over so many tokens."""
        self._problem = problem
        self._built = Built(self._implementation, problem)
        self._built.desk = desk
        own = {name: value.to_local() if hasattr(value, "to_local") else value
               for name, value in self._built.parameters.items()}  # fmt: skip
        self._weights = own | problem.parameters
        found = sizes(problem.case)
        found["output"] = found["x"]
        found |= {name: (tokens, found[name][1]) for name in OF_TOKENS}
        wanted = {name: found[name] for name in ("output", *self._built.gradients)}
        self._boxes["results"] = Letterbox.here(wanted, torch_dtype(problem.case), problem.device)
        return BuildReport(gradients=list(self._built.gradients))

    @property
    def results(self) -> Mapping[str, Tensor]:
        """What was handed over last."""
        return self._boxes["results"].tensors

    def memory(self, draw: Draw) -> MemoryReport:
        """Bytes of one call of the case's mode."""
        call = self._built.call(self._problem.case.mode, draw, upstream_first=True)
        call.begin()
        call.prepare()

        def run() -> Tensor:
            call.run(nullcontext)
            output: Tensor = call.results()["output"]
            return output

        use = measure_memory(self._problem.device, run, None)
        return MemoryReport(saved_bytes=use.saved_bytes, peak_bytes=use.peak_bytes, kept_bytes=use.kept_bytes)

    def check_fused(self, draw: Draw) -> None:
        """Raise NothingFused unless the call, compiled before, runs a product fused with a collective."""
        contenders.check_fused(self._built.call(self._problem.case.mode, draw, upstream_first=True))


class RankBench:
    """The questions that all ranks answer together."""

    def __init__(self) -> None:
        self._ceilings: dict[Any, float | None] = {}
        self._seats: dict[str, tuple[Seat, Kind]] = {}
        self._bare: dict[bool, Callable[[], None]] = {}

    def join(
        self, settings: Settings, patience_s: float, declared: Sequence[Implementation], processes: int = 1
    ) -> None:
        """Meet the others where the environment says, as torchrun sets it, and load implementations.

        `processes` share this machine's CPU threads.
        """
        quiet()
        device = settings.device
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // processes))
        self.group = Group.join(device, patience_s)
        self.settings = dataclasses.replace(settings, device=device)
        self.clock, self.machine = self.group.clock(), machine.describe(device)
        self._known = {one.name: registry.find(one) for one in declared}

    def describe(self) -> dict[str, Any]:
        """This rank's machine."""
        return self.machine.as_dict()

    def meet(self) -> None:
        """Wait for the others."""
        self.group.meet()

    def why_not(self, case: Case, names: Sequence[str], ways: Sequence[bool]) -> list[str | None]:
        """For each of names x ways, why an implementation takes no part, in one sentence, or None if it does."""
        device, size = self.group.device, self.group.size
        large = policy.too_large(self.settings, case, machine.free_memory_bytes(device))

        def reason(known: Implementation, way: bool) -> str | None:
            if large:
                return f"One GPU runs the case whole. {large}"
            if case.shape.experts and known.backend == "inductor":
                return "A rank has a different number of rows in every call, and it is compiled for one."
            if case.mode is not Mode.FORWARD and known.trains != "everything":
                return "It yields no weight gradients, which a step has."
            refusal = contenders.why_no_async(device.type, way) if known.name == ASYNC else None
            return refusal or policy.inapplicable(self.settings, self.machine, local(case, size), known)

        return [reason(self._known[name], way) for name in names for way in ways]

    def begin_case(self, case: Case, drawn: Drawn) -> None:
        """Draw the weights, and compute the truth of the calls that all contenders are admitted by."""
        self.end_case()
        self._case, self._seed = case, drawn.weights
        self._whole = make_problem(case, self.group.device, seed=drawn.weights)
        self._judge = SplitJudge(self.group, self._whole, drawn.draws)

    def end_case(self) -> None:
        """Let go of the case."""
        self._seats.clear()
        self._bare.clear()
        for name in ("_judge", "_whole"):
            self.__dict__.pop(name, None)
        forget_compiled()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def build(self, key: str, name: str, kind: Kind) -> BuildReport:
        """Build an implementation, split one way, without collectives, or whole; it is called `key` from now on."""
        known, whole, part, tokens = self._known[name], self._whole, self._judge.problem, self._case.tokens
        desk, by_tokens = Desk(whole), kind is True
        if kind == SINGLE:
            part = whole
        elif kind != LOCAL:
            known = contenders.split(known, self.group, whole, bool(kind))
        elif whole.case.shape.experts:
            known = dataclasses.replace(known, build=partial(without_exchanges, known=known))
            by_tokens = True
        if by_tokens:
            desk, tokens = contenders.PartOfTokens(whole, self.group), tokens // self.group.size
        seat = Seat(self.settings, known, GlobalState(), self.clock)
        self._seats[key] = seat, kind
        try:
            return seat.take_up(part, desk, tokens)
        finally:
            seat.conduct()  # puts back what is not its own

    def ask(self, key: str, method: str, *arguments: Any) -> Report | None:
        """A question to one of the contenders."""
        seat = self._seats[key][0]
        try:
            found: Report | None = getattr(seat, method)(*arguments)
        finally:
            seat.conduct()
        return found

    def judge(
        self, key: str, draw: Draw, results: Mapping[str, Fault | None], label: str, distribution: bool
    ) -> list[dict[str, Any]]:
        """Verdicts on what all ranks' letterboxes have, and on what has a fault instead."""
        faults = {name: fault for name, fault in results.items() if fault}
        sound = self._whole_results(key, [name for name in results if name not in faults])
        produced = {name: sound.get(name) for name in results}
        if self._seats[key][1] == SINGLE:
            checks = self._judge.judge_alone(produced, draw, faults)
        else:
            checks = self._judge.judge(produced, draw, label=label, faults=faults, distribution=distribution)
            for name in self._judge.differing(sound):
                checks = tuple(_different(one) if one.tensor == name and one.ok else one for one in checks)
        return [dataclasses.asdict(one) for one in checks]

    def compare(self, draw: Draw, delivered: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Hold the results of a round against eager's on the same inputs: what is wrong, by contender."""
        wrong = self._judge.compare(self._case.mode, [draw])
        found = {}
        for key, names in delivered.items():
            results = self._whole_results(key, names)
            different = self._judge.differing(results)
            found[key] = wrong(results) or "; ".join(f"{name}: {COPIES}" for name in different)
        return {key: reason for key, reason in found.items() if reason}

    def changed_weights(self) -> list[str]:
        """Names of the weights that are not what they were when the case began; they are then put back."""
        fresh = make_problem(self._case, self.group.device, seed=self._seed)
        changed = set()
        for now, before in ((self._whole, fresh), (self._judge.problem, contenders.part_of(self.group, fresh))):
            for name, value in before.weights.items():
                if not same_bits(now.weights[name], value):
                    now.weights[name].detach().copy_(value)
                    changed.add(name)
        return sorted(changed)

    def sample_collectives(self, way: bool, lead_us: float) -> SampleReport:
        """Time the bare collectives of a call of the case once."""
        if way not in self._bare:
            elements = self._case.pairs * self._case.shape.hidden
            kinds = traffic.kinds(self._case.mode, way, self._case.scope)
            self._bare[way] = collectives.bare(self.group, kinds, elements, torch_dtype(self._case))
        taken = self.clock.sample(self._bare[way], lead_us)
        return SampleReport(
            ms=taken.ms, host_us=taken.host_us, queue_us=taken.queue_us, queue_filled=taken.queue_filled,
            delivered=[], faults={},
        )  # fmt: skip

    def ceiling_gbps(self, way: bool) -> float | None:
        """Bus bandwidth of large collectives of the same kinds; measured once."""
        key = kinds, dtype = traffic.kinds(Mode.FORWARD, way, self._case.scope), torch_dtype(self._case)
        if key not in self._ceilings:
            self._ceilings[key] = collectives.ceiling_gbps(self.group, self.clock, kinds, dtype)
        return self._ceilings[key]

    def _whole_results(self, key: str, names: Sequence[str]) -> dict[str, Tensor]:
        """What a contender has handed over, with all ranks' tokens."""
        seat, kind = self._seats[key]
        found = {name: seat.results[name].clone() for name in names}
        for name in OF_TOKENS if kind is True else ():
            if name in found:
                whole = found[name].new_empty(self._case.tokens, found[name].shape[1])
                collectives.gather_into(whole, found[name])
                found[name] = whole
        return found


COPIES = "the ranks' copies differ"


def _different(check: TensorCheck) -> TensorCheck:
    return dataclasses.replace(check, ok=False, reason=COPIES, check="relative error")


def quiet() -> None:
    """Keep what torch says of its own interfaces from every rank's screen."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")
    warnings.filterwarnings("ignore", message=".*To construct DTensor from torch.Tensor.*")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
