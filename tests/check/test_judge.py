"""The tolerance itself: what must pass it, and what must fail it."""

import dataclasses
import functools
import gc
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from specimens import small_case

from swiglu_bench.check.inputs import make_problem, torch_dtype
from swiglu_bench.check.judge import Judge, Sealed, make_judge
from swiglu_bench.check.truth import compute_truth
from swiglu_bench.rows.record import TensorCheck
from swiglu_bench.spec.cases import ACTIVATIONS, Dtype, Mode, Scope, Shape, tensors
from swiglu_bench.spec.problem import Problem

Produced = dict[str, torch.Tensor | None]
MIDDLE = Shape("middle", 96, 160, "made up", (33,))
K_TILE = 16


def in_high_precision(problem: Problem, variant: int, *, drop: int = 0, swap: bool = False) -> Produced:
    """What a good fused kernel gives: everything in fp32, each result rounded once to the case's dtype.

    `drop` leaves out the last columns of the products' inner dimension, `swap` takes gate for up.
    """
    scope, dtype = problem.case.scope, torch_dtype(problem.case)
    leaves = dict(zip(ACTIVATIONS[scope], problem.activations[variant], strict=True)) | problem.weights
    leaves = {name: value.detach().float().requires_grad_() for name, value in leaves.items()}
    if scope is Scope.ACTIVATION:
        gate, up = leaves["gate"], leaves["up"]
    else:
        inner = slice(0, leaves["x"].shape[1] - drop)
        gate, up = (F.linear(leaves["x"][:, inner], leaves[name][:, inner]) for name in ("w_gate", "w_up"))
    if swap:
        gate, up = up, gate
    output = F.silu(gate) * up
    if scope is Scope.MLP:
        output = F.linear(output, leaves["w_down"])
    output.backward(problem.upstream[variant].float())
    gradients = {name: value.grad for name, value in leaves.items()}
    return {"output": output.detach().to(dtype)} | {
        name: value.to(dtype) for name, value in gradients.items() if value is not None
    }


def setting(scope: Scope, dtype: Dtype, tokens: int = 33, shape: Shape = MIDDLE) -> tuple[Problem, Judge]:
    problem = make_problem(small_case(scope=scope, dtype=dtype, tokens=tokens, shape=shape), "cpu")
    return problem, make_judge(problem, 0)


def failed(checks: tuple[TensorCheck, ...]) -> set[str]:
    return {check.tensor for check in checks if not check.ok}


every_setting = pytest.mark.parametrize(
    ("scope", "dtype"), [(scope, dtype) for scope in Scope for dtype in Dtype], ids=lambda value: value.value
)


# What must pass


@every_setting
@pytest.mark.parametrize("tokens", [1, 2, 33, 130])
def test_a_result_kept_in_fp32_until_the_store_passes(scope: Scope, dtype: Dtype, tokens: int) -> None:
    problem, judge = setting(scope, dtype, tokens)
    checks = judge.judge(in_high_precision(problem, 0))
    assert {check.tensor for check in checks} == {"output", *tensors(scope)}
    assert not failed(checks), [(check.tensor, check.reason) for check in checks]


@every_setting
@pytest.mark.parametrize("seed", range(1, 6))
def test_it_passes_whatever_the_seed(scope: Scope, dtype: Dtype, seed: int) -> None:
    problem = make_problem(small_case(scope=scope, dtype=dtype, seed=seed), "cpu")
    checks = make_judge(problem, 1).judge(in_high_precision(problem, 1))
    assert not failed(checks), [(check.tensor, check.reason) for check in checks]


@every_setting
def test_eager_stands_exactly_at_its_own_mark(scope: Scope, dtype: Dtype) -> None:
    _, judge = setting(scope, dtype)
    for name, error in judge.eager.items():
        assert error.finite
        assert 0 < error.relative < 40 * torch.finfo(judge.dtype).eps, name
        assert error.relative < error.maximum


