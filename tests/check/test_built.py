from collections.abc import Callable
from typing import Any

import pytest
import torch
from specimens import small_case
from torch import Tensor

from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.judge import make_judge
from swiglu_bench.check.truth import compute_truth
from swiglu_bench.implementations import fused, liger, pytorch
from swiglu_bench.spec.cases import ACTIVATIONS, VARIANTS, Dtype, Mode, Scope, Shape, tensors
from swiglu_bench.spec.costs import predicted_memory
from swiglu_bench.spec.implementation import Implementation, Step, implementation
from swiglu_bench.spec.problem import Problem


def declared(build: Callable[[Problem], Step], scope: Scope = Scope.GLU, **fields: Any) -> Implementation:
    return implementation("mine", scopes=[scope], description="d", **fields)(build)


def glu(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.silu(x @ weights["w_gate"].T) * (x @ weights["w_up"].T)


def is_right(trial_result: dict[str, Tensor | None], problem: Problem, variant: int) -> bool:
    return all(check.ok for check in make_judge(problem, variant).judge(trial_result))


def snapshot(problem: Problem) -> list[Tensor]:
    changing = [value for variant in problem.activations for value in variant]
    return [value.clone() for value in (*problem.weights.values(), *changing, *problem.upstream)]


class Overwriting(torch.autograd.Function):
    """Right once: its backward puts its results into what it saved and into what it was given."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = (value.detach() for value in ctx.saved_tensors)
        sigmoid = torch.sigmoid(gate)
        d_up = upstream * gate * sigmoid
        d_gate = upstream * up * sigmoid * (1 + gate * (1 - sigmoid))
        gate.copy_(d_gate)
        up.copy_(d_up)
        upstream.zero_()
        return gate, up


def overwriting(problem: Problem) -> Step:
    return Step(lambda gate, up: Overwriting.apply(gate, up))


def run_every_way(built: Built) -> None:
    for variant in range(VARIANTS):
        built.infer(variant)
        built.train(variant)
        for mode in Mode:
            built.prepare(mode, variant)()()
    built.memory()


# What is handed out


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("variant", range(VARIANTS))
def test_infer_yields_the_output_of_the_variant(scope: Scope, variant: int) -> None:
    problem = make_problem(small_case(scope=scope), "cpu")
    produced = Built(pytorch.eager, problem).infer(variant)
    assert set(produced) == {"output"}
    assert not produced["output"].requires_grad  # type: ignore[union-attr]
    assert is_right(produced, problem, variant)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("variant", range(VARIANTS))
def test_train_yields_the_output_and_every_gradient(scope: Scope, variant: int) -> None:
    problem = make_problem(small_case(scope=scope), "cpu")
    produced = Built(pytorch.eager, problem).train(variant)
    assert list(produced) == ["output", *tensors(scope)]
    assert is_right(produced, problem, variant)


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        (Mode.FORWARD, ["output"]),
        (Mode.BACKWARD, ["output", "x", "w_gate", "w_up"]),
        (Mode.STEP, ["output", "x", "w_gate", "w_up"]),
    ],
)
def test_prepared_calls_hand_out_what_they_made(mode: Mode, names: list[str]) -> None:
    problem = make_problem(small_case(mode=mode), "cpu")
    built = Built(pytorch.eager, problem)
    for variant in (0, 1, 1, 0):
        produced = built.prepare(mode, variant)()()
        assert list(produced) == names
        assert is_right(produced, problem, variant)


def test_a_forward_keeps_nothing_for_backward() -> None:
    produced = Built(pytorch.eager, make_problem(small_case(), "cpu")).prepare(Mode.FORWARD, 0)()()
    assert not produced["output"].requires_grad  # type: ignore[union-attr]


# A fresh forward for each backward


def test_each_backward_has_a_fresh_forward() -> None:
    forwards: list[int] = []

    def build(problem: Problem) -> Step:
        def forward(x: Tensor) -> Tensor:
            forwards.append(1)
            return glu(x, problem.weights)

        return Step(forward)

    built = Built(declared(build), make_problem(small_case(), "cpu"))
    for expected in (1, 2, 3):
        call = built.prepare(Mode.BACKWARD, 0)
        assert len(forwards) == expected, "the forward runs while preparing, outside what is timed"
        call()
        assert len(forwards) == expected
    call = built.prepare(Mode.STEP, 0)
    assert len(forwards) == 3, "a step times its forward"
    call()
    assert len(forwards) == 4


def test_an_implementation_that_overwrites_is_right_every_time() -> None:
    """Replaying one graph would compute on garbage from the second time on."""
    problem = make_problem(small_case(scope=Scope.ACTIVATION), "cpu")
    built = Built(declared(overwriting, Scope.ACTIVATION), problem)
    judges = [make_judge(problem, variant) for variant in range(VARIANTS)]  # gradients lie where inputs lay
    for variant in (0, 1, 0, 0, 1):
        assert all(check.ok for check in judges[variant].judge(built.train(variant)))
        for mode in (Mode.BACKWARD, Mode.STEP):
            assert all(check.ok for check in judges[variant].judge(built.prepare(mode, variant)()()))


def test_an_implementation_that_overwrites_leaves_the_problem_alone() -> None:
    problem = make_problem(small_case(scope=Scope.ACTIVATION), "cpu")
    before = snapshot(problem)
    run_every_way(Built(declared(overwriting, Scope.ACTIVATION), problem))
    assert all(torch.equal(one, other) for one, other in zip(before, snapshot(problem), strict=True))


def test_a_forward_that_overwrites_its_input_leaves_the_problem_alone() -> None:
    """Or every contender after it would be called incorrect."""

    def build(problem: Problem) -> Step:
        def forward(x: Tensor) -> Tensor:
            output = glu(x, problem.weights)
            if not torch.is_grad_enabled():
                x.zero_()
            return output

        return Step(forward)

    problem = make_problem(small_case(), "cpu")
    before, built = snapshot(problem), Built(declared(build), problem)
    run_every_way(built)
    assert all(torch.equal(one, other) for one, other in zip(before, snapshot(problem), strict=True))
    assert is_right(built.infer(0), problem, 0)
    assert is_right(built.prepare(Mode.FORWARD, 0)()(), problem, 0)


def test_copies_are_made_outside_what_is_timed() -> None:
    given: list[int] = []

    def build(problem: Problem) -> Step:
        def forward(x: Tensor) -> Tensor:
            given.append(x.data_ptr())
            return glu(x, problem.weights)

        return Step(forward)

    built = Built(declared(build), make_problem(small_case(), "cpu"))
    for mode in (Mode.FORWARD, Mode.STEP):
        call = built.prepare(mode, 0)
        given.clear()
        call()
        call()
        assert len(given) == 2
        assert given[0] == given[1], "the call itself copies nothing"


@pytest.mark.parametrize("scope", list(Scope))
def test_nothing_is_left_on_the_problem(scope: Scope) -> None:
    problem = make_problem(small_case(scope=scope), "cpu")
    before = snapshot(problem)
    run_every_way(Built(pytorch.eager, problem))
    assert all(torch.equal(one, other) for one, other in zip(before, snapshot(problem), strict=True))
    held = [*problem.weights.values(), *(one for variant in problem.activations for one in variant)]
    assert all(value.grad is None and not value.requires_grad for value in held)


def test_gradients_do_not_add_up() -> None:
    problem = make_problem(small_case(), "cpu")
    built = Built(pytorch.eager, problem)
    first = {name: value.clone() for name, value in built.train(0).items() if value is not None}
    for name, value in built.train(0).items():
        assert value is not None
        assert torch.equal(value, first[name])


def test_contenders_do_not_share_gradients() -> None:
    problem = make_problem(small_case(), "cpu")
    one, other = Built(pytorch.eager, problem), Built(pytorch.eager, problem)
    one.train(0)
    assert all(parameter.grad is None for parameter in other.parameters.values())


def test_the_upstream_gradient_is_the_implementation_s_own_copy() -> None:
    given: list[int] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:  # type: ignore[override]
            given.append(upstream.data_ptr())
            return upstream

    problem = make_problem(small_case(), "cpu")
    built = Built(declared(lambda p: Step(lambda x: Watch.apply(glu(x, p.weights)))), problem)
    built.train(0)
    built.prepare(Mode.STEP, 0)()
    assert len(given) == 2
    assert not {value.data_ptr() for value in problem.upstream} & set(given)


# Layouts and what is trained


@pytest.mark.parametrize("scope", [Scope.GLU, Scope.MLP])
@pytest.mark.parametrize("dtype", list(Dtype))
def test_gradients_of_packed_weights_come_in_the_canonical_layout(scope: Scope, dtype: Dtype) -> None:
    problem = make_problem(small_case(scope=scope, dtype=dtype), "cpu")
    built = Built(pytorch.eager_packed, problem)
    assert "w_gate_up" in built.parameters
    produced = built.train(1)
    assert list(produced) == ["output", *tensors(scope)]
    truth = compute_truth(problem, 1)
    assert all(value is not None and value.shape == truth[name].shape for name, value in produced.items())
    assert is_right(produced, problem, 1)


def test_packed_weights_are_a_copy() -> None:
    problem = make_problem(small_case(), "cpu")
    packed = Built(pytorch.eager_packed, problem).parameters["w_gate_up"]
    assert packed.is_leaf
    assert packed.requires_grad
    assert packed.data_ptr() not in {value.data_ptr() for value in problem.weights.values()}
    assert torch.equal(packed, torch.cat([problem.weights["w_gate"], problem.weights["w_up"]]))


def test_frozen_weights_get_no_gradient() -> None:
    problem = make_problem(small_case(), "cpu")
    built = Built(declared(lambda p: Step(lambda x: glu(x, p.weights)), trains="inputs"), problem)
    assert not any(parameter.requires_grad for parameter in built.parameters.values())
    produced = built.train(0)
    assert list(produced) == ["output", "x"]
    assert is_right(produced, problem, 0)
    assert all(parameter.grad is None for parameter in built.parameters.values())


def test_frozen_packed_weights() -> None:
    def build(problem: Problem) -> Step:
        return pytorch.eager_packed.build(problem)

    problem = make_problem(small_case(), "cpu")
    produced = Built(declared(build, trains="inputs", weight_layout="packed"), problem).train(0)
    assert list(produced) == ["output", "x"]
    assert is_right(produced, problem, 0)


def test_an_implementation_for_inference_only() -> None:
    problem = make_problem(small_case(), "cpu")
    built = Built(declared(lambda p: Step(lambda x: glu(x, p.weights).detach()), trains="nothing"), problem)
    assert built.gradients == ()
    assert list(built.train(0)) == ["output"]
    assert is_right(built.train(0), problem, 0)
    assert built.memory().peak_bytes > 0


def test_a_gradient_that_was_promised_and_did_not_come_is_none() -> None:
    problem = make_problem(small_case(), "cpu")
    built = Built(
        declared(lambda p: Step(lambda x: glu(x, {name: value.detach() for name, value in p.weights.items()}))), problem
    )
    produced = built.train(0)
    assert produced["x"] is not None
    assert produced["w_gate"] is produced["w_up"] is None
    failed = [check for check in make_judge(problem, 0).judge(produced) if not check.ok]
    assert [(check.tensor, check.reason) for check in failed] == [
        (name, "missing: no gradient came back") for name in ("w_gate", "w_up")
    ]


def test_building_happens_once() -> None:
    built: list[Problem] = []

    def build(problem: Problem) -> Step:
        built.append(problem)
        return Step(lambda x: glu(x, problem.weights))

    run_every_way(Built(declared(build), make_problem(small_case(), "cpu")))
    assert len(built) == 1
    assert all(value.requires_grad for value in built[0].weights.values())


def test_an_activation_has_no_parameters() -> None:
    problem = make_problem(small_case(scope=Scope.ACTIVATION), "cpu")
    built = Built(pytorch.eager, problem)
    assert built.parameters == {}
    assert list(built.train(0)) == ["output", *ACTIVATIONS[Scope.ACTIVATION]]


# Memory


def test_memory_leaves_no_gradient_behind() -> None:
    built = Built(pytorch.eager, make_problem(small_case(), "cpu"))
    built.train(0)
    use = built.memory()
    assert use.kept_bytes == 0
    assert all(parameter.grad is None for parameter in built.parameters.values())


@pytest.mark.parametrize(
    ("one", "scope"),
    [(one, scope) for one in (pytorch.eager, pytorch.eager_packed) for scope in Scope if scope in one.scopes],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("tokens", [3, 700])
def test_memory_is_what_arithmetic_predicts(one: Implementation, scope: Scope, tokens: int) -> None:
    """Few tokens: the weights' gradients are the peak. Many: the activations are."""
    case = small_case(scope=scope, tokens=tokens)
    built = Built(one, make_problem(case, "cpu"))
    built.train(0)
    use = built.memory()
    assert (use.saved_bytes, use.peak_bytes) == predicted_memory(case, one.footprints[scope])
    assert use.kept_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("one", "scope"),
    [
        (one, scope)
        for one in (*fused.ROWS.values(), liger.liger_mlp)
        for scope in one.footprints
        if scope is not Scope.ACTIVATION
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("tokens", [512, 8192])
def test_memory_of_the_kernels_is_what_arithmetic_predicts(one: Implementation, scope: Scope, tokens: int) -> None:
    """Within 1%: the allocator rounds up, and cuBLAS may keep a workspace."""
    case = small_case(
        scope=scope, tokens=tokens, dtype=Dtype.BFLOAT16, shape=Shape("medium", 2048, 8192, "made up", (tokens,))
    )
    built = Built(one, make_problem(case, "cuda"))
    built.train(0)
    use = built.memory()
    assert (use.saved_bytes, use.peak_bytes) == pytest.approx(predicted_memory(case, one.footprints[scope]), rel=0.01)


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.STEP])
def test_a_fixed_call_works_on_tensors_that_stay_and_reads_what_is_loaded(mode: Mode) -> None:
    problem = make_problem(small_case(mode=mode), "cpu")
    built = Built(pytorch.eager_packed, problem)
    fixed = built.fixed(mode)
    for variant in (1, 0, 1):
        fixed.load(variant)
        produced = fixed.call()()
        expected = built.infer(variant) if mode is Mode.FORWARD else built.train(variant)
        assert produced.keys() == expected.keys()
        for name, value in expected.items():
            assert value is not None
            torch.testing.assert_close(produced[name], value)


def test_the_results_of_a_fixed_call_outlive_other_runs_of_the_trial() -> None:
    problem = make_problem(small_case(mode=Mode.STEP), "cpu")
    built = Built(pytorch.eager, problem)
    fixed = built.fixed(Mode.STEP)
    collect = fixed.call()
    before = {name: value.clone() for name, value in collect().items() if value is not None}
    built.train(1)
    assert all(torch.equal(value, before[name]) for name, value in collect().items() if value is not None)
    assert len(before) == 4
