"""swiglu_glu_packed: swiglu_glu with both projections in one matrix, which is never split into copies.

The kernels of `swiglu_glu` read the two halves through strided views of the one matrix and write the weight gradient
through the same views of one tensor of its shape. The layouts, by name:

    packed        [2 * intermediate, hidden]   the gate's rows first: Phi-3's gate_up_proj
    interleaved   [2 * intermediate, hidden]   rows gate, up, gate, up, ...: gpt-oss, whose [hidden, 2 * intermediate]
                                               is passed as its transposed view
    transposed    [hidden, 2 * intermediate]   the gate's columns first: x @ w
"""

import torch

from swiglu_kernels.ops.gate.formula import check_formula, formula_of
from swiglu_kernels.ops.glu import definition
from swiglu_kernels.ops.glu.choice import INPUT_GRADS, SAVES, WEIGHT_GRADS, resolve
from swiglu_kernels.ops.glu.definition import split_packed
from swiglu_kernels.ops.glu.operation import (
    as_matrix,
    forward_outputs,
    like_leading,
    needs_backward,
    new,
    run_backward,
    run_forward,
)
from swiglu_kernels.runtime import autocast
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.checks import check_option, check_packed, check_vector
from swiglu_kernels.runtime.operator import operator
from swiglu_kernels.runtime.saved import call_and_keep, register, save

LAYOUTS = ("packed", "interleaved", "transposed")


def _intermediate(w_gate_up: torch.Tensor, layout: str) -> int:
    return w_gate_up.shape[1 if layout == "transposed" else 0] // 2


def _backward_outputs(
    dz: torch.Tensor, w_gate_up: torch.Tensor, layout: str, weight_grad: str, needs_dx: bool, needs_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate dX, the weight's gradient (with its strides) and the bias gradient; those not wanted are empty."""
    hidden = w_gate_up.shape[0 if layout == "transposed" else 1]
    dx = new(dz, *((dz.shape[0], hidden) if needs_dx else (0, 0)))
    d_weight = torch.empty_like(w_gate_up) if weight_grad != "none" else new(dz, 0, 0)
    return dx, d_weight, new(dz, 2 * dz.shape[1] if needs_bias else 0)


@operator("glu_packed")
def _glu_packed(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    bias_gate_up: torch.Tensor | None,
    layout: str,
    weight_grad: str,
    save: str,
    input_grad: str,
    activation: str,
    gate_multiplier: float,
    alpha: float,
    limit: float | None,
    up_offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return z, and gate and up if they are saved."""
    weights, biases = split_packed(w_gate_up, bias_gate_up, layout)
    return run_forward(x, *weights, biases, formula_of(activation, gate_multiplier, alpha, limit, up_offset), save)


@_glu_packed.register_fake
def _(
    x: torch.Tensor, w_gate_up: torch.Tensor, layout: str, save: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return forward_outputs(x, _intermediate(w_gate_up, layout), save)


@operator("glu_packed_backward")
def _glu_packed_backward(
    dz: torch.Tensor,
    x: torch.Tensor | None,
    w_gate_up: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    bias_gate_up: torch.Tensor | None,
    needs_dx: bool,
    needs_bias: bool,
    layout: str,
    weight_grad: str,
    save: str,
    input_grad: str,
    activation: str,
    gate_multiplier: float,
    alpha: float,
    limit: float | None,
    up_offset: float,
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dX and the gradients of weight and bias, empty where not wanted; x may be None if it is not read.

    `in_place` lets it overwrite gate and up, which the operator, being functional, must not.
    """
    dx, d_weight, d_bias = _backward_outputs(dz, w_gate_up, layout, weight_grad, needs_dx, needs_bias)
    weights, biases = split_packed(w_gate_up, bias_gate_up, layout)
    d_weights = split_packed(d_weight, None, layout)[0] if weight_grad != "none" else None
    half = dz.shape[1]
    d_biases = (d_bias[0::2], d_bias[1::2]) if layout == "interleaved" else (d_bias[:half], d_bias[half:])
    run_backward(
        dz, x, *weights, gate, up, biases, formula_of(activation, gate_multiplier, alpha, limit, up_offset),
        (weight_grad, save, input_grad), dx if needs_dx else None, d_weights, d_biases if needs_bias else None,
        in_place,
    )  # fmt: skip
    return dx, d_weight, d_bias


_glu_packed_backward.register_fake(_backward_outputs)


def _keep(ctx, tensors, options, output) -> None:
    x, w_gate_up, bias_gate_up = tensors
    _, weight_grad, kept, *_ = options
    saved_x = None if (weight_grad, kept) == ("none", "preact") else x
    save(ctx, saved_x, (w_gate_up, bias_gate_up if kept == "input" else None), output[1:], options)


def _gradients(backward, dz, saved, needs, options):
    x, w_gate_up, bias_gate_up, gate, up = saved
    needs_x, needs_weight, needs_bias = needs
    dx, d_weight, d_bias = backward(dz, x, w_gate_up, gate, up, bias_gate_up, needs_x, needs_bias, *options)
    frozen = options[1] == "none"
    return (dx if needs_x else None, d_weight if needs_weight and not frozen else None, d_bias if needs_bias else None)


register(_glu_packed, _glu_packed_backward, _keep, _gradients, tensors=3, preactivations=2)


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
    size = 2 * _intermediate(w_gate_up, layout)
    bias = check_vector("bias_gate_up", bias_gate_up, size, "2 * intermediate", "x", x)
    if weight_grad == "none":
        w_gate_up, bias = w_gate_up.detach(), None if bias is None else bias.detach()
    if backend_for(x) == "torch":
        return definition.swiglu_glu_packed(x, w_gate_up, bias, layout=layout, **formula)
    rows = as_matrix(x)
    weight_grad, save, input_grad = resolve(weight_grad, save, input_grad, rows, size // 2)
    if not w_gate_up.requires_grad:
        weight_grad = "none"
    if not needs_backward(x, w_gate_up, bias):
        save = "input"
    z = call_and_keep(_glu_packed, rows, w_gate_up, bias, layout, weight_grad, save, input_grad, *formula.values())
    return like_leading(z, x)