def test_eager_loses_more_than_one_rounding_in_16_bits() -> None:
    """The reason for a judge: eager rounds gate, up and silu, so a fused kernel beats it."""
    problem, judge = setting(Scope.GLU, Dtype.BFLOAT16)
    checks = {check.tensor: check for check in judge.judge(in_high_precision(problem, 0))}
    assert checks["output"].error < 0.7 * checks["output"].eager_error


# What must fail


def zeros(produced: Produced, name: str) -> torch.Tensor:
    return torch.zeros_like(produced[name])  # type: ignore[arg-type]


def shifted_row(produced: Produced, name: str) -> torch.Tensor:
    return produced[name].roll(1, 0)  # type: ignore[union-attr]


def shifted_column(produced: Produced, name: str) -> torch.Tensor:
    return produced[name].roll(-1, 1)  # type: ignore[union-attr]


def last_row_unwritten(produced: Produced, name: str) -> torch.Tensor:
    value = produced[name].clone()  # type: ignore[union-attr]
    value[-1] = 0
    return value


def last_row_unmasked(produced: Produced, name: str) -> torch.Tensor:
    """The last row of a ragged tile mixed up with the rows beyond it."""
    value = produced[name].clone()  # type: ignore[union-attr]
    value[-1] += value[-2]
    return value


def last_column_unwritten(produced: Produced, name: str) -> torch.Tensor:
    value = produced[name].clone()  # type: ignore[union-attr]
    value[:, -1] = 0
    return value


def row_0_for_all(produced: Produced, name: str) -> torch.Tensor:
    value = produced[name]
    return value[:1].expand_as(value).clone()  # type: ignore[union-attr, index]


def one_wrong_element(produced: Produced, name: str) -> torch.Tensor:
    value = produced[name].clone()  # type: ignore[union-attr]
    flat = value.view(-1)
    flat[flat.abs().argmax()] *= -1
    return value


def one_element_off_by_the_tensor_s_size(produced: Produced, name: str) -> torch.Tensor:
    value = produced[name].clone()  # type: ignore[union-attr]
    value[-1, -1] += value.float().norm() / math.sqrt(value.numel())
    return value


def one_nan(produced: Produced, name: str) -> torch.Tensor:
    value = produced[name].clone()  # type: ignore[union-attr]
    value[0, 0] = math.nan
    return value


def one_infinity(produced: Produced, name: str) -> torch.Tensor:
    value = produced[name].clone()  # type: ignore[union-attr]
    value[-1, 0] = -math.inf
    return value


def too_large_by_3_percent(produced: Produced, name: str) -> torch.Tensor:
    return produced[name] * 1.03  # type: ignore[operator]


def wrong_sign(produced: Produced, name: str) -> torch.Tensor:
    return -produced[name]  # type: ignore[operator]


def coarser_dtype_s_rounding(produced: Produced, name: str) -> torch.Tensor:
    """fp8 on the way, in a tensor of the right dtype."""
    value = produced[name]
    return value.to(torch.float8_e4m3fn).to(value.dtype)  # type: ignore[union-attr]


def wrong_dtype(produced: Produced, name: str) -> torch.Tensor:
    return produced[name].double()  # type: ignore[union-attr]


def wrong_shape(produced: Produced, name: str) -> torch.Tensor:
    return produced[name][:-1]  # type: ignore[index]


def transposed(produced: Produced, name: str) -> torch.Tensor:
    return produced[name].T  # type: ignore[union-attr]


def missing(produced: Produced, name: str) -> None:
    return None


FAULTS = [
    zeros, shifted_row, shifted_column, last_row_unwritten, last_row_unmasked, last_column_unwritten, row_0_for_all,
    one_wrong_element, one_element_off_by_the_tensor_s_size, one_nan, one_infinity, too_large_by_3_percent, wrong_sign,
    coarser_dtype_s_rounding, wrong_dtype, wrong_shape, transposed, missing,
]  # fmt: skip


