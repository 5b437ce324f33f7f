"""The best rates of this machine, measured: a copy, a matrix product, the bare products of a case."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from swiglu_bench.measure.clock import Clock
from swiglu_bench.measure.statistics import percentile

COPY_BYTES = {"cuda": 2**31, "cpu": 2**28}
"""Size of the copy that defines the machine's bandwidth: far larger than every cache."""
PRODUCT_SIDE = {"cuda": 8192, "cpu": 512}
"""Size of the square product that defines the machine's rate."""
ALIGNMENT_BYTES = 16
"""Alignment of an operand's rows below which cuBLAS is much slower."""

WARMUPS, LEAST_SAMPLES, LEAST_S = 3, 9, 0.1
"""A figure is kept for a day, so a disturbance of some milliseconds must not decide it."""


def _best_ms(clock: Clock, call: Callable[[], object]) -> float:
    """Time a call repeatedly and return the fastest decile: what disturbs a sample makes it longer."""
    for _ in range(WARMUPS):
        call()
    samples_ms: list[float] = []
    began = time.perf_counter()
    while len(samples_ms) < LEAST_SAMPLES or time.perf_counter() - began < LEAST_S:
        samples_ms.append(clock.sample(call, 100.0).ms)
    return percentile(samples_ms, 10)


def copy_gbps(device: torch.device, clock: Clock, size_bytes: int) -> float:
    """Bytes read plus bytes written per second, in 10^9, by a copy of `size_bytes` of random data on the device.

    Raises torch.OutOfMemoryError where two such buffers do not fit.
    """
    source = torch.empty(size_bytes // 4, dtype=torch.float32, device=device).uniform_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_ms(clock, lambda: target.copy_(source)) / 1e6


def matmul_tflops(device: torch.device, dtype: torch.dtype, clock: Clock, m: int, n: int, k: int) -> float:
    """Rate of one product C[m, n] = A[m, k] B[n, k]^T of random data, in 10^12 operations per second."""
    return 2 * m * n * k / _best_ms(clock, bare_products([(m, n, k)], device, dtype)) / 1e9


def bare_products(
    products: Sequence[tuple[int, int, int]], device: torch.device, dtype: torch.dtype
) -> Callable[[], list[Tensor]]:
    """A callable that runs C[m, n] = A[m, k] B[n, k]^T for each (m, n, k) on random data, and nothing else.

    Operands have the layout that cuBLAS multiplies fast: rows of k elements or, where these are not multiples of 16
    bytes (such as the 1100 tokens that a weight's gradient sums over), rows of m and n elements. float8_e4m3fn is
    multiplied by torch._scaled_mm with scales of 1 to bf16, at sizes rounded up to multiples of 16, which it takes.
    """
    if dtype is torch.float8_e4m3fn:
        scale = torch.ones((), device=device)
        scaled = partial(torch._scaled_mm, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
        sizes = [[size + -size % 16 for size in product] for product in products]
        return _all([partial(scaled, _drawn(device, dtype, m, k), _drawn(device, dtype, n, k).T) for m, n, k in sizes])

    def drawn(outer: int, k: int) -> Tensor:
        if k * dtype.itemsize % ALIGNMENT_BYTES == 0 or outer * dtype.itemsize % ALIGNMENT_BYTES:
            return _drawn(device, dtype, outer, k)
        return _drawn(device, dtype, k, outer).T

    return _all([partial(torch.matmul, drawn(m, k), drawn(n, k).T) for m, n, k in products])


def grouped_products(
    of_rows: Sequence[tuple[int, int, int]],
    of_weights: Sequence[tuple[int, int, int]],
    counts: Tensor,
    dtype: torch.dtype,
) -> Callable[[], list[Tensor]]:
    """The same by torch's grouped product, for rows that are sorted by expert: `counts` [experts] of each.

    `of_rows` are C[m, n] = A[m, k] B_e[n, k]^T with the weights of each row's expert; `of_weights` are, for each
    expert, C_e[m, n] = A[k, m]^T B[k, n] over its rows. Raises RuntimeError for sizes that torch does not take.
    """
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    ends = counts.cumsum(0, dtype=torch.int32)

    drawn = partial(_drawn, counts.device, dtype)
    operands = [(drawn(m, k), drawn(len(counts), n, k).mT) for m, n, k in of_rows]
    operands += [(drawn(k, m).T, drawn(k, n)) for m, n, k in of_weights]
    return _all([partial(product, *pair, offs=ends) for pair in operands])


def _drawn(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(size, device=device).to(dtype)


def _all(calls: Sequence[Callable[[], Tensor]]) -> Callable[[], list[Tensor]]:
    """A callable that makes calls one after the other, without autograd."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [call() for call in calls]

    return run
