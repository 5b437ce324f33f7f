"""Elementwise SwiGLU kernels with the names and contracts that Unsloth documents, written for this package.

With T the dtype of the tensors, and everything marked T rounded to it:

    forward    f = T(e * sigmoid(e)),  h = T(f * g)                      e is read as fp32
    backward   h = T(f * g),  df = T(DW * f),  dg = T(DW * g),  de = T(dg * s * (1 + e * (1 - s))),  s = sigmoid(e)

The backward makes all three results in one pass and stores them over its inputs, so that no memory is allocated: h over
DW, df (the gradient of **up**) over e, de (the gradient of **gate**) over g. `e` is the gate and `g` is up.

Source: Unsloth (github.com/unslothai/unsloth), its fused SwiGLU for LoRA.
"""

import torch
from torch import Tensor

from swiglu_kernels.ops.gate import definition
from swiglu_kernels.ops.gate.arithmetic import round_to
from swiglu_kernels.runtime.backend import backend_for, tl, triton
from swiglu_kernels.runtime.checks import check_gate_up, check_like, check_shape, check_tensor
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.operator import operator, refuse_double_backward
from swiglu_kernels.runtime.shortcuts.plan import run

BLOCK_SIZE = 1024
LONG_INDEXING_ABOVE = 2**31 - 4 * BLOCK_SIZE
"""Elements above which offsets are int64, with four blocks of head-room below 2^31."""


@triton.jit
def _offsets(n_elements, BLOCK_SIZE: tl.constexpr, LONG_INDEXING: tl.constexpr):
    block = tl.program_id(0)
    if LONG_INDEXING:
        block = block.to(tl.int64)
    offsets = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    return offsets, offsets < n_elements


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    """Round to dtype and return as fp32: fp32 products of such values, rounded again, equal products in dtype."""
    return round_to(value, dtype).to(tl.float32)


@triton.jit
def _fg_kernel(e_ptr, g_ptr, h_ptr, n_elements, BLOCK_SIZE: tl.constexpr, LONG_INDEXING: tl.constexpr):
    offsets, mask = _offsets(n_elements, BLOCK_SIZE, LONG_INDEXING)
    dtype = h_ptr.dtype.element_ty
    e = tl.load(e_ptr + offsets, mask=mask, other=0).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=mask, other=0).to(tl.float32)
    f = _rounded(e * tl.sigmoid(e), dtype)
    tl.store(h_ptr + offsets, round_to(f * g, dtype), mask=mask)


@triton.jit
def _dwf_dw_dfg_kernel(dw_ptr, e_ptr, g_ptr, n_elements, BLOCK_SIZE: tl.constexpr, LONG_INDEXING: tl.constexpr):
    offsets, mask = _offsets(n_elements, BLOCK_SIZE, LONG_INDEXING)
    dtype = dw_ptr.dtype.element_ty
    dw = tl.load(dw_ptr + offsets, mask=mask, other=0).to(tl.float32)
    e = tl.load(e_ptr + offsets, mask=mask, other=0).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=mask, other=0).to(tl.float32)
    s = tl.sigmoid(e)
    f = _rounded(e * s, dtype)
    dg = _rounded(dw * g, dtype)
    tl.store(dw_ptr + offsets, round_to(f * g, dtype), mask=mask)
    tl.store(e_ptr + offsets, round_to(dw * f, dtype), mask=mask)
    tl.store(g_ptr + offsets, round_to(dg * s * (1.0 + e * (1.0 - s)), dtype), mask=mask)


def _launch(kernel: object, tensors: dict[str, Tensor]) -> Launch:
    n_elements = next(iter(tensors.values())).numel()
    sizes = {"n_elements": n_elements, "BLOCK_SIZE": BLOCK_SIZE, "LONG_INDEXING": n_elements > LONG_INDEXING_ABOVE}
    return Launch(kernel, (triton.cdiv(n_elements, BLOCK_SIZE),), tensors | sizes, num_warps=4, num_stages=1)


def forward_launch(e: Tensor, g: Tensor, h: Tensor) -> Launch:
    """Describe the launch of h = silu(e) * g on contiguous tensors."""
    return _launch(_fg_kernel, {"e_ptr": e, "g_ptr": g, "h_ptr": h})


def backward_launch(dw: Tensor, e: Tensor, g: Tensor) -> Launch:
    """Describe the launch that overwrites contiguous dw, e and g with h, df and de."""
    return _launch(_dwf_dw_dfg_kernel, {"dw_ptr": dw, "e_ptr": e, "g_ptr": g})


@operator("unsloth_silu_mul")
def _unsloth_silu_mul(gate: Tensor, up: Tensor, overwrite: bool) -> Tensor:
    h = gate.new_empty(gate.shape)
    run(forward_launch, gate.contiguous(), up.contiguous(), h)
    return h


_unsloth_silu_mul.register_fake(lambda gate: gate.new_empty(gate.shape))


@torch.library.custom_op("swiglu_kernels::unsloth_backward_", mutates_args=("dw", "e", "g"))
def _unsloth_backward_(dw: Tensor, e: Tensor, g: Tensor) -> None:
    """Overwrite dw, e and g with h, df and de; a non-contiguous buffer is worked on as a copy and written back."""
    buffers = (dw, e, g)
    if dw.numel() > 0 and len({buffer.data_ptr() for buffer in buffers}) < 3:
        raise ValueError("DW, e, g: expected three separate buffers, got one buffer more than once")
    dense = [buffer.contiguous() for buffer in buffers]
    run(backward_launch, *dense)
    for buffer, result in zip(buffers, dense, strict=True):
        if result is not buffer:
            buffer.copy_(result)