@every_setting
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_fails_in_the_tensor_that_has_it_and_nowhere_else(
    scope: Scope, dtype: Dtype, fault: Callable[[Produced, str], torch.Tensor | None]
) -> None:
    problem, judge = setting(scope, dtype)
    produced = in_high_precision(problem, 0)
    for name in produced:
        checks = judge.judge(produced | {name: fault(produced, name)})
        assert failed(checks) == {name}, f"{fault.__name__} in {name}"
        assert all(check.reason for check in checks if not check.ok)


@every_setting
def test_gate_and_up_swapped_fails_everywhere(scope: Scope, dtype: Dtype) -> None:
    problem, judge = setting(scope, dtype)
    assert failed(judge.judge(in_high_precision(problem, 0, swap=True))) >= {"output", *ACTIVATIONS[scope]}


@every_setting
def test_gradients_of_gate_and_up_swapped_fail(scope: Scope, dtype: Dtype) -> None:
    problem, judge = setting(scope, dtype)
    produced = in_high_precision(problem, 0)
    first, second = ("gate", "up") if scope is Scope.ACTIVATION else ("w_gate", "w_up")
    checks = judge.judge(produced | {first: produced[second], second: produced[first]})
    assert failed(checks) == {first, second}


@pytest.mark.parametrize("scope", [Scope.GLU, Scope.MLP])
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("drop", [K_TILE, 1], ids=["tile", "column"])
def test_a_dropped_k_tile_fails(scope: Scope, dtype: Dtype, drop: int) -> None:
    problem, judge = setting(scope, dtype)
    checks = judge.judge(in_high_precision(problem, 0, drop=drop))
    assert failed(checks) == {"output", *tensors(scope)}


@every_setting
def test_a_stale_result_fails_everywhere(scope: Scope, dtype: Dtype) -> None:
    problem, judge = setting(scope, dtype)
    assert failed(judge.judge(in_high_precision(problem, 1))) == {"output", *tensors(scope)}
    assert not failed(make_judge(problem, 1).judge(in_high_precision(problem, 1)))


@pytest.mark.parametrize("dtype", list(Dtype))
def test_one_bad_row_of_thousands_fails(dtype: Dtype) -> None:
    """Where the norm of many rows hides the one, the largest element shows it."""
    narrow = Shape("narrow", 8, 64, "made up", (1,))
    problem, judge = setting(Scope.ACTIVATION, dtype, tokens=20_000, shape=narrow)
    produced = in_high_precision(problem, 0)
    for fault in (last_row_unwritten, last_row_unmasked, one_wrong_element):
        assert failed(judge.judge(produced | {"output": fault(produced, "output")})) == {"output"}


