import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from specimens import small_case
from torch import Tensor

from swiglu_bench.cases.cases import Dtype, Scope
from swiglu_bench.check import results
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.results import fingerprint, form_fault, poison, same_bits

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


class Other(Tensor):
    pass


def without_memory() -> Tensor:
    value = torch.ones(2, 3)
    value.untyped_storage().resize_(0)
    return value


def nested(layout: torch.layout) -> Tensor:
    """Whose first use imports for a second."""
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=layout)


ODD: list[tuple[Any, str, str, str]] = [
    (None, "missing", "no gradient came back", ""),
    ((torch.ones(2, 3), torch.ones(2, 3)), "plain tensor", "tuple", "torch.Tensor"),
    (1.5, "plain tensor", "float", "torch.Tensor"),
    (np.ones((2, 3), np.float32), "plain tensor", "ndarray", "torch.Tensor"),
    (torch.ones(2, 3).as_subclass(Other), "plain tensor", "Other", "torch.Tensor"),
    (torch.nn.Parameter(torch.ones(2, 3)), "plain tensor", "Parameter", "torch.Tensor"),
    (torch.ones(2, 3).to_sparse(), "plain tensor", "sparse_coo", "dense"),
    (partial(nested, torch.strided), "plain tensor", "nested", "dense"),
    (partial(nested, torch.jagged), "plain tensor", "NestedTensor", "Tensor"),
    (torch.ones(2, 3, dtype=torch.complex64).conj(), "plain tensor", "lazy view", "values in memory"),
    (torch._neg_view(torch.ones(2, 3)), "plain tensor", "lazy view", "values in memory"),
    (without_memory(), "plain tensor", "memory", ""),
    (torch.ones(3, 2), "form", "(3, 2)", "(2, 3)"),
    (torch.ones(6), "form", "(6,)", "(2, 3)"),
    (torch.ones(1, 2, 3), "form", "(1, 2, 3)", "(2, 3)"),
    (torch.ones(2, 3, dtype=torch.float64), "form", "float64", "float32"),
    (torch.ones(2, 3, device="meta"), "form", "meta", "cpu"),
]


@pytest.mark.parametrize(("value", "check", "came", "wanted"), ODD, ids=[f"{one[1]}: {one[2]}" for one in ODD])
def test_results_of_odd_kinds_say_what_came_and_what_is_wanted(value: Any, check: str, came: str, wanted: str) -> None:
    fault = form_fault(value() if isinstance(value, partial) else value, (2, 3), torch.float32, CPU)
    assert fault is not None
    assert fault.check == check
    assert came in fault.reason
    assert wanted in fault.reason
    assert "\n" not in fault.reason


@pytest.mark.parametrize(
    "value",
    [torch.ones(2, 3), torch.ones(3, 2).T, torch.ones(2, 6)[:, ::2], torch.ones(1).expand(2, 3), torch.full((2, 3), 9)],
    ids=["plain", "transposed", "strided", "expanded", "of integers"],
)
def test_strides_are_no_fault(value: Tensor) -> None:
    assert form_fault(value, (2, 3), value.dtype, CPU) is None


def test_memory_of_an_input_is_no_memory_for_a_result() -> None:
    both = torch.ones(10, 4)
    beside, across = both[5:], both[3:8]
    assert form_fault(beside, (5, 4), torch.float32, CPU, [both[:5]]) is None
    fault = form_fault(across, (5, 4), torch.float32, CPU, [torch.ones(3), both[:5]])
    assert fault is not None
    assert fault.check == "aliasing"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (2, 3, 4), (0, 4)])
def test_a_fingerprint_sees_one_bit_and_one_exchange(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(dtype)
    mark = fingerprint(value)
    assert torch.equal(mark, fingerprint(value.clone()))
    if value.numel() < 2:
        return
    changed, exchanged = value.clone(), value.clone()
    changed.view(-1)[-1].nextafter_(torch.tensor(9.0, dtype=dtype))
    flat = exchanged.view(-1)
    flat[0], flat[-1] = value.view(-1)[-1], value.view(-1)[0]
    for other in (changed, exchanged):
        assert not torch.equal(mark, fingerprint(other))
        assert not same_bits(value, other)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (2, 3, 4), (0, 4)])
@pytest.mark.parametrize("at_once", [1, 12])
def test_a_fingerprint_is_the_same_however_few_are_added_up_at_once(
    shape: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.randn(shape)
    mark = fingerprint(value)
    monkeypatch.setattr(results, "AT_ONCE", at_once)
    assert torch.equal(mark, fingerprint(value))


def test_nan_counts_as_the_bits_that_it_is() -> None:
    value = torch.tensor([[math.nan, 1.0]])
    assert torch.equal(fingerprint(value), fingerprint(value.clone()))
    assert same_bits(value, value.clone())
    assert not same_bits(value, torch.tensor([[1.0, math.nan]]))
    assert not same_bits(torch.zeros(1), -torch.zeros(1))


@pytest.mark.parametrize("backward", [True, False])
def test_poison_is_nan_of_the_results_own_sizes(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[Tensor] = []
    real = torch.full

    def watched(*given: Any, **named: Any) -> Tensor:
        blocks.append(real(*given, **named))
        return blocks[-1]

    monkeypatch.setattr(results.torch, "full", watched)
    poison(make_problem(small_case(dtype=Dtype.BFLOAT16, scope=Scope.MLP), "cpu"), backward)
    output, weights = (7, 24), {(40, 24), (24, 40)}
    assert {tuple(block.shape) for block in blocks} == ({output, *weights} if backward else {output})
    assert all(block.dtype is torch.bfloat16 and block.isnan().all() for block in blocks)


@pytest.mark.gpu
def test_memory_that_is_handed_out_next_is_poisoned() -> None:
    problem = make_problem(small_case(tokens=2000, dtype=Dtype.BFLOAT16), "cuda")
    torch.cuda.empty_cache()
    poison(problem, backward=False)
    assert torch.empty(2000, 40, dtype=torch.bfloat16, device="cuda").isnan().all()
