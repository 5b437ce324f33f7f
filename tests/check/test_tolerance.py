import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiglu_bench.check import tolerance
from swiglu_bench.check.tolerance import MARGIN, MAX_MARGIN, TensorError, poison, tensor_error, unit_roundoff
from swiglu_bench.rows.record import TensorCheck

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(
    name: str, value: torch.Tensor | None, truth: torch.Tensor, eager: TensorError, dtype: torch.dtype, terms: int = 1
) -> TensorCheck:
    return tolerance.check(name, value, truth, eager, dtype, terms)


def floor(dtype: torch.dtype, terms: int = 1) -> tuple[float, float]:
    """What no implementation can avoid, of the norm and of one element: the store's rounding and an fp32 sum's."""
    summation = math.sqrt(terms) * 2.0**-24
    return unit_roundoff(dtype) / 2 + summation, unit_roundoff(dtype) + summation


def rms(value: torch.Tensor) -> float:
    return (value.norm() / math.sqrt(value.numel())).item()


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)])
def test_unit_roundoff_is_half_a_unit_in_the_last_place(dtype: torch.dtype, bits: int) -> None:
    roundoff = unit_roundoff(dtype)
    assert roundoff == 2.0**-bits
    assert torch.tensor(1 + roundoff, dtype=dtype) == 1
    assert torch.tensor(1 + 1.01 * roundoff, dtype=dtype) != 1


# tensor_error


def test_the_truth_itself_has_no_error() -> None:
    truth = normal(5, 6)
    assert tensor_error(truth.clone(), truth) == TensorError(0.0, 0.0, True)


@given(st.floats(min_value=1e-9, max_value=1e3))
def test_a_scaled_tensor_has_the_relative_error_of_its_scale(size: float) -> None:
    truth = normal(40, 50)
    error = tensor_error(truth * (1 + size), truth)
    assert error.relative == pytest.approx(size, rel=1e-5)
    assert error.maximum == pytest.approx(size * truth.abs().max().item() / rms(truth), rel=1e-5)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_one_wrong_element_is_counted_in_units_of_the_tensor_s_size(size: float) -> None:
    truth = 1e-3 * normal(40, 50)
    value = truth.clone()
    value[3, 4] += size * rms(truth)
    error = tensor_error(value, truth)
    assert error.maximum == pytest.approx(size, rel=1e-6)
    assert error.relative == pytest.approx(size / math.sqrt(truth.numel()), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_finite_comes_of_what_is_not(bad: float) -> None:
    value = normal(4, 4).float()
    value[1, 1] = bad
    assert tensor_error(value, normal(4, 4)) == TensorError(math.inf, math.inf, False)


def test_a_truth_of_zeros() -> None:
    zeros = torch.zeros(3, dtype=torch.float64)
    assert tensor_error(zeros.clone(), zeros) == TensorError(0.0, 0.0, True)
    assert tensor_error(torch.tensor([0.0, 1e-30, 0.0], dtype=torch.float64), zeros).relative == math.inf


def test_an_empty_tensor_has_no_error() -> None:
    empty = torch.empty(0, 4, dtype=torch.float64)
    assert tensor_error(empty.float(), empty) == TensorError(0.0, 0.0, True)
    assert check("output", empty.float(), empty, TensorError(0.0, 0.0, True), torch.float32).ok


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_measuring_changes_neither_side(dtype: torch.dtype) -> None:
    """A float64 value shares its memory with what is measured unless it is copied."""
    truth = normal(4, 4)
    value = (truth * 1.1).to(dtype)
    kept, kept_truth = value.clone(), truth.clone()
    tensor_error(value, truth)
    assert torch.equal(value, kept)
    assert torch.equal(truth, kept_truth)


def test_a_tensor_that_asks_for_gradients_is_fine() -> None:
    truth = normal(4, 4)
    assert tensor_error(truth.clone().requires_grad_(), truth).relative == 0.0


# check


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 11008])
def test_the_budget_is_eager_s_error_with_a_margin_and_the_rounding(dtype: torch.dtype, terms: int) -> None:
    truth = normal(30, 30)
    verdict = check("output", truth.to(dtype), truth, TensorError(0.01, 0.1, True), dtype, terms)
    whole, element = floor(dtype, terms)
    assert verdict.allowed == pytest.approx(MARGIN * 0.01 + whole)
    peak = truth.abs().max().item() / rms(truth)
    assert verdict.max_allowed == pytest.approx(MAX_MARGIN * 0.1 + element * peak)
    assert (verdict.eager_error, verdict.eager_max_error) == (0.01, 0.1)


