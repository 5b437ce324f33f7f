from collections.abc import Callable
from typing import Any

import pytest
import torch

from swiglu_bench.measure import ceilings as ceilings_module
from swiglu_bench.measure.ceilings import bare_products, copy_gbps, matmul_tflops
from swiglu_bench.measure.clock import CpuClock, Sample, make_clock

CPU = torch.device("cpu")


class SteadyClock(CpuClock):
    """Every call takes half a millisecond."""

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []

    def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
        self.results.append(call())
        return Sample(0.5, 10.0, True, None)


def test_bandwidth_counts_bytes_read_and_written() -> None:
    clock = SteadyClock()
    found = copy_gbps(CPU, clock, 2**16)
    assert clock.results[0].nbytes == 2**16
    assert found == pytest.approx(2 * 2**16 / 0.5e-3 / 1e9)
    assert len(clock.results) >= 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rate_counts_two_operations_a_term(dtype: torch.dtype) -> None:
    clock = SteadyClock()
    found = matmul_tflops(CPU, dtype, clock, 32, 16, 8)
    (product,) = clock.results[-1]
    assert found == pytest.approx(2 * 32 * 16 * 8 / 0.5e-3 / 1e12)
    assert (product.shape, product.dtype) == ((32, 16), dtype)


def test_a_slow_sample_does_not_lower_them() -> None:
    """The median counts, so that one interruption is no ceiling."""

    class Interrupted(SteadyClock):
        def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
            sample = super().sample(call, lead_us)
            return Sample(500.0, 10.0, True, None) if len(self.results) % 5 == 0 else sample

    assert copy_gbps(CPU, Interrupted(), 2**16) == copy_gbps(CPU, SteadyClock(), 2**16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bare_products_have_the_sizes_and_the_type_asked_for(dtype: torch.dtype) -> None:
    sizes = [(3, 4, 5), (1, 2, 6), (7, 7, 1)]
    results = bare_products(sizes, CPU, dtype)()
    assert [tuple(result.shape) for result in results] == [(m, n) for m, n, _ in sizes]
    assert all(result.dtype == dtype and not result.requires_grad for result in results)


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

    def watched(*size: int, **keywords: Any) -> torch.Tensor:
        drawn.append(real(*size, **keywords))
        return drawn[-1]

    monkeypatch.setattr(torch, "randn", watched)
    (result,) = bare_products([(8, 3, k)], CPU, torch.float32)()
    assert [tuple(value.shape) for value in drawn] == shapes
    left, right = (value if value.shape[1] == k else value.T for value in drawn)
    assert torch.equal(result, left @ right.T)
    assert all(value.std() > 0.1 for value in drawn), "a GPU multiplies zeros faster than numbers"


def test_products_do_not_share_operands() -> None:
    """A second product that finds its operand in the cache would be too fast."""
    first, second = bare_products([(8, 8, 8), (8, 8, 8)], CPU, torch.float32)()
    assert not torch.equal(first, second)


def test_no_products_are_no_work() -> None:
    assert bare_products([], CPU, torch.float32)() == []


@pytest.mark.gpu
def test_a_gpu_s_rates_are_positive_and_below_its_datasheet() -> None:
    from swiglu_bench.machine.machine import describe

    device = torch.device("cuda", 0)
    clock = make_clock(device)
    copied, rate = copy_gbps(device, clock, 2**30), matmul_tflops(device, torch.bfloat16, clock, 8192, 8192, 8192)
    assert copied > 0
    assert rate > 0
    sheet = describe(device).datasheet
    if sheet:
        assert copied <= sheet.gbps
        assert rate <= sheet.tflops


def test_a_gpu_s_copy_and_product_are_large() -> None:
    """They must leave every cache and fill every multiprocessor."""
    assert ceilings_module.COPY_BYTES["cuda"] >= 2**30
    assert ceilings_module.PRODUCT_SIDE["cuda"] >= 4096
