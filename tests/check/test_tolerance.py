import math

import pytest
import torch

from swiglu_bench.check import tolerance
from swiglu_bench.check.tolerance import BIAS_SHARE, TensorError, tensor_error
from swiglu_bench.rows.record import TensorCheck

MANY = 10**9


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(
    name: str, value: torch.Tensor, truth: torch.Tensor, eager: TensorError, dtype: torch.dtype, terms: int = 1
) -> TensorCheck:
    return tolerance.check(name, value, truth, eager, tolerance.Arithmetic(dtype, terms, MANY))


def signs(value: torch.Tensor) -> torch.Tensor:
    """Plus and minus 1 by lot: errors of one size without a direction."""
    return torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1


def rms(value: torch.Tensor) -> float:
    return (value.norm() / math.sqrt(value.numel())).item()


# tensor_error


def test_errors_are_relative_to_the_tensor_and_measuring_changes_neither_side() -> None:
    truth = 1e-3 * normal(40, 50)
    kept, value = truth.clone(), truth * 1.25  # a float64 value shares its memory with what is measured
    error = tensor_error(value, truth)
    assert error.relative == pytest.approx(0.25, rel=1e-6)
    assert error.maximum == pytest.approx(0.25 * truth.abs().max().item() / rms(truth), rel=1e-6)
    assert torch.equal(value, truth * 1.25)
    assert torch.equal(truth, kept)
    value = truth.clone()
    value[3, 4] += 1e3 * rms(truth)
    error = tensor_error(value, truth)
    assert error.maximum == pytest.approx(1e3, rel=1e-6)
    assert error.relative == pytest.approx(1e3 / math.sqrt(truth.numel()), rel=1e-6)


def test_what_is_not_finite_or_empty_or_zero() -> None:
    zeros, empty = torch.zeros(3, dtype=torch.float64), torch.empty(0, 4, dtype=torch.float64)
    for bad in (math.nan, -math.inf):
        assert tensor_error(zeros + bad, normal(3)) == TensorError(math.inf, math.inf, False)
    assert tensor_error(zeros.clone(), zeros) == tensor_error(empty, empty) == TensorError(0.0, 0.0, True)
    assert tensor_error(torch.tensor([0.0, 1e-30, 0.0], dtype=torch.float64), zeros).relative == math.inf
    assert check("output", empty.float(), empty, TensorError(0.0, 0.0, True), torch.float32).ok


# check


# check


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_implementation_can_do_better_than_to_round_the_truth_once(dtype: torch.dtype) -> None:
    truth = normal(30, 30)
    assert check("output", truth.to(dtype), truth, TensorError(0.0, 0.0, True), dtype).ok


# Distribution, few elements, bias


def test_the_distribution_of_errors_and_where_the_worst_is() -> None:
    truth = torch.ones(1, 1000, dtype=torch.float64)
    value = truth + torch.arange(1, 1001, dtype=torch.float64) * 1e-6
    value[0, 123] += 1.0
    error = tensor_error(value, truth, distribution=True)
    assert error.median == pytest.approx(501e-6, rel=1e-5)
    assert error.p999 == pytest.approx(1000e-6, rel=1e-5)
    assert error.maximum == pytest.approx(1.000124)
    assert error.worst_index == (0, 123)
    assert tensor_error(value, truth).median is None


@pytest.mark.parametrize("seed", range(2))
def test_errors_of_few_elements_of_h_stand_in_every_tensor(seed: int) -> None:
    """Of one token, a weight's gradient is an outer product: a few errors, each in a whole row."""
    gradient, x = normal(12, seed=seed), normal(500, seed=seed + 100)
    truth = torch.outer(gradient, x)
    found, lucky = (truth + torch.outer(scale * 1e-3 * normal(12, seed=seed + 200), x) for scale in (1.0, 0.5))
    eager = tensor_error(lucky, truth)
    for elements, ok in ((12, True), (MANY, False)):
        assert tolerance.check("w", found, truth, eager, tolerance.Arithmetic(torch.float32, 1, elements)).ok is ok
    one_way = torch.outer(gradient * (1 + 1e-3), x)
    fine = TensorError(1e-3, 1e-2, True)
    for elements, reason in ((12, ""), (MANY, "bias")):
        arithmetic = tolerance.Arithmetic(torch.float32, 1, elements)
        assert tolerance.check("w", one_way, truth, fine, arithmetic).check == reason


def test_an_error_of_one_direction_fails_long_before_the_norm_sees_it() -> None:
    truth = normal(300, 300)
    eager = TensorError(0.01, 0.1, True)
    allowed = BIAS_SHARE * check("output", truth.float(), truth, eager, torch.float32).allowed
    for factor, passes in ((0.5, True), (1.5, False), (-0.5, True), (-1.5, False)):
        verdict = check("output", (truth * (1 + factor * allowed)).float(), truth, eager, torch.float32)
        assert verdict.error < verdict.allowed
        assert verdict.max_error < verdict.max_allowed
        assert (verdict.ok, verdict.check) == (passes, "" if passes else "bias"), verdict.reason
    without_direction = truth + signs(truth) * 0.014 * rms(truth)
    assert check("output", without_direction, truth, eager, torch.float64).ok


def test_digits_that_are_cut_off_are_a_bias_and_rounded_ones_are_none() -> None:
    truth = normal(300, 300)
    rounded = truth.float().bfloat16()
    eager = tensor_error(rounded, truth)
    cut = (truth.float().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert abs(eager.bias) < 6 * eager.bias_by_chance
    assert check("output", rounded, truth, eager, torch.bfloat16).ok
    verdict = check("output", cut, truth, TensorError(3 * eager.relative, 1.0, True), torch.bfloat16)
    assert verdict.check == "bias"
    assert check("output", cut, truth, tensor_error(cut, truth), torch.bfloat16).ok, "where eager has it, too"


def test_a_gates_fp32_sum_counts_in_the_tail() -> None:
    """256 terms one after the other, of which one alone makes the gate -40: 1.3e-5 of exp(-40), measured on a GPU."""
    lost = [tolerance.Arithmetic(dtype, 256, MANY, tail=40.0).lost_anyway for dtype in (torch.float32, torch.bfloat16)]
    assert 1.3e-5 < lost[0] < 1e-4
    assert lost[1] == pytest.approx(40 * 2 * 2**-8, rel=1e-3)
