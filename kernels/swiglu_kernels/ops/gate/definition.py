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
    gate: torch.Tensor, up: torch.Tensor, *, activation: str = "silu", gate_multiplier: float = 1.0, alpha: float = 1.0,
    limit: float | None = None, up_offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
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
