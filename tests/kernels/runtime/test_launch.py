from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from on_hopper import needs_hopper

from swiglu_kernels import swiglu_glu
from swiglu_kernels.hopper import admission
from swiglu_kernels.runtime.launch import INT32_MAX, Launch, flat_needs_int64, tile_needs_int64, vectorises


@pytest.mark.parametrize(
    ("count", "block", "wide"),
    [(0, 128, False), (2**31 - 127, 128, False), (2**31, 128, False), (2**31 + 1, 128, True), (2**31 - 1, 1000, True)],
)
def test_flat_offsets_count_the_masked_end_of_the_last_block(count, block, wide):
    assert flat_needs_int64(count, block) is wide


def test_tile_offsets_count_the_last_element_of_a_tile():
    assert not tile_needs_int64(((INT32_MAX, 1), (2, 1)))
    assert tile_needs_int64(((INT32_MAX, 1), (2, 2)))
    assert tile_needs_int64(((1, 1), (128, 64)), ((2**24, 1), (129, 64)))
    assert not tile_needs_int64(((1, 1), (128, 64)), ((2**24, 1), (128, 64)))


def test_vectorises():
    matrix = torch.empty(6, 32)
    assert vectorises(matrix, matrix.t())
    assert vectorises(matrix[:, 4:])  # 16 bytes further on
    assert not vectorises(matrix[:, 1:])
    assert not vectorises(matrix[:, ::2])
    assert not vectorises(matrix, torch.empty(6, 33))
    assert not vectorises(torch.empty(6, 40))
    assert vectorises(torch.empty(6, 40), multiple=8)
    assert not vectorises(torch.ones(1).expand(6, 32))


def test_an_empty_grid_launches_nothing():
    Launch(kernel=None, grid=(0,), arguments={}, num_warps=1, num_stages=1).run()


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("calls_before", [0, 2])
    def test_a_thread_s_first_launch_may_have_tma_descriptors(self, calls_before: int) -> None:
        """Where PyTorch allocates from its cache, nothing before it has given the thread a context."""
        drawn = [
            torch.randn(size, device="cuda").bfloat16() for size in ((640 + calls_before, 512), (512, 512), (512, 512))
        ]
        with torch.no_grad(), admission.by_hand_aside(None):
            for _ in range(calls_before):
                swiglu_glu(*(one.clone() for one in drawn))
            others = [one.clone() for one in drawn]
            torch.full((2**22,), 0.0, device="cuda")  # and free again

            def first() -> torch.Tensor:
                with torch.no_grad():
                    return swiglu_glu(*others)

            with ThreadPoolExecutor(1) as threads:
                found = threads.submit(first).result()
            assert torch.equal(found, swiglu_glu(*drawn))
