"""z = silu(x w_gate^T + bias_gate) * (x w_up^T + bias_up): both products and the gate in one launch.

M tokens, N intermediate, K hidden. A program owns one M x N tile: each x tile that it loads feeds two products, with
the tiles of w_gate and w_up, into two fp32 accumulators; the biases, if any, are added, the gate (any of `formula.py`)
is applied, and z is rounded once.

Three kernels share that main loop. The forward stores z, and with STORE_PREACT gate and up too, for the backward. Where
few tokens meet a narrow matrix, so that there are fewer tiles than multiprocessors, several programs share a tile's sum
over K: they store their parts in fp32, and a second launch adds these up, always in the same order, and does the rest.
The recomputation is for a backward that saved x alone: its epilogue turns dZ into d_gate and d_up.
"""

from dataclasses import replace
from typing import Any

import torch

from swiglu_kernels.ops.gate.arithmetic import dot, gated, gated_gradients, grouped_tile, halves, output_tile, round_to
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu import choice, hopper_forward, hopper_row, hopper_transposed
from swiglu_kernels.runtime.backend import capability_of, tl, triton
from swiglu_kernels.runtime.early import starts_early, wait_for_launch_ahead
from swiglu_kernels.runtime.launch import Launch, tile_needs_int64
from swiglu_kernels.runtime.precision import float32_dot_precision
from swiglu_kernels.tiles.candidates import Choice
from swiglu_kernels.tiles.rules import Tile

BY_HAND = {"ping-pong": hopper_forward, "transposed": hopper_transposed, "cooperative": hopper_row}
"""By schedule: what describes the launch."""
Biases = tuple[torch.Tensor | None, torch.Tensor | None]
NO_BIASES: Biases = (None, None)
Pair = tuple[torch.Tensor, torch.Tensor]
"""Of gate and up."""
Matrices = dict[str, tuple[torch.Tensor, str]]
"""By name, with the names of their axes."""


