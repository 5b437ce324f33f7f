"""Kinds of tensors, told apart by PyTorch's guards and, where it has none, in Python."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.shortcuts import door
from swiglu_kernels.runtime.shortcuts.door import Kinds


class Own(torch.Tensor):
    pass


@pytest.fixture(params=["guards", "Python"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(internals, "guard", lambda _: None)
    else:
        assert internals.guard([torch.empty(2)]) is not None


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sizes": lambda x: x[:3],
    "strides": lambda x: x.t().contiguous().t(),
    "dimensions": lambda x: x[None],
    "dtype": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
    "a gradient": lambda x: x.clone().requires_grad_(),
    "another type": lambda x: x.as_subclass(Own),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "negated": lambda x: torch.complex(x, x).conj().imag,
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("place", [0, 1])
def test_another_kind_is_not_taken_for_it(change: str, place: int) -> None:
    given = [torch.randn(4, 8), torch.randn(4, 8)]
    known: Kinds[str] = Kinds()
    known.add("key", given, "found")
    assert known.get("key", [torch.randn(4, 8), torch.randn(4, 8)]) == "found"
    assert known.get("another", given) is None
    given[place] = OTHERS[change](given[place])
    assert known.get("key", given) is None
    known.add("key", given, "the other")
    assert known.get("key", given) == "the other"
    assert known.get("key", [torch.randn(4, 8), torch.randn(4, 8)]) == "found"


def test_a_tensor_that_is_given_twice_is_two() -> None:
    x, known = torch.randn(4, 8), Kinds[str]()
    known.add("key", [x, x], "found")
    assert known.get("key", [x, x]) == "found"
    assert known.get("key", [x, x.clone()]) == "found"


def test_the_precision_of_float32_products_belongs_to_it() -> None:
    known: Kinds[str] = Kinds()
    for dtype in (torch.float32, torch.bfloat16):
        known.add("key", [torch.ones(2, dtype=dtype)], "found")
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        assert known.get("key", [torch.ones(2)]) is None
        assert known.get("key", [torch.ones(2, dtype=torch.bfloat16)]) == "found"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_they_keep_no_tensor_alive_and_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MOST_KINDS", 3)
    monkeypatch.setattr(door, "MOST_KEYS", 2)
    known: Kinds[int] = Kinds()
    alive = []
    for key in range(4):
        for size in range(1, 6):
            tensor = torch.empty(size)
            alive.append(weakref.ref(tensor))
            known.add(key, [tensor], size)
            del tensor
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    assert known.values() == [3, 4, 5, 3, 4, 5], "the newest"
    assert known.get(3, [torch.empty(5)]) == 5
    known.clear()
    assert len(known) == 0
