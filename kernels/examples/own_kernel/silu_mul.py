"""One's own Triton kernel as an implementation of the suite: silu(gate) * up, forward and backward.

swiglu-bench verify  --impl silu_mul.py:mine
swiglu-bench forward --impl eager,silu_mul.py:mine
"""

import torch
import triton
import triton.language as tl

from swiglu_bench import Step, implementation

BLOCK = 1024


@triton.jit
def _forward(gate_ptr, up_ptr, h_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(h_ptr + at, (gate * tl.sigmoid(gate) * up).to(h_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _backward(dh_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dh = tl.load(dh_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate, d_up = dh * up * s * (1.0 + gate * (1.0 - s)), dh * gate * s
    tl.store(d_gate_ptr + at, d_gate.to(d_gate_ptr.dtype.element_ty), mask=at < count)
    tl.store(d_up_ptr + at, d_up.to(d_up_ptr.dtype.element_ty), mask=at < count)


class SiluMul(torch.autograd.Function):
    """The two kernels; gradients go to new tensors."""

    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, of their shape."""
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        h = torch.empty_like(gate)
        _forward[(triton.cdiv(h.numel(), BLOCK),)](gate, up, h, h.numel(), BLOCK)
        return h

    @staticmethod
    def backward(ctx, dh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of gate and up."""
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), BLOCK),)
        _backward[grid](dh.contiguous(), gate, up, d_gate, d_up, gate.numel(), BLOCK)
        return d_gate, d_up


@implementation("mine", scopes=("activation",), backend="triton", description="my own Triton kernel")
def mine(problem):
    """Return the step; an activation has no weights to prepare."""
    return Step(SiluMul.apply)
