import time
from typing import Any

import pytest
import torch

from swiglu_bench.measure.replaced import put_back


def test_nothing_is_replaced_at_first() -> None:
    assert put_back() == []


@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (time, "perf_counter", "time.perf_counter"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
        (torch, "equal", "torch.equal"),
        (torch.Tensor, "norm", "torch.Tensor.norm"),
    ],
)
def test_a_replaced_function_is_named_and_put_back(owner: Any, name: str, told: str) -> None:
    real = getattr(owner, name)
    setattr(owner, name, lambda *arguments: real(*arguments))
    try:
        assert put_back() == [told]
        assert getattr(owner, name) is real
    finally:
        setattr(owner, name, real)
    assert put_back() == []