def test_the_margins_are_tight() -> None:
    assert 1 < MARGIN <= 1.5
    assert 1 < MAX_MARGIN <= 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_rounding_alone_passes_even_where_eager_is_exact(dtype: torch.dtype, seed: int) -> None:
    """No implementation can do better than to round the truth once."""
    truth = normal(60, 70, seed=seed)
    verdict = check("output", truth.to(dtype), truth, TensorError(0.0, 0.0, True), dtype)
    assert verdict.ok, verdict.reason


@given(st.floats(min_value=0.01, max_value=3.0), st.sampled_from([1e-6, 1e-3, 0.1]))
def test_the_verdict_flips_where_the_relative_budget_ends(factor: float, eager: float) -> None:
    truth = normal(40, 50)
    budget = MARGIN * eager + floor(torch.float64)[0]
    value = truth * (1 + factor * budget)
    verdict = check("output", value, truth, TensorError(eager, 1e9, True), torch.float64)
    if abs(factor - 1) > 1e-6:
        assert verdict.ok == (factor < 1)
    assert verdict.ok or verdict.reason.startswith("relative error ")


@given(st.floats(min_value=0.01, max_value=3.0), st.sampled_from([1e-6, 1e-3, 0.1]))
def test_the_verdict_flips_where_one_element_leaves_its_budget(factor: float, eager: float) -> None:
    truth = normal(40, 50)
    peak = truth.abs().max().item() / rms(truth)
    budget = MAX_MARGIN * eager + floor(torch.float64)[1] * peak
    value = truth.clone()
    value[17, 3] -= factor * budget * rms(truth)
    verdict = check("output", value, truth, TensorError(1e9, eager, True), torch.float64)
    if abs(factor - 1) > 1e-6:
        assert verdict.ok == (factor < 1)
    assert verdict.ok or verdict.reason.startswith("largest element error ")


FINE = TensorError(0.01, 0.1, True)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "missing: no gradient came back"),
        (torch.zeros(40, 50), "has shape (40, 50), expected (40, 40)"),
        (torch.zeros(1600), "has shape (1600,), expected (40, 40)"),
        (torch.zeros(1, 40, 40), "has shape (1, 40, 40), expected (40, 40)"),
        (torch.zeros(40, 40, dtype=torch.float64), "has dtype torch.float64, expected torch.float32"),
        (torch.zeros(40, 40, dtype=torch.bfloat16), "has dtype torch.bfloat16, expected torch.float32"),
        (torch.full((40, 40), math.nan), "NaN or Inf in 1600 of 1600 elements"),
        (torch.zeros(40, 40), "relative error 1.00e+00 exceeds 1.50e-02 (eager loses 1.00e-02)"),
    ],
)
def test_every_failure_says_why(value: torch.Tensor | None, reason: str) -> None:
    verdict = check("w_gate", value, normal(40, 40), FINE, torch.float32)
    assert not verdict.ok
    assert verdict.tensor == "w_gate"
    assert verdict.reason == reason
    assert verdict.error > 0


def test_one_bad_element_in_a_crowd_is_counted() -> None:
    value = normal(4, 4).float()
    value[2, 3], value[0, 0] = math.inf, math.nan
    assert check("x", value, normal(4, 4), FINE, torch.float32).reason == "NaN or Inf in 2 of 16 elements"


def test_what_failed_before_it_was_measured_has_no_finite_error() -> None:
    verdict = check("x", None, normal(4, 4), FINE, torch.float32)
    assert verdict.error == verdict.max_error == math.inf


def test_a_pass_has_no_reason() -> None:
    verdict = check("x", normal(4, 4).float(), normal(4, 4), FINE, torch.float32)
    assert (verdict.ok, verdict.reason) == (True, "")


