"""What an implementation passes before it gets a time, by the code of a sweep in this process."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged import admitting
from specimens import declared, small_case
from torch import Tensor

from swiglu_bench.cases.cases import PLAIN, Case, Dtype, Extras, Mode, Scope, Shape
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import usage
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem
from swiglu_bench.check.judge import REFERENCE, compute_truth
from swiglu_bench.check.results import Letterbox
from swiglu_bench.check.tolerance import tensor_error
from swiglu_bench.contenders import pytorch
from swiglu_bench.rows.record import FAULTS, TensorCheck
from swiglu_bench.tasks.selftest.run import SHAPES, SPECIMENS
from swiglu_bench.tasks.selftest.specimen import glu
from swiglu_bench.worker import admission
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.policy import Settings, Task
from swiglu_bench.worker.workbench import Workbench

CPU = torch.device("cpu")


def admitted(one: Implementation, case: Case, extras: Extras = PLAIN, drawn: Drawn | None = None) -> Any:
    """The verdicts on an implementation, in full."""
    drawn = drawn or Drawn.new()
    admits, contender = admitting(one, case, extras=extras, drawn=drawn)
    return Admitting(admits._court, case, drawn, thorough=True, extras=extras).admit(contender)


def faults(one: Implementation, case: Case, extras: Extras = PLAIN) -> set[tuple[str, str]]:
    return {(check.tensor, check.check) for check in admitted(one, case, extras).checks if not check.ok}


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("build", [pytorch.eager.build, glu], ids=["eager", "the specimens' own"])
def test_what_is_right_passes(build: Callable[[Problem], Step], dtype: Dtype, mode: Mode) -> None:
    assert faults(declared(build), small_case(dtype=dtype, mode=mode)) == set()


def test_a_compiled_function_is_compiled_for_every_case_of_a_process() -> None:
    """And never left to eager: torch.compile gives a function up that it compiled for eight others before."""

    def build(problem: Problem) -> Step:
        step = glu(problem)
        step.forward = torch.compile(step.forward, fullgraph=True, dynamic=False, backend="eager")
        return step

    bench = Workbench(Settings(Task.VERIFY, CPU, "c", "r"), declared(build))
    for tokens in range(2, 12):
        bench.build(small_case(tokens=tokens), weights_seed=1)
        bench._built.infer(Draw(1))
    box = Letterbox.make({"unused": (1,)}, torch.float32, CPU)
    small = usage.small_case(bench._problem.case, "cpu")
    used = bench.use(small, usage.Seeds(1, 2, 3, (4, 5, 6)), box.address(), {"unused": (1,)})
    assert set(used.raised) <= {"batches"}  # which this one does not take


def test_letterboxes_that_the_judge_has_closed_go_before_another_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench(Settings(Task.VERIFY, CPU, "c", "r"), declared(glu))
    bench.build(small_case(), weights_seed=1)
    kept: list[set[str]] = []
    map_it = Letterbox.open
    monkeypatch.setattr(Letterbox, "open", lambda *given: (kept.append(set(bench._boxes)), map_it(*given))[1])
    boxes = [Letterbox.make({"output": (1,)}, torch.float32, CPU) for _ in range(4)]
    for kind, box in zip(("results", "usage", "weights", "results"), boxes, strict=True):
        bench._open(kind, box.address(), {"output": (1,)}, torch.float32)
    assert kept == [set(), {"results"}, {"results"}, {"weights"}]


@pytest.mark.parametrize("seed", [19, 113])
def test_a_sigmoid_written_out_passes_in_half_precision(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With these numbers it loses about twice what eager does, in the tail and for wide values."""

    def build(problem: Problem) -> Step:
        w_gate, w_up = problem.weights["w_gate"], problem.weights["w_up"]

        def forward(x: Tensor) -> Tensor:
            gate = x @ w_gate.t()
            return gate * torch.sigmoid(gate) * (x @ w_up.t())

        return Step(forward)

    monkeypatch.setattr(admission, "new_seed", functools.partial(random.Random(seed).getrandbits, 62))
    admits, contender = admitting(declared(build), small_case(dtype=Dtype.FLOAT16))
    admits.build(contender)
    assert [check.reason for check in admits.use(contender)] == []


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("extras", [Extras(bias=True), Extras(packed=True), Extras(limit=9.0)], ids=str)
def test_what_is_offered_is_kept(scope: Scope, extras: Extras) -> None:
    one = pytorch.eager_packed if extras.packed else pytorch.eager
    if scope in one.scopes:
        assert faults(one, small_case(scope=scope), extras) == set()


def test_each_tensor_has_one_verdict_the_worst_of_two_draws() -> None:
    case, drawn = small_case(), Drawn.new()
    admission = admitted(pytorch.eager, case, drawn=drawn)
    checks: tuple[TensorCheck, ...] = admission.checks
    assert [check.tensor for check in checks] == ["output (inference)", "output", "x", "w_gate", "w_up"]
    assert all(check.median_error is not None and len(check.worst_index) == 2 for check in checks)
    assert admission.gradients == ("x", "w_gate", "w_up")
    built = Built(REFERENCE, make_problem(case, CPU, seed=drawn.weights))
    errors = []
    for draw in drawn.draws:
        truth = compute_truth(built.problem, built.desk.activations(draw), None)["output"]
        errors.append(tensor_error(built.infer(draw)["output"], truth).relative)
    assert min(abs(checks[1].error / error - 1) for error in errors) < 1e-6


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
    expected = set() if declares else {("gate", "aliasing"), ("up", "aliasing"), ("conduct", "inputs unchanged")}
    assert faults(one, small_case(scope=Scope.ACTIVATION)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "gate-up-swapped", "last-row-unwritten", "nan-in-one-element", "no-weight-gradient", "truncated",
        "first-answer", "cached-by-address", "gradient-accumulated", "one-buffer", "output-over-input",
        "weights-changed", "input-changed", "lazy", "patched-perf-counter", "patched-norm", "one-thread",
        "random-numbers",
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_check(name: str) -> None:
    specimen = SPECIMENS[name]
    at = {"scope": specimen.scope, "dtype": specimen.dtype, "mode": specimen.mode}
    case = small_case(shape=SHAPES["cpu"], tokens=33, **at)
    found = {check for _, check in faults(specimen.implementation, case)}
    assert found & set(specimen.caught_by)
    assert found <= set(FAULTS)


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
@pytest.mark.parametrize(
    ("one", "right"),
    [
        (pytorch.eager, True), (pytorch.eager_packed, True), (SPECIMENS["overflows-when-large"].implementation, False),
        (SPECIMENS["stale-when-large"].implementation, False),
    ],
)  # fmt: skip
def test_what_is_used_at_small_sizes_is_used_at_its_own(one: Implementation, right: bool, mode: Mode) -> None:
    case = small_case(shape=Shape("large", 64, 192, "more than the small layers", (129,)), tokens=129, mode=mode)
    drawn = Drawn.new()
    admits, contender = admitting(one, case, drawn=drawn)
    thorough = Admitting(admits._court, case, drawn, thorough=True, used={})
    wrong = [check for check in thorough.admit(contender).checks if not check.ok]
    assert [check.check for check in wrong] == ([] if right else ["use"]), wrong
    assert right or "at its own size" in wrong[0].reason
    assert not thorough.conduct(contender), "its weights are its own again"
