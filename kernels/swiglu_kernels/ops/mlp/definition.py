"""swiglu_mlp in plain PyTorch."""

import torch
import torch.nn.functional as F

from swiglu_kernels.ops.glu.definition import swiglu_glu


def swiglu_mlp(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor,
    bias_gate: torch.Tensor | None = None, bias_up: torch.Tensor | None = None, bias_down: torch.Tensor | None = None,
    **options: str | float | None,
) -> torch.Tensor:  # fmt: skip
    """Return `swiglu_glu(x, w_gate, w_up, bias_gate, bias_up, **options) w_down^T + bias_down`, [..., hidden_out].

    w_down is [hidden_out, intermediate] and bias_down [hidden_out] or None; the others are as for `swiglu_glu`.
    """
    return F.linear(swiglu_glu(x, w_gate, w_up, bias_gate, bias_up, **options), w_down, bias_down)
