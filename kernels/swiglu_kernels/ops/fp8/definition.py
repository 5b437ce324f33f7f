"""The two recipes of fp8, and swiglu_mlp_fp8, in plain PyTorch."""

import torch
import torch.nn.functional as F

from swiglu_kernels.ops.gate.definition import gate_mul

RECIPES = ("rowwise", "blockwise")
_BLOCK = 128


def quantise(matrix: torch.Tensor, recipe: str, weight: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to fp8 (e4m3) for products that sum over its last axis.

    In fp32, with amax at least 2^-100: code = matrix * (448 / amax), rounded to nearest even and saturating;
    scale = amax * (1 / 448). What is meant is code * scale. For a product that sums over the first axis, quantise
    `matrix.t()`.

    Source: "rowwise" is the recipe of that name in torchao's float8; "blockwise" is that of DeepSeek-V3
    (arXiv:2412.19437, section 3.3), with scales that are any number.

    Args:
        matrix: [rows, depth].
        recipe: "rowwise" (a scale for each row) or "blockwise" (one for 1 x 128 elements, of a weight for 128 x 128).
        weight: whether it is a weight: that is a matter of the blocks alone.

    Returns:
        codes [rows, depth] in float8_e4m3fn; scales in float32: rowwise [rows], blockwise [rows, ceil(depth / 128)], of
        a weight [ceil(rows / 128), ceil(depth / 128)].
    """
    values = matrix.float()
    rows, depth = values.shape
    if recipe == "rowwise":
        height, width = 1, max(depth, 1)
    else:
        height, width = _BLOCK if weight else 1, _BLOCK
    padded = F.pad(values, (0, -depth % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # row blocks, height, depth blocks, width
    amax = blocks.abs().amax((1, 3)).clamp(min=2.0**-100)
    inverse = torch.full_like(amax, 448) / amax  # 448 / amax is a reciprocal and a product, of other bits
    scales = amax * (1 / 448)
    codes = (blocks * inverse[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = codes.flatten(2, 3).flatten(0, 1)[:rows, :depth]
    return codes.contiguous(), scales[:, 0] if recipe == "rowwise" else scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return code * scale, [rows, depth], for what `quantise` returns."""
    if scales.dim() == 1:
        return codes.to(dtype) * scales.to(dtype)[:, None]
    rows, depth = codes.shape
    height = 1 if scales.shape[0] == rows else _BLOCK
    each = scales.to(dtype).repeat_interleave(height, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :depth]
    return codes.to(dtype) * each


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, recipe, fp8_weight_grad, fp8_input_grad):
        ctx.save_for_backward(x, weight)
        ctx.options = recipe, fp8_weight_grad, fp8_input_grad
        return _fp8_product(x, weight, recipe, True)

    @staticmethod
    def backward(ctx, d_out):
        x, weight = ctx.saved_tensors
        recipe, fp8_weight_grad, fp8_input_grad = ctx.options
        d_weight = _fp8_product(d_out.t(), x.t(), recipe, False) if fp8_weight_grad else d_out.t() @ x
        d_x = _fp8_product(d_out, weight.t(), recipe, True) if fp8_input_grad else d_out @ weight
        return d_x, d_weight, None, None, None


def _fp8_product(a: torch.Tensor, b: torch.Tensor, recipe: str, b_is_weight: bool) -> torch.Tensor:
    first = dequantise(*quantise(a, recipe), torch.float64)
    second = dequantise(*quantise(b, recipe, b_is_weight), torch.float64)
    return (first @ second.t()).to(a.dtype)


def swiglu_mlp_fp8(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor | None = None,
    bias_gate: torch.Tensor | None = None, bias_up: torch.Tensor | None = None, bias_down: torch.Tensor | None = None,
    *, recipe: str, fp8_weight_grad: bool = True, fp8_input_grad: bool = True, **options: str | float | None,
) -> torch.Tensor:  # fmt: skip
    """Return `swiglu_mlp`, or without w_down `swiglu_glu`, with operands of every product quantised by `quantise`.

    The gradients are such products, too: d_x = d_out w sums over the columns of d_out, d_w = d_out^T x over the tokens,
    and each operand is quantised for that anew; products of the weights' gradients are not where fp8_weight_grad is
    False, nor are the others where fp8_input_grad is.

    Args:
        x: [tokens, hidden].
        w_gate, w_up, w_down, bias_gate, bias_up, bias_down, options: as for `swiglu_mlp`.
        recipe: as for `quantise`.
        fp8_weight_grad: whether products that make gradients of weights are quantised.
        fp8_input_grad: the same of those that make gradients of h and x.

    Returns:
        [tokens, hidden_out] or [tokens, intermediate], in x's dtype, in which h is rounded, too.
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = _Fp8Linear.apply(x, weight, recipe, fp8_weight_grad, fp8_input_grad)
        return out if bias is None else out + bias

    h = gate_mul(linear(x, w_gate, bias_gate), linear(x, w_up, bias_up), **options)  # type: ignore[arg-type]
    return h if w_down is None else linear(h, w_down, bias_down)
