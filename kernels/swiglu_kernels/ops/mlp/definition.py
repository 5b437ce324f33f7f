"""swiglu_mlp in plain PyTorch."""

import torch
import torch.nn.functional as F

from swiglu_kernels.ops.glu.definition import swiglu_glu


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
