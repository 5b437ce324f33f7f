"""z = silu(x w_gate^T) * (x w_up^T) of operands quantised to fp8, hand-scheduled for Hopper, in Gluon.

Codes travel in pairs, as elements of 16 bits: rings, descriptors and the producer are `hopper_forward.py`'s, and a
stage is 128 of depth. The tensor cores keep some 14 bits of a sum of fp8 products, so that the sum over each stage goes
to registers of its own and is added in fp32 from there (`loop.multiply_fp8`); 128 x 192 of both do not fit into one
warpgroup's registers. So both consumers share a tile, 64 rows each, and a stage: while one adds, the other multiplies.

Scales by rows are applied to the finished sums, those of blocks while they are added: they come with the stages. The
consumers then begin each multiplication in turn, so that they do not add at the same time, unless h leaves as codes,
where that was slower. A tile of 128 columns is a whole block of h, which may leave as codes and scales; its 128 x 256
sums come of two wgmmas, gate and then up, whose sums over a stage go through the same registers.
"""

import dataclasses
from typing import Any

import torch

from swiglu_kernels.hopper import loop, shared
from swiglu_kernels.hopper.shared import GLUON_MISSING, fits_tma
from swiglu_kernels.ops.fp8.portable_codes import up_to
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu import hopper_forward
from swiglu_kernels.ops.glu.hopper_forward import BUFFERS, DEPTH, PART, REST, ROWS, TILE, WIDE
from swiglu_kernels.runtime.backend import capability_of, multiprocessors
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles.rules import Tile, waves

BLOCK = 128
"""Columns of a tile that is a block of h."""
BLOCK_COLUMNS = {96: 1.0, BLOCK: 0.91, 64: 1.15}
"""Columns of a tile whose scales are those of blocks: threes or twos of 32, each of which is in one, or a whole block.
For each, the time of a column relative to the first (H200)."""
BLOCK_STAGES = 4
"""Of 40 KB, or of 48 for tiles of a whole block, where scales come with them."""
CODES_FOR = 1.05
"""How much longer tiles of whole blocks may take: h leaves them as codes, which takes a pass over it otherwise."""
PRODUCT = {True: 0.92, False: 1.05}
"""Time of a product's column relative to one of PyTorch's, where that has tiles that are cut, and where not (H200)."""
_OUTPUTS = ("z", "codes", "gate_out", "up_out")
_OPTIONAL = (*(f"{weight}_{rows}" for weight in ("w_gate", "w_up") for rows in REST), *_OUTPUTS)

Operand = tuple[torch.Tensor, torch.Tensor]
"""Codes in pairs, [rows, depth / 2] of the output's 16-bit dtype, and scales as `Quantised` has them."""


