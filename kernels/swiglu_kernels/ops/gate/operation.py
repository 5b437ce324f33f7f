"""silu_mul: h = silu(gate) * up, elementwise, one pass over memory in each direction.

All arithmetic is fp32 with one rounding at the store (eager PyTorch rounds silu(gate) to the input dtype in between).
The backward reads dh, gate and up and writes d_gate and d_up into new buffers; the saved inputs stay as they were, so a
second backward is right. Formulas: `arithmetic.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swiglu_kernels.ops.gate import definition
from swiglu_kernels.ops.gate.arithmetic import gated, gated_gradients, round_to
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.runtime.backend import backend_for, capability_of, tl, triton
from swiglu_kernels.runtime.checks import check_gate_up
from swiglu_kernels.runtime.early import starts_early, wait_for_launch_ahead
from swiglu_kernels.runtime.launch import INT32_MAX, Launch, flat_needs_int64
from swiglu_kernels.runtime.operator import operator, refuse_double_backward
from swiglu_kernels.runtime.shortcuts.plan import run

BLOCK = 1024  # 8 elements per thread: one 16-byte access each for 16-bit types


@triton.jit
def _element(columns, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return (row, columns of this program in that row, mask); programs walk through rows block by block."""
    blocks = (columns - 1) // BLOCK + 1  # cdiv adds BLOCK first, which wraps just below 2^31 columns
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if WIDE:
        block = block.to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64), column, column < columns


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, h_ptr, columns, gate_row, up_row, multiplier, alpha, limit, up_offset,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    numbers = multiplier, alpha, limit, up_offset
    wait_for_launch_ahead(EARLY)
    row, column, mask = _element(columns, BLOCK, WIDE)
    gate = tl.load(gate_ptr + row * gate_row + column, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=mask).to(tl.float32)
    h = gated(gate, up, numbers, FORMULA)
    tl.store(h_ptr + row * columns + column, round_to(h, h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dh_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, h_ptr, columns, dh_row, gate_row, up_row,
    multiplier, alpha, limit, up_offset,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr, STORE_H: tl.constexpr, FORMULA: tl.constexpr,
):  # fmt: skip
    numbers = multiplier, alpha, limit, up_offset
    wait_for_launch_ahead(EARLY)
    row, column, mask = _element(columns, BLOCK, WIDE)
    dh = tl.load(dh_ptr + row * dh_row + column, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + column, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=mask).to(tl.float32)
    d_gate, d_up = gated_gradients(dh, gate, up, numbers, FORMULA)
    tl.store(d_gate_ptr + row * columns + column, round_to(d_gate, d_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(d_up_ptr + row * columns + column, round_to(d_up, d_up_ptr.dtype.element_ty), mask=mask)
    if STORE_H:
        h = gated(gate, up, numbers, FORMULA)
        tl.store(h_ptr + row * columns + column, round_to(h, h_ptr.dtype.element_ty), mask=mask)


def _in_rows(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return equally shaped tensors as the kernels read them: contiguous, or [rows, columns] with unit column stride.

    A tensor whose last stride is not 1, or whose leading dimensions do not collapse into one, is copied.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return tensors
    columns = tensors[0].shape[-1]
    rows = [tensor.reshape(-1, columns) for tensor in tensors]
    if rows[0].shape[0] * -(-columns // BLOCK) > INT32_MAX:  # more programs than one grid axis has
        return [tensor.contiguous() for tensor in tensors]
    return [row if row.stride(1) == 1 else row.contiguous() for row in rows]


def forward_launch(gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor, formula: Formula = PLAIN) -> Launch:
    """Describe the launch of h = silu(gate) * up: gate and up as `_in_rows` returns them, h contiguous, not empty."""
    pointers = {"gate_ptr": gate, "up_ptr": up, "h_ptr": h}
    return _launch(_forward_kernel, {"gate": gate, "up": up}, pointers | formula.arguments())


def backward_launch(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, d_gate: torch.Tensor, d_up: torch.Tensor,
    formula: Formula = PLAIN, h: torch.Tensor | None = None,
) -> Launch:  # fmt: skip
    """Describe the launch that turns dh into d_gate and d_up, and makes h again where it is given.

    dh, gate and up are as `_in_rows` returns them; what is written is contiguous and not empty. d_gate may be gate,
    d_up may be up, and h may be dh where that is contiguous.
    """
    pointers = {"dh_ptr": dh, "gate_ptr": gate, "up_ptr": up, "d_gate_ptr": d_gate, "d_up_ptr": d_up}
    pointers |= {"h_ptr": d_gate if h is None else h}
    more = formula.arguments() | {"STORE_H": h is not None}
    return _launch(_backward_kernel, {"dh": dh, "gate": gate, "up": up}, pointers | more)


def _launch(kernel: object, strided: dict[str, torch.Tensor], arguments: Mapping[str, Any]) -> Launch:
    one_row = all(tensor.is_contiguous() for tensor in strided.values())
    like = strided["gate"]
    rows, columns = (1, like.numel()) if one_row else like.shape
    block = min(BLOCK, max(128, triton.next_power_of_2(columns)))
    row_strides = {f"{name}_row": columns if one_row else tensor.stride(0) for name, tensor in strided.items()}
    sizes = {"columns": columns, "BLOCK": block, "WIDE": flat_needs_int64(columns, block)}
    early = {"EARLY": starts_early(capability_of(like.device))}
    grid = (rows * triton.cdiv(columns, block),)
    return Launch(kernel, grid, {**arguments, **row_strides, **sizes, **early}, num_warps=4, num_stages=1)


def gate_gradients(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, formula: Formula = PLAIN, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (d_gate, d_up) for any formula, in new contiguous buffers or in gate and up; for the inside of ops."""
    d_gate = gate if in_place else gate.new_empty(gate.shape)
    d_up = up if in_place else gate.new_empty(gate.shape)
    if d_gate.numel() > 0:
        run(backward_launch, *_in_rows(dh, gate, up), d_gate, d_up, formula)
    return d_gate, d_up


@operator("silu_mul")
def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    h = gate.new_empty(gate.shape)
    if h.numel() > 0:
        run(forward_launch, *_in_rows(gate, up), h)
    return h


@operator("silu_mul_backward")
def silu_mul_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (d_gate, d_up) for the upstream gradient dh, in new contiguous buffers."""
    return gate_gradients(dh, gate, up)


_silu_mul.register_fake(lambda gate: gate.new_empty(gate.shape))
silu_mul_backward.register_fake(lambda gate: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)))
_silu_mul.register_autograd(
    lambda ctx, dh: silu_mul_backward(dh, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
refuse_double_backward(silu_mul_backward)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`, computed in fp32 and rounded once.

    Source: the gate of SwiGLU, Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202); Liger-Kernel has
    an elementwise operation of the same meaning.

    Args:
        gate: at least one dimension, of any sizes; float32, float16, bfloat16 or float64. A tensor whose last stride is
            1 and whose leading dimensions collapse into one (such as either half of a packed [tokens, 2 * intermediate]
            matrix) is read as it is, any other layout is copied first.
        up: as gate, same shape, dtype and device.

    Returns:
        A contiguous tensor of gate's shape and dtype. Differentiable once; gradients go to new buffers.

    Raises:
        TypeError: an argument is not a tensor, or of another dtype than expected.
        ValueError: shapes or devices differ, or gate is a scalar.

    In float64, slowly, and where no kernel can run (`backend_for(gate) == "torch"`), this is `reference.silu_mul`,
    which is differentiable any number of times.
    """
    gate, up = check_gate_up(gate, up)
    if backend_for(gate) == "torch":
        return definition.silu_mul(gate, up)
    return _silu_mul(gate, up)