def test_a_verdict_cannot_be_changed() -> None:
    verdict = check("x", None, normal(4, 4), FINE, torch.float32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.ok = True  # type: ignore[misc]


# poison


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_nan_of_the_results_own_size(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[torch.Tensor] = []
    real = torch.full

    def watched(*arguments: object, **keywords: object) -> torch.Tensor:
        blocks.append(real(*arguments, **keywords))  # type: ignore[arg-type]
        return blocks[-1]

    monkeypatch.setattr(tolerance.torch, "full", watched)
    poison([(3, 5), (2, 2)], dtype, torch.device("cpu"))
    assert {tuple(block.shape) for block in blocks} == {(3, 5), (2, 2)}
    assert all(block.dtype == dtype and block.isnan().all() for block in blocks)


@pytest.mark.gpu
def test_memory_that_is_handed_out_next_is_poisoned() -> None:
    truth = torch.zeros(1000, 1000, dtype=torch.float64, device="cuda")
    torch.cuda.empty_cache()
    poison([truth.shape], torch.bfloat16, truth.device)
    assert torch.empty(1000, 1000, dtype=torch.bfloat16, device="cuda").isnan().all()


# Distribution, form, fingerprints


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


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_the_place_of_the_worst_is_its_index(shape: list[int], data: st.DataObject) -> None:
    truth = torch.ones(shape, dtype=torch.float64)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    value = truth.clone()
    value[place] += 1
    assert tensor_error(value, truth, distribution=True).worst_index == place


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.ones(2, 3), ""),
        (None, "missing"),
        (torch.ones(3, 2), "form"),
        (torch.ones(2, 3, dtype=torch.float64), "form"),
        (torch.ones(2, 3, device="meta"), "form"),
        (torch.ones(2, 3).as_subclass(Other), "plain tensor"),
        (torch.ones(2, 3).to_sparse(), "plain tensor"),
        (torch.nn.Parameter(torch.ones(2, 3)), "plain tensor"),
    ],
)
def test_what_is_no_result_whatever_its_values(value: torch.Tensor | None, expected: str) -> None:
    fault = tolerance.form_fault(value, (2, 3), torch.float32, torch.device("cpu"))
    assert (fault.check if fault else "") == expected


def test_memory_of_an_input_is_no_memory_for_a_result() -> None:
    both = torch.ones(10, 4)
    cpu = torch.device("cpu")
    beside, across = both[5:], both[3:8]
    assert tolerance.form_fault(beside, (5, 4), torch.float32, cpu, [both[:5]]) is None
    fault = tolerance.form_fault(across, (5, 4), torch.float32, cpu, [both[:5]])
    assert fault is not None
    assert fault.check == "aliasing"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (2, 3, 4), (0, 4)])
def test_a_fingerprint_sees_one_bit_and_one_exchange(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = normal(*shape).to(dtype) if shape else normal(1).to(dtype)[0]
    mark = tolerance.fingerprint(value)
    assert torch.equal(mark, tolerance.fingerprint(value.clone()))
    if value.numel() < 2:
        return
    changed, exchanged = value.clone(), value.clone()
    changed.view(-1)[-1].nextafter_(torch.tensor(9.0, dtype=dtype))
    flat = exchanged.view(-1)
    flat[0], flat[-1] = value.view(-1)[-1], value.view(-1)[0]
    assert not torch.equal(mark, tolerance.fingerprint(changed))
    assert not torch.equal(mark, tolerance.fingerprint(exchanged))


def test_nan_has_a_fingerprint_like_any_other_bits() -> None:
    value = torch.tensor([[math.nan, 1.0]])
    assert torch.equal(tolerance.fingerprint(value), tolerance.fingerprint(value.clone()))
    assert tolerance.same_bits(value, value.clone())
    assert not tolerance.same_bits(value, torch.tensor([[1.0, math.nan]]))


def test_few_elements_are_judged_by_what_chance_can_do() -> None:
    assert [tolerance.scatter(count) for count in (0, 1000, 10**9)] == [1.0, 1.0, 1.0]
    assert tolerance.scatter(1) == tolerance.scatter(3) == tolerance.FEW_MARGIN
    assert tolerance.scatter(150) < MARGIN < tolerance.scatter(130)
    factors = [tolerance.scatter(count) for count in range(1, 1001)]
    assert factors == sorted(factors, reverse=True)


def test_an_unlucky_error_on_three_elements_passes_and_a_wrong_one_does_not() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    lucky = TensorError(1e-4, 1e-4, True)
    assert check("bias", truth * (1 + 1e-3), truth, lucky, torch.float64).ok
    assert not check("bias", truth * (1 + 1e-2), truth, lucky, torch.float64).ok


def test_the_scatter_is_that_of_random_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(2, 100_000, 20, generator=generator).square().mean(-1).sqrt()
    assert (errors[0] / errors[1]).max().item() < tolerance.scatter(20) < 2 * (errors[0] / errors[1]).max().item()
