from collections.abc import Callable
from typing import Any

import pytest
import torch

from swiglu_bench.measure.ceilings import bare_products, copy_gbps, matmul_tflops
from swiglu_bench.measure.clock import CpuClock, Sample, make_clock

CPU = torch.device("cpu")


class SteadyClock(CpuClock):
    """Every call takes half a millisecond, and every fifth sample is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[torch.Tensor] = []

    def sample(self, call: Callable[[], Any], *others: Any) -> Sample:
        self.results.append(call())
        return Sample(500.0 if len(self.results) % 5 == 0 else 0.5, 10.0, 10.0, True, None)


def test_rates_count_bytes_read_and_written_and_two_operations_a_term_and_ignore_interruptions() -> None:
    clock = SteadyClock()
    assert copy_gbps(CPU, clock, 2**16) == pytest.approx(2 * 2**16 / 0.5e-3 / 1e9)
    assert clock.results[0].nbytes == 2**16
    rate = matmul_tflops(CPU, torch.bfloat16, SteadyClock(), 32, 16, 8)
    assert rate == pytest.approx(2 * 32 * 16 * 8 / 0.5e-3 / 1e12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bare_products_have_the_sizes_and_the_type_asked_for(dtype: torch.dtype) -> None:
    sizes = [(3, 4, 5), (1, 2, 6), (7, 7, 1)]
    results = bare_products(sizes, CPU, dtype)()
    assert [tuple(result.shape) for result in results] == [(m, n) for m, n, _ in sizes]
    assert all(result.dtype == dtype and not result.requires_grad for result in results)
    first, second = bare_products([(8, 8, 8), (8, 8, 8)], CPU, dtype)()
    assert not torch.equal(first, second), "a second product that finds its operand in the cache would be too fast"


@pytest.mark.parametrize(
    ("k", "shapes"),
    [
        (4, [(8, 4), (3, 4)]),  # rows of k elements are 16 bytes
        (5, [(5, 8), (3, 5)]),  # they are 20: rows of m are 32, rows of n would be 12
    ],
)
def test_bare_products_are_products_of_aligned_rows(
    monkeypatch: pytest.MonkeyPatch, k: int, shapes: list[tuple[int, int]]
) -> None:
    drawn: list[torch.Tensor] = []
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **more: drawn.append(real(*size, **more)) or drawn[-1])
    (result,) = bare_products([(8, 3, k)], CPU, torch.float32)()
    assert [tuple(value.shape) for value in drawn] == shapes
    left, right = (value if value.shape[1] == k else value.T for value in drawn)
    assert torch.equal(result, left @ right.T)
    assert all(value.std() > 0.1 for value in drawn), "a GPU multiplies zeros faster than numbers"


@pytest.mark.gpu
def test_a_gpu_s_rates_are_positive_and_below_its_datasheet() -> None:
    from swiglu_bench.machine.machine import describe

    device = torch.device("cuda", 0)
    clock = make_clock(device)
    copied, rate = copy_gbps(device, clock, 2**30), matmul_tflops(device, torch.bfloat16, clock, 8192, 8192, 8192)
    sheet = describe(device).datasheet
    assert 0 < copied <= (sheet.gbps if sheet else float("inf"))
    assert 0 < rate <= (sheet.tflops if sheet else float("inf"))
