"""Products of quantised operands, each by the fastest way that takes them: by hand, PyTorch's or portable Triton.

Gate, up and SwiGLU are one launch, by hand on Hopper; by blocks and from many tokens on they are two products and a
pass where that kernel does not take them. A product alone is PyTorch's `_scaled_mm` there, which has full accumulation
too, or by rows that kernel, where PyTorch's tiles would be cut; on other GPUs, where neither was measured, all of them
are the portable kernels'.
"""

import torch
from torch.nn.functional import pad

from swiglu_kernels.ops.fp8 import choice, hopper_fp8, portable_codes
from swiglu_kernels.ops.fp8.choice import Operands
from swiglu_kernels.ops.fp8.portable_codes import BLOCK, ROWS, Maxima, Quantised, lines_of, new_codes, new_scales, up_to
from swiglu_kernels.ops.fp8.portable_fp8 import glu_launch, hidden_grad_launch, sum_launch
from swiglu_kernels.ops.fp8.portable_gate import Scales, gradients_launch, scaled_sum_launch
from swiglu_kernels.ops.fp8.portable_gate import gate_launch as gate_codes_launch
from swiglu_kernels.ops.gate.formula import Formula
from swiglu_kernels.ops.gate.operation import forward_launch as gate_launch
from swiglu_kernels.ops.glu.portable_forward import Biases, Pair, any_of
from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.backend import multiprocessors
from swiglu_kernels.runtime.shortcuts import plan
from swiglu_kernels.runtime.shortcuts.plan import run

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""d_gate, d_up and h."""
MaximaOf = tuple[Maxima, Maxima, Maxima]
"""Those of d_gate, d_up and h."""
UNKNOWN: MaximaOf = ((None, None), (None, None), (None, None))


def _multiply(a: Quantised, b: Quantised, out: torch.Tensor) -> None:
    """Write a b^T to out by PyTorch; by blocks, out may have rows up to a multiple of ROWS."""
    (codes, scales), (b_codes, b_scales) = a, b
    if scales.dim() == 1:
        scales, b_scales = scales[:, None], b_scales[:, None]
    else:
        rows, columns = up_to(len(codes), ROWS), len(b_codes)
        if len(out) < rows:
            out.copy_(_multiplied(a, b))
            return
        of_weight, blocks = len(b_scales) != columns, scales.shape[1]
        scales = scales.as_strided((rows, blocks), (1, rows))
        b_scales = lines_of(b_scales) if of_weight else b_scales
        alone = of_weight and internals.scaled_mm_of_blocks  # with scales of b that reach further than its codes
        short = b_scales.shape[1] - blocks
        if short and not alone:
            blocks, scales = blocks + short, pad(scales, (0, short)).t().contiguous().t()
        codes, b_codes = _in_blocks(codes, rows, blocks), _in_blocks(b_codes, columns, blocks)
        if alone:
            internals.multiply_blocks(codes, scales, b_codes.t(), b_scales.t(), out)
            return
    internals.scaled_mm(codes, b_codes.t(), scale_a=scales, scale_b=b_scales.t(), out_dtype=torch.bfloat16, out=out)


def _multiplied(a: Quantised, b: Quantised) -> torch.Tensor:
    """Return a b^T; by blocks, there is memory behind for rows up to a multiple of ROWS, so that nothing is copied."""
    out = _new_product(a, len(b[0]))
    _multiply(a, b, out)
    return out.resize_(len(a[0]), len(b[0]))  # no view, which autograd would not let users change in place


def _multiply_codes(a: Quantised, b: Quantised, out: torch.Tensor) -> None:
    """Write codes of a times those of b to out by PyTorch, without their scales."""
    unit = _unit(out.device)
    internals.scaled_mm(a[0], b[0].t(), scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16, out=out)


def _unit(device: torch.device) -> torch.Tensor:
    """Return a scale of one, made once for a device; before that, in a graph's capture, one of the graph's own."""
    if device in _units:
        return _units[device]
    made = torch.ones((), device=device)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return made
        torch.cuda.current_stream(device).synchronize()
    _units[device] = made
    return made


_units: dict[torch.device, torch.Tensor] = {}


def _in_blocks(codes: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Return codes of more rows, and of whole blocks with zeros behind: where `new_codes` left room, in place."""
    depth, step = blocks * BLOCK, codes.stride(0)
    end = codes.storage_offset() + (rows - 1) * step + depth
    if depth <= step and end <= codes.untyped_storage().nbytes():
        return codes.as_strided((rows, depth), (step, 1))
    return pad(codes.view(torch.uint8), (0, depth - codes.shape[1], 0, rows - len(codes))).view(codes.dtype)


