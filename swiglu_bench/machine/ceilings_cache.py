"""This machine's best rates, of a copy and of bare products, measured at most once a day and kept in the user's cache.

A file holds the figures of one GPU under one driver and one PyTorch. If it is cut short, altered or implausible, its
figures are measured again. A figure is kept only where it was measured on a quiet machine and came out alike twice.
"""

import datetime
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import platformdirs
import torch
from pydantic import AwareDatetime, BaseModel, Field, ValidationError
from torch import Tensor

from swiglu_bench.cases.costs import Product
from swiglu_bench.machine.machine import Machine
from swiglu_bench.machine.system import LoadWatch
from swiglu_bench.measure.clock import Clock
from swiglu_bench.measure.statistics import percentile
from swiglu_bench.rows.figures import reason, write_whole

FRESH = datetime.timedelta(days=1)
ALIKE = 1.1
COPY_BYTES = {"cuda": 2**31, "cpu": 2**28}
"""Size of the copy that defines the machine's bandwidth: far larger than every cache."""
PRODUCT_SIDE = {"cuda": 8192, "cpu": 512}
"""Size of the square product that defines the machine's rate."""
LARGE = 4
"""Products with so much less work than that may be slower than half of its rate."""
ALIGNMENT_BYTES = 16
"""Alignment of an operand's rows below which cuBLAS is much slower."""
WARMUPS, LEAST_SAMPLES, LEAST_S = 3, 9, 0.1
"""A figure is kept for a day, so a disturbance of some milliseconds must not decide it."""


@dataclass(frozen=True)
class Ceilings:
    """Best rates of this machine for one dtype."""

    copy_gbps: float
    """Bytes read plus bytes written per second by a large copy, in 10^9."""
    matmul_tflops: float
    """A large square product of the dtype, in 10^12 operations per second."""
    measured_at: str = ""
    """UTC, ISO 8601: the older of the two."""
    unsure: str = ""
    """Why they may be wrong, in one sentence."""


class MeasuredRate(BaseModel):
    """One rate, when it was measured, and why it may be wrong."""

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    at: AwareDatetime
    unsure: str = ""

    @property
    def at_text(self) -> str:
        """UTC, ISO 8601, to the second."""
        return self.at.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _File(BaseModel):
    machine: dict[str, str]
    figures: dict[str, MeasuredRate]
    checksum: str = ""

    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"checksum"}).encode()).hexdigest()


