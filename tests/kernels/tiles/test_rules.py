import itertools
import math

import pytest
import torch

from swiglu_kernels.tiles.candidates import KERNELS
from swiglu_kernels.tiles.rules import TABLES, Tile, few_tokens_tile, forward_tile, tile_of

CAPABILITIES = [None, (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
WIDTHS = [0, 1, 768, 2880, 11008, 18944, 28672]
OPERANDS = {name: (max(KERNELS[name].left, 3 * (name == "weight-grad")), KERNELS[name].right) for name in TABLES}
"""The table of weight gradients is for those on the fly as well."""
SIZES = [0, 1, 16, 17, 64, 65, 128, 512, 513, 2**31 - 1024]


def tiles(
    size: int, dtype: torch.dtype, capability: tuple[int, int] | None, aligned: bool
) -> list[tuple[Tile, int, int]]:
    """List (tile, operands of rows x depth, operands of depth x columns) for every kernel."""
    return [
        *((forward_tile(size, 7168, width, dtype, capability, aligned, 132), 1, 2) for width in WIDTHS),
        *((tile_of(name, size, dtype, capability, aligned), *OPERANDS[name]) for name in TABLES),
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


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "sizes"),
    [
        (1, 7168, 2048, (16, 32, 128, 5, 2)),  # 64 tiles would leave half of 132 multiprocessors without any
        (128, 7168, 2048, (128, 64, 64, 5, 4)),
        (65, 4096, 11008, None),  # equal shares are faster
    ],
)
def test_few_tokens_fill_the_gpu(tokens: int, hidden: int, intermediate: int, sizes: tuple[int, ...] | None) -> None:
    tile = few_tokens_tile(tokens, hidden, intermediate, 132)
    assert (tile and (tile.rows, tile.columns, tile.depth, tile.stages, tile.parts)) == sizes


def test_no_part_of_a_sum_is_empty() -> None:
    for tokens, hidden, intermediate in itertools.product(
        (0, 1, 16, 64, 128), (0, 1, 129, 2049, 7168), (0, 1, 96, 2048)
    ):
        tile = few_tokens_tile(tokens, hidden, intermediate, 132)
        if tile is not None and tile.parts > 1:
            steps = math.ceil(hidden / tile.depth)
            share = math.ceil(steps / tile.parts) * tile.depth
            assert (tile.parts - 1) * share < hidden <= tile.parts * share
