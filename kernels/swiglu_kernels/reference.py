"""SwiGLU in plain PyTorch: the definition that every kernel of this package is held against.

Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202): `SwiGLU(x) = SiLU(x W_gate) * (x W_up)` with
`SiLU(a) = a * sigmoid(a)`. Everything is computed in the dtype of the inputs, as eager PyTorch does; pass float64
tensors for an answer that can stand as the truth. Weights are [out_features, in_features], as in `torch.nn.Linear`.

The variants that models use are keyword options, the same for every function:

    activation       "silu" or "gelu_tanh" (GeGLU with the tanh approximation: Gemma)
    gate_multiplier  the gate's pre-activation is multiplied by it first (Falcon-H1)
    limit            gate is bounded from above by it, up to [-limit, limit] (gpt-oss: 7); None: unbounded
    alpha            SiLU becomes gate * sigmoid(alpha * gate) (gpt-oss: 1.702)
    up_offset        added to up (gpt-oss: 1)
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`; all three have the same shape."""
    return F.silu(gate) * up


def gate_mul(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str = "silu",
    gate_multiplier: float = 1.0,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """Return `activation(gate) * up` with the options above; `silu_mul` where all are at their defaults."""
    if gate_multiplier != 1.0:
        gate = gate * gate_multiplier
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if up_offset != 0.0:
        up = up + up_offset
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if alpha != 1.0:
        return gate * torch.sigmoid(alpha * gate) * up
    return silu_mul(gate, up)


def swiglu_glu(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    **options: str | float | None,
) -> torch.Tensor:
    """Return `silu(x w_gate^T + bias_gate) * (x w_up^T + bias_up)`, or the variant that `options` ask for.

    Args:
        x: [..., hidden].
        w_gate: [intermediate, hidden].
        w_up: [intermediate, hidden].
        bias_gate: [intermediate] or None.
        bias_up: [intermediate] or None.
        options: as for `gate_mul`.

    Returns:
        [..., intermediate].
    """
    return gate_mul(F.linear(x, w_gate, bias_gate), F.linear(x, w_up, bias_up), **options)  # type: ignore[arg-type]


def swiglu_glu_packed(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    bias_gate_up: torch.Tensor | None = None,
    *,
    layout: str = "packed",
    **options: str | float | None,
) -> torch.Tensor:
    """Return `swiglu_glu` with both projections in one matrix.

    Args:
        x: [..., hidden].
        w_gate_up: "packed": [2 * intermediate, hidden], the gate's rows first. "interleaved": the same with rows gate,
            up, gate, up, ... "transposed": [hidden, 2 * intermediate], the gate's columns first.
        bias_gate_up: [2 * intermediate], ordered as the rows (columns for "transposed") of the weight; or None.
        layout: one of those names.
        options: as for `gate_mul`.

    Returns:
        [..., intermediate].
    """
    (w_gate, w_up), (bias_gate, bias_up) = split_packed(w_gate_up, bias_gate_up, layout)
    return swiglu_glu(x, w_gate, w_up, bias_gate, bias_up, **options)


def split_packed(
    weight: torch.Tensor, bias: torch.Tensor | None, layout: str
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return views (w_gate, w_up), each [intermediate, hidden], and (bias_gate, bias_up) of a packed pair."""
    if layout == "transposed":
        weight = weight.t()
    if layout == "interleaved":
        gate, up = slice(0, None, 2), slice(1, None, 2)
    else:
        gate, up = slice(0, weight.shape[0] // 2), slice(weight.shape[0] // 2, None)
    biases = (None, None) if bias is None else (bias[gate], bias[up])
    return (weight[gate], weight[up]), biases


def swiglu_mlp(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    bias_down: torch.Tensor | None = None,
    **options: str | float | None,
) -> torch.Tensor:
    """Return `swiglu_glu(x, w_gate, w_up) w_down^T + bias_down`.

    Args:
        x: [..., hidden].
        w_gate: [intermediate, hidden].
        w_up: [intermediate, hidden].
        w_down: [hidden_out, intermediate].
        bias_gate: [intermediate] or None.
        bias_up: [intermediate] or None.
        bias_down: [hidden_out] or None.
        options: as for `gate_mul`.

    Returns:
        [..., hidden_out].
    """
    return F.linear(swiglu_glu(x, w_gate, w_up, bias_gate, bias_up, **options), w_down, bias_down)


def swiglu_experts(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    interleaved: bool = False,
    precision: str = "bf16",
    **options: str | float | None,
) -> torch.Tensor:
    """Return each token's sum of `swiglu_mlp` of its experts by their weights; in fp8 of `swiglu_mlp_fp8`.

    Args:
        x: [..., hidden].
        w_gate_up: [experts, 2 * intermediate, hidden].
        w_down: [experts, hidden_out, intermediate].
        top_k_index: [..., k], integers; one outside of 0 to experts - 1 is skipped.
        top_k_weights: [..., k].
        b_gate_up: [experts, 2 * intermediate] or None.
        b_down: [experts, hidden_out] or None.
        interleaved: rows of w_gate_up (and b_gate_up) are gate, up, gate, up, ...; else the gate's come first.
        precision: "bf16", operands as they are, or "fp8-rowwise": those of the forward's products are quantised by
            rows, those of the gradients' are not.
        options: as for `gate_mul`.

    Returns:
        [..., hidden_out].
    """
    block: Callable[..., torch.Tensor] = swiglu_mlp
    if precision != "bf16":
        recipe = precision.removeprefix("fp8-")
        block = functools.partial(swiglu_mlp_fp8, recipe=recipe, fp8_weight_grad=False, fp8_input_grad=False)
    rows, index, weights = (one.reshape(-1, one.shape[-1]) for one in (x, top_k_index, top_k_weights))
    out = rows.new_zeros(rows.shape[0], w_down.shape[1])
    for expert in range(w_down.shape[0]):
        token, slot = torch.where(index == expert)
        bias, bias_down = (None if one is None else one[expert] for one in (b_gate_up, b_down))
        (w_gate, w_up), biases = split_packed(w_gate_up[expert], bias, "interleaved" if interleaved else "packed")
        y = block(rows[token], w_gate, w_up, w_down[expert], *biases, bias_down, **options)
        out = out.index_add(0, token, (y * weights[token, slot, None]).to(out.dtype))
    return out.reshape(*x.shape[:-1], w_down.shape[1])


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
    amax = blocks.abs().amax((1, 3))
    amax = amax.clamp(min=2.0**-100)
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
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor | None = None,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    bias_down: torch.Tensor | None = None,
    *,
    recipe: str,
    fp8_weight_grad: bool = True,
    fp8_input_grad: bool = True,
    **options: str | float | None,
) -> torch.Tensor:
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
