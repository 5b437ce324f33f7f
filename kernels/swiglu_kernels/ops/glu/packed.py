"""swiglu_glu_packed: swiglu_glu with both projections in one matrix, which is never split into copies.

The kernels of `swiglu_glu` read the two halves through strided views of the one matrix and write the weight gradient
through the same views of one tensor of its shape. The layouts, by name:

    packed        [2 * intermediate, hidden]   the gate's rows first: Phi-3's gate_up_proj
    interleaved   [2 * intermediate, hidden]   rows gate, up, gate, up, ...: gpt-oss, whose [hidden, 2 * intermediate]
                                               is passed as its transposed view
    transposed    [hidden, 2 * intermediate]   the gate's columns first: x @ w
"""

import torch

from swiglu_kernels.ops.gate.formula import Limit
from swiglu_kernels.ops.glu.operation import GLU
from swiglu_kernels.runtime.checks import check_option

LAYOUTS = ("packed", "interleaved", "transposed")


def swiglu_glu_packed(
    x: torch.Tensor, w_gate_up: torch.Tensor, bias_gate_up: torch.Tensor | None = None, *, layout: str = "packed",
    activation: str = "silu", gate_multiplier: float = 1.0, alpha: float = 1.0, limit: Limit = None,
    up_offset: float = 0.0, weight_grad: str = "auto", save: str = "auto", input_grad: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """Return `swiglu_glu` of x and the two halves of one weight matrix, which is neither copied nor rearranged.

    Args:
        x: [..., hidden]; as for `swiglu_glu`.
        w_gate_up: [2 * intermediate, hidden], or [hidden, 2 * intermediate] for layout="transposed"; any strides,
            dtype and device of x.
        bias_gate_up: [2 * intermediate] in the order of the weight's rows ("transposed": columns); None: no bias.
        layout: "packed" (the gate's rows first), "interleaved" (rows gate, up, gate, up, ...: pass gpt-oss's
            [hidden, 2 * intermediate] as w.t()) or "transposed" (the gate's columns first).
        activation, gate_multiplier, alpha, limit, up_offset, weight_grad, save, input_grad: as for `swiglu_glu`.

    Returns:
        z, [..., intermediate], as `swiglu_glu` returns it. The weight's gradient is one tensor of its shape (and of its
        strides, where its memory has no gaps), which the kernel or the PyTorch products write directly.

    Raises:
        TypeError, ValueError: as for `swiglu_glu`; ValueError for an odd number of rows (columns) as well.
    """
    check_option("layout", layout, LAYOUTS)
    gate = activation, gate_multiplier, alpha, limit, up_offset
    tensors = x, w_gate_up, None, bias_gate_up, None
    return GLU.first_call(None, tensors, gate, (weight_grad, save, input_grad), layout=layout)
