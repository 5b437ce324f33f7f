"""Products of quantised operands, each by the fastest way that takes them: by hand, PyTorch's or portable Triton.

Gate, up and SwiGLU are one launch, by hand on Hopper. A product alone is PyTorch's `_scaled_mm` there, which has full
accumulation too; on other GPUs, where neither was measured, all of them are the portable kernels'.
"""

import torch
from torch.nn.functional import pad

from swiglu_kernels.hopper import fp8 as by_hand
from swiglu_kernels.launches import internals, plan
from swiglu_kernels.launches.backend import INTERPRETING, capability_of
from swiglu_kernels.launches.formula import Formula
from swiglu_kernels.launches.plan import run
from swiglu_kernels.operations.silu_mul import backward_launch as gate_backward_launch
from swiglu_kernels.operations.silu_mul import forward_launch as gate_launch
from swiglu_kernels.portable.fp8 import BLOCK, Quantised, glu_launch, hidden_grad_launch, sum_launch
from swiglu_kernels.portable.glu_forward import Biases

MULTIPLE = 16
"""Rows, columns and depth of what `_scaled_mm` multiplies are multiples of this."""
Operands = tuple[Quantised, Quantised, Quantised]
"""x, w_gate and w_up."""
SCALES = 4
"""cuBLAS reads the scales of a weight's blocks in rows of a multiple of this; PyTorch 2.11 does not check it."""


def why_not_by_torch(a: Quantised, b: Quantised, dtype: torch.dtype, has_bias: bool) -> str | None:
    """Say why a b^T is not PyTorch's product, or return None where it is.

    Args:
        a: [R, D]; blockwise scales with the rows last.
        b: [C, D].
        dtype: of the product.
        has_bias: whether a bias is added.
    """
    (rows, depth), columns, blocks = a.codes.shape, b.codes.shape[0], a.scales.dim() == 2
    if INTERPRETING or capability_of(a.codes.device) != (9, 0):
        return "PyTorch's product was measured on compute capability 9.0 alone"
    if internals.scaled_mm is None:
        return "this PyTorch has no torch._scaled_mm"
    if dtype != torch.bfloat16 or has_bias:
        return "PyTorch's product is for bfloat16 without a bias"
    if rows % MULTIPLE or depth % (BLOCK if blocks else MULTIPLE) or columns % MULTIPLE or 0 in (rows, depth, columns):
        return f"PyTorch multiplies multiples of {BLOCK if blocks else MULTIPLE}"
    if blocks and a.scales.stride() != (1, rows):
        return "scales have to lie with the rows last"
    return None


def _multiply(a: Quantised, b: Quantised, out: torch.Tensor) -> None:
    """Write a b^T to out by PyTorch."""
    (codes, scales), (b_codes, b_scales) = a, b
    if scales.dim() == 1:
        scales, b_scales = scales[:, None], b_scales[:, None]
    elif short := -scales.shape[1] % SCALES:
        codes, b_codes = (pad(one.view(torch.uint8), (0, short * BLOCK)).view(one.dtype) for one in (codes, b_codes))
        scales = pad(scales.t(), (0, 0, 0, short)).t()
        b_scales = pad(b_scales, (0, short)) if b_scales.is_contiguous() else pad(b_scales.t(), (0, 0, 0, short)).t()
    internals.scaled_mm(codes, b_codes.t(), scale_a=scales, scale_b=b_scales.t(), out_dtype=torch.bfloat16, out=out)


def _add_products(a: Quantised, b: Quantised, more_a: Quantised, more_b: Quantised, out: torch.Tensor) -> None:
    _multiply(a, b, out)
    more = torch.empty_like(out)
    _multiply(more_a, more_b, more)
    out.add_(more)


def by_hand_takes(operands: Operands, biases: Biases, formula: Formula) -> bool:
    """Whether `write_glu` is the launch by hand, which writes 16 bits."""
    has_bias = biases[0] is not None or biases[1] is not None
    return not INTERPRETING and by_hand.why_not(*operands, has_bias, formula) is None


def write_glu(
    operands: Operands,
    z: torch.Tensor,
    preactivations: tuple[torch.Tensor, torch.Tensor],
    biases: Biases,
    formula: Formula,
) -> None:
    """Write z, and gate and up unless they are empty; arguments as of `portable.fp8.glu_launch`."""
    if z.numel() and by_hand_takes(operands, biases, formula):
        pairs = [(codes.view(z.dtype), scales) for codes, scales in operands]
        run(by_hand.forward_launch, *pairs, z, preactivations if preactivations[0].numel() else None)
    else:
        run(glu_launch, *operands, z, None, preactivations, None, biases, formula)


def write_product(a: Quantised, b: Quantised, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Write a b^T + bias to out [R, C]."""
    if why_not_by_torch(a, b, out.dtype, bias is not None) is None:
        plan.apply(_multiply, a, b, out)
    else:
        run(sum_launch, a, b, None, out, bias)


def write_sum(a: Quantised, b: Quantised, more_a: Quantised, more_b: Quantised, out: torch.Tensor) -> None:
    """Write a b^T + more_a more_b^T to out [R, C]; the second pair has the first's shapes."""
    if why_not_by_torch(a, b, out.dtype, False) is None:
        plan.apply(_add_products, a, b, more_a, more_b, out)
    else:
        run(sum_launch, a, b, (more_a, more_b), out)


def write_hidden_grad(
    d_out: Quantised,
    w_down: Quantised,
    preactivations: tuple[torch.Tensor, torch.Tensor],
    d_gate: torch.Tensor,
    d_up: torch.Tensor,
    h: torch.Tensor | None,
    formula: Formula,
) -> None:
    """Write d_gate, d_up and, if it is given, h; arguments as of `portable.fp8.hidden_grad_launch`."""
    if why_not_by_torch(d_out, w_down, d_gate.dtype, False) is None:
        if h is not None:
            run(gate_launch, *preactivations, h, formula)
        d_h = d_gate.new_empty(d_gate.shape)
        plan.apply(_multiply, d_out, w_down, d_h)
        run(gate_backward_launch, d_h, *preactivations, d_gate, d_up, formula)
    else:
        run(hidden_grad_launch, d_out, w_down, preactivations, d_gate, d_up, h, None, formula)
