"""SwiGLU in plain PyTorch: the definition that every kernel of this package is held against.

Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202): `SwiGLU(x) = SiLU(x W_gate) * (x W_up)` with
`SiLU(a) = a * sigmoid(a)`. Everything is computed in the dtype of the inputs, as eager PyTorch does; pass float64
tensors for an answer that can stand as the truth. Weights are [out_features, in_features], as in `torch.nn.Linear`.

The variants that models use are keyword options, the same for every function:

    activation       "silu", or "gelu_tanh" (GeGLU with the tanh approximation: Gemma); "silu_clamp" and
                     "silu_softcap" bound silu(gate) in other ways (Step-3.7, Inkling-2)
    gate_multiplier  the gate's pre-activation is multiplied by it first (Falcon-H1)
    limit            gate is bounded from above by it, up to [-limit, limit] (gpt-oss: 7); None: unbounded.
                     "silu_clamp": silu(gate) is bounded by it, and up as before (Step-3.7). "silu_softcap": two
                     numbers c; gate becomes c tanh(gate / c) except in its sigmoid, and up likewise (Inkling-2: 4, 25)
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
    limit: float | tuple[float, float] | None = None, up_offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Return `activation(gate) * up` with the options above; `silu_mul` where all are at their defaults."""
    if gate_multiplier != 1.0:
        gate = gate * gate_multiplier
    if activation == "silu_softcap":
        of_gate, of_up = limit  # type: ignore[misc]
        activated, up = _softcap(gate, of_gate) * torch.sigmoid(gate), _softcap(up, of_up)
    else:
        assert not isinstance(limit, tuple)
        if limit is not None:
            up = up.clamp(min=-limit, max=limit)
            gate = gate if activation == "silu_clamp" else gate.clamp(max=limit)
        if activation == "gelu_tanh":
            activated = F.gelu(gate, approximate="tanh")
        else:
            activated = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
        if activation == "silu_clamp" and limit is not None:
            activated = activated.clamp(max=limit)
    return activated * (up if up_offset == 0.0 else up + up_offset)


def _softcap(value: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(value / cap)