_unsloth_backward_.register_fake(lambda dw, e, g: None)


@operator("unsloth_backward")
def _unsloth_backward(dw: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (h, df, de) in new buffers: the in-place kernel, run on copies."""
    h, df, de = (buffer.clone(memory_format=torch.contiguous_format) for buffer in (dw, e, g))
    run(backward_launch, h, df, de)
    return h, df, de


_unsloth_backward.register_fake(lambda e: (e.new_empty(e.shape), e.new_empty(e.shape), e.new_empty(e.shape)))


def _setup_context(ctx, inputs, output) -> None:
    gate, up, ctx.overwrite = inputs
    ctx.overwritten = False
    ctx.save_for_backward(gate, up)


def _backward(ctx, dh):
    if ctx.overwritten:
        raise RuntimeError(
            "unsloth_silu_mul(overwrite=True): the first backward overwrote gate and up, a second one "
            "(retain_graph=True) has nothing to work on; use overwrite=False or silu_mul"
        )
    e, g = ctx.saved_tensors
    if not ctx.overwrite:
        _, df, de = _unsloth_backward(dh, e, g)
        return de, df, None
    if torch.is_grad_enabled():
        raise RuntimeError(
            "unsloth_silu_mul(overwrite=True) cannot be differentiated twice (create_graph=True): its backward "
            "overwrites what a second differentiation would need; use the functions of swiglu_kernels.reference"
        )
    ctx.overwritten = True
    _, df, de = swiglu_DWf_DW_dfg_kernel(dh.clone(), e, g)  # autograd may hand the same dh to other nodes
    return de.detach(), df.detach(), None


_unsloth_silu_mul.register_autograd(_backward, setup_context=_setup_context)
refuse_double_backward(_unsloth_backward)


def swiglu_fg_kernel(e: Tensor, g: Tensor) -> Tensor:
    """Return h = silu(e) * g, contiguous, with silu(e) rounded to the input dtype before the product.

    Not differentiable: `unsloth_silu_mul` is. Source: Unsloth's function of this name.

    Args:
        e: the gate, (batch, seq, hidden); float32, float16, bfloat16 or float64. Non-contiguous input is copied.
        g: up, same shape, dtype and device.

    Raises:
        TypeError, ValueError: as `silu_mul` does; ValueError also where e does not have three dimensions.
    """
    e = check_tensor("e", e)
    g = check_like("g", g, "e", e)
    if e.dim() != 3:
        raise ValueError(f"e: expected three dimensions, (batch, seq, hidden), got {tuple(e.shape)}")
    check_shape("g", g, e.shape, "the shape of e")
    with torch.no_grad():
        if backend_for(e) == "torch":
            return definition.silu_mul(e, g)
        return _unsloth_silu_mul(e, g, False)


def swiglu_DWf_DW_dfg_kernel(DW: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite DW, e and g with h, df and de, and return them in this order.

    Args:
        DW: the gradient of h, (tokens, hidden); holds h = silu(e) * g afterwards.
        e: the gate, same shape; holds df = DW * silu(e) afterwards, the gradient of **up**.
        g: up, same shape; holds de afterwards, the gradient of **gate**.

    The three must not share memory. A non-contiguous buffer costs a copy in each direction. Source: Unsloth's function
    of this name.

    Raises:
        TypeError, ValueError: as `silu_mul` does; ValueError also where the same buffer was passed twice.
    """
    DW = check_tensor("DW", DW)
    for name, tensor in (("e", e), ("g", g)):
        check_shape(name, check_like(name, tensor, "DW", DW), DW.shape, "the shape of DW")
    with torch.no_grad():
        if backend_for(DW) != "torch":
            _unsloth_backward_(DW, e, g)
            return DW, e, g
    with torch.enable_grad():  # the definition, differentiated
        gate, up = e.detach().clone().requires_grad_(), g.detach().clone().requires_grad_()
        h = definition.silu_mul(gate, up)
        de, df = torch.autograd.grad(h, (gate, up), DW)
    with torch.no_grad():
        for buffer, result in ((DW, h), (e, df), (g, de)):
            buffer.copy_(result)
    return DW, e, g


def unsloth_silu_mul(gate: Tensor, up: Tensor, *, overwrite: bool = False) -> Tensor:
    """Return `silu(gate) * up`, contiguous, through the Unsloth-style kernels, differentiable.

    Args:
        gate: at least one dimension; float32, float16, bfloat16 or float64. Non-contiguous input is copied.
        up: same shape, dtype and device.
        overwrite: False: the backward works on copies of what was saved, and may run again. True: the backward works
            in place, as Unsloth does, and saves their memory: afterwards **gate holds the gradient of up, and up that
            of gate**. Only for intermediates that nobody reads later. A second backward then raises, as does any other
            operation that saved gate or up and runs its backward later. The upstream gradient is never overwritten.

    Raises:
        TypeError, ValueError: as `silu_mul` does; ValueError also in the backward where gate and up are one buffer and
            overwrite is set.
        RuntimeError: in a second backward after overwrite=True, and with create_graph=True.

    In float64, slowly, and where no kernel can run (`backend_for(gate) == "torch"`), this is `reference.silu_mul`, and
    nothing is overwritten.
    """
    gate, up = check_gate_up(gate, up)
    if not isinstance(overwrite, bool):
        raise TypeError(f"overwrite: expected a bool, got {type(overwrite).__name__}")
    if backend_for(gate) == "torch":
        return definition.silu_mul(gate, up)
    return _unsloth_silu_mul(gate, up, overwrite)
