import math

import pytest
import torch
from specimens import small_case

from swiglu_bench.check.inputs import lay_out, make_problem, restore_parameters, torch_dtype
from swiglu_bench.spec.cases import ACTIVATIONS, VARIANTS, WEIGHTS, Dtype, Extras, Mode, Scope, Shape
from swiglu_bench.spec.problem import Problem


def everything(problem: Problem) -> list[torch.Tensor]:
    return [*problem.weights.values(), *(one for variant in problem.activations for one in variant), *problem.upstream]


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("dtype", list(Dtype))
def test_the_same_seeds_give_the_same_tensors(scope: Scope, dtype: Dtype) -> None:
    case = small_case(scope=scope, dtype=dtype)
    torch.manual_seed(1)
    first = everything(make_problem(case, "cpu", unannounced=3))
    torch.manual_seed(2)
    second = everything(make_problem(case, "cpu", unannounced=3))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_one_variant_is_drawn_from_a_seed_that_nobody_can_know() -> None:
    first, second = (make_problem(small_case(), "cpu") for _ in range(2))
    assert first.unannounced != second.unannounced
    assert torch.equal(first.activations[0][0], second.activations[0][0])
    assert not torch.equal(first.activations[1][0], second.activations[1][0])
    again = make_problem(small_case(), "cpu", unannounced=first.unannounced)
    assert torch.equal(again.activations[1][0], first.activations[1][0])


def test_a_build_sees_no_inputs() -> None:
    seen = make_problem(small_case(), "cpu").for_building()
    assert seen.activations == seen.upstream == ()
    assert not seen.desk
    assert not seen.unannounced
    assert set(seen.weights) == {"w_gate", "w_up"}


def test_variants_are_laid_out_at_the_same_addresses() -> None:
    problem = make_problem(small_case(scope=Scope.ACTIVATION), "cpu")
    first, upstream = lay_out(problem, 0)
    addresses = [value.data_ptr() for value in (*first, upstream)]
    second, other_upstream = lay_out(problem, 1)
    assert addresses == [value.data_ptr() for value in (*second, other_upstream)]
    assert all(torch.equal(one, other) for one, other in zip(second, problem.activations[1], strict=True))
    assert torch.equal(other_upstream, problem.upstream[1])
    assert not {*addresses} & {value.data_ptr() for value in everything(problem)}


def test_biases_come_only_where_they_are_asked_for() -> None:
    case = small_case(scope=Scope.MLP)
    assert make_problem(case, "cpu").biases == {}
    problem = make_problem(case, "cpu", Extras(bias=True))
    assert {name: len(value) for name, value in problem.biases.items()} == {
        "bias_gate": 40, "bias_up": 40, "bias_down": 24,
    }  # fmt: skip
    assert all(leaf.requires_grad for leaf in problem.with_leaves(True).parameters.values())


def test_parameters_that_somebody_changed_are_drawn_again() -> None:
    problem = make_problem(small_case(), "cpu", Extras(bias=True))
    before = {name: value.clone() for name, value in problem.parameters.items()}
    for value in problem.parameters.values():
        value.zero_()
    restore_parameters(problem)
    assert all(torch.equal(value, before[name]) for name, value in problem.parameters.items())


def test_another_seed_gives_other_tensors() -> None:
    first, second = (everything(make_problem(small_case(seed=seed), "cpu")) for seed in (0, 1))
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_modes_share_their_tensors() -> None:
    first, second = (
        everything(make_problem(small_case(mode=mode), "cpu", unannounced=5)) for mode in (Mode.FORWARD, Mode.STEP)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    make_problem(small_case(), "cpu")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("scope", list(Scope))
def test_no_two_tensors_are_alike(scope: Scope) -> None:
    """Gate and up that are equal, or variants that are, would let a wrong kernel pass."""
    tensors = everything(make_problem(small_case(scope=scope), "cpu"))
    for index, one in enumerate(tensors):
        for other in tensors[:index]:
            assert one.shape != other.shape or not torch.equal(one, other)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("dtype", list(Dtype))
def test_sizes_and_types(scope: Scope, dtype: Dtype) -> None:
    case = small_case(scope=scope, dtype=dtype)
    problem = make_problem(case, torch.device("cpu"))
    sizes = {
        "x": (7, 24), "gate": (7, 40), "up": (7, 40), "w_gate": (40, 24), "w_up": (40, 24), "w_down": (24, 40),
    }  # fmt: skip
    assert {name: tuple(value.shape) for name, value in problem.weights.items()} == {
        name: sizes[name] for name in WEIGHTS[scope]
    }
    assert len(problem.activations) == len(problem.upstream) == VARIANTS
    for variant in problem.activations:
        assert [tuple(value.shape) for value in variant] == [sizes[name] for name in ACTIVATIONS[scope]]
    assert {tuple(value.shape) for value in problem.upstream} == {(7, 24 if scope is Scope.MLP else 40)}
    for value in everything(problem):
        assert value.dtype == torch_dtype(case) == getattr(torch, dtype.value)
        assert value.is_contiguous()
        assert not value.requires_grad
        assert torch.isfinite(value).all()


def test_gate_and_up_are_of_unit_size() -> None:
    wide = Shape("wide", 512, 300, "made up", (1,))
    problem = make_problem(small_case(shape=wide, tokens=200), "cpu")
    for name in ("w_gate", "w_up"):
        projected = problem.activations[0][0] @ problem.weights[name].T
        assert math.isclose(projected.std().item(), 1.0, abs_tol=0.05)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_leaves_are_one_s_own_but_share_the_values(requires_grad: bool) -> None:
    problem = make_problem(small_case(scope=Scope.MLP), "cpu")
    mine, theirs = problem.with_leaves(requires_grad), problem.with_leaves(True)
    for name, weight in problem.weights.items():
        leaf = mine.weights[name]
        assert leaf.is_leaf
        assert leaf.requires_grad is requires_grad
        assert leaf is not theirs.weights[name]
        assert leaf.data_ptr() == weight.data_ptr()
        assert not weight.requires_grad
    theirs.weights["w_up"].sum().backward()
    assert mine.weights["w_up"].grad is None
    assert mine.activations is problem.activations
