"""swiglu_experts in plain PyTorch."""

import functools
from collections.abc import Callable

import torch

from swiglu_kernels.ops.fp8.definition import swiglu_mlp_fp8
from swiglu_kernels.ops.glu.definition import split_packed
from swiglu_kernels.ops.mlp.definition import swiglu_mlp


def swiglu_experts(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor, *, b_gate_up: torch.Tensor | None = None, b_down: torch.Tensor | None = None,
    interleaved: bool = False, precision: str = "bf16", **options: str | float | None,
) -> torch.Tensor:  # fmt: skip
    """Return each token's sum of `swiglu_mlp` of its experts by their weights; in fp8 of `swiglu_mlp_fp8`.

    Args:
        x: [..., hidden].
        w_gate_up, b_gate_up: [experts, 2 * intermediate, hidden], and [experts, 2 * intermediate] or None.
        w_down, b_down: [experts, hidden_out, intermediate], and [experts, hidden_out] or None.
        top_k_index, top_k_weights: [..., k]; an index outside of 0 to experts - 1 is skipped.
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
    rows, index, weights = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, top_k_index, top_k_weights))
    out = rows.new_zeros(rows.shape[0], w_down.shape[1])
    for expert in range(w_down.shape[0]):
        token, slot = torch.where(index == expert)
        bias, bias_down = (None if bias is None else bias[expert] for bias in (b_gate_up, b_down))
        (w_gate, w_up), biases = split_packed(w_gate_up[expert], bias, "interleaved" if interleaved else "packed")
        y = block(rows[token], w_gate, w_up, w_down[expert], *biases, bias_down, **options)
        out = out.index_add(0, token, (y * weights[token, slot, None]).to(out.dtype))
    return out.reshape(*x.shape[:-1], w_down.shape[1])
