"""What an implementation has to pass before it gets a time: built, run on every variant, and judged.

The variants are laid out at the same addresses, and all but the first are drawn from a seed that nobody knew, so that
what is remembered, by address or by value, is wrong. Memory is poisoned before each run, and the GPU is kept busy while
a run is queued, so that work outside the current stream reads old inputs or comes too late. `record.FAULTS` lists the
checks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench.check.built import Built, Produced
from swiglu_bench.check.inputs import lay_out, restore_parameters
from swiglu_bench.check.judge import Judge
from swiglu_bench.check.tolerance import fingerprint, same_bits
from swiglu_bench.measure.graph import capture
from swiglu_bench.measure.replaced import put_back
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.spec.cases import ACTIVATIONS, VARIANTS, Mode
from swiglu_bench.spec.implementation import Implementation
from swiglu_bench.spec.problem import Problem

HOLD_CYCLES = 10_000_000
"""How long the GPU is kept from its queue: some 5 ms, more than the host needs to queue a run."""
VALUES = ("relative error", "largest element")
TARDY_MS = 0.2
"""By which work may outlast the current stream's last event, besides half its time: what a synchronisation takes."""

_perf_counter, _cuda_synchronize, _cuda_event = time.perf_counter, torch.cuda.synchronize, torch.cuda.Event
_elapsed_ms, _sleep = torch.cuda.Event.elapsed_time, getattr(torch.cuda, "_sleep", None)


@dataclass(frozen=True)
class Admission:
    """A built implementation, the verdicts on it, and what building and the first call took."""

    built: Built
    checks: tuple[TensorCheck, ...]
    first_call_ms: float


def admit(
    implementation: Implementation,
    problem: Problem,
    judges: Sequence[Judge],
    *,
    thorough: bool = False,
    distribution: bool = False,
) -> Admission:
    """Build an implementation and check it; raises what it raises.

    `thorough` adds what timing has no use for: inference beside training, and a CUDA graph with changed inputs.
    `distribution` adds to each verdict how the errors of the elements are distributed.
    """
    put_back()
    judges[0].poison()
    began = _perf_counter()
    built = Built(implementation, problem)
    watch = _Watch(built, judges, distribution)
    infers = problem.case.mode is Mode.FORWARD
    checks = watch.run(built.infer if infers else built.train, began=began)
    if thorough:
        if not infers:
            checks = (*watch.run(built.infer, "{} (inference)"), *checks)
        checks += watch.replay()
    checks += watch.conduct()
    return Admission(built, checks, watch.first_call_ms)


