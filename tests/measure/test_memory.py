import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swiglu_bench.measure.memory import MemoryUse, measure_memory

ELEMENTS = 64 * 1024
UNIT = 4 * ELEMENTS
"""Bytes of one fp32 tensor of these tests. They use no Python numbers: PyTorch makes a tensor of some bytes of each."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def leaf(device: torch.device) -> Tensor:
    return torch.ones(ELEMENTS, device=device, requires_grad=True)


def measured(device: torch.device, forward: Callable[[], Tensor], leaves: list[Tensor]) -> MemoryUse:
    """Memory of a forward and its backward; the gradients of the leaves are handed over."""
    upstream = torch.ones(ELEMENTS, device=device)

    def backward(output: Tensor) -> list[Tensor | None]:
        torch.autograd.backward(output, upstream)
        taken = [one.grad for one in leaves]
        for one in leaves:
            one.grad = None
        return taken

    for _ in range(2):  # the first call is the warm-up
        use = measure_memory(device, forward, backward)
    return use


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


def test_saved_and_peak_of_a_known_function(device: torch.device) -> None:
    x = leaf(device)
    assert measured(device, lambda: SavesThree.apply(x), [x]) == MemoryUse(
        saved_bytes=3 * UNIT, peak_bytes=(3 + 1 + 1) * UNIT, kept_bytes=0
    )


def test_what_a_product_saves_was_there_before(device: torch.device) -> None:
    """x * y keeps its inputs, which cost nothing more; its backward makes two gradients beside the output."""
    x, y = leaf(device), leaf(device)
    assert measured(device, lambda: x * y, [x, y]) == MemoryUse(0, (1 + 2) * UNIT, 0)


def test_an_intermediate_is_saved(device: torch.device) -> None:
    """silu(x) * y keeps silu(x). Its backward holds that, the output, d_silu and dy; dx comes where one was freed."""
    x, y = leaf(device), leaf(device)
    use = measured(device, lambda: torch.nn.functional.silu(x) * y, [x, y])
    assert use.saved_bytes == UNIT
    assert use.peak_bytes == 4 * UNIT
    assert use.kept_bytes == 0


def test_the_peak_of_a_forward_counts_what_is_freed_in_it(device: torch.device) -> None:
    x = leaf(device)

    def forward() -> Tensor:
        with torch.no_grad():
            scratch = torch.empty(4 * ELEMENTS, device=device)
            result = x.clone()
            del scratch
        return result

    assert measure_memory(device, forward, None) == MemoryUse(0, 5 * UNIT, 0)


def test_a_workspace_is_kept_between_calls(device: torch.device) -> None:
    x, kept = leaf(device), []

    def forward() -> Tensor:
        kept.append(torch.empty(2 * ELEMENTS, device=device))
        with torch.no_grad():
            return x.clone()

    assert measure_memory(device, forward, None).kept_bytes == 2 * UNIT


def test_a_workspace_made_in_backward_is_kept_as_well(device: torch.device) -> None:
    x, kept = leaf(device), []

    def backward(output: Tensor) -> None:
        kept.append(torch.empty(3 * ELEMENTS, device=device))

    assert measure_memory(device, x.clone, backward).kept_bytes == 3 * UNIT


def test_a_forward_that_writes_in_place_takes_nothing(device: torch.device) -> None:
    buffer, other = torch.ones(ELEMENTS, device=device), torch.ones(ELEMENTS, device=device)
    assert measure_memory(device, lambda: buffer.add_(other), None) == MemoryUse(0, 0, 0)


def test_an_output_that_is_a_view_counts_its_storage(device: torch.device) -> None:
    """Half of a packed product keeps the whole of it alive; that is not 'saved beyond the output'."""
    x = leaf(device)

    def forward() -> Tensor:
        with torch.no_grad():
            return torch.cat([x, x]).chunk(2)[0]

    assert measure_memory(device, forward, None) == MemoryUse(0, 2 * UNIT, 0)


def test_garbage_of_before_is_not_counted(device: torch.device) -> None:
    x = leaf(device)
    leftovers = torch.empty(8 * ELEMENTS, device=device)
    cycle: list[object] = [leftovers]
    cycle.append(cycle)
    gone = weakref.ref(leftovers)
    del cycle, leftovers

    def forward() -> Tensor:
        assert gone() is None, "what it frees now would make its own memory look smaller"
        return x.detach().clone()

    gc.disable()  # or Python may collect it by itself just before
    try:
        assert measure_memory(device, forward, None) == MemoryUse(0, UNIT, 0)
    finally:
        gc.enable()


def test_errors_come_through_and_the_next_measurement_works(device: torch.device) -> None:
    x = leaf(device)

    def broken() -> Tensor:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        measure_memory(device, broken, None)
    assert measured(device, lambda: SavesThree.apply(x), [x]).saved_bytes == 3 * UNIT
