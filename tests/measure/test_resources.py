import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from swiglu_bench.measure import resources
from swiglu_bench.measure.resources import WARMUPS, MemoryUse, capture, joules_per_call, measure_memory

CUDA = torch.device("cuda", 0)
ELEMENTS = 64 * 1024
UNIT = 4 * ELEMENTS
"""Bytes of one fp32 tensor of these tests. They use no Python numbers: PyTorch makes a tensor of some bytes of each."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def leaf(device: torch.device) -> Tensor:
    return torch.ones(ELEMENTS, device=device, requires_grad=True)


def test_saved_and_peak(device: torch.device) -> None:
    """It keeps silu(x). Its backward holds that, the output, d_silu and dy; dx comes where one was freed."""
    leaves, upstream = [leaf(device), leaf(device)], torch.ones(ELEMENTS, device=device)

    def forward() -> Tensor:
        return silu(leaves[0]) * leaves[1]

    def backward(output: Tensor) -> list[Tensor | None]:
        torch.autograd.backward(output, upstream)
        taken = [value.grad for value in leaves]
        for value in leaves:
            value.grad = None
        return taken

    measure_memory(device, forward, backward)  # the warm-up
    assert measure_memory(device, forward, backward) == MemoryUse(UNIT, 4 * UNIT, kept_bytes=0)


def with_scratch(x: Tensor) -> Tensor:
    scratch = torch.empty(4 * ELEMENTS, device=x.device)  # noqa: F841 -- freed within it
    return x.clone()


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


class Meter:
    """A device of 500 W whose counter moves every 100 ms; a call takes `call_ms`, and there is a clock to look at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_ms: float) -> None:
        self.now_ms, self.call_ms, self.calls = 37.0, call_ms, 0
        monkeypatch.setattr(resources.time, "perf_counter", self.look)

    def look(self) -> float:
        self.now_ms += 1e-4
        return self.now_ms / 1e3

    def run(self, calls: int) -> None:
        self.calls += calls
        self.now_ms += calls * self.call_ms

    def read_j(self) -> float:
        return 50.0 * (self.now_ms // 100.0)

    def measure(self, read_j: Callable[[], float] | None = None) -> float:
        return joules_per_call(self.run, read_j or self.read_j)


@pytest.mark.parametrize(("call_ms", "off"), [(0.02, 0.02), (7.0, 0.02), (900.0, 0.15)])
def test_the_width_of_the_counter_s_steps_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, call_ms: float, off: float
) -> None:
    """Nor is a call too long that takes longer than the loop, which lasts for 0.4 s and the steps at both ends."""
    meter = Meter(monkeypatch, call_ms)
    assert meter.measure() == pytest.approx(0.5 * call_ms, rel=off)
    assert 400 <= meter.calls * call_ms < 1000 or call_ms > 400
    with pytest.raises(RuntimeError, match="The energy counter did not move in 2 s"):
        meter.measure(lambda: 5.0)


@pytest.mark.gpu
def test_a_replay_does_the_work_again_on_what_is_there_now() -> None:
    x, calls = torch.ones(1024, device=CUDA), []

    def call() -> torch.Tensor:
        calls.append(1)
        return x * 2

    graph = capture(call, CUDA)
    assert len(calls) == WARMUPS + 1
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert graph.result.unique().tolist() == [6.0]
    assert len(calls) == WARMUPS + 1
    with pytest.raises(RuntimeError):  # which costs the device nothing
        capture(lambda: x.sum().item(), CUDA)
    torch.cuda.synchronize()
    assert capture(lambda: x + 1, CUDA).result.shape == (1024,)
