"""Which versions of Triton the hand-scheduled kernels run with, who says so where they do not; the order of tiles."""

import itertools
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch

from swiglu_bench.machine import doctor
from swiglu_kernels import FusedSwiGLU
from swiglu_kernels.hopper import shared
from swiglu_kernels.hopper.admission import by_hand_aside
from swiglu_kernels.hopper.shared import why_aside
from swiglu_kernels.ops.experts import hopper_tiles
from swiglu_kernels.ops.glu import hopper_forward, hopper_products
from swiglu_kernels.runtime import backend
from swiglu_kernels.tiles import here
from swiglu_kernels.tiles.candidates import TileProblem, shipped

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one, and Gluon."""
    monkeypatch.setattr(shared, "GLUON_MISSING", None)
    for module in (shared, backend):
        monkeypatch.setattr(module, "INTERPRETING", False)
        monkeypatch.setattr(module, "TRITON_AVAILABLE", True)
        monkeypatch.setattr(module, "capability_of", lambda device: (9, 0) if device.type == "cuda" else None)
    monkeypatch.setattr(here, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(here, "multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("hopper")
def test_they_step_aside_for_the_portable_kernels() -> None:
    x, weight = (torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta") for _ in range(2))
    problem = TileProblem(1024, 4096, 11008, torch.bfloat16, (9, 0))
    for reason, schedule in ((None, "ping-pong"), ("Triton 4.2.0 ran on no GPU", "torch")):
        with by_hand_aside(reason):
            assert hopper_forward.why_not(x, weight, weight, (9, 0)) == reason
            assert hopper_products.why_not("dX", [(x, weight)], [x], (9, 0)) == reason
            assert shipped("forward", problem).schedule == schedule
            assert here.hopper_multiprocessors(GPU, "dW") == (132 if reason is None else 0)


@pytest.mark.usefixtures("hopper")
def test_who_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FusedSwiGLU(8, 8)
    monkeypatch.setattr(type(next(module.parameters())), "device", GPU, raising=False)
    with by_hand_aside("Triton 4.2.0 ran on no GPU"):
        assert why_aside(GPU) == "Triton 4.2.0 ran on no GPU"
        assert why_aside(torch.device("cpu")) is None
        assert module.backend == "triton, portable kernels only: Triton 4.2.0 ran on no GPU"
        finding = doctor.kernel_finding(GPU)
        assert (finding.severity, finding.found) == (doctor.WARN, "Triton 4.2.0 ran on no GPU")
    with by_hand_aside(None):
        assert module.backend == "triton"
        assert doctor.kernel_finding(GPU).severity == doctor.OK


def plain(function) -> FunctionType:
    """Return a function of Triton's language as one of Python's numbers."""
    numbers = SimpleNamespace(cdiv=lambda a, b: -(-a // b), where=lambda chosen, one, other: one if chosen else other)
    return FunctionType(function.fn.__code__, {"tl": numbers, "max": max, "min": min})


@pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")
@pytest.mark.parametrize("group", [8, 16])
def test_every_tile_is_walked_through_once_and_no_few_rows_of_tiles_alone(group: int) -> None:
    position = plain(shared.position)
    for rows in (*range(1, 3 * group + 6), 64):
        order = [position(tile, rows, 5, group) for tile in range(rows * 5)]
        assert sorted(order) == [(row, column) for row in range(rows) for column in range(5)]
        runs = itertools.groupby(order, key=lambda place: place[1])
        together = [len(list(tiles)) for column, tiles in runs if column == 0]
        assert max(together) <= group + group // 4
        assert len(together) == 1 or min(together) > group // 4


@pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")
@pytest.mark.parametrize(("width", "tall_width"), [(192, 128), (96, 64)])
def test_tiles_of_an_expert_cover_its_rows_and_columns_and_tall_ones_leave_no_rest(width: int, tall_width: int) -> None:
    tiles_of, tiles_in, place = map(plain, (hopper_tiles.tiles_of, hopper_tiles.tiles_in, hopper_tiles.place))
    for columns in (*range(192, 1600, 64), 2048, 2880):
        narrow = hopper_tiles.tall_columns(columns, width, tall_width)
        assert (columns - narrow * tall_width) % width == 0
        assert 0 <= narrow <= 2
        sizes = columns, width, tall_width, narrow
        for blocks in (*range(1, 40), 75):
            whole, tall = tiles_of(64 * blocks - 5, 24)
            assert 2 * whole + 3 * tall - blocks == (blocks % 2 if blocks == 1 or blocks >= 24 else 0)
            times = np.zeros((2 * whole + 3 * tall, columns // 32), int)
            order = [place(tile, whole, tall, *sizes, 8) for tile in range(tiles_in(whole, tall, *sizes))]
            for row, column, is_tall in order:
                assert 0 <= row <= 64 * times.shape[0] - (192 if is_tall else 128)
                assert 0 <= column <= columns - (tall_width if is_tall else width)
                first, last = row // 64, row // 64 + (3 if is_tall else 2)
                times[first:last, column // 32 : (column + (tall_width if is_tall else width)) // 32] += 1
            assert len(set(order)) == len(order)
            assert times.min() == 1
            twice = times[: 2 * whole].sum() - 2 * whole * (columns // 32)
            assert whole < 3 or twice <= 2 * narrow * (tall_width // 32)  # fewer than three blocks of each tall column
