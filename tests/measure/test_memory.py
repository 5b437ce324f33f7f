import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.measure.memory import MemoryUse, measure_memory

ELEMENTS = 64 * 1024
UNIT = 4 * ELEMENTS
"""Bytes of one fp32 tensor of these tests. They use no Python numbers: PyTorch makes a tensor of some bytes of each."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def leaf(device: torch.device) -> Tensor:
    return torch.ones(ELEMENTS, device=device, requires_grad=True)


class SavesThree(torch.autograd.Function):
    """Keeps three tensors of its own; its backward makes one gradient."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x * x, x + x, x.clone())
        return x + x

    @staticmethod
    def backward(ctx, d):  # type: ignore[no-untyped-def]
        first, _, _ = ctx.saved_tensors
        return d * first


@pytest.mark.parametrize(
    ("function", "saved", "peak"),
    [
        (lambda x, y: SavesThree.apply(x), 3, 3 + 1 + 1),
        # It keeps its inputs, which were there before; its backward makes two gradients beside the output.
        (lambda x, y: x * y, 0, 1 + 2),
        # It keeps silu(x). Its backward holds that, the output, d_silu and dy; dx comes where one was freed.
        (lambda x, y: silu(x) * y, 1, 4),
    ],
    ids=["a function of one's own", "a product", "an intermediate"],
)
def test_saved_and_peak(device: torch.device, function: Callable[..., Tensor], saved: int, peak: int) -> None:
    leaves, upstream = [leaf(device), leaf(device)], torch.ones(ELEMENTS, device=device)

    def backward(output: Tensor) -> list[Tensor | None]:
        torch.autograd.backward(output, upstream)
        taken = [one.grad for one in leaves]
        for one in leaves:
            one.grad = None
        return taken

    def broken() -> Tensor:
        raise ValueError("broken")

    measure_memory(device, lambda: function(*leaves), backward)  # the warm-up
    with pytest.raises(ValueError, match="broken"):
        measure_memory(device, broken, None)
    use = measure_memory(device, lambda: function(*leaves), backward)
    assert use == MemoryUse(saved * UNIT, peak * UNIT, kept_bytes=0)


def with_scratch(x: Tensor) -> Tensor:
    scratch = torch.empty(4 * ELEMENTS, device=x.device)
    result = x.clone()
    del scratch
    return result


@pytest.mark.parametrize(
    ("function", "peak"),
    [(with_scratch, 5), (lambda x: x.add_(x), 0), (lambda x: torch.cat([x, x]).chunk(2)[0], 2)],
    ids=["freed within it", "in place", "a view keeps its whole storage, which is not saved beyond the output"],
)
def test_the_peak_of_a_forward(device: torch.device, function: Callable[[Tensor], Tensor], peak: int) -> None:
    x = torch.ones(ELEMENTS, device=device)
    assert measure_memory(device, lambda: function(x), None) == MemoryUse(0, peak * UNIT, 0)


def test_a_workspace_is_kept_between_calls(device: torch.device) -> None:
    x, kept = leaf(device), []

    def forward() -> Tensor:
        kept.append(torch.empty(2 * ELEMENTS, device=device))
        with torch.no_grad():
            return x.clone()

    def backward(output: Tensor) -> None:
        kept.append(torch.empty(3 * ELEMENTS, device=device))

    assert measure_memory(device, forward, None).kept_bytes == 2 * UNIT
    assert measure_memory(device, x.clone, backward).kept_bytes == 3 * UNIT


def test_garbage_of_before_is_not_counted(device: torch.device) -> None:
    x = torch.ones(ELEMENTS, device=device)
    leftovers = torch.empty(8 * ELEMENTS, device=device)
    cycle: list[object] = [leftovers]
    cycle.append(cycle)
    gone = weakref.ref(leftovers)
    del cycle, leftovers

    def forward() -> Tensor:
        assert gone() is None, "what it frees now would make its own memory look smaller"
        return x.clone()

    gc.disable()  # or Python may collect it by itself just before
    try:
        assert measure_memory(device, forward, None) == MemoryUse(0, UNIT, 0)
    finally:
        gc.enable()