def _clear_behind(codes: torch.Tensor) -> None:
    """Zero what a row of `new_codes` has behind its last column."""
    lines_of(codes.view(torch.uint8))[:, codes.shape[1] :].zero_()


def _new_product(a: Quantised, columns: int) -> torch.Tensor:
    """Return what `_multiply` writes as it is: with a's rows, by blocks up to a multiple of ROWS."""
    codes, scales = a  # a series hands over plain tuples
    rows = len(codes)
    return codes.new_empty((up_to(rows, ROWS) if scales.dim() == 2 else rows, columns), dtype=torch.bfloat16)


def _multiply_blocks(a: Quantised, b: Quantised, more_a: Quantised, more_b: Quantised, out: torch.Tensor) -> None:
    second = _new_product(a, out.shape[1])
    first = out if len(second) == len(out) else torch.empty_like(second)
    _multiply(a, b, first)
    _multiply(more_a, more_b, second)
    torch.add(first[: len(out)], second[: len(out)], out=out)


def _write_gate_and_up(operands: Operands, preactivations: Pair) -> Pair:
    """Return gate and up by PyTorch, in preactivations unless these are empty."""
    x, *weights = operands
    rows, columns = len(x.codes), len(weights[0].codes)
    made = [product if product.numel() else _new_product(x, columns) for product in preactivations]
    for weight, product in zip(weights, made, strict=True):
        plan.apply(_multiply, x, weight, product)
    gate, up = (product[:rows] for product in made)
    return gate, up


def _launch_by_hand(operands: Operands, out: torch.Tensor | Pair | None, preactivations: Pair) -> None:
    """Write z, or codes and scales of h by blocks, or nothing; and gate and up unless they are empty."""
    gate, _ = preactivations
    pairs = [(codes.view(gate.dtype), scales) for codes, scales in operands]
    run(hopper_fp8.forward_launch, *pairs, out, preactivations if gate.numel() else None)


def _schedule(operands: Operands, dtype: torch.dtype, biases: Biases, formula: Formula) -> str:
    x, w_gate, _ = operands
    return choice.way_of_glu(operands, len(w_gate.codes), x.scales.dim() == 2, dtype, any_of(biases), formula).schedule


def write_glu(operands: Operands, z: torch.Tensor, preactivations: Pair, biases: Biases, formula: Formula) -> None:
    """Write z, and gate and up unless they are empty; arguments as of `portable_fp8.glu_launch`."""
    schedule = _schedule(operands, z.dtype, biases, formula)
    if schedule == "hopper":
        _launch_by_hand(operands, z, preactivations)
    elif schedule == "torch":
        run(gate_launch, *_write_gate_and_up(operands, preactivations), z, formula)
    else:
        run(glu_launch, *operands, z, None, preactivations, biases, formula)


