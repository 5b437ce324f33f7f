import pytest
import torch
import torch.nn.functional as F
from specimens import small_case

from swiglu_bench.check import truth
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.truth import compute_truth
from swiglu_bench.spec.cases import ACTIVATIONS, VARIANTS, Dtype, Extras, Mode, Scope, Shape, tensors
from swiglu_bench.spec.problem import Problem


def by_autograd(problem: Problem, variant: int) -> dict[str, torch.Tensor]:
    """The same answer by another way: PyTorch's own derivatives of the definition, in fp64."""
    scope = problem.case.scope
    leaves = dict(zip(ACTIVATIONS[scope], problem.activations[variant], strict=True)) | problem.weights
    leaves = {name: value.detach().double().requires_grad_() for name, value in leaves.items()}
    if scope is Scope.ACTIVATION:
        output = F.silu(leaves["gate"]) * leaves["up"]
    else:
        output = F.silu(F.linear(leaves["x"], leaves["w_gate"])) * F.linear(leaves["x"], leaves["w_up"])
    if scope is Scope.MLP:
        output = F.linear(output, leaves["w_down"])
    output.backward(problem.upstream[variant].double())
    gradients = {name: value.grad for name, value in leaves.items() if value.grad is not None}
    return {"output": output.detach(), **gradients}


def distance(value: torch.Tensor, other: torch.Tensor) -> float:
    assert value.shape == other.shape
    return ((value - other).norm() / other.norm()).item()


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("variant", range(VARIANTS))
def test_it_agrees_with_autograd(scope: Scope, dtype: Dtype, variant: int) -> None:
    problem = make_problem(small_case(scope=scope, dtype=dtype), "cpu")
    answer, expected = compute_truth(problem, variant), by_autograd(problem, variant)
    assert set(answer) == set(expected) == {"output", *tensors(scope)}
    for name, value in answer.items():
        assert value.dtype == torch.float64
        assert distance(value, expected[name]) < 1e-14


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 8])
def test_chunks_change_nothing(scope: Scope, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(small_case(scope=scope, tokens=7), "cpu")
    whole = compute_truth(problem, 0)
    monkeypatch.setattr(truth, "TRUTH_CHUNK", chunk)
    for name, value in compute_truth(problem, 0).items():
        assert distance(value, whole[name]) < 1e-14


@pytest.mark.parametrize("scope", list(Scope))
def test_a_forward_case_has_no_gradients(scope: Scope) -> None:
    problem = make_problem(small_case(scope=scope, mode=Mode.FORWARD), "cpu")
    answer = compute_truth(problem, 1)
    assert list(answer) == ["output"]
    assert distance(answer["output"], by_autograd(problem, 1)["output"]) < 1e-14


def test_variants_have_answers_of_their_own() -> None:
    problem = make_problem(small_case(), "cpu")
    first, second = compute_truth(problem, 0), compute_truth(problem, 1)
    assert all(distance(first[name], second[name]) > 0.5 for name in first)


def test_a_block_of_one_by_one_by_one() -> None:
    point = Shape("point", 1, 1, "made up", (1,))
    problem = make_problem(small_case(shape=point, tokens=1, scope=Scope.MLP), "cpu")
    expected = by_autograd(problem, 0)
    for name, value in compute_truth(problem, 0).items():
        assert torch.allclose(value, expected[name], rtol=1e-12, atol=0)


def test_it_changes_nothing_of_the_problem() -> None:
    problem = make_problem(small_case(scope=Scope.MLP), "cpu")
    kept = [value.clone() for value in (*problem.weights.values(), *problem.activations[0], problem.upstream[0])]
    compute_truth(problem, 0)
    now = [*problem.weights.values(), *problem.activations[0], problem.upstream[0]]
    assert all(torch.equal(one, other) for one, other in zip(kept, now, strict=True))


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("extras", [Extras(bias=True), Extras(limit=0.7), Extras(bias=True, limit=0.7)])
def test_biases_and_limits_agree_with_autograd(scope: Scope, extras: Extras) -> None:
    problem = make_problem(small_case(scope=scope), "cpu", extras)
    leaves = dict(zip(ACTIVATIONS[scope], problem.activations[1], strict=True)) | problem.parameters
    leaves = {name: value.detach().double().requires_grad_() for name, value in leaves.items()}
    if scope is Scope.ACTIVATION:
        gate, up = leaves["gate"], leaves["up"]
    else:
        gate = F.linear(leaves["x"], leaves["w_gate"], leaves.get("bias_gate"))
        up = F.linear(leaves["x"], leaves["w_up"], leaves.get("bias_up"))
    if extras.limit:
        gate, up = gate.clamp(max=extras.limit), up.clamp(-extras.limit, extras.limit)
    output = F.silu(gate) * up
    if scope is Scope.MLP:
        output = F.linear(output, leaves["w_down"], leaves.get("bias_down"))
    output.backward(problem.upstream[1].double())
    answer = compute_truth(problem, 1)
    assert set(answer) == {"output", *leaves}
    assert distance(answer["output"], output.detach()) < 1e-14
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert distance(answer[name], leaf.grad) < 1e-14


def test_no_tokens_are_an_empty_answer_and_gradients_of_zeros() -> None:
    answer = compute_truth(make_problem(small_case(scope=Scope.MLP, tokens=0), "cpu"), 0)
    assert answer["output"].shape == answer["x"].shape == (0, 24)
    assert not answer["w_gate"].any()
