"""swiglu_glu and swiglu_glu_packed in plain PyTorch."""

import torch
import torch.nn.functional as F

from swiglu_kernels.ops.gate.definition import gate_mul


def swiglu_glu(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None, **options: str | float | None,
) -> torch.Tensor:  # fmt: skip
    """Return `silu(x w_gate^T + bias_gate) * (x w_up^T + bias_up)`, [..., intermediate], or what `options` ask for.

    Args:
        x: [..., hidden].
        w_gate, w_up: [intermediate, hidden].
        bias_gate, bias_up: [intermediate] or None.
        options: as for `gate_mul`.
    """
    return gate_mul(F.linear(x, w_gate, bias_gate), F.linear(x, w_up, bias_up), **options)  # type: ignore[arg-type]


def swiglu_glu_packed(
    x: torch.Tensor, w_gate_up: torch.Tensor, bias_gate_up: torch.Tensor | None = None, *, layout: str = "packed",
    **options: str | float | None,
) -> torch.Tensor:  # fmt: skip
    """Return `swiglu_glu`, [..., intermediate], with both projections in one matrix.

    Args:
        x: [..., hidden].
        w_gate_up: "packed": [2 * intermediate, hidden], the gate's rows first. "interleaved": the same with rows gate,
            up, gate, up, ... "transposed": [hidden, 2 * intermediate], the gate's columns first.
        bias_gate_up: [2 * intermediate], ordered as the rows (columns for "transposed") of the weight; or None.
        layout: one of those names.
        options: as for `gate_mul`.
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
