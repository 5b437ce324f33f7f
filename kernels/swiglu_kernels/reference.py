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
    **options: str | float | None,
) -> torch.Tensor:
    """Return each token's sum of `swiglu_mlp` of its experts by their weights.

    Args:
        x: [..., hidden].
        w_gate_up: [experts, 2 * intermediate, hidden].
        w_down: [experts, hidden_out, intermediate].
        top_k_index: [..., k], integers; one outside of 0 to experts - 1 is skipped.
        top_k_weights: [..., k].
        b_gate_up: [experts, 2 * intermediate] or None.
        b_down: [experts, hidden_out] or None.
        interleaved: rows of w_gate_up (and b_gate_up) are gate, up, gate, up, ...; else the gate's come first.
        options: as for `gate_mul`.

    Returns:
        [..., hidden_out].
    """
    rows, index, weights = (one.reshape(-1, one.shape[-1]) for one in (x, top_k_index, top_k_weights))
    out = rows.new_zeros(rows.shape[0], w_down.shape[1])
    for expert in range(w_down.shape[0]):
        token, slot = torch.where(index == expert)
        bias, bias_down = (None if one is None else one[expert] for one in (b_gate_up, b_down))
        (w_gate, w_up), biases = split_packed(w_gate_up[expert], bias, "interleaved" if interleaved else "packed")
        y = swiglu_mlp(rows[token], w_gate, w_up, w_down[expert], *biases, bias_down, **options)  # type: ignore[arg-type]
        out = out.index_add(0, token, (y * weights[token, slot, None]).to(out.dtype))
    return out.reshape(*x.shape[:-1], w_down.shape[1])
