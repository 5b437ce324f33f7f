import datetime
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swiglu_bench.machine import ceilings_cache, machine
from swiglu_bench.machine.ceilings_cache import FRESH, Limits, bare_products, copy_gbps, matmul_tflops
from swiglu_bench.machine.system import LoadWatch
from swiglu_bench.measure.clock import CpuClock, Sample, make_clock
from swiglu_bench.rows.record import Load

CPU = torch.device("cpu")
THIS = machine.describe(CPU)


@pytest.fixture(autouse=True)
def _no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadWatch, "load", lambda self: None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order, each twice; the results are 11, 12, 13, ..."""
    done: list[str] = []
    calls = itertools.count()

    def stand_in(what: str) -> Callable[..., float]:
        def measure(*_: object) -> float:
            if next(calls) % 2 == 0:
                done.append(what)
            return 10.0 + len(done)

        return measure

    monkeypatch.setattr(ceilings_cache, "copy_gbps", stand_in("copy"))
    monkeypatch.setattr(ceilings_cache, "matmul_tflops", stand_in("product"))
    return done


def limits(folder: Path, this: machine.Machine = THIS, refresh: bool = False) -> Limits:
    return Limits(this, CPU, CpuClock(), refresh, folder)


def test_a_figure_is_measured_once_unless_refreshed(tmp_path: Path, measured: list[str]) -> None:
    first, again = limits(tmp_path).copy(), limits(tmp_path).copy()
    assert first == again
    assert measured == ["copy"]
    renewed = limits(tmp_path, refresh=True).copy()
    assert len(measured) == 2
    assert limits(tmp_path).copy() == renewed
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "no temporary file stays"
    known = limits(tmp_path)
    for _ in range(2):
        known.copy(4096)
        for dtype, size in ((torch.bfloat16, None), (torch.float32, None), (torch.float32, (1, 2, 3))):
            known.product(dtype, size)
    assert len(measured) == 6, "each size and dtype is a figure of its own"


@pytest.mark.parametrize(("age", "times"), [(FRESH / 2, 1), (FRESH * 1.01, 2), (-FRESH / 2, 2)])
def test_old_figures_and_those_of_the_future_do_not_count(
    tmp_path: Path, measured: list[str], age: datetime.timedelta, times: int
) -> None:
    one = limits(tmp_path)
    kept = one.copy()
    one._write("copy 268435456 B, GB/s", kept.model_copy(update={"at": kept.at - age}))
    one.copy()
    assert len(measured) == times


def test_another_machine_has_figures_of_its_own(tmp_path: Path, measured: list[str]) -> None:
    for change in ({}, {"device": "another"}, {"driver": "1.2"}, {"torch": "3.0"}, {"power_limit_w": 300.0}):
        limits(tmp_path, machine.Machine(**(THIS.as_dict() | change))).copy()
    assert len(measured) == 5


CORRUPT: dict[str, Callable[[str], str]] = {
    "cut short": lambda text: text[: len(text) // 2],
    "a digit changed": lambda text: text.replace("11.0", "91.0"),
    "endless": lambda text: text.replace("11.0", "1e999"),
    "another machine's": lambda text: text.replace(json.dumps(THIS.device), '"other"'),
    "no checksum": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "checksum"}),
    "not UTF-8": lambda text: "\udcff\udcfe",
}


@pytest.mark.parametrize("corrupt", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_measured_again_and_repaired(
    tmp_path: Path, measured: list[str], corrupt: Callable[[str], str]
) -> None:
    one = limits(tmp_path)
    assert one.copy().value == 11.0
    one.path.write_bytes(corrupt(one.path.read_text()).encode(errors="surrogateescape"))
    assert [limits(tmp_path).copy().value for _ in range(2)] == [12.0, 12.0], "measured, not read; then read"


def test_a_figure_that_is_above_the_datasheet_or_unsure_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h200 = machine.Machine(**(THIS.as_dict() | {"device": "NVIDIA H200", "cache_bytes": 1 << 20}))
    values = iter([9000.0, 9000.0, 3000.0, 4000.0, 4000.0, 4000.0, 1.0])
    monkeypatch.setattr(ceilings_cache, "copy_gbps", lambda *_: next(values))
    found = [limits(tmp_path, h200).copy() for _ in range(4)]
    assert [one.value for one in found] == [9000.0, 4000.0, 4000.0, 4000.0]
    assert [bool(one.unsure) for one in found] == [False, True, False, False]
    monkeypatch.setattr(ceilings_cache, "copy_gbps", lambda *_: 1.0)
    monkeypatch.setattr(LoadWatch, "load", lambda self: Load(2, 1.9, 0.0))
    assert "1.9 of 2 CPUs" in limits(tmp_path / "busy").copy().unsure
    assert not (tmp_path / "busy").exists()


def test_a_folder_that_cannot_be_written_costs_the_cache_only(tmp_path: Path, measured: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert [limits(tmp_path / "file" / "deeper").copy().value for _ in range(2)] == [11.0, 12.0]
    assert [limits(tmp_path / "missing" / "deeper").copy().value for _ in range(2)] == [13.0, 13.0]


SQUARE, TINY, WIDE = ((512, 512, 512),), ((16, 24, 40),), ((1, 2**14, 2**13),)
"""0.268 GFLOP, next to nothing, and half a GiB of operands."""


@pytest.mark.parametrize(
    ("products_ms", "busy", "wrong"),
    [
        ({SQUARE: 2.7}, False, False), ({SQUARE: 2.0}, False, True), ({SQUARE: 5.0}, False, False),
        ({SQUARE: 6.0}, False, True), ({SQUARE: 6.0}, True, False), ({SQUARE: 6.0, TINY: 9.0}, False, False),
        ({SQUARE: 6.0, ((512, 1024, 512),): 6.0}, False, False), ({TINY: 9.0}, False, False),
        ({WIDE: 50.0}, False, False), ({WIDE: 40.0}, True, True), ({}, False, False),
    ],
)  # fmt: skip
def test_bare_products_contradict_a_rate(products_ms: dict[Any, float], busy: bool, wrong: bool) -> None:
    """One that is faster than it can be, or all that are large slower than half; 100 GFLOP/s and 10 GB/s are known."""
    known = ceilings_cache.Ceilings(copy_gbps=10.0, matmul_tflops=0.1)
    assert ceilings_cache.contradicted(known, products_ms, 4, "cpu", busy) is wrong


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
    device = torch.device("cuda", 0)
    clock = make_clock(device)
    copied, rate = copy_gbps(device, clock, 2**30), matmul_tflops(device, torch.bfloat16, clock, 8192, 8192, 8192)
    sheet = machine.describe(device).datasheet
    assert 0 < copied <= (sheet.gbps if sheet else float("inf"))
    assert 0 < rate <= (sheet.tflops if sheet else float("inf"))
