"""Candidate kernels for few tokens, where the time is that of reading (dW: writing) the weights once.

M tokens, N intermediate, K hidden. Each returns a `Launch`, or a list of them that run one after the other.

even     forward: every multiprocessor gets the same number of weight rows, in `waves` programs. The weights are the
         left operand (out^T = W x^T), so that only the tokens are padded. One loop over K with a deep pipeline.
dot      forward of 1 to 4 tokens without tensor cores: products in registers, one sum along K at the end.
split    dX: programs share the sum over N; fp32 parts, added up in fixed order by a second launch.
outer    dW: one program a tile of either gradient, one step along the tokens. With FMA no tensor cores.
"""

import torch
import triton
import triton.language as tl

from swiglu_kernels.launches.launch import Launch
from swiglu_kernels.portable.arithmetic import dot, gated, round_to

Tensors = tuple[torch.Tensor, ...]
SHARED_BYTES = 222 * 1024


@triton.jit
def _even_kernel(
    x_ptr, w_gate_ptr, w_up_ptr, z_ptr, gate_ptr, up_ptr, M, N, K, share,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, HINT: tl.constexpr,
    STORE_PREACT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * share
    row = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    token = tl.arange(0, TOKENS)
    live = (row < share) & (first + row < N)
    weights = first.to(tl.int64) * K
    w_offsets = row[:, None] * K + k[None, :]
    x_offsets = token[None, :] * K + k[:, None]
    gate = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    up = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for at in tl.range(0, K, DEPTH, num_stages=STAGES):
        inside = (at + k) < K
        x = tl.load(x_ptr + at + x_offsets, mask=(token < M)[None, :] & inside[:, None], other=0.0)
        w_mask = live[:, None] & inside[None, :]
        w_gate = tl.load(w_gate_ptr + weights + at + w_offsets, mask=w_mask, other=0.0, eviction_policy=HINT)
        w_up = tl.load(w_up_ptr + weights + at + w_offsets, mask=w_mask, other=0.0, eviction_policy=HINT)
        gate = dot(w_gate, x, gate, "ieee")
        up = dot(w_up, x, up, "ieee")
    out = token[None, :].to(tl.int64) * N + first + row[:, None]
    mask = live[:, None] & (token < M)[None, :]
    z = gated(gate, up, None, None, None, None, "silu")
    tl.store(z_ptr + out, round_to(z, z_ptr.dtype.element_ty), mask=mask)
    if STORE_PREACT:
        tl.store(gate_ptr + out, round_to(gate, z_ptr.dtype.element_ty), mask=mask)
        tl.store(up_ptr + out, round_to(up, z_ptr.dtype.element_ty), mask=mask)


def even(
    tensors: Tensors, processors: int, *, waves: int, depth: int, warps: int, stages: int = 0, hint: str = ""
) -> Launch:
    """z of x [M, K], w_gate and w_up [N, K], all contiguous; stages=0: as many as `waves` programs have room for."""
    x, w_gate, w_up, z = tensors
    (M, K), N = x.shape, w_gate.shape[0]
    share = -(-N // (processors * waves))
    rows, tokens = max(16, triton.next_power_of_2(share)), max(16, triton.next_power_of_2(M))
    room = SHARED_BYTES // waves // ((2 * rows + tokens) * depth * x.element_size())
    buffers = max(2, min(room, 8))
    stages = stages or (buffers if rows >= 64 else buffers + 1)  # wgmma still reads one buffer while another fills
    return Launch(
        _even_kernel, (-(-N // share),),
        {
            "x_ptr": x, "w_gate_ptr": w_gate, "w_up_ptr": w_up, "z_ptr": z, "gate_ptr": z, "up_ptr": z,
            "M": M, "N": N, "K": K, "share": share, "ROWS": rows, "TOKENS": tokens, "DEPTH": depth, "STAGES": stages,
            "HINT": hint, "STORE_PREACT": False,
        },
        warps, stages,
    )  # fmt: skip


@triton.jit
def _dot_kernel(
    x_ptr, w_gate_ptr, w_up_ptr, z_ptr, M, N, K,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    token = tl.arange(0, TOKENS)
    w_offsets = row.to(tl.int64)[:, None] * K + k[None, :]
    x_offsets = token[:, None] * K + k[None, :]
    gate = tl.zeros((TOKENS, ROWS, DEPTH), dtype=tl.float32)
    up = tl.zeros((TOKENS, ROWS, DEPTH), dtype=tl.float32)
    for at in tl.range(0, K, DEPTH, loop_unroll_factor=UNROLL):
        inside = ((at + k) < K)[None, :]
        w_mask = (row < N)[:, None] & inside
        w_gate = tl.load(w_gate_ptr + at + w_offsets, mask=w_mask, other=0.0, eviction_policy=HINT)
        w_up = tl.load(w_up_ptr + at + w_offsets, mask=w_mask, other=0.0, eviction_policy=HINT)
        x = tl.load(x_ptr + at + x_offsets, mask=(token < M)[:, None] & inside, other=0.0).to(tl.float32)
        gate += w_gate.to(tl.float32)[None, :, :] * x[:, None, :]
        up += w_up.to(tl.float32)[None, :, :] * x[:, None, :]
    z = gated(tl.sum(gate, axis=2), tl.sum(up, axis=2), None, None, None, None, "silu")
    mask = (token < M)[:, None] & (row < N)[None, :]
    tl.store(z_ptr + token[:, None] * N + row[None, :], round_to(z, z_ptr.dtype.element_ty), mask=mask)


def fma(tensors: Tensors, processors: int, *, rows: int, depth: int, warps: int, unroll: int, hint: str = "") -> Launch:
    """z of x [M, K], M up to 4, w_gate and w_up [N, K], all contiguous."""
    x, w_gate, w_up, z = tensors
    (M, K), N = x.shape, w_gate.shape[0]
    return Launch(
        _dot_kernel, (-(-N // rows),),
        {
            "x_ptr": x, "w_gate_ptr": w_gate, "w_up_ptr": w_up, "z_ptr": z, "M": M, "N": N, "K": K, "ROWS": rows,
            "TOKENS": triton.next_power_of_2(M), "DEPTH": depth, "UNROLL": unroll, "HINT": hint,
        },
        warps, 1,
    )  # fmt: skip


@triton.jit
def _part(
    total, d_ptr, w_ptr, column, first, last, M, N, K,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return total + d w over rows first to last of w [N, K]; d is [M, N]."""
    token = tl.arange(0, TOKENS)
    n = tl.arange(0, DEPTH)
    k = column + tl.arange(0, COLUMNS)
    step = tl.full([], K, tl.int64)
    for at in tl.range(first, last, DEPTH, num_stages=STAGES):
        inside = (at + n) < last
        d = tl.load(
            d_ptr + token[:, None] * N + (at + n)[None, :], mask=(token < M)[:, None] & inside[None, :], other=0.0
        )
        rows = w_ptr + step * at
        w = tl.load(rows + n[:, None] * K + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        total = dot(d, w, total, "ieee")
    return total


@triton.jit
def _split_kernel(
    d_gate_ptr, d_up_ptr, w_gate_ptr, w_up_ptr, parts_ptr, M, N, K, share,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, N)
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    total = _part(total, d_gate_ptr, w_gate_ptr, column, first, last, M, N, K, TOKENS, COLUMNS, DEPTH, STAGES)
    total = _part(total, d_up_ptr, w_up_ptr, column, first, last, M, N, K, TOKENS, COLUMNS, DEPTH, STAGES)
    token = tl.arange(0, TOKENS)
    k = column + tl.arange(0, COLUMNS)
    here = parts_ptr + tl.program_id(1).to(tl.int64) * M * K
    tl.store(here + token[:, None] * K + k[None, :], total, mask=(token < M)[:, None] & (k < K)[None, :])


@triton.jit
def _add_kernel(parts_ptr, dx_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * count + at, mask=at < count, other=0.0)
    tl.store(dx_ptr + at, round_to(total, dx_ptr.dtype.element_ty), mask=at < count)


def split(
    tensors: Tensors, processors: int, *, parts: int, columns: int, depth: int, warps: int, stages: int
) -> list[Launch]:
    """dX of d_gate and d_up [M, N], w_gate and w_up [N, K], all contiguous."""
    d_gate, d_up, w_gate, w_up, dx = tensors
    (M, N), K = d_gate.shape, dx.shape[1]
    share = -(-N // parts)
    parts = -(-N // share)
    workspace = torch.empty(parts, M, K, dtype=torch.float32, device=dx.device)
    block = 512
    return [
        Launch(
            _split_kernel, (-(-K // columns), parts),
            {
                "d_gate_ptr": d_gate, "d_up_ptr": d_up, "w_gate_ptr": w_gate, "w_up_ptr": w_up, "parts_ptr": workspace,
                "M": M, "N": N, "K": K, "share": share, "TOKENS": max(16, triton.next_power_of_2(M)),
                "COLUMNS": columns, "DEPTH": depth, "STAGES": stages,
            },
            warps, stages,
        ),
        Launch(
            _add_kernel, (-(-M * K // block),),
            {"parts_ptr": workspace, "dx_ptr": dx, "count": M * K, "PARTS": parts, "BLOCK": block}, 4, 1,
        ),
    ]  # fmt: skip


@triton.jit
def _outer_kernel(
    d_gate_ptr, d_up_ptr, x_ptr, d_w_gate_ptr, d_w_up_ptr, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FMA: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        d_ptr, out_ptr = d_gate_ptr, d_w_gate_ptr
    else:
        d_ptr, out_ptr = d_up_ptr, d_w_up_ptr
    column_tiles = tl.cdiv(K, COLUMNS)
    row = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if FMA:
        for token in range(M):
            d = tl.load(d_ptr + token * N + row, mask=row < N, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + token * K + column, mask=column < K, other=0.0).to(tl.float32)
            total += d[:, None] * x[None, :]
    else:
        token = tl.arange(0, DEPTH)
        for first in range(0, M, DEPTH):
            inside = (first + token) < M
            d = tl.load(
                d_ptr + (first + token)[:, None] * N + row[None, :],
                mask=inside[:, None] & (row < N)[None, :],
                other=0.0,
            )
            x = tl.load(
                x_ptr + (first + token)[:, None] * K + column[None, :],
                mask=inside[:, None] & (column < K)[None, :], other=0.0,
            )  # fmt: skip
            total = dot(tl.trans(d), x, total, "ieee")
    out = out_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
    tl.store(out, round_to(total, out_ptr.dtype.element_ty), mask=(row < N)[:, None] & (column < K)[None, :])


def outer(
    tensors: Tensors, processors: int, *, rows: int, columns: int, depth: int, warps: int, stages: int = 2
) -> Launch:
    """Both weight gradients of d_gate and d_up [M, N] and x [M, K], all contiguous; depth=0: no tensor cores."""
    d_gate, d_up, x, d_w_gate, d_w_up = tensors
    (M, K), N = x.shape, d_gate.shape[1]
    return Launch(
        _outer_kernel, (-(-N // rows) * -(-K // columns), 2),
        {
            "d_gate_ptr": d_gate, "d_up_ptr": d_up, "x_ptr": x, "d_w_gate_ptr": d_w_gate, "d_w_up_ptr": d_w_up,
            "M": M, "N": N, "K": K, "ROWS": rows, "COLUMNS": columns, "DEPTH": max(16, depth), "FMA": depth == 0,
        },
        warps, stages,
    )  # fmt: skip