@every_setting
def test_the_verdict_flips_at_the_budget(scope: Scope, dtype: Dtype) -> None:
    """An error of known size is added to the truth; fp64 carries it so that no rounding blurs its size."""
    _, judge = setting(scope, dtype)
    in_fp64 = dataclasses.replace(judge, dtype=torch.float64)
    summation = math.sqrt(judge.longest_sum) * 2.0**-24
    for name, sealed in judge.truth.items():
        truth = sealed.open()
        eager = judge.eager[name].relative
        flat = torch.randint(0, 2, truth.shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1
        flat *= truth.norm() / math.sqrt(truth.numel())  # the same for every element: none of them stands out
        for factor, passes in ((0.5, True), (1.49, True), (1.51, False), (5.0, False)):
            (check,) = in_fp64.judge({name: truth + flat * (factor * eager + summation)})
            assert check.ok is passes, f"{name}: {factor} times eager's error: {check.reason}"
            assert check.reason.startswith("" if passes else "relative error")


# The judge itself


@pytest.mark.parametrize("scope", list(Scope))
def test_a_forward_case_judges_the_output_alone(scope: Scope) -> None:
    problem = make_problem(small_case(scope=scope, mode=Mode.FORWARD), "cpu")
    judge = make_judge(problem, 0)
    assert set(judge.truth) == set(judge.eager) == {"output"}
    assert not failed(judge.judge({"output": in_high_precision(problem, 0)["output"]}))


def test_a_label_words_the_name() -> None:
    problem, judge = setting(Scope.GLU, Dtype.FLOAT32)
    produced = in_high_precision(problem, 0)
    (check,) = judge.judge({"output": produced["output"]}, "{} (inference)")
    assert check.tensor == "output (inference)"
    assert check.ok


def test_making_it_changes_nothing_of_the_problem() -> None:
    problem = make_problem(small_case(scope=Scope.MLP), "cpu")
    kept = [value.clone() for value in (*problem.weights.values(), *problem.activations[0], problem.upstream[0])]
    make_judge(problem, 0)
    now = [*problem.weights.values(), *problem.activations[0], problem.upstream[0]]
    assert all(torch.equal(one, other) and other.grad is None for one, other in zip(kept, now, strict=True))


def test_poisoning_touches_neither_truth_nor_problem() -> None:
    problem, judge = setting(Scope.GLU, Dtype.FLOAT32)
    judge.poison()
    assert all(torch.isfinite(value.open()).all() for value in judge.truth.values())
    assert not failed(judge.judge(in_high_precision(problem, 0)))


def test_nobody_finds_the_truth_among_the_tensors() -> None:
    problem, judge = setting(Scope.MLP, Dtype.FLOAT32)
    answers = compute_truth(problem, 0)
    alive = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype is torch.float64]
    for name, sealed in judge.truth.items():
        assert torch.equal(sealed.open(), answers[name])
        mine = {id(value) for value in answers.values()}
        twins = [one for one in alive if id(one) not in mine and one.shape == sealed.shape]
        assert not any(torch.allclose(one, answers[name]) for one in twins)


def test_what_is_sealed_can_be_opened_any_number_of_times() -> None:
    value = torch.tensor([[0.0, -0.0, 1.5], [float("inf"), -3.0, 1e-300]], dtype=torch.float64)
    sealed = Sealed(value.clone())
    assert all(torch.equal(sealed.open(), value) for _ in range(2))
    assert sealed.shape == value.shape


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(Scope)),
    st.sampled_from(list(Dtype)),
    st.floats(0.02, 50.0).filter(lambda factor: abs(factor - 1) > 0.02),
    st.integers(0, 3),
)
def test_an_injected_error_of_known_size_flips_the_verdict_where_the_budget_is(
    scope: Scope, dtype: Dtype, factor: float, which: int
) -> None:
    """The truth with an error of `factor` times the budget, the same for every element, or of one element alone."""
    _, judge = _settings(scope, dtype)
    in_fp64 = dataclasses.replace(judge, dtype=torch.float64)
    name = list(judge.truth)[which % len(judge.truth)]
    truth = judge.truth[name].open()
    rms = (truth.norm() / math.sqrt(truth.numel())).item()
    (clean,) = in_fp64.judge({name: truth})
    assert clean.ok
    signs = torch.randint(0, 2, truth.shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    (spread,) = in_fp64.judge({name: truth + signs * rms * clean.allowed * factor})
    assert spread.ok is (factor < 1)
    assert spread.check == ("" if factor < 1 else "relative error")
    one = truth.clone()
    one[0, 0] += rms * clean.max_allowed * factor
    (single,) = in_fp64.judge({name: one})
    within = clean.max_allowed * factor / math.sqrt(truth.numel()) <= clean.allowed
    assert single.ok is (factor < 1 and within)
    if within and factor > 1:
        assert single.check == "largest element"


@functools.cache
def _settings(scope: Scope, dtype: Dtype) -> tuple[Problem, Judge]:
    return setting(scope, dtype)
