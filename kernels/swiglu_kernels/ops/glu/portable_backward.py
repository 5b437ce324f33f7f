"""The gradients of z = silu(gate) * up, gate = x w_gate^T, up = x w_up^T, as matrix kernels.

M tokens, N intermediate, K hidden. With d_gate and d_up as in `arithmetic.py`, rounded to the dtype of the tensors:

    dX [M, K]        = d_gate w_gate + d_up w_up        one launch
    d_w_gate [N, K]  = d_gate^T x                       one launch for both, each sum in one program: the same bits
    d_w_up   [N, K]  = d_up^T x                         on every run, no atomics

Either kernel has two forms. ON_THE_FLY, it reads dZ, gate and up and forms d_gate and d_up in its main loop, so that
they never exist in memory. Otherwise it reads d_gate and d_up that another kernel has made.
"""

from dataclasses import replace
from typing import Any

import torch

from swiglu_kernels.ops.gate.arithmetic import dot, gated_gradients, grouped_tile, output_tile, store_sum, strided_tile
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu import choice, hopper_products, hopper_weights
from swiglu_kernels.ops.glu.portable_forward import tiled_launch
from swiglu_kernels.runtime.backend import tl, triton
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.precision import round_to
from swiglu_kernels.tiles.rules import FORMULA_DEPTH, Tile


