import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from specimens import small_case
from torch import Tensor

from swiglu_bench.check import admission
from swiglu_bench.check.admission import admit
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.judge import make_judge
from swiglu_bench.implementations import pytorch
from swiglu_bench.rows.record import FAULTS
from swiglu_bench.selftest.specimen import glu
from swiglu_bench.spec.cases import PLAIN, VARIANTS, Dtype, Extras, Mode, Scope
from swiglu_bench.spec.implementation import Implementation, Step, implementation
from swiglu_bench.spec.problem import Problem


def declared(build: Callable[[Problem], Step], scope: Scope = Scope.GLU, **fields: Any) -> Implementation:
    return implementation("mine", scopes=[scope], description="d", **fields)(build)


def faults(one: Implementation, problem: Problem, **how: bool) -> dict[str, str]:
    """What it fails, by tensor."""
    judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
    return {check.tensor: check.check for check in admit(one, problem, judges, **how).checks if not check.ok}


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("build", [pytorch.eager.build, glu], ids=["eager", "the specimens' own"])
def test_what_is_right_passes(build: Callable[[Problem], Step], dtype: Dtype, mode: Mode) -> None:
    problem = make_problem(small_case(dtype=dtype, mode=mode), "cpu")
    assert faults(declared(build), problem, thorough=True, distribution=True) == {}


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("extras", [PLAIN, Extras(bias=True), Extras(packed=True), Extras(limit=9.0)], ids=str)
def test_what_is_offered_is_kept(scope: Scope, extras: Extras) -> None:
    one = pytorch.eager_packed if extras.packed else pytorch.eager
    if scope not in one.scopes:
        pytest.skip("it has no such scope")
    problem = make_problem(small_case(scope=scope), "cpu", extras)
    assert faults(one, problem) == {}


def test_each_tensor_has_one_verdict_the_worst() -> None:
    problem = make_problem(small_case(), "cpu")
    judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
    checks = admit(pytorch.eager, problem, judges, thorough=True, distribution=True).checks
    assert [check.tensor for check in checks] == ["output (inference)", "output", "x", "w_gate", "w_up"]
    each = [judges[variant].eager["output"].relative for variant in range(VARIANTS)]
    assert checks[1].error == pytest.approx(max(each), rel=0.3)
    assert all(check.median_error is not None and len(check.worst_index) == 2 for check in checks)


class InPlace(torch.autograd.Function):
    """Its gradients take the place of its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = (value.detach() for value in ctx.saved_tensors)
        d_up = dz * torch.nn.functional.silu(gate)
        gate.copy_(torch.ops.aten.silu_backward(dz * up, gate))
        return gate, up.copy_(d_up)


@pytest.mark.parametrize("declares", [True, False])
def test_only_what_it_declares_may_be_overwritten(declares: bool) -> None:
    overwrites = ("gate", "up") if declares else ()
    one = declared(lambda problem: Step(InPlace.apply), Scope.ACTIVATION, overwrites=overwrites)
    problem = make_problem(small_case(scope=Scope.ACTIVATION), "cpu")
    expected = {} if declares else {"gate": "aliasing", "up": "aliasing", "conduct": "inputs unchanged"}
    assert faults(one, problem) == expected


def test_changed_weights_are_drawn_again_for_those_who_come_after() -> None:
    def build(problem: Problem) -> Step:
        step = pytorch.eager.build(problem)

        def forward(x: Tensor) -> Tensor:
            out = step.forward(x)
            problem.weights["w_up"].data.zero_()
            return out

        return Step(forward)

    problem = make_problem(small_case(), "cpu")
    assert faults(declared(build), problem)["conduct"] == "inputs unchanged"
    assert faults(pytorch.eager, problem) == {}


def test_a_build_cannot_know_the_inputs() -> None:
    seen: list[Problem] = []

    def build(problem: Problem) -> Step:
        seen.append(problem)
        return pytorch.eager.build(problem)

    assert faults(declared(build), make_problem(small_case(), "cpu")) == {}
    assert all(problem.activations == () and not problem.desk for problem in seen)


def test_the_names_of_checks_are_all_explained() -> None:
    assert all(name == name.lower() and text for name, text in FAULTS.items())


# What exists on a GPU only, with stand-ins for CUDA's part


class FakeGraph:
    """Runs the call again at each replay, and leaves what it yields where the recorded call's result is."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self.recording = True
        self.result = call()
        self.recording = False
        self._call = call

    def replay(self) -> None:
        self.result.copy_(self._call())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    made: list[FakeGraph] = []

    def capture(call: Callable[[], Tensor], device: torch.device) -> FakeGraph:
        made.append(FakeGraph(call))
        return made[-1]

    monkeypatch.setattr(admission, "capture", capture)
    monkeypatch.setattr(admission, "_cuda_synchronize", lambda device: None)
    return made


def test_a_graph_is_replayed_on_other_inputs(graphs: list[FakeGraph]) -> None:
    problem = make_problem(small_case(), "cpu")
    judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
    assert admission.replayed(Built(pytorch.eager, problem), judges) == []
    assert len(graphs) == 1


def test_a_graph_without_the_work_is_found(graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(small_case(), "cpu")
    judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
    for replay, reason in ((lambda graph: None, "NaN"), (lambda graph: graph.result.fill_(1.0), "relative error")):
        monkeypatch.setattr(FakeGraph, "replay", replay)
        failed = admission.replayed(Built(pytorch.eager, problem), judges)
        assert len(failed) == VARIANTS
        assert all(check.tensor == "output (CUDA graph)" and reason in check.reason for check in failed)


class FakeEvent:
    """Notes the wall clock; the device needs `late_s` more until it has reached it."""

    late_s = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        time.sleep(self.late_s)


@pytest.mark.parametrize(
    ("late_s", "after_s", "words"),
    [(0.0, 0.0, ""), (0.0, 0.02, "the device worked on for 2"), (0.025, 0.0, "the wall clock saw 2")],
)
def test_work_behind_the_clock_s_back_is_found(
    late_s: float, after_s: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEvent, "late_s", late_s)
    monkeypatch.setattr(admission, "_cuda_event", FakeEvent)
    monkeypatch.setattr(admission, "_elapsed_ms", lambda start, end: (end.at - start.at) * 1e3)
    monkeypatch.setattr(admission, "_cuda_synchronize", lambda device: time.sleep(after_s))
    problem = make_problem(small_case(), "cpu")
    judges = [make_judge(problem, variant) for variant in range(VARIANTS)]
    watch = admission._Watch(Built(pytorch.eager, problem), judges, distribution=False)
    watch._on_gpu = True
    told = watch._tardiness()
    assert told.startswith(words) if words else not told
