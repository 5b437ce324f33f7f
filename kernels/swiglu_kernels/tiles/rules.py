"""Which tile each matrix kernel works in as shipped: one table per kernel, chosen by tokens, dtype and GPU.

`tuning.py` may know a faster one for a shape on this GPU.

`rows` and `columns` are the output tile, `depth` the step along the axis that is summed over. Most kernels keep two
fp32 accumulators of rows x columns (gate and up): 128 x 128 with eight warps takes 128 registers per thread for them.

`aligned` says that 16-byte accesses are possible (`launch.vectorises`). Two families: "hopper" (9.0, 10.x) may use
227 KB of shared memory per program; "ampere" (8.x, 12.x) stays under the 99 KB that 8.6, 8.9 and 12.x have, which two
programs share comfortably on 8.0. `compiled.py` measures registers, spills and shared memory of every entry without a
GPU. `group` is the number of row tiles that are swept together for the L2 cache: on an H200 at 4096 x 11008 and 8192
tokens, 8 or 4 were 1-4% slower than 16. `parts` is the number of programs that share a tile's sum over the depth, where
a matrix has fewer tiles than the GPU has multiprocessors; a second launch adds up their parts (the forward's alone).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from swiglu_kernels.runtime.backend import Capability

Family = Literal["hopper", "ampere"]
Rows = list[tuple[float, "Tile"]]
"""(most rows, tile), first fit; of a tile the tables give rows, columns, depth, warps and stages."""
ANY = float("inf")
Tables = dict[Family, Rows]


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch options of one matrix kernel."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 16
    parts: int = 1


TABLES: dict[str, Tables] = {
    # Few tokens: the time is that of reading the weights once, so many programs with small tiles and deep steps. 512
    # tokens: 128 x 128 tiles would leave a third of an H200's 132 SMs idle at 11008 columns.
    "recompute": {
        "hopper": [
            (16, Tile(16, 32, 128, 4, 3)),
            (64, Tile(64, 64, 64, 4, 4)),
            (512, Tile(128, 64, 64, 4, 3)),
            (ANY, Tile(128, 128, 64, 8, 4)),
        ],
        "ampere": [(16, Tile(16, 32, 128, 4, 3)), (64, Tile(64, 64, 64, 4, 3)), (ANY, Tile(128, 64, 32, 4, 4))],
    },
    # On the fly: five tensors are loaded, two accumulators. Read: two loops of one plain product, one accumulator.
    "input-grad-fused": {
        "hopper": [(16, Tile(16, 32, 64, 4, 3)), (ANY, Tile(128, 128, 64, 8, 3))],
        "ampere": [(16, Tile(16, 32, 64, 4, 3)), (ANY, Tile(128, 64, 32, 8, 3))],
    },
    "input-grad": {
        "hopper": [(16, Tile(16, 32, 128, 4, 3)), (128, Tile(128, 64, 64, 4, 4)), (ANY, Tile(128, 256, 64, 8, 3))],
        "ampere": [(16, Tile(16, 32, 128, 4, 3)), (ANY, Tile(128, 128, 32, 8, 4))],
    },
    "weight-grad": {"hopper": [(ANY, Tile(128, 128, 64, 8, 3))], "ampere": [(ANY, Tile(128, 64, 32, 8, 3))]},
    # The MLP's d_h product: one accumulator, and an epilogue that loads two tiles and stores three.
    "mlp-hidden-grad": {
        "hopper": [(16, Tile(16, 32, 128, 4, 3)), (512, Tile(128, 64, 64, 4, 4)), (ANY, Tile(128, 128, 64, 8, 4))],
        "ampere": [(16, Tile(16, 32, 128, 4, 3)), (ANY, Tile(128, 128, 32, 8, 4))],
    },
    "mlp-weight-grad": {"hopper": [(ANY, Tile(128, 128, 64, 8, 4))], "ampere": [(ANY, Tile(128, 128, 32, 8, 4))]},
}
"""Of kernels of a dense block, by their names in `candidates.KERNELS`; the forward has that of "recompute", and
"weight-grad-fused" that of "weight-grad"."""
FEW_TOKENS = 128
"""For which `few_tokens_tile` chooses; `ops/glu/hopper_row.py`, which it gives way to, takes as many."""
LEAST_SHARED, MOST_PARTS = 2048, 8
"""Hidden size from which on a sum is shared (the least where it was measured to pay for its second launch), and by how
many programs at most; their parts are no larger than the weights."""
# Of 32 columns and up to 16 tokens: (most programs for each multiprocessor, depth, stages). Five programs with the
# first fit on a multiprocessor at once, nine with the second, two with the last.
_SIXTEEN_TOKENS = [(3.5, 128, 3), (4.5, 64, 3), (ANY, 128, 5)]
# float32, without tensor cores ("ieee") or with them ("tf32"): one table for every kernel and GPU.
_FLOAT32: Rows = [(16, Tile(16, 32, 32, 4, 3)), (ANY, Tile(64, 64, 16, 8, 3))]
# Strides that rule out 16-byte accesses: every element is loaded on its own through registers, larger tiles spill them.
_UNALIGNED: Rows = [(16, Tile(16, 32, 64, 4, 2)), (ANY, Tile(64, 64, 32, 8, 2))]

# Experts: rows are those of a tile of the routing, columns those of one accumulator, two of which are a gate and an up.
_EXPERTS: Tables = {
    "hopper": [(32, Tile(32, 64, 128, 4, 5)), (64, Tile(64, 128, 64, 4, 4)), (ANY, Tile(128, 256, 64, 8, 3))],
    "ampere": [(32, Tile(32, 64, 128, 4, 3)), (64, Tile(64, 128, 32, 4, 4)), (ANY, Tile(128, 128, 32, 8, 4))],
}

# fp8: depth is the 128 elements of a block's scale, and so are the columns of the two products, whose result a block
# of 1 x 128 may quantise.
_FP8_GLU: Tables = {
    "hopper": [(16, Tile(16, 128, 128, 4, 4)), (64, Tile(64, 128, 128, 8, 4)), (ANY, Tile(128, 128, 128, 8, 4))],
    "ampere": [(16, Tile(16, 128, 128, 4, 2)), (ANY, Tile(64, 128, 128, 8, 2))],
}
# Scales of blocks need a third tile of registers: with 128 rows it spills.
_FP8_GLU_BLOCKS: Tables = {
    "hopper": [_FP8_GLU["hopper"][0], (ANY, Tile(64, 128, 128, 8, 4))],
    "ampere": _FP8_GLU["ampere"],
}
_FP8_PRODUCT: Tables = {
    "hopper": _FP8_GLU["hopper"],
    "ampere": [(16, Tile(16, 128, 128, 4, 3)), (64, Tile(64, 128, 128, 8, 3)), (ANY, Tile(128, 128, 128, 8, 3))],
}

# Of experts: one accumulator of which each 128 of depth is a second one before it is added.
_FP8_EXPERTS: Tables = {
    "hopper": [(16, Tile(16, 128, 128, 4, 4)), (64, Tile(64, 128, 128, 4, 4)), (ANY, Tile(128, 128, 128, 8, 4))],
    "ampere": _FP8_PRODUCT["ampere"],
}

FORMULA_DEPTH = 32
"""The most, where operands are formed on the fly by another formula than plain SiLU: deeper tiles spill registers."""


def family_of(capability: Capability | None) -> Family:
    """Name the tile table for a compute capability; None (the interpreter) reads the Hopper table."""
    return "hopper" if capability is None or capability[0] in (9, 10) else "ampere"


def waves(rows: int, columns: int, tile_rows: int, tile_columns: int, processors: int) -> int:
    """Count the waves of programs of an output's tiles: in each, every multiprocessor has one tile, or none is left."""
    return -(-(-(-rows // tile_rows) * -(-columns // tile_columns)) // processors)


def _first_fit(rows: int, table: Rows) -> Tile:
    return next(tile for most_rows, tile in table if rows <= most_rows)


def forward_tile(
    tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, capability: Capability | None, aligned: bool,
    processors: int,
) -> Tile:  # fmt: skip
    """Tile of the forward: rows are tokens, columns intermediate, depth hidden."""
    if tokens <= FEW_TOKENS and family_of(capability) == "hopper" and _special(dtype, aligned) is None:
        tile = few_tokens_tile(tokens, hidden, intermediate, processors)
        if tile is not None:
            return tile
    return tile_of("recompute", tokens, dtype, capability, aligned)


def few_tokens_tile(tokens: int, hidden: int, intermediate: int, processors: int) -> Tile | None:
    """Tile of the forward of up to FEW_TOKENS tokens in 16 bits on Hopper; None: `hopper_row.py` is faster, if it can.

    The time is that of reading the weights, if enough is on its way at any moment, and until the end: programs run at
    once, and where they do not, their last wave is short. How each was measured: NOTES.md.
    """
    rows = 16 if tokens <= 16 else 64 if tokens <= 64 else 128
    columns, depth = (32, 128) if rows < 128 else (64, 64)
    programs = max(1, -(-intermediate // columns))
    parts = min(processors // programs, MOST_PARTS, hidden // (2 * max(1, tokens)) if hidden >= LEAST_SHARED else 1)
    if parts >= (1 if rows < 128 else 4):
        steps = max(1, -(-hidden // depth))
        parts = -(-steps // -(-steps // parts))  # those that have anything to sum
        return Tile(rows, columns, depth, warps=4, stages=5, parts=parts)
    if rows == 16:
        depth, stages = next(sizes for most, *sizes in _SIXTEEN_TOKENS if programs <= most * processors)
        return Tile(rows, columns, depth, warps=4, stages=stages)
    tile = Tile(64, 64, 64, warps=4, stages=4)
    one_wave = processors < -(-intermediate // tile.columns) <= 2 * processors
    return tile if rows == 64 and one_wave else None


def tile_of(kernel: str, rows: int, dtype: torch.dtype, capability: Capability | None, aligned: bool) -> Tile:
    """Tile of a kernel of TABLES whose output has so many rows."""
    return _first_fit(rows, _special(dtype, aligned) or TABLES[kernel][family_of(capability)])


def expert_tile_rows(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Return the rows of a routing's tiles: the mean of an expert, as far as a tile of that height exists.

    Few rows are all padding in a high tile; many are products of low ones, which read the weights more often.
    """
    most = 64 if dtype == torch.float32 else 128
    return next((rows for rows in (16, 32, 64) if rows * experts >= pairs or rows == most), most)


def expert_tile(rows: int, dtype: torch.dtype, capability: Capability | None, aligned: bool) -> Tile:
    """Tile of products of a routing's rows, which come in tiles of `rows`; columns are those of the accumulator."""
    return replace(_first_fit(rows, _special(dtype, aligned) or _EXPERTS[family_of(capability)]), rows=rows)


def expert_weight_grad_tile(rows: int, dtype: torch.dtype, capability: Capability | None, aligned: bool) -> Tile:
    """Tile of experts' weight gradients: rows and columns of a weight, depth its expert's rows, `rows` in the mean."""
    tile = _first_fit(17, _special(dtype, aligned) or TABLES["mlp-weight-grad"][family_of(capability)])
    return replace(tile, depth=16 if rows <= 16 else min(32, tile.depth) if rows <= 32 else tile.depth)


def fp8_glu_tile(tokens: int, blocks: bool, capability: Capability | None) -> Tile:
    """Tile of the forward of operands in fp8: rows are tokens, columns intermediate, depth hidden."""
    return _first_fit(tokens, (_FP8_GLU_BLOCKS if blocks else _FP8_GLU)[family_of(capability)])


def fp8_product_tile(rows: int, capability: Capability | None) -> Tile:
    """Tile of any other product of operands in fp8, by the rows of its result."""
    return _first_fit(rows, _FP8_PRODUCT[family_of(capability)])


def fp8_expert_tile(rows: int, capability: Capability | None) -> Tile:
    """`expert_tile` of operands in fp8."""
    return replace(_first_fit(rows, _FP8_EXPERTS[family_of(capability)]), rows=rows)


def _special(dtype: torch.dtype, aligned: bool) -> Rows | None:
    if dtype == torch.float32:
        return _FLOAT32
    return None if aligned else _UNALIGNED
