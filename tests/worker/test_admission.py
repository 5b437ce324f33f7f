"""What an implementation passes before it gets a time, by the code of a sweep in this process."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged import admitting
from specimens import a_record, declared, small_case
from torch import Tensor

from swiglu_bench.cases.cases import PLAIN, Case, Dtype, Experts, Extras, Mode, Precision, Scope
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import usage
from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem
from swiglu_bench.check.judge import REFERENCE, compute_truth
from swiglu_bench.check.results import Letterbox
from swiglu_bench.check.tolerance import tensor_error
from swiglu_bench.contenders import fp8, pytorch
from swiglu_bench.rows.record import FAULTS, TensorCheck
from swiglu_bench.tasks.selftest.run import SHAPES, SPECIMENS, case_of
from swiglu_bench.tasks.selftest.specimen import Specimen, glu
from swiglu_bench.worker import admission
from swiglu_bench.worker.admission import Admitting, Drawn
from swiglu_bench.worker.child import Contender, InProcess
from swiglu_bench.worker.judge_bench import JudgeBench
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
    small, seeds = usage.small_case(bench._problem.case, "cpu"), usage.Seeds.new()
    for name in usage.wanted(bench._implementation, small):
        box = Letterbox.make({"unused": (1,)}, torch.float32, CPU)
        used = bench.use(usage.Question(name, small, PLAIN, seeds, True), box.address(), {"unused": (1,)})
        assert name == "batches" or not used.raised  # which this one does not take


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


def used(entry: Implementation, case: Case, extras: Extras = PLAIN) -> tuple[Any, list[TensorCheck]]:
    """What is wrong with an implementation once its use was checked at both sizes, and what admitted it."""
    drawn = Drawn.new()
    admits, contender = admitting(entry, case, drawn=drawn, extras=extras)
    thorough = Admitting(admits._court, case, drawn, thorough=True, used={}, extras=extras)
    wrong = [check for check in thorough.admit(contender).checks if not check.ok]
    assert not thorough.conduct(contender), "its weights are its own again"
    return thorough, wrong


BIASES_AND_GATES = (PLAIN, Extras(bias=True), Extras(limit=7.0), Extras(bias=True, limit=7.0, alpha=1.702))


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
@pytest.mark.parametrize("extras", BIASES_AND_GATES, ids=str)
@pytest.mark.parametrize("scope", list(Scope))
def test_what_is_right_passes_at_both_sizes(scope: Scope, extras: Extras, mode: Mode) -> None:
    if extras.alpha != 1.0 and scope is not Scope.EXPERTS:
        extras = Extras(limit=7.0)
    case = small_case(scope=scope, mode=mode, dtype=Dtype.BFLOAT16, tokens=70)
    entries = [pytorch.eager] if scope is Scope.ACTIVATION else [pytorch.eager, fp8.reference]
    for entry in entries if extras == PLAIN else entries[:1]:
        precise = case if entry is pytorch.eager else dataclasses.replace(case, precision=Precision.FP8_ROWWISE)
        admits, wrong = used(entry, precise, extras)
        assert wrong == []
        sizes = admits.used_at[entry.name]
        assert [size.split(" ")[0] for size in sizes] == ["64x96", "24x40"]


AT_BOTH_SIZES = [s for s in SPECIMENS.values() if s.task == "verify" and not s.precision and not s.needs]


@pytest.mark.parametrize("specimen", AT_BOTH_SIZES, ids=lambda specimen: specimen.name)
def test_what_is_right_at_the_small_size_is_asked_at_its_own(specimen: Specimen) -> None:
    _, wrong = used(specimen.implementation, case_of(specimen, "cpu"))
    assert {check.check for check in wrong} & set(specimen.caught_by), wrong
    if "-large" in specimen.name:
        assert all("at 128x192" in check.reason for check in wrong), wrong


def test_an_inference_only_implementation_is_asked_for_all_that_is_no_gradient() -> None:
    entry, case = declared(lambda problem: Step(pytorch.eager.build(problem).forward), trains="nothing"), small_case()
    names = usage.wanted(entry, case)
    assert {"two_calls", "two_layers", "changed_weights", "batches", "strided", "other_lengths", "nan_and_inf"} <= {
        *names
    }
    assert not {"accumulated", "uneven_upstream", "frozen_weights", "hooks_of_weights"} & {*names}
    assert used(entry, case)[1] == []


def test_only_lengths_are_spared_of_who_compiles() -> None:
    """And of the suite's own rows all for which they would compile again."""
    case, plain = small_case(scope=Scope.EXPERTS), declared(lambda problem: glu(problem), Scope.EXPERTS)
    everything = set(usage.wanted(plain, case))
    theirs = set(usage.wanted(dataclasses.replace(plain, backend="inductor"), case))
    ours = set(usage.wanted(dataclasses.replace(plain, backend="inductor", source="swiglu_bench.contenders"), case))
    assert everything - theirs == usage.LENGTHS
    assert theirs - ours == {"inputs_without_gradient", "frozen_weights", "one_frozen", "batches", "strided"}


def test_where_memory_is_short_few_experts_stand_for_all_or_the_row_says_that_nothing_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = dataclasses.replace(small_case(scope=Scope.EXPERTS).shape, experts=Experts(8, 2))
    case = small_case(scope=Scope.EXPERTS, shape=shape)

    def too_large(_: JudgeBench, asked: Case) -> str:
        return "it does not fit" if asked.shape.experts.count > fit else ""  # type: ignore[union-attr]

    monkeypatch.setattr(JudgeBench, "too_large_to_use", too_large)
    for fit, sizes in ((4, 2), (1, 1)):
        admits, wrong = used(pytorch.eager, case)
        record = a_record()
        admits.note_use(record, Contender("eager", pytorch.eager, InProcess(None), 0.0))
        assert wrong == []
        assert len(record.used_at.split("; ")) == sizes
        assert ("4 experts with 7 tokens" in record.used_at, "does not fit" in record.remarks) == (fit == 4, fit == 1)