@triton.jit
def two_products(
    x_ptr, w_gate_ptr, w_up_ptr, tile_m, tile_n, sizes, strides, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the fp32 tiles (x w_gate^T, x w_up^T)."""
    x_m, x_k, w_gate_n, w_gate_k, w_up_n, w_up_k = strides
    M, N, K = sizes
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside = (tile_m * BLOCK_M + m < M)[:, None]
    n_inside = (tile_n * BLOCK_N + n < N)[None, :]
    first_m = tile_m.to(tl.int64) * BLOCK_M
    first_n = tile_n.to(tl.int64) * BLOCK_N
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        k = k.to(tl.int64)
    # Scalar 64-bit positions move, 32-bit offsets within the tile stay: fewer registers than tiles of moving pointers.
    x_ptr += first_m * x_m
    w_gate_ptr += first_n * w_gate_n
    w_up_ptr += first_n * w_up_n
    x_offsets = m[:, None] * x_m + k[None, :] * x_k
    w_gate_offsets = k[:, None] * w_gate_k + n[None, :] * w_gate_n
    w_up_offsets = k[:, None] * w_up_k + n[None, :] * w_up_n
    step = tl.full([], BLOCK_K, tl.int64)

    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first_k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptr + x_offsets, mask=m_inside, other=0.0)
            w_gate = tl.load(w_gate_ptr + w_gate_offsets, mask=n_inside, other=0.0)
            w_up = tl.load(w_up_ptr + w_up_offsets, mask=n_inside, other=0.0)
        else:
            k_inside = first_k + tl.arange(0, BLOCK_K) < K
            x = tl.load(x_ptr + x_offsets, mask=m_inside & k_inside[None, :], other=0.0)
            w_gate = tl.load(w_gate_ptr + w_gate_offsets, mask=k_inside[:, None] & n_inside, other=0.0)
            w_up = tl.load(w_up_ptr + w_up_offsets, mask=k_inside[:, None] & n_inside, other=0.0)
        gate = dot(x, w_gate, gate, PRECISION)
        up = dot(x, w_up, up, PRECISION)
        x_ptr += step * x_k
        w_gate_ptr += step * w_gate_k
        w_up_ptr += step * w_up_k
    return gate, up


@triton.jit
def biased(gate, up, biases, tile_n, N, BLOCK_N: tl.constexpr):
    """Return (gate + bias_gate, up + bias_up) for fp32 tiles; a bias that is None costs nothing."""
    bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n = biases
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias_gate_ptr is not None:
        bias = tl.load(bias_gate_ptr + n.to(tl.int64) * bias_gate_n, mask=n < N, other=0.0)
        gate += bias.to(tl.float32)[None, :]
    if bias_up_ptr is not None:
        bias = tl.load(bias_up_ptr + n.to(tl.int64) * bias_up_n, mask=n < N, other=0.0)
        up += bias.to(tl.float32)[None, :]
    return gate, up


@triton.jit
def _store_gated(
    gate, up, outs, tile_n, tile_m, M, N, biases, numbers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, STORE_PREACT: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Turn fp32 tiles of the two products into z, and store it; with STORE_PREACT gate and up as well."""
    z_ptr, gate_ptr, up_ptr = outs
    gate, up = biased(gate, up, biases, tile_n, N, BLOCK_N)
    position, offsets, inside = output_tile(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, WIDE)
    z = gated(gate, up, numbers, FORMULA)
    tl.store(z_ptr + position + offsets, round_to(z, z_ptr.dtype.element_ty), mask=inside)
    if STORE_PREACT:
        tl.store(gate_ptr + position + offsets, round_to(gate, gate_ptr.dtype.element_ty), mask=inside)
        tl.store(up_ptr + position + offsets, round_to(up, up_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_gated(
    gate, up, outs, tile_n, tile_m, M, N, biases, numbers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, STORE_PREACT: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """As `_store_gated`, in halves, one after the other: whole tiles spill registers, of the longest formula halves."""
    if BLOCK_N >= 64 or (FORMULA == "silu_softcap" and BLOCK_N >= 32):
        gates, ups = halves(gate), halves(up)
        for half in tl.static_range(2):
            if FORMULA == "silu_softcap" and BLOCK_N >= 64:
                store_gated(
                    gates[half], ups[half], outs, 2 * tile_n + half, tile_m, M, N, biases, numbers,
                    BLOCK_M, BLOCK_N // 2, WIDE, STORE_PREACT, FORMULA,
                )  # fmt: skip
            else:
                _store_gated(
                    gates[half], ups[half], outs, 2 * tile_n + half, tile_m, M, N, biases, numbers,
                    BLOCK_M, BLOCK_N // 2, WIDE, STORE_PREACT, FORMULA,
                )  # fmt: skip
    else:
        _store_gated(
            gate, up, outs, tile_n, tile_m, M, N,
            biases, numbers, BLOCK_M, BLOCK_N, WIDE, STORE_PREACT,
            FORMULA,
        )  # fmt: skip


@triton.jit
def _forward_kernel(
    x_ptr, w_gate_ptr, w_up_ptr, z_ptr, gate_ptr, up_ptr, M, N, K, x_m, x_k, w_gate_n, w_gate_k, w_up_n, w_up_k,
    bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n, multiplier, alpha, limit, up_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, STORE_PREACT: tl.constexpr,
    FORMULA: tl.constexpr,
):  # fmt: skip
    numbers = multiplier, alpha, limit, up_offset
    tile_m, tile_n = grouped_tile(M, N, BLOCK_M, BLOCK_N, GROUP)
    gate, up = two_products(
        x_ptr, w_gate_ptr, w_up_ptr, tile_m, tile_n, (M, N, K), (x_m, x_k, w_gate_n, w_gate_k, w_up_n, w_up_k), BLOCK_M,
        BLOCK_N, BLOCK_K, EVEN_K, WIDE, PRECISION,
    )  # fmt: skip
    store_gated(
        gate, up, (z_ptr, gate_ptr, up_ptr), tile_n, tile_m, M, N, (bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n),
        numbers, BLOCK_M, BLOCK_N, WIDE, STORE_PREACT, FORMULA,
    )  # fmt: skip


@triton.jit
def _parts_kernel(
    x_ptr, w_gate_ptr, w_up_ptr, parts_ptr, M, N, K, share, x_m, x_k, w_gate_n, w_gate_k, w_up_n, w_up_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum over the share of K that is program_id(1)'s; parts: [parts, gate and up, M, N]."""
    tile_m, tile_n = grouped_tile(M, N, BLOCK_M, BLOCK_N, GROUP)
    part = tl.program_id(1).to(tl.int64)
    first = part * share
    length = tl.minimum(K - tl.program_id(1) * share, share)
    gate, up = two_products(
        x_ptr + first * x_k, w_gate_ptr + first * w_gate_k, w_up_ptr + first * w_up_k, tile_m, tile_n, (M, N, length),
        (x_m, x_k, w_gate_n, w_gate_k, w_up_n, w_up_k), BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, WIDE, PRECISION,
    )  # fmt: skip
    position, offsets, inside = output_tile(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, WIDE)
    parts_ptr += position
    tl.store(parts_ptr + 2 * part * M * N + offsets, gate, mask=inside)
    tl.store(parts_ptr + (2 * part + 1) * M * N + offsets, up, mask=inside)


@triton.jit
def _join_kernel(
    parts_ptr, z_ptr, gate_ptr, up_ptr, M, N,
    bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n, multiplier, alpha, limit, up_offset,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
    STORE_PREACT: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    numbers = multiplier, alpha, limit, up_offset
    wait_for_launch_ahead(EARLY)
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)
    position, offsets, inside = output_tile(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, WIDE)
    size = tl.full([], 1, tl.int64) * M * N
    parts_ptr += position
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        gate += tl.load(parts_ptr + 2 * part * size + offsets, mask=inside, other=0.0)
        up += tl.load(parts_ptr + (2 * part + 1) * size + offsets, mask=inside, other=0.0)
    _store_gated(
        gate, up, (z_ptr, gate_ptr, up_ptr), tile_n, tile_m, M, N, (bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n),
        numbers, BLOCK_M, BLOCK_N, WIDE, STORE_PREACT, FORMULA,
    )  # fmt: skip


@triton.jit
def _store_gradients(
    gate, up, dz_and_strides, outs, tile_n, tile_m, M, N, biases, numbers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Turn fp32 tiles of the two products and the tile of dz into d_gate and d_up, and store them."""
    d_gate_ptr, d_up_ptr = outs
    dz_ptr, dz_m, dz_n = dz_and_strides
    gate, up = biased(gate, up, biases, tile_n, N, BLOCK_N)
    position, offsets, inside = output_tile(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N, WIDE)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
    dz_ptr += tile_m.to(tl.int64) * BLOCK_M * dz_m + tile_n.to(tl.int64) * BLOCK_N * dz_n
    dz = tl.load(dz_ptr + (m[:, None] * dz_m + n[None, :] * dz_n), mask=inside, other=0.0).to(tl.float32)
    d_gate, d_up = gated_gradients(dz, gate, up, numbers, FORMULA)
    tl.store(d_gate_ptr + position + offsets, round_to(d_gate, d_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(d_up_ptr + position + offsets, round_to(d_up, d_up_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _recompute_kernel(
    x_ptr, w_gate_ptr, w_up_ptr, dz_ptr, d_gate_ptr, d_up_ptr, M, N, K,
    x_m, x_k, w_gate_n, w_gate_k, w_up_n, w_up_k, dz_m, dz_n,
    bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n, multiplier, alpha, limit, up_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    numbers = multiplier, alpha, limit, up_offset
    tile_m, tile_n = grouped_tile(M, N, BLOCK_M, BLOCK_N, GROUP)
    gate, up = two_products(
        x_ptr, w_gate_ptr, w_up_ptr, tile_m, tile_n, (M, N, K), (x_m, x_k, w_gate_n, w_gate_k, w_up_n, w_up_k), BLOCK_M,
        BLOCK_N, BLOCK_K, EVEN_K, WIDE, PRECISION,
    )  # fmt: skip
    if BLOCK_N >= 64:  # in halves, one after the other: whole tiles spill registers
        gates, ups = halves(gate), halves(up)
        for half in tl.static_range(2):
            _store_gradients(
                gates[half], ups[half], (dz_ptr, dz_m, dz_n), (d_gate_ptr, d_up_ptr), 2 * tile_n + half, tile_m, M, N,
                (bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n), numbers, BLOCK_M, BLOCK_N // 2, WIDE, FORMULA,
            )  # fmt: skip
    else:
        _store_gradients(
            gate, up, (dz_ptr, dz_m, dz_n), (d_gate_ptr, d_up_ptr), tile_n, tile_m, M, N,
            (bias_gate_ptr, bias_up_ptr, bias_gate_n, bias_up_n), numbers, BLOCK_M, BLOCK_N, WIDE, FORMULA,
        )  # fmt: skip


def forward_launch(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, z: torch.Tensor, preactivations: Pair | None,
    biases: Biases = NO_BIASES, formula: Formula = PLAIN, chosen: Choice | None = None,
) -> Launch:  # fmt: skip
    """Describe the forward: of a hand-scheduled kernel where one can take these tensors, else of this file's.

    Args:
        x, w_gate, w_up: [M, K], [N, K] and [N, K], any strides.
        z: [M, N], contiguous, written.
        preactivations: gate and up, [M, N] and contiguous, written; None stores z alone.
        biases: of gate and up, [N] with any stride, or None; what is stored as gate and up includes them.
        formula: the gate.
        chosen: what `choice.forward` returned, if it was asked.
    """
    stored = preactivations is not None
    chosen = chosen or choice.forward(x, w_gate, w_up, z, stored, any_of(biases), formula, launch=True)
    tile = chosen.tile
    if chosen.schedule != "portable":
        return BY_HAND[chosen.schedule].forward_launch(x, w_gate, w_up, z, preactivations, tile)
    gate, up = preactivations or (z, z)  # never touched without STORE_PREACT
    sizes = {"M": x.shape[0], "N": w_gate.shape[0], "K": x.shape[1]}
    operands = {"x": (x, "MK"), "w_gate": (w_gate, "NK"), "w_up": (w_up, "NK")}
    gating = {"gate_ptr": gate, "up_ptr": up} | bias_arguments(biases) | formula.arguments() | {"STORE_PREACT": stored}
    if tile.parts == 1:
        return tiled_launch(_forward_kernel, tile, sizes, operands, {"z": (z, "MN")}, gating)
    parts = x.new_empty((tile.parts, 2, *z.shape), dtype=torch.float32)
    share = triton.cdiv(triton.cdiv(x.shape[1], tile.depth), tile.parts) * tile.depth
    launch = tiled_launch(_parts_kernel, tile, sizes, operands, {"parts": (z, "MN")}, {"share": share})
    arguments, join = launch.arguments | {"parts_ptr": parts}, _join_launch(parts, z, gating | {"z_ptr": z})
    return replace(launch, grid=(*launch.grid, tile.parts), arguments=arguments, then=join, scratch=parts)


def _join_launch(parts: torch.Tensor, z: torch.Tensor, gating: dict[str, Any]) -> Launch:
    """Describe the launch that adds up the parts of gate and up, and does what is left of a forward."""
    (M, N), block = z.shape, (1 if z.shape[0] <= 16 else 4, 256)
    arguments = {
        "parts_ptr": parts, "M": M, "N": N, "PARTS": parts.shape[0], "BLOCK_M": block[0], "BLOCK_N": block[1],
        "WIDE": tile_needs_int64((z.stride(), block)), "EARLY": starts_early(capability_of(z.device)),
    }  # fmt: skip
    grid = triton.cdiv(M, block[0]), triton.cdiv(N, block[1])
    return Launch(_join_kernel, grid, arguments | gating, num_warps=4, num_stages=1)


def recompute_launch(
    dz: torch.Tensor, x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, gradients: Pair,
    biases: Biases = NO_BIASES, formula: Formula = PLAIN,
) -> Launch:  # fmt: skip
    """Describe the launch that makes the gradients of gate and up [M, N] (contiguous, written) from all the others."""
    d_gate, d_up = gradients
    tile = choice.recompute(dz, x, w_gate, w_up, d_gate).tile
    return tiled_launch(
        _recompute_kernel, tile, {"M": x.shape[0], "N": w_gate.shape[0], "K": x.shape[1]},
        {"x": (x, "MK"), "w_gate": (w_gate, "NK"), "w_up": (w_up, "NK"), "dz": (dz, "MN")}, {"d_gate": (d_gate, "MN")},
        {"d_up_ptr": d_up} | bias_arguments(biases) | formula.arguments(),
    )  # fmt: skip


def any_of(biases: Biases) -> bool:
    """Whether there is a bias."""
    return biases[0] is not None or biases[1] is not None


def bias_arguments(biases: Biases) -> dict[str, torch.Tensor | int | None]:
    """Return pointers and strides of the two biases, None for a bias that does not exist."""
    gate, up = biases
    return {
        "bias_gate_ptr": gate, "bias_gate_n": None if gate is None else gate.stride(0),
        "bias_up_ptr": up, "bias_up_n": None if up is None else up.stride(0),
    }  # fmt: skip


def tiled_launch(
    kernel: object, tile: Tile, sizes: dict[str, int], strided: Matrices, contiguous: Matrices, others: dict[str, Any]
) -> Launch:
    """Describe the launch of a kernel that makes a tile of an output in each program.

    Args:
        kernel: its arguments are named after the axes: of an axis M the size M and BLOCK_M, of the last also EVEN_M,
            and of a matrix x of axes M and K x_ptr and the strides x_m and x_k.
        tile: rows, columns and depth are those of the three axes of `sizes`.
        sizes: of the axes: rows and columns of the output, and what is summed over.
        strided: matrices of any strides, with their axes.
        contiguous: matrices whose strides the kernel knows; such as lie in memory alike need to be named once.
        others: its other arguments.
    """
    blocks = dict(zip(sizes, (tile.rows, tile.columns, tile.depth), strict=True))
    rows, columns, depth = sizes
    matrices = strided | contiguous
    arguments: dict[str, Any] = {f"{name}_ptr": matrix for name, (matrix, _) in matrices.items()}
    for name, (matrix, axes) in strided.items():
        arguments |= {f"{name}_{axis.lower()}": stride for axis, stride in zip(axes, matrix.stride(), strict=True)}
    offsets = ((matrix.stride(), tuple(blocks[axis] for axis in axes)) for matrix, axes in matrices.values())
    arguments |= sizes | {f"BLOCK_{axis}": block for axis, block in blocks.items()} | {
        "GROUP": tile.group, f"EVEN_{depth}": sizes[depth] % tile.depth == 0, "WIDE": tile_needs_int64(*offsets),
        "PRECISION": float32_dot_precision(),
    }  # fmt: skip
    grid = (triton.cdiv(sizes[rows], tile.rows) * triton.cdiv(sizes[columns], tile.columns),)
    return Launch(kernel, grid, arguments | others, num_warps=tile.warps, num_stages=tile.stages)