def glu_codes(operands: Operands, preactivations: Pair, biases: Biases, formula: Formula) -> Quantised | None:
    """Return h in fp8 whose 16 bits are never stored, which is the way of blocks; None where `write_glu` comes first.

    Arguments are those of `write_glu`; h is rounded to the dtype of gate and up first, which are written unless empty.
    """
    x, w_gate, _ = operands
    if x.scales.dim() == 1:
        return None
    tokens, intermediate = len(x.codes), len(w_gate.codes)
    schedule = _schedule(operands, preactivations[0].dtype, biases, formula)
    if schedule == "hopper" and not hopper_fp8.makes_codes(tokens, intermediate, multiprocessors(x.codes.device)):
        return None
    codes = new_codes(x.codes, tokens, intermediate, True)
    scales = new_scales(x.codes, tokens, intermediate, True)
    if schedule == "hopper":
        if codes.stride(0) > intermediate:
            plan.apply(_clear_behind, codes)
        _launch_by_hand(operands, (codes, scales), preactivations)
    elif schedule == "torch":
        run(gate_codes_launch, _write_gate_and_up(operands, preactivations), codes, scales, formula)
    else:
        run(glu_launch, *operands, codes, scales, preactivations, biases, formula)
    return Quantised(codes, scales)


def write_product(a: Quantised, b: Quantised, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Write a b^T + bias to out [R, C]."""
    if choice.product_by_hand(a, b, out.dtype, bias is not None):
        half = out.shape[1] // 2
        halves = (Quantised(b.codes[:half], b.scales[:half]), Quantised(b.codes[half:], b.scales[half:]))
        _launch_by_hand((a, *halves), None, (out[:, :half], out[:, half:]))
    elif choice.why_not_by_torch(a, b, out.dtype, bias is not None) is None:
        plan.apply(_multiply, a, b, out, returning=_multiplied)
    else:
        run(sum_launch, a, b, None, out, bias)


def write_sum(a: Quantised, b: Quantised, more_a: Quantised, more_b: Quantised, out: torch.Tensor) -> None:
    """Write a b^T + more_a more_b^T to out [R, C]; the second pair has the first's shapes."""
    if choice.why_not_by_torch(a, b, out.dtype, False) is not None:
        run(sum_launch, a, b, (more_a, more_b), out)
    elif a.scales.dim() == 2:
        plan.apply(_multiply_blocks, a, b, more_a, more_b, out)
    else:
        second = torch.empty_like(out)
        plan.apply(_multiply_codes, a, b, out)
        plan.apply(_multiply_codes, more_a, more_b, second)
        run(scaled_sum_launch, out, (a.scales, b.scales), second, (more_a.scales, more_b.scales))


def write_hidden_grad(
    d_out: Quantised, w_down: Quantised, preactivations: Pair, gradients: Gradients, formula: Formula, maxima: bool
) -> MaximaOf:
    """Write d_gate, d_up and, if it is not None, h; arguments as of `portable_fp8.hidden_grad_launch`.

    maxima: whether d_gate, d_up and h are quantised along both axes next, "rowwise". Their largest magnitudes are
    returned, or Nones where they are not found on the way.
    """
    d_gate = gradients[0]
    if choice.why_not_by_torch(d_out, w_down, d_gate.dtype, False) is None:
        d_h = _new_product(d_out, d_gate.shape[1])
        blocks = d_out.scales.dim() == 2
        plan.apply(_multiply if blocks else _multiply_codes, d_out, w_down, d_h)
        scales = (None, None) if blocks else (d_out.scales, w_down.scales)
        return write_gate_gradients(d_h[: len(d_gate)], preactivations, gradients, formula, maxima, scales)
    run(hidden_grad_launch, d_out, w_down, preactivations, *gradients, formula)
    return UNKNOWN


def write_gate_gradients(
    d_h: torch.Tensor, preactivations: Pair, gradients: Gradients, formula: Formula, maxima: bool,
    scales: Scales = (None, None),
) -> MaximaOf:  # fmt: skip
    """`write_hidden_grad` of a given d_h, 16 bits with any strides, times scales of its rows and columns."""
    if d_h.numel() == 0:
        return UNKNOWN
    found = UNKNOWN
    if maxima:
        wanted = (True, True), (True, True), (False, gradients[2] is not None)
        of_gate, of_up, of_h = portable_codes.new_maxima(d_h, *wanted)
        found = of_gate, of_up, of_h
    run(gradients_launch, d_h, scales, preactivations, *gradients, found, formula)
    return found