if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

    from swiglu_kernels.hopper.buffers import set_up
    from swiglu_kernels.hopper.loop import BLOCK_LAYOUT, multiply_fp8
    from swiglu_kernels.hopper.shared import halves, position, sigmoid, start, store, synchronize, view, write
    from swiglu_kernels.ops.glu.hopper_forward import finish_part, first_column, produce

    _ROWS, _DEPTH, _WIDE, _PART = (gl.constexpr(size) for size in (ROWS, DEPTH, WIDE, PART))
    _BUFFERS, _SCALE_ROWS = gl.constexpr(BUFFERS), gl.constexpr(loop.SCALE_ROWS)

    # Triton 3.9 renamed it.
    _copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
    _SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

    @gluon.jit
    def _ask(gate_scales, up_scales, column, scales, N, COLUMNS: gl.constexpr):
        """Begin to copy the scales of a tile's columns, as they lie in the accumulator."""
        number = gl.arange(0, _WIDE, _EACH)
        near = column + number
        _copy(scales.index(0), gate_scales + near, mask=near < N)
        _copy(scales.index(1), up_scales + near, mask=near < N)
        if COLUMNS > _WIDE:
            far = column + COLUMNS - _PART + number % _PART
            of_both = gl.where(number < _PART, gate_scales + far, up_scales + far)
            _copy(scales.index(2), of_both, mask=far < N)
        async_copy.commit_group()

    @gluon.jit
    def _scaled(gate, up, both, of_rows, scales, COLUMNS: gl.constexpr):
        """Return sums of codes times their scales by rows."""
        LAYOUT: gl.constexpr = gl.SliceLayout(0, gate.type.layout)
        async_copy.wait_group(0)
        of_gate = scales.index(0).load(LAYOUT)[None, :]
        of_up = scales.index(1).load(LAYOUT)[None, :]
        if COLUMNS > _WIDE:
            both *= of_rows * scales.index(2).load(LAYOUT)[None, :]
        return gate * (of_rows * of_gate), up * (of_rows * of_up), both

    @gluon.jit
    def _put(gate, up, z, buffer):
        buffer.store((gate * sigmoid(gate) * up).to(z.dtype))

    @gluon.jit
    def _finish_z(gate, up, both, z, row, column, buffers, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
        """Store z of a tile, all of which is put into buffers before any of it is sent."""
        gate_0, gate_1 = halves(gate, _WIDE, _PART)
        up_0, up_1 = halves(up, _WIDE, _PART)
        tma.store_wait(0)
        _put(gate_0, up_0, z, buffers.index(FIRST))
        _put(gate_1, up_1, z, buffers.index(FIRST + 1))
        if COLUMNS > _WIDE:
            gate_2, up_2 = halves(both, _WIDE, _PART)
            _put(gate_2, up_2, z, buffers.index(FIRST + 2))
        fence_async_shared()
        store(z, [row, column], buffers.index(FIRST))
        store(z, [row, column + _PART], buffers.index(FIRST + 1))
        if COLUMNS > _WIDE:
            store(z, [row, column + COLUMNS - _PART], buffers.index(FIRST + 2))

    @gluon.jit
    def _finish_half(
        gate, up, z, gate_out, up_out, row, column, buffers,
        FIRST: gl.constexpr, NEWER: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """`finish_part` of two parts, which are a block of the accumulator."""
        gate_0, gate_1 = halves(gate, _WIDE, _PART)
        up_0, up_1 = halves(up, _WIDE, _PART)
        finish_part(gate_0, up_0, z, gate_out, up_out, row, column, buffers, FIRST, 0, NEWER, STORE_PREACT)
        finish_part(gate_1, up_1, z, gate_out, up_out, row, column + _PART, buffers, FIRST, 1, NEWER, STORE_PREACT)

    @gluon.jit
    def _store_preact(gate, up, gate_out, up_out, row, column, buffers, FIRST: gl.constexpr):
        gate_0, gate_1 = halves(gate, _WIDE, _PART)
        up_0, up_1 = halves(up, _WIDE, _PART)
        write(gate_0, gate_out, row, column, buffers.index(FIRST), 1)
        write(up_0, up_out, row, column, buffers.index(FIRST + 1), 1)
        write(gate_1, gate_out, row, column + _PART, buffers.index(FIRST), 1)
        write(up_1, up_out, row, column + _PART, buffers.index(FIRST + 1), 1)

    @gluon.jit
    def _finish_product(
        gate, up, both, gate_out, up_out, row, column, buffers, FIRST: gl.constexpr, COLUMNS: gl.constexpr
    ):
        """Store gate and up alone, which are the two halves of a product's columns."""
        _store_preact(gate, up, gate_out, up_out, row, column, buffers, FIRST)
        if COLUMNS > _WIDE:
            gate_2, up_2 = halves(both, _WIDE, _PART)
            write(gate_2, gate_out, row, column + COLUMNS - _PART, buffers.index(FIRST), 1)
            write(up_2, up_out, row, column + COLUMNS - _PART, buffers.index(FIRST + 1), 1)

    @gluon.jit
    def _bits(h):
        """Absolute values as integers, which have their order: NaN is the largest."""
        return h.to(gl.int32, bitcast=True) & 0x7FFFFFFF

    @gluon.jit
    def _finish_codes(
        products, codes, h_scales, gate_out, up_out, row, column, buffers, of_codes, M, dtype: gl.constexpr,
        ME: gl.constexpr, STORE_PREACT: gl.constexpr,
    ):  # fmt: skip
        """Store codes and scales of h as `portable_codes.scales_of` makes them, and gate and up if they are wanted."""
        gate, gate_1, up, up_1 = products
        if STORE_PREACT:
            _store_preact(gate, up, gate_out, up_out, row, column, buffers, 2 * ME)
            _store_preact(gate_1, up_1, gate_out, up_out, row, column + _WIDE, buffers, 2 * ME)
        h = (gate * sigmoid(gate) * up).to(dtype).to(gl.float32)
        h_1 = (gate_1 * sigmoid(gate_1) * up_1).to(dtype).to(gl.float32)
        SCALE: gl.constexpr = 1 / 448
        largest = gl.maximum(gl.max(_bits(h), 1), gl.max(_bits(h_1), 1))
        amax = gl.maximum(largest, 27 << 23).to(gl.float32, bitcast=True)
        near = 448.0 / amax
        inverse = gl.fma(gl.fma(near, amax * -1.0, 448.0) * SCALE, near, near)
        inverse = gl.where(amax == float("inf"), 0.0, inverse)
        rows = row + gl.arange(0, _WIDE, gl.SliceLayout(1, h.type.layout))
        line = gl.cdiv(M, 4) * 4
        gl.store(h_scales + (column // (2 * _WIDE)).to(gl.int64) * line + rows, amax * SCALE, mask=rows < M)
        write(h * inverse[:, None], codes, row, column, of_codes.index(2 * ME), 1)
        write(h_1 * inverse[:, None], codes, row, column + _WIDE, of_codes.index(2 * ME + 1), 1)

    @gluon.jit
    def _consume(
        given, scales, ME: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
        STORE_PREACT: gl.constexpr, BLOCKS: gl.constexpr,
    ):  # fmt: skip
        (
            z, codes, gate_out, up_out, h_scales, x_scales, gate_scales, up_scales, x_at, w_at, barriers_at, buffers,
            of_codes, M, N, row_tiles, column_tiles, depth_tiles, x,
        ) = given  # fmt: skip
        FIRST: gl.constexpr = ME * _BUFFERS
        WHOLE: gl.constexpr = COLUMNS == 2 * _WIDE
        NEWER: gl.constexpr = _BUFFERS - 1 if STORE_PREACT else 1  # buffers in use are taken in turn
        step, last = 0, row_tiles * column_tiles - 1
        next_row, next_column = position(gl.program_id(0), row_tiles, column_tiles, GROUP)
        for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
            row, column = start(next_row, _ROWS, M) + ME * _WIDE, first_column(next_column, COLUMNS, N)
            if not BLOCKS:
                rows = row + gl.arange(0, _WIDE, gl.SliceLayout(1, BLOCK_LAYOUT))
                of_rows = gl.load(x_scales + rows, mask=rows < M, other=0.0)[:, None]
                _ask(gate_scales, up_scales, column, scales, N, COLUMNS)
            sums = multiply_fp8(
                (x_at, w_at, barriers_at), step, depth_tiles, row, column, 2 * COLUMNS, ME, STAGES, BLOCKS,
                BLOCKS and codes is None,
            )  # fmt: skip
            step += depth_tiles
            # Divisions take long; those for the next tile are done here, where what finishes this one waits.
            next_row, next_column = position(min(tile + gl.num_programs(0), last), row_tiles, column_tiles, GROUP)
            if codes is not None:
                gate, gate_1, up, up_1 = sums
                _finish_codes(
                    (gate, gate_1, up, up_1), codes, h_scales, gate_out, up_out, row, column, buffers, of_codes, M,
                    x.dtype, ME, STORE_PREACT,
                )  # fmt: skip
            elif WHOLE:
                gate, gate_1, up, up_1 = sums
                _finish_half(gate, up, z, gate_out, up_out, row, column, buffers, FIRST, NEWER, STORE_PREACT)
                _finish_half(
                    gate_1, up_1, z, gate_out, up_out, row, column + _WIDE, buffers, FIRST, NEWER, STORE_PREACT
                )
            else:
                gate, up, both = sums
                if not BLOCKS:
                    gate, up, both = _scaled(gate, up, both, of_rows, scales, COLUMNS)
                if z is None:
                    _finish_product(gate, up, both, gate_out, up_out, row, column, buffers, FIRST, COLUMNS)
                elif STORE_PREACT:
                    _finish_half(gate, up, z, gate_out, up_out, row, column, buffers, FIRST, NEWER, True)
                    if COLUMNS > _WIDE:
                        gate_2, up_2 = halves(both, _WIDE, _PART)
                        column += COLUMNS - _PART
                        finish_part(gate_2, up_2, z, gate_out, up_out, row, column, buffers, FIRST, 2, NEWER, True)
                else:
                    _finish_z(gate, up, both, z, row, column, buffers, FIRST, COLUMNS)
        tma.store_wait(0)

    @gluon.jit(do_not_specialize=("K",))
    def _forward_kernel(
        x, w_gate, w_up, w_gate_32, w_gate_16, w_gate_8, w_up_32, w_up_16, w_up_8,
        x_scales, gate_scales, up_scales, z, codes, h_scales, gate_out, up_out, M, N, K,
        COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, STORE_PREACT: gl.constexpr,
        BLOCKS: gl.constexpr,
    ):  # fmt: skip
        row_tiles, column_tiles, depth_tiles = gl.cdiv(M, _ROWS), gl.cdiv(N, COLUMNS), gl.cdiv(K, _DEPTH)
        EACH: gl.constexpr = 4 if COLUMNS == 2 * _WIDE else 3
        x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, _ROWS, _DEPTH], x.layout)
        w_ring = gl.allocate_shared_memory(x.dtype, [EACH * STAGES, _WIDE, _DEPTH], w_gate.layout)
        of_codes = x_ring  # what is not stored has no buffers, and these are not used
        if codes is not None:
            of_codes = gl.allocate_shared_memory(codes.dtype, [4, _WIDE, _WIDE], codes.layout)
        buffers = of_codes
        if codes is None and z is None:
            buffers = gl.allocate_shared_memory(x.dtype, [2 * _BUFFERS, _WIDE, _PART], gate_out.layout)
        elif codes is None:
            buffers = gl.allocate_shared_memory(x.dtype, [2 * _BUFFERS, _WIDE, _PART], z.layout)
        elif STORE_PREACT:
            LAYOUT: gl.constexpr = gate_out.layout
            buffers = view(of_codes, x.dtype, [4, _WIDE, _PART], LAYOUT)  # whose stores end in turn
        scales, other_scales = buffers, buffers  # those of blocks have a place of their own, see `set_up`
        if not BLOCKS:
            scales = gl.allocate_shared_memory(gl.float32, [3, _WIDE], _SCALES)
            other_scales = gl.allocate_shared_memory(gl.float32, [3, _WIDE], _SCALES)
        x_at, w_at, barriers_at, barriers = set_up(
            x_ring, w_ring, STAGES, TURNS=False, ROWS=_SCALE_ROWS if BLOCKS else 8
        )
        fence_async_shared()
        synchronize()
        w_gate_rest, w_up_rest = (w_gate_32, w_gate_16, w_gate_8), (w_up_32, w_up_16, w_up_8)
        loaded = ((x_scales, gate_scales, up_scales, gl.cdiv(M, 4) * 4, gl.cdiv(depth_tiles, 4) * 4), barriers_at)
        operands = (x, w_gate, w_up, w_gate_rest, w_up_rest, x_ring, w_ring, barriers, loaded)
        sizes = (M, N, row_tiles, column_tiles, depth_tiles)
        given = (
            z, codes, gate_out, up_out, h_scales, x_scales, gate_scales, up_scales, x_at, w_at, barriers_at, buffers,
            of_codes, M, N, row_tiles, column_tiles, depth_tiles, x,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (_consume, (given, scales, 0, COLUMNS, STAGES, GROUP, STORE_PREACT, BLOCKS)),
                (_consume, (given, other_scales, 1, COLUMNS, STAGES, GROUP, STORE_PREACT, BLOCKS)),
                (produce, (operands, sizes, COLUMNS, STAGES, GROUP, BLOCKS)),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [240, 24],  # their registers; the first consumer gets the rest, 240
        )  # fmt: skip


def tile_for(tokens: int, intermediate: int, processors: int, stores_preact: bool, blocks: bool) -> Tile:
    """Return the tile whose waves are filled best; scales of blocks leave three to choose from."""
    if not blocks:
        return hopper_forward.tile_for(tokens, intermediate, processors, stores_preact)
    found = _costs_of_blocks(tokens, intermediate, processors)
    return tile_of(min(found, key=found.__getitem__), True)


def _costs_of_blocks(tokens: int, intermediate: int, processors: int) -> dict[int, float]:
    """Return what the tiles take whose scales are those of blocks, by their columns."""
    return {
        columns: waves(tokens, intermediate, ROWS, columns, processors) * columns * each
        for columns, each in BLOCK_COLUMNS.items()
    }


def makes_codes(tokens: int, intermediate: int, processors: int) -> bool:
    """Whether h by blocks leaves the launch as codes, and not in 16 bits for a pass that quantises it."""
    found = _costs_of_blocks(tokens, intermediate, processors)
    return found[BLOCK] <= CODES_FOR * min(found.values())


def tile_of(columns: int, blocks: bool) -> Tile:
    """Return the tile of so many columns, with the stages that it has room for."""
    return dataclasses.replace(TILE, columns=columns, stages=BLOCK_STAGES if blocks else TILE.stages)


def why_off(device: torch.device, intermediate: int, has_bias: bool, formula: Formula) -> str | None:
    """Say why no operands can take this path, or return None where some can; see `why_not`."""
    if device.type != "cuda" or capability_of(device) != (9, 0):
        return "the hand-scheduled kernel is for compute capability 9.0"
    if off := shared.why_off("fp8 forward"):
        return off
    if has_bias or formula != PLAIN:
        return "the hand-scheduled kernel is for plain SwiGLU without biases"
    multiple = shared.ALIGNMENT_BYTES // 2
    return f"intermediate has to be a multiple of {multiple}" if intermediate % multiple else None


def why_not(x: Operand, w_gate: Operand, w_up: Operand, has_bias: bool, formula: Formula) -> str | None:
    """Say why quantised operands cannot take this path, or return None where they can.

    Args:
        x, w_gate, w_up: [M, K], [N, K] and [N, K] in fp8, with scales.
        has_bias: whether gate or up have biases.
        formula: the gate.
    """
    matrices = x[0], w_gate[0], w_up[0]
    if off := why_off(x[0].device, w_gate[0].shape[0], has_bias, formula):
        return off
    if any(0 in matrix.shape for matrix in matrices):
        return "an empty tensor has no descriptor"
    return None if all(map(fits_tma, matrices)) else shared.NO_TMA


def product_pays(rows: int, columns: int, processors: int) -> bool:
    """Whether a product is faster as gate and up than in PyTorch's tiles of 128 x 128; measured from 256 rows on."""
    cost = 2 * min(hopper_forward.costs(rows, columns // 2, processors, True).values())
    by_torch = waves(rows, columns, ROWS, BLOCK, processors) * BLOCK
    return rows >= 2 * ROWS and cost * PRODUCT[rows % ROWS > 0 or columns % BLOCK > 0] < by_torch


def forward_launch(
    x: Operand, w_gate: Operand, w_up: Operand, z: torch.Tensor | Operand | None,
    preactivations: tuple[torch.Tensor, torch.Tensor] | None, tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """Describe the launch; ask `why_not` first.

    Args:
        x: [M, K / 2] and scales.
        w_gate, w_up: [N, K / 2] and scales.
        z: [M, N], contiguous, written; 16 bits. Of blocks also codes [M, N] in fp8 and scales as of `new_scales`. By
            rows None as well: then gate and up alone are stored.
        preactivations: gate and up, [M, N] with a last stride of 1, written; None stores z alone.
        tile: its columns, stages and group are taken. None: `tile_for`, or for codes that of a whole block.
    """
    (x_pairs, x_scales), (gate_pairs, gate_scales), (up_pairs, up_scales) = x, w_gate, w_up
    (M, K), N, blocks = x_pairs.shape, gate_pairs.shape[0], x_scales.dim() == 2
    programs, stores = multiprocessors(x_pairs.device), preactivations is not None
    z, h_scales = z if isinstance(z, tuple) else (z, None)
    if tile is None:
        tile = tile_for(M, N, programs, stores, blocks) if h_scales is None else tile_of(BLOCK, True)
    last = 0 if tile.columns == BLOCK else tile.columns - WIDE
    moved = hopper_forward.operand_blocks(x_pairs, gate_pairs, up_pairs, last)
    moved |= {name: (output, WIDE, PART) for name, output in shared.forward_outputs(z, preactivations).items()}
    if h_scales is not None:
        moved["codes"] = moved.pop("z")[0], WIDE, WIDE
    others: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    others |= {"x_scales": x_scales, "gate_scales": gate_scales, "up_scales": up_scales, "h_scales": h_scales}
    # The last tile ends with N, and each 32 of its columns have to be in one block.
    others |= {"M": M, "N": up_to(N, PART) if blocks else N, "K": K, "COLUMNS": tile.columns}
    others |= {"GROUP": tile.group, "BLOCKS": blocks, "STORE_PREACT": stores}
    programs = min(-(-M // ROWS) * -(-N // tile.columns), programs)
    return hopper_forward.launch_of(_forward_kernel, programs, tile, moved, others, "ops/fp8/hopper_fp8.py")
