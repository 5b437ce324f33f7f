"""swiglu_glu_packed: swiglu_glu with both projections in one matrix, which is never split into copies.

The kernels of `swiglu_glu` read the two halves through strided views of the one matrix and write the weight gradient
through the same views of one tensor of its shape. The layouts, by name:

    packed        [2 * intermediate, hidden]   the gate's rows first: Phi-3's gate_up_proj
    interleaved   [2 * intermediate, hidden]   rows gate, up, gate, up, ...: gpt-oss, whose [hidden, 2 * intermediate]
                                               is passed as its transposed view
    transposed    [hidden, 2 * intermediate]   the gate's columns first: x @ w
"""

import torch

from swiglu_kernels.ops.gate.formula import check_formula
from swiglu_kernels.ops.glu import definition
from swiglu_kernels.ops.glu.choice import INPUT_GRADS, SAVES, WEIGHT_GRADS, resolve
from swiglu_kernels.ops.glu.operation import as_matrix, glu, like_leading, needs_backward
from swiglu_kernels.runtime import autocast
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.checks import check_option, check_packed, check_vector
from swiglu_kernels.runtime.operator import call_and_keep

LAYOUTS = ("packed", "interleaved", "transposed")


def swiglu_glu_packed(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    bias_gate_up: torch.Tensor | None = None,
    *,
    layout: str = "packed",
    activation: str = "silu",
    gate_multiplier: float = 1.0,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_grad: str = "auto",
    save: str = "auto",
    input_grad: str = "auto",
) -> torch.Tensor:
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

    Where no kernel can run (`backend_for(x) == "torch"`), this is `reference.swiglu_glu_packed`; of the options that
    choose how gradients are made, weight_grad="none" keeps its meaning.
    """
    check_option("layout", layout, LAYOUTS)
    check_option("weight_grad", weight_grad, WEIGHT_GRADS)
    check_option("save", save, SAVES)
    check_option("input_grad", input_grad, INPUT_GRADS)
    formula = check_formula(activation, gate_multiplier, alpha, limit, up_offset)
    x, w_gate_up, bias_gate_up = autocast.operands(x, w_gate_up, bias_gate_up)
    x, w_gate_up = check_packed(x, w_gate_up, layout)
    size = w_gate_up.shape[1 if layout == "transposed" else 0]
    bias = check_vector("bias_gate_up", bias_gate_up, size, "2 * intermediate", "x", x)
    if weight_grad == "none":
        w_gate_up, bias = w_gate_up.detach(), None if bias is None else bias.detach()
    if backend_for(x) == "torch":
        return definition.swiglu_glu_packed(x, w_gate_up, bias, layout=layout, **formula.options)
    rows = as_matrix(x)
    weight_grad, save, input_grad = resolve(weight_grad, save, input_grad, rows, size // 2)
    if not w_gate_up.requires_grad:
        weight_grad = "none"
    if not needs_backward(x, w_gate_up, bias):
        save = "input"
    options = layout, weight_grad, save, input_grad, formula.numbers
    z = call_and_keep(glu, rows, w_gate_up, None, bias, None, *options)
    return like_leading(z, x)