class _Watch:
    """An implementation under watch: each of its runs is judged, and what it must not touch is compared afterwards."""

    def __init__(self, built: Built, judges: Sequence[Judge], distribution: bool) -> None:
        self.built = built
        self.problem = built.problem
        self.judges = judges
        self.distribution = distribution
        self.first_call_ms = 0.0
        self._on_gpu = self.problem.device.type == "cuda"
        self._constants = built.parameters | self.problem.parameters
        self._before = {name: fingerprint(value) for name, value in self._constants.items()}
        self._changed: dict[str, str] = {}

    def run(
        self, call: Callable[[int], Produced], label: str = "{}", began: float | None = None
    ) -> tuple[TensorCheck, ...]:
        """Every variant in turn; per tensor the worst verdict."""
        infers = call == self.built.infer
        worst: dict[str, TensorCheck] = {}
        earlier: tuple[Produced, dict[str, Tensor]] = ({}, {})
        for variant in range(VARIANTS):
            self.judges[variant].poison()
            self._hold()
            produced = call(variant)
            marks = _marks(produced)  # queued right behind the work, read when everything is done
            self._synchronize()
            if began is not None and variant == 0:
                self.first_call_ms = (_perf_counter() - began) * 1e3
            self._note_changed_inputs(variant, infers)
            others = self._must_not_share(infers)
            checks = self.judges[variant].judge(produced, label, others, self.distribution)
            late = _changed(produced, marks)
            overwritten = {name for name in _changed(*earlier) if not self._lies_on_desk(earlier[0][name])}
            for name, check in zip(produced, checks, strict=True):
                if name in late:
                    check = _failed(check, "complete on return", "was not complete when the call's stream was")
                elif name in overwritten and check.ok:
                    check = _failed(check, "kept", "was changed by the next call")
                elif check.check in VALUES and variant and worst[name].ok:
                    where = f"on new inputs at the same addresses (seed {self.problem.unannounced}), {check.reason}"
                    check = _failed(check, "new inputs", where)
                if name not in worst or (worst[name].ok and (not check.ok or check.used > worst[name].used)):
                    worst[name] = check
            earlier = (produced, marks)
        return tuple(worst.values())

    def conduct(self) -> tuple[TensorCheck, ...]:
        """Failures that no result shows: changed inputs and weights, replaced clocks, work behind the clock's back."""
        found = dict(self._changed)
        after = {name: fingerprint(value) for name, value in self._constants.items()}
        torn = [name for name, mark in self._before.items() if not torch.equal(mark, after[name])]
        if torn:
            found.setdefault("inputs unchanged", f"changed its parameters {', '.join(torn)}")
            restore_parameters(self.problem)
        replaced = put_back()
        if replaced:
            found["own clock"] = f"replaced {', '.join(replaced)}"
        tardy = self._tardiness() if self._on_gpu else ""
        if tardy:
            found["wall clock"] = tardy
        return tuple(failure(check, reason) for check, reason in found.items())

    def replay(self) -> tuple[TensorCheck, ...]:
        """On a GPU: the forward as a CUDA graph, recorded on one variant and replayed on another; empty if right.

        What cannot be recorded is no fault here; `audit` says so.
        """
        if not self._on_gpu:
            return ()
        try:
            wrong = replayed(self.built, self.judges)
        except Exception:
            self._synchronize()
            return ()
        return tuple(_failed(check, "graph replay", f"replayed on changed inputs, {check.reason}") for check in wrong)

    def _note_changed_inputs(self, variant: int, infers: bool) -> None:
        problem = self.problem
        names = (*ACTIVATIONS[problem.case.scope], "upstream")
        given = (*problem.activations[variant], problem.upstream[variant])
        allowed = frozenset() if infers else self.built.implementation.overwrites
        spoilt = [
            name
            for name, there, value in zip(names, problem.desk, given, strict=True)
            if name not in allowed and not same_bits(there, value)
        ]
        if spoilt:
            self._changed["inputs unchanged"] = f"changed its inputs {', '.join(spoilt)}"

    def _must_not_share(self, infers: bool) -> list[Tensor]:
        names = (*ACTIVATIONS[self.problem.case.scope], "upstream")
        allowed = frozenset() if infers else self.built.implementation.overwrites
        desk = [value for name, value in zip(names, self.problem.desk, strict=True) if name not in allowed]
        return [*desk, *self._constants.values()]

    def _lies_on_desk(self, value: Tensor | None) -> bool:
        """Whether a result shares memory with the inputs, which the next run overwrites; only what is declared may."""
        places = {place.untyped_storage().data_ptr() for place in self.problem.desk}
        return value is not None and value.untyped_storage().data_ptr() in places

    def _hold(self) -> None:
        if self._on_gpu and _sleep is not None:
            _sleep(HOLD_CYCLES)

    def _synchronize(self) -> None:
        if self._on_gpu:
            _cuda_synchronize(self.problem.device)

    def _tardiness(self) -> str:
        """Three runs by two events of our own and by the wall: the least disagreement, or "" where they agree."""
        mode = self.problem.case.mode
        after_ms, missing_ms, event_ms = [], [], []
        for number in range(3):
            call = self.built.prepare(mode, number % VARIANTS)
            self._synchronize()
            start, end = _cuda_event(enable_timing=True), _cuda_event(enable_timing=True)
            began = _perf_counter()
            start.record()
            call()
            queued = _perf_counter()
            end.record()
            end.synchronize()
            ended = _perf_counter()
            self._synchronize()
            after_ms.append((_perf_counter() - ended) * 1e3)
            event_ms.append(_elapsed_ms(start, end))
            missing_ms.append((ended - began) * 1e3 - (queued - began) * 1e3 - event_ms[-1])
        allowed = TARDY_MS + 0.5 * min(event_ms)
        if min(after_ms) > allowed:
            return f"the device worked on for {min(after_ms):.2f} ms after the call's stream had ended"
        if min(missing_ms) > allowed:
            return f"the wall clock saw {min(missing_ms):.2f} ms more than the events' {min(event_ms):.3f} ms"
        return ""


def replayed(built: Built, judges: Sequence[Judge]) -> list[TensorCheck]:
    """Record inference on variant 0 as a CUDA graph, replay it on the others: the verdicts that fail.

    Raises what the implementation or CUDA has against being recorded.
    """
    problem = built.problem
    inputs, _ = lay_out(problem, 0)

    def call() -> Tensor:
        with torch.no_grad():
            return built.step.forward(*inputs)

    graph = capture(call, problem.device)
    failed: list[TensorCheck] = []
    for variant in (*range(1, VARIANTS), 0):
        lay_out(problem, variant)
        graph.result.fill_(torch.nan)
        graph.replay()
        _cuda_synchronize(problem.device)
        (check,) = judges[variant].judge({"output": graph.result}, "{} (CUDA graph)")
        failed += [] if check.ok else [check]
    return failed


def failure(check: str, reason: str) -> TensorCheck:
    """A verdict that belongs to no tensor."""
    return TensorCheck("conduct", False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, reason, check)


def _failed(check: TensorCheck, name: str, reason: str) -> TensorCheck:
    return dataclasses.replace(check, ok=False, check=name, reason=reason)


def _changed(produced: Produced, marks: dict[str, Tensor]) -> set[str]:
    """Names of the tensors that are not what they were when they were marked."""
    return {name for name, mark in _marks(produced).items() if not torch.equal(mark, marks[name])}


def _marks(produced: Produced) -> dict[str, Tensor]:
    return {name: fingerprint(value) for name, value in produced.items() if type(value) is Tensor}
