import itertools

import pytest
import torch

from swiglu_kernels.tiles import (
    Tile,
    down_backward_tile,
    down_weight_grad_tile,
    forward_tile,
    input_grad_tile,
    weight_grad_tile,
)

CAPABILITIES = [None, (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
SIZES = [0, 1, 16, 17, 64, 65, 128, 512, 513, 2**31 - 1024]


def tiles(
    size: int, dtype: torch.dtype, capability: tuple[int, int] | None, aligned: bool
) -> list[tuple[Tile, int, int]]:
    """List (tile, operands of rows x depth, operands of depth x columns) for every kernel."""
    return [
        (forward_tile(size, dtype, capability, aligned), 1, 2),
        (input_grad_tile(size, dtype, capability, aligned, True), 3, 2),
        (input_grad_tile(size, dtype, capability, aligned, False), 1, 1),
        (weight_grad_tile(size, dtype, capability, aligned), 3, 1),
        (down_backward_tile(size, dtype, capability, aligned), 1, 1),
        (down_weight_grad_tile(size, dtype, capability, aligned), 1, 1),
    ]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_choice_is_a_legal_tile_that_fits_in_shared_memory(capability, dtype):
    limit = 227 * 1024 if capability is None or capability[0] in (9, 10) else 99 * 1024
    for size, aligned in itertools.product(SIZES, [False, True]):
        for tile, left, right in tiles(size, dtype, capability, aligned):
            for block in (tile.rows, tile.columns, tile.depth):
                assert block >= 16
                assert block & (block - 1) == 0, "Triton's blocks are powers of two"
            # one stage of a pipeline is always in flight or in registers
            stage = (left * tile.rows + right * tile.columns) * tile.depth * dtype.itemsize
            assert stage * (tile.stages - 1) <= limit, tile


def test_few_tokens_take_small_tiles():
    assert forward_tile(1, torch.bfloat16, (9, 0), True).rows == 16
    assert forward_tile(8192, torch.bfloat16, (9, 0), True) == Tile(128, 128, 64, warps=8, stages=4)


def test_unaligned_operands_take_smaller_tiles():
    aligned = forward_tile(8192, torch.bfloat16, (9, 0), True)
    unaligned = forward_tile(8192, torch.bfloat16, (9, 0), False)
    assert unaligned.rows * unaligned.columns < aligned.rows * aligned.columns