@triton.jit
def _load_gradients(
    dz_ptrs, gate_ptrs, up_ptrs, inside, numbers,
    ON_THE_FLY: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Return tiles (d_gate, d_up): formed from dZ, gate and up, or read from where gate_ptrs and up_ptrs point."""
    gate = tl.load(gate_ptrs, mask=inside, other=0.0)
    up = tl.load(up_ptrs, mask=inside, other=0.0)
    if ON_THE_FLY:
        dz = tl.load(dz_ptrs, mask=inside, other=0.0)
        d_gate, d_up = gated_gradients(dz.to(tl.float32), gate.to(tl.float32), up.to(tl.float32), numbers, FORMULA)
        gate = round_to(d_gate, gate.dtype)
        up = round_to(d_up, up.dtype)
    return gate, up


@triton.jit
def _product(
    accumulator, d_ptr, w_ptr, tile_m, tile_k, sizes, w_n, w_k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return accumulator + d w for d [M, N], contiguous, and w [N, K]."""
    M, N, K = sizes
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside = (tile_m * BLOCK_M + m < M)[:, None]
    k_inside = (tile_k * BLOCK_K + k < K)[None, :]
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        k = k.to(tl.int64)
    d_ptrs = d_ptr + tile_m.to(tl.int64) * BLOCK_M * N + (m[:, None] * N + n[None, :])
    w_ptrs = w_ptr + tile_k.to(tl.int64) * BLOCK_K * w_k + (n[:, None] * w_n + k[None, :] * w_k)
    step = tl.full([], BLOCK_N, tl.int64)
    for first_n in range(0, N, BLOCK_N):
        if EVEN_N:
            d = tl.load(d_ptrs, mask=m_inside, other=0.0)
            w = tl.load(w_ptrs, mask=k_inside, other=0.0)
        else:
            n_inside = first_n + tl.arange(0, BLOCK_N) < N
            d = tl.load(d_ptrs, mask=m_inside & n_inside[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=n_inside[:, None] & k_inside, other=0.0)
        accumulator = dot(d, w, accumulator, PRECISION)
        d_ptrs += BLOCK_N
        w_ptrs += step * w_n
    return accumulator


@triton.jit
def _two_products_on_the_fly(
    pointers, tile_m, tile_k, sizes, strides, numbers, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    """Return d_gate w_gate + d_up w_up with d_gate and d_up formed tile by tile."""
    dz_ptr, gate_ptr, up_ptr, w_gate_ptr, w_up_ptr = pointers
    dz_m, dz_n, w_gate_n, w_gate_k, w_up_n, w_up_k = strides
    M, N, K = sizes
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside = (tile_m * BLOCK_M + m < M)[:, None]
    k_inside = (tile_k * BLOCK_K + k < K)[None, :]
    first_m = tile_m.to(tl.int64) * BLOCK_M
    first_k = tile_k.to(tl.int64) * BLOCK_K
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        k = k.to(tl.int64)
    dz_ptrs = dz_ptr + first_m * dz_m + (m[:, None] * dz_m + n[None, :] * dz_n)
    saved = first_m * N + (m[:, None] * N + n[None, :])
    gate_ptrs = gate_ptr + saved
    up_ptrs = up_ptr + saved
    w_gate_ptrs = w_gate_ptr + first_k * w_gate_k + (n[:, None] * w_gate_n + k[None, :] * w_gate_k)
    w_up_ptrs = w_up_ptr + first_k * w_up_k + (n[:, None] * w_up_n + k[None, :] * w_up_k)
    step = tl.full([], BLOCK_N, tl.int64)

    # Two accumulators: two dots into one in a single loop body are reported to miscompile for Blackwell.
    from_gate = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    from_up = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for first_n in range(0, N, BLOCK_N):
        d_inside, w_inside = m_inside, k_inside
        if not EVEN_N:
            n_inside = first_n + tl.arange(0, BLOCK_N) < N
            d_inside, w_inside = m_inside & n_inside[None, :], n_inside[:, None] & k_inside
        d_gate, d_up = _load_gradients(dz_ptrs, gate_ptrs, up_ptrs, d_inside, numbers, True, FORMULA)
        w_gate = tl.load(w_gate_ptrs, mask=w_inside, other=0.0)
        w_up = tl.load(w_up_ptrs, mask=w_inside, other=0.0)
        from_gate = dot(d_gate, w_gate, from_gate, PRECISION)
        from_up = dot(d_up, w_up, from_up, PRECISION)
        dz_ptrs += step * dz_n
        gate_ptrs += BLOCK_N
        up_ptrs += BLOCK_N
        w_gate_ptrs += step * w_gate_n
        w_up_ptrs += step * w_up_n
    return from_gate + from_up


@triton.jit
def _input_grad_kernel(
    dz_ptr, gate_ptr, up_ptr, w_gate_ptr, w_up_ptr, dx_ptr, M, N, K, dz_m, dz_n, w_gate_n, w_gate_k, w_up_n, w_up_k,
    multiplier, alpha, limit, up_offset,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    EVEN_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ON_THE_FLY: tl.constexpr,
    FORMULA: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    numbers = multiplier, alpha, limit, up_offset
    tile_m, tile_k = grouped_tile(M, K, BLOCK_M, BLOCK_K, GROUP)
    if ON_THE_FLY:
        dx = _two_products_on_the_fly(
            (dz_ptr, gate_ptr, up_ptr, w_gate_ptr, w_up_ptr), tile_m, tile_k, (M, N, K),
            (dz_m, dz_n, w_gate_n, w_gate_k, w_up_n, w_up_k), numbers, BLOCK_M, BLOCK_K, BLOCK_N, EVEN_N, WIDE,
            PRECISION, FORMULA,
        )  # fmt: skip
    else:
        dx = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        dx = _product(
            dx, gate_ptr, w_gate_ptr, tile_m, tile_k, (M, N, K), w_gate_n, w_gate_k, BLOCK_M, BLOCK_K, BLOCK_N, EVEN_N,
            WIDE, PRECISION,
        )  # fmt: skip
        dx = _product(
            dx, up_ptr, w_up_ptr, tile_m, tile_k, (M, N, K), w_up_n, w_up_k, BLOCK_M, BLOCK_K, BLOCK_N, EVEN_N, WIDE,
            PRECISION,
        )  # fmt: skip
    position, offsets, inside = output_tile(tile_m, tile_k, M, K, BLOCK_M, BLOCK_K, WIDE)
    store_sum(dx_ptr + position + offsets, dx, inside, ACCUMULATE)


@triton.jit
def _weight_grad_kernel(
    dz_ptr, gate_ptr, up_ptr, x_ptr, d_w_gate_ptr, d_w_up_ptr, M, N, K, dz_m, dz_n, x_m, x_k,
    d_w_n, d_w_k, multiplier, alpha, limit, up_offset,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
    EVEN_M: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ON_THE_FLY: tl.constexpr,
    FORMULA: tl.constexpr,
):  # fmt: skip
    numbers = multiplier, alpha, limit, up_offset
    tile_n, tile_k = grouped_tile(N, K, BLOCK_N, BLOCK_K, GROUP)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_inside = (tile_n * BLOCK_N + n < N)[None, :]
    k_inside = (tile_k * BLOCK_K + k < K)[None, :]
    first_n = tile_n.to(tl.int64) * BLOCK_N
    first_k = tile_k.to(tl.int64) * BLOCK_K
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        k = k.to(tl.int64)
    dz_ptrs = dz_ptr + first_n * dz_n + (m[:, None] * dz_m + n[None, :] * dz_n)
    saved = first_n + (m[:, None] * N + n[None, :])
    gate_ptrs = gate_ptr + saved
    up_ptrs = up_ptr + saved
    x_ptrs = x_ptr + first_k * x_k + (m[:, None] * x_m + k[None, :] * x_k)
    step = tl.full([], BLOCK_M, tl.int64)

    # The transposes are accumulated: x^T is read from shared memory as it lies there, and d_gate and d_up, which the
    # on-the-fly form makes in registers, go there without being transposed.
    d_w_gate = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    d_w_up = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for first_m in range(0, M, BLOCK_M):
        if EVEN_M:
            d_gate, d_up = _load_gradients(dz_ptrs, gate_ptrs, up_ptrs, n_inside, numbers, ON_THE_FLY, FORMULA)
            x = tl.load(x_ptrs, mask=k_inside, other=0.0)
        else:
            m_inside = (first_m + tl.arange(0, BLOCK_M) < M)[:, None]
            d_gate, d_up = _load_gradients(
                dz_ptrs, gate_ptrs, up_ptrs, m_inside & n_inside, numbers,
                ON_THE_FLY, FORMULA,
            )  # fmt: skip
            x = tl.load(x_ptrs, mask=m_inside & k_inside, other=0.0)
        d_w_gate = dot(tl.trans(x), d_gate, d_w_gate, PRECISION)
        d_w_up = dot(tl.trans(x), d_up, d_w_up, PRECISION)
        dz_ptrs += step * dz_m
        gate_ptrs += step * N
        up_ptrs += step * N
        x_ptrs += step * x_m

    if d_w_n is None:
        position, offsets, inside = output_tile(tile_n, tile_k, N, K, BLOCK_N, BLOCK_K, WIDE)
    else:
        position, offsets, inside = strided_tile(tile_n, tile_k, N, K, d_w_n, d_w_k, BLOCK_N, BLOCK_K, WIDE)
    adds: tl.constexpr = d_w_gate_ptr.dtype != x_ptr.dtype
    store_sum(d_w_gate_ptr + position + offsets, tl.trans(d_w_gate), inside, adds)
    store_sum(d_w_up_ptr + position + offsets, tl.trans(d_w_up), inside, adds)


def input_grad_launch(
    dz: torch.Tensor | None, gate: torch.Tensor, up: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor,
    dx: torch.Tensor, formula: Formula = PLAIN, accumulate: bool = False,
) -> Launch:  # fmt: skip
    """Describe the launch that writes dX.

    Args:
        dz: [M, N], any strides: the kernel forms d_gate and d_up on the fly. None: gate and up are d_gate and d_up.
        gate, up: [M, N], contiguous.
        w_gate, w_up: [N, K], any strides.
        dx: [M, K], contiguous, written; its dtype is that of the tensors, with `accumulate` float32.
        formula: the gate; read on the fly only.
        accumulate: add to what dx holds.
    """
    pairs = [(gate, w_gate), (up, w_up)]
    chosen = choice.input_grad(pairs, dx, dz, accumulate)
    if chosen.schedule != "portable":
        return hopper_products.sum_launch(pairs, dx, chosen.schedule, chosen.tile, accumulate)
    tile, forming = _forming(chosen.tile, dz is not None, formula)
    return tiled_launch(
        _input_grad_kernel, tile, {"M": gate.shape[0], "K": dx.shape[1], "N": gate.shape[1]},
        # dz is never touched unless on the fly
        {"dz": (gate if dz is None else dz, "MN"), "w_gate": (w_gate, "NK"), "w_up": (w_up, "NK")},
        {"gate": (gate, "MN"), "dx": (dx, "MK")}, {"up_ptr": up, "ACCUMULATE": accumulate} | forming,
    )  # fmt: skip


def weight_grad_launch(
    dz: torch.Tensor | None, gate: torch.Tensor, up: torch.Tensor, x: torch.Tensor, d_w_gate: torch.Tensor,
    d_w_up: torch.Tensor, formula: Formula = PLAIN,
) -> Launch:  # fmt: skip
    """Describe the launch that writes both weight gradients.

    Args:
        dz, gate, up, formula: as of `input_grad_launch`.
        x: [M, K], any strides.
        d_w_gate, d_w_up: [N, K], any strides, the same of both, written; float32 with others of 16 bits: added to.
    """
    assert d_w_gate.stride() == d_w_up.stride(), "one pair of strides serves both"
    pairs, outs = [(gate, x), (up, x)], [d_w_gate, d_w_up]
    chosen = choice.weight_grad(pairs, outs, dz)
    if chosen.schedule == "cooperative":
        return hopper_weights.weights_launch(x, [gate, up], outs, chosen.tile)
    if chosen.schedule != "portable":
        return hopper_products.transposed_launch(pairs, outs, chosen.tile)
    tile, forming = _forming(chosen.tile, dz is not None, formula)
    d_w_n, d_w_k = (None, None) if d_w_gate.is_contiguous() else d_w_gate.stride()
    return tiled_launch(
        _weight_grad_kernel, tile, {"N": gate.shape[1], "K": x.shape[1], "M": x.shape[0]},
        {"dz": (gate if dz is None else dz, "MN"), "x": (x, "MK")},
        {"gate": (gate, "MN"), "d_w_gate": (d_w_gate, "NK")},
        {"up_ptr": up, "d_w_up_ptr": d_w_up, "d_w_n": d_w_n, "d_w_k": d_w_k} | forming,
    )  # fmt: skip


def _forming(tile: Tile, on_the_fly: bool, formula: Formula) -> tuple[Tile, dict[str, Any]]:
    """Return the tile and the arguments for gradients that are formed on the fly, or read."""
    if on_the_fly and formula != PLAIN:
        tile = replace(tile, depth=min(tile.depth, FORMULA_DEPTH))
    return tile, {"ON_THE_FLY": on_the_fly} | (formula if on_the_fly else PLAIN).arguments()