class Limits:
    """The figures of one machine, from the cache where they are fresh and sound, else measured."""

    def __init__(
        self, machine: Machine, device: torch.device, clock: Clock, refresh: bool = False, folder: Path | None = None
    ) -> None:
        """`refresh` measures everything again; `folder` is the user's cache folder unless given."""
        self.machine, self.device, self.clock, self._refresh = machine, device, clock, refresh
        self.kept = True
        """Whether the cache folder could be read and written so far."""
        self._key = {
            "device": machine.device, "uuid": machine.gpu_uuid, "driver": machine.driver, "torch": machine.torch,
            "cpu_threads": str(machine.cpu_threads), "power_limit_w": str(machine.power_limit_w),
        }  # fmt: skip
        name = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or platformdirs.user_cache_path("swiglu-bench", appauthor=False)) / f"limits-{name}.json"

    def copy(self, size_bytes: int | None = None) -> MeasuredRate:
        """Bandwidth of a copy in GB/s, of the size that sweeps use unless given."""
        if size_bytes is None:
            size_bytes = COPY_BYTES[self.device.type]
            if self.device.type == "cuda":
                room = torch.cuda.mem_get_info(self.device)[0] // 8
                size_bytes = min(size_bytes, 1 << (room.bit_length() - 1))  # a round size is found again in the cache
        sheet = self.machine.datasheet
        # A small copy stays in the L2 cache, which is faster than the memory that the datasheet describes.
        most = sheet.gbps if sheet and size_bytes > 4 * (self.machine.cache_bytes or 0) else None
        return self._figure(f"copy {size_bytes} B, GB/s", lambda: copy_gbps(self.device, self.clock, size_bytes), most)

    def product(self, dtype: torch.dtype, size: Product | None = None) -> MeasuredRate:
        """Rate of a product (m, n, k) in TFLOP/s, of the square that sweeps use unless given."""
        m, n, k = size or (PRODUCT_SIDE[self.device.type],) * 3
        name, sheet = str(dtype).removeprefix("torch."), self.machine.datasheet
        measure = partial(matmul_tflops, self.device, dtype, self.clock, m, n, k)
        return self._figure(f"product {name} {m}x{n}x{k}, TFLOP/s", measure, sheet.rate(name) if sheet else None)

    def _figure(self, name: str, measure: Callable[[], float], most: float | None) -> MeasuredRate:
        """From the cache, if it is fresh and not above what the datasheet allows; else measured, and kept if sound."""
        now = datetime.datetime.now(datetime.UTC)
        kept = None if self._refresh else self._read().get(name)
        if kept and kept.at <= now < kept.at + FRESH and (most is None or kept.value <= most):
            return kept
        watch = LoadWatch()
        values = sorted(measure() for _ in range(2))
        unsure = load.reason(self.device.type) if (load := watch.load()) else ""
        if not unsure and values[1] > ALIKE * values[0]:
            unsure = f"Measured twice, they differ by {values[1] / values[0] - 1:.0%}."
        figure = MeasuredRate(value=values[1], at=now, unsure=unsure and f"The machine's limits are unsure. {unsure}")
        if not unsure and (most is None or figure.value <= most):
            self._write(name, figure)
        return figure

    def _read(self) -> dict[str, MeasuredRate]:
        try:
            file = _File.model_validate_json(self.path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return {}
        except OSError as error:
            self._go_without(error)
            return {}
        return file.figures if file.machine == self._key and file.checksum == file.digest() else {}

    def _write(self, name: str, figure: MeasuredRate) -> None:
        file = _File(machine=self._key, figures=self._read() | {name: figure})
        file.checksum = file.digest()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, file.model_dump_json(indent=1).encode())
        except OSError as error:
            self._go_without(error)

    def _go_without(self, error: OSError) -> None:
        self.kept = False
        told = f"{self.path.parent} cannot be used: {reason(error)}; each run measures the machine's limits anew."
        warnings.warn(told, stacklevel=1)  # which Python shows once


def ceilings(this: Machine, device: torch.device, dtype: torch.dtype, clock: Clock, refresh: bool = False) -> Ceilings:
    """The two rates that a sweep's limits are computed from; `refresh` measures them again."""
    limits = Limits(this, device, clock, refresh)
    copy, product = limits.copy(), limits.product(dtype)
    at = min(copy, product, key=lambda figure: figure.at).at_text
    return Ceilings(copy.value, product.value, at, copy.unsure or product.unsure)


def contradicted(
    known: Ceilings, products_ms: Mapping[Sequence[Product], float], itemsize: int, device_type: str, busy: bool
) -> bool:
    """Whether a case's bare products, timed by the judge, show that a rate is not this machine's.

    One product is faster than a rate lets it be, by more than two measurements of it differ by; or all are slower than
    half of what both rates let expect, on a machine that is not `busy`, and are large enough for that. Operands of a
    GPU's come from its memory, for its cache is flushed; a CPU's may lie in its caches unless they are as large as what
    its bandwidth is measured with.
    """
    slow = list[bool]()
    for products, ms in products_ms.items():
        operations = sum(2 * m * n * k for m, n, k in products)
        read_bytes = itemsize * sum((m + n) * k for m, n, k in products)
        matmul_ms, copy_ms = operations / known.matmul_tflops / 1e9, read_bytes / known.copy_gbps / 1e6
        from_memory = device_type == "cuda" or read_bytes >= COPY_BYTES[device_type]
        if ms < matmul_ms / ALIKE**2 or (from_memory and ms < copy_ms / ALIKE**2):
            return True
        slow.append(operations >= 2 * PRODUCT_SIDE[device_type] ** 3 / LARGE and ms > 2 * max(matmul_ms, copy_ms))
    return bool(slow) and all(slow) and not busy


# Measured


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


def bare_products(products: Sequence[Product], device: torch.device, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
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
    of_rows: Sequence[Product], of_weights: Sequence[Product], counts: Tensor, dtype: torch.dtype
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
