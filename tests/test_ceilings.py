from collections.abc import Callable
from typing import Any

import pytest
import torch

from swiglu_bench.measure import ceilings as ceilings_module
from swiglu_bench.measure.ceilings import bare_products, measure_ceilings
from swiglu_bench.measure.clock import CpuClock, Sample, make_clock

CPU = torch.device("cpu")


class SteadyClock(CpuClock):
    """Every call takes half a millisecond."""

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []

    def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
        self.results.append(call())
        return Sample(0.5, 10.0, True, None)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings_module.COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(ceilings_module.PRODUCT_SIDE, "cpu", 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rates_follow_from_sizes_and_times(dtype: torch.dtype) -> None:
    clock = SteadyClock()
    found = measure_ceilings(CPU, dtype, clock)
    copied, product = clock.results[0], clock.results[-1]
    assert found.copy_gbps == pytest.approx(2 * copied.nbytes / 0.5e-3 / 1e9), "bytes read plus bytes written"
    assert found.matmul_tflops == pytest.approx(2 * 32**3 / 0.5e-3 / 1e12)
    assert (product.shape, product.dtype) == ((32, 32), dtype)
    assert len(clock.results) >= 6


def test_a_slow_sample_does_not_lower_them() -> None:
    """The median counts, so that one interruption is no ceiling."""

    class Interrupted(SteadyClock):
        def sample(self, call: Callable[[], Any], lead_us: float) -> Sample:
            sample = super().sample(call, lead_us)
            return Sample(500.0, 10.0, True, None) if len(self.results) % 5 == 0 else sample

    assert measure_ceilings(CPU, torch.float32, Interrupted()) == measure_ceilings(CPU, torch.float32, SteadyClock())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bare_products_have_the_sizes_and_the_type_asked_for(dtype: torch.dtype) -> None:
    sizes = [(3, 4, 5), (1, 2, 6), (7, 7, 1)]
    results = bare_products(sizes, CPU, dtype)()
    assert [tuple(result.shape) for result in results] == [(m, n) for m, n, _ in sizes]
    assert all(result.dtype == dtype and not result.requires_grad for result in results)


def test_bare_products_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.Tensor] = []
    real = torch.randn

    def watched(*size: int, **keywords: Any) -> torch.Tensor:
        drawn.append(real(*size, **keywords))
        return drawn[-1]

    monkeypatch.setattr(torch, "randn", watched)
    (result,) = bare_products([(3, 4, 5)], CPU, torch.float32)()
    assert [tuple(value.shape) for value in drawn] == [(3, 5), (4, 5)]
    assert torch.equal(result, drawn[0] @ drawn[1].T)
    assert all(value.std() > 0.1 for value in drawn), "a GPU multiplies zeros faster than numbers"


def test_products_do_not_share_operands() -> None:
    """A second product that finds its operand in the cache would be too fast."""
    first, second = bare_products([(8, 8, 8), (8, 8, 8)], CPU, torch.float32)()
    assert not torch.equal(first, second)


def test_no_products_are_no_work() -> None:
    assert bare_products([], CPU, torch.float32)() == []


@pytest.mark.gpu
def test_a_gpu_s_ceilings_are_positive_and_below_its_datasheet() -> None:
    from swiglu_bench.machine import describe

    device = torch.device("cuda", 0)
    found = measure_ceilings(device, torch.bfloat16, make_clock(device))
    assert found.copy_gbps > 0
    assert found.matmul_tflops > 0
    sheet = describe(device).datasheet
    if sheet:
        assert found.copy_gbps <= sheet.gbps
        assert found.matmul_tflops <= sheet.tflops


def test_a_gpu_s_copy_and_product_are_large() -> None:
    """They must leave every cache and fill every multiprocessor."""
    assert ceilings_module.COPY_BYTES["cuda"] >= 2**30
    assert ceilings_module.PRODUCT_SIDE["cuda"] >= 4096
