"""SwiGLU in plain PyTorch: the definition that every kernel of this package is held against.

Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202): `SwiGLU(x) = SiLU(x W_gate) * (x W_up)` with
`SiLU(a) = a * sigmoid(a)`. Everything is computed in the dtype of the inputs, as eager PyTorch does; pass float64
tensors for an answer that can stand as the truth. Weights are [out_features, in_features], as in `torch.nn.Linear`.
"""

import torch
import torch.nn.functional as F


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`; all three have the same shape."""
    return F.silu(gate) * up


def swiglu_glu(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(x w_gate^T) * (x w_up^T)`.

    Args:
        x: [..., hidden].
        w_gate: [intermediate, hidden].
        w_up: [intermediate, hidden].

    Returns:
        [..., intermediate].
    """
    return silu_mul(F.linear(x, w_gate), F.linear(x, w_up))


def swiglu_mlp(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    """Return `swiglu_glu(x, w_gate, w_up) w_down^T`.

    Args:
        x: [..., hidden].
        w_gate: [intermediate, hidden].
        w_up: [intermediate, hidden].
        w_down: [hidden_out, intermediate].

    Returns:
        [..., hidden_out].
    """
    return F.linear(swiglu_glu(x, w_gate, w_up), w_down)
