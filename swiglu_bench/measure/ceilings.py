"""What this machine can do at best, measured: a large copy, a large matrix product, the bare products of a case."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiglu_bench.measure.clock import Clock

COPY_BYTES = {"cuda": 2**31, "cpu": 2**28}
PRODUCT_SIDE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Ceilings:
    """Best rates of this machine for one dtype."""

    copy_gbps: float
    """Bytes read plus bytes written per second, in 10^9."""
    matmul_tflops: float
    """A square product of the dtype, in 10^12 operations per second."""


def _median_ms(clock: Clock, call: Callable[[], object], warmups: int = 3, repeats: int = 9) -> float:
    for _ in range(warmups):
        call()
    return statistics.median(clock.sample(call, 100.0).ms for _ in range(repeats))


def measure_ceilings(device: torch.device, dtype: torch.dtype, clock: Clock) -> Ceilings:
    """Time a large device-to-device copy and a large square product on random data."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else COPY_BYTES["cpu"] * 4
    return Ceilings(_copy_gbps(device, clock, min(COPY_BYTES[device.type], free // 8)), _tflops(device, dtype, clock))


def _copy_gbps(device: torch.device, clock: Clock, size_bytes: int) -> float:
    source = torch.empty(size_bytes // 4, dtype=torch.float32, device=device).uniform_()
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / _median_ms(clock, lambda: target.copy_(source)) / 1e6


def _tflops(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    side = PRODUCT_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _median_ms(clock, lambda: a @ b) / 1e9


def bare_products(
    products: Sequence[tuple[int, int, int]], device: torch.device, dtype: torch.dtype
) -> Callable[[], list[Tensor]]:
    """A callable that runs C[m, n] = A[m, k] B[n, k]^T for each (m, n, k) on random data, and nothing else."""
    operands = [
        (torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)) for m, n, k in products
    ]

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [a @ b.T for a, b in operands]

    return run
