import pytest
import torch
import torch.nn.functional as F
from specimens import small_case
from torch import Tensor

from swiglu_bench.cases.cases import ACTIVATIONS, DENSE, PLAIN, Dtype, Extras, Scope, tensors
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check import truth
from swiglu_bench.check.inputs import Desk, Draw, make_problem
from swiglu_bench.check.truth import compute_truth


def given(problem: Problem) -> tuple[list[Tensor], Tensor]:
    desk = Desk(problem)
    return desk.activations(Draw(1)), desk.upstream(Draw(1))


def by_autograd(problem: Problem, activations: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """The same answer by another way: PyTorch's own derivatives of the definition, in fp64."""
    scope, limit = problem.case.scope, problem.extras.limit
    leaves = dict(zip(ACTIVATIONS[scope], activations, strict=True)) | problem.parameters
    leaves = {name: value.detach().double().requires_grad_() for name, value in leaves.items()}
    if scope is Scope.ACTIVATION:
        gate, up = leaves["gate"], leaves["up"]
    else:
        gate, up = (
            F.linear(leaves["x"], leaves[f"w_{name}"], leaves.get(f"bias_{name}")) for name in ("gate", "up")
        )  # fmt: skip
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    output = F.silu(gate) * up
    if scope is Scope.MLP:
        output = F.linear(output, leaves["w_down"], leaves.get("bias_down"))
    output.backward(upstream.double())
    return {"output": output.detach()} | {name: one.grad for name, one in leaves.items() if one.grad is not None}


def distance(value: Tensor, other: Tensor) -> float:
    assert value.shape == other.shape
    assert value.dtype is torch.float64
    return ((value - other).norm() / other.norm()).item()


@pytest.mark.parametrize("scope", DENSE)
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("extras", [PLAIN, Extras(bias=True), Extras(limit=0.7), Extras(bias=True, limit=0.7)], ids=str)
def test_it_agrees_with_autograd(scope: Scope, dtype: Dtype, extras: Extras) -> None:
    problem = make_problem(small_case(scope=scope, dtype=dtype), "cpu", extras)
    activations, upstream = given(problem)
    answer, expected = compute_truth(problem, activations, upstream), by_autograd(problem, activations, upstream)
    assert set(answer) == set(expected) == {"output", *tensors(scope), *problem.biases}
    assert max(distance(value, expected[name]) for name, value in answer.items()) < 1e-14


@pytest.mark.parametrize("scope", DENSE)
@pytest.mark.parametrize("chunk", [1, 3, 7, 8])
def test_chunks_change_nothing(scope: Scope, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(small_case(scope=scope, tokens=7), "cpu")
    whole = compute_truth(problem, *given(problem))
    monkeypatch.setattr(truth, "TRUTH_CHUNK", chunk)
    assert max(distance(v, whole[name]) for name, v in compute_truth(problem, *given(problem)).items()) < 1e-14


@pytest.mark.parametrize("scope", DENSE)
def test_without_an_upstream_gradient_there_are_no_gradients(scope: Scope) -> None:
    problem = make_problem(small_case(scope=scope), "cpu")
    activations, upstream = given(problem)
    answer = compute_truth(problem, activations, None)
    assert list(answer) == ["output"]
    assert torch.equal(answer["output"], compute_truth(problem, activations, upstream)["output"])


def test_no_tokens_are_an_empty_answer_and_gradients_of_zeros() -> None:
    problem = make_problem(small_case(scope=Scope.MLP, tokens=0), "cpu")
    answer = compute_truth(problem, *given(problem))
    assert answer["output"].shape == answer["x"].shape == (0, 24)
    assert not answer["w_gate"].any()
